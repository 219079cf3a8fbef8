"""Fetching many byte ranges of one file: the one function that formats read scattered bytes with."""

from __future__ import annotations

import math

import numpy as np

from saev_store.coalesce import coalesce
from saev_store.layout import IntArray
from saev_store.transport import Transport

#: Ranges of one call travel side by side and share one wait among about this many. Reading over a gap is worth that
#: much less than the transport's cost says for requests one after the other.
_PARALLEL_RANGES = 32


def is_resident(transport: Transport) -> bool:
    """Whether ranges are views of memory: a whole file is one array, and nothing is fetched."""
    return math.isinf(transport.cost.max_gap_bytes) and math.isinf(transport.cost.max_request_bytes)


def fetch_ranges(transport: Transport, path: str, starts: IntArray, ends: IntArray) -> list[memoryview]:
    """Fetch ranges of a file; near ranges share a request where that is cheaper.

    Args:
        transport: Where the file is.
        path: The file.
        starts: First bytes, int64, in any order.
        ends: One past the last bytes.

    Returns:
        The bytes of each range, in the order of the arguments; ranges of one request share its memory.
    """
    if len(starts) <= 1:
        return [memoryview(part) for part in transport.get_ranges(path, starts=starts.tolist(), ends=ends.tolist())]
    order = np.argsort(starts, kind="stable")
    cost = transport.cost
    spans = coalesce(
        starts[order],
        ends[order],
        max_gap_bytes=cost.max_gap_bytes / _PARALLEL_RANGES,
        max_request_bytes=cost.max_request_bytes,
    )
    buffers = transport.get_ranges(path, starts=spans.starts.tolist(), ends=spans.ends.tolist())
    found = [memoryview(b"")] * len(starts)
    for span, buffer in enumerate(buffers):
        base, view = int(spans.starts[span]), memoryview(buffer)
        for i in order[spans.first[span] : spans.first[span + 1]].tolist():
            found[i] = view[int(starts[i]) - base : int(ends[i]) - base]
    return found
