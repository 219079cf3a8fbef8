"""Batches that fill up while their rows are read: no window is kept, no row is gathered."""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from itertools import accumulate

import numpy as np

from saev_store.errors import SaevStoreError
from saev_store.layout import IntArray
from saev_store.loaders._dressing import Coordinates
from saev_store.loaders._reads import Reads
from saev_store.loaders._ring import BatchRing, Scattered
from saev_store.loaders._run import Machinery
from saev_store.loaders._slots import BlockSlots
from saev_store.loaders._workers import Group
from saev_store.order import Cohort, Partition, Window
from saev_store.order._ahead import RowsAhead
from saev_store.reader import FloatArray

#: Where slots are free, because the consumer has fewer batches than he may, so many times as many cohorts are read ahead.
_MORE_AHEAD = 2


def n_batches_ahead(partitions: Sequence[Partition], n_ahead: int) -> int:
    """Batches' worth of rows that are in memory at the same time at most, besides one that is begun and one that ends.

    What w ticks hand out must find room. That is the rows of w cohorts, give or take two blocks, because cohorts are of whole
    blocks; and at the end of the stream up to one row more for each block in the window, because shares are rounded down.
    """
    found = 1
    for part in partitions:
        w, width, longest = part.window_ticks, part.blocks_per_tick, part.order.blocks.cells_per_block
        n_rows = min((w + max(n_ahead, 2)) * width * longest + w * width, part.n_rows)
        found = max(found, -(-n_rows // part.order.rows_per_tick))
    return found


class BatchesAhead:
    """Reads the cohorts of some partitions ahead of time, each row to its place in a batch to come.

    Args:
        partitions: The streams, at least one.
        first: The first batch.
        stop: The batch after the last.
        fill_up: Repeat a partition's last row where others have one more.
        n_ahead: Cohorts that are read ahead of the window.
        n_lent: Batches that the consumer may have.
        ring: Memory.
        reads: Brings vectors into memory.
        machinery: Threads and counters.
    """

    def __init__(
        self,
        partitions: Sequence[Partition],
        first: int,
        stop: int,
        *,
        fill_up: bool,
        n_ahead: int,
        n_lent: int,
        ring: BatchRing,
        reads: Reads,
        machinery: Machinery,
    ) -> None:
        self._parts, self._ring, self._reads, self._machinery = partitions, ring, reads, machinery
        order = partitions[0].order
        self._share, self._longest, self._stop = order.rows_per_tick, order.longest(), stop
        self._shortest = min(part.n_rows for part in partitions)
        self._fill_up, self._blocks = fill_up, order.blocks
        self._window = Window(partitions, _MORE_AHEAD * n_ahead)
        ring.begin(
            first, n_slots=n_batches_ahead(partitions, n_ahead) + 2, n_lent=n_lent, n_lanes=len(partitions),
            batch_rows=self._share * len(partitions), d_model=reads.layout.d_model,
        )  # fmt: skip
        ring.sources.layer[:] = self._blocks.space.layer_idx[0]
        self._slots = BlockSlots(self._window)
        self._target = Scattered(
            ring, len(self._window.numbers) * self._window.longest, reads.layout.d_model, machinery.tally.reads
        )
        # A lane that has no row left for the first batch may have to repeat its last.
        self._start = [min(first * self._share, max(part.n_rows - fill_up, 0)) for part in partitions]
        ticks = [
            part.tick_of(min(at, part.n_rows - 1)) if part.n_rows else 0
            for part, at in zip(partitions, self._start, strict=True)
        ]
        self._ahead = RowsAhead(self._window, ticks, self._where)
        self._tick, self._next, self._first = ticks, ticks.copy(), first
        #: Of each lane, the position before which all rows have arrived.
        self._done = self._start.copy()
        #: Of each lane, where the ticks from `_tick` on end, as far as their cohorts have entered.
        self._ends: list[deque[int]] = [deque() for _ in partitions]
        self._reading: list[dict[int, Group]] = [{} for _ in partitions]

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

    def pump(self, *, n_least: int = 1) -> None:
        """Start reading every cohort that there is room for, as long as at least so many lanes have it."""
        while len(lanes := [lane for lane in range(len(self._parts)) if self._has_room(lane)]) >= n_least:
            cohorts = [self._next[lane] for lane in lanes]
            entered = self._window.admit(lanes, cohorts)
            self._place(lanes, cohorts, entered)
            runs = self._slots.runs(lanes, entered, np.zeros_like(entered.counts))
            group = self._machinery.read(self._reads.tasks(runs, self._target))
            for lane, cohort in zip(lanes, cohorts, strict=True):
                self._reading[lane][cohort] = group
                self._next[lane] = cohort + 1

    def _has_room(self, lane: int) -> bool:
        part, cohort = self._parts[lane], self._next[lane]
        if cohort >= min(self._tick[lane] + self._window.depth[lane], part.n_cohorts):
            return False
        end = self._ahead.end_after(lane, cohort)
        return self._ring.open(min(-(-end // self._share), self._stop))

    def _where(self, lane: int, start: int, stop: int) -> IntArray:
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

    def _place(self, lanes: Sequence[int], cohorts: Sequence[int], entered: Cohort) -> None:
        """Work out where the rows of cohorts belong, and where they come from."""
        rows = self._ahead.enter(lanes, cohorts, entered)
        for lane, cohort in zip(lanes, cohorts, strict=True):
            if cohort < self._parts[lane].n_ticks:
                self._ends[lane].append(self._ahead.end[lane])
        longest, blocks = self._window.longest, self._blocks
        if len(rows.cell) < len(entered.slots) * longest:
            self._target.to.reshape(-1, longest)[entered.slots] = self._ring.unwanted
        self._target.to[(entered.slots * longest)[rows.block] + rows.cell] = rows.place
        places, sources, n_tokens = blocks.places(entered.numbers), self._ring.sources, blocks.space.tokens.count
        if blocks.examples_per_block == 1:
            within, token = 0, rows.cell
        else:
            within, token = np.divmod(rows.cell, n_tokens)
        sources.example[rows.place] = blocks.examples(places.first[rows.block] + within)
        sources.token[rows.place] = token + blocks.space.tokens.start
        if len(blocks.space.layer_idx) > 1:
            layer = np.asarray(blocks.space.layer_idx, dtype=np.int64)[places.layer]
            sources.layer[rows.place] = layer[rows.block]

    def batch(self, number: int) -> tuple[FloatArray, Coordinates]:
        """A batch and where its rows come from, once they have been read."""
        shares, real = self._shares(number)
        ends = [min((number + 1) * self._share, part.n_rows) for part in self._parts]
        for lane, end in enumerate(ends):
            if end > self._done[lane]:
                self._wait(lane, end)
                self._done[lane] = end
        # A batch of repeated rows alone gets its slot here: no cohort asked for one.
        if not self._ring.open(number + 1):
            raise no_room()
        offsets = [0, *accumulate(shares)]
        for lane, part in enumerate(self._parts):
            if shares[lane] > real[lane]:
                last = self._ring.row(number, offsets[lane] + real[lane] - 1) if real[lane] else self._ring.spare(lane)
                self._ring.copy_row(last, self._ring.row(number, offsets[lane] + real[lane]))
            elif self._fill_up and ends[lane] == part.n_rows < self._longest:
                self._ring.copy_row(self._ring.row(number, offsets[lane] + real[lane] - 1), self._ring.spare(lane))
        return self._ring.hand_out(number, offsets[-1])

    def _wait(self, lane: int, end: int) -> None:
        """Until all rows of a lane before a position are there."""
        part, reading, ends = self._parts[lane], self._reading[lane], self._ends[lane]
        while True:
            needed = min(self._tick[lane] + part.window_ticks, part.n_cohorts)
            if self._next[lane] < needed:
                self.pump()
                if self._next[lane] < needed:
                    raise no_room()
            for cohort in [cohort for cohort in reading if cohort < needed]:
                if self._machinery.helps:
                    self._machinery.readers.help(reading[cohort])
                reading[cohort].wait(self._machinery.stop)
                del reading[cohort]
            tick_end = ends[0]
            if tick_end <= end:
                ends.popleft()
                self._tick[lane] += 1
            if tick_end >= end:
                return

    @property
    def fill(self) -> float:
        """Share of the window's cohorts that are in memory."""
        lanes = zip(self._next, self._reading, self._tick, self._window.depth, strict=True)
        return sum((ahead - len(reading) - tick) / depth for ahead, reading, tick, depth in lanes) / len(self._tick)


def no_room() -> SaevStoreError:
    """The plan for the window's memory was wrong."""
    return SaevStoreError(
        "the window's memory has no room for the rows that come next, although it was planned for them",
        where="slots",
        remedy="Please report this. slots='block' plans in another way.",
    )
