"""The shuffled order: a function of (seed, epoch, position), never materialised.

Blocks are permuted; the permuted blocks' rows are cut into equal *partitions*, which `saev_store.order._partition` describes.
docs/loaders.md has the picture, and why it mixes well.
"""

from __future__ import annotations

from bisect import bisect_right
from functools import cached_property
from typing import ClassVar, NamedTuple

import numpy as np

from saev_store.core.indexing import Progression
from saev_store.core.layout import MAX_INT64, IntArray
from saev_store.core.rows import RowSpace
from saev_store.errors import ArgumentError
from saev_store.order._permutation import Permutation, derive


class Batching:
    """How many batches an epoch has, and which rows a rank takes of each; all closed forms.

    Args:
        n_rows: Rows of an epoch, over all ranks.
        batch_size: Rows of a full batch, over all ranks.
        drop_last: Leave out the last batch where it would not be full.
        world: How many ranks share the work; divides `batch_size`.

    Attributes:
        n_batches: Batches of an epoch.
        n_samples: Rows that are handed out in an epoch, over all ranks, without those that fill up.

    Raises:
        ArgumentError: a number is out of range.

    >>> batching = Batching(n_rows=10, batch_size=4, drop_last=False, world=2)
    >>> batching.n_batches, [batching.rows_of_rank(2, rank) for rank in (0, 1)]
    (3, [(8, 9), (9, 10)])
    """

    def __init__(self, n_rows: int, batch_size: int, drop_last: bool, world: int = 1) -> None:
        if batch_size < 1 or world < 1 or batch_size % world:
            raise ArgumentError(
                f"a batch of {batch_size} rows cannot be shared by {world} ranks; it must be a positive multiple",
                where="batch_size",
            )
        self.n_rows, self.batch_size, self.drop_last, self.world = n_rows, batch_size, drop_last, world
        self.n_batches = n_rows // batch_size if drop_last else -(-n_rows // batch_size)
        self.n_samples = self.n_batches * batch_size if drop_last else n_rows

    def rows_of_rank(self, batch: int, rank: int) -> tuple[int, int]:
        """The half-open range of rows of a batch that a rank takes.

        All ranks take equally many. Where that does not come out even (only in a last, partial batch), ranges reach past
        `n_rows`; the caller repeats the last row.
        """
        here = min(self.batch_size, self.n_rows - batch * self.batch_size)
        per_rank = -(-here // self.world)
        start = batch * self.batch_size + rank * per_rank
        return start, start + per_rank


class Places(NamedTuple):
    """Where blocks lie, one int64 array each.

    Attributes:
        first: The first chosen example of the block, counted among the chosen ones.
        n_examples: How many chosen examples it has: `examples_per_block`, fewer in the last group.
        layer: Its layer, counted among the chosen ones; 0 where these are stacked.
    """

    first: IntArray
    n_examples: IntArray
    layer: IntArray


class Blocks:
    """The blocks of a row space: one layer, or all stacked layers, of `examples_per_block` successive chosen examples each.

    Blocks are numbered by group of examples, in it by layer; those of which no row is kept have no number. Inside a block
    a *cell* is a token of the full block (example by example, token by token), and a *row* is a cell that is kept.

    Args:
        space: The chosen rows.
        examples_per_block: Examples of a full block.

    Attributes:
        n_blocks: How many there are.
        cells_per_block: Cells of a full block, ignored ones included.
        n_layers: Layers that are blocks apart: those chosen, or 1 where these are stacked.
        n_rows: Of the row space.
        n_short, short_rows: Without ignored labels: how many blocks at the end are smaller than the others, and their rows.
        is_uniform: Whether sizes follow from arithmetic: nothing is ignored.

    Raises:
        ArgumentError: a block would be empty or too large.

    >>> from saev_store.core.layout import Layout
    >>> from saev_store.core.rows import row_space
    >>> blocks = Blocks(row_space(Layout(7, (2, 5), 4, True, 8, 3), tokens="content"), examples_per_block=2)
    >>> blocks.n_blocks, blocks.sizes(np.arange(8)).tolist()
    (8, [8, 8, 8, 8, 8, 8, 4, 4])
    """

    #: A block's permutation is sorted in 24 bits (`shuffled_rows`), and no read of this many vectors is sensible anyway.
    MAX_ROWS: ClassVar[int] = (1 << 24) - 1

    def __init__(self, space: RowSpace, examples_per_block: int = 1) -> None:
        self.space, self.examples_per_block = space, examples_per_block
        self.cells_per_block = examples_per_block * space.tokens.count
        if examples_per_block < 1 or self.cells_per_block > self.MAX_ROWS:
            raise ArgumentError(
                f"a block of {examples_per_block} examples has {self.cells_per_block} vectors of a layer; it must "
                f"have 1 to {self.MAX_ROWS}",
                where="examples_per_block",
            )
        self.n_layers, self.n_rows = space.rows_per_token, space.n_rows
        n_groups = -(-space.n_examples // examples_per_block) if self.n_rows else 0
        self.n_short = self.short_rows = 0
        # With ignored labels: the groups of examples that keep any row, and their rows of one layer.
        self._groups: IntArray | None = None
        self._rows_of_group: IntArray | None = None
        self.is_uniform = space.ends is None
        if space.ends is not None:
            n_ends = len(space.ends)
            last = np.minimum(np.arange(n_groups) * examples_per_block + examples_per_block, n_ends) - 1
            rows = np.diff(space.ends[last], prepend=0) // self.n_layers
            self._groups = np.flatnonzero(rows)
            self._rows_of_group = rows[self._groups]
            n_groups = len(self._groups)
        elif n_groups and space.n_examples % examples_per_block:
            self.n_short = self.n_layers
            self.short_rows = space.n_examples % examples_per_block * space.tokens.count
        self.n_blocks = n_groups * self.n_layers

    def sizes(self, numbers: IntArray) -> IntArray:
        """Rows of blocks, int64."""
        if self._rows_of_group is not None:
            return self._rows_of_group[numbers // self.n_layers]
        return self.places(numbers).n_examples * self.space.tokens.count

    def places(self, numbers: IntArray) -> Places:
        """Which examples and which layer blocks hold."""
        group, layer = np.divmod(numbers, np.int64(self.n_layers))
        if self._groups is not None:
            group = self._groups[group]
        first = group * self.examples_per_block
        return Places(first, np.minimum(self.examples_per_block, self.space.n_examples - first), layer)

    def kept_cells(self, numbers: IntArray) -> IntArray | None:
        """The cell of every row: (blocks, cells), each line beginning with the kept cells in order; None if all are kept."""
        labels, kept = self.space.labels, self.space.kept
        if labels is None or kept is None:
            return None
        places = self.places(numbers)
        n_content = self.space.layout.content_tokens_per_example
        n_special = self.space.tokens.count - n_content
        within = np.arange(self.examples_per_block)
        there = within < places.n_examples[:, None]
        ordinal = np.minimum(places.first[:, None] + within, self.space.n_examples - 1)
        stays = np.ones((len(numbers), self.examples_per_block, self.space.tokens.count), dtype=np.bool_)
        stays[:, :, n_special:] = kept[labels[self.space.example(ordinal)]]
        stays &= there[:, :, None]
        # A stable sort of "not kept" puts the kept cells first, in order.
        return np.argsort(~stays.reshape(len(numbers), self.cells_per_block), axis=1, kind="stable").astype(np.int64)

    def numbers_of(self, example: IntArray, layer_idx: IntArray) -> IntArray:
        """The blocks that hold examples and layers, both by position on their axes; -1 where none does."""
        layers = np.full(self.space.layout.n_layers, -1)
        layers[self.space.row_layers] = np.arange(self.n_layers)[:, None]
        layer, ordinal = layers[layer_idx], self._ordinals(example)
        group = ordinal // self.examples_per_block
        known = (layer >= 0) & (ordinal >= 0)
        if self._groups is not None:
            nth = np.searchsorted(self._groups, group)
            known &= np.append(self._groups, -1)[nth] == group
            group = nth
        return np.where(known, group * self.n_layers + layer, -1)

    def _ordinals(self, example: IntArray) -> IntArray:
        """Which of the chosen examples these are; the first one where it was chosen repeatedly; -1 if it was not."""
        chosen = self.space.examples
        if isinstance(chosen, Progression):
            ordinal, rest = np.divmod(example - chosen.start, chosen.step)
            return np.where((rest == 0) & (ordinal >= 0) & (ordinal < chosen.count), ordinal, -1)
        order, ascending = self._sorted_examples
        nth = np.searchsorted(ascending, example)
        return np.where(ascending[nth] == example, order[nth], -1)

    @cached_property
    def _sorted_examples(self) -> tuple[IntArray, IntArray]:
        """Chosen one by one: which of them, and the examples, by rising example; behind them none, beyond all examples."""
        chosen = self.space.example(np.arange(self.space.n_examples))
        order = np.argsort(chosen, kind="stable")
        return np.append(order, -1), np.append(chosen[order], MAX_INT64)


_BLOCKS, _ROWS = 1, 2
#: Blocks whose sizes are looked up at once.
_N_AT_ONCE = 1 << 20


class ShuffledOrder:
    """A seeded shuffle of all rows of a row space, in `n_partitions` streams of equal length.

    Args:
        blocks: What is shuffled.
        seed: Any integer.
        epoch: Each epoch has an order of its own.
        n_partitions: Streams that can be read independently, such as one per rank.
        window_blocks: How many blocks of one partition are in the window at most.
        rows_per_tick: About how many rows a tick hands out: the rows of a batch that come from one partition.
        early_start: Let the windows begin with few blocks and grow with what has been handed out.

    Attributes:
        permutation: Which block stands at which position.
        key: Seeds everything else in this order.
        row_key: Seeds every block's own permutation.
        n_rows: Rows of all partitions.
        longest: Rows of the longest partition; the others have at most one row less.

    Raises:
        ArgumentError: a number is below 1.
    """

    #: Changes whenever the same arguments would give another order; part of every saved state.
    VERSION: ClassVar[int] = 1

    def __init__(
        self,
        blocks: Blocks,
        seed: int,
        epoch: int,
        n_partitions: int,
        window_blocks: int,
        rows_per_tick: int,
        *,
        early_start: bool = False,
    ) -> None:
        numbers = {"n_partitions": n_partitions, "window_blocks": window_blocks, "rows_per_tick": rows_per_tick}
        for name, number in numbers.items():
            if number < 1:
                raise ArgumentError(f"{name} is {number}; it must be at least 1", where=name)
        self.blocks, self.n_rows = blocks, blocks.n_rows
        self.n_partitions, self.window_blocks, self.rows_per_tick = n_partitions, window_blocks, rows_per_tick
        self.early_start = early_start
        self.key = derive(seed, epoch, self.VERSION)
        self.row_key = derive(self.key, _ROWS)
        self.permutation = Permutation(max(blocks.n_blocks, 1), derive(self.key, _BLOCKS))
        self.longest = -(-self.n_rows // n_partitions)
        # The positions of the blocks that are not full, and how many rows these lack.
        self._short = np.zeros(0, dtype=np.int64)
        self._n_missing = blocks.cells_per_block - blocks.short_rows
        if blocks.n_short:
            short = np.arange(blocks.n_blocks - blocks.n_short, blocks.n_blocks)
            self._short = np.sort(self.permutation.position_of(short))
        # With ignored labels: rows in the first 0, 1, 2, … permuted blocks; 8 bytes a block, the only table there is.
        self._ends: IntArray | None = None
        if not blocks.is_uniform:
            self._ends = np.zeros(blocks.n_blocks + 1, dtype=np.int64)
            for start in range(0, blocks.n_blocks, _N_AT_ONCE):
                stop = min(start + _N_AT_ONCE, blocks.n_blocks)
                numbers_at = self.permutation.at(np.arange(start, stop))
                self._ends[start + 1 : stop + 1] = blocks.sizes(numbers_at)
            np.cumsum(self._ends, out=self._ends)

    def rows_before(self, position: int) -> int:
        """Rows in all permuted blocks before a position."""
        if self._ends is not None:
            return int(self._ends[position])
        n_short = int(np.searchsorted(self._short, position))
        return position * self.blocks.cells_per_block - n_short * self._n_missing

    def sizes_between(self, start: int, stop: int) -> IntArray:
        """Rows of the blocks at positions `start` to `stop` of the permutation, without asking which blocks these are."""
        if self._ends is not None:
            return np.diff(self._ends[start : stop + 1])
        sizes = np.full(stop - start, self.blocks.cells_per_block, dtype=np.int64)
        first, last = np.searchsorted(self._short, [start, stop])
        sizes[self._short[first:last] - start] = self.blocks.short_rows
        return sizes

    def position_of(self, row: int) -> int:
        """The position of the block that holds the row number `row` of the permuted blocks."""
        if self._ends is not None:
            return int(np.searchsorted(self._ends, row, side="right")) - 1
        full = self.blocks.cells_per_block
        missing = len(self._short) * self._n_missing
        near = range(row // full, min((row + missing) // full, self.blocks.n_blocks - 1) + 1)
        return near.start + bisect_right(near, row, lo=1, key=self.rows_before) - 1
