"""Plans carried out on a dense array, step by step: every read gives what NumPy gives, from the vectors that it needs."""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterable, Sequence

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from saev_store.core import plan as plan_module
from saev_store.core.coalesce import coalesce
from saev_store.core.indexing import Axis, Block, Points, outer_block, parse_key
from saev_store.core.layout import Layout
from saev_store.core.plan import MappedBox, Planner, PlanPart, Runs, pieces
from saev_store.transport import ReadCost

FREE, FAR = ReadCost(math.inf, math.inf), ReadCost(1 << 20, 1 << 20)
#: Three shards of 4, 4 and 3 examples; vectors of 12 bytes.
LAYOUT = Layout(11, (2, 5, 11), 4, True, 3, 4)
_, N_LAYERS, N_TOKENS, WIDTH = LAYOUT.shape
VECTOR = LAYOUT.vector_nbytes
DENSE = np.arange(1, math.prod(LAYOUT.shape) + 1, dtype=np.float32).reshape(LAYOUT.shape)
SHARDS = [DENSE[start : start + 4].reshape(-1, WIDTH) for start in (0, 4, 8)]
EXAMPLES: list[object] = [
    slice(None), slice(1, 9), slice(9, 1, -1), slice(None, None, 3), slice(None, None, -2), slice(0, 4), slice(10, 11),
    slice(5, 1, -3), 6, -1, np.array([8, 0, 8, 3]), np.array([5, 4]), np.array([7]),
]  # fmt: skip
LAYERS: list[object] = [slice(None), slice(1, 3), slice(None, None, 2), slice(None, None, -1), 1, np.array([2, 0])]
TOKENS: list[object] = [
    slice(None),
    slice(1, 4),
    slice(None, None, 2),
    slice(None, None, -1),
    0,
    3,
    np.array([4, 0, 4]),
]
COLUMNS: list[object] = [slice(None), slice(1, 3), slice(None, None, -1), np.array([2, 0, 2]), 1]
POINTS: list[tuple[object, ...]] = [
    ([10, 0, 5, 0], [2, 0, 1, 0]), ([10, 0, 5, 0], [2, 0, 1, 0], 3), ([10, 0, 5, 0], [2, 0, 1, 0], [4, 4, 0, 1], [0, 1, 2, 0]),
    ([[10], [1]], [2, 0, 1], 0, slice(None, None, -1)), ([[10], [1]], slice(None), [2, 0, 1], slice(1, 2)),
    ([[3]], [2], [4], slice(None)), ([3], [2], [4], [1]), ([1, 2, 3], [2], [4], 1), ([0, 1], [0, 1], slice(None), [0, 2]),
    (DENSE % 7 == 3,), (DENSE[..., 0] % 5 == 0,),
]  # fmt: skip


def positions(axis: Axis) -> np.ndarray:
    return np.array(list(axis)) if isinstance(axis, range) else axis


def carried_out(parts: Iterable[PlanPart], out_shape: Sequence[int]) -> np.ndarray:
    """The output of a plan, by the words of the docstrings."""
    out = np.full(out_shape, -1, dtype=np.float32)
    for part in parts:
        shards = [step.shard_idx for step in part.steps]
        assert shards == sorted(set(shards))
        if part.rows is None or (part.columns is None and not part.is_pointwise):
            target = out if part.rows is None else out.reshape(-1, WIDTH)[part.rows]
            for step in part.steps:
                carry_out(step, target)
            continue
        rows = np.full((part.rows.stop - part.rows.start, WIDTH), -1, dtype=np.float32)
        for step in part.steps:
            carry_out(step, rows)
        if part.is_pointwise:
            out.reshape(-1)[part.rows] = rows[np.arange(len(rows)), part.columns]
        else:
            assert part.columns is not None
            out.reshape(-1, len(positions(part.columns)))[part.rows] = rows[:, positions(part.columns)]
    return out


def carry_out(step: MappedBox | Runs, out: np.ndarray) -> None:
    shard, per_example = SHARDS[step.shard_idx], N_LAYERS * N_TOKENS
    if isinstance(step, MappedBox):
        assert step.highest == positions(step.axes[0]).max()
        out[step.place] = shard.reshape(-1, *LAYOUT.shape[1:])[np.ix_(*map(positions, step.axes))]
    else:
        assert step.first.min() >= 0
        assert step.highest == (step.first + step.n_vectors - 1).max() // per_example
        rows = out.reshape(-1, WIDTH)
        for first, place in zip(step.first.tolist(), step.rows.tolist(), strict=True):
            assert (rows[place : place + step.n_vectors] == -1).all()
            rows[place : place + step.n_vectors] = shard[first : first + step.n_vectors]


def blocks() -> Iterable[Block]:
    """Every choice of examples, layers and tokens, with a choice of columns each in turn."""
    turn = itertools.cycle(COLUMNS)
    for examples, layers, tokens in itertools.product(EXAMPLES, LAYERS, TOKENS):
        yield outer_block((examples, layers, tokens, next(turn)), LAYOUT.shape)


