"""One stream of a shuffled order, and the places of its rows.

A window of blocks slides over each partition of the permuted blocks, one *tick* at a time. Blocks enter and leave the window
in *cohorts*. A cohort that lives l ticks emits, in its tick number a, the rows `floor(a*m/l)` to `floor((a+1)*m/l)` of each
block's own permutation (m: the block's rows), and the rows of a tick are permuted among each other.

The window is stationary from the first row to the last: the first cohorts live 1, 2, … w ticks and are as much smaller
as they live shorter, likewise the last ones. A window that holds all blocks is one tick, and thus one exact permutation.

With an early start the window grows instead: the first tick has one cohort, each tick one more, until there are w. The ticks
hand out rows in proportion, so that about as much waits in the window as has been handed out.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Callable, Sequence
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from saev_store.core.layout import IntArray
from saev_store.order._permutation import derive, ranges, shuffled_each, shuffled_rows, words
from saev_store.order._shuffle import ShuffledOrder

_TICKS = 3


class Emitted(NamedTuple):
    """Rows in the order they are handed out: number of the block and cell inside it, int64."""

    block: IntArray
    cell: IntArray


def _first_tick(cohort: IntArray, window_ticks: IntArray | int, start_ticks: IntArray | int) -> IntArray:
    """The ticks at which cohorts enter: two at each tick while the window grows, then one."""
    return np.maximum(np.maximum(cohort - window_ticks + 1, (cohort - start_ticks + 2) // 2), 0)


class Partition:
    """One stream of a `ShuffledOrder`: an equal share of the permuted rows, give or take one.

    The share's first and last block may belong to a neighbour in part; both then read it.

    Args:
        order: The order.
        number: Which of its partitions, from 0.
        window_blocks: Instead of the order's.

    Attributes:
        order: The order.
        number: Which of its partitions, from 0.
        first_row, end_row, n_rows: The share, counted in permuted rows.
        first_position, n_blocks: Its blocks, counted in the permutation.
        blocks_per_tick: Blocks of a full cohort.
        window_ticks: How many cohorts are in the window (w).
        start_ticks: How many of them are in it at the first tick (s); each tick has one more.
        n_ticks: Ticks that hand out all rows.
        n_cohorts: Cohorts of all blocks.
    """

    def __init__(self, order: ShuffledOrder, number: int, window_blocks: int | None = None) -> None:
        self.order, self.number = order, number
        self.first_row = number * order.n_rows // order.n_partitions
        self.end_row = (number + 1) * order.n_rows // order.n_partitions
        self.n_rows, self.first_position, self.n_blocks = self.end_row - self.first_row, 0, 0
        if self.n_rows:
            self.first_position = order.position_of(self.first_row)
            self.n_blocks = order.position_of(self.end_row - 1) + 1 - self.first_position
        most = window_blocks or order.window_blocks
        if not self.n_blocks or (self.n_blocks <= most and not order.early_start):
            self.blocks_per_tick, self.window_ticks = max(self.n_blocks, 1), 1
        else:
            wanted = round(order.rows_per_tick * self.n_blocks / self.n_rows)
            most = min(most, self.n_blocks)
            self.blocks_per_tick = min(max(wanted, 1), most)
            self.window_ticks = most // self.blocks_per_tick
        self.start_ticks = 1 if order.early_start else self.window_ticks
        # Cohort-ticks that a growing window lacks; further ticks make up for them.
        missing = (self.window_ticks - self.start_ticks) * (self.window_ticks - self.start_ticks + 1) // 2
        self.n_ticks = -(-self.n_blocks // self.blocks_per_tick) - (-missing // self.window_ticks)
        self.n_cohorts = self.n_ticks + self.window_ticks - 1 if self.n_blocks else 0
        self._n_lived = self.n_ticks * self.window_ticks - missing

    def window_rows(self, n_ahead: int) -> int:
        """Rows of the blocks of a window, with those of `n_ahead` cohorts read ahead."""
        # A window that holds everything has nothing to read ahead.
        n_cohorts = self.window_ticks + min(n_ahead, max(self.n_cohorts - self.window_ticks, 0))
        return n_cohorts * self.blocks_per_tick * self.order.blocks.cells_per_block

    def placed_rows(self, n_ahead: int) -> int:
        """Rows that as many successive ticks hand out at most: the room that `Placement` needs.

        These are the rows of as many cohorts, with what is rounded: cohorts are whole blocks, the first blocks hand out less
        than their share at first (never where a block is one row), and the last ones hand out the rest in the last tick.
        """
        w, longest = self.window_ticks, self.order.blocks.cells_per_block
        n_first = w if self.start_ticks < w else (w + 1) // 2
        rounded = 2 * longest + n_first * self.blocks_per_tick * (longest > 1)
        last = self.n_rows - self.emitted_before(max(self.n_ticks - w - n_ahead, 0))
        return min(max(self.window_rows(n_ahead) + rounded, last), self.n_rows)

    def first_block(self, cohort: int) -> int:
        """Blocks of this partition in the cohorts before `cohort`: their share of all block-ticks, rounded down."""
        n, grows = self.n_ticks, self.window_ticks - self.start_ticks
        # The sums, over the cohorts before this one, of the ticks that follow their last, and of their first ticks.
        behind = cohort * (cohort + 1) // 2 if cohort <= n else n * (n + 1) // 2 + (cohort - n) * n
        late = max(cohort - self.start_ticks, 0)  # cohorts that are not in the window at the first tick
        growing = min(late, 2 * grows)
        first = (growing + 1) ** 2 // 4 + (late - growing) * (late - growing + 1 + 2 * grows) // 2
        return (behind - first) * self.n_blocks // self._n_lived

    def entered(self, tick: int) -> int:
        """Cohorts that have entered the window at a tick, those that have left it included."""
        return min(tick + self.window_ticks, 2 * tick + self.start_ticks, self.n_cohorts)

    def lives(self, cohort: IntArray) -> tuple[IntArray, IntArray]:
        """The ticks at which cohorts enter, and how many ticks each lives."""
        first = _first_tick(cohort, self.window_ticks, self.start_ticks)
        return first, np.minimum(cohort, self.n_ticks - 1) - first + 1

    def block_numbers(self, cohort: int) -> IntArray:
        """The blocks of a cohort."""
        return self.numbers_between(cohort, cohort + 1)

    def numbers_between(self, cohort: int, stop: int) -> IntArray:
        """The blocks of some cohorts, up to `stop` and without it."""
        first, last = self.first_block(cohort), self.first_block(stop)
        return self.order.permutation.at(np.arange(self.first_position + first, self.first_position + last))

    def trim(self, start: int, stop: int, counts: IntArray) -> int:
        """Take the neighbours' rows off the rows of this partition's blocks `start` to `stop`, in place.

        Returns:
            How many rows of the first of them come before this partition's.
        """
        if start == stop:
            return 0
        if stop == self.n_blocks:
            counts[-1] -= self.order.rows_before(self.first_position + self.n_blocks) - self.end_row
        if start > 0:
            return 0
        skipped = self.first_row - self.order.rows_before(self.first_position)
        counts[0] -= skipped
        return skipped

    def emitted_before(self, tick: int) -> int:
        """Rows handed out in all ticks before `tick`: what makes resuming a binary search."""
        if tick >= self.n_ticks:
            return self.n_rows
        done = self.first_block(tick)
        total = min(self.order.rows_before(self.first_position + done), self.end_row) - self.first_row if done else 0
        last = self.entered(tick - 1)
        bounds = [self.first_block(cohort) for cohort in range(tick, last + 1)]
        if last <= tick or bounds[-1] == done:
            return total
        counts = self.order.sizes_between(self.first_position + done, self.first_position + bounds[-1])
        self.trim(done, bounds[-1], counts)
        cohort, n = np.arange(tick, last), np.diff(bounds)
        first, life = self.lives(cohort)
        return total + int((np.repeat(tick - first, n) * counts // np.repeat(life, n)).sum())

    def tick_of(self, position: int) -> int:
        """The tick that hands out the row at a position from 0 to `n_rows - 1`."""
        # Ticks are near their average pace, so that is where to look first.
        low = position * self.n_ticks // self.n_rows
        high, step = low + 1, 1
        while self.emitted_before(low) > position:
            low, high, step = max(low - step, 0), low, 2 * step
        while self.emitted_before(high) <= position:
            low, high, step = high, min(high + step, self.n_ticks), 2 * step
        return low + bisect_right(range(low + 1, high), position, key=self.emitted_before)

    def rows(self, start: int, stop: int) -> Emitted:
        """The rows at positions `start` to `stop`, by nothing but arithmetic; a loader gives them in the same order."""
        stop = min(stop, self.n_rows)
        if start >= stop:
            return Emitted(np.zeros(0, np.int64), np.zeros(0, np.int64))
        first, last = self.tick_of(start), self.tick_of(stop - 1)
        begin = self.emitted_before(first)
        placement = Placement([self], [first], 0)
        # Rows of all ticks whose cohorts enter get a place.
        n_placed = self.emitted_before(min(self.entered(last), self.n_ticks)) - begin
        block, cell = np.zeros(n_placed, np.int64), np.zeros(n_placed, np.int64)
        for cohort in range(first, self.entered(last)):
            placed = placement.enter([0], [cohort], lambda _, low, high: np.arange(low - begin, high - begin))
            block[placed.place], cell[placed.place] = placed.numbers[placed.block], placed.cell
        wanted = slice(start - begin, stop - begin)
        return Emitted(block[wanted], cell[wanted])


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


class Placement:
    """Places the rows of some partitions of one order, cohort by cohort.

    A tick is permuted when the first of its cohorts enters. The tick keeps the places of its rows in a line of a table until
    its last cohort has entered: four bytes for each row of the window. Each step is taken for several partitions at once,
    because its cost is mostly that of the calls.

    Args:
        partitions: The streams, at least one.
        first_tick: Of each partition, the first tick that is handed out. Its cohorts enter first, in rising order.
        n_ahead: Cohorts that may enter before the ticks of the window have been handed out.

    Attributes:
        depth: Of each partition, the cohorts that may have entered since the current tick.
        end: Of each partition, the position that follows all ticks whose cohorts have entered.
    """

    def __init__(self, partitions: Sequence[Partition], first_tick: Sequence[int], n_ahead: int) -> None:
        self._parts, self._order = partitions, partitions[0].order
        self.depth = [max(min(part.window_ticks + n_ahead, part.n_cohorts), 1) for part in partitions]
        # The same by partition, for many blocks at once.
        self._first_tick = np.array(first_tick)
        self._depth = np.array(self.depth)
        self._window_ticks = np.array([part.window_ticks for part in partitions])
        self._start_ticks = np.array([part.start_ticks for part in partitions])
        self._n_ticks = np.array([part.n_ticks for part in partitions])
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

    def enter(self, lanes: Sequence[int], cohorts: Sequence[int], where: Where) -> PlacedRows:
        """Place the rows of the next cohort of some partitions, except those of ticks before the first.

        Args:
            lanes: Which of the partitions, each once.
            cohorts: The cohort of each.
            where: Gives positions a meaning. Called once for each position of a tick, when its first cohort enters.
        """
        self._permute(lanes, cohorts, where)
        order, blocks = self._order, self._order.blocks
        parts = [self._parts[lane] for lane in lanes]
        bounds = [(part.first_block(t), part.first_block(t + 1)) for part, t in zip(parts, cohorts, strict=True)]
        n_blocks = np.array([stop - start for start, stop in bounds])
        numbers = self._numbers(lanes, bounds)
        counts = blocks.sizes(numbers)
        # Of each block its own permutation, without the rows of neighbouring partitions.
        cells = shuffled_rows(words(order.row_key, numbers), counts)
        kept = None if blocks.is_uniform else blocks.kept_cells(numbers)
        if kept is not None:
            cells = np.take_along_axis(kept, cells, axis=1)
        counts, at = counts.copy(), 0
        for part, (start, stop) in zip(parts, bounds, strict=True):
            if skipped := part.trim(start, stop, counts[at : at + stop - start]):
                n = int(counts[at])
                cells[at, :n] = cells[at, skipped : skipped + n].copy()
            at += stop - start
        # Of each lane the first tick of its cohort and how many ticks this lives; then of each block, as columns.
        lane, cohort = np.array(lanes), np.array(cohorts)
        first = _first_tick(cohort, self._window_ticks[lane], self._start_ticks[lane])
        life = np.minimum(cohort, self._n_ticks[lane] - 1) - first + 1
        lane, first, life = (np.repeat(column, n_blocks)[:, None] for column in (lane, first, life))
        age = np.arange(int(life.max(initial=0)))
        # Of each block the ranks from `low` on are handed out `n` in a tick.
        rows = counts[:, None]
        low = age * rows // life
        lives = (age < life) & (first + age >= self._first_tick[lane])
        n = np.where(lives, (age + 1) * rows // life - low, 0)
        line = self._first_line[lane] + (first + age) % self._depth[lane]
        # Before the rows of a block come those of the blocks before it, and of the cohorts that entered earlier.
        before = np.cumsum(n, axis=0) - n
        some = n_blocks[n_blocks > 0]
        before -= np.repeat(before[np.cumsum(some) - some], some, axis=0)
        start = line * self._places.shape[1] + self._n_placed[line] + before
        np.add.at(self._n_placed, line, n)
        block = np.arange(len(n))
        place = self._places.ravel()[ranges(start.ravel(), n.ravel())]
        width, cell = cells.shape[1], cells.ravel()
        of_block = n.sum(axis=1)
        if not bool((of_block == width).all()):
            cell = cell[ranges((block[:, None] * width + low).ravel(), n.ravel())]
        return PlacedRows(numbers, n_blocks, np.repeat(block, of_block), cell, place)

    def end_after(self, lane: int, cohort: int) -> int:
        """What `end` will be of a partition once a cohort, the next one, has entered."""
        if self._end_after[lane][0] != cohort:
            part = self._parts[lane]
            self._end_after[lane] = cohort, part.emitted_before(min(cohort + 1, part.n_ticks))
        return self._end_after[lane][1]

    def _permute(self, lanes: Sequence[int], cohorts: Sequence[int], where: Where) -> None:
        """Give a line to the tick that cohorts are the first of."""
        pairs = [(lane, t) for lane, t in zip(lanes, cohorts, strict=True) if t < self._parts[lane].n_ticks]
        if not pairs:
            return
        begins = [self.end[lane] for lane, _ in pairs]
        for lane, tick in pairs:
            self.end[lane] = self.end_after(lane, tick)
        n_rows = [self.end[lane] - begin for (lane, _), begin in zip(pairs, begins, strict=True)]
        # Seeds the permutation of the rows of each tick.
        keys = np.array(
            [derive(self._order.key, _TICKS, self._parts[lane].number, tick) for lane, tick in pairs], np.uint64
        )
        order = shuffled_each(keys, np.array(n_rows))
        place = np.empty(len(order), dtype=np.int32)
        place[order] = np.concatenate(
            [where(lane, begin, begin + n) for (lane, _), begin, n in zip(pairs, begins, n_rows, strict=True)]
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
            found = self._order.permutation.at(ranges(np.array(first), np.array(count)))
            for (lane, start, _), numbers in zip(unknown, np.split(found, np.cumsum(count)[:-1]), strict=True):
                self._known[lane] = start, numbers
        return np.concatenate(
            [
                self._known[lane][1][start - self._known[lane][0] : stop - self._known[lane][0]]
                for lane, (start, stop) in zip(lanes, bounds, strict=True)
            ]
        )
