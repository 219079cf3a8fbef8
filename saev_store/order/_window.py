"""The windows at work: which rows of the blocks in them come next. A few bytes per resident row, no IO."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import numpy as np
import numpy.typing as npt

from saev_store.layout import IntArray
from saev_store.order._words import ranges, shuffled_each, shuffled_rows, words

if TYPE_CHECKING:
    from saev_store.order._shuffle import Cohort, Emitted, Partition


#: Blocks of all partitions together that are found out at once.
_N_BLOCKS_AT_ONCE = 4096


class _NextBlocks:
    """Which blocks come next in some partitions, found out many at a time: above a table's size it costs by the call."""

    def __init__(self, partitions: Sequence[Partition]) -> None:
        self._partitions, self._order = partitions, partitions[0].order
        self._n_at_once = _N_BLOCKS_AT_ONCE // len(partitions)
        self._first = [0] * len(partitions)
        self._numbers = [np.zeros(0, dtype=np.int64)] * len(partitions)

    def get(self, lanes: Sequence[int], bounds: Sequence[tuple[int, int]]) -> IntArray:
        """The numbers of the blocks from one bound to the other, counted from each partition's first block."""
        wanted = list(zip(lanes, bounds, strict=True))
        unknown = [
            (lane, start, stop)
            for lane, (start, stop) in wanted
            if start < self._first[lane] or stop > self._first[lane] + len(self._numbers[lane])
        ]
        if unknown:
            parts = [self._partitions[lane] for lane, _, _ in unknown]
            first = [part.first_position + start for part, (_, start, _) in zip(parts, unknown, strict=True)]
            count = [
                max(stop, min(start + self._n_at_once, part.n_blocks)) - start
                for part, (_, start, stop) in zip(parts, unknown, strict=True)
            ]
            found = self._order.blocks_at(ranges(np.array(first, dtype=np.int64), np.array(count, dtype=np.int64)))
            for (lane, start, _), numbers in zip(unknown, np.split(found, np.cumsum(count)[:-1]), strict=True):
                self._first[lane], self._numbers[lane] = start, numbers
        return np.concatenate(
            [
                self._numbers[lane][start - self._first[lane] : stop - self._first[lane]]
                for lane, (start, stop) in wanted
            ]
        )


