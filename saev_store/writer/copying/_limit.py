"""A limit on the bytes and requests per second of a copy."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Sequence
from typing import Any, cast

from saev_store.transport import Buffer, Sink, Transport


class Rate:
    """A limit that all who share it keep together; thread-safe.

    Args:
        bytes_per_s: Bytes read and written; None for no limit.
        requests_per_s: Requests of all kinds; None for no limit.
    """

    def __init__(self, bytes_per_s: float | None, requests_per_s: float | None) -> None:
        self._s_per_byte = 1 / bytes_per_s if bytes_per_s else 0.0
        self._s_per_request = 1 / requests_per_s if requests_per_s else 0.0
        self._lock, self._free_at = threading.Lock(), 0.0

    def take(self, nbytes: int, requests: int = 1) -> None:
        """Wait until so many bytes and requests are allowed."""
        with self._lock:
            now = time.monotonic()
            begin = max(now, self._free_at)
            self._free_at = begin + max(nbytes * self._s_per_byte, requests * self._s_per_request)
        if begin > now:
            time.sleep(begin - now)


class _Limited:
    """A transport whose requests keep to a rate."""

    def __init__(self, inner: Transport, rate: Rate) -> None:
        self._inner, self._rate = inner, rate

    def __getattr__(self, name: str) -> Any:  # noqa: ANN401  # of whatever type the other one's is
        found = getattr(self._inner, name)
        if name in {"read", "stat", "size", "list", "put", "create", "delete"}:
            self._rate.take(0)
        return found

    def at(self, path: str) -> _Limited:
        return _Limited(self._inner.at(path), self._rate)

    def get_ranges(self, path: str, *, starts: Sequence[int], ends: Sequence[int]) -> Sequence[Buffer]:
        self._rate.take(sum(ends) - sum(starts), len(starts))
        return self._inner.get_ranges(path, starts=starts, ends=ends)

    def open_sink(self, path: str, *, used_nbytes: int, file_nbytes: int, resume: bool = False) -> Sink:
        sink = self._inner.open_sink(path, used_nbytes=used_nbytes, file_nbytes=file_nbytes, resume=resume)
        write = sink.write

        def limited_write(offset: int, buffers: Sequence[memoryview], done: Callable[[], object] | None = None) -> None:
            self._rate.take(sum(buffer.nbytes for buffer in buffers))
            write(offset, buffers, done)

        sink.write = limited_write
        return sink


Transport.register(_Limited)


def limited(transport: Transport, rate: Rate) -> Transport:
    """The same transport, whose requests keep to a rate."""
    return cast("Transport", _Limited(transport, rate))
