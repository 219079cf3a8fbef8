"""Which bytes of a file are there."""

from __future__ import annotations

import threading

from saev_store.errors import ArgumentError


class Written:
    """Which bytes of a file were written, as disjoint intervals; thread-safe."""

    def __init__(self) -> None:
        self._intervals: list[tuple[int, int]] = []
        self._lock = threading.Lock()

    def add(self, start: int, end: int) -> None:
        """Bytes `start` to `end` are there."""
        with self._lock:
            merged: list[tuple[int, int]] = []
            for low, high in self._intervals:
                if high < start or end < low:
                    merged.append((low, high))
                else:
                    start, end = min(start, low), max(end, high)
            self._intervals = sorted([*merged, (start, end)])

    def prefix(self) -> int:
        """How many leading bytes are there."""
        with self._lock:
            return self._intervals[0][1] if self._intervals and self._intervals[0][0] == 0 else 0

    def check_complete(self, used_nbytes: int, *, where: str) -> None:
        """Refuse to commit a file with holes, which would read as vectors of zeros."""
        if (prefix := self.prefix()) < used_nbytes:
            raise ArgumentError(
                f"only the first {prefix:,} of {used_nbytes:,} bytes were written without a gap",
                where=where,
                remedy="Write the rest before `commit` (after a resume, `keep` what was verified), or `abort`.",
            )
