"""Counts of operations, for tests and profiling."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TypeVar, cast

from saev_store.transport._tally import Tally
from saev_store.transport._wrap import Wrapper
from saev_store.transport.base import Buffer, Counters, Transport

T = TypeVar("T")

_WRITING = {"put", "create", "sink.write"}


class CountingTransport(Wrapper):
    """Counts operations, failed ones included, separately from the wrapped transport's own counters.

    In `operations` a call of `get_ranges` is one, however many ranges travel with it.

    Thread-safe. Transports opened below it count together. A pickle starts again from zero.

    >>> from saev_store.transport import MemoryTransport
    >>> transport = CountingTransport(MemoryTransport({"a.bin": b"0123456789"}))
    >>> _ = transport.get_ranges("a.bin", starts=[0, 4], ends=[3, 6])
    >>> transport.counters.requests, transport.counters.bytes_read, transport.counters.operations
    (2, 5, {'get_ranges': 1})
    """

    def __init__(self, inner: Transport) -> None:
        super().__init__(inner)
        self._tally = Tally()

    @property
    def counters(self) -> Counters:
        """A snapshot."""
        return self._tally.counters

    def reset(self) -> None:
        """Start again from zero."""
        self._tally.reset()

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
            if operation in _WRITING:
                self._tally.add(operation, requests=requests, written=moved, calls=1)
            else:
                self._tally.add(operation, requests=requests, read=moved, calls=1)
