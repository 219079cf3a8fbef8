"""Merged requests cover exactly what was asked for, and merge no more and no less than the rule says."""

from __future__ import annotations

import math

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from saev_store.core.coalesce import coalesce

ranges = st.lists(st.tuples(st.integers(0, 500), st.integers(1, 40)), max_size=40).map(
    lambda pairs: sorted((start, start + size) for start, size in pairs)
)
limits = st.one_of(st.integers(0, 100), st.just(math.inf))


def dull(wanted: list[tuple[int, int]], gap: float, request: float) -> list[tuple[int, int, int]]:
    """One range after the other: (start, end, how many)."""
    spans: list[tuple[int, int, int]] = []
    runs: list[list[tuple[int, int]]] = []
    reach = 0
    for start, end in wanted:
        if runs and start - reach <= gap:
            runs[-1].append((start, end))
        else:
            runs.append([(start, end)])
        reach = max(reach, end)
    reach = previous = 0
    for run in runs:
        group: list[tuple[int, int]] = []
        for item in run:
            reach = max(reach, item[1])
            if group and reach - group[0][0] > request:
                spans.append((group[0][0], previous, len(group)))
                group = []
            group.append(item)
            previous = reach
        spans.append((group[0][0], previous, len(group)))
    return spans


@given(ranges, limits, limits)
def test_spans_equal_the_dull_loop(wanted: list[tuple[int, int]], gap: float, request: float) -> None:
    starts = np.array([start for start, _ in wanted], dtype=np.int64)
    ends = np.array([end for _, end in wanted], dtype=np.int64)
    spans = coalesce(starts, ends, max_gap_bytes=gap, max_request_bytes=request)
    found = list(zip(spans.starts.tolist(), spans.ends.tolist(), np.diff(spans.first).tolist(), strict=True))
    assert found == dull(wanted, gap, request)
    assert len(spans) == len(found)


def test_nothing_asked_is_no_request() -> None:
    none = np.zeros(0, dtype=np.int64)
    spans = coalesce(none, none, max_gap_bytes=0, max_request_bytes=1)
    assert len(spans) == 0
    assert spans.first.tolist() == [0]


def test_free_gaps_make_one_span() -> None:
    starts = np.array([0, 2**40, 2**62], dtype=np.int64)
    spans = coalesce(starts, starts + 5, max_gap_bytes=math.inf, max_request_bytes=math.inf)
    assert (spans.starts.tolist(), spans.ends.tolist()) == ([0], [2**62 + 5])


def spans_of(wanted: list[tuple[int, int]], gap: float, request: float) -> tuple[list[tuple[int, int]], list[int]]:
    starts, ends = (np.array(column, dtype=np.int64) for column in zip(*wanted, strict=True))
    spans = coalesce(starts, ends, max_gap_bytes=gap, max_request_bytes=request)
    assert {array.dtype for array in (spans.starts, spans.ends, spans.first)} == {np.dtype(np.int64)}
    return list(zip(spans.starts.tolist(), spans.ends.tolist(), strict=True)), spans.first.tolist()


def test_a_gap_is_merged_up_to_its_price_and_a_request_grows_up_to_its_bound() -> None:
    wanted = [(10, 20), (27, 30), (30, 40)]
    assert spans_of(wanted, 7, 30) == ([(10, 40)], [0, 3])
    assert spans_of(wanted, 6, 30) == ([(10, 20), (27, 40)], [0, 1, 3])
    assert spans_of(wanted, 7, 29) == ([(10, 30), (30, 40)], [0, 2, 3])
    assert spans_of(wanted, 7, 20) == ([(10, 30), (30, 40)], [0, 2, 3])
    assert spans_of(wanted, 7, 19) == ([(10, 20), (27, 40)], [0, 1, 3])
    assert spans_of(wanted, 7, 1) == ([(10, 20), (27, 30), (30, 40)], [0, 1, 2, 3])
    # A later run is cut, an earlier one is not, and the other way round.
    assert spans_of([(0, 5), (50, 60), (60, 70)], 0, 10) == ([(0, 5), (50, 60), (60, 70)], [0, 1, 2, 3])
    assert spans_of([(0, 10), (10, 20), (50, 55)], 0, 10) == ([(0, 10), (10, 20), (50, 55)], [0, 1, 2, 3])


def test_no_ranges_are_no_spans_of_the_same_types() -> None:
    none = np.zeros(0, dtype=np.int64)
    spans = coalesce(none, none, max_gap_bytes=0, max_request_bytes=1)
    assert {array.dtype for array in (spans.starts, spans.ends, spans.first)} == {np.dtype(np.int64)}
    assert (spans.starts.size, spans.ends.size) == (0, 0)
