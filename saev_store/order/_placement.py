"""The shuffle as it is carried out: where each row will be handed out, known as soon as its cohort enters the window."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, NamedTuple

import numpy as np
import numpy.typing as npt

from saev_store.core.layout import IntArray
from saev_store.order._permutation import ranges, shuffled_each, shuffled_rows, words

if TYPE_CHECKING:
    from saev_store.order._shuffle import Partition

#: Blocks of all partitions together whose numbers are computed at once: a cipher costs by the call.
_N_BLOCKS_AT_ONCE = 4096

#: Maps positions of a partition to places: (partition, first position, position after the last) -> int, below 2^31.
Where = Callable[[int, int, int], IntArray]


class PlacedRows(NamedTuple):
    """Rows of cohorts that enter the window together, block after block.

    Attributes:
        numbers: The cohorts' blocks, int64 (blocks,).
        n_blocks: How many of them are of each partition, int64 (partitions,).
        block: Which of the blocks a row is of, int64 (rows,).
        cell: Which cell of the block, int64 (rows,).
        place: Where it will be handed out, in terms of `Where`, int32 (rows,).
    """

    numbers: IntArray
    n_blocks: IntArray
    block: IntArray
    cell: IntArray
    place: npt.NDArray[np.int32]


class _Cohort(NamedTuple):
    """Blocks that enter the window together: their numbers, their rows, and the cells of these in the order of emission."""

    numbers: IntArray
    counts: IntArray
    cells: IntArray
    n_blocks: IntArray


class Placement:
    """Places the rows of some partitions of one order, cohort by cohort.

    A tick is permuted when the first of its cohorts enters. The tick keeps the places of its rows in a line of a table until
    its last cohort has entered: four bytes for each row of the window. Each step is taken for several partitions at once,
    because its cost is mostly that of the calls.

    Args:
        partitions: The streams, at least one.
        first_tick: Of each partition, the first tick that is handed out. Its cohorts enter first, in rising order.
        where: Gives positions a meaning; called once for each, in rising order.
        n_ahead: Cohorts that may enter before the ticks of the window have been handed out.

    Attributes:
        depth: Of each partition, the cohorts that may have entered since the current tick.
        end: Of each partition, the position that follows all ticks whose cohorts have entered.
    """

    def __init__(
        self, partitions: Sequence[Partition], first_tick: Sequence[int], where: Where, n_ahead: int = 0
    ) -> None:
        self._parts, self._first_tick, self._where = partitions, list(first_tick), where
        self._order = partitions[0].order
        self.depth = [max(min(part.window_ticks + n_ahead, part.n_cohorts), 1) for part in partitions]
        self._depth = np.array(self.depth, dtype=np.int64)
        self._first_line = np.cumsum(self._depth) - self._depth
        n_lines = int(self._depth.sum())
        self.end = [part.emitted_before(tick) for part, tick in zip(partitions, first_tick, strict=True)]
        self._end_after: list[tuple[int, int]] = [(-1, 0)] * len(self.end)
        # By line: how many rows of its tick have a place, and all places, in the order before the permutation.
        self._n_placed = np.zeros(n_lines, dtype=np.int64)
        self._places: npt.NDArray[np.int32] = np.zeros((n_lines, 0), dtype=np.int32)
        # Block numbers computed ahead of time: of each partition the first one's position, and the numbers.
        self._n_at_once = _N_BLOCKS_AT_ONCE // len(partitions)
        self._known: list[tuple[int, IntArray]] = [(0, np.zeros(0, dtype=np.int64))] * len(partitions)

    def enter(self, lanes: Sequence[int], cohorts: Sequence[int]) -> PlacedRows:
        """Place the rows of the next cohort of some partitions, except those of ticks before the first.

        Args:
            lanes: Which of the partitions, each once.
            cohorts: The cohort of each.
        """
        self._permute(lanes, cohorts)
        entered = self._cohort(lanes, cohorts)
        parts = [self._parts[lane] for lane in lanes]

        def each(values: Sequence[int]) -> IntArray:
            return np.repeat(np.array(values, dtype=np.int64), entered.n_blocks)[:, None]

        first = each([part.first_tick(cohort) for part, cohort in zip(parts, cohorts, strict=True)])
        life = each([part.life_ticks(cohort) for part, cohort in zip(parts, cohorts, strict=True)])
        lane = each(list(lanes))
        age = np.arange(int(life.max(initial=0)), dtype=np.int64)
        # Of each block the ranks from `low` on are handed out `n` in a tick.
        counts = entered.counts[:, None]
        low = age * counts // life
        lives = (age < life) & (first + age >= each([self._first_tick[lane] for lane in lanes]))
        n = np.where(lives, (age + 1) * counts // life - low, 0)
        line = self._first_line[lane] + (first + age) % self._depth[lane]
        # Before the rows of a block come those of the blocks before it, and of the cohorts that entered earlier.
        before = np.cumsum(n, axis=0) - n
        n_blocks = entered.n_blocks[entered.n_blocks > 0]
        before -= np.repeat(before[np.cumsum(n_blocks) - n_blocks], n_blocks, axis=0)
        start = line * self._places.shape[1] + self._n_placed[line] + before
        np.add.at(self._n_placed, line, n)
        block = np.arange(len(n), dtype=np.int64)
        place = self._places.reshape(-1)[ranges(start.reshape(-1), n.reshape(-1))]
        width = entered.cells.shape[1]
        of_block = n.sum(axis=1)
        if bool((of_block == width).all()):
            cell = entered.cells.reshape(-1)
        else:
            cell = entered.cells.reshape(-1)[ranges((block[:, None] * width + low).reshape(-1), n.reshape(-1))]
        return PlacedRows(entered.numbers, entered.n_blocks, np.repeat(block, of_block), cell, place)

    def end_after(self, lane: int, cohort: int) -> int:
        """What `end` will be of a partition once a cohort, the next one, has entered."""
        if self._end_after[lane][0] != cohort:
            part = self._parts[lane]
            self._end_after[lane] = cohort, part.emitted_before(min(cohort + 1, part.n_ticks))
        return self._end_after[lane][1]

    def _permute(self, lanes: Sequence[int], cohorts: Sequence[int]) -> None:
        """Give a line to the tick that cohorts are the first of."""
        pairs = [(lane, t) for lane, t in zip(lanes, cohorts, strict=True) if t < self._parts[lane].n_ticks]
        if not pairs:
            return
        begins = [self.end[lane] for lane, _ in pairs]
        for lane, tick in pairs:
            self.end[lane] = self.end_after(lane, tick)
        n_rows = [self.end[lane] - begin for (lane, _), begin in zip(pairs, begins, strict=True)]
        keys = np.array([self._parts[lane].tick_key(tick) for lane, tick in pairs], dtype=np.uint64)
        order = shuffled_each(keys, np.array(n_rows, dtype=np.int64))
        place = np.empty(len(order), dtype=np.int32)
        place[order] = np.concatenate(
            [self._where(lane, begin, begin + n) for (lane, _), begin, n in zip(pairs, begins, n_rows, strict=True)]
        )
        longest = max(n_rows)
        if longest > self._places.shape[1]:
            wider = np.zeros((len(self._places), longest + longest // 8), dtype=np.int32)
            wider[:, : self._places.shape[1]] = self._places
            self._places = wider
        at = 0
        for (lane, tick), n in zip(pairs, n_rows, strict=True):
            line = int(self._first_line[lane]) + tick % int(self._depth[lane])
            self._n_placed[line] = 0
            self._places[line, :n] = place[at : at + n]
            at += n

    def _cohort(self, lanes: Sequence[int], cohorts: Sequence[int]) -> _Cohort:
        """The blocks of a cohort of some partitions, each with its own permutation."""
        order, blocks = self._order, self._order.blocks
        parts = [self._parts[lane] for lane in lanes]
        bounds = [(part.first_block(t), part.first_block(t + 1)) for part, t in zip(parts, cohorts, strict=True)]
        numbers = self._numbers(lanes, bounds)
        counts = blocks.sizes(numbers)
        cells = shuffled_rows(words(order.row_key, numbers), counts)
        kept = blocks.kept_cells(numbers)
        if kept is not None:
            cells = np.take_along_axis(kept, cells, axis=1)
        counts, at = counts.copy(), 0
        for part, (start, stop) in zip(parts, bounds, strict=True):
            if skipped := part.trim(start, stop, counts[at : at + stop - start]):
                n = int(counts[at])
                cells[at, :n] = cells[at, skipped : skipped + n].copy()
            at += stop - start
        return _Cohort(numbers, counts, cells, np.array([stop - start for start, stop in bounds], dtype=np.int64))

    def _numbers(self, lanes: Sequence[int], bounds: Sequence[tuple[int, int]]) -> IntArray:
        """The numbers of the blocks from one bound to the other, counted from each partition's first block."""
        unknown = [
            (lane, start, stop)
            for lane, (start, stop) in zip(lanes, bounds, strict=True)
            if start < self._known[lane][0] or stop > self._known[lane][0] + len(self._known[lane][1])
        ]
        if unknown:
            parts = [self._parts[lane] for lane, _, _ in unknown]
            first = [part.first_position + start for part, (_, start, _) in zip(parts, unknown, strict=True)]
            count = [
                max(stop, min(start + self._n_at_once, part.n_blocks)) - start
                for part, (_, start, stop) in zip(parts, unknown, strict=True)
            ]
            found = self._order.blocks_at(ranges(np.array(first, dtype=np.int64), np.array(count, dtype=np.int64)))
            for (lane, start, _), numbers in zip(unknown, np.split(found, np.cumsum(count)[:-1]), strict=True):
                self._known[lane] = start, numbers
        return np.concatenate(
            [
                self._known[lane][1][start - self._known[lane][0] : stop - self._known[lane][0]]
                for lane, (start, stop) in zip(lanes, bounds, strict=True)
            ]
        )
