"""Scattered ranges of one file, fetched together."""

from __future__ import annotations

import numpy as np

from saev_store.coalesce import Spans, coalesce
from saev_store.layout import IntArray
from saev_store.transport import Buffer, Transport

#: Ranges of one call travel side by side, so that the wait for one is shared by about this many: reading over a gap is
#: worth that much less than the transport's cost says for requests one after the other.
_SIDE_BY_SIDE = 32


def fetch(
    transport: Transport, path: str, starts: IntArray, ends: IntArray
) -> tuple[Spans, list[memoryview], IntArray]:
    """The bytes of many ranges, in as few requests as make sense.

    Args:
        transport: Where the file is.
        path: The file.
        starts: First bytes, in any order.
        ends: One past the last bytes.

    Returns:
        The spans that were read, their bytes, and the order of the ranges that `spans.first` refers to.
    """
    order = np.argsort(starts, kind="stable")
    cost = transport.cost
    spans = coalesce(
        starts[order],
        ends[order],
        max_gap_bytes=cost.max_gap_bytes / _SIDE_BY_SIDE,
        max_request_bytes=cost.max_request_bytes,
    )
    parts: list[Buffer] = list(
        transport.get_ranges(path, starts=spans.starts.tolist(), ends=spans.ends.tolist()) if len(spans) else []
    )
    return spans, [memoryview(part) for part in parts], order
