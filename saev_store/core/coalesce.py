"""Which byte ranges are read together, decided before anything is read. Pure."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from saev_store.core.layout import IntArray


class Spans(NamedTuple):
    """Requests from `starts` to `ends` that cover sorted ranges: span `i` covers the ranges `first[i]` to `first[i + 1]`."""

    starts: IntArray
    ends: IntArray
    first: IntArray


def coalesce(starts: IntArray, ends: IntArray, *, max_gap_bytes: float, max_request_bytes: float) -> Spans:
    """Merge ranges of one file whose gap is small, as long as the request stays small; a longer range stays as it is.

    Starts ascend; ranges may touch, overlap and repeat.
    """
    reach = np.maximum.accumulate(ends)
    breaks = np.flatnonzero(starts[1:] - reach[:-1] > max_gap_bytes) + 1
    first: list[int] = []
    for lo, hi in zip([0, *breaks.tolist()], [*breaks.tolist(), len(starts)], strict=True):
        at = lo
        while at < hi:
            first.append(at)
            # As many ranges as fit into one request, at least one. `reach` ascends, so this is a search.
            limit = int(starts[at]) + max_request_bytes
            at = hi if reach[hi - 1] <= limit else max(at + 1, lo + int(np.searchsorted(reach[lo:hi], limit, "right")))
    bounds = np.array([*first, len(starts)], dtype=np.int64)
    return Spans(starts[bounds[:-1]], reach[bounds[1:] - 1] if len(starts) else ends, bounds)
