"""Durable files of this machine: large ones behind a descriptor, small ones through a temporary file, and locks."""

from __future__ import annotations

import contextlib
import errno
import os
import secrets
import warnings
from collections.abc import Generator

from saev_store.errors import AccessError, SaevStoreWarning, WriterConflictError, outside
from saev_store.transport.base import Sink
from saev_store.transport.checks import Buffer, os_errors
from saev_store.transport.files import IOV_MAX, behind

#: Temporary files start with this; one that outlives its process may be deleted by any process.
TEMP_PREFIX = ".saev_store.tmp-"

#: Errors of file systems that cannot sync folders (CIFS, some FUSE), make hard links, or lock.
_UNSUPPORTED = {
    errno.EINVAL, errno.EMLINK, errno.ENODEV, errno.ENOLCK, errno.ENOSYS, errno.ENOTSUP, errno.EOPNOTSUPP, errno.EPERM, errno.EXDEV,
}  # fmt: skip
#: Flags of a file that must not exist.
_NEW = sum(getattr(os, name, 0) for name in ("O_CREAT", "O_EXCL", "O_CLOEXEC", "O_NOFOLLOW"))


def write_all(fd: int, views: list[memoryview], offset: int) -> None:
    """Write all buffers, one after the other, however short the system's writes are."""
    while views:
        n_written = os.pwritev(fd, views[:IOV_MAX], offset)
        offset += n_written
        views = behind(views, n_written)


def fsync_folder(folder: str) -> None:
    """Make the names in a folder survive a crash; nothing on file systems that cannot."""
    fd = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        os.fsync(fd)
    except OSError as error:
        if error.errno not in _UNSUPPORTED:
            raise
    finally:
        os.close(fd)


def make_folders(folder: str) -> None:
    """Create a folder and its parents, each durable under its name; `AccessError` on Windows."""
    if not hasattr(os, "pwritev"):
        raise AccessError("files are written on Linux and macOS only", where=folder, remedy="Write to an object store.")
    if os.path.isdir(folder):
        return
    parent = os.path.dirname(folder)
    make_folders(parent)
    with contextlib.suppress(FileExistsError):  # another process was quicker
        os.mkdir(folder)
    if os.path.islink(folder):
        os.stat(folder)  # an error if it leads nowhere, such as to a disk that is not mounted
    fsync_folder(parent)


class LocalSink(Sink):
    """A file under construction at its final place, cut to its exact size at the end."""

    _fd = -1

    def __init__(self, where: str, *, used_nbytes: int, file_nbytes: int, replace: bool) -> None:
        super().__init__(where, used_nbytes=used_nbytes, file_nbytes=file_nbytes)
        with os_errors(where, "open for writing"):
            make_folders(os.path.dirname(where))
            if replace:  # a hard link of it may be a file of another store
                with contextlib.suppress(FileNotFoundError):
                    os.unlink(where)
            self._fd = os.open(where, os.O_RDWR | _NEW, 0o666)

    def _append(self, views: list[memoryview]) -> None:
        with os_errors(self._where, "write"):
            write_all(self._fd, views, self._written)

    def _finish(self) -> None:
        with os_errors(self._where, "commit"):
            os.ftruncate(self._fd, self._file_nbytes)
            os.fsync(self._fd)
            fsync_folder(os.path.dirname(self._where))

    def _release(self) -> None:
        fd, self._fd = self._fd, -1
        if fd >= 0:
            with contextlib.suppress(OSError):  # what was committed was flushed before
                os.close(fd)

    __del__ = _release


def write_file(where: str, data: Buffer, *, replace: bool) -> None:
    """Make a durable file that has all of its content at once; without `replace` a `FileExistsError` if the name is taken."""
    folder = os.path.dirname(where)
    make_folders(folder)
    temporary = f"{folder}/{TEMP_PREFIX}{os.getpid()}-{secrets.token_hex(6)}"
    try:
        _new_file(temporary, data)
        if replace:
            os.replace(temporary, where)
        else:
            os.link(temporary, where)  # a rename would replace
    except OSError as error:
        if replace or error.errno not in _UNSUPPORTED:
            raise
        _new_file(where, data)  # a kill can leave a part of it
    finally:
        with contextlib.suppress(OSError):
            os.unlink(temporary)
    fsync_folder(folder)


def _new_file(where: str, data: Buffer) -> None:
    fd = os.open(where, os.O_WRONLY | _NEW, 0o666)
    try:
        write_all(fd, [memoryview(data)], 0)
        os.fsync(fd)
    except OSError:
        os.unlink(where)
        raise
    finally:
        os.close(fd)


#: Files that this process has locked, by its number and their paths: locks of the system are between processes.
_HELD: dict[tuple[int, str], object] = {}


@contextlib.contextmanager
def locked(where: str) -> Generator[None]:
    """A block that holds `lockf` on a file, which stays, or `WriterConflictError`. It ends with the process; forked children have none.

    Warns:
        SaevStoreWarning: the file system has no locks.
    """
    key, own, fd = (os.getpid(), os.path.realpath(where)), object(), -1
    if _HELD.setdefault(key, own) is not own:
        raise _conflict(where)
    try:
        with os_errors(where, "lock"):
            while fd < 0:
                fd = _try_to_lock(where)
        yield
    finally:
        if fd >= 0:
            os.close(fd)  # first: any descriptor of the file that is closed ends the lock of the process
        del _HELD[key]


def _try_to_lock(where: str) -> int:
    """The descriptor of a file that is locked now; -1 if it was deleted at this moment."""
    import fcntl  # not on Windows, where `make_folders` refuses

    make_folders(os.path.dirname(where))
    fd = -1
    try:
        fd = os.open(where, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW, 0o666)
        fcntl.lockf(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        if os.path.samestat(os.fstat(fd), os.stat(where)):
            return fd
    except FileNotFoundError:  # the holder before us has deleted it, or its folder
        pass
    except OSError as error:
        if error.errno in _UNSUPPORTED and fd >= 0:
            text = f"{where}: this file system has no locks ({error.strerror}); do not start two writers."
            warnings.warn(text, SaevStoreWarning, stacklevel=outside())
            return fd
        if fd >= 0:
            os.close(fd)
        raise (_conflict(where) if isinstance(error, BlockingIOError) else error) from None
    if fd >= 0:
        os.close(fd)
    return -1


def _conflict(where: str) -> WriterConflictError:
    return WriterConflictError("another process is writing here", where=where, remedy="Wait for it, or stop it.")
