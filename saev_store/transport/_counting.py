"""How many requests an operation costs: for tests of what we promise, and for finding out where time goes."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TypeVar, cast

from saev_store.transport._base import Buffer, Transport
from saev_store.transport._locks import ForkSafeLock
from saev_store.transport._wrap import Wrapper

T = TypeVar("T")

_WRITING = {"put", "create", "sink.write"}


@dataclass(frozen=True, slots=True)
class Counters:
    """What has passed a `CountingTransport` so far.

    Attributes:
        requests: Operations, where each range of a `get_ranges` that is not empty is one.
        bytes_read: Bytes handed out (of a mapped file: made visible).
        bytes_written: Bytes taken in.
        operations: Calls by name, such as `{"read": 2, "get_ranges": 1, "sink.write": 3}`.
    """

    requests: int = 0
    bytes_read: int = 0
    bytes_written: int = 0
    operations: Mapping[str, int] = field(default_factory=dict[str, int])


class _Tally:
    def __init__(self) -> None:
        self.lock = ForkSafeLock()
        self.operations: Counter[str] = Counter()
        self.requests = self.bytes_read = self.bytes_written = 0


class CountingTransport(Wrapper):
    """Counts the operations that pass, failed ones included; thread-safe. Transports opened below it count together.

    A pickle starts again from zero.

    >>> from saev_store.transport import MemoryTransport
    >>> transport = CountingTransport(MemoryTransport({"a.bin": b"0123456789"}))
    >>> _ = transport.get_ranges("a.bin", starts=[0, 4], ends=[3, 6])
    >>> transport.counters.requests, transport.counters.bytes_read, transport.counters.operations
    (2, 5, {'get_ranges': 1})
    """

    def __init__(self, inner: Transport) -> None:
        super().__init__(inner)
        self._tally = _Tally()

    @property
    def counters(self) -> Counters:
        """A snapshot."""
        tally = self._tally
        with tally.lock:
            return Counters(tally.requests, tally.bytes_read, tally.bytes_written, dict(tally.operations))

    def reset(self) -> None:
        """Start again from zero."""
        tally = self._tally
        with tally.lock:
            tally.operations.clear()
            tally.requests = tally.bytes_read = tally.bytes_written = 0

    def _around(self, operation: str, nbytes: int | None, call: Callable[[], T]) -> T:
        requests, moved = 1, 0
        try:
            result = call()
            moved = nbytes or 0
            if operation == "get_ranges":
                lengths = [len(part) for part in cast("Sequence[Buffer]", result)]
                requests, moved = sum(length > 0 for length in lengths), sum(lengths)
            elif nbytes is None:
                moved = len(cast("bytes", result))
            return result
        finally:
            tally = self._tally
            with tally.lock:
                tally.operations[operation] += 1
                tally.requests += requests
                if operation in _WRITING:
                    tally.bytes_written += moved
                else:
                    tally.bytes_read += moved
