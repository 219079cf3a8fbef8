"""Shuffled batches: each row is read to its place in the batch that it will be handed out with."""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from functools import partial
from itertools import accumulate

import numpy as np

from saev_store.core.layout import IntArray
from saev_store.errors import SaevStoreError
from saev_store.loaders._iteration import Group, Iteration
from saev_store.loaders._reads import Positions, Reads, Runs, runs_of_planes
from saev_store.loaders._ring import BatchRing, RowNumbers
from saev_store.order import Blocks, Partition, Placement
from saev_store.store.reader import NumberArray


def runs_of_blocks(blocks: Blocks, numbers: IntArray, n_blocks: IntArray) -> Runs:
    """The reads of whole blocks: block `numbers[i]` goes to the places from `i * cells_per_block * vectors_per_row` on.

    Its vectors are there by example, in it by layer, in that by token, as they lie in the file. The first `n_blocks[0]` blocks
    have requests of their own, and so on.
    """
    space, places = blocks.space, blocks.places(numbers)
    which = np.repeat(np.arange(len(numbers)), places.n_examples)
    within = np.arange(len(which)) - np.repeat(np.cumsum(places.n_examples) - places.n_examples, places.n_examples)
    example = blocks.space.example(places.first[which] + within)
    layer = space.row_layers[places.layer[which]].ravel()
    n_vectors, n_tokens = space.vectors_per_row, space.tokens.count
    first = (which * blocks.cells_per_block + within * n_tokens) * n_vectors
    place = (first[:, None] + np.arange(n_vectors) * n_tokens).ravel()
    example, which = example.repeat(n_vectors), which.repeat(n_vectors)
    token, count = np.full_like(example, space.tokens.start), np.full_like(example, n_tokens)
    origin = np.repeat(np.arange(len(n_blocks)), n_blocks)[which]
    return runs_of_planes(space.layout, Positions(example, layer, token), count, place, origin)


