"""Partitions on their way through memory: what is being read, what waits, which rows come next."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from saev_store.layout import IntArray
from saev_store.loaders._dressing import Coordinates
from saev_store.loaders._memory import WindowMemory
from saev_store.loaders._reads import Reads
from saev_store.loaders._run import Machinery
from saev_store.loaders._slots import BlockSlots, RowSlots, n_rows_of
from saev_store.loaders._workers import Group
from saev_store.order import Partition, Window


class Lanes:
    """Reads the cohorts of some partitions ahead of time and says where in memory their next rows lie.

    A lane is what one partition has in memory. Each goes on by itself, but what several can do is done in one step: few
    large calls and reads instead of many small ones.

    Args:
        partitions: The streams, at least one.
        position: Where each begins: everything before it counts as handed out.
        n_ahead: Cohorts that are read ahead of the window.
        rows_apart: Whether rows or whole blocks are the unit of memory.
        memory: The window's.
        reads: Brings vectors into memory.
        machinery: Threads and counters.
    """

    def __init__(
        self,
        partitions: Sequence[Partition],
        position: Sequence[int],
        n_ahead: int,
        *,
        rows_apart: bool,
        memory: WindowMemory,
        reads: Reads,
        machinery: Machinery,
    ) -> None:
        self.partitions, self._blocks = partitions, partitions[0].order.blocks
        self.window = Window(partitions, n_ahead)
        n_rows = [n_rows_of(part, n_ahead, rows_apart=rows_apart) for part in partitions]
        memory.reserve(sum(n_rows), reads.layout.d_model)
        self._slots = RowSlots(self.window, n_rows) if rows_apart else BlockSlots(self.window)
        self._memory, self._reads, self._machinery = memory, reads, machinery
        # Of each slot's block: the first chosen example, and the layer.
        self._first_example = np.zeros_like(self.window.numbers)
        self._layer = np.zeros_like(self.window.numbers)
        self._reading: list[dict[int, Group]] = [{} for _ in partitions]
        none = np.zeros(0, dtype=np.int64)
        self._entries, self._last = [none] * len(partitions), [none] * len(partitions)
        self._taken: list[tuple[int, IntArray]] = []
        within = [min(at, part.n_rows - 1) for part, at in zip(partitions, position, strict=True)]
        self._tick = [part.tick_of(at) if at >= 0 else 0 for part, at in zip(partitions, within, strict=True)]
        self._first_tick, self._freed_tick, self._next = self._tick.copy(), self._tick.copy(), self._tick.copy()
        self._skip = [
            at - part.emitted_before(tick) for part, at, tick in zip(partitions, position, self._tick, strict=True)
        ]

    def pump(self) -> None:
        """Start reading every cohort that there is room for: each lane's next ones first."""
        while lanes := [lane for lane in range(len(self.partitions)) if self._has_room(lane)]:
            cohorts = [self._next[lane] for lane in lanes]
            entered = self.window.admit(lanes, cohorts)
            places = self._blocks.places(entered.numbers)
            self._first_example[entered.slots] = places.first
            self._layer[entered.slots] = np.asarray(self._blocks.space.layer_idx, dtype=np.int64)[places.layer]
            spent, at = np.zeros_like(entered.counts), 0
            for lane, cohort, n in zip(lanes, cohorts, entered.n_blocks.tolist(), strict=True):
                mine, part = slice(at, at + n), self.partitions[lane]
                if self._first_tick[lane] > part.first_tick(cohort):
                    spent[mine] = part.spent_before(self._first_tick[lane], cohort, entered.counts[mine])
                at += n
            group = self._machinery.read(self._reads.tasks(self._slots.runs(lanes, entered, spent), self._memory))
            for lane, cohort in zip(lanes, cohorts, strict=True):
                self._reading[lane][cohort] = group
                self._next[lane] = cohort + 1

    def _has_room(self, lane: int) -> bool:
        part, cohort = self.partitions[lane], self._next[lane]
        if cohort >= min(self._freed_tick[lane] + self.window.depth[lane], part.n_cohorts):
            return False
        return self._slots.fits(lane, part, cohort, self._first_tick[lane])

    def take(self, wanted: Sequence[int]) -> list[IntArray]:
        """Entries of so many next rows of each lane; fewer at the end, and where rows have to be released first.

        But for what `padding` gives, they count as taken until `release`.
        """
        left, found = list(wanted), [[entries[:0]] for entries in self._entries]
        while True:
            for lane, entries in enumerate(self._entries):
                if left[lane] > 0 and len(entries):
                    part, self._entries[lane] = entries[: left[lane]], entries[left[lane] :]
                    left[lane] -= len(part)
                    found[lane].append(part)
                    self._last[lane] = part[-1:]
                    self._taken.append((lane, part))
                    if not len(self._entries[lane]):
                        self._tick[lane] += 1
            if not self._enter([lane for lane, n in enumerate(left) if n > 0]):
                return [np.concatenate(parts) for parts in found]

    def padding(self, lane: int, n: int) -> IntArray:
        """The last row again, n times, as entries; nothing is read over it, because nothing comes after it."""
        if n and not len(self._last[lane]):
            self._enter([lane])
        return np.repeat(self._last[lane], n)

    def rows(self, entries: IntArray) -> IntArray:
        """Rows of the memory where entries lie."""
        return self._slots.locate(entries)

    def coordinates(self, entries: IntArray) -> Coordinates:
        """Where the rows of entries come from."""
        blocks, slot = self._blocks, entries // self.window.longest
        cell = self.window.cells.reshape(-1)[entries].astype(np.int64)
        ordinal = self._first_example[slot]
        if blocks.examples_per_block > 1:
            within, cell = np.divmod(cell, blocks.space.tokens.count)
            ordinal += within
        return Coordinates(blocks.examples(ordinal), self._layer[slot], cell + blocks.space.tokens.start)

    def release(self) -> None:
        """All rows that were taken have been copied: their memory may be used again."""
        for lane, entries in self._taken:
            self._slots.release(lane, entries)
        self._taken.clear()
        self._freed_tick[:] = self._tick

    @property
    def fill(self) -> float:
        """Share of the window's cohorts that are in memory."""
        lanes = zip(self._next, self._reading, self._tick, self.window.depth, strict=True)
        return sum((ahead - len(reading) - tick) / depth for ahead, reading, tick, depth in lanes) / len(self._tick)

    def _enter(self, lanes: Sequence[int]) -> bool:
        """Look at the next tick of some lanes; False if all are at their end, or need a cohort that there is no room for."""
        lanes = [lane for lane in lanes if self._tick[lane] < self.partitions[lane].n_ticks]
        if any(self._next[lane] < self._needed(lane) for lane in lanes):
            self.pump()
            lanes = [lane for lane in lanes if self._next[lane] >= self._needed(lane)]
        if not lanes:
            return False
        for lane in lanes:
            needed, reading = self._needed(lane), self._reading[lane]
            for cohort in [cohort for cohort in reading if cohort < needed]:
                if self._machinery.helps:
                    self._machinery.readers.help(reading[cohort])
                reading[cohort].wait(self._machinery.stop)
                del reading[cohort]
        for lane, entries in zip(lanes, self.window.tick(lanes, [self._tick[lane] for lane in lanes]), strict=True):
            skip, self._skip[lane] = self._skip[lane], 0
            if skip:
                self._last[lane] = entries[:skip][-1:]
                self._taken.append((lane, entries[:skip]))
            self._entries[lane] = entries[skip:]
            if not len(self._entries[lane]):
                self._tick[lane] += 1
        return True

    def _needed(self, lane: int) -> int:
        """Cohorts that must have been admitted for a lane's next tick."""
        part = self.partitions[lane]
        return min(self._tick[lane] + part.window_ticks, part.n_cohorts)
