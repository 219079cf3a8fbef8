"""Makes batches: the two orders, over the same reads, in the thread of a run."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import accumulate

import numpy as np

from saev_store.layout import IntArray
from saev_store.loaders._ahead import BatchesAhead, no_room
from saev_store.loaders._dressing import Coordinates, Dressing
from saev_store.loaders._lanes import Lanes
from saev_store.loaders._memory import Outputs, Rows, WindowMemory
from saev_store.loaders._reads import Reads, Runs, merged, runs_of_planes
from saev_store.loaders._ring import BatchRing
from saev_store.loaders._run import Batch, Machinery
from saev_store.loaders._slots import n_rows_of
from saev_store.loaders._workers import Group
from saev_store.order import Batching, ShuffledOrder
from saev_store.reader import FloatArray
from saev_store.rows import RowSpace


def n_window_rows(order: ShuffledOrder, partitions: range, n_ahead: int, *, rows_apart: bool) -> int:
    """Rows of memory that the window of some partitions needs."""
    return sum(n_rows_of(order.partition(number), n_ahead, rows_apart=rows_apart) for number in partitions)


@dataclass(frozen=True)
class Equipment:
    """What both kinds of batches are made with.

    Attributes:
        reads: Brings vectors into memory.
        machinery: Threads and counters.
        outputs: Memory of batches.
        window: Memory of the window, kept from epoch to epoch.
        ring: Memory of batches to come, likewise.
        dressing: What a batch holds besides vectors.
    """

    reads: Reads
    machinery: Machinery
    outputs: Outputs
    window: WindowMemory
    ring: BatchRing
    dressing: Dressing


class ShuffledBatches:
    """Batches of a shuffled order: an equal share of each of this rank's partitions, one after the other.

    Args:
        order: The order of the epoch.
        partitions: This rank's.
        fill_up: Repeat a partition's last row where others have one more, so that all ranks have equally many.
        n_ahead: Cohorts read ahead of the window.
        rows_apart: Row slots instead of block slots.
        equipment: What to make them with.
    """

    def __init__(
        self,
        order: ShuffledOrder,
        partitions: range,
        *,
        fill_up: bool,
        n_ahead: int,
        rows_apart: bool,
        equipment: Equipment,
    ) -> None:
        self._order, self._partitions, self._fill_up = order, partitions, fill_up
        self._n_ahead, self._rows_apart, self._eq = n_ahead, rows_apart, equipment

    def batches(self, first: int, stop: int) -> Iterator[Batch]:
        """The batches `first` to `stop`, counted from the epoch's beginning."""
        parts = [self._order.partition(number) for number in self._partitions]
        lanes = Lanes(
            parts,
            [min(first * self._order.rows_per_tick, part.n_rows) for part in parts],
            self._n_ahead,
            rows_apart=self._rows_apart,
            memory=self._eq.window,
            reads=self._eq.reads,
            machinery=self._eq.machinery,
        )
        lanes.pump()
        for number in range(first, stop):
            yield self._batch(number, lanes)

    def _batch(self, number: int, lanes: Lanes) -> Batch:
        share, longest = self._order.rows_per_tick, self._order.longest()
        start = number * share
        have = [part.n_rows for part in lanes.partitions]
        n = [max(min(start + share, longest if self._fill_up else rows) - start, 0) for rows in have]
        real = [min(rows, max(all_rows - start, 0)) for rows, all_rows in zip(n, have, strict=True)]
        bounds = [0, *accumulate(n)]
        total, filled = bounds[-1], [0] * len(n)
        act = self._eq.window.batch(total)
        where = Coordinates(*np.empty((3, total), dtype=np.int64))
        while True:
            found = lanes.take([rows - done for rows, done in zip(real, filled, strict=True)])
            for lane, done in enumerate(filled):
                if done == real[lane]:
                    found[lane] = lanes.padding(lane, n[lane] - done)
            entries = np.concatenate(found)
            if not len(entries) and total:
                raise no_room()
            rows, coordinates = lanes.rows(entries), lanes.coordinates(entries)
            if len(entries) == total:
                where = coordinates
                self._gather(rows, act)
                filled = n
            else:
                at = 0
                for lane, count in enumerate(map(len, found)):
                    to, some = bounds[lane] + filled[lane], slice(at, at + count)
                    for column, values in zip(where, coordinates, strict=True):
                        column[to : to + count] = values[some]
                    self._gather(rows[some], act[to : to + count])
                    filled[lane] += count
                    at += count
            lanes.release()
            lanes.pump()
            if filled == n:
                break
        self._eq.machinery.tally.window_fill = lanes.fill
        if self._eq.dressing.scale is not None:
            self._eq.window.scale(act, self._eq.dressing.scale)
        return self._eq.dressing.batch(act, where)

    def _gather(self, rows: IntArray, act: FloatArray) -> None:
        machinery, started = self._eq.machinery, time.perf_counter()
        self._eq.window.gather(rows, act, machinery)
        machinery.tally.gather_s += time.perf_counter() - started


