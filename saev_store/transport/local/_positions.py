"""Reading at a position of an open file, also where the system has no `pread`."""

from __future__ import annotations

import os
from collections.abc import Sequence

from saev_store._runtime.locks import ForkSafeLock

# Windows has one position for each descriptor: seek and read are one step for all threads.
_POSITION = ForkSafeLock()


def pread(fd: int, nbytes: int, offset: int) -> bytes:
    """`os.pread`, or the same by seeking."""
    if hasattr(os, "pread"):
        return os.pread(fd, nbytes, offset)
    with _POSITION:
        os.lseek(fd, offset, os.SEEK_SET)
        return os.read(fd, nbytes)


def preadv(fd: int, views: Sequence[memoryview], offset: int, flags: int = 0) -> int:
    """`os.preadv`, or as much of it as one read gives."""
    if hasattr(os, "preadv"):
        return os.preadv(fd, views, offset, flags) if flags else os.preadv(fd, views, offset)
    data = pread(fd, views[0].nbytes, offset)
    views[0][: len(data)] = data
    return len(data)


def file_size(fd: int) -> int:
    """The size of an open file in bytes; with `pread` the position is not used, and moving it costs a third of `fstat`."""
    return os.lseek(fd, 0, os.SEEK_END) if hasattr(os, "pread") else os.fstat(fd).st_size