def n_batches_ahead(partitions: Sequence[Partition], n_ahead: int) -> int:
    """Batches' worth of rows that are in memory at the same time at most, besides one that is begun and one that ends."""
    share = partitions[0].order.rows_per_tick
    return max(1, *(-(-part.placed_rows(max(n_ahead, 2)) // share) for part in partitions))


def first_ticks(
    partitions: Sequence[Partition], first: int, *, fill_up: bool
) -> tuple[list[int], list[int], list[int]]:
    """Of each partition, the position at which batch `first` begins, its tick, and the last tick that this batch needs."""
    share = partitions[0].order.rows_per_tick
    # A partition that has no row left for the batch may have to repeat its last.
    start = [min(first * share, max(part.n_rows - fill_up, 0)) for part in partitions]
    ends = [
        (min(at, part.n_rows - 1), min((first + 1) * share, part.n_rows) - 1)
        for part, at in zip(partitions, start, strict=True)
    ]
    ticks = [
        tuple(part.tick_of(at) for at in end) if part.n_rows else (0, 0)
        for part, end in zip(partitions, ends, strict=True)
    ]
    return start, [begin for begin, _ in ticks], [last for _, last in ticks]


def vectors_of_rows(to: RowNumbers, n_tokens: int, n_vectors: int) -> RowNumbers:
    """The ring's vectors for the vectors of blocks in the order of `runs_of_blocks`, given its rows for their cells."""
    # In 64 bits: rows are fewer than 2^31, vectors may be more.
    by_layer = to.astype(np.int64).reshape(-1, 1, n_tokens) * n_vectors + np.arange(n_vectors)[:, None]
    return by_layer.reshape(-1)


class ShuffledBatches:
    """Batches of a shuffled order: an equal share of each of some partitions, one after the other.

    A lane is what one partition has in memory. Each goes on by itself, but what several can do is done in one step: few
    large calls and reads instead of many small ones.

    Args:
        partitions: The streams, at least one.
        first: The first batch.
        stop: The batch after the last.
        fill_up: Repeat a partition's last row where others have one more, so that all ranks have equally many.
        most_ahead: Cohorts that are read ahead of the window, at most and where slots are free.
        ring: Memory, with slots for `n_batches_ahead` batches and two more.
        iteration: Threads.
        reads: Brings vectors into memory.
        scale: Factor for all vectors, or None.
    """

    def __init__(
        self,
        partitions: Sequence[Partition],
        first: int,
        stop: int,
        *,
        fill_up: bool,
        most_ahead: int,
        ring: BatchRing,
        iteration: Iteration,
        reads: Reads,
        scale: float | None,
    ) -> None:
        self._parts, self._ring, self._iteration, self._reads, self._scale = partitions, ring, iteration, reads, scale
        order = partitions[0].order
        self._share, self._longest, self._first, self._stop = order.rows_per_tick, order.longest, first, stop
        self._fill_up, self._blocks = fill_up, order.blocks
        ring.begin(first)
        ring.layer[:] = self._blocks.space.layer_idx[0]
        self._start, ticks, last_ticks = first_ticks(partitions, first, fill_up=fill_up)
        self._placement, self._most_ahead = Placement(partitions, ticks, most_ahead), most_ahead
        #: Of each lane, the last tick of the first batch. Until that batch is there, nothing else is read, and then 1, 3, 7, …
        #: cohorts ahead: on a slow link these bytes would arrive instead of those that are waited for.
        self._n_ahead = 0
        self._first_tick = last_ticks
        self._tick, self._next = ticks, ticks.copy()
        #: Of each lane, the position before which all rows have arrived.
        self._done = self._start.copy()
        #: Of each lane, where the ticks from `_tick` on end, as far as their cohorts have entered.
        self._ends: list[deque[int]] = [deque() for _ in partitions]
        self._reading: list[dict[int, Group]] = [{} for _ in partitions]
        self._pump()

    def batch(self, number: int) -> tuple[NumberArray, Positions]:
        """The vectors of a batch and where its rows come from, once they have been read. Every batch once, in order."""
        ring = self._ring
        for lane, part in enumerate(self._parts):
            end = min((number + 1) * self._share, part.n_rows)
            if end > self._done[lane]:
                self._wait(lane, end)
                self._done[lane] = end
        self._n_ahead = min(2 * self._n_ahead + 1, self._most_ahead)
        # A batch of repeated rows alone gets its slot here: no cohort asked for one.
        if not ring.open(number + 1):
            raise _no_room()
        start, offsets = ring.first_row[number], self._offsets(number)
        for lane, part in enumerate(self._parts):
            n_real = max(min((number + 1) * self._share, part.n_rows) - number * self._share, 0)
            behind = start + offsets[lane] + n_real
            if offsets[lane] + n_real < offsets[lane + 1]:
                ring.copy_row(behind - 1 if n_real else ring.spare + lane, behind)
            elif self._fill_up and (number + 1) * self._share >= part.n_rows and part.n_rows < self._longest:
                ring.copy_row(behind - 1, ring.spare + lane)
        rows = slice(start, start + offsets[-1])
        where = Positions(*(column[rows].astype(np.int64) for column in (ring.example, ring.layer, ring.token)))
        act = ring.hand_out(number, offsets[-1])
        # Few large steps: what one costs is mostly its calls.
        self._pump(n_least=(len(self._parts) + 1) // 2)
        lanes = zip(self._next, self._reading, self._tick, self._placement.depth, strict=True)
        filled = sum((ahead - len(reading) - tick) / depth for ahead, reading, tick, depth in lanes)
        self._iteration.totals.window_fill = filled / len(self._parts)
        if self._scale is not None:
            ring.memory.scale(act, self._scale)
        return act, where

    def _offsets(self, number: int) -> list[int]:
        """The first row of each lane in a batch, and the end of the last lane."""
        start, stop = number * self._share, (number + 1) * self._share
        n_rows = [self._longest if self._fill_up else part.n_rows for part in self._parts]
        return [0, *accumulate(max(min(stop, n) - start, 0) for n in n_rows)]

    def _pump(self, *, n_least: int = 1) -> None:
        """Start reading every cohort that there is room for, as long as at least so many lanes have it."""
        placement, blocks, ring = self._placement, self._blocks, self._ring
        while True:
            lanes: list[int] = []
            for lane, part in enumerate(self._parts):
                cohort, tick = self._next[lane], self._tick[lane]
                needed = part.entered(max(tick, self._first_tick[lane]) if self._n_ahead else self._first_tick[lane])
                needed += self._n_ahead
                if cohort < min(needed, tick + placement.depth[lane], part.n_cohorts):
                    end = placement.end_after(lane, cohort)
                    if ring.open(min(-(-end // self._share), self._stop)):
                        lanes.append(lane)
            if len(lanes) < n_least:
                return
            cohorts = [self._next[lane] for lane in lanes]
            rows = placement.enter(lanes, cohorts, self._rows_for)
            # Where each cell goes, and where each row comes from.
            to = np.full(len(rows.numbers) * blocks.cells_per_block, ring.unwanted, dtype=np.int32)
            to[rows.block * blocks.cells_per_block + rows.cell] = rows.place
            places, n_tokens = blocks.places(rows.numbers), blocks.space.tokens.count
            within, token = (0, rows.cell) if blocks.examples_per_block == 1 else np.divmod(rows.cell, n_tokens)
            ring.example[rows.place] = blocks.space.example(places.first[rows.block] + within)
            ring.token[rows.place] = token + blocks.space.tokens.start
            if blocks.n_layers > 1:
                layer = blocks.space.row_layers[places.layer, 0]
                ring.layer[rows.place] = layer[rows.block]
            runs, n_vectors = runs_of_blocks(blocks, rows.numbers, rows.n_blocks), blocks.space.vectors_per_row
            vectors = to if n_vectors == 1 else vectors_of_rows(to, n_tokens, n_vectors)
            put = partial(ring.memory.put, vectors)
            group = self._iteration.read(self._reads.tasks(runs, put))
            for lane, cohort in zip(lanes, cohorts, strict=True):
                if cohort < self._parts[lane].n_ticks:
                    self._ends[lane].append(placement.end[lane])
                self._reading[lane][cohort] = group
                self._next[lane] = cohort + 1

    def _rows_for(self, lane: int, start: int, stop: int) -> IntArray:
        """The ring's rows for some positions of a lane; there are slots for their batches."""
        ring, at = self._ring, start
        found = np.full(stop - start, ring.unwanted)
        while at < stop:
            number, row = divmod(at, self._share)
            end = min((number + 1) * self._share, stop)
            if at < self._start[lane]:
                end = min(end, self._start[lane])
            elif number < self._first:
                found[at - start : end - start] = ring.spare + lane  # only to be repeated
            elif number < self._stop:
                begin = ring.first_row[number] + self._offsets(number)[lane] + row
                found[at - start : end - start] = np.arange(begin, begin + end - at)
            at = end
        return found

    def _wait(self, lane: int, end: int) -> None:
        """Until all rows of a lane before a position are there."""
        part, reading, ends = self._parts[lane], self._reading[lane], self._ends[lane]
        while True:
            needed = part.entered(self._tick[lane])
            if self._next[lane] < needed:
                self._pump()
                if self._next[lane] < needed:
                    raise _no_room()
            for cohort in [cohort for cohort in reading if cohort < needed]:
                self._iteration.wait(reading.pop(cohort))
            tick_end = ends[0]
            if tick_end <= end:
                ends.popleft()
                self._tick[lane] += 1
            if tick_end >= end:
                return


def _no_room() -> SaevStoreError:
    """The plan for the ring's memory was wrong."""
    return SaevStoreError(
        "the batches' memory has no room for the rows that come next, although it was planned for them",
        where="window_bytes",
        remedy="Please report this. Another window_bytes plans in another way.",
    )
