"""Durable files of this machine: large ones behind a descriptor, small ones through a temporary file, and locks."""

from __future__ import annotations

import contextlib
import ctypes
import errno
import os
import secrets
import socket
import warnings
import weakref
from collections.abc import Callable, Generator, Sequence

from saev_store._runtime.threads import after_fork_in_child
from saev_store.errors import (
    AccessError,
    ArgumentError,
    SaevStoreError,
    SaevStoreWarning,
    StoreExistsError,
    TransportError,
    WriterConflictError,
    outside,
)
from saev_store.transport.base import RequestCounter, Sink
from saev_store.transport.checks import Buffer, byte_views, os_errors
from saev_store.transport.files import IOV_MAX, LIBC, behind, check_regular

#: Temporary files start with this; one that outlives its process may be deleted by any process.
TEMP_PREFIX = ".saev_store.tmp-"
#: Folders that are no longer needed once the process that made them has ended start with this.
ASIDE_PREFIX = f"{TEMP_PREFIX}aside-"

_AT_FDCWD, _RENAME_NOREPLACE = -100, 1
_UNSUPPORTED = {errno.EOPNOTSUPP, errno.ENOTSUP, errno.ENOSYS, errno.EINVAL, errno.ENODEV}
_NO_LINKS = {errno.EPERM, errno.EOPNOTSUPP, errno.ENOSYS, errno.EMLINK, errno.EXDEV}
_NO_LOCKS = {errno.ENOLCK, errno.EOPNOTSUPP, errno.ENOSYS, errno.EINVAL}
#: Attempts to lock in a folder that other processes delete at the same time.
_N_TRIES = 100


def write_all(fd: int, views: list[memoryview], offset: int) -> None:
    """Write all buffers, one after the other, however short the system's writes are."""
    while views:
        n_written = os.pwritev(fd, views[:IOV_MAX], offset)
        offset += n_written
        views = behind(views, n_written)


def fsync_folder(folder: str) -> None:
    """Make the names in a folder survive a crash; nothing on Windows, and on file systems that cannot (CIFS, some FUSE)."""
    if not hasattr(os, "O_DIRECTORY"):
        return
    fd = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        os.fsync(fd)
    except OSError as error:
        if error.errno not in _UNSUPPORTED:
            raise
    finally:
        os.close(fd)


def make_folders(folder: str) -> None:
    """Create a folder and its parents, each durable under its name.

    Raises:
        AccessError: this is Windows.
    """
    if not hasattr(os, "pwritev"):
        raise AccessError("files are written on Linux and macOS only", where=folder, remedy="Write to an object store.")
    if os.path.isdir(folder):
        return
    parent = os.path.dirname(folder)
    make_folders(parent)
    with contextlib.suppress(FileExistsError):  # another process was quicker
        os.mkdir(folder)
    fsync_folder(parent)


def preallocate(fd: int, nbytes: int) -> None:
    """Reserve disk space for the first `nbytes` of a file, which grows to that size.

    If the file system cannot reserve, the file only grows, provided that enough space is free. (`os.posix_fallocate` would
    silently touch each block there.)

    Raises:
        OSError: there is not enough space (`ENOSPC`, `EDQUOT`), or another failure.
    """
    if nbytes == 0:
        return
    # A reservation that fails half-way takes all space from other processes for a moment, so compare first.
    status, space = os.fstat(fd), os.statvfs(fd)
    if space.f_blocks and nbytes - status.st_blocks * 512 > space.f_bavail * space.f_frsize:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
    fallocate = getattr(LIBC, "fallocate", None)
    if fallocate is not None:
        fallocate.argtypes = (ctypes.c_int, ctypes.c_int, ctypes.c_long, ctypes.c_long)
        while fallocate(fd, 0, 0, nbytes) != 0:
            code = ctypes.get_errno()
            if code in _UNSUPPORTED:
                break
            if code != errno.EINTR:
                raise OSError(code, os.strerror(code))
    if os.fstat(fd).st_size < nbytes:
        os.ftruncate(fd, nbytes)


class SequentialSink(Sink):
    """A sink that knows how many bytes were written.

    Raises:
        ArgumentError: `used_nbytes` do not fit into `file_nbytes`.
    """

    def __init__(self, where: str, requests: RequestCounter, *, used_nbytes: int, file_nbytes: int) -> None:
        if not 0 <= used_nbytes <= file_nbytes:
            raise ArgumentError(f"{used_nbytes} used bytes do not fit a file of {file_nbytes}", where=where)
        self._where, self.tally = where, requests
        self._used, self._file_nbytes = used_nbytes, file_nbytes
        self._written = 0

    def _next(self, offset: int, buffers: Sequence[memoryview]) -> list[memoryview]:
        """The buffers as bytes, which are the next ones of the file."""
        views = byte_views(buffers, writable=False)
        end = offset + sum(map(len, views))
        if offset != self._written or end > self._used:
            raise ArgumentError(
                f"bytes {offset}:{end} are not the next ones: {self._written:,} of {self._used:,} were written",
                where=self._where,
            )
        return views

    def _check_complete(self) -> None:
        """Refuse to commit a file with a hole, which would read as vectors of zeros."""
        if self._written < self._used:
            raise ArgumentError(
                f"only {self._written:,} of {self._used:,} bytes were written",
                where=self._where,
                remedy="Write the rest before `commit`, or `abort`.",
            )


