"""Simulated network latency, for tests and benchmarks of read planning."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from typing import TypeVar, cast

from saev_store.errors import ArgumentError
from saev_store.transport._wrap import Wrapper
from saev_store.transport.base import Buffer, ReadCost, Transport

T = TypeVar("T")


class LatencyTransport(Wrapper):
    """Delays every operation, like a network; the ranges of one `get_ranges` travel together.

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
        """Without a bandwidth that of `inner`; with one, a gap is worth what travels during the latency."""
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