class Window:
    """Tables of the cohorts in the windows of some partitions of one order, all in one piece.

    A *slot* is a block's place: cohort t of a partition has the slots of its line `t % depth`. An *entry* is an index into
    the flattened cells: `slot * longest + rank in the block's own order`. Every step is taken for several partitions at
    once, because what it costs is mostly the calls.

    Args:
        partitions: The streams, at least one.
        n_ahead: Lines besides a partition's `window_ticks`, to have cohorts ready ahead of time.

    Attributes:
        depth: Lines of each partition.
        longest: Cells of a full block.
        first_slot: Each partition's first slot, and at the end how many there are, int64 (n + 1,).
        numbers: Block numbers by slot, int64.
        counts: Rows of each, int64.
        cells: Cells in the order in which they are handed out, int32 (slots, longest).
    """

    def __init__(self, partitions: Sequence[Partition], n_ahead: int = 0) -> None:
        self.partitions, self.order = partitions, partitions[0].order
        self.depth = [max(min(part.window_ticks + n_ahead, part.n_cohorts), 1) for part in partitions]
        self._width = [part.blocks_per_tick for part in partitions]
        self.longest = self.order.blocks.cells_per_block
        sizes = [depth * width for depth, width in zip(self.depth, self._width, strict=True)]
        self.first_slot: IntArray = np.cumsum([0, *sizes])
        n_slots = int(self.first_slot[-1])
        self.numbers = np.zeros(n_slots, dtype=np.int64)
        self.counts = np.zeros(n_slots, dtype=np.int64)
        self.cells: npt.NDArray[np.int32] = np.zeros((n_slots, self.longest), dtype=np.int32)
        self._next_blocks = _NextBlocks(partitions)

    def admit(self, lanes: Sequence[int], cohorts: Sequence[int]) -> Cohort:
        """Compute the next cohort of some partitions and put each into its line, where one that has left may still stand.

        Args:
            lanes: Which of the partitions, each once.
            cohorts: The cohort of each.
        """
        from saev_store.order._shuffle import Cohort

        order, blocks = self.order, self.order.blocks
        parts = [self.partitions[lane] for lane in lanes]
        bounds = [(part.first_block(t), part.first_block(t + 1)) for part, t in zip(parts, cohorts, strict=True)]
        count = np.array([stop - start for start, stop in bounds], dtype=np.int64)
        lines = [self._line(lane, cohort) for lane, cohort in zip(lanes, cohorts, strict=True)]
        numbers = self._next_blocks.get(lanes, bounds)
        sizes = blocks.sizes(numbers)
        ranks = shuffled_rows(words(order.row_key, numbers), sizes)
        kept = blocks.kept_cells(numbers)
        if kept is not None:
            ranks = np.take_along_axis(kept, ranks, axis=1)
        counts, at = sizes.copy(), 0
        for part, (start, stop), line, width in zip(
            parts, bounds, lines, [self._width[lane] for lane in lanes], strict=True
        ):
            mine = slice(at, at + stop - start)
            if skipped := part.trim(start, stop, counts[mine]):
                n = int(counts[at])
                ranks[at, :n] = ranks[at, skipped : skipped + n].copy()
            self.counts[line : line + width] = 0
            at = mine.stop
        slots = ranges(np.array(lines, dtype=np.int64), count)
        self.numbers[slots], self.counts[slots] = numbers, counts
        self.cells[slots, : ranks.shape[1]] = ranks
        return Cohort(numbers, counts, ranks, slots, count)

    def _line(self, lane: int, cohort: int) -> int:
        """The first slot of a cohort."""
        return int(self.first_slot[lane]) + cohort % self.depth[lane] * self._width[lane]

    def tick(self, lanes: Sequence[int], ticks: Sequence[int]) -> list[IntArray]:
        """Entries of the rows that a tick of each of some partitions hands out, in order; its cohorts have been admitted."""
        parts = [self.partitions[lane] for lane in lanes]

        def each(values: Sequence[int]) -> IntArray:
            return np.repeat(np.array(values, dtype=np.int64), n_cohorts)

        n_cohorts = np.array(
            [min(t + part.window_ticks, part.n_cohorts) - t for part, t in zip(parts, ticks, strict=True)],
            dtype=np.int64,
        )
        tick, width = each(ticks), each([self._width[lane] for lane in lanes])
        cohort = ranges(np.array(ticks, dtype=np.int64), n_cohorts)
        first = np.maximum(0, cohort - each([part.window_ticks for part in parts]) + 1)
        life = np.minimum(cohort, each([part.n_ticks - 1 for part in parts])) - first + 1
        line = each(self.first_slot[list(lanes)].tolist()) + cohort % each([self.depth[lane] for lane in lanes]) * width
        slot, age, life = ranges(line, width), np.repeat(tick - first, width), np.repeat(life, width)
        counts = self.counts[slot]
        low = age * counts // life
        n = (age + 1) * counts // life - low
        entries = ranges(slot * self.longest + low, n)
        # Rows of each partition: the sum over its slots, of which it has width times cohorts.
        slots_of = n_cohorts * [self._width[lane] for lane in lanes]
        ends = np.concatenate(([0], np.cumsum(n)))[np.cumsum(slots_of)]
        n_rows = np.diff(ends, prepend=0)
        keys = [part.tick_key(t) for part, t in zip(parts, ticks, strict=True)]
        entries = entries[shuffled_each(np.array(keys, dtype=np.uint64), n_rows)]
        return np.split(entries, ends[:-1])

    def emitted(self, entries: IntArray) -> Emitted:
        """Blocks and cells of entries."""
        from saev_store.order._shuffle import Emitted

        return Emitted(self.numbers[entries // self.longest], self.cells.reshape(-1)[entries].astype(np.int64))