class PlacedBatches:
    """The same batches, whose rows are put where they belong as soon as they are read.

    Args:
        order: The order of the epoch.
        partitions: This rank's.
        fill_up: As for `ShuffledBatches`.
        n_ahead: Cohorts read ahead of the window.
        equipment: What to make them with.
    """

    def __init__(
        self, order: ShuffledOrder, partitions: range, *, fill_up: bool, n_ahead: int, equipment: Equipment
    ) -> None:
        self._order, self._partitions, self._fill_up = order, partitions, fill_up
        self._n_ahead, self._eq = n_ahead, equipment

    def batches(self, first: int, stop: int) -> Iterator[Batch]:
        """The batches `first` to `stop`, counted from the epoch's beginning."""
        if first >= stop:
            return
        eq = self._eq
        ahead = BatchesAhead(
            [self._order.partition(number) for number in self._partitions],
            first,
            stop,
            fill_up=self._fill_up,
            n_ahead=self._n_ahead,
            # Two more are in the ring, begun and not full.
            n_lent=max(eq.outputs.n_kept - 2, 1),
            ring=eq.ring,
            reads=eq.reads,
            machinery=eq.machinery,
        )
        ahead.pump()
        n_least = (len(self._partitions) + 1) // 2
        for number in range(first, stop):
            act, where = ahead.batch(number)
            # Few large steps: what one costs is mostly its calls.
            ahead.pump(n_least=n_least)
            eq.machinery.tally.window_fill = ahead.fill
            if eq.dressing.scale is not None:
                eq.window.scale(act, eq.dressing.scale)
            batch = eq.dressing.batch(act, where)
            # The consumer alone decides how long it lives.
            del act, where
            yield batch
            del batch


class OrderedBatches:
    """Batches in storage order, read straight into their memory, several at a time.

    Args:
        space: The row space.
        batching: How it is cut.
        rank: Whose slices.
        n_ahead: Batches whose reads are under way at the same time.
        equipment: What to make them with.
    """

    def __init__(self, space: RowSpace, batching: Batching, rank: int, *, n_ahead: int, equipment: Equipment) -> None:
        self._space, self._batching, self._rank = space, batching, rank
        self._n_ahead, self._eq = n_ahead, equipment

    def batches(self, first: int, stop: int) -> Iterator[Batch]:
        """The batches `first` to `stop`, counted from the epoch's beginning."""
        reading: deque[tuple[FloatArray, Coordinates, Group]] = deque()
        for number in range(first, stop):
            reading.append(self._start(number))
            if len(reading) > self._n_ahead:
                yield self._finish(*reading.popleft())
        while reading:
            yield self._finish(*reading.popleft())

    def _finish(self, act: FloatArray, where: Coordinates, group: Group) -> Batch:
        group.wait(self._eq.machinery.stop)
        if self._eq.dressing.scale is not None:
            act *= np.float32(self._eq.dressing.scale)
        return self._eq.dressing.batch(act, where)

    def _start(self, number: int) -> tuple[FloatArray, Coordinates, Group]:
        start, stop = self._batching.rows_of_rank(number, self._rank)
        act = self._eq.outputs.get()[: stop - start]
        where, runs = plan_of_rows(self._space, start, stop)
        tasks = list(self._eq.reads.tasks(runs, Rows(act)))
        group = Group(len(tasks))
        for task, file in tasks:
            self._eq.machinery.readers.submit(task, group, file)
        return act, where, group


def plan_of_rows(space: RowSpace, start: int, stop: int) -> tuple[Coordinates, Runs]:
    """Where the rows `start` to `stop` in storage order come from, and the reads that bring them."""
    n_rows = len(space)
    if space.ends is not None or stop > n_rows or space.tokens.count == 1:
        # Row by row: where labels leave holes, and where the last row is repeated.
        row = np.minimum(np.arange(start, stop, dtype=np.int64), n_rows - 1)
        where = Coordinates(*space.locate(row))
        place = np.arange(stop - start, dtype=np.int64)
        return where, merged(runs_of_planes(space.layout, *where, np.ones_like(place), place))
    n_tokens = space.tokens.count
    plane = np.arange(start // n_tokens, -(-stop // n_tokens), dtype=np.int64)
    first = np.maximum(start - plane * n_tokens, 0)
    count = np.minimum(stop - plane * n_tokens, n_tokens) - first
    example, layer, _ = space.locate(plane * n_tokens)
    token = space.tokens.start + first
    runs = merged(runs_of_planes(space.layout, example, layer, token, count, np.cumsum(count) - count))
    within = np.arange(start, stop, dtype=np.int64) - np.repeat(plane * n_tokens, count)
    return Coordinates(np.repeat(example, count), np.repeat(layer, count), within + space.tokens.start), runs