def test_block_of_any_choice_reads_what_numpy_selects(monkeypatch: pytest.MonkeyPatch) -> None:
    for cost, n_rows in itertools.product((FREE, FAR), (0, 5, 1000)):
        monkeypatch.setattr(plan_module, "PIECE_BYTES", n_rows * VECTOR)
        monkeypatch.setattr(plan_module, "RUNS_AT_ONCE", max(n_rows, 1))
        monkeypatch.setattr(plan_module, "DIRECT_BYTES", 4 * VECTOR)
        for block in blocks():
            parts = list(Planner(LAYOUT, is_mapped=cost is FREE).block(block))
            out = carried_out(parts, block.full_shape)
            np.testing.assert_array_equal(out, DENSE[np.ix_(*map(positions, block.axes))])
            # Far away runs are as long as can be, and rows that lose columns pass in pieces through bounded memory.
            least = math.prod(block.full_shape[1:3]) if cost is FREE else math.prod(block.full_shape[1:3]) * 8
            for part in parts:
                if part.columns is not None and part.rows is not None:
                    assert part.rows.stop - part.rows.start <= max(least, n_rows * (1 if cost is FREE else 8))


def test_block_of_neighbouring_tokens_is_read_in_the_longest_runs() -> None:
    for key, n_vectors, n_runs in [
        (np.s_[:], 15, 11), (np.s_[2:6], 15, 4), (np.s_[:, 1:], 10, 11), (np.s_[:, :, 1:], 4, 33), (np.s_[:, 1], 5, 11),
        (np.s_[:, ::2], 5, 22), (np.s_[:, 1, 2], 1, 11), (np.s_[:, :, ::2], 1, 99), (np.s_[:, [2, 0], 1:3], 2, 22),
        (np.s_[[4, 4, 0]], 15, 3), (np.s_[:, 1, ::-1], 1, 55),
    ]:  # fmt: skip
        block = parse_key(key, LAYOUT.shape)
        assert isinstance(block, Block)
        steps = [step for part in Planner(LAYOUT, is_mapped=False).block(block) for step in part.steps]
        assert all(isinstance(step, Runs) and step.n_vectors == n_vectors for step in steps)
        assert sum(len(step.first) for step in steps if isinstance(step, Runs)) == n_runs


def test_block_of_long_runs_of_a_map_is_read_straight_into_the_output(monkeypatch: pytest.MonkeyPatch) -> None:
    for key, nbytes, n_runs in [
        (np.s_[0:4], 4 * 15 * VECTOR, 1), (np.s_[1:3], 2 * 15 * VECTOR, 1), (np.s_[5], 15 * VECTOR, 1),
        (np.s_[0:4:2], 15 * VECTOR, 2), (np.s_[3::-1], 15 * VECTOR, 4), (np.s_[:4, 1], 5 * VECTOR, 4),
        (np.s_[:4, 1:], 10 * VECTOR, 4), (np.s_[:4, 1, 2:], 3 * VECTOR, 4), (np.s_[3, 1, 2], VECTOR, 1),
        (np.s_[:4, ::-1], None, 0), (np.s_[:4, ::2], None, 0), (np.s_[:4, 1, ::2], None, 0), (np.s_[:4, :, 1:], None, 0),
        (np.s_[:4, :2, :4], None, 0), (np.s_[:4, :, :, 1:], None, 0), (np.s_[:4, :, :, [0, 1, 2]], None, 0),
    ]:  # fmt: skip
        block = parse_key(key, LAYOUT.shape)
        assert isinstance(block, Block)

        def step(least: int, *, block: Block = block) -> object:
            monkeypatch.setattr(plan_module, "DIRECT_BYTES", least)
            ((found,), *_) = (part.steps for part in Planner(LAYOUT, is_mapped=True).block(block))
            return found

        assert isinstance(step(1), MappedBox if nbytes is None else Runs)
        if nbytes is not None:
            found = step(nbytes)
            assert isinstance(found, Runs)
            assert (len(found.first), found.n_vectors * VECTOR) == (n_runs, nbytes)
            assert isinstance(step(nbytes + 1), MappedBox)


def test_points_of_any_lists_read_what_numpy_selects(monkeypatch: pytest.MonkeyPatch) -> None:
    for cost, at_once, key in itertools.product((FREE, FAR), (0, 1, 2, 1000), POINTS):
        monkeypatch.setattr(plan_module, "PIECE_BYTES", at_once * VECTOR)
        points = parse_key(key, LAYOUT.shape)
        assert isinstance(points, Points)
        parts = list(Planner(LAYOUT, is_mapped=cost is FREE).points(points))
        np.testing.assert_array_equal(carried_out(parts, points.shape), DENSE[key])
        n, step = DENSE[key].size if points.last is None else DENSE[key].size // points.shape[-1], max(1, at_once)
        assert [part.rows for part in parts] == [slice(start, min(start + step, n)) for start in range(0, n, step)]


