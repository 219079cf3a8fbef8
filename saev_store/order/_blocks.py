"""Blocks: what a row space is cut into, and what is read at once."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from typing import ClassVar, NamedTuple

import numpy as np

from saev_store.core.indexing import Progression
from saev_store.core.layout import IntArray
from saev_store.core.rows import RowSpace
from saev_store.errors import ArgumentError


class Places(NamedTuple):
    """Where blocks lie, one int64 array each.

    Attributes:
        first: The first chosen example of the block, counted among the chosen ones.
        n_examples: How many chosen examples it has: `examples_per_block`, fewer in the last group.
        layer: Its layer, counted among the chosen ones.
    """

    first: IntArray
    n_examples: IntArray
    layer: IntArray


@dataclass(frozen=True, eq=False)
class Blocks:
    """The blocks of a row space: one layer of `examples_per_block` successive chosen examples each.

    Blocks are numbered by group of examples, in it by layer; those of which no row is kept have no number. Inside a block
    a *cell* is a vector of the full block (example by example, token by token), and a *row* is a cell that is kept.

    >>> from saev_store.core.layout import Layout
    >>> from saev_store.core.rows import row_space
    >>> blocks = Blocks(row_space(Layout(7, (2, 5), 4, True, 8, 3), tokens="content"), examples_per_block=2)
    >>> len(blocks), blocks.sizes(np.arange(8)).tolist()
    (8, [8, 8, 8, 8, 8, 8, 4, 4])
    """

    #: A block's permutation is sorted in 24 bits (`_words`), and no read of this many vectors is sensible anyway.
    MAX_ROWS: ClassVar[int] = (1 << 24) - 1

    space: RowSpace
    examples_per_block: int = 1

    def __post_init__(self) -> None:
        if self.examples_per_block < 1 or self.cells_per_block > self.MAX_ROWS:
            raise ArgumentError(
                f"a block of {self.examples_per_block} examples has {self.cells_per_block} vectors of a layer; it must "
                f"have 1 to {self.MAX_ROWS}",
                where="examples_per_block",
            )

    @property
    def cells_per_block(self) -> int:
        """Vectors of a full block, ignored ones included."""
        return self.examples_per_block * self.space.tokens.count

    @property
    def n_layers(self) -> int:
        return len(self.space.layer_idx)

    @property
    def n_rows(self) -> int:
        return len(self.space)

    @cached_property
    def _groups(self) -> IntArray | None:
        """With ignored labels: the groups of examples that keep any row."""
        return None if self._rows_per_group is None else np.flatnonzero(self._rows_per_group)

    @cached_property
    def _rows_per_group(self) -> IntArray | None:
        """With ignored labels: rows of one layer, per group of examples."""
        ends = self.space.ends
        if ends is None:
            return None
        last = np.append(np.arange(self.examples_per_block - 1, len(ends) - 1, self.examples_per_block), len(ends) - 1)
        return np.diff(ends[last] if len(ends) else ends, prepend=0) // max(self.n_layers, 1)

    def __len__(self) -> int:
        if self._groups is not None:
            return len(self._groups) * self.n_layers
        return -(-self.space.n_examples // self.examples_per_block) * self.n_layers if self.n_rows else 0

    @property
    def is_uniform(self) -> bool:
        """Whether sizes follow from arithmetic: nothing is ignored."""
        return self._rows_per_group is None

    def odd(self) -> IntArray:
        """Without ignored labels: the numbers of the blocks that are smaller than the others (the last group's)."""
        short = self.space.n_examples % self.examples_per_block
        return np.arange(len(self) - self.n_layers, len(self), dtype=np.int64) if short else np.zeros(0, np.int64)

    def sizes(self, numbers: IntArray) -> IntArray:
        """Rows of blocks, int64."""
        if self._rows_per_group is not None and self._groups is not None:
            return self._rows_per_group[self._groups[numbers // self.n_layers]]
        return self.places(numbers).n_examples * self.space.tokens.count

    def places(self, numbers: IntArray) -> Places:
        """Which examples and which layer blocks hold."""
        group, layer = np.divmod(numbers, np.int64(max(self.n_layers, 1)))
        if self._groups is not None:
            group = self._groups[group]
        first = group * self.examples_per_block
        return Places(first, np.minimum(self.examples_per_block, self.space.n_examples - first), layer)

    def numbers_of(self, example: IntArray, layer_idx: IntArray) -> IntArray:
        """The blocks that hold examples and layers, both by position on their axes; -1 where none does."""
        layers = np.full(self.space.layout.n_layers, -1, dtype=np.int64)
        layers[list(self.space.layer_idx)] = np.arange(self.n_layers)
        layer, ordinal = layers[layer_idx], self._ordinals(example)
        group = ordinal // self.examples_per_block
        known = (layer >= 0) & (ordinal >= 0)
        if self._groups is not None:
            found = np.minimum(np.searchsorted(self._groups, group), max(len(self._groups) - 1, 0))
            known &= self._groups[found] == group if len(self._groups) else False
            group = found
        return np.where(known, group * self.n_layers + layer, -1)

    def _ordinals(self, example: IntArray) -> IntArray:
        """Which of the chosen examples these are; the first one where it was chosen repeatedly; -1 if it was not."""
        chosen = self.space.examples
        if isinstance(chosen, Progression):
            ordinal, rest = np.divmod(example - chosen.start, chosen.step or 1)
            return np.where((rest == 0) & (ordinal >= 0) & (ordinal < chosen.count), ordinal, -1)
        order, ascending = self._sorted_examples
        found = np.minimum(np.searchsorted(ascending, example), max(len(order) - 1, 0))
        return np.where(ascending[found] == example, order[found], -1) if len(order) else np.full_like(example, -1)

    @cached_property
    def _sorted_examples(self) -> tuple[IntArray, IntArray]:
        """Chosen one by one: which of them, and the examples, by rising example."""
        chosen = self.examples(np.arange(self.space.n_examples, dtype=np.int64))
        order = np.argsort(chosen, kind="stable")
        return order, chosen[order]

    def kept_cells(self, numbers: IntArray) -> IntArray | None:
        """The cell of every row: (blocks, cells), each line beginning with the kept cells in order; None if all are kept."""
        labels, kept = self.space.labels, self.space.kept
        if labels is None or kept is None:
            return None
        places = self.places(numbers)
        n_content = self.space.layout.content_tokens_per_example
        n_special = self.space.tokens.count - n_content
        within = np.arange(self.examples_per_block, dtype=np.int64)
        there = within < places.n_examples[:, None]
        ordinal = np.minimum(places.first[:, None] + within, self.space.n_examples - 1)
        stays = np.ones((len(numbers), self.examples_per_block, self.space.tokens.count), dtype=np.bool_)
        stays[:, :, n_special:] = kept[labels[self.examples(ordinal)]]
        stays &= there[:, :, None]
        # A stable sort of "not kept" puts the kept cells first, in order.
        return np.argsort(~stays.reshape(len(numbers), self.cells_per_block), axis=1, kind="stable").astype(np.int64)

    def examples(self, ordinal: IntArray) -> IntArray:
        """Positions on the example axis of chosen examples."""
        chosen = self.space.examples
        return chosen.start + chosen.step * ordinal if isinstance(chosen, Progression) else chosen[ordinal]
