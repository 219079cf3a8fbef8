"""Open files of this machine, and maps of them."""

from __future__ import annotations

import contextlib
import ctypes
import mmap
import os
import stat
import threading
import weakref
from collections import deque
from collections.abc import Callable

import numpy as np

from saev_store.errors import TransportError

_FLAGS = os.O_RDONLY | sum(getattr(os, name, 0) for name in ("O_CLOEXEC", "O_BINARY"))
#: Buffers of one system call.
IOV_MAX = min(1024, os.sysconf("SC_IOV_MAX")) if hasattr(os, "sysconf") else 16
#: Without `preadv` (on Windows) a descriptor has one position for all threads: seek and read are one step.
_HAS_POSITIONS, _ONE_POSITION = hasattr(os, "preadv"), threading.Lock()
#: Open files: few enough for `ulimit -n 256`, and so many that a scan with several threads never reopens.
_OPEN: deque[OpenFile] = deque(maxlen=128)

#: Size of an open file. `lseek` to its end takes a third of the time of `fstat`, but moves the only position that Windows has.
seek_end: Callable[[int, int, int], int] = os.lseek if _HAS_POSITIONS else lambda fd, _at, _from: os.fstat(fd).st_size


class OpenFile:
    """A regular file open for reading; closed when the last reference goes, so never under a thread that reads it."""

    def __init__(self, where: str) -> None:
        self.where, self.fd = where, os.open(where, _FLAGS)
        self.status = os.fstat(self.fd)
        check_regular(self.status.st_mode, where=where)

    def size(self) -> int:
        """The size of the file now, in bytes."""
        return seek_end(self.fd, 0, os.SEEK_END)

    # Bound here because the interpreter may have emptied `os` by the time it ends the last open file.
    def __del__(self, close: Callable[[int], None] = os.close) -> None:
        if hasattr(self, "fd"):
            close(self.fd)


def check_regular(mode: int, *, where: str) -> None:
    """Refuse folders, pipes, sockets and devices with a `TransportError`."""
    if not stat.S_ISREG(mode):
        raise TransportError("this is a folder or a device, but a regular file is needed", where=where)


def open_file(where: str) -> OpenFile:
    """The file that has the name now. It is kept open until many others were opened."""
    file = OpenFile(where)
    _OPEN.append(file)  # without a lock, which a forked child could find taken
    return file


def forget(where: str) -> None:
    """Close a file, or everything in a folder, once no reader uses it."""
    for file in list(_OPEN):
        if file.where == where or file.where.startswith(f"{where}/"):
            with contextlib.suppress(ValueError):  # another thread was quicker
                _OPEN.remove(file)


def read_at(fd: int, views: list[memoryview], offset: int) -> int:
    """Fill some of the memory from a position of a file, and return the number of bytes."""
    if _HAS_POSITIONS:
        return os.preadv(fd, views[:IOV_MAX], offset)
    with _ONE_POSITION:
        os.lseek(fd, offset, os.SEEK_SET)
        data = os.read(fd, len(views[0]))
    views[0][: len(data)] = data
    return len(data)


def behind(views: list[memoryview], nbytes: int) -> list[memoryview]:
    """The memory behind the first `nbytes`."""
    first = 0
    while first < len(views) and nbytes >= views[first].nbytes:
        nbytes -= views[first].nbytes
        first += 1
    return [views[first][nbytes:], *views[first + 1 :]] if nbytes else views[first:]


def _c_library() -> ctypes.CDLL | None:
    try:
        library = ctypes.CDLL(None, use_errno=True)
    except TypeError:  # on Windows
        return None
    library.mmap.restype = ctypes.c_void_p
    library.mmap.argtypes = (ctypes.c_void_p, ctypes.c_size_t, *[ctypes.c_int] * 3, ctypes.c_long)
    library.munmap.argtypes = (ctypes.c_void_p, ctypes.c_size_t)
    return library


_LIBC = _c_library()
_MAP_FAILED = ctypes.c_void_p(-1).value


def map_file(fd: int, nbytes: int) -> memoryview:
    """A read-only view of the first `nbytes` of a file; the descriptor may be closed at once.

    The map is released with the last view (or NumPy array) that looks into it. `mmap.mmap` would keep a descriptor open for
    as long as any view exists (before Python 3.13), so a store of thousands of shards would run into `ulimit -n`.
    """
    if nbytes == 0:  # the system refuses empty maps
        return memoryview(b"")
    if _LIBC is None:
        return memoryview(mmap.mmap(fd, nbytes, access=mmap.ACCESS_READ))
    address: int | None = _LIBC.mmap(None, nbytes, mmap.PROT_READ, mmap.MAP_SHARED, fd, 0)
    if address is None or address == _MAP_FAILED:
        code = ctypes.get_errno()
        raise OSError(code, os.strerror(code))
    memory = (ctypes.c_ubyte * nbytes).from_address(address)
    # At exit the kernel unmaps; doing it earlier could pull memory from under an array that outlives us.
    weakref.finalize(memory, _LIBC.munmap, address, nbytes).atexit = False
    return np.frombuffer(memoryview(memory), np.uint8).data.toreadonly()
