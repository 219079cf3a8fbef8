"""Writing on this machine so that a crash, or another writer, never leaves half a document under its name."""

from __future__ import annotations

import contextlib
import errno
import os
import secrets
import shutil
import socket
import warnings
import weakref
from collections.abc import Generator

try:
    import fcntl
except ImportError:  # Windows
    fcntl = None

from saev_store._runtime.locks import after_fork_in_child
from saev_store.errors import ArgumentError, SaevStoreWarning, WriterConflictError
from saev_store.transport._counters import RequestCounter
from saev_store.transport.base import Buffer
from saev_store.transport.checks import check_path, os_errors
from saev_store.transport.local._libc import rename_exclusive
from saev_store.transport.local.descriptors import DESCRIPTORS, Identity
from saev_store.transport.local.sink import LocalSink, fsync_folder, make_folders, write_all

#: Temporary files start with this; one that outlives its process may be deleted by any process.
TEMP_PREFIX = ".saev_store.tmp-"

# Absent on Windows.
_CLOEXEC, _NOFOLLOW = getattr(os, "O_CLOEXEC", 0), getattr(os, "O_NOFOLLOW", 0)
_NO_LINKS = {errno.EPERM, errno.EOPNOTSUPP, errno.ENOSYS, errno.EMLINK, errno.EXDEV}
_NO_LOCKS = {errno.ENOLCK, errno.EOPNOTSUPP, errno.ENOSYS, errno.EINVAL}


class LocalWrites:
    """The write half of both local engines."""

    _root: str
    #: Which file each name meant when a range of it was first read.
    _pins: dict[str, Identity]
    _requests: RequestCounter

    @property
    def pads(self) -> bool:
        """True: the tail of a file is a hole that takes no space."""
        return True

    def _where(self, path: str, *, root_ok: bool = False) -> str:
        checked = check_path(path, root_ok=root_ok)
        return f"{self._root}/{checked}" if checked else self._root

    def _changed(self, path: str) -> None:
        """What was known of a file, or of all files in a folder, no longer holds: this transport has changed them."""
        DESCRIPTORS.forget(self._where(path))
        for pinned in [name for name in self._pins if name == path or name.startswith(f"{path}/")]:
            del self._pins[pinned]

    def put(self, path: str, data: Buffer) -> None:
        """Create or replace a small file: a temporary file, fsync, rename, fsync of the folder."""
        where = self._where(path)
        self._requests.add("put", written=len(data))
        with os_errors(where, "write"):
            with _temporary(where, data) as temporary:
                os.replace(temporary, where)
            fsync_folder(os.path.dirname(where))
        self._changed(path)

    def create(self, path: str, data: Buffer) -> None:
        """Create a small file with all of its content at once, unless the name is taken: then `StoreExistsError`."""
        where = self._where(path)
        self._requests.add("create", written=len(data))
        with os_errors(where, "create"):
            with _temporary(where, data) as temporary:
                # A hard link is exclusive and carries the content; an ordinary rename would replace.
                try:
                    os.link(temporary, where)
                except OSError as error:
                    if error.errno not in _NO_LINKS:
                        raise
                    if not rename_exclusive(temporary, where):
                        _create_without_links(where, data)
            fsync_folder(os.path.dirname(where))

    def delete(self, path: str) -> None:
        """Delete a file, a symbolic link (not what it points to) or a whole folder."""
        where = self._where(path)
        self._requests.add("delete")
        with os_errors(where, "delete"), contextlib.suppress(FileNotFoundError, NotADirectoryError):
            if os.path.isdir(where) and not os.path.islink(where):
                shutil.rmtree(where)
            else:
                os.unlink(where)
            fsync_folder(os.path.dirname(where))
        self._changed(path)

    def move(self, source: str, target: str) -> None:
        """Rename a file over another one: rename, fsync of both folders."""
        old, new = self._where(source), self._where(target)
        with os_errors(new, f"move {source} to"):
            os.replace(old, new)
            fsync_folder(os.path.dirname(new))
            fsync_folder(os.path.dirname(old))
        self._changed(source)
        self._changed(target)

    def open_sink(self, path: str, *, used_nbytes: int, file_nbytes: int, resume: bool = False) -> LocalSink:
        """A file that is written in place, its space reserved first.

        Raises:
            StoreExistsError: something lies there and `resume` is false.
            TransportError: there is not enough space; nothing is left behind.
        """
        if not 0 <= used_nbytes <= file_nbytes:
            raise ArgumentError(f"{used_nbytes} used bytes do not fit a file of {file_nbytes}", where=path)
        self._changed(path)
        sink = LocalSink(self._where(path), used_nbytes=used_nbytes, file_nbytes=file_nbytes, resume=resume)
        sink.requests = self._requests
        return sink

    @contextlib.contextmanager
    def lock(self, path: str) -> Generator[None]:
        """Hold `flock` on a file, which is created and stays; the system releases it when this process ends."""
        where = self._where(path)
        with os_errors(where, "lock"):
            fd = _locked_in_folder(where)
        try:
            yield
        finally:
            fd.close()


#: How often a folder is made that others delete at that moment.
_N_TRIES = 100


class _LockFile:
    """The descriptor that carries a lock; a forked child closes its copy, or the lock would outlive its owner."""

    def __init__(self, where: str) -> None:
        self.fd = os.open(where, os.O_RDWR | os.O_CREAT | _CLOEXEC | _NOFOLLOW, 0o666)
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


def _locked_in_folder(where: str) -> _LockFile:
    """The lock on a file whose folder is made first; again where another writer removes that folder meanwhile."""
    for _ in range(_N_TRIES):
        make_folders(os.path.dirname(where))
        with contextlib.suppress(FileNotFoundError):
            return _locked(where)
    return _locked(where)


def _locked(where: str) -> _LockFile:
    while True:
        lock = _LockFile(where)
        try:
            _flock(lock.fd)
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


def _flock(fd: int) -> None:
    if fcntl is None:
        raise OSError(errno.ENOSYS, "this system has no flock")
    fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)


def _is_same(fd: int, where: str) -> bool:
    try:
        return os.path.samestat(os.fstat(fd), os.stat(where))
    except FileNotFoundError:
        return False


@contextlib.contextmanager
def _temporary(where: str, data: Buffer) -> Generator[str]:
    """A durable file with that content next to `where`; gone afterwards unless it was renamed."""
    folder = os.path.dirname(where)
    make_folders(folder)
    temporary = f"{folder}/{TEMP_PREFIX}{os.getpid()}-{secrets.token_hex(6)}"
    fd = os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_EXCL | _CLOEXEC, 0o666)
    try:
        try:
            write_all(fd, [memoryview(data)], 0)
            os.fsync(fd)
        finally:
            os.close(fd)
        yield temporary
    finally:
        with contextlib.suppress(OSError):
            os.unlink(temporary)


def _create_without_links(where: str, data: Buffer) -> None:
    """Create a file exclusively where there are neither links nor exclusive renames; a kill can leave an empty file."""
    fd = os.open(where, os.O_WRONLY | os.O_CREAT | os.O_EXCL | _CLOEXEC, 0o666)
    try:
        write_all(fd, [memoryview(data)], 0)
        os.fsync(fd)
    except OSError:
        os.unlink(where)
        raise
    finally:
        os.close(fd)
