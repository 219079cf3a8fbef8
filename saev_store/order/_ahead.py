"""Where rows will be handed out, known as soon as their cohort enters the window: the shuffle the other way round."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, NamedTuple

import numpy as np
import numpy.typing as npt

from saev_store.layout import IntArray
from saev_store.order._words import ranges, shuffled_each

if TYPE_CHECKING:
    from saev_store.order._shuffle import Cohort
    from saev_store.order._window import Window

#: Places for the rows at some positions of a partition: (partition, first position, position after the last), below 2^31.
Where = Callable[[int, int, int], IntArray]


class Ahead(NamedTuple):
    """Rows of cohorts that have just entered, block after block.

    Attributes:
        block: Which of the cohorts' blocks a row is of, int64.
        cell: Which cell of the block, int64.
        place: Where it will be handed out, in terms of `Where`, int32.
    """

    block: IntArray
    cell: IntArray
    place: npt.NDArray[np.int32]


class RowsAhead:
    """The order of some partitions, worked out cohort by cohort: what `Window.tick` does, inverted.

    A tick is permuted when the first of its cohorts enters; until its last one has, it has a line, as that cohort has in the
    window. Memory: four bytes per row of the window.

    Args:
        window: Which cohorts enter, in rising order, a partition's first one being that of its first tick.
        first_tick: Of each partition, the first tick that is handed out.
        where: Gives positions a meaning; asked once for each, in rising order.
    """

    def __init__(self, window: Window, first_tick: Sequence[int], where: Where) -> None:
        self._window, self._first_tick, self._where = window, list(first_tick), where
        self._depth = np.array(window.depth, dtype=np.int64)
        self._first_line = np.cumsum(self._depth) - self._depth
        n_lines = int(self._depth.sum())
        #: Of each partition, the position that follows all ticks whose cohorts have entered.
        self.end = [part.emitted_before(tick) for part, tick in zip(window.partitions, first_tick, strict=True)]
        self._end_after: list[tuple[int, int]] = [(-1, 0)] * len(self.end)
        # By line: how many rows of its tick have a place, and all places, in the order before the permutation.
        self._n_placed = np.zeros(n_lines, dtype=np.int64)
        self._places: npt.NDArray[np.int32] = np.zeros((n_lines, 0), dtype=np.int32)

    def enter(self, lanes: Sequence[int], cohorts: Sequence[int], entered: Cohort) -> Ahead:
        """The rows of cohorts that `Window.admit` has just let in, but for those of ticks before the first."""
        self._permute(lanes, cohorts)
        parts = [self._window.partitions[lane] for lane in lanes]

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
        return Ahead(np.repeat(block, of_block), cell, place)

    def end_after(self, lane: int, cohort: int) -> int:
        """What `end` will be of a partition once a cohort, the next one, has entered."""
        if self._end_after[lane][0] != cohort:
            part = self._window.partitions[lane]
            self._end_after[lane] = cohort, part.emitted_before(min(cohort + 1, part.n_ticks))
        return self._end_after[lane][1]

    def _permute(self, lanes: Sequence[int], cohorts: Sequence[int]) -> None:
        """Give a line to the tick that cohorts are the first of."""
        pairs = [(lane, t) for lane, t in zip(lanes, cohorts, strict=True) if t < self._window.partitions[lane].n_ticks]
        if not pairs:
            return
        begins = [self.end[lane] for lane, _ in pairs]
        for lane, tick in pairs:
            self.end[lane] = self.end_after(lane, tick)
        n_rows = [self.end[lane] - begin for (lane, _), begin in zip(pairs, begins, strict=True)]
        keys = np.array([self._window.partitions[lane].tick_key(tick) for lane, tick in pairs], dtype=np.uint64)
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
