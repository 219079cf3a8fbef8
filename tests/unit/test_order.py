"""The order of rows: every row exactly once, the same for ever, without work that grows with the data."""

from __future__ import annotations

import hashlib
import itertools
import sys
import tracemalloc
from collections.abc import Callable
from functools import partial
from types import FrameType, SimpleNamespace
from typing import TypeVar

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from saev_store.core.layout import Layout
from saev_store.core.rows import RowSpace, row_space
from saev_store.errors import ArgumentError
from saev_store.order import (
    Batching,
    Blocks,
    Partition,
    Permutation,
    Placement,
    ShuffledOrder,
    predict_mixing,
    shuffled,
)
from saev_store.order._partition import Emitted
from saev_store.order._permutation import derive, shuffled_each, shuffled_rows, words

T = TypeVar("T")


def space_of(
    n: int, n_layers: int, tokens: int, *, choice: str = "content", labels: np.ndarray | None = None, **kw
) -> RowSpace:
    layout = Layout(n, tuple(range(n_layers)), tokens, True, 8, 3)
    ignore = [0, 1] if labels is not None else None
    return row_space(layout, tokens=choice, ignore_labels=ignore, labels=labels, **kw)


@st.composite
def orders(draw: st.DrawFn) -> ShuffledOrder:
    n, n_layers, tokens = draw(st.integers(1, 40)), draw(st.integers(1, 3)), draw(st.integers(1, 6))
    labels = None
    if draw(st.booleans()):
        labels = (
            np.random.default_rng(draw(st.integers(0, 99)))
            .integers(0, draw(st.integers(2, 5)), (n, tokens))
            .astype(np.uint8)
        )
    choice = draw(st.sampled_from(["content", "all"] if labels is not None else ["content", "all", "special"]))
    space = space_of(n, n_layers, tokens, choice=choice, labels=labels)
    return ShuffledOrder(
        Blocks(space, draw(st.integers(1, 5))),
        draw(st.integers(-(2**70), 2**70)),
        draw(st.integers(0, 5)),
        draw(st.integers(1, 8)),
        draw(st.sampled_from([1, 2, 3, 7, 20, 10_000])),
        draw(st.integers(1, 50)),
        early_start=draw(st.booleans()),
    )


def everything(order: ShuffledOrder) -> np.ndarray:
    """(block, cell) of all rows of all partitions, partition after partition."""
    parts = [Partition(order, number) for number in range(order.n_partitions)]
    return np.concatenate([np.stack(part.rows(0, part.n_rows), axis=1) for part in parts])


def expected_rows(space: RowSpace) -> set[tuple[int, int, int]]:
    """(example, layer, token) of every chosen vector, found one by one."""
    return set(zip(*(axis.tolist() for axis in space.locate(np.arange(len(space)))), strict=True))


@given(orders())
def test_every_row_exactly_once(order: ShuffledOrder):
    blocks, space = order.blocks, order.blocks.space
    found = everything(order)
    assert len(found) == len(space)
    places = blocks.places(found[:, 0])
    within, token = np.divmod(found[:, 1], space.tokens.count)
    example = blocks.space.example(places.first + within)
    layer = np.asarray(space.layer_idx)[places.layer]
    rows = set(zip(example.tolist(), layer.tolist(), (token + space.tokens.start).tolist(), strict=True))
    assert rows == expected_rows(space)
    lengths = [Partition(order, number).n_rows for number in range(order.n_partitions)]
    assert sum(lengths) == len(space)
    assert max(lengths) - min(lengths) <= 1
    assert order.longest == max(lengths)


