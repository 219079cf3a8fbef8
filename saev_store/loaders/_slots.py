"""How blocks lie in the window's memory: whole, or row by row. Which of the two never changes what is handed out."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise

import numpy as np
import numpy.typing as npt

from saev_store.layout import IntArray
from saev_store.loaders._reads import Runs, merged, runs_of_planes
from saev_store.order import Blocks, Cohort, Partition, Window


def runs_of_blocks(blocks: Blocks, numbers: IntArray, first_row: IntArray, n_blocks: IntArray) -> Runs:
    """The reads of whole blocks: block `numbers[i]` goes to the rows from `first_row[i]` on.

    The first `n_blocks[0]` of them are read by requests of their own, and so on.
    """
    space = blocks.space
    places = blocks.places(numbers)
    which = np.repeat(np.arange(len(numbers)), places.n_examples)
    within = np.arange(len(which)) - np.repeat(np.cumsum(places.n_examples) - places.n_examples, places.n_examples)
    example = blocks.examples(places.first[which] + within)
    layer = np.asarray(space.layer_idx, dtype=np.int64)[places.layer[which]]
    token, count = np.full_like(example, space.tokens.start), np.full_like(example, space.tokens.count)
    place = first_row[which] + within * space.tokens.count
    origin = np.repeat(np.arange(len(n_blocks)), n_blocks)[which]
    return merged(runs_of_planes(space.layout, example, layer, token, count, place, origin))


def n_rows_of(partition: Partition, n_ahead: int, *, rows_apart: bool) -> int:
    """Rows of memory that a partition's window needs to read `n_ahead` cohorts ahead."""
    # A window that holds everything has nothing to read ahead.
    n_ahead = min(n_ahead, max(partition.n_cohorts - partition.window_ticks, 0))
    return (RowSlots if rows_apart else BlockSlots).n_rows(partition, n_ahead)


class BlockSlots:
    """A block lies as it does in its file; cohort t has line `t % depth`.

    The fastest arrangement to fill. A block keeps its memory until its last row is handed out, so on average half of the
    memory holds rows that are gone.
    """

    def __init__(self, window: Window) -> None:
        self._window = window

    @staticmethod
    def n_rows(partition: Partition, n_ahead: int) -> int:
        """Rows of memory that a partition needs to read `n_ahead` cohorts ahead."""
        width = partition.blocks_per_tick * partition.order.blocks.cells_per_block
        return (partition.window_ticks + n_ahead) * width

    def fits(self, lane: int, partition: Partition, cohort: int, tick: int) -> bool:  # noqa: ARG002  # the other kind asks
        """Whether a cohort can be taken in, given that its line is free."""
        return True

    def runs(self, lanes: Sequence[int], entered: Cohort, spent: IntArray) -> Runs:  # noqa: ARG002  # the other kind asks
        """The reads that bring cohorts, of whose blocks the first `spent` rows are not wanted any more."""
        first_row = entered.slots * self._window.longest
        return runs_of_blocks(self._window.order.blocks, entered.numbers, first_row, entered.n_blocks)

    def locate(self, entries: IntArray) -> IntArray:
        """Rows of the memory where entries lie."""
        longest = self._window.longest
        return entries // longest * longest + self._window.cells.reshape(-1)[entries]

    def release(self, lane: int, entries: IntArray) -> None:
        """Rows of the memory were copied out: nothing to do, a line is free when its cohort has left."""


class RowSlots:
    """A row that was handed out makes room for a row of the next block, which is read through an I/O vector.

    Twice as many blocks fit into the same memory, for the price of longer I/O vectors. Each lane has a part of it.
    """

    def __init__(self, window: Window, n_rows: Sequence[int]) -> None:
        self._window = window
        ends = np.cumsum([0, *n_rows])
        self._free = [np.arange(lo, hi, dtype=np.int64)[::-1].copy() for lo, hi in pairwise(ends.tolist())]
        self._n_free = list(n_rows)
        self._place: npt.NDArray[np.int32] = np.zeros_like(window.cells)

    @staticmethod
    def n_rows(partition: Partition, n_ahead: int) -> int:
        """Rows of memory that a partition needs to read `n_ahead` cohorts ahead."""
        w, width, longest = partition.window_ticks, partition.blocks_per_tick, partition.order.blocks.cells_per_block
        age = np.arange(w)
        waiting = width * int((longest - age * longest // w).sum())
        # Shares are rounded down, by less than a row of each block, and cohorts by less than a block.
        return min(waiting + w * width + 2 * longest, (w + 1) * width * longest) + n_ahead * width * longest

    def fits(self, lane: int, partition: Partition, cohort: int, tick: int) -> bool:
        """Whether the rows that a lane's cohort hands out from a tick on can be taken in."""
        return partition.rows_left(cohort, tick) <= self._n_free[lane]

    def runs(self, lanes: Sequence[int], entered: Cohort, spent: IntArray) -> Runs:
        """The reads that bring cohorts of some lanes, without the first `spent` rows of each block.

        Free rows of the memory in rising order are given to the wanted cells in rising order: long runs, few buffers.
        """
        blocks, space = self._window.order.blocks, self._window.order.blocks.space
        rank = np.arange(entered.cells.shape[1])
        wanted = (rank >= spent[:, None]) & (rank < entered.counts[:, None])
        block, rank = np.nonzero(wanted)
        cell = entered.cells[wanted].astype(np.int64)
        order = np.lexsort((cell, block))
        block, rank, cell = block[order], rank[order], cell[order]
        ends = np.concatenate(([0], np.cumsum(entered.counts - spent)))[np.cumsum(entered.n_blocks)]
        free = np.concatenate(
            [self._take(lane, n) for lane, n in zip(lanes, np.diff(ends, prepend=0).tolist(), strict=True)]
        )
        self._place[entered.slots[block], rank] = free
        places = blocks.places(entered.numbers)
        within, token = np.divmod(cell, np.int64(space.tokens.count))
        example = blocks.examples(places.first[block] + within)
        layer = np.asarray(space.layer_idx, dtype=np.int64)[places.layer[block]]
        count, origin = np.ones_like(cell), np.repeat(np.arange(len(lanes)), entered.n_blocks)[block]
        return merged(runs_of_planes(space.layout, example, layer, token + space.tokens.start, count, free, origin))

    def locate(self, entries: IntArray) -> IntArray:
        """Rows of the memory where entries lie."""
        return self._place.reshape(-1)[entries].astype(np.int64)

    def _take(self, lane: int, n: int) -> IntArray:
        """Free rows of a lane's memory, in rising order."""
        self._n_free[lane] -= n
        return np.sort(self._free[lane][self._n_free[lane] : self._n_free[lane] + n])

    def release(self, lane: int, entries: IntArray) -> None:
        """Rows of the memory were copied out and may be overwritten."""
        self._free[lane][self._n_free[lane] : self._n_free[lane] + len(entries)] = self.locate(entries)
        self._n_free[lane] += len(entries)
