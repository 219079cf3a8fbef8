"""Sizes of the parts of an upload, and memory for them."""

from __future__ import annotations

from collections import deque

#: A part; S3 wants at least 5 MiB and at most 10,000 parts.
PART_BYTES, _MOST_PARTS = 8 << 20, 9_000
#: Parts of one file that are under way at the same time: with the one being filled, all the memory a sink takes.
PARTS_IN_FLIGHT = 8


def part_bytes_of(file_nbytes: int) -> int:
    """Length of the parts of a file of this size.

    >>> part_bytes_of(100 << 20) >> 20, part_bytes_of(90_000 << 20) >> 20
    (8, 10)
    """
    return max(PART_BYTES, -(-file_nbytes // _MOST_PARTS))


class Buffers:
    """Reuses memory for parts: fresh memory costs more than filling it."""

    def __init__(self) -> None:
        self._idle: deque[bytearray] = deque(maxlen=PARTS_IN_FLIGHT + 2)

    def borrow(self, nbytes: int) -> bytearray:
        """A buffer of that length with arbitrary content."""
        while self._idle:
            try:
                buffer = self._idle.pop()
            except IndexError:  # another thread was faster
                break
            if len(buffer) == nbytes:
                return buffer
        return bytearray(nbytes)

    def give_back(self, buffer: bytearray | bytes) -> None:
        """Return a buffer that is no longer read or written."""
        if isinstance(buffer, bytearray):  # `bytes` are zeros that pad a file, and may still be in flight
            self._idle.append(buffer)

    def clear(self) -> None:
        """Free unused buffers."""
        self._idle.clear()
