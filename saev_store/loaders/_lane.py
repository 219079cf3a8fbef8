"""One partition on its way through memory: what is being read, what waits, which row comes next."""

from __future__ import annotations

import threading

import numpy as np

from saev_store.layout import IntArray
from saev_store.loaders._memory import WindowMemory
from saev_store.loaders._reads import Reads
from saev_store.loaders._slots import BlockSlots, RowSlots
from saev_store.loaders._workers import Group, Workers
from saev_store.order import Cohort, Partition, Window


class Lane:
    """Reads a partition's cohorts ahead of time and says where in memory its next rows lie.

    Args:
        partition: The stream.
        n_ahead: Cohorts that are read ahead of the window.
        memory: The window's.
        rows: The lane's part of it.
        rows_apart: Whether rows or whole blocks are the unit of memory.
        position: Where to begin: everything before it counts as handed out.
    """

    def __init__(
        self, partition: Partition, n_ahead: int, memory: WindowMemory, rows: range, *, rows_apart: bool, position: int
    ) -> None:
        self.partition = partition
        depth = min(partition.window_ticks + n_ahead, max(partition.n_cohorts, 1))
        self.window = Window(partition, depth)
        blocks = partition.order.blocks
        self._slots = RowSlots(blocks, self.window, len(rows)) if rows_apart else BlockSlots(blocks, self.window)
        self._memory, self._base = memory, rows.start
        self._reading: dict[int, Group] = {}
        self._entries = np.zeros(0, dtype=np.int64)
        self._last = np.zeros(0, dtype=np.int64)
        self._taken: list[IntArray] = []
        within = min(position, partition.n_rows - 1)
        self._tick = self._first_tick = self._freed_tick = self._next = partition.tick_of(within) if within >= 0 else 0
        self._skip = position - partition.emitted_before(self._tick)
        self._entered: Cohort | None = None

    def pump(self, reads: Reads, workers: Workers) -> None:
        """Start reading every cohort that there is room for."""
        part = self.partition
        while self._next < min(self._freed_tick + self.window.depth, part.n_cohorts):
            cohort = self._next
            entered = self._entered = self._entered or self.window.admit(cohort)
            spent = part.spent_before(self._first_tick, cohort, entered.counts)
            if not self._slots.fits(int((entered.counts - spent).sum())):
                return
            runs = self._slots.runs(cohort, entered, spent)
            tasks = list(reads.tasks(runs._replace(place=runs.place + self._base), self._memory))
            group = self._reading[cohort] = Group(len(tasks))
            for task, where in tasks:
                workers.submit(task, group, where)
            self._entered, self._next = None, cohort + 1

    def take(self, n: int, reads: Reads, workers: Workers, stop: threading.Event) -> IntArray:
        """Entries of up to n next rows; fewer at the end, and where rows taken before have to be released first."""
        found = [self._entries[:0]]
        while n > 0 and (len(self._entries) or self._enter_tick(reads, workers, stop)):
            part, self._entries = self._entries[:n], self._entries[n:]
            n -= len(part)
            found.append(part)
            if not len(self._entries):
                self._tick += 1
        entries = np.concatenate(found)
        if len(entries):
            self._last = entries[-1:]
        return entries

    def rows(self, entries: IntArray, *, padding: bool) -> IntArray:
        """Rows of the window where entries lie; but for padding, they count as taken until `release`."""
        rows = self._slots.locate(entries)
        if not padding:
            self._taken.append(rows)
        return rows + self._base

    def padding(self, n: int, reads: Reads, workers: Workers, stop: threading.Event) -> IntArray:
        """The last row again, n times, as entries; nothing is read over it, because nothing comes after it."""
        if n and not len(self._last):
            self._enter_tick(reads, workers, stop)
        return np.repeat(self._last, n)

    def release(self) -> None:
        """All rows that were taken have been copied: their memory may be used again."""
        for rows in self._taken:
            self._slots.release(rows)
        self._taken.clear()
        self._freed_tick = self._tick

    @property
    def fill(self) -> float:
        """Share of the window's cohorts that are in memory."""
        return (self._next - len(self._reading) - self._tick) / max(self.window.depth, 1)

    def _enter_tick(self, reads: Reads, workers: Workers, stop: threading.Event) -> bool:
        """Look at the next tick that has rows; False at the end, or where it needs a cohort that there is no room for."""
        part = self.partition
        while self._tick < part.n_ticks:
            needed = min(self._tick + part.window_ticks, part.n_cohorts)
            if self._next < needed:
                self.pump(reads, workers)
                if self._next < needed:
                    return False
            for cohort in [cohort for cohort in self._reading if cohort < needed]:
                self._reading[cohort].wait(stop)
                del self._reading[cohort]
            entries = self.window.tick(self._tick)
            if self._skip:
                skipped, entries, self._skip = entries[: self._skip], entries[self._skip :], 0
                self._last = skipped[-1:]
                self._taken.append(self._slots.locate(skipped))
            self._entries = entries
            if len(entries):
                return True
            self._tick += 1
        return False
