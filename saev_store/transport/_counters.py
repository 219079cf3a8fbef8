"""Counts requests and bytes where they are made."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

from saev_store._runtime.locks import ForkSafeLock
from saev_store.transport.base import Counters


class RequestCounter:
    """Counts of one client, shared by all transports below it; thread-safe. A pickle starts again from zero."""

    def __init__(self) -> None:
        self._lock = ForkSafeLock()
        self._operations: Counter[str] = Counter()
        self._requests = self._read = self._written = 0

    def __reduce__(self) -> tuple[type[RequestCounter], tuple[()]]:
        return RequestCounter, ()

    def add(
        self, operation: str, *, read: int = 0, written: int = 0, requests: int = 1, calls: int | None = None
    ) -> None:
        """Count requests of one kind and their bytes; `operations` counts `calls` instead of `requests` where given."""
        with self._lock:
            self._requests += requests
            self._operations[operation] += requests if calls is None else calls
            self._read += read
            self._written += written

    def add_ranges(self, starts: Sequence[int], ends: Sequence[int]) -> None:
        """Count one request for each range that is not empty."""
        lengths = [end - start for start, end in zip(starts, ends, strict=True) if end > start]
        self.add("get_ranges", read=sum(lengths), requests=len(lengths))

    @property
    def counters(self) -> Counters:
        """A snapshot."""
        with self._lock:
            return Counters(self._requests, self._read, self._written, dict(self._operations))