@given(orders(), st.data())
def test_blocks_are_found_by_what_they_hold(order: ShuffledOrder, data: st.DataObject):
    """From a block to its examples and layer, and back; nothing else is in any block."""
    blocks, space = order.blocks, order.blocks.space
    numbers = np.arange(blocks.n_blocks, dtype=np.int64)
    places = blocks.places(numbers)
    layer = np.asarray(space.layer_idx, dtype=np.int64)[places.layer]
    for within in range(blocks.examples_per_block):
        there = within < places.n_examples
        example = blocks.space.example(places.first[there] + within)
        np.testing.assert_array_equal(blocks.numbers_of(example, layer[there]), numbers[there])
    held = {(int(e), int(la)) for e, la, _ in expected_rows(space)} if len(space) else set()
    every = np.arange(space.layout.n_examples)
    for one in range(space.layout.n_layers):
        found = blocks.numbers_of(every, np.full_like(every, one))
        if blocks.examples_per_block == 1:
            assert {(int(e), one) for e in every[found >= 0]} == {pair for pair in held if pair[1] == one}


@given(orders(), st.data())
def test_sizes_are_known_without_the_blocks(order: ShuffledOrder, data: st.DataObject):
    """Resuming looks at many windows, and must not have to find out which blocks are in them."""
    start = data.draw(st.integers(0, order.blocks.n_blocks))
    stop = data.draw(st.integers(start, order.blocks.n_blocks))
    np.testing.assert_array_equal(
        order.sizes_between(start, stop), order.blocks.sizes(order.permutation.at(np.arange(start, stop)))
    )


@given(orders(), st.data())
def test_any_position_can_be_asked_for(order: ShuffledOrder, data: st.DataObject):
    """Starting in the middle gives what going through from the beginning gives: a tick is a closed form."""
    part = Partition(order, data.draw(st.integers(0, order.n_partitions - 1)))
    if not part.n_rows:
        return
    whole = np.stack(part.rows(0, part.n_rows), axis=1)
    start = data.draw(st.integers(0, part.n_rows))
    stop = data.draw(st.integers(start, part.n_rows + 3))
    np.testing.assert_array_equal(np.stack(part.rows(start, stop), axis=1), whole[start:stop])


@given(
    lengths=st.lists(st.one_of(st.just(0), st.integers(0, 3), st.integers(0, 200)), min_size=1, max_size=80).filter(any)
)
def test_the_tick_of_a_row_far_from_the_average_pace(lengths: list[int]):
    ends = [0, *itertools.accumulate(lengths)]
    uneven = SimpleNamespace(n_ticks=len(lengths), n_rows=ends[-1], emitted_before=ends.__getitem__)
    found = [Partition.tick_of(uneven, position) for position in range(ends[-1])]
    assert found == np.repeat(np.arange(len(lengths)), lengths).tolist()


@given(orders(), st.data())
def test_places_are_found_where_the_sums_say(order: ShuffledOrder, data: st.DataObject):
    """What is looked for near its average place is what counting from the beginning finds."""
    row = data.draw(st.integers(0, max(order.n_rows - 1, 0)))
    if order.n_rows:
        position = order.position_of(row)
        assert order.rows_before(position) <= row < order.rows_before(position + 1)
    part = Partition(order, data.draw(st.integers(0, order.n_partitions - 1)))
    ends = np.cumsum([len(tick.block) for tick in ticks_of(part)])
    for position in range(part.n_rows):
        assert part.tick_of(position) == np.searchsorted(ends, position, side="right")
    assert [part.emitted_before(tick) for tick in range(1, part.n_ticks + 1)] == ends.tolist()


def in_window(part: Partition, tick: int) -> range:
    """The cohorts that are in the window at a tick, as the definition says: one leaves with each tick."""
    n = min(tick + 1, part.window_ticks) if part.order.early_start else part.window_ticks
    return range(tick, min(tick + n, part.n_cohorts))


