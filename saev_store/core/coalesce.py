"""Which byte ranges are read together, decided before anything is read. Pure."""

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
    """Merge neighbouring half-open ranges of one file whose gap is small, as long as the request stays small.

    Args:
        starts: First bytes, ascending; ranges may touch, overlap and repeat.
        ends: One past the last bytes.
        max_gap_bytes: The largest number of unneeded bytes between two ranges that are still merged.
        max_request_bytes: A merged span never grows past this; a single range that is longer stays as it is.

    >>> spans = coalesce(np.array([0, 10, 100]), np.array([10, 20, 130]), max_gap_bytes=5, max_request_bytes=64)
    >>> list(zip(spans.starts.tolist(), spans.ends.tolist())), spans.first.tolist()
    ([(0, 20), (100, 130)], [0, 2, 3])
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
