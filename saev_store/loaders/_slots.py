"""How blocks lie in the window's memory: whole, or row by row. Which of the two never changes what is handed out."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from saev_store.layout import IntArray
from saev_store.loaders._reads import Runs, merged, runs_of_planes
from saev_store.order import Blocks, Cohort, Partition, Window


def runs_of_blocks(blocks: Blocks, numbers: IntArray, first_row: IntArray) -> Runs:
    """The reads of whole blocks: block `numbers[i]` goes to the rows from `first_row[i]` on."""
    space = blocks.space
    places = blocks.places(numbers)
    which = np.repeat(np.arange(len(numbers)), places.n_examples)
    within = np.arange(len(which)) - np.repeat(np.cumsum(places.n_examples) - places.n_examples, places.n_examples)
    example = blocks.examples(places.first[which] + within)
    layer = np.asarray(space.layer_idx, dtype=np.int64)[places.layer[which]]
    token, count = np.full_like(example, space.tokens.start), np.full_like(example, space.tokens.count)
    return runs_of_planes(space.layout, example, layer, token, count, first_row[which] + within * space.tokens.count)


class BlockSlots:
    """A block lies as it does in its file; cohort t has line `t % depth`.

    The fastest arrangement to fill. A block keeps its memory until its last row is handed out, so on average half of the
    memory holds rows that are gone.
    """

    def __init__(self, blocks: Blocks, window: Window) -> None:
        self._blocks, self._window = blocks, window

    @staticmethod
    def n_rows(partition: Partition, n_ahead: int) -> int:
        """Rows of memory that a lane needs to read `n_ahead` cohorts ahead."""
        width = partition.blocks_per_tick * partition.order.blocks.cells_per_block
        return (partition.window_ticks + n_ahead) * width

    def fits(self, n_rows: int) -> bool:  # noqa: ARG002  # the other kind of slots asks
        """Whether a cohort of that many rows can be taken in, given that its line is free."""
        return True

    def runs(self, cohort: int, entered: Cohort, spent: IntArray) -> Runs:  # noqa: ARG002  # the other kind of slots asks
        """The reads that bring a cohort, of whose blocks the first `spent` rows are not wanted any more."""
        line, width = cohort % self._window.depth, self._window.numbers.shape[1]
        slot = line * width + np.arange(len(entered.numbers), dtype=np.int64)
        return runs_of_blocks(self._blocks, entered.numbers, slot * self._blocks.cells_per_block)

    def locate(self, entries: IntArray) -> IntArray:
        """Rows of the memory where entries lie."""
        longest = self._window.longest
        return entries // longest * longest + self._window.cells.reshape(-1)[entries]

    def release(self, rows: IntArray) -> None:
        """Rows of the memory were copied out: nothing to do, a line is free when its cohort has left."""


class RowSlots:
    """A row that was handed out makes room for a row of the next block, which is read through an I/O vector.

    Twice as many blocks fit into the same memory, for the price of longer I/O vectors.
    """

    def __init__(self, blocks: Blocks, window: Window, n_rows: int) -> None:
        self._blocks, self._window = blocks, window
        self._free = np.arange(n_rows, dtype=np.int64)[::-1].copy()
        self._n_free = n_rows
        self._place: npt.NDArray[np.int32] = np.zeros_like(window.cells)

    @staticmethod
    def n_rows(partition: Partition, n_ahead: int) -> int:
        """Rows of memory that a lane needs to read `n_ahead` cohorts ahead."""
        w, width, longest = partition.window_ticks, partition.blocks_per_tick, partition.order.blocks.cells_per_block
        age = np.arange(w)
        waiting = width * int((longest - age * longest // w).sum())
        # Shares are rounded down, by less than a row of each block, and cohorts by less than a block.
        return min(waiting + w * width + 2 * longest, (w + 1) * width * longest) + n_ahead * width * longest

    def fits(self, n_rows: int) -> bool:
        """Whether a cohort of that many rows can be taken in."""
        return n_rows <= self._n_free

    def runs(self, cohort: int, entered: Cohort, spent: IntArray) -> Runs:
        """The reads that bring a cohort, without the first `spent` rows of each block.

        Free rows of the memory in rising order are given to the wanted cells in rising order: long runs, few buffers.
        """
        blocks, space = self._blocks, self._blocks.space
        rank = np.arange(entered.cells.shape[1])
        wanted = (rank >= spent[:, None]) & (rank < entered.counts[:, None])
        block, rank = np.nonzero(wanted)
        cell = entered.cells[wanted].astype(np.int64)
        order = np.lexsort((cell, block))
        block, rank, cell = block[order], rank[order], cell[order]
        self._n_free -= len(cell)
        free = np.sort(self._free[self._n_free : self._n_free + len(cell)])
        self._place[cohort % self._window.depth, block, rank] = free
        places = blocks.places(entered.numbers)
        within, token = np.divmod(cell, np.int64(space.tokens.count))
        example = blocks.examples(places.first[block] + within)
        layer = np.asarray(space.layer_idx, dtype=np.int64)[places.layer[block]]
        count = np.ones_like(cell)
        return merged(runs_of_planes(space.layout, example, layer, token + space.tokens.start, count, free))

    def locate(self, entries: IntArray) -> IntArray:
        """Rows of the memory where entries lie."""
        return self._place.reshape(-1)[entries].astype(np.int64)

    def release(self, rows: IntArray) -> None:
        """Rows of the memory were copied out and may be overwritten."""
        self._free[self._n_free : self._n_free + len(rows)] = rows
        self._n_free += len(rows)
