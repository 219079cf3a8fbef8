"""Rate limiting by bytes/s and requests/s."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Sequence
from typing import TypeVar, cast

from saev_store.errors import ArgumentError
from saev_store.transport._wrap import Wrapper
from saev_store.transport.base import Buffer, Transport

T = TypeVar("T")

#: What travels in one request; longer ranges and files are cut into pieces of about this length.
_REQUEST_BYTES = 8 << 20


class Rate:
    """A limit on bytes/s and requests/s, shared by all that it limits together; thread-safe.

    Args:
        bytes_per_s: Bytes read and written; None for no limit.
        requests_per_s: Requests of all kinds; None for no limit.

    Raises:
        ArgumentError: a limit is not positive.
    """

    def __init__(self, bytes_per_s: float | None = None, requests_per_s: float | None = None) -> None:
        for name, limit in (("bytes_per_s", bytes_per_s), ("requests_per_s", requests_per_s)):
            if limit is not None and not limit > 0:
                raise ArgumentError(f"{limit} is not a limit: it must be more than 0", where=name)
        self._limits = (bytes_per_s, requests_per_s)
        self._s_per_byte = 1 / bytes_per_s if bytes_per_s else 0.0
        self._s_per_request = 1 / requests_per_s if requests_per_s else 0.0
        self._lock = threading.Lock()
        self._free_at = 0.0

    def __reduce__(self) -> tuple[object, ...]:
        return Rate, self._limits

    def take(self, nbytes: int, requests: float) -> None:
        """Wait until so many bytes and requests are allowed."""
        cost_s = max(nbytes * self._s_per_byte, requests * self._s_per_request)
        with self._lock:
            now = time.monotonic()
            begin = max(now, self._free_at)
            self._free_at = begin + cost_s
        if begin > now:
            time.sleep(begin - now)


class LimitTransport(Wrapper):
    """A transport whose bytes/s and requests/s stay below a rate, on average.

    Args:
        inner: Does the work.
        rate: Shared by transports that are limited together, such as the two ends of a copy.
    """

    def __init__(self, inner: Transport, rate: Rate) -> None:
        super().__init__(inner)
        self._rate = rate

    def _arguments(self) -> tuple[object, ...]:
        return (self._rate,)

    def get_ranges(self, path: str, *, starts: Sequence[int], ends: Sequence[int]) -> Sequence[Buffer]:
        """Waits for all ranges together, before the first."""
        lengths = [end - start for start, end in zip(starts, ends, strict=False) if end > start]
        self._rate.take(sum(lengths), sum(-(-length // _REQUEST_BYTES) for length in lengths))
        return self._inner.get_ranges(path, starts=starts, ends=ends)

    def _around(self, operation: str, nbytes: int | None, call: Callable[[], T]) -> T:
        if nbytes is not None:
            # A part of a file is sent when enough was written: a request for so many bytes.
            self._rate.take(nbytes, nbytes / _REQUEST_BYTES if operation == "sink.write" else 1)
            return call()
        result = call()
        self._rate.take(len(cast("bytes", result)), 1)
        return result
