"""A row space: which vectors of a store are chosen, counted and indexed without reading any of them.

Pure. Rows are numbered in storage order: by example (in the order the examples were given), then by layer, then by token.
A row is one vector of `d_model` numbers.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple, cast

import numpy as np
import numpy.typing as npt

from saev_store.indexing import Axis, Progression, length
from saev_store.layout import IntArray, Layout

Labels = npt.NDArray[np.uint8]


class Coordinates(NamedTuple):
    """Where rows come from, one int64 array each.

    Attributes:
        example_idx: Position on the example axis.
        layer: The layer's *label*.
        token_idx: The content token, from 0; -1 stands for the special token (CLS).
    """

    example_idx: IntArray
    layer: IntArray
    token_idx: IntArray


@dataclass(frozen=True, eq=False)
class RowSpace:
    """The vectors chosen by layers x tokens x examples, minus those whose label is ignored.

    Attributes:
        layout: The geometry of the store.
        examples: The chosen examples, by position.
        layer_idx: The chosen layers, by position on the layer axis.
        tokens: The chosen tokens; a contiguous run on the token axis.
        ends: Only with ignored labels: rows up to and including each chosen example, int64.
        labels: Only with ignored labels: the store's labels (n_examples, content tokens), borrowed.
        kept: Only with ignored labels: a table of 256 booleans, true for labels that stay.
    """

    layout: Layout
    examples: Axis
    layer_idx: tuple[int, ...]
    tokens: Progression
    ends: IntArray | None = None
    labels: Labels | None = None
    kept: npt.NDArray[np.bool_] | None = None

    @property
    def n_examples(self) -> int:
        """How many examples are chosen (also counting those of which no token is left)."""
        return length(self.examples)

    @property
    def rows_per_example(self) -> int:
        """Rows of an example of which nothing is ignored."""
        return len(self.layer_idx) * self.tokens.count

    def __len__(self) -> int:
        if self.ends is not None:
            return int(self.ends[-1]) if len(self.ends) else 0
        return self.n_examples * self.rows_per_example

    def locate(self, rows: npt.ArrayLike) -> tuple[IntArray, IntArray, IntArray]:
        """(example, layer, token) *positions* of rows, vectorised; rows must be from 0 to `len(self) - 1`."""
        row = np.asarray(rows, dtype=np.int64)
        if self.ends is not None:
            return self._locate_kept(row)
        ordinal, within = np.divmod(row, np.int64(max(self.rows_per_example, 1)))
        layer, token = np.divmod(within, np.int64(max(self.tokens.count, 1)))
        return self._example(ordinal), self._layer(layer), self.tokens.start + token

    def coordinates(self, rows: npt.ArrayLike) -> Coordinates:
        """Example, layer *label* and content token of rows."""
        example, layer, token = self.locate(rows)
        labels = np.asarray(self.layout.layers, dtype=np.int64)[layer]
        return Coordinates(example, labels, np.maximum(token - self.layout.n_special_tokens, -1))

    def _example(self, ordinal: IntArray) -> IntArray:
        if isinstance(self.examples, Progression):
            return self.examples.start + self.examples.step * ordinal
        return self.examples[ordinal]

    def _layer(self, ordinal: IntArray) -> IntArray:
        return np.asarray(self.layer_idx, dtype=np.int64)[ordinal]

    def _locate_kept(self, row: IntArray) -> tuple[IntArray, IntArray, IntArray]:
        ends, labels, kept = (
            cast("IntArray", self.ends),
            cast("Labels", self.labels),
            cast("npt.NDArray[np.bool_]", self.kept),
        )
        flat = row.reshape(-1)
        ordinal = np.searchsorted(ends, flat, side="right")
        rows_before = np.where(ordinal > 0, ends[ordinal - 1], 0)
        per_layer = (ends[ordinal] - rows_before) // max(len(self.layer_idx), 1)
        layer, nth = np.divmod(flat - rows_before, np.maximum(per_layer, 1))
        # The nth kept token: look only at the examples that occur, once each.
        seen, which = np.unique(self._example(ordinal), return_inverse=True)
        stays = np.ones((len(seen), self.tokens.count), dtype=np.bool_)
        n_special = self.tokens.count - self.layout.content_tokens_per_example
        stays[:, n_special:] = kept[labels[seen]]
        token_of = np.nonzero(stays)[1]
        starts = np.concatenate(([0], np.cumsum(stays.sum(axis=1, dtype=np.int64))))
        token = self.tokens.start + token_of[starts[which] + nth]
        shape = row.shape
        return self._example(ordinal).reshape(shape), self._layer(layer).reshape(shape), token.reshape(shape)
