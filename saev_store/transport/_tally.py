"""What a transport has done so far, counted where it is done."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

from saev_store._runtime.locks import ForkSafeLock
from saev_store.transport.base import Counters


class Tally:
    """Counts of one client, shared by all transports below it; thread-safe. A pickle starts again from zero."""

    def __init__(self) -> None:
        self._lock = ForkSafeLock()
        self._operations: Counter[str] = Counter()
        self._requests = self._read = self._written = 0

    def __reduce__(self) -> tuple[type[Tally], tuple[()]]:
        return Tally, ()

    def add(
        self, operation: str, *, read: int = 0, written: int = 0, requests: int = 1, calls: int | None = None
    ) -> None:
        """Count `requests` of one kind and the bytes that they moved, under their name as many (or as `calls`)."""
        with self._lock:
            self._requests += requests
            self._operations[operation] += requests if calls is None else calls
            self._read += read
            self._written += written

    @property
    def counters(self) -> Counters:
        """A snapshot."""
        with self._lock:
            return Counters(self._requests, self._read, self._written, dict(self._operations))

    def reset(self) -> None:
        """Start again from zero."""
        with self._lock:
            self._operations.clear()
            self._requests = self._read = self._written = 0


def count_ranges(tally: Tally, starts: Sequence[int], ends: Sequence[int]) -> None:
    """Count the ranges that are not empty as a request each."""
    lengths = [end - start for start, end in zip(starts, ends, strict=True) if end > start]
    tally.add("get_ranges", read=sum(lengths), requests=len(lengths))
