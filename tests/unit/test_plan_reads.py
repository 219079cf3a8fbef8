"""Plans carried out on dense arrays, step by step: every read gives what NumPy gives, from the bytes it may ask for."""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterable, Sequence

import numpy as np
import pytest

from saev_store.core import plan as plan_module
from saev_store.core.indexing import Axis, Block, Points, Progression, outer_block, parse_key
from saev_store.core.layout import Layout
from saev_store.core.plan import MappedBox, MappedRows, Part, Planner, Runs, pieces
from saev_store.transport.base import FREE, ReadCost

#: Three shards of 4, 4 and 3 examples; vectors of 12 bytes.
LAYOUT = Layout(11, (2, 5, 11), 4, True, 3, 4)
N_LAYERS, N_TOKENS, WIDTH = LAYOUT.shape[1:]
VECTOR = WIDTH * 4
DENSE = np.arange(1, math.prod(LAYOUT.shape) + 1, dtype=np.float32).reshape(LAYOUT.shape)
SHARDS = [DENSE[start : start + 4] for start in (0, 4, 8)]

EXAMPLES: list[object] = [
    slice(None), slice(1, 9), slice(9, 1, -1), slice(None, None, 3), slice(None, None, -2), slice(0, 4), slice(10, 11),
    slice(5, 1, -3), 6, -1, np.array([8, 0, 8, 3]), np.array([5, 4]), np.array([7]),
]  # fmt: skip
LAYERS: list[object] = [slice(None), slice(1, 3), slice(None, None, 2), slice(None, None, -1), 1, slice(1, 2)]
TOKENS: list[object] = [
    slice(None), slice(1, 4), slice(None, None, 2), slice(None, None, -1), slice(4, 0, -2), 0, 3, slice(0, 5, 4),
]  # fmt: skip
COLUMNS: list[object] = [slice(None), slice(1, 3), slice(None, None, 2), slice(None, None, -1), np.array([2, 0, 2]), 1]


def positions(axis: Axis) -> np.ndarray:
    return np.array([axis.start + i * axis.step for i in range(axis.count)]) if isinstance(axis, Progression) else axis


def carried_out(parts: Iterable[Part], out_shape: Sequence[int], cost: ReadCost) -> np.ndarray:
    """The output of a plan, by the words of the docstrings; each byte range must lie in the shard and be worth it."""
    out = np.full(out_shape, -1, dtype=np.float32)
    for part in parts:
        shards = [step.shard_idx for step in part.steps]
        assert shards == sorted(set(shards))
        if part.rows is None:
            assert (part.columns, part.is_pointwise) == (None, False)
            for step in part.steps:
                carry_out(step, out, cost)
            continue
        rows = np.full((part.rows.stop - part.rows.start, WIDTH), -1, dtype=np.float32)
        for step in part.steps:
            carry_out(step, rows, cost)
        if part.is_pointwise:
            out.ravel()[part.rows] = rows[np.arange(len(rows)), part.columns]
        else:
            chosen = np.arange(WIDTH) if part.columns is None else positions(part.columns)
            out.reshape(-1, len(chosen))[part.rows] = rows[:, chosen]
    return out


