"""Durable writing: large files behind a descriptor, small ones through a temporary file, reserved space, locks."""

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
    SaevStoreError,
    SaevStoreWarning,
    StoreExistsError,
    TransportError,
    WriterConflictError,
    outside,
)
from saev_store.transport._sink import BaseSink
from saev_store.transport.base import Buffer
from saev_store.transport.checks import RequestCounter, check_ranges, os_errors
from saev_store.transport.local.files import IOV_MAX, LIBC, behind, check_regular

#: Temporary files start with this; one that outlives its process may be deleted by any process.
TEMP_PREFIX = ".saev_store.tmp-"
#: Folders that nobody needs once the process that made them has ended start with this.
ASIDE_PREFIX = f"{TEMP_PREFIX}aside-"

_AT_FDCWD, _RENAME_NOREPLACE = -100, 1
_UNSUPPORTED = {errno.EOPNOTSUPP, errno.ENOSYS, errno.EINVAL, errno.ENODEV}
_NO_LINKS = {errno.EPERM, errno.EOPNOTSUPP, errno.ENOSYS, errno.EMLINK, errno.EXDEV}
_NO_LOCKS = {errno.ENOLCK, errno.EOPNOTSUPP, errno.ENOSYS, errno.EINVAL}
#: How often a folder is made that others delete at that moment.
_N_TRIES = 100


def write_all(fd: int, views: list[memoryview], offset: int) -> None:
    """Write all buffers, one after the other, however short the system's writes are."""
    while views:
        n_written = os.pwritev(fd, views[:IOV_MAX], offset)
        offset += n_written
        views = behind(views, n_written)


def fsync_folder(folder: str) -> None:
    """Make the names in a folder survive a crash; nothing on Windows."""
    if not hasattr(os, "O_DIRECTORY"):
        return
    fd = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        os.fsync(fd)
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
    with contextlib.suppress(FileExistsError):  # another writer was quicker; a file of that name fails at its use
        os.mkdir(folder)
    fsync_folder(parent)


def preallocate(fd: int, nbytes: int) -> None:
    """Reserve disk space for the first `nbytes` of a file, which grows to that size; what it holds is not changed.

    Where the file system cannot reserve, the file only grows, provided that it claims to have the space free.
    (`os.posix_fallocate` would silently touch every block there.)

    Raises:
        OSError: there is not enough space (`ENOSPC`, `EDQUOT`), or another failure.
    """
    if nbytes == 0:
        return
    # A reservation that fails half-way would take all space from other processes for a moment, so compare first.
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


class FdSink(BaseSink):
    """Writes blocks with `pwritev`, also from several threads; subclasses open the descriptor and say what `commit` is."""

    #: Where what is written is counted.
    requests: RequestCounter | None = None
    _fd = -1

    def write(self, offset: int, buffers: Sequence[memoryview], done: Callable[[], object] | None = None) -> None:
        """Write the buffers one after the other at `offset`."""
        views, end = self._checked(offset, buffers)
        with os_errors(self._where, "write"):
            write_all(self._descriptor(), views, offset)
        if self.requests is not None:
            self.requests.add("sink.write", written=end - offset)
        self._add(offset, end)
        if done is not None:
            done()

    def abort(self) -> None:
        """Close the descriptor; a file that has a name on the disk stays."""
        fd, self._fd = self._fd, -1
        if fd >= 0:
            # Whatever it says: what was committed was flushed before, and the rest is not wanted.
            with contextlib.suppress(OSError):
                os.close(fd)

    def __del__(self) -> None:
        self.abort()

    def _descriptor(self) -> int:
        if self._fd < 0:
            raise TransportError("this file is committed or aborted already", where=self._where)
        return self._fd


