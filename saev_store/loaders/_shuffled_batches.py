"""Shuffled batches: each row is read to its place in the batch that it will be handed out with."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Iterator, Sequence
from itertools import accumulate

import numpy as np
import numpy.typing as npt

from saev_store.core.layout import IntArray
from saev_store.errors import SaevStoreError
from saev_store.loaders._iteration import BatchContext
from saev_store.loaders._reads import ReadTotals
from saev_store.loaders._ring import BatchRing, RingMemory
from saev_store.loaders._rows import Batch, Positions, runs_of_blocks
from saev_store.loaders._workers import Group
from saev_store.order import Partition, Placement
from saev_store.store.reader import FloatArray
from saev_store.transport import Buffer


def n_batches_ahead(partitions: Sequence[Partition], n_ahead: int) -> int:
    """Batches' worth of rows that are in memory at the same time at most, besides one that is begun and one that ends."""
    share = partitions[0].order.rows_per_tick
    return max(1, *(-(-part.placed_rows(max(n_ahead, 2)) // share) for part in partitions))


class _Target:
    """Rows that are read, each with its row of a ring; see `saev_store.loaders._reads.Target`."""

    def __init__(self, memory: RingMemory, to: npt.NDArray[np.int32], totals: ReadTotals) -> None:
        self._memory, self._to, self._totals = memory, to, totals

    def memory(self, place: int, count: int) -> memoryview | None:  # noqa: ARG002  # the protocol's arguments; no two rows are neighbours
        return None

    def put(self, place: slice | IntArray, source: Buffer) -> None:
        started = time.perf_counter()
        self._memory.put(self._to[place], source)
        self._totals.add_copy(time.perf_counter() - started)


class ShuffledBatches:
    """Batches of a shuffled order: an equal share of each of some partitions, one after the other.

    A lane is what one partition has in memory. Each goes on by itself, but what several can do is done in one step: few
    large calls and reads instead of many small ones.

    Args:
        partitions: The streams, at least one.
        first: The first batch.
        stop: The batch after the last.
        fill_up: Repeat a partition's last row where others have one more, so that all ranks have equally many.
        n_ahead: Cohorts that are read ahead of the window.
        most_ahead: Where slots are free, because the consumer has fewer batches than it may, as many are read ahead.
        n_lent: Batches that the consumer may have.
        ring: Memory.
        context: What to make them with.
    """

    def __init__(
        self,
        partitions: Sequence[Partition],
        first: int,
        stop: int,
        *,
        fill_up: bool,
        n_ahead: int,
        most_ahead: int,
        n_lent: int,
        ring: BatchRing,
        context: BatchContext,
    ) -> None:
        self._parts, self._ring, self._context = partitions, ring, context
        order = partitions[0].order
        self._share, self._longest, self._first, self._stop = order.rows_per_tick, order.longest(), first, stop
        self._shortest = min(part.n_rows for part in partitions)
        self._fill_up, self._blocks = fill_up, order.blocks
        ring.begin(
            first, n_slots=n_batches_ahead(partitions, n_ahead) + 2, n_lent=n_lent, n_lanes=len(partitions),
            batch_rows=self._share * len(partitions), d_model=order.blocks.space.layout.d_model,
        )  # fmt: skip
        ring.sources.layer[:] = self._blocks.space.layer_idx[0]
        # A lane that has no row left for the first batch may have to repeat its last.
        self._start = [min(first * self._share, max(part.n_rows - fill_up, 0)) for part in partitions]
        ticks = [
            part.tick_of(min(at, part.n_rows - 1)) if part.n_rows else 0
            for part, at in zip(partitions, self._start, strict=True)
        ]
        self._placement = Placement(partitions, ticks, self._rows_for, most_ahead)
        self._tick, self._next = ticks, ticks.copy()
        #: Of each lane, the position before which all rows have arrived.
        self._done = self._start.copy()
        #: Of each lane, where the ticks from `_tick` on end, as far as their cohorts have entered.
        self._ends: list[deque[int]] = [deque() for _ in partitions]
        self._reading: list[dict[int, Group]] = [{} for _ in partitions]

    def __iter__(self) -> Iterator[Batch]:
        context = self._context
        self._pump()
        n_least = (len(self._parts) + 1) // 2
        for number in range(self._first, self._stop):
            act, where = self._batch(number)
            # Few large steps: what one costs is mostly its calls.
            self._pump(n_least=n_least)
            context.runtime.totals.window_fill = self._fill
            if context.maker.scale is not None:
                self._ring.memory.scale(act, context.maker.scale)
            batch = context.maker.batch(act, where)
            # The consumer alone decides how long a batch lives.
            del act, where
            yield batch
            del batch

    def _shares(self, number: int) -> tuple[list[int], list[int]]:
        """Rows of each lane in a batch, with repeated ones and without."""
        start, stop = number * self._share, (number + 1) * self._share
        real = [max(min(stop, part.n_rows) - start, 0) for part in self._parts]
        if not self._fill_up:
            return real, real
        return [max(min(stop, self._longest) - start, 0)] * len(real), real

    def _offsets(self, number: int) -> list[int]:
        """The first row of each lane in a batch."""
        if (number + 1) * self._share <= self._shortest:
            return [lane * self._share for lane in range(len(self._parts))]
        return [0, *accumulate(self._shares(number)[0])]

    def _pump(self, *, n_least: int = 1) -> None:
        """Start reading every cohort that there is room for, as long as at least so many lanes have it."""
        while len(lanes := [lane for lane in range(len(self._parts)) if self._has_room(lane)]) >= n_least:
            cohorts = [self._next[lane] for lane in lanes]
            group = self._read(lanes, cohorts)
            for lane, cohort in zip(lanes, cohorts, strict=True):
                if cohort < self._parts[lane].n_ticks:
                    self._ends[lane].append(self._placement.end[lane])
                self._reading[lane][cohort] = group
                self._next[lane] = cohort + 1

    def _has_room(self, lane: int) -> bool:
        part, cohort = self._parts[lane], self._next[lane]
        if cohort >= min(self._tick[lane] + self._placement.depth[lane], part.n_cohorts):
            return False
        end = self._placement.end_after(lane, cohort)
        return self._ring.open(min(-(-end // self._share), self._stop))

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
                found[at - start : end - start] = ring.spare(lane)  # only to be repeated
            elif number < self._stop:
                begin = ring.row(number, self._offsets(number)[lane] + row)
                found[at - start : end - start] = np.arange(begin, begin + end - at)
            at = end
        return found

    def _read(self, lanes: Sequence[int], cohorts: Sequence[int]) -> Group:
        """Start reading cohorts to where their rows belong, and note where these come from."""
        rows, blocks, sources = self._placement.enter(lanes, cohorts), self._blocks, self._ring.sources
        to = np.full(len(rows.numbers) * blocks.cells_per_block, self._ring.unwanted, dtype=np.int32)
        to[rows.block * blocks.cells_per_block + rows.cell] = rows.place
        places, n_tokens = blocks.places(rows.numbers), blocks.space.tokens.count
        within, token = (0, rows.cell) if blocks.examples_per_block == 1 else np.divmod(rows.cell, n_tokens)
        sources.example[rows.place] = blocks.examples(places.first[rows.block] + within)
        sources.token[rows.place] = token + blocks.space.tokens.start
        if len(blocks.space.layer_idx) > 1:
            layer = np.asarray(blocks.space.layer_idx, dtype=np.int64)[places.layer]
            sources.layer[rows.place] = layer[rows.block]
        context = self._context
        target = _Target(self._ring.memory, to, context.runtime.totals.reads)
        return context.runtime.read(context.reads.tasks(runs_of_blocks(blocks, rows.numbers, rows.n_blocks), target))

    def _batch(self, number: int) -> tuple[FloatArray, Positions]:
        """A batch and where its rows come from, once they have been read."""
        ring = self._ring
        shares, real = self._shares(number)
        ends = [min((number + 1) * self._share, part.n_rows) for part in self._parts]
        for lane, end in enumerate(ends):
            if end > self._done[lane]:
                self._wait(lane, end)
                self._done[lane] = end
        # A batch of repeated rows alone gets its slot here: no cohort asked for one.
        if not ring.open(number + 1):
            raise _no_room()
        offsets = [0, *accumulate(shares)]
        for lane, part in enumerate(self._parts):
            if shares[lane] > real[lane]:
                last = ring.row(number, offsets[lane] + real[lane] - 1) if real[lane] else ring.spare(lane)
                ring.copy_row(last, ring.row(number, offsets[lane] + real[lane]))
            elif self._fill_up and ends[lane] == part.n_rows < self._longest:
                ring.copy_row(ring.row(number, offsets[lane] + real[lane] - 1), ring.spare(lane))
        return ring.hand_out(number, offsets[-1])

    def _wait(self, lane: int, end: int) -> None:
        """Until all rows of a lane before a position are there."""
        part, reading, ends, runtime = self._parts[lane], self._reading[lane], self._ends[lane], self._context.runtime
        while True:
            needed = min(self._tick[lane] + part.window_ticks, part.n_cohorts)
            if self._next[lane] < needed:
                self._pump()
                if self._next[lane] < needed:
                    raise _no_room()
            for cohort in [cohort for cohort in reading if cohort < needed]:
                runtime.wait(reading.pop(cohort))
            tick_end = ends[0]
            if tick_end <= end:
                ends.popleft()
                self._tick[lane] += 1
            if tick_end >= end:
                return

    @property
    def _fill(self) -> float:
        """Share of the window's cohorts that are in memory."""
        lanes = zip(self._next, self._reading, self._tick, self._placement.depth, strict=True)
        return sum((ahead - len(reading) - tick) / depth for ahead, reading, tick, depth in lanes) / len(self._tick)


def _no_room() -> SaevStoreError:
    """The plan for the ring's memory was wrong."""
    return SaevStoreError(
        "the batches' memory has no room for the rows that come next, although it was planned for them",
        where="window_bytes",
        remedy="Please report this. Another window_bytes plans in another way.",
    )
