"""What a transport has done so far, counted where it is done."""

from __future__ import annotations

from collections import Counter

from saev_store.transport._counting import Counters
from saev_store.transport._locks import ForkSafeLock


class Tally:
    """Counts of one client, shared by all transports below it; thread-safe. A pickle starts again from zero."""

    def __init__(self) -> None:
        self._lock = ForkSafeLock()
        self._operations: Counter[str] = Counter()
        self._read = self._written = 0

    def add(self, operation: str, *, read: int = 0, written: int = 0, requests: int = 1) -> None:
        """Count `requests` of one kind and the bytes that they moved."""
        with self._lock:
            self._operations[operation] += requests
            self._read += read
            self._written += written

    @property
    def counters(self) -> Counters:
        """A snapshot."""
        with self._lock:
            return Counters(self._operations.total(), self._read, self._written, dict(self._operations))
