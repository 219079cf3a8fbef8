"""The order's arithmetic in numbers: shapes of windows, room for rows, predictions; and where examples and layers lie."""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np
import pytest

from saev_store.core.layout import Layout
from saev_store.core.rows import RowSpace, row_space
from saev_store.errors import ArgumentError
from saev_store.order import (
    Batching,
    Blocks,
    Mixing,
    Partition,
    Permutation,
    Placement,
    ShuffledOrder,
    derive,
    predict_mixing,
    shuffled,
)
from saev_store.order import _partition as partition_module
from saev_store.order import _shuffle as shuffle_module


def order_of(
    n: int,
    tokens: int,
    *,
    n_layers: int = 1,
    group: int = 1,
    partitions: int = 1,
    window: int = 10,
    tick: int = 1,
    early: bool = False,
) -> ShuffledOrder:
    layout = Layout(n, tuple(range(n_layers)), tokens, True, 8, 3)
    blocks = Blocks(row_space(layout, tokens="content"), group)
    return ShuffledOrder(blocks, 17, 0, partitions, window, tick, early_start=early)


@pytest.mark.parametrize(
    ("order", "number", "window_blocks", "expected"),
    [  # first_row, end_row, first_position, n_blocks, blocks_per_tick, window_ticks, n_ticks, n_cohorts
        (order_of(100, 5, window=12, tick=20), 0, None, (0, 500, 0, 100, 4, 3, 25, 27)),
        (order_of(100, 5, window=12, tick=22), 0, None, (0, 500, 0, 100, 4, 3, 25, 27)),
        (order_of(100, 5, window=12, tick=23), 0, None, (0, 500, 0, 100, 5, 2, 20, 21)),
        (order_of(100, 5, window=12, tick=1), 0, None, (0, 500, 0, 100, 1, 12, 100, 111)),
        (order_of(100, 5, window=12, tick=1000), 0, None, (0, 500, 0, 100, 12, 1, 9, 9)),
        (order_of(100, 5, window=99, tick=20), 0, None, (0, 500, 0, 100, 4, 24, 25, 48)),
        (order_of(100, 5, window=100, tick=20), 0, None, (0, 500, 0, 100, 100, 1, 1, 1)),
        (order_of(100, 5, window=12, tick=20), 0, 7, (0, 500, 0, 100, 4, 1, 25, 25)),
        (order_of(100, 5, window=12, tick=20), 0, 100, (0, 500, 0, 100, 100, 1, 1, 1)),
        (order_of(100, 5, partitions=3, window=12, tick=20), 0, None, (0, 166, 0, 34, 4, 3, 9, 11)),
        (order_of(100, 5, partitions=3, window=12, tick=20), 1, None, (166, 333, 33, 34, 4, 3, 9, 11)),
        (order_of(100, 5, partitions=3, window=12, tick=20), 2, None, (333, 500, 66, 34, 4, 3, 9, 11)),
        (order_of(100, 5, window=12, tick=20, early=True), 0, None, (0, 500, 0, 100, 4, 3, 26, 28)),
        (order_of(100, 5, window=12, tick=1, early=True), 0, None, (0, 500, 0, 100, 1, 12, 106, 117)),
        (order_of(100, 5, window=1000, tick=20, early=True), 0, None, (0, 500, 0, 100, 4, 25, 37, 61)),
        (order_of(100, 5, window=3, tick=20, early=True), 0, None, (0, 500, 0, 100, 3, 1, 34, 34)),
        (order_of(1, 1, partitions=3, early=True), 0, None, (0, 0, 0, 0, 1, 1, 0, 0)),
        (order_of(1, 1, partitions=3), 0, None, (0, 0, 0, 0, 1, 1, 0, 0)),
        (order_of(1, 1, partitions=3), 2, None, (0, 1, 0, 1, 1, 1, 1, 1)),
    ],
)
def test_the_shape_of_a_partition(
    order: ShuffledOrder, number: int, window_blocks: int | None, expected: tuple[int, ...]
):
    part = Partition(order, number, window_blocks)
    found = (part.first_row, part.end_row, part.first_position, part.n_blocks, part.blocks_per_tick, part.window_ticks)
    assert (*found, part.n_ticks, part.n_cohorts) == expected
    assert part.n_rows == expected[1] - expected[0]
    assert (part.number, part.order) == (number, order)
    assert (order.longest, order.n_rows) == (-(-order.blocks.n_rows // order.n_partitions), order.blocks.n_rows)


@pytest.mark.parametrize(
    ("order", "window_rows", "placed_rows"),
    [  # for 0, 1, 2 and 1000 cohorts ahead
        (order_of(100, 5, window=12, tick=20), (60, 80, 100, 540), (78, 98, 118, 500)),
        (order_of(100, 5, window=50, tick=8), (250, 260, 270, 740), (286, 296, 306, 500)),
        (order_of(100, 1, window=12, tick=4), (12, 16, 20, 108), (16, 20, 24, 100)),
        (order_of(100, 2, window=12, tick=4), (24, 28, 32, 220), (34, 38, 42, 200)),
        (order_of(100, 3, window=60, tick=3), (180, 183, 186, 477), (216, 219, 222, 300)),
        (order_of(100, 5, window=12, tick=20, early=True), (60, 80, 100, 560), (82, 102, 122, 500)),
        (order_of(100, 5, window=50, tick=8, early=True), (250, 260, 270, 860), (310, 320, 330, 500)),
        (order_of(100, 1, window=12, tick=4, early=True), (12, 16, 20, 112), (16, 20, 24, 100)),
        (order_of(40, 5, window=40), (200, 200, 200, 200), (200, 200, 200, 200)),
        (order_of(1, 1, partitions=3), (1, 1, 1, 1), (0, 0, 0, 0)),
    ],
)
def test_the_room_for_a_window(order: ShuffledOrder, window_rows: Sequence[int], placed_rows: Sequence[int]):
    part = Partition(order, 0)
    assert tuple(part.window_rows(ahead) for ahead in (0, 1, 2, 1000)) == window_rows
    assert tuple(part.placed_rows(ahead) for ahead in (0, 1, 2, 1000)) == placed_rows


def test_cohorts_at_both_ends_live_shorter_and_are_smaller():
    part = Partition(order_of(90, 5, window=12, tick=20), 0)
    assert (part.window_ticks, part.n_ticks, part.n_cohorts, part.blocks_per_tick) == (3, 23, 25, 4)
    bounds = [part.first_block(cohort) for cohort in range(part.n_cohorts + 1)]
    lives = [1, 2, *[3] * 21, 2, 1]
    assert bounds == [sum(lives[:cohort]) * 90 // 69 for cohort in range(26)]
    assert [part.block_numbers(cohort).tolist() for cohort in (0, 24)] == [
        part.order.permutation.at(np.arange(0, 1)).tolist(),
        part.order.permutation.at(np.arange(88, 90)).tolist(),
    ]


def test_an_early_window_grows_by_a_cohort_with_each_tick():
    part = Partition(order_of(90, 5, window=16, tick=20, early=True), 0)
    assert (part.window_ticks, part.start_ticks, part.n_ticks, part.n_cohorts) == (4, 1, 25, 28)
    assert [part.entered(tick) for tick in (*range(7), 24)] == [1, 3, 5, 7, 8, 9, 10, 28]
    lives = [1, 1, 2, 2, 3, 3, *[4] * 19, 3, 2, 1]
    assert sum(lives) == 25 * 4 - (3 + 2 + 1)
    assert part.lives(np.arange(28))[1].tolist() == lives
    assert [part.first_block(cohort) for cohort in range(29)] == [
        sum(lives[:cohort]) * 90 // 94 for cohort in range(29)
    ]
    late = Partition(order_of(90, 5, window=16, tick=20), 0)
    assert (late.start_ticks, late.lives(np.arange(6))[1].tolist(), [late.entered(tick) for tick in range(3)]) == (
        4,
        [1, 2, 3, 4, 4, 4],
        [4, 5, 6],
    )


def selected(examples: object, labels: np.ndarray | None = None, layer: object = "all") -> RowSpace:
    layout = Layout(11, (7, 3, 5), 2, True, 8, 4)
    ignore = None if labels is None else [0]
    return row_space(layout, layer=layer, tokens="content", examples=examples, ignore_labels=ignore, labels=labels)


SOME = np.ones((11, 2), dtype=np.uint8)
SOME[[0, 3, 4, 10]] = 0
SOME[6, 1] = 0


@pytest.mark.parametrize("group", [1, 2, 3, 20])
@pytest.mark.parametrize("labels", [None, SOME, np.zeros_like(SOME)], ids=["all", "some", "none"])
@pytest.mark.parametrize("layer", ["all", [5, 7], 3])
@pytest.mark.parametrize(
    "examples",
    [None, slice(2, 9), slice(9, 1, -2), slice(1, None, 3), slice(10, None, -3), [8, 0, 8, 3], [4], [], slice(0, 0)],
    ids=str,
)
def test_the_block_of_an_example_and_layer(examples: object, layer: object, labels: np.ndarray | None, group: int):
    """Found by listing what each block holds; the first one where an example was chosen repeatedly."""
    space = selected(examples, labels, layer)
    blocks = Blocks(space, group)
    chosen = np.arange(11)[slice(None) if examples is None else examples].astype(int).tolist()
    numbers: dict[tuple[int, int], int] = {}  # by group of chosen examples and by layer
    sizes: list[int] = []
    for start in range(0, len(chosen), group):
        kept = sum(2 if labels is None else int(np.count_nonzero(labels[e])) for e in chosen[start : start + group])
        for layer_idx in space.layer_idx if kept else ():
            numbers[start // group, layer_idx] = len(sizes)
            sizes.append(kept)
    assert blocks.n_blocks == len(sizes)
    assert blocks.sizes(np.arange(len(sizes))).tolist() == sizes
    assert blocks.is_uniform == (labels is None)
    example, layer_idx = (axis.ravel() for axis in np.meshgrid(np.arange(11), np.arange(3)))
    found = blocks.numbers_of(example, layer_idx)
    assert found.dtype == np.int64
    assert found.tolist() == [
        numbers.get((chosen.index(e) // group, at), -1) if e in chosen else -1
        for e, at in zip(example.tolist(), layer_idx.tolist(), strict=True)
    ]
    assert blocks.n_short == (len(space.layer_idx) if labels is None and len(chosen) % group else 0)
    assert blocks.short_rows == (2 * (len(chosen) % group) if blocks.n_short else 0)
    assert blocks.cells_per_block == 2 * group
    if sizes:
        places = blocks.places(np.arange(blocks.n_blocks))
        assert {array.dtype for array in places} == {np.dtype(np.int64)}


def test_an_order_of_any_number_of_blocks_at_once(monkeypatch: pytest.MonkeyPatch):
    """Sizes of blocks are looked up in pieces, and numbers of blocks ahead of time: neither changes anything."""
    layout = Layout(40, (7, 3), 3, True, 8, 4)
    labels = (np.arange(120).reshape(40, 3) * 7 % 5).astype(np.uint8)
    space = row_space(layout, ignore_labels=[0, 1], labels=labels)

    def everything() -> list[list[int]]:
        order = ShuffledOrder(Blocks(space, 2), 5, 1, 2, 6, 9)
        assert [order.rows_before(position) for position in (0, order.blocks.n_blocks)] == [0, order.n_rows]
        found = []
        for number in range(2):
            part = Partition(order, number)
            found += [column.tolist() for column in part.rows(0, part.n_rows)]
        return found

    expected = everything()
    for n_at_once in (1, 2, 3, 7, 39, 40, 41):
        monkeypatch.setattr(shuffle_module, "_N_AT_ONCE", n_at_once)
        monkeypatch.setattr(partition_module, "_N_BLOCKS_AT_ONCE", n_at_once)
        assert everything() == expected


def test_numbers_of_blocks_are_computed_together(monkeypatch: pytest.MonkeyPatch):
    """A cipher costs by the call: one call for as many blocks as are computed at once, of all partitions together."""
    order = order_of(400, 3, partitions=2, window=12, tick=6)
    parts = [Partition(order, number) for number in range(2)]
    monkeypatch.setattr(partition_module, "_N_BLOCKS_AT_ONCE", 100)
    placement = Placement(parts, [0, 0], 0)
    calls: list[int] = []
    at = Permutation.at

    def counted(permutation: Permutation, positions: np.ndarray) -> np.ndarray:
        calls.append(len(positions))
        return at(permutation, positions)

    monkeypatch.setattr(Permutation, "at", counted)
    for cohort in range(parts[0].n_cohorts):
        placement.enter([0, 1], [cohort, cohort], lambda lane, start, stop: np.arange(start, stop) * 2 + lane)
    # 50 of each of the two; a block at the border is of both.
    assert calls == [100, 100, 100, 100, 2]


def test_keys_of_any_integers():
    assert [hex(derive(*parts)) for parts in ((0,), (-1,), (2**64,), (1, -5, 2**130), (2**64 - 1,), (-(2**64),))] == [
        "0xbfef8030ddc2d772",
        "0xe220a8397b1dcdaf",
        "0x5a65d398c02a3a63",
        "0xbe88db6964a82345",
        "0x7ee8be1b285050a3",
        "0xe4d971771b652c20",
    ]
    assert shuffled(2**64 - 1, 5).tolist() == [2, 3, 4, 0, 1]
    assert [shuffled(3, n).tolist() for n in (0, 1, 2)] == [[], [0], [0, 1]]
    assert shuffled(3, 2).dtype == np.int64
    table, cipher = Permutation(65_536, 3), Permutation(65_537, 3)
    assert table.at(np.array([0, 1, 65_535])).tolist() == [22471, 52199, 12948]
    assert cipher.at(np.array([0, 1, 65_536])).tolist() == [5827, 37878, 5749]
    assert {permutation.at(np.arange(3)).dtype for permutation in (table, cipher)} == {np.dtype(np.int64)}
    assert {permutation.position_of(np.arange(3)).dtype for permutation in (table, cipher)} == {np.dtype(np.int64)}


MIXINGS = {
    "plain": (order_of(400, 9, window=60, tick=128), 128, None, (55.125, 61.98024075942481)),
    "partitions": (
        order_of(4000, 16, partitions=8, window=23, tick=128),
        1024,
        None,
        (126.5, 186.27188077133238),
    ),
    "some partitions": (
        order_of(4000, 16, partitions=8, window=23, tick=128),
        512,
        3,
        (47.8125, 76.5357325567395),
    ),
    "layers": (
        order_of(2000, 49, n_layers=3, partitions=4, window=100, tick=1024),
        4096,
        None,
        (333.75, 379.5831429191283),
    ),
    "all layers": (order_of(50, 4, n_layers=3, window=150), 16, None, (50.0, 13.849928127643036)),
    "groups": (order_of(2001, 9, group=4, partitions=4, window=50, tick=100), 400, None, (757.0, 334.0302944507144)),
    "whole": (order_of(50, 4, window=50), 16, None, (50.0, 14.180351999999996)),
    "one row": (order_of(1, 1), 4, None, (1.0, 0.999999999999)),
    "early": (order_of(200, 9, window=100, tick=32, early=True), 32, None, (89.625, 31.90882533464365)),
    "large batch": (order_of(30, 4, window=5, tick=8), 1000, None, (3.0, 30.0)),
}


@pytest.mark.parametrize("name", MIXINGS)
def test_predictions_in_numbers(name: str):
    """A new number here means that users are told something else of the same order."""
    order, batch, n_partitions, expected = MIXINGS[name]
    found = predict_mixing(order, batch, n_partitions)
    assert (found.window_examples, found.distinct_examples) == pytest.approx(expected, rel=1e-9)
    assert found.batch_size == batch
    n_examples = order.blocks.space.n_examples
    share = order.n_rows / n_examples / order.n_rows
    full = n_examples * (1 - (1 - share) ** batch)
    assert found.full_shuffle == pytest.approx(full, rel=1e-9)
    window = found.window_examples
    assert found.independent_draws == pytest.approx(window * (1 - math.exp(-batch / window)), rel=1e-9)


def test_nothing_is_mixed_where_there_is_nothing():
    order = order_of(1, 1, partitions=5)
    assert predict_mixing(order, 3) == Mixing(3, 0.0, 0.0, 0.0, 0.0)


def test_the_variance_of_a_batch():
    mixing = Mixing(101, 50.0, 40.0, 39.0, 90.0)
    assert mixing.variance_inflation(0.0) == 1
    assert mixing.variance_inflation(0.5) == 1 + 100 * 0.5 / 40
    assert Mixing(11, 1.0, 0.5, 0.5, 0.5).variance_inflation(0.25) == 3.5
    assert Mixing(11, 1.0, 1.0, 0.5, 0.5).variance_inflation(1.0) == 11


def test_the_rows_of_a_batch():
    batching = Batching(22, 8, drop_last=False, world=4)
    assert (batching.n_batches, batching.n_samples, batching.n_rows, batching.world) == (3, 22, 22, 4)
    assert [batching.rows_of_rank(1, rank) for rank in range(4)] == [(8, 10), (10, 12), (12, 14), (14, 16)]
    assert [batching.rows_of_rank(2, rank) for rank in range(4)] == [(16, 18), (18, 20), (20, 22), (22, 24)]
    assert [Batching(21, 8, False, 4).rows_of_rank(2, rank) for rank in (0, 3)] == [(16, 18), (22, 24)]
    assert [Batching(20, 8, False, 4).rows_of_rank(2, rank) for rank in (0, 3)] == [(16, 17), (19, 20)]
    dropping = Batching(22, 8, drop_last=True)
    assert (dropping.n_batches, dropping.n_samples, dropping.world, dropping.drop_last) == (2, 16, 1, True)
    assert dropping.rows_of_rank(1, 0) == (8, 16)


@pytest.mark.parametrize(("batch_size", "world"), [(0, 1), (-4, 1), (4, 0), (4, -2), (4, 3), (1, 2), (0, 0), (-4, -2)])
def test_batches_that_ranks_cannot_share(batch_size: int, world: int):
    with pytest.raises(
        ArgumentError, match=f"a batch of {batch_size} rows cannot be shared by {world} ranks"
    ) as caught:
        Batching(10, batch_size, drop_last=False, world=world)
    assert caught.value.where == "batch_size"


def test_bad_numbers_name_their_argument():
    space = selected(None)
    for name, place in (("n_partitions", 3), ("window_blocks", 4), ("rows_per_tick", 5)):
        arguments = [Blocks(space), 1, 0, 1, 1, 1]
        ShuffledOrder(*arguments)
        for number in (0, -1):
            arguments[place] = number
            with pytest.raises(ArgumentError, match=f"{name} is {number}; it must be at least 1") as caught:
                ShuffledOrder(*arguments)
            assert caught.value.where == name
    layout = Layout(2**30, (0,), 1, False, 1, 2**30)
    assert Blocks(row_space(layout), 2**24 - 1).cells_per_block == 2**24 - 1
    for group in (0, 2**24):
        with pytest.raises(ArgumentError, match=f"a block of {group} examples has {group} vectors") as caught:
            Blocks(row_space(layout), group)
        assert caught.value.where == "examples_per_block"
