"""Open files of this machine and maps of them: one bounded cache of read-only descriptors for the process."""

from __future__ import annotations

import ctypes
import errno
import mmap
import os
import stat
import threading
import weakref
from collections.abc import Callable, Sequence

import numpy as np

from saev_store.errors import TransportError

_FLAGS = os.O_RDONLY | sum(getattr(os, name, 0) for name in ("O_CLOEXEC", "O_NONBLOCK", "O_BINARY"))
#: Buffers of one system call.
IOV_MAX = min(1024, os.sysconf("SC_IOV_MAX")) if hasattr(os, "sysconf") else 16


def _c_library() -> ctypes.CDLL | None:
    try:
        library = ctypes.CDLL(None, use_errno=True)
    except TypeError:
        return None
    library.mmap.restype = ctypes.c_void_p
    library.mmap.argtypes = (
        ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int, ctypes.c_int, ctypes.c_int, ctypes.c_long,
    )  # fmt: skip
    library.munmap.argtypes = (ctypes.c_void_p, ctypes.c_size_t)
    return library


#: The C library, for system calls that Python does not wrap, or wraps at a cost; None on Windows.
LIBC = _c_library()
_MAP_FAILED = ctypes.c_void_p(-1).value


class _OnePosition:
    """Reads on Windows, where a descriptor has one position for all threads: seek and read are one step."""

    _lock = threading.Lock()

    @classmethod
    def pread(cls, fd: int, nbytes: int, offset: int, /) -> bytes:
        """`os.pread`."""
        with cls._lock:
            os.lseek(fd, offset, os.SEEK_SET)
            return os.read(fd, nbytes)

    @classmethod
    def preadv(cls, fd: int, buffers: Sequence[memoryview], offset: int, /) -> int:
        """As much of `os.preadv` as one buffer takes."""
        data = cls.pread(fd, buffers[0].nbytes, offset)
        buffers[0][: len(data)] = data
        return len(data)

    @staticmethod
    def lseek(fd: int, _offset: int, _whence: int, /) -> int:
        """The size of the file, with the position unchanged."""
        return os.fstat(fd).st_size


#: Has `pread`, `preadv` and `lseek` to the end of a file.
positions = os if hasattr(os, "preadv") else _OnePosition


def behind(views: list[memoryview], nbytes: int) -> list[memoryview]:
    """The memory behind the first `nbytes`."""
    first = 0
    while first < len(views) and nbytes >= views[first].nbytes:
        nbytes -= views[first].nbytes
        first += 1
    return [views[first][nbytes:], *views[first + 1 :]] if nbytes else views[first:]


def check_regular(mode: int, *, where: str) -> None:
    """Refuse everything that is not a regular file.

    Raises:
        TransportError: `mode` is that of a folder, a pipe, a socket or a device.
    """
    if not stat.S_ISREG(mode):
        kind = "a folder" if stat.S_ISDIR(mode) else "not a regular file"
        raise TransportError(f"this is {kind}, but a regular file is needed", where=where)


class OpenFile:
    """A regular file open for reading; closed when the last reference goes, so never under a thread that reads it.

    Raises:
        OSError: the system cannot open it.
        TransportError: it is not a regular file.
    """

    def __init__(self, where: str) -> None:
        self.where, self.fd = where, os.open(where, _FLAGS)
        self.look()

    def look(self) -> None:
        """Remember what distinguishes the file from others of its name: size, time of the last change (ns), inode number."""
        status = os.fstat(self.fd)
        check_regular(status.st_mode, where=self.where)
        self.identity = status.st_size, status.st_mtime_ns, status.st_ino
        self.inode = status.st_dev, status.st_ino

    def size(self) -> int:
        """The size of the file now, in bytes; a third of the price of `fstat`, and the position is not used."""
        return positions.lseek(self.fd, 0, os.SEEK_END)

    # Bound here because the interpreter may have emptied `os` by the time it ends the last open file.
    def __del__(self, close: Callable[[int], None] = os.close) -> None:
        if hasattr(self, "fd"):
            close(self.fd)


class DescriptorCache:
    """A bounded number of open files by absolute path; thread-safe without a lock, which a forked child could find taken."""

    def __init__(self, limit: int) -> None:
        self._limit = limit
        self._files: dict[str, OpenFile] = {}
        #: The open file if there is one, else None.
        self.peek = self._files.get

    def open(self, where: str) -> OpenFile:
        """The open file, opened now if it is not, or if another file has taken the name.

        Raises:
            OSError: the system cannot open it.
            TransportError: it is not a regular file.
        """
        file = self._files.get(where)
        if file is not None:
            status = os.stat(where)
            # The open descriptor keeps the inode number from being given to another file.
            if (status.st_dev, status.st_ino) == file.inode:
                return file
        try:
            file = OpenFile(where)
        except OSError as error:
            if error.errno != errno.EMFILE:
                raise
            self._files.clear()
            file = OpenFile(where)
        self._files.pop(where, None)
        for oldest in list(self._files)[: max(0, len(self._files) + 1 - self._limit)]:
            self._files.pop(oldest, None)  # a reader that still uses it keeps it open
        self._files[where] = file
        return file

    def forget(self, where: str) -> None:
        """Close `where` and everything below it once no reader uses it."""
        for path in list(self._files):
            if path == where or path.startswith(f"{where}/"):
                self._files.pop(path, None)


#: Small enough for `ulimit -n 256`, large enough that a scan with several threads never reopens.
DESCRIPTORS = DescriptorCache(128)


def map_file(fd: int, nbytes: int) -> memoryview:
    """A read-only view of the first `nbytes` of a file; the descriptor may be closed at once.

    The map is released with the last view (or NumPy array) that looks into it. `mmap.mmap` would keep a descriptor open for
    as long as any view exists (before Python 3.13), so a store of thousands of shards would run into `ulimit -n`.

    Raises:
        OSError: the system refuses the map.
    """
    if nbytes == 0:  # the system refuses empty maps
        return memoryview(b"")
    if LIBC is None:
        return memoryview(mmap.mmap(fd, nbytes, access=mmap.ACCESS_READ))
    address: int | None = LIBC.mmap(None, nbytes, mmap.PROT_READ, mmap.MAP_SHARED, fd, 0)
    if address is None or address == _MAP_FAILED:
        code = ctypes.get_errno()
        raise OSError(code, os.strerror(code))
    memory = (ctypes.c_ubyte * nbytes).from_address(address)
    # At exit the kernel unmaps; doing it earlier could pull memory from under an array that outlives us.
    weakref.finalize(memory, LIBC.munmap, address, nbytes).atexit = False
    return np.frombuffer(memoryview(memory), np.uint8).data.toreadonly()
