"""Steps of durable writing: temporary files, exclusive names, reserved space, locks."""

from __future__ import annotations

import contextlib
import ctypes
import errno
import fcntl
import os
import secrets
import socket
import warnings
import weakref
from collections.abc import Generator

from saev_store._runtime.locks import after_fork_in_child
from saev_store.errors import SaevStoreWarning, WriterConflictError
from saev_store.transport.base import Buffer
from saev_store.transport.local.files import LIBC

#: Temporary files start with this; one that outlives its process may be deleted by any process.
TEMP_PREFIX = ".saev_store.tmp-"

_AT_FDCWD, _RENAME_NOREPLACE = -100, 1
_UNSUPPORTED = {errno.EOPNOTSUPP, errno.ENOSYS, errno.EINVAL, errno.ENODEV}
_NO_LINKS = {errno.EPERM, errno.EOPNOTSUPP, errno.ENOSYS, errno.EMLINK, errno.EXDEV}
_NO_LOCKS = {errno.ENOLCK, errno.EOPNOTSUPP, errno.ENOSYS, errno.EINVAL}
_IOV_MAX = min(1024, os.sysconf("SC_IOV_MAX"))
#: How often a folder is made that others delete at that moment.
_N_TRIES = 100


def write_all(fd: int, views: list[memoryview], offset: int) -> None:
    """Write all buffers, one after the other, however short the system's writes are."""
    first = 0
    while first < len(views):
        n_written = os.pwritev(fd, views[first : first + _IOV_MAX], offset)
        offset += n_written
        while first < len(views) and n_written >= views[first].nbytes:
            n_written -= views[first].nbytes
            first += 1
        if n_written:
            views[first] = views[first][n_written:]


def flush(fd: int) -> None:
    """Make the content of a file survive a crash."""
    if hasattr(os, "fdatasync"):  # absent on macOS
        os.fdatasync(fd)
    else:
        os.fsync(fd)


def fsync_folder(folder: str) -> None:
    """Make the names in a folder survive a crash."""
    fd = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        os.fsync(fd)
    finally:
        os.close(fd)


def make_folders(folder: str) -> None:
    """Create a folder and its parents, each durable under its name."""
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

    def __init__(self, where: str) -> None:
        self.fd = os.open(where, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW, 0o666)
        _LOCKS.add(self)

    def close(self) -> None:
        if self.fd >= 0:
            os.close(self.fd)
            self.fd = -1


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
        make_folders(os.path.dirname(where))
        with contextlib.suppress(FileNotFoundError):
            return _locked(where)
    return _locked(where)


def _locked(where: str) -> _LockFile:
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
            holder = os.pread(lock.fd, 200, 0).decode(errors="replace").strip() or "another process"
            lock.close()
            raise WriterConflictError(
                f"{holder} is writing here", where=where, remedy="Wait for it, or stop it and resume."
            ) from error
        except OSError as error:
            if error.errno in _NO_LOCKS:
                warnings.warn(
                    f"{where}: this file system has no locks ({error.strerror}); do not start two writers.",
                    SaevStoreWarning,
                    stacklevel=5,
                )
                return lock
            lock.close()
            raise
        return lock


def _is_same(fd: int, where: str) -> bool:
    """Whether an open file still has its name."""
    try:
        return os.path.samestat(os.fstat(fd), os.stat(where))
    except FileNotFoundError:
        return False
