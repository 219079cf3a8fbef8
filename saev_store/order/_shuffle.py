"""The shuffled order: a function of (seed, epoch, position), never materialised.

Blocks are permuted; the permuted blocks' rows are cut into equal *partitions*; a window of blocks slides over each
partition, one *tick* at a time. Blocks enter and leave the window in *cohorts*. A cohort that lives l ticks emits, in its
tick number a, the rows `floor(a*m/l)` to `floor((a+1)*m/l)` of each block's own permutation (m: the block's rows), and
the rows of a tick are permuted among each other. docs/loaders.md has the picture, and why it mixes well.

The window is stationary from the first row to the last: the first cohorts live 1, 2, … w ticks and are as much smaller
as they live shorter, likewise the last ones. A window that holds all blocks is one tick, and thus one exact permutation.
"""

from __future__ import annotations

from bisect import bisect_right
from dataclasses import dataclass
from functools import cached_property
from typing import ClassVar, NamedTuple

import numpy as np

from saev_store.core.layout import IntArray
from saev_store.errors import ArgumentError
from saev_store.order._blocks import Blocks
from saev_store.order._mixing import Mixing, predict_mixing
from saev_store.order._permutation import Permutation, derive
from saev_store.order._placement import Placement


@dataclass(frozen=True, slots=True)
class Batching:
    """How many batches an epoch has, and which rows a rank takes of each; all closed forms.

    Args:
        n_rows: Rows of an epoch, over all ranks.
        batch_size: Rows of a full batch, over all ranks.
        drop_last: Leave out the last batch where it would not be full.
        world: How many ranks share the work; divides `batch_size`.

    Raises:
        ArgumentError: a number is out of range.

    >>> batching = Batching(n_rows=10, batch_size=4, drop_last=False, world=2)
    >>> len(batching), [batching.rows_of_rank(2, rank) for rank in (0, 1)]
    (3, [(8, 9), (9, 10)])
    """

    n_rows: int
    batch_size: int
    drop_last: bool
    world: int = 1

    def __post_init__(self) -> None:
        if self.batch_size < 1 or self.world < 1 or self.batch_size % self.world:
            raise ArgumentError(
                f"a batch of {self.batch_size} rows cannot be shared by {self.world} ranks; it must be a positive multiple",
                where="batch_size",
            )

    def __len__(self) -> int:
        return self.n_rows // self.batch_size if self.drop_last else -(-self.n_rows // self.batch_size)

    @property
    def n_samples(self) -> int:
        """Rows that are handed out in an epoch, over all ranks, without those that fill up."""
        return len(self) * self.batch_size if self.drop_last else self.n_rows

    def rows_of_rank(self, batch: int, rank: int) -> tuple[int, int]:
        """The half-open range of rows of a batch that a rank takes.

        All ranks take equally many. Where that does not come out even (only in a last, partial batch), ranges reach past
        `n_rows`; the caller repeats the last row.
        """
        here = min(self.batch_size, self.n_rows - batch * self.batch_size)
        per_rank = -(-here // self.world)
        start = batch * self.batch_size + rank * per_rank
        return start, start + per_rank


_BLOCKS, _ROWS, _TICKS = 1, 2, 3


class Emitted(NamedTuple):
    """Rows in the order they are handed out: number of the block and cell inside it, int64."""

    block: IntArray
    cell: IntArray


@dataclass(frozen=True, eq=False)
class ShuffledOrder:
    """A seeded shuffle of all rows of a row space, in `n_partitions` streams of equal length.

    Args:
        blocks: What is shuffled.
        seed: Any integer.
        epoch: Each epoch has an order of its own.
        n_partitions: Streams that can be read independently, such as one per rank.
        window_blocks: How many blocks of one partition are in the window at most.
        rows_per_tick: About how many rows a tick hands out: the rows of a batch that come from one partition.

    Raises:
        ArgumentError: a number is below 1.
    """

    #: Changes whenever the same arguments would give another order; part of every saved state.
    VERSION: ClassVar[int] = 1

    blocks: Blocks
    seed: int
    epoch: int
    n_partitions: int
    window_blocks: int
    rows_per_tick: int

    def __post_init__(self) -> None:
        for name in ("n_partitions", "window_blocks", "rows_per_tick"):
            if getattr(self, name) < 1:
                raise ArgumentError(f"{name} is {getattr(self, name)}; it must be at least 1", where=name)

    @cached_property
    def key(self) -> int:
        return derive(self.seed, self.epoch, self.VERSION)

    @cached_property
    def _permutation(self) -> Permutation:
        return Permutation(max(len(self.blocks), 1), derive(self.key, _BLOCKS))

    @cached_property
    def row_key(self) -> int:
        """Seeds every block's own permutation."""
        return derive(self.key, _ROWS)

    @cached_property
    def _ends(self) -> IntArray | None:
        """With ignored labels: rows in the first 0, 1, 2, … permuted blocks; 8 bytes a block, the only table there is."""
        if self.blocks.is_uniform:
            return None
        ends = np.zeros(len(self.blocks) + 1, dtype=np.int64)
        step = 1 << 20
        for start in range(0, len(self.blocks), step):
            stop = min(start + step, len(self.blocks))
            ends[start + 1 : stop + 1] = self.blocks.sizes(self._permutation.at(np.arange(start, stop, dtype=np.int64)))
        return np.cumsum(ends, out=ends)

    @cached_property
    def _odd_positions(self) -> IntArray:
        return np.sort(self._permutation.position_of(self.blocks.odd()))

    @property
    def _odd_size(self) -> int:
        """Rows of the blocks that are not full, where no labels are ignored."""
        return (self.blocks.space.n_examples % self.blocks.examples_per_block) * self.blocks.space.tokens.count

    def block_numbers(self, start: int, stop: int) -> IntArray:
        """The blocks at positions `start` to `stop` of the permutation."""
        return self.blocks_at(np.arange(start, stop, dtype=np.int64))

    def blocks_at(self, positions: IntArray) -> IntArray:
        """The blocks at some positions of the permutation."""
        return self._permutation.at(positions)

    def rows_before(self, position: int) -> int:
        """Rows in all permuted blocks before a position."""
        if self._ends is not None:
            return int(self._ends[position])
        odd, full = self._odd_positions, self.blocks.cells_per_block
        return position * full - int(np.searchsorted(odd, position)) * (full - self._odd_size)

    def sizes_between(self, start: int, stop: int) -> IntArray:
        """Rows of the blocks at positions `start` to `stop` of the permutation, without asking which blocks these are."""
        if self._ends is not None:
            return np.diff(self._ends[start : stop + 1])
        sizes = np.full(stop - start, self.blocks.cells_per_block, dtype=np.int64)
        first, last = np.searchsorted(self._odd_positions, [start, stop])
        sizes[self._odd_positions[first:last] - start] = self._odd_size
        return sizes

    def position_of(self, row: int) -> int:
        """The position of the block that holds the row number `row` of the permuted blocks."""
        if self._ends is not None:
            return int(np.searchsorted(self._ends, row, side="right")) - 1
        full = self.blocks.cells_per_block
        missing = len(self._odd_positions) * (full - self._odd_size)
        near = range(row // full, min((row + missing) // full, len(self.blocks) - 1) + 1)
        return near.start + bisect_right(near, row, lo=1, key=self.rows_before) - 1

    @property
    def n_rows(self) -> int:
        return self.blocks.n_rows

    def partition(self, number: int) -> Partition:
        """One of the streams, by number from 0."""
        return Partition(self, number)

    def mixing(self, batch_size: int, n_partitions: int | None = None) -> Mixing:
        """The expected mixing of a batch that takes `batch_size` rows from `n_partitions` of the partitions; default: all.

        >>> from saev_store.core.layout import Layout
        >>> from saev_store.core.rows import row_space
        >>> rows = row_space(Layout(1_281_167, (11,), 196, True, 768, 4000), tokens="content")
        >>> order = ShuffledOrder(Blocks(rows), 17, 0, n_partitions=8, window_blocks=446, rows_per_tick=2048)
        >>> mixing = order.mixing(16_384)
        >>> round(mixing.distinct_examples), round(mixing.full_shuffle)
        (3573, 16280)
        """
        return predict_mixing(self, batch_size, n_partitions)

    def longest(self) -> int:
        """Rows of the longest partition; the others have at most one row less."""
        return -(-self.n_rows // self.n_partitions)


class Partition:
    """One stream of a `ShuffledOrder`: an equal share of the permuted rows, give or take one.

    The share's first and last block may belong to a neighbour in part; both then read it.

    Attributes:
        order: The order.
        number: Which of its partitions, from 0.
        first_row, end_row, n_rows: The share, counted in permuted rows.
        first_position, n_blocks: Its blocks, counted in the permutation.
        blocks_per_tick: Blocks of a full cohort.
        window_ticks: How many cohorts are in the window (w).
        n_ticks: Ticks that hand out all rows.
        n_cohorts: Cohorts of all blocks.
    """

    def __init__(self, order: ShuffledOrder, number: int) -> None:
        self.order, self.number = order, number
        self.first_row = number * order.n_rows // order.n_partitions
        self.end_row = (number + 1) * order.n_rows // order.n_partitions
        self.n_rows, self.first_position, self.n_blocks = self.end_row - self.first_row, 0, 0
        if self.n_rows:
            self.first_position = order.position_of(self.first_row)
            self.n_blocks = order.position_of(self.end_row - 1) + 1 - self.first_position
        if self.n_blocks <= order.window_blocks:
            self.blocks_per_tick, self.window_ticks = max(self.n_blocks, 1), 1
        else:
            wanted = round(order.rows_per_tick * self.n_blocks / self.n_rows)
            self.blocks_per_tick = min(max(wanted, 1), order.window_blocks)
            self.window_ticks = order.window_blocks // self.blocks_per_tick
        self.n_ticks = -(-self.n_blocks // self.blocks_per_tick)
        self.n_cohorts = self.n_ticks + self.window_ticks - 1 if self.n_blocks else 0

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
        rounded = 2 * longest + (w + 1) // 2 * self.blocks_per_tick * (longest > 1)
        last = self.n_rows - self.emitted_before(max(self.n_ticks - w - n_ahead, 0))
        return min(max(self.window_rows(n_ahead) + rounded, last), self.n_rows)

    def first_block(self, cohort: int) -> int:
        """Blocks of this partition in the cohorts before `cohort`: their share of all block-ticks, rounded down."""
        w, n = self.window_ticks, self.n_cohorts
        if cohort <= w:
            lived = cohort * (cohort + 1) // 2
        elif cohort <= n - w:
            lived = w * (w + 1) // 2 + (cohort - w) * w
        else:
            lived = self.n_ticks * w - (n - cohort) * (n - cohort + 1) // 2
        return lived * self.n_blocks // (self.n_ticks * w)

    def first_tick(self, cohort: int) -> int:
        """The first tick that a cohort is needed for."""
        return max(0, cohort - self.window_ticks + 1)

    def life_ticks(self, cohort: int) -> int:
        """How many ticks a cohort lives."""
        return min(cohort, self.n_ticks - 1) - self.first_tick(cohort) + 1

    def block_numbers(self, cohort: int) -> IntArray:
        """The blocks of a cohort."""
        start, stop = self.first_block(cohort), self.first_block(cohort + 1)
        return self.order.block_numbers(self.first_position + start, self.first_position + stop)

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

    def _counts(self, start: int, stop: int) -> IntArray:
        """Rows of blocks, counted from this partition's first."""
        counts = self.order.sizes_between(self.first_position + start, self.first_position + stop)
        self.trim(start, stop, counts)
        return counts

    def emitted_before(self, tick: int) -> int:
        """Rows handed out in all ticks before `tick`: what makes resuming a binary search."""
        if tick >= self.n_ticks:
            return self.n_rows
        done = self.first_block(tick)
        total = min(self.order.rows_before(self.first_position + done), self.end_row) - self.first_row if done else 0
        last = min(tick + self.window_ticks - 1, self.n_cohorts)
        bounds = [self.first_block(cohort) for cohort in range(tick, last + 1)]
        if last <= tick or bounds[-1] == done:
            return total
        counts = self._counts(done, bounds[-1])
        cohort, n = np.arange(tick, last), np.diff(bounds)
        first = np.maximum(cohort - self.window_ticks + 1, 0)
        life = np.minimum(cohort, self.n_ticks - 1) - first + 1
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

    def tick_key(self, tick: int) -> int:
        """Seeds the permutation of the rows of a tick."""
        return derive(self.order.key, _TICKS, self.number, tick)

    def rows(self, start: int, stop: int) -> Emitted:
        """The rows at positions `start` to `stop`, by nothing but arithmetic; a loader gives them in the same order."""
        stop = min(stop, self.n_rows)
        if start >= stop:
            return Emitted(np.zeros(0, np.int64), np.zeros(0, np.int64))
        first, last = self.tick_of(start), self.tick_of(stop - 1)
        begin = self.emitted_before(first)
        placement = Placement([self], [first], lambda _, low, high: np.arange(low - begin, high - begin))
        # Rows of all ticks whose cohorts enter get a place.
        n_placed = self.emitted_before(min(last + self.window_ticks, self.n_ticks)) - begin
        block, cell = np.zeros(n_placed, np.int64), np.zeros(n_placed, np.int64)
        for cohort in range(first, min(last + self.window_ticks, self.n_cohorts)):
            placed = placement.enter([0], [cohort])
            block[placed.place], cell[placed.place] = placed.numbers[placed.block], placed.cell
        wanted = slice(start - begin, stop - begin)
        return Emitted(block[wanted], cell[wanted])