class LocalSink(FdSink):
    """A file under construction at its final place: reserved first, then filled, then cut to its exact size.

    A crash leaves a file of full size whose unwritten blocks are zeros, which a resumed writer judges by what it has
    recorded elsewhere. Blocks may be written by several threads.
    """

    def __init__(self, where: str, *, used_nbytes: int, file_nbytes: int, resume: bool) -> None:
        super().__init__(where, used_nbytes=used_nbytes, file_nbytes=file_nbytes)
        self._tail_is_zero = True
        self._name_is_durable = False
        try:
            with os_errors(self._where, "open for writing"):
                make_folders(os.path.dirname(where))
                created = self._open(resume=resume)
            try:
                with os_errors(self._where, f"reserve {used_nbytes:,} bytes"):
                    preallocate(self._fd, used_nbytes)
                with os_errors(self._where, f"pad it to {file_nbytes:,} bytes"):
                    if os.fstat(self._fd).st_size < file_nbytes:
                        os.ftruncate(self._fd, file_nbytes)
            except SaevStoreError:
                if created:
                    with contextlib.suppress(OSError):
                        os.unlink(where)
                raise
        except BaseException:
            self.abort()
            raise

    def _open(self, *, resume: bool) -> bool:
        """Open the file; False if it was there before."""
        flags = os.O_RDWR | os.O_CLOEXEC | os.O_NONBLOCK
        if resume:
            with contextlib.suppress(FileNotFoundError):
                self._fd = os.open(self._where, flags)
                status = os.fstat(self._fd)
                check_regular(status.st_mode, where=self._where)
                self._tail_is_zero = status.st_size <= self._used
                return False
        try:
            self._fd = os.open(self._where, flags | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW, 0o666)
        except FileExistsError as error:
            raise StoreExistsError(
                "the file already exists", where=self._where, remedy="Resume, or delete it first."
            ) from error
        return True

    def sync(self) -> int:
        """Flush to the disk; the number of leading bytes that are safe now."""
        prefix = self._prefix()  # before the flush: a block written meanwhile is not promised
        with os_errors(self._where, "sync"):
            if hasattr(os, "fdatasync"):  # absent on macOS
                os.fdatasync(self._descriptor())
            else:
                os.fsync(self._descriptor())
            if not self._name_is_durable:
                fsync_folder(os.path.dirname(self._where))
                self._name_is_durable = True
        return prefix

    def read_back(self, start: int, end: int) -> bytes:
        check_ranges(self._where, (start,), (end,))
        end, parts = min(end, self._used), list[bytes]()
        with os_errors(self._where, "read"):
            while start < end and (part := os.pread(self._descriptor(), end - start, start)):
                parts.append(part)
                start += len(part)
        return b"".join(parts)

    def commit(self, *, check_size: bool = True) -> None:  # noqa: ARG002  # it is cut to its size
        """Cut to exactly `file_nbytes`, flush file and folder, close.

        Raises:
            ArgumentError: not all of `used_nbytes` were written.
        """
        self._check_complete()
        with os_errors(self._where, "commit"):
            fd = self._descriptor()
            if not self._tail_is_zero:
                os.ftruncate(fd, self._used)
            os.ftruncate(fd, self._file_nbytes)
            os.fsync(fd)
            fsync_folder(os.path.dirname(self._where))
        self.abort()


@contextlib.contextmanager
def temporary_file(where: str, data: Buffer) -> Generator[str]:
    """The path of a durable file with that content next to `where`; gone afterwards unless it was renamed."""
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
    """Rename a file unless the new name is taken; False, and nothing done, where the system cannot.

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

    fd = -1  # an interrupt may come before it is opened

    def __init__(self, where: str) -> None:
        self.fd = os.open(where, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW, 0o666)
        _LOCKS.add(self)

    def close(self) -> None:
        fd, self.fd = self.fd, -1
        if fd >= 0:
            try:  # noqa: SIM105  # an interrupt within `suppress` would keep the descriptor
                os.close(fd)
            except OSError:  # the descriptor, and the lock with it, is gone whatever it says
                pass

    def __del__(self) -> None:  # an interrupt may come before anybody has it
        self.close()


_LOCKS: weakref.WeakSet[_LockFile] = weakref.WeakSet()


def _close_in_child() -> None:
    for lock in list(_LOCKS):
        lock.close()


after_fork_in_child(_close_in_child)


def lock_file(where: str) -> _LockFile:
    """The lock on a file, whose folder is made first; again where another writer removes that folder meanwhile.

    Raises:
        WriterConflictError: another process holds it.
    """
    for _ in range(_N_TRIES):
        with contextlib.suppress(FileNotFoundError):
            make_folders(os.path.dirname(where))
            return _locked(where)
    return _locked(where)


def _locked(where: str) -> _LockFile:
    import fcntl  # not on Windows, where `make_folders` refuses

    while True:
        lock = _LockFile(where)
        try:
            fcntl.flock(lock.fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
            if not _is_same(lock.fd, where):  # the holder before us has deleted it: what we locked has no name
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
            if error.errno in _NO_LOCKS:
                warnings.warn(
                    f"{where}: this file system has no locks ({error.strerror}); do not start two writers.",
                    SaevStoreWarning,
                    stacklevel=outside(),
                )
                return lock
            lock.close()
            raise
        except BaseException:  # the traceback of an interrupt would keep it
            lock.close()
            raise
        return lock


def lock_holder(where: str) -> str:
    """Who holds the lock on a file, in words; "" for nobody, and where that cannot be told. Writes nothing."""
    try:
        fd = os.open(where, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK | getattr(os, "O_NOFOLLOW", 0))
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
        with contextlib.suppress(OSError):
            os.close(fd)
    return ""


def _holder(fd: int) -> str:
    """What the holder of a lock has written into its file."""
    return os.pread(fd, 200, 0).decode(errors="replace").strip() or "another process"


def _is_same(fd: int, where: str) -> bool:
    """Whether an open file still has its name."""
    try:
        return os.path.samestat(os.fstat(fd), os.stat(where))
    except FileNotFoundError:
        return False
