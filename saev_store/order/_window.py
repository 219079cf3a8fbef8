"""The window at work: which rows of the blocks in it come next. A few bytes per resident row, no IO."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np
import numpy.typing as npt

from saev_store.layout import IntArray

if TYPE_CHECKING:
    from saev_store.order._shuffle import Cohort, Emitted, Partition


class Window:
    """Tables of the cohorts in the window of one partition: cohort t lies in line `t % depth`.

    An *entry* is an index into the flattened tables: (line, block of the cohort, rank in the block's own order).

    Args:
        partition: The stream.
        depth: Lines: at least the partition's `window_ticks`, more to have cohorts ready ahead of time.

    Attributes:
        numbers: Block numbers, int64 (depth, blocks_per_tick).
        counts: Rows of each, int64 (depth, blocks_per_tick).
        cells: Cells in the order in which they are handed out, int32 (depth, blocks_per_tick, longest block).
    """

    def __init__(self, partition: Partition, depth: int) -> None:
        self.partition = partition
        self.depth = depth
        width = partition.blocks_per_tick
        self.longest = partition.order.blocks.cells_per_block
        self.numbers = np.zeros((depth, width), dtype=np.int64)
        self.counts = np.zeros((depth, width), dtype=np.int64)
        self.cells: npt.NDArray[np.int32] = np.zeros((depth, width, self.longest), dtype=np.int32)

    def admit(self, cohort: int) -> Cohort:
        """Compute a cohort and put it into its line, where a cohort that has left may still stand."""
        entered = self.partition.cohort(cohort)
        line, n = cohort % self.depth, len(entered.numbers)
        self.numbers[line, :n] = entered.numbers
        self.counts[line, :n] = entered.counts
        self.counts[line, n:] = 0
        self.cells[line, :n, : entered.cells.shape[1]] = entered.cells
        return entered

    def tick(self, tick: int) -> IntArray:
        """Entries of the rows that a tick hands out, in order; all cohorts of the tick have been admitted."""
        part = self.partition
        cohort = np.arange(tick, min(tick + part.window_ticks, part.n_cohorts), dtype=np.int64)
        first = np.maximum(0, cohort - part.window_ticks + 1)
        life = (np.minimum(cohort, part.n_ticks - 1) - first + 1)[:, None]
        age = (tick - first)[:, None]
        line = cohort % self.depth
        counts = self.counts[line]
        low = age * counts // life
        n = ((age + 1) * counts // life - low).reshape(-1)
        width = self.counts.shape[1]
        start = ((line[:, None] * width + np.arange(width)) * self.longest + low).reshape(-1)
        # Runs start[i], start[i] + 1, … of n[i] each, one after the other.
        before = np.cumsum(n) - n
        entries = np.repeat(start - before, n)
        entries += np.arange(len(entries), dtype=np.int64)
        return entries[part.tick_shuffle(tick, len(entries))]

    def emitted(self, entries: IntArray) -> Emitted:
        """Blocks and cells of entries."""
        from saev_store.order._shuffle import Emitted

        return Emitted(
            self.numbers.reshape(-1)[entries // self.longest], self.cells.reshape(-1)[entries].astype(np.int64)
        )
