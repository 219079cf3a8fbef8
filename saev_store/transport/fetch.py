"""Fetch byte ranges of one file in as few requests as make sense: the one way from ranges to bytes.

`fetch_ranges` takes ranges in any order and gives the bytes of each. `fetch` takes ranges that `coalesce` has merged
already, as the plan of a read has them.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from itertools import pairwise

import numpy as np

from saev_store.core.coalesce import Spans, coalesce
from saev_store.core.layout import IntArray
from saev_store.transport import Buffer, ReadCost, Transport

#: Bytes that are requested, and not yet handed out, at a time.
IN_FLIGHT_BYTES = 256 << 20


def request_sizes(cost: ReadCost, spans: Spans) -> IntArray:
    """Bytes of each request that `fetch` makes for `spans`.

    >>> spans = Spans(np.array([0]), np.array([250]), np.array([0, 1]))
    >>> request_sizes(ReadCost(0, 100), spans).tolist()
    [100, 100, 50]
    """
    _, starts, ends = _cut(spans, cost.max_request_bytes)
    return ends - starts


def fetch(transport: Transport, path: str, spans: Spans) -> Iterator[tuple[int, memoryview]]:
    """The bytes of merged ranges, in order, as (number of the span, its bytes).

    Spans longer than the transport's `max_request_bytes` are fetched in several requests at once, and joined. At most
    about `IN_FLIGHT_BYTES` are requested before the first of them are handed out.

    Raises:
        NotFoundError: there is no such file.
        CorruptShardError: the file ends before a span does.
        TransportError: it cannot be read.
    """
    numbers, starts, ends = _cut(spans, transport.cost.max_request_bytes)
    batch_of = np.cumsum(ends - starts) // IN_FLIGHT_BYTES
    bounds = [0, *(np.flatnonzero(np.diff(batch_of)) + 1).tolist(), len(starts)]
    held: list[memoryview] = []
    for lo, hi in pairwise(bounds):
        if lo == hi:
            continue
        buffers = transport.get_ranges(path, starts=starts[lo:hi].tolist(), ends=ends[lo:hi].tolist())
        for at, buffer in enumerate(buffers, start=lo):
            held.append(memoryview(buffer))
            if at + 1 == len(numbers) or numbers[at + 1] != numbers[at]:
                yield int(numbers[at]), held[0] if len(held) == 1 else memoryview(b"".join(held))
                held = []


def fetch_ranges(transport: Transport, path: str, starts: Sequence[int], ends: Sequence[int]) -> Sequence[Buffer]:
    """The bytes of each range, in the order of the ranges; neighbours share requests where that is cheaper.

    Args:
        transport: Where the file is.
        path: The file.
        starts: First bytes, in any order; ranges may overlap and repeat.
        ends: One past the last bytes.

    Returns:
        Read-only memory. Of a mapped file these are views; elsewhere ranges that shared a request share its memory.

    Raises:
        As `fetch`.

    >>> from saev_store.transport import MemoryTransport
    >>> [bytes(part) for part in fetch_ranges(MemoryTransport({"a": b"0123456789"}), "a", [7, 0], [9, 3])]
    [b'78', b'012']
    """
    cost = transport.cost
    if len(starts) == 0:
        return []
    if math.isinf(cost.max_gap_bytes) or (len(starts) == 1 and ends[0] - starts[0] <= cost.max_request_bytes):
        return transport.get_ranges(path, starts=starts, ends=ends)
    low, high = np.asarray(starts, dtype=np.int64), np.asarray(ends, dtype=np.int64)
    order = np.argsort(low, kind="stable")
    low, high = low[order], high[order]
    spans = coalesce(low, high, max_gap_bytes=cost.max_gap_bytes, max_request_bytes=cost.max_request_bytes)
    found = [memoryview(b"")] * len(order)
    for number, view in fetch(transport, path, spans):
        first, last, base = int(spans.first[number]), int(spans.first[number + 1]), int(spans.starts[number])
        bounds = zip(
            order[first:last].tolist(), (low[first:last] - base).tolist(), (high[first:last] - base).tolist(),
            strict=True,
        )  # fmt: skip
        for at, begin, end in bounds:
            found[at] = view[begin:end]
    return found


def map_check(transport: Transport) -> Callable[[str, int], None]:
    """What compares the file behind a map with its size, by path and the bytes needed, before bytes are copied out of it.

    It raises `CorruptShardError` for a file that was cut; it does nothing for transports that map no files.
    """
    return getattr(transport, "check_mapped", _check_nothing)


def _check_nothing(path: str, nbytes: int) -> None:
    """Of files that are not mapped; by name, so that what reads them can be pickled."""
    del path, nbytes


def _cut(spans: Spans, longest: float) -> tuple[IntArray, IntArray, IntArray]:
    """Requests of at most `longest` bytes: the number of their span, first bytes, ends."""
    lengths = spans.ends - spans.starts
    numbers = np.arange(len(spans), dtype=np.int64)
    if len(spans) == 0 or int(lengths.max()) <= longest:
        return numbers, spans.starts, spans.ends
    step = max(1, int(longest))
    n_parts = np.maximum(-(-lengths // step), 1)
    numbers = np.repeat(numbers, n_parts)
    within = np.arange(len(numbers)) - np.repeat(np.cumsum(n_parts) - n_parts, n_parts)
    starts = spans.starts[numbers] + within * step
    return numbers, starts, np.minimum(starts + step, spans.ends[numbers])