def ticks_of(part: Partition) -> list[Emitted]:
    """What each tick of a partition hands out, one block after the other, as the definition says."""
    order, found = part.order, []
    for tick in range(part.n_ticks):
        rows: list[tuple[int, int]] = []
        for cohort in in_window(part, tick):
            start, stop = part.first_block(cohort), part.first_block(cohort + 1)
            lives = [t for t in range(part.n_ticks) if cohort in in_window(part, t)]
            age, life = lives.index(tick), len(lives)
            for position, number in zip(range(start, stop), part.block_numbers(cohort).tolist(), strict=True):
                one = np.array([number])
                size = int(order.blocks.sizes(one)[0])
                cells = shuffled_rows(words(order.row_key, one), np.array([size]))[0]
                kept = order.blocks.kept_cells(one)
                cells = cells if kept is None else kept[0][cells]
                # A block at a border of the partition belongs to it in part.
                before = order.rows_before(part.first_position + position)
                mine = cells[max(part.first_row - before, 0) : min(part.end_row - before, size)]
                m = len(mine)
                rows += [(number, cell) for cell in mine[age * m // life : (age + 1) * m // life].tolist()]
        shuffled_rows_of_tick = np.array(rows, np.int64).reshape(-1, 2)[
            shuffled(derive(part.order.key, 3, part.number, tick), len(rows))
        ]
        found.append(Emitted(shuffled_rows_of_tick[:, 0], shuffled_rows_of_tick[:, 1]))
    return found


@given(orders(), st.data())
def test_it_is_known_ahead_where_a_row_will_be_handed_out(order: ShuffledOrder, data: st.DataObject):
    """From any tick on, and however unequally partitions get on: the order the other way round."""
    parts = [Partition(order, number) for number in range(order.n_partitions)]
    first_tick = [data.draw(st.integers(0, part.n_ticks)) for part in parts]

    def where(lane: int, start: int, stop: int) -> np.ndarray:
        return np.arange(start, stop) * len(parts) + lane

    placement = Placement(parts, first_tick, data.draw(st.integers(0, 2)))
    next_cohort = first_tick.copy()
    found = [np.full((part.n_rows, 2), -1, dtype=np.int64) for part in parts]
    while lanes := [lane for lane, part in enumerate(parts) if next_cohort[lane] < part.n_cohorts]:
        lanes = sorted(data.draw(st.sets(st.sampled_from(lanes), min_size=1)))
        rows = placement.enter(lanes, [next_cohort[lane] for lane in lanes], where)
        where_to, lane = np.divmod(rows.place, len(parts))
        np.testing.assert_array_equal(lane, np.repeat(lanes, rows.n_blocks)[rows.block])
        for one in lanes:
            next_cohort[one] += 1
            mine = lane == one
            assert (found[one][where_to[mine]] == -1).all()
            found[one][where_to[mine]] = np.stack([rows.numbers[rows.block], rows.cell], axis=1)[mine]
    for lane, part in enumerate(parts):
        start = part.emitted_before(first_tick[lane])
        assert (found[lane][:start] == -1).all()
        expected = np.concatenate([np.zeros((0, 2), int), *(np.stack(tick, axis=1) for tick in ticks_of(part))])
        np.testing.assert_array_equal(found[lane][start:], expected[start:])
        np.testing.assert_array_equal(np.stack(part.rows(start, part.n_rows), axis=1), expected[start:])


@given(orders(), st.integers(0, 4))
def test_there_is_room_for_the_rows_of_a_window(order: ShuffledOrder, n_ahead: int):
    """Wherever it is, and whatever is rounded."""
    for part in map(partial(Partition, order), range(order.n_partitions)):
        ends = [part.emitted_before(tick) for tick in range(part.n_ticks + 1)]
        n_ticks = min(part.window_ticks + n_ahead, part.n_ticks)
        most = max(ends[tick + n_ticks] - ends[tick] for tick in range(part.n_ticks - n_ticks + 1))
        assert most <= part.placed_rows(n_ahead)


@given(st.lists(st.tuples(st.integers(0, 2**64 - 1), st.integers(0, 70)), max_size=6))
def test_shuffles_together_are_shuffles(runs: list[tuple[int, int]]):
    keys, counts = (np.array([run[i] for run in runs], dtype=kind) for i, kind in enumerate((np.uint64, np.int64)))
    first = np.cumsum(counts) - counts
    alone = [start + shuffled(key, n) for start, (key, n) in zip(first.tolist(), runs, strict=True)]
    np.testing.assert_array_equal(shuffled_each(keys, counts), np.concatenate([np.zeros(0, np.int64), *alone]))


@given(orders())
def test_the_window_never_holds_more_than_it_may(order: ShuffledOrder):
    for number in range(order.n_partitions):
        part = Partition(order, number)
        for tick in range(part.n_ticks if part.n_rows else 0):
            assert part.entered(tick) == in_window(part, tick).stop
            assert part.first_block(part.entered(tick)) - part.first_block(tick) <= order.window_blocks
        for cohort in range(part.n_cohorts):
            assert part.first_block(cohort + 1) - part.first_block(cohort) <= part.blocks_per_tick


@given(orders())
def test_a_cohort_is_as_large_as_it_lives_long(order: ShuffledOrder):
    """So a tick of a full window hands out as many rows as any other, and of a growing one a share that grows evenly."""
    for part in map(partial(Partition, order), range(order.n_partitions)):
        if not part.n_blocks:
            continue
        windows = [in_window(part, tick) for tick in range(part.n_ticks)]
        lives = np.bincount([cohort for window in windows for cohort in window], minlength=part.n_cohorts)
        assert (lives > 0).all()
        bounds = [part.first_block(cohort) for cohort in range(part.n_cohorts + 1)]
        assert bounds == (np.cumsum([0, *lives.tolist()]) * part.n_blocks // lives.sum()).tolist()
        assert part.lives(np.arange(part.n_cohorts))[1].tolist() == lives.tolist()


def test_a_window_as_large_as_the_data_is_one_exact_permutation():
    """Every row can come first, with equal chances, and neighbours are independent: a chi-square over many seeds."""
    space = space_of(3, 1, 2)
    first = np.zeros((6, 6))
    n_seeds = 3000
    for seed in range(n_seeds):
        part = Partition(ShuffledOrder(Blocks(space), seed, 0, 1, 3, 1), 0)
        assert part.n_ticks == 1
        emitted = part.rows(0, 6)
        row = emitted.block * 2 + emitted.cell
        assert sorted(row.tolist()) == list(range(6))
        first[row[0], row[1]] += 1
    assert (np.diag(first) == 0).all()
    pairs = first[~np.eye(6, dtype=bool)]
    chi2 = ((pairs - n_seeds / 30) ** 2 / (n_seeds / 30)).sum()
    assert chi2 < 60  # 29 degrees of freedom: p = 0.0006


@pytest.mark.parametrize("change", ["seed", "epoch"])
def test_seed_and_epoch_change_everything(change: str):
    space = space_of(50, 1, 4)
    arguments = {"seed": 1, "epoch": 1}
    one = everything(ShuffledOrder(Blocks(space), **arguments, n_partitions=2, window_blocks=6, rows_per_tick=8))
    arguments[change] = 2
    two = everything(ShuffledOrder(Blocks(space), **arguments, n_partitions=2, window_blocks=6, rows_per_tick=8))
    assert (one == two).all(axis=1).mean() < 0.1


def digest(order: ShuffledOrder) -> str:
    return hashlib.sha256(everything(order).astype("<i8").tobytes()).hexdigest()[:16]


def golden_orders() -> dict[str, ShuffledOrder]:
    labels = (np.arange(400 * 9).reshape(400, 9) * 7 % 5).astype(np.uint8)
    return {
        "plain": ShuffledOrder(Blocks(space_of(400, 1, 9)), 17, 0, 1, 60, 128),
        "partitions": ShuffledOrder(Blocks(space_of(400, 1, 9)), 17, 3, 8, 10, 32),
        "layers": ShuffledOrder(Blocks(space_of(200, 3, 9), 2), 17, 0, 4, 20, 64),
        "labels": ShuffledOrder(Blocks(space_of(400, 2, 9, choice="all", labels=labels), 3), 5, 1, 2, 30, 100),
        "whole": ShuffledOrder(Blocks(space_of(300, 1, 9)), -1, 2**65, 1, 300, 1),
        "cipher": ShuffledOrder(Blocks(space_of(35_001, 2, 3)), 17, 4, 3, 900, 2000),  # more blocks than a table has
    }


def test_golden_orders():
    """Whoever changes one of these changes ShuffledOrder.VERSION with it."""
    assert {name: digest(order) for name, order in golden_orders().items()} == {
        "plain": "04f3235f69026505",
        "partitions": "8a4fc03663986ca6",
        "layers": "9e8098c09986f78d",
        "labels": "906556d7f24d446c",
        "whole": "4dd857c3188a4aa2",
        "cipher": "b3983697589029ce",
    }


def test_golden_words_and_permutations():
    state = words(0, np.arange(3))
    # The published SplitMix64 outputs for the state 0.
    assert [hex(int(word)) for word in state] == ["0xe220a8397b1dcdaf", "0x6e789e6aa1b965f4", "0x6c45d188009454f"]
    assert derive() == 0
    assert len({derive(a, b) for a in range(-20, 20) for b in range(20)}) == 800
    found = Permutation(10**15, 3).at(np.array([0, 1, 10**15 - 1])).tolist()
    assert found == [129695848036561, 375442452155439, 831640389576146]


@given(st.one_of(st.integers(1, 300), st.integers(2**16 - 2, 2**16 + 300)), st.integers(0, 2**64 - 1))
def test_permutations_are_permutations(n: int, key: int):
    permutation = Permutation(n, key)
    things = permutation.at(np.arange(n, dtype=np.int64))
    np.testing.assert_array_equal(np.sort(things), np.arange(n))
    np.testing.assert_array_equal(permutation.position_of(things), np.arange(n))


@given(st.integers(2**17, 2**61), st.integers(0, 2**64 - 1), st.data())
def test_large_permutations_can_be_inverted(n: int, key: int, data: st.DataObject):
    positions = np.array(data.draw(st.lists(st.integers(0, n - 1), min_size=1, max_size=20)), dtype=np.int64)
    permutation = Permutation(n, key)
    things = permutation.at(positions)
    assert things.min() >= 0
    assert things.max() < n
    np.testing.assert_array_equal(permutation.position_of(things), positions)


def test_shuffles_are_unbiased():
    """Where each of 8 things ends up, over many keys: a chi-square per table, for the sort and for the cipher."""
    counts = np.zeros((8, 8))
    for key in range(4000):
        counts[np.arange(8), shuffled(key, 8)] += 1
    assert ((counts - 500) ** 2 / 500).sum() < 95  # 49 degrees of freedom: p = 0.0001
    n = 100_000
    things = Permutation(n, 5).at(np.arange(n))
    table = np.histogram2d(np.arange(n), things, bins=10)[0]
    assert ((table - n / 100) ** 2 / (n / 100)).sum() < 140  # 81 degrees of freedom


def test_cost_does_not_grow_with_the_data():
    """10^10 rows: a window in the middle is found with the same few kilobytes as in 10^6 rows."""
    peaks = []
    for n_examples in (5_000, 51_000_000):
        tracemalloc.start()
        order = ShuffledOrder(Blocks(space_of(n_examples, 1, 196)), 17, 0, 8, 400, 2048)
        part = Partition(order, 3)
        middle = part.n_rows // 2
        emitted = part.rows(middle, middle + 2048)
        peaks.append(tracemalloc.get_traced_memory()[1])
        tracemalloc.stop()
        assert len(np.unique(np.stack(emitted, axis=1), axis=0)) == 2048
    assert peaks[1] < 2 * peaks[0] + 1_000_000


def test_a_tick_takes_the_same_steps_however_much_data_there_is():
    """Starting in the middle and going on: function calls are counted, which no other process can disturb."""

    def counted(n_examples: int) -> tuple[int, int, int]:
        order = ShuffledOrder(Blocks(space_of(n_examples, 1, 196)), 17, 0, 8, 128, 2048)
        parts, lanes = [Partition(order, number) for number in range(8)], range(8)
        n_start, ticks = n_calls(lambda: [part.tick_of(part.n_rows // 8) for part in parts])
        w = parts[0].window_ticks
        placement = Placement(parts, ticks, 4)

        def enter(first: int, n: int) -> None:
            for number in range(first, first + n):
                placement.enter(
                    lanes,
                    [tick + number for tick in ticks],
                    lambda lane, start, stop: np.arange(start, stop) * 8 + lane,
                )

        n_fill, _ = n_calls(lambda: enter(0, w))
        return n_start, n_fill, n_calls(lambda: enter(w, 50))[0]

    # 638 blocks a partition, of which 128 are in the window: a table. The others are a cipher.
    few, *more = np.array([counted(n) for n in (5_103, 510_205, 51_020_409)])
    assert (np.array(more) <= 1.25 * few + 800).all(), (few, more)


def n_calls(work: Callable[[], T]) -> tuple[int, T]:
    """How many functions are called to do something, and what it returns."""
    count = 0

    def note(frame: FrameType, event: str, arg: object) -> None:
        nonlocal count
        del frame, arg
        count += event in ("call", "c_call")

    before = sys.getprofile()
    sys.setprofile(note)
    try:
        found = work()
    finally:
        sys.setprofile(before)
    return count, found


@pytest.mark.parametrize(
    ("n", "n_layers", "tokens", "group", "n_partitions", "window", "batch"),
    [
        (20_000, 1, 196, 1, 8, 446, 16_384),
        (20_000, 1, 196, 1, 8, 100, 16_384),
        (20_000, 3, 49, 1, 4, 100, 4096),
        (20_000, 1, 49, 4, 4, 50, 4096),
        (20_000, 1, 8, 1, 1, 3000, 4096),
        (2000, 1, 49, 1, 4, 5000, 4096),
        (4000, 1, 16, 1, 8, 23, 1024),
        (4000, 1, 16, 1, 8, 119, 1024),
        (4000, 1, 16, 1, 8, 399, 1024),
    ],
)
@pytest.mark.parametrize("early_start", [False, True])
def test_mixing_is_what_the_formula_says(n, n_layers, tokens, group, n_partitions, window, batch, early_start):
    """Also where a window that grows holds the whole store in the end."""
    blocks = Blocks(space_of(n, n_layers, tokens), group)
    order = ShuffledOrder(blocks, 1, 0, n_partitions, window, batch // n_partitions, early_start=early_start)
    share, found = batch // n_partitions, []
    n_batches = order.n_rows // batch
    for number in np.linspace(0.25, 0.75, 16):
        at = int(n_batches * number) * share
        met = []
        for part in map(partial(Partition, order), range(n_partitions)):
            emitted = part.rows(at, at + share)
            met.append(blocks.places(emitted.block).first + emitted.cell // tokens)
        found.append(len(np.unique(np.concatenate(met))))
    mixing = predict_mixing(order, batch)
    assert mixing.distinct_examples == pytest.approx(np.mean(found), rel=0.02)
    assert mixing.independent_draws <= mixing.distinct_examples * 1.03
    assert mixing.variance_inflation(0.5) > 1


@given(st.integers(0, 200), st.integers(1, 8), st.integers(1, 9), st.booleans())
def test_batching(n_rows: int, world: int, per_rank: int, drop_last: bool):
    batching = Batching(n_rows, world * per_rank, drop_last, world)
    seen: list[int] = []
    for batch in range(batching.n_batches):
        ranges = [batching.rows_of_rank(batch, rank) for rank in range(world)]
        assert len({stop - start for start, stop in ranges}) == 1
        seen += [row for start, stop in ranges for row in range(start, stop) if row < n_rows]
    assert seen == list(range(batching.n_samples))


def test_bad_numbers_are_refused():
    space = space_of(4, 1, 4)
    with pytest.raises(ArgumentError, match="n_partitions is 0"):
        ShuffledOrder(Blocks(space), 1, 0, 0, 1, 1)
    with pytest.raises(ArgumentError, match="examples_per_block"):
        Blocks(space, 0)
    with pytest.raises(ArgumentError, match=str(Blocks.MAX_ROWS)):
        Blocks(space, 2**24)
    with pytest.raises(ArgumentError, match="shared by 3 ranks"):
        Batching(10, 4, drop_last=False, world=3)
