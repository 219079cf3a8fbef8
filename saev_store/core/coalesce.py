"""Which byte ranges are read together: the plan of a read, made before anything is read.

Pure. The caller sorts its ranges; what comes back says which neighbours share one request.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from saev_store.core.layout import IntArray


@dataclass(frozen=True, slots=True)
class Spans:
    """Requests that cover sorted ranges: span `i` covers the ranges `first[i]` to `first[i + 1]`.

    Attributes:
        starts: First byte of each span, int64.
        ends: One past the last byte of each span, int64.
        first: Index of the first range that each span covers, and one past the last range: one longer than `starts`.
    """

    starts: IntArray
    ends: IntArray
    first: IntArray

    def __len__(self) -> int:
        return len(self.starts)


def coalesce(starts: IntArray, ends: IntArray, *, max_gap_bytes: float, max_request_bytes: float) -> Spans:
    """Merge neighbouring half-open ranges whose gap is small, as long as the request stays small.

    Args:
        starts: First bytes, ascending; ranges may touch, overlap and repeat.
        ends: One past the last bytes.
        max_gap_bytes: The largest number of unneeded bytes between two ranges that are still merged.
        max_request_bytes: A merged span never grows past this; a single range that is longer stays as it is.

    >>> spans = coalesce(np.array([0, 10, 100]), np.array([10, 20, 130]), max_gap_bytes=5, max_request_bytes=64)
    >>> list(zip(spans.starts.tolist(), spans.ends.tolist())), spans.first.tolist()
    ([(0, 20), (100, 130)], [0, 2, 3])
    """
    n = len(starts)
    if n == 0:
        empty = np.zeros(0, np.int64)
        return Spans(empty, empty, np.zeros(1, np.int64))
    reach = np.maximum.accumulate(ends)
    breaks = np.flatnonzero(starts[1:] - reach[:-1] > max_gap_bytes) + 1
    first = np.concatenate(([0], breaks, [n])).astype(np.int64)
    if np.any(reach[first[1:] - 1] - starts[first[:-1]] > max_request_bytes):
        first = _cut_long_runs(starts, reach, first, max_request_bytes)
    return Spans(starts[first[:-1]], reach[first[1:] - 1], first)


def _cut_long_runs(starts: IntArray, reach: IntArray, first: IntArray, max_request_bytes: float) -> IntArray:
    cuts: list[int] = []
    for lo, hi in zip(first[:-1].tolist(), first[1:].tolist(), strict=True):
        at = lo
        while at < hi:
            cuts.append(at)
            # Greedy: as many ranges as fit into one request, at least one. `reach` ascends, so this is a search.
            limit = int(starts[at]) + max_request_bytes
            at = max(at + 1, lo + int(np.searchsorted(reach[lo:hi], limit, side="right")))
    return np.array([*cuts, first[-1]], dtype=np.int64)
