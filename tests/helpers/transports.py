"""Transports around another one, for tests and benchmarks: they count its operations, or delay them."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from typing import TypeVar, cast

from saev_store.errors import ArgumentError
from saev_store.transport import Buffer, Counters, ReadCost, Transport
from saev_store.transport.checks import RequestCounter
from saev_store.transport.limit import Wrapper

T = TypeVar("T")

_WRITING = {"put", "create", "sink.write"}


class CountingTransport(Wrapper):
    """Counts operations, failed ones included, separately from the wrapped transport's own counters.

    In `operations` a call of `get_ranges` is one, however many ranges it has.

    Thread-safe. Transports opened below it count together. A pickle starts again from zero.
    """

    def __init__(self, inner: Transport) -> None:
        super().__init__(inner)
        self._counts = [RequestCounter()]  # a list, so that transports below share what `reset` puts here

    @property
    def counters(self) -> Counters:
        """A snapshot."""
        return self._counts[0].counters

    def reset(self) -> None:
        """Start again from zero."""
        self._counts[0] = RequestCounter()

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
            read, written = (0, moved) if operation in _WRITING else (moved, 0)
            self._counts[0].add(operation, requests=requests, read=read, written=written, calls=1)


class LatencyTransport(Wrapper):
    """Delays every operation, like a network; the ranges of one `get_ranges` are delayed once.

    Args:
        inner: Does the work.
        latency_s: Seconds until the first byte.
        bytes_per_s: Bandwidth; None for no limit. With it, `cost` is that of such a network.

    Raises:
        ArgumentError: a number is negative, or `bytes_per_s` is 0.
    """

    def __init__(self, inner: Transport, latency_s: float, bytes_per_s: float | None = None) -> None:
        if not latency_s >= 0:
            raise ArgumentError(f"{latency_s} is not a delay: it is at least 0 seconds", where="latency_s")
        if bytes_per_s is not None and not bytes_per_s > 0:
            raise ArgumentError(f"{bytes_per_s} is not a bandwidth: it is more than 0", where="bytes_per_s")
        super().__init__(inner)
        self._latency_s, self._bytes_per_s = latency_s, bytes_per_s

    def _arguments(self) -> tuple[object, ...]:
        return (self._latency_s, self._bytes_per_s)

    @property
    def cost(self) -> ReadCost:
        """Without a bandwidth that of `inner`; with one, a gap costs as much as what is sent during the latency."""
        if self._bytes_per_s is None:
            return self._inner.cost
        return ReadCost(self._latency_s * self._bytes_per_s, self._inner.cost.max_request_bytes)

    def _around(self, operation: str, nbytes: int | None, call: Callable[[], T]) -> T:
        result = call()
        if operation == "get_ranges":
            nbytes = sum(len(part) for part in cast("Sequence[Buffer]", result))
        elif nbytes is None:
            nbytes = len(cast("bytes", result))
        time.sleep(self._latency_s + (nbytes / self._bytes_per_s if self._bytes_per_s else 0))
        return result
