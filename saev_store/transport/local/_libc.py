"""System calls that Python does not wrap, or wraps at a cost.

`mmap.mmap` keeps a descriptor open for as long as any view lives (before Python 3.13), so a store of thousands of
shards would run into `ulimit -n`. `os.posix_fallocate` silently falls back to touching every block where the file
system cannot preallocate.
"""

from __future__ import annotations

import ctypes
import errno
import mmap
import os
import weakref

import numpy as np


def _libc() -> ctypes.CDLL | None:
    """The C library; None on Windows."""
    try:
        return ctypes.CDLL(None, use_errno=True)
    except TypeError:
        return None


_LIBC = _libc()
if _LIBC is not None:
    _LIBC.mmap.restype = ctypes.c_void_p
    _LIBC.mmap.argtypes = (
        ctypes.c_void_p,
        ctypes.c_size_t,
        ctypes.c_int,
        ctypes.c_int,
        ctypes.c_int,
        ctypes.c_long,
    )
    _LIBC.munmap.argtypes = (ctypes.c_void_p, ctypes.c_size_t)
_MAP_FAILED = ctypes.c_void_p(-1).value
_AT_FDCWD, _RENAME_NOREPLACE = -100, 1
_UNSUPPORTED = {errno.EOPNOTSUPP, errno.ENOSYS, errno.EINVAL, errno.ENODEV}


def map_file(fd: int, nbytes: int) -> memoryview:
    """A read-only view of the first `nbytes` of a file; the descriptor may be closed at once.

    The map is released with the last view (or NumPy array) that looks into it.

    Raises:
        OSError: the system refuses the map.
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


def preallocate(fd: int, nbytes: int) -> None:
    """Reserve disk space for the first `nbytes` of a file, which grows to that size; what it holds is not changed.

    Where the file system cannot reserve, the file only grows, provided that it claims to have the space free.

    Raises:
        OSError: there is not enough space (`ENOSPC`, `EDQUOT`), or another failure.
    """
    if nbytes == 0:
        return
    if not hasattr(os, "statvfs"):  # Windows
        os.ftruncate(fd, max(nbytes, os.fstat(fd).st_size))
        return
    # A reservation that fails half-way would take all space from other processes for a moment, so compare first.
    status, space = os.fstat(fd), os.statvfs(fd)
    if space.f_blocks and nbytes - status.st_blocks * 512 > space.f_bavail * space.f_frsize:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
    fallocate = getattr(_LIBC, "fallocate", None)
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


def rename_exclusive(old: str, new: str) -> bool:
    """Rename a file unless the new name is taken; False, and nothing done, where the system cannot.

    Raises:
        OSError: `FileExistsError` if the name is taken, or another failure.
    """
    renameat2 = getattr(_LIBC, "renameat2", None)
    if renameat2 is None:
        return False
    renameat2.argtypes = (ctypes.c_int, ctypes.c_char_p, ctypes.c_int, ctypes.c_char_p, ctypes.c_uint)
    if renameat2(_AT_FDCWD, os.fsencode(old), _AT_FDCWD, os.fsencode(new), _RENAME_NOREPLACE) == 0:
        return True
    code = ctypes.get_errno()
    if code in _UNSUPPORTED:
        return False
    raise OSError(code, os.strerror(code), new)