class FdSink(SequentialSink):
    """Writes to a descriptor; subclasses open it and define what `commit` is."""

    _fd = -1

    def write(self, offset: int, buffers: Sequence[memoryview], done: Callable[[], object] | None = None) -> None:
        """Append the buffers."""
        fd, views = self._descriptor(), self._next(offset, buffers)
        nbytes = sum(map(len, views))
        with os_errors(self._where, "write"):
            write_all(fd, views, offset)
        self._written = offset + nbytes
        self.tally.add(written=nbytes)
        if done is not None:
            done()

    def abort(self) -> None:
        """Close the descriptor; a file that has a name on the disk stays."""
        fd, self._fd = self._fd, -1
        if fd >= 0:
            with contextlib.suppress(OSError):  # what was committed was flushed before
                os.close(fd)

    def __del__(self) -> None:
        self.abort()

    def _descriptor(self) -> int:
        if self._fd < 0:
            raise TransportError("this file is already committed or aborted", where=self._where)
        return self._fd


class LocalSink(FdSink):
    """A file under construction at its final place: reserved, filled, and cut to its exact size.

    A crash leaves a file of full size whose unwritten blocks are zeros.
    """

    def __init__(
        self, where: str, requests: RequestCounter, *, used_nbytes: int, file_nbytes: int, resume: bool
    ) -> None:
        super().__init__(where, requests, used_nbytes=used_nbytes, file_nbytes=file_nbytes)
        try:
            with os_errors(where, "open for writing"):
                make_folders(os.path.dirname(where))
                is_new = self._open(resume=resume)
            try:
                with os_errors(where, f"reserve {used_nbytes:,} bytes"):
                    preallocate(self._fd, used_nbytes)
            except SaevStoreError:
                if is_new:
                    with contextlib.suppress(OSError):
                        os.unlink(where)
                raise
        except BaseException:
            self.abort()
            raise

    def _open(self, *, resume: bool) -> bool:
        """Open the file; return False if it existed."""
        flags = os.O_RDWR | os.O_CLOEXEC | os.O_NONBLOCK
        if resume:
            with contextlib.suppress(FileNotFoundError):
                self._fd = os.open(self._where, flags)
                check_regular(os.fstat(self._fd).st_mode, where=self._where)
                return False
        try:
            self._fd = os.open(self._where, flags | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW, 0o666)
        except FileExistsError as error:
            raise StoreExistsError(
                "the file already exists", where=self._where, remedy="Resume, or delete it first."
            ) from error
        return True

    def sync(self) -> int:
        """Flush to the disk; return the number of leading bytes that are safe now."""
        with os_errors(self._where, "sync"):
            os.fsync(self._descriptor())
            fsync_folder(os.path.dirname(self._where))
        return self._written

    def keep(self, nbytes: int) -> None:
        """Count the first `nbytes` of a resumed file as written: the caller has verified them."""
        if not 0 <= nbytes <= self._used:
            raise ArgumentError(f"{nbytes} bytes cannot be kept of {self._used:,}", where=self._where)
        self._written = nbytes

    def read_back(self, start: int, end: int) -> bytes:
        """Return that range of a resumed file; shorter than requested where the file ends."""
        parts = list[bytes]()
        with os_errors(self._where, "read"):
            while start < end and (part := os.pread(self._descriptor(), min(end, self._used) - start, start)):
                parts.append(part)
                start += len(part)
        return b"".join(parts)

    def commit(self) -> None:
        """Cut to exactly `file_nbytes`, flush file and folder, close."""
        self._check_complete()
        with os_errors(self._where, "commit"):
            fd = self._descriptor()
            if os.fstat(fd).st_size > self._used:  # what was behind the used bytes must read as zeros
                os.ftruncate(fd, self._used)
            os.ftruncate(fd, self._file_nbytes)
            os.fsync(fd)
            fsync_folder(os.path.dirname(self._where))
        self.abort()


@contextlib.contextmanager
def temporary_file(where: str, data: Buffer) -> Generator[str]:
    """The path of a durable file with that content next to `where`; deleted afterwards unless it was renamed."""
    folder = os.path.dirname(where)
    make_folders(folder)
    temporary = f"{folder}/{TEMP_PREFIX}{os.getpid()}-{secrets.token_hex(6)}"
    try:
        _new_file(temporary, data)
        yield temporary
    finally:
        with contextlib.suppress(OSError):
            os.unlink(temporary)