def test_plan_of_nothing_is_empty() -> None:
    none = np.zeros(0, dtype=np.int64)
    for cost in (FREE, FAR):
        planner = Planner(LAYOUT, is_mapped=cost is FREE)
        for axis, nothing in itertools.product(range(4), (slice(0, 0), none)):
            key: list[object] = [slice(None)] * 4
            key[axis] = nothing
            assert list(planner.block(outer_block(key, LAYOUT.shape))) == []
        assert list(planner.points(Points((none, none, none), range(3)))) == []
        assert planner.rows(none, none, none) == PlanPart([], slice(0, 0))


@given(st.lists(st.tuples(st.integers(0, 10), st.integers(0, 2), st.integers(0, 4)), min_size=1, max_size=20))
def test_rows_in_any_order_are_read_to_their_places(rows: list[tuple[int, int, int]]) -> None:
    example, layer, token = np.array(rows).T
    for cost in (FREE, FAR):
        part = Planner(LAYOUT, is_mapped=cost is FREE).rows(example, layer, token)
        assert part.rows == slice(0, len(rows))
        np.testing.assert_array_equal(carried_out([part], (len(rows), WIDTH)), DENSE[example, layer, token])
        assert [step.shard_idx for step in part.steps] == sorted(set((example // 4).tolist()))


def test_pieces_split_examples_by_shard() -> None:
    for examples, capacity in itertools.product(EXAMPLES, (1, 2, 3, 4, 10, 11, 12)):
        layout = Layout(11, (0,), 1, False, 1, capacity)
        axis = outer_block((examples, 0, 0, 0), layout.shape).axes[0]
        if not isinstance(axis, range):
            continue
        found, shards = np.full(len(axis), -1), []
        for piece in pieces(layout, axis):
            assert (found[piece.place] == -1).all()
            found[piece.place] = piece.shard_idx * capacity + positions(piece.examples)
            assert 0 <= min(piece.examples) <= max(piece.examples) < capacity
            shards.append(piece.shard_idx)
        np.testing.assert_array_equal(found, positions(axis))
        assert len(shards) == len(set(shards))


ranges = st.lists(st.tuples(st.integers(0, 500), st.integers(1, 40)), max_size=40).map(
    lambda pairs: sorted((start, start + size) for start, size in pairs)
)
limits = st.one_of(st.integers(0, 100), st.just(math.inf))


def dull(wanted: list[tuple[int, int]], gap: float, request: float) -> list[tuple[int, int, int]]:
    """One range after the other: (start, end, how many). Runs without wide gaps first, which are then cut."""
    runs: list[list[tuple[int, int]]] = []
    reach = 0
    for start, end in wanted:
        if runs and start - reach <= gap:
            runs[-1].append((start, end))
        else:
            runs.append([(start, end)])
        reach = max(reach, end)
    spans: list[tuple[int, int, int]] = []
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
def test_coalesce_merges_as_the_dull_loop_does(wanted: list[tuple[int, int]], gap: float, request: float) -> None:
    starts, ends = (np.array([pair[side] for pair in wanted], dtype=np.int64) for side in (0, 1))
    spans = coalesce(starts, ends, max_gap_bytes=gap, max_request_bytes=request)
    assert {array.dtype for array in (spans.starts, spans.ends, spans.first)} == {np.dtype(np.int64)}
    found = list(zip(spans.starts.tolist(), spans.ends.tolist(), np.diff(spans.first).tolist(), strict=True))
    assert found == dull(wanted, gap, request)
    assert spans.first[0] == 0


def test_coalesce_at_its_bounds() -> None:
    def spans_of(wanted: list[tuple[int, int]], gap: float, request: float) -> list[tuple[int, int]]:
        starts, ends = (np.array(column, dtype=np.int64) for column in zip(*wanted, strict=True))
        spans = coalesce(starts, ends, max_gap_bytes=gap, max_request_bytes=request)
        return list(zip(spans.starts.tolist(), spans.ends.tolist(), strict=True))

    wanted = [(10, 20), (27, 30), (30, 40)]
    assert spans_of(wanted, 7, 30) == [(10, 40)]
    assert spans_of(wanted, 6, 30) == [(10, 20), (27, 40)]
    assert spans_of(wanted, 7, 29) == spans_of(wanted, 7, 20) == [(10, 30), (30, 40)]
    assert spans_of(wanted, 7, 19) == [(10, 20), (27, 40)]
    assert spans_of(wanted, 7, 1) == wanted
    assert spans_of([(0, 5), (50, 60), (60, 70)], 0, 10) == [(0, 5), (50, 60), (60, 70)]
    assert spans_of([(0, 5), (2**40, 2**40 + 5), (2**62, 2**62 + 5)], math.inf, math.inf) == [(0, 2**62 + 5)]
