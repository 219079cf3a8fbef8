"""Open files: one bounded cache of read-only descriptors for the whole process."""

from __future__ import annotations

import errno
import os
import stat
from collections.abc import Callable

from saev_store._runtime.locks import ForkSafeLock
from saev_store.errors import TransportError
from saev_store.transport.local._positions import file_size

# Without O_NONBLOCK, opening a FIFO without a writer would wait for ever. Windows has other flags, and reads text without one.
_FLAGS = os.O_RDONLY | sum(getattr(os, name, 0) for name in ("O_NONBLOCK", "O_CLOEXEC", "O_NOCTTY", "O_BINARY"))
_KINDS = (
    (stat.S_ISDIR, "a folder"),
    (stat.S_ISFIFO, "a named pipe"),
    (stat.S_ISSOCK, "a socket"),
    (stat.S_ISCHR, "a device"),
    (stat.S_ISBLK, "a device"),
)


def check_regular(mode: int, *, where: str) -> None:
    """Refuse everything that is not a regular file.

    Raises:
        TransportError: `mode` is that of a folder, a pipe, a socket or a device.
    """
    if stat.S_ISREG(mode):
        return
    kind = next((name for test, name in _KINDS if test(mode)), "something else")
    raise TransportError(f"this is {kind}, but a regular file is needed", where=where)


#: Device, inode number, size, and the times (ns) of the last change of content and of inode.
Identity = tuple[int, int, int, int, int]


def identity_of(status: os.stat_result) -> Identity:
    """Tells a file from another one of its name, also from one that was given the inode number of a deleted file."""
    return status.st_dev, status.st_ino, status.st_size, status.st_mtime_ns, status.st_ctime_ns


class OpenFile:
    """A regular file open for reading; closed when the last reference goes, so never under a thread that reads it."""

    __slots__ = ("fd", "identity", "inode")

    def __init__(self, where: str) -> None:
        self.fd = -1
        try:
            self.fd = os.open(where, _FLAGS)
        except OSError as error:
            if error.errno != errno.ENXIO:
                raise
            raise TransportError("this is a socket, but a regular file is needed", where=where) from error
        status = os.fstat(self.fd)
        check_regular(status.st_mode, where=where)
        self.inode = (status.st_dev, status.st_ino)
        self.identity = identity_of(status)

    def size(self) -> int:
        """The size of the file now, in bytes."""
        return file_size(self.fd)

    # Bound here because the interpreter may have emptied `os` by the time it ends the last open file.
    def __del__(self, close: Callable[[int], None] = os.close) -> None:
        if self.fd >= 0:
            close(self.fd)


class DescriptorCache:
    """At most `limit` open files by absolute path; thread-safe, safe to inherit through `fork`."""

    def __init__(self, limit: int) -> None:
        self._limit = limit
        self._files: dict[str, OpenFile] = {}
        #: The open file if there is one, else None.
        self.peek = self._files.get
        self._lock = ForkSafeLock()

    def open(self, where: str) -> OpenFile:
        """The open file, opened now if need be.

        Raises:
            OSError: the system cannot open it.
            TransportError: it is not a regular file.
        """
        file = self._files.get(where)
        if file is not None:
            status = os.stat(where)
            # The open descriptor keeps the inode from being given to another file.
            if (status.st_dev, status.st_ino) == file.inode:
                return file
            self.forget(where)  # another file has the name by now
        try:
            file = OpenFile(where)
        except OSError as error:
            if error.errno != errno.EMFILE:
                raise
            self.forget("")
            file = OpenFile(where)
        with self._lock:
            # The oldest goes first; a reader that still uses it keeps it open.
            while len(self._files) >= self._limit:
                del self._files[next(iter(self._files))]
            return self._files.setdefault(where, file)

    def forget(self, where: str) -> None:
        """Close `where` and everything below it (`""`: everything) once no reader uses it."""
        with self._lock:
            gone = [path for path in self._files if not where or path == where or path.startswith(f"{where}/")]
            for path in gone:
                del self._files[path]


#: Small enough for `ulimit -n 256`, large enough that a scan with several threads never reopens.
DESCRIPTORS = DescriptorCache(128)