def _new_file(where: str, data: Buffer) -> None:
    """Create a durable file exclusively; a kill can leave an empty or partial one."""
    fd = os.open(where, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o666)
    try:
        write_all(fd, [memoryview(data)], 0)
        os.fsync(fd)
    except OSError:
        os.unlink(where)
        raise
    finally:
        os.close(fd)


def link_exclusive(temporary: str, where: str, data: Buffer) -> None:
    """Give a file with the content `data` the name `where` as well, unless that is taken.

    Raises:
        OSError: `FileExistsError` if the name is taken, or another failure.
    """
    # A hard link is exclusive and carries the content; an ordinary rename would replace.
    try:
        os.link(temporary, where)
    except OSError as error:
        if error.errno not in _NO_LINKS:
            raise
        if not rename_exclusive(temporary, where):
            _new_file(where, data)


def rename_exclusive(old: str, new: str) -> bool:
    """Rename a file unless the new name is taken; return False, with nothing done, if the system cannot.

    Raises:
        OSError: `FileExistsError` if the name is taken, or another failure.
    """
    renameat2 = getattr(LIBC, "renameat2", None)
    if renameat2 is None:
        return False
    renameat2.argtypes = (ctypes.c_int, ctypes.c_char_p, ctypes.c_int, ctypes.c_char_p, ctypes.c_uint)
    if renameat2(_AT_FDCWD, os.fsencode(old), _AT_FDCWD, os.fsencode(new), _RENAME_NOREPLACE) == 0:
        return True
    code = ctypes.get_errno()
    if code in _UNSUPPORTED:
        return False
    raise OSError(code, os.strerror(code), new)


class _LockFile:
    """The descriptor that carries a lock; a forked child closes its copy, or the lock would outlive its owner."""

    def __init__(self, where: str) -> None:
        self.fd = os.open(where, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW, 0o666)
        _LOCKS.add(self)

    def close(self) -> None:
        """Release the lock; a second call does nothing."""
        fd, self.fd = self.fd, -1
        if fd >= 0:
            with contextlib.suppress(OSError):
                os.close(fd)

    def __del__(self) -> None:
        if hasattr(self, "fd"):  # it was opened
            self.close()


_LOCKS: weakref.WeakSet[_LockFile] = weakref.WeakSet()
after_fork_in_child(lambda: [lock.close() for lock in list(_LOCKS)])


@contextlib.contextmanager
def locked(where: str) -> Generator[None]:
    """A block that holds `flock` on a file, which is created and stays; the system releases it when the process ends.

    Raises:
        WriterConflictError: another process holds it.

    Warns:
        SaevStoreWarning: the file system has no locks.
    """
    with os_errors(where, "lock"):
        lock = _locked(where)
    try:
        yield
    finally:
        lock.close()


def _locked(where: str) -> _LockFile:
    import fcntl  # not on Windows, where `make_folders` refuses

    for attempt in range(_N_TRIES):
        try:
            make_folders(os.path.dirname(where))
            lock = _LockFile(where)
        except FileNotFoundError:  # another process removes that folder at this moment
            if attempt + 1 == _N_TRIES:
                raise
            continue
        try:
            fcntl.flock(lock.fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
            if not _is_same(lock.fd, where):  # the holder before us has deleted it
                lock.close()
                continue
            os.ftruncate(lock.fd, 0)
            os.pwrite(lock.fd, f"process {os.getpid()} on {socket.gethostname()}\n".encode(), 0)
        except BlockingIOError as error:
            holder = _holder(lock.fd)
            lock.close()
            raise WriterConflictError(
                f"{holder} is writing here", where=where, remedy="Wait for it, or stop it and resume."
            ) from error
        except OSError as error:
            if error.errno not in _NO_LOCKS:
                lock.close()
                raise
            warnings.warn(
                f"{where}: this file system has no locks ({error.strerror}); do not start two writers.",
                SaevStoreWarning,
                stacklevel=outside(),
            )
        return lock
    raise WriterConflictError("other processes create and delete this lock again and again", where=where)


def lock_holder(where: str) -> str:
    """Description of the process that holds the lock on a file; "" if none does, or it cannot be determined."""
    try:
        fd = os.open(where, os.O_RDONLY | os.O_CLOEXEC)
    except OSError:
        return ""
    try:
        import fcntl

        fcntl.flock(fd, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except BlockingIOError:
        return _holder(fd)
    except (ImportError, OSError):  # Windows, and file systems without locks
        return ""
    finally:
        os.close(fd)
    return ""


def _holder(fd: int) -> str:
    """Text that the holder of a lock has written into its file."""
    return os.pread(fd, 200, 0).decode(errors="replace").strip() or "another process"


def _is_same(fd: int, where: str) -> bool:
    """Return True if an open file still has its name."""
    try:
        return os.path.samestat(os.fstat(fd), os.stat(where))
    except FileNotFoundError:
        return False