def carry_out(step: MappedBox | MappedRows | Runs, out: np.ndarray, cost: ReadCost) -> None:
    shard, per_example = SHARDS[step.shard_idx], N_LAYERS * N_TOKENS
    vectors = shard.reshape(-1, WIDTH)
    if isinstance(step, MappedBox):
        assert step.highest == positions(step.axes[0]).max()
        out[step.place] = shard[np.ix_(*map(positions, step.axes))]
        return
    if isinstance(step, MappedRows):
        assert step.highest == step.vector.max() // per_example
        assert step.vector.min() >= 0
        out[slice(len(step.vector)) if step.place is None else step.place] = vectors[step.vector]
        return
    assert step.highest == step.first.max() // per_example
    assert step.direct or (np.diff(step.first) >= 0).all()
    assert step.first.min() >= 0
    spans, v = step.spans, VECTOR
    assert (spans.first[0], spans.first[-1]) == (0, len(step.first))
    assert (np.diff(spans.first) > 0).all()
    units = out.reshape(-1, *step.unit)
    columns = np.arange(WIDTH) if step.columns is None else positions(step.columns)
    assert not (step.columns is not None and np.array_equal(columns, np.arange(WIDTH)))
    for number, (start, end) in enumerate(zip(spans.starts.tolist(), spans.ends.tolist(), strict=True)):
        assert 0 <= start < end <= vectors.nbytes
        mine = slice(int(spans.first[number]), int(spans.first[number + 1]))
        runs = step.first[mine]
        assert (start, end) == (runs[0] * v, (runs[-1] + step.n_vectors) * v)
        if step.direct:
            assert (step.kept, step.columns) == (None, None)
            whole = out.ravel()[int(step.place[mine][0]) * math.prod(step.unit) :][: (end - start) // 4]
            whole[:] = vectors.ravel()[start // 4 : end // 4]
            continue
        assert end - start <= cost.max_request_bytes or (runs == runs[0]).all()
        assert ((runs[1:] - runs[:-1] - step.n_vectors) * v <= cost.max_gap_bytes).all()
        read = vectors[start // v : end // v]
        for run, place in zip(runs.tolist(), step.place[mine].tolist(), strict=True):
            found = read[run - start // v : run - start // v + step.n_vectors]
            kept = np.arange(step.n_vectors) if step.kept is None else step.kept
            assert step.kept is None or not np.array_equal(kept.ravel(), np.arange(step.n_vectors))
            units[place] = found[kept][..., columns].reshape(step.unit)
    if not step.direct:
        for number in range(len(spans) - 1):  # requests that could have been one are one
            gap = int(spans.starts[number + 1] - spans.ends[number])
            merged = (step.first[spans.first[number + 1]] + step.n_vectors) * v - int(spans.starts[number])
            assert gap > cost.max_gap_bytes or merged > cost.max_request_bytes


def blocks(columns: Sequence[object] = COLUMNS) -> Iterable[Block]:
    """Every choice of examples, layers and tokens, with a column subset each in turn."""
    turn = itertools.cycle(columns)
    for examples, layers, tokens in itertools.product(EXAMPLES, LAYERS, TOKENS):
        yield outer_block((examples, layers, tokens, next(turn)), LAYOUT.shape)


def meaning(block: Block) -> np.ndarray:
    return DENSE[np.ix_(*map(positions, block.axes))]


COSTS = {
    "mapped": FREE,
    "alone": ReadCost(0, 1),
    "no gaps": ReadCost(0, math.inf),
    "a vector": ReadCost(VECTOR, 5 * VECTOR),
    "planes": ReadCost(3 * VECTOR, N_TOKENS * VECTOR),
    "examples": ReadCost(7 * VECTOR, N_LAYERS * N_TOKENS * VECTOR),
    "anything": ReadCost(1 << 20, 1 << 20),
}


@pytest.mark.parametrize("cost", COSTS.values(), ids=COSTS)
@pytest.mark.parametrize("reads_into", [False, True])
def test_blocks_are_read_as_numpy_slices(cost: ReadCost, reads_into: bool, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(plan_module, "DIRECT_BYTES", 4 * VECTOR)
    planner = Planner(LAYOUT, cost, reads_into)
    for block in blocks():
        out = carried_out(planner.block(block), block.full_shape, cost)
        np.testing.assert_array_equal(out, meaning(block))


@pytest.mark.parametrize("cost", [FREE, COSTS["a vector"]], ids=["mapped", "ranges"])
@pytest.mark.parametrize("rows_at_once", [0, 1, 2, 5, 6, 7, 12, 13, 1000])
def test_lists_are_read_in_pieces_of_bounded_memory(cost: ReadCost, rows_at_once: int, monkeypatch: pytest.MonkeyPatch):
    """As many whole examples as fit, at least one."""
    monkeypatch.setattr(plan_module, "PIECE_BYTES", rows_at_once * VECTOR)
    planner = Planner(LAYOUT, cost, reads_into=True)
    for examples, columns in itertools.product(EXAMPLES, COLUMNS):
        key = (examples, np.array([2, 0]), np.array([4, 0, 2]), columns)
        block = outer_block(key, LAYOUT.shape)
        parts = list(planner.block(block))
        np.testing.assert_array_equal(carried_out(parts, block.full_shape, cost), meaning(block))
        n, at_once = len(positions(block.axes[0])), max(1, rows_at_once // 6)
        assert [part.rows for part in parts] == [
            slice(6 * start, 6 * min(start + at_once, n)) for start in range(0, n, at_once)
        ]
        whole = columns == slice(None) if isinstance(columns, slice) else False
        assert all((part.columns is None) == whole for part in parts)


@pytest.mark.parametrize("cost", [FREE, COSTS["a vector"], COSTS["alone"]], ids=["mapped", "ranges", "alone"])
@pytest.mark.parametrize("rows_at_once", [0, 1, 2, 3, 1000])
def test_points_are_read_as_numpy_indexes(cost: ReadCost, rows_at_once: int, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(plan_module, "PIECE_BYTES", rows_at_once * VECTOR)
    planner = Planner(LAYOUT, cost, reads_into=True)
    keys: list[tuple[object, ...]] = [
        ([10, 0, 5, 0], [2, 0, 1, 0]),
        ([10, 0, 5, 0], [2, 0, 1, 0], 3),
        ([10, 0, 5, 0], [2, 0, 1, 0], [4, 4, 0, 1], [0, 1, 2, 0]),
        ([[10], [1]], [2, 0, 1], 0, slice(None, None, -1)),
        ([[10], [1]], slice(None), [2, 0, 1], slice(1, 2)),
        ([3], [2], [4], slice(None)),
        ([3], [2], [4], [1]),
        ([1, 2, 3], [2], [4], 1),
        ([7, 1], [2, 1], np.array(4), slice(None)),
        ([0, 1], [0, 1], slice(None), [0, 2]),
        (DENSE % 7 == 3,),
        (DENSE[..., 0] % 5 == 0,),
    ]
    for key in keys:
        points = parse_key(key, LAYOUT.shape)
        assert isinstance(points, Points)
        parts = list(planner.points(points))
        np.testing.assert_array_equal(carried_out(parts, points.shape, cost), DENSE[key])
        n = DENSE[key].size if points.last is None else DENSE[key].size // points.shape[-1]
        at_once = max(1, rows_at_once)
        assert [part.rows for part in parts] == [
            slice(start, min(start + at_once, n)) for start in range(0, n, at_once)
        ]
        assert {part.is_pointwise for part in parts} == {points.last is None}
        if points.last is not None:
            whole = points.last == Progression(0, 1, WIDTH)
            assert all((part.columns is None) == whole for part in parts)
    scalar = Points(tuple(map(np.array, (9, 1, 3))), Progression(0, 1, WIDTH), (WIDTH,))
    np.testing.assert_array_equal(carried_out(planner.points(scalar), (WIDTH,), cost), DENSE[9, 1, 3])


@pytest.mark.parametrize("cost", [FREE, COSTS["a vector"]], ids=["mapped", "ranges"])
def test_nothing_is_no_read(cost: ReadCost):
    planner = Planner(LAYOUT, cost, reads_into=True)
    none = np.zeros(0, dtype=np.int64)
    for axis in range(4):
        key: list[object] = [slice(None)] * 4
        for nothing in (slice(0, 0), none):
            key[axis] = nothing
            assert list(planner.block(outer_block(key, LAYOUT.shape))) == []
    assert list(planner.points(Points((none, none, none), Progression(0, 1, 3), (0, 3)))) == []
    assert list(planner.points(Points((none, none, none, none), None, (0,)))) == []
    assert planner.rows(none, none, none) == Part([], slice(0, 0))


@pytest.mark.parametrize("cost", [FREE, COSTS["a vector"]], ids=["mapped", "ranges"])
def test_rows_of_one_shard_have_no_places_and_keep_their_order(cost: ReadCost):
    planner = Planner(LAYOUT, cost, reads_into=True)
    for first in (0, 4, 8):
        example, layer, token = first + np.array([2, 0, 2, 1]), np.array([2, 1, 2, 0]), np.array([4, 0, 4, 2])
        part = planner.rows(example, layer, token)
        assert part.rows == slice(0, 4)
        out = carried_out([part], (4, WIDTH), cost)
        np.testing.assert_array_equal(out, DENSE[example, layer, token])
        (step,) = part.steps
        assert step.shard_idx == first // 4
        if isinstance(step, MappedRows):
            assert step.place is None
            assert step.vector.tolist() == [2 * 15 + 2 * 5 + 4, 5, 2 * 15 + 2 * 5 + 4, 15 + 2]
        else:
            assert isinstance(step, Runs)
            assert step.place.tolist() == [1, 3, 0, 2]  # equal vectors in the order of their rows
    example = np.array([9, 0, 4, 9, 5, 1])
    part = planner.rows(example, np.zeros_like(example), np.ones_like(example))
    assert part.rows == slice(0, 6)
    assert [step.shard_idx for step in part.steps] == [0, 1, 2]
    assert [step.highest for step in part.steps] == [1, 1, 1]
    assert [step.place.tolist() for step in part.steps] == [[1, 5], [2, 4], [0, 3]]


def runs_of_box(block: Block, cost: ReadCost) -> tuple[int, tuple[int, ...]]:
    """The rule of a run: whole examples, or planes, or vectors, found by looking at the chosen vectors one by one."""
    layers, tokens = (np.sort(positions(axis)) for axis in block.axes[1:3])
    n_columns, v = block.full_shape[3], VECTOR
    chosen = (layers[:, None] * N_TOKENS + tokens).ravel()
    in_plane = np.diff(tokens) - 1
    between = np.diff(layers) * N_TOKENS + tokens[0] - tokens[-1] - 1
    cheap_tokens = (in_plane * v <= cost.max_gap_bytes).all()
    cheap_layers = (between * v <= cost.max_gap_bytes).all()
    whole, plane = int(np.ptp(chosen)) + 1, int(np.ptp(tokens)) + 1
    if cheap_tokens and cheap_layers and whole * v <= cost.max_request_bytes:
        return whole, (len(layers), len(tokens), n_columns)
    if cheap_tokens and plane * v <= cost.max_request_bytes:
        return plane, (len(tokens), n_columns)
    return 1, (n_columns,)


def test_a_run_is_the_largest_that_wastes_little():
    """Gaps and requests at each number of vectors, and a byte below it."""
    for gap, request, less in itertools.product(range(9), (1, 2, 3, 4, 5, 9, 10, 13, 14, 15), (0, 1)):
        cost = ReadCost(gap * VECTOR - less, request * VECTOR - less)
        planner = Planner(LAYOUT, cost, reads_into=False)
        for layers, tokens in itertools.product(LAYERS, TOKENS):
            block = outer_block((slice(None), layers, tokens, slice(1, 3)), LAYOUT.shape)
            parts = list(planner.block(block))
            assert [len(part.steps) for part in parts] == [1, 1, 1]
            for part in parts:
                (step,) = part.steps
                assert isinstance(step, Runs)
                assert (step.n_vectors, step.unit) == runs_of_box(block, cost), (block, cost)


@pytest.mark.parametrize(
    ("key", "nbytes", "n_requests"),
    [  # bytes of a run that are compared, and requests of the shards
        (np.s_[:], 4 * 15 * VECTOR, [1, 1, 1]),
        (np.s_[0:4], 4 * 15 * VECTOR, [1]),
        (np.s_[1:3], 2 * 15 * VECTOR, [1]),
        (np.s_[5], 15 * VECTOR, [1]),
        (np.s_[::2], 15 * VECTOR, [2, 2, 2]),
        (np.s_[3::-1], 15 * VECTOR, [4]),
        (np.s_[:4, 1], 5 * VECTOR, [4]),
        (np.s_[:4, 1:], 10 * VECTOR, [4]),
        (np.s_[:4, 1, 2:], 3 * VECTOR, [4]),
        (np.s_[3, 1, 2], VECTOR, [1]),
        (np.s_[:4, ::-1], None, None),
        (np.s_[:4, ::2], None, None),
        (np.s_[:4, 1, ::2], None, None),
        (np.s_[:4, 1, ::-1], None, None),
        (np.s_[:4, :, 1:], None, None),
        (np.s_[:4, :2, :4], None, None),
        (np.s_[:4, :, :, 1:], None, None),
        (np.s_[:4, :, :, ::-1], None, None),
        (np.s_[:4, :, :, [0, 1, 2]], None, None),
    ],
)
def test_long_runs_are_read_straight_into_the_output(
    key: object, nbytes: int | None, n_requests: list[int] | None, monkeypatch: pytest.MonkeyPatch
):
    block = parse_key(key, LAYOUT.shape)
    assert isinstance(block, Block)

    def steps(reads_into: bool, least: int) -> list[object]:
        monkeypatch.setattr(plan_module, "DIRECT_BYTES", least)
        parts = list(Planner(LAYOUT, FREE, reads_into).block(block))
        np.testing.assert_array_equal(carried_out(parts, block.full_shape, FREE), meaning(block))
        return [step for part in parts for step in part.steps]

    if nbytes is None:
        assert all(isinstance(step, MappedBox) for step in steps(True, 1))
        return
    found = steps(True, 1)
    assert all(isinstance(step, Runs) and step.direct for step in found)
    assert [len(step.spans) for step in found if isinstance(step, Runs)] == n_requests
    assert isinstance(steps(True, nbytes)[0], Runs)
    assert isinstance(steps(True, nbytes + 1)[0], MappedBox)
    assert all(isinstance(step, MappedBox) for step in steps(False, 1))


@pytest.mark.parametrize("examples", EXAMPLES, ids=repr)
@pytest.mark.parametrize("capacity", [1, 2, 3, 4, 10, 11, 12])
def test_examples_are_split_by_shard(examples: object, capacity: int):
    layout = Layout(11, (0,), 1, False, 1, capacity)
    axis = outer_block((examples, 0, 0, 0), layout.shape).axes[0]
    chosen, found = positions(axis), np.full(len(positions(axis)), -1)
    shards = []
    for piece in pieces(layout, axis):
        place = np.arange(len(chosen))[piece.place]
        assert (found[place] == -1).all()
        found[place] = piece.shard_idx * capacity + positions(piece.examples)
        assert ((positions(piece.examples) >= 0) & (positions(piece.examples) < capacity)).all()
        assert (
            isinstance(piece.examples, Progression) == isinstance(axis, Progression) == isinstance(piece.place, slice)
        )
        shards.append(piece.shard_idx)
    np.testing.assert_array_equal(found, chosen)
    assert sorted(shards) == sorted(set((chosen // capacity).tolist()))
    assert shards == sorted(shards, reverse=isinstance(axis, Progression) and axis.step < 0)
    assert list(pieces(layout, np.zeros(0, dtype=np.int64))) == []
