"""Makes batches: the two orders, over the same reads, in the thread of a run."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

from saev_store.layout import IntArray
from saev_store.loaders._lane import Lane
from saev_store.loaders._memory import Outputs, Rows, WindowMemory
from saev_store.loaders._reads import Reads, Runs, merged, runs_of_planes
from saev_store.loaders._run import Batch, Machinery
from saev_store.loaders._slots import BlockSlots, RowSlots
from saev_store.loaders._workers import Group
from saev_store.order import Batching, ShuffledOrder
from saev_store.reader import FloatArray
from saev_store.selection import Labels, RowSpace

#: The label of special tokens, which have none.
NO_LABEL = 255


class Coordinates(NamedTuple):
    """Where the rows of a batch come from: positions on the axes, int64."""

    example: IntArray
    layer: IntArray
    token: IntArray


@dataclass(frozen=True)
class Dressing:
    """Turns gathered rows and their coordinates into what a batch holds.

    Attributes:
        space: The row space.
        labels: The store's labels, or None where batches carry none.
        scale: Factor for all activations, or None.
    """

    space: RowSpace
    labels: Labels | None
    scale: float | None

    def batch(self, act: FloatArray, where: Coordinates) -> Batch:
        """The finished batch."""
        layout = self.space.layout
        token = where.token - layout.n_special_tokens
        batch: Batch = {"act": act, "example_idx": where.example, "token_idx": token}
        if len(self.space.layer_idx) > 1:
            batch["layer"] = np.asarray(layout.layers, dtype=np.int64)[where.layer]
        if self.labels is not None:
            # Special tokens have no label; 255 stands for "none" where they are mixed with content.
            found = self.labels[where.example, np.maximum(token, 0)]
            batch["token_labels"] = np.where(token < 0, np.uint8(NO_LABEL), found) if layout.cls_token else found
        return batch


def n_window_rows(order: ShuffledOrder, partitions: range, n_ahead: int, *, rows_apart: bool) -> int:
    """Rows of memory that the window of some partitions needs."""
    kind = RowSlots if rows_apart else BlockSlots
    return sum(kind.n_rows(order.partition(number), _ahead(order, number, n_ahead)) for number in partitions)


def _ahead(order: ShuffledOrder, number: int, n_ahead: int) -> int:
    """A window that holds everything has nothing to read ahead."""
    part = order.partition(number)
    return min(n_ahead, max(part.n_cohorts - part.window_ticks, 0))


@dataclass(frozen=True)
class Equipment:
    """What both kinds of batches are made with.

    Attributes:
        reads: Brings vectors into memory.
        machinery: Threads and counters.
        outputs: Memory of batches.
        window: Memory of the window, kept from epoch to epoch.
        dressing: What a batch holds besides vectors.
    """

    reads: Reads
    machinery: Machinery
    outputs: Outputs
    window: WindowMemory
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
        lanes = self._lanes(first)
        for number in range(first, stop):
            yield self._batch(number, lanes)

    def _lanes(self, first: int) -> list[Lane]:
        order, kind = self._order, RowSlots if self._rows_apart else BlockSlots
        parts = [order.partition(number) for number in self._partitions]
        aheads = [_ahead(order, part.number, self._n_ahead) for part in parts]
        needs = [kind.n_rows(part, ahead) for part, ahead in zip(parts, aheads, strict=True)]
        window = self._eq.window
        window.reserve(sum(needs), self._eq.reads.layout.d_model)
        lanes, base = list[Lane](), 0
        for part, ahead, n_rows in zip(parts, aheads, needs, strict=True):
            position = min(first * order.rows_per_tick, part.n_rows)
            rows = range(base, base + n_rows)
            lanes.append(Lane(part, ahead, window, rows, rows_apart=self._rows_apart, position=position))
            base += n_rows
        for lane in lanes:
            lane.pump(self._eq.reads, self._eq.machinery.readers)
        return lanes

    def _batch(self, number: int, lanes: list[Lane]) -> Batch:
        machinery, window, share = self._eq.machinery, self._eq.window, self._order.rows_per_tick
        longest, start = self._order.longest(), number * share
        ends = [min(start + share, longest if self._fill_up else lane.partition.n_rows) for lane in lanes]
        shares = [_Share(lane, max(end - start, 0), start) for lane, end in zip(lanes, ends, strict=True)]
        total = sum(part.n for part in shares)
        at = 0
        for part in shares:
            part.first = part.copied = at
            at += part.n
        act = window.batch(total)
        row, cell, block = (np.empty(total, dtype=np.int64) for _ in range(3))
        while True:
            for part in shares:
                part.take(self._eq.reads, machinery, row, cell, block)
            pending = [part.pending() for part in shares]
            if pending[0].start == 0 and pending[-1].stop == total:
                pending = [slice(0, total)]
            started = time.perf_counter()
            for some in pending:
                window.gather(row[some], act[some], machinery)
            machinery.tally.gather_s += time.perf_counter() - started
            for part in shares:
                part.copied = part.first + part.filled
                part.lane.release()
                part.lane.pump(self._eq.reads, machinery.readers)
            if all(part.filled == part.n for part in shares):
                break
        machinery.tally.window_fill = sum(lane.fill for lane in lanes) / len(lanes)
        if self._eq.dressing.scale is not None:
            window.scale(act, self._eq.dressing.scale)
        return self._eq.dressing.batch(act, self._coordinates(block, cell))

    def _coordinates(self, block: IntArray, cell: IntArray) -> Coordinates:
        blocks = self._order.blocks
        places = blocks.places(block)
        within, token = (0, cell) if blocks.examples_per_block == 1 else np.divmod(cell, blocks.space.tokens.count)
        layer = np.asarray(blocks.space.layer_idx, dtype=np.int64)[places.layer]
        return Coordinates(blocks.examples(places.first + within), layer, token + blocks.space.tokens.start)


@dataclass
class _Share:
    """One lane's part of a batch while it is filled."""

    lane: Lane
    n: int
    start: int
    first: int = 0
    filled: int = 0
    copied: int = 0

    def pending(self) -> slice:
        """Rows of the batch that were taken and not yet copied."""
        return slice(self.copied, self.first + self.filled)

    def take(self, reads: Reads, machinery: Machinery, row: IntArray, cell: IntArray, block: IntArray) -> None:
        """As many rows as the lane has without a release."""
        lane = self.lane
        left = lane.partition.n_rows - self.start - self.filled
        real = min(self.n - self.filled, max(left, 0))
        if real:
            entries = lane.take(real, reads, machinery.readers, machinery.stop)
        else:
            entries = lane.padding(self.n - self.filled, reads, machinery.readers, machinery.stop)
        part = slice(self.first + self.filled, self.first + self.filled + len(entries))
        row[part] = lane.rows(entries, padding=not real)
        emitted = lane.window.emitted(entries)
        block[part], cell[part] = emitted.block, emitted.cell
        self.filled += len(entries)


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
