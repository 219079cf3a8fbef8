"""A row space: which vectors of a store are chosen, counted and indexed without reading any of them. Pure.

A row is one vector of `d_model` numbers, or, with stacked layers, the vectors of all chosen layers of one token. Rows are
numbered in storage order: by example (in the order the examples were given), then by layer unless layers are stacked, then by token.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Literal, NamedTuple, cast, get_args

import numpy as np
import numpy.typing as npt

from saev_store.core.indexing import Axis, parse_axis
from saev_store.core.layout import IntArray, LayerKey, Layout, is_layer_pair
from saev_store.errors import SelectionError, brief

#: Which tokens of an example: those that stand for content, the special ones before them (CLS), or all.
Tokens = Literal["content", "special", "all"]
#: Which layers, by label or pair (label, hook point): one, several in the order given, or every recorded one.
Layers = LayerKey | Sequence[LayerKey] | Literal["all"]
TokenMask = npt.NDArray[np.bool_]


class Coordinates(NamedTuple):
    """Origins of rows, one int64 array each.

    Attributes:
        example_idx: Position on the example axis.
        layer: The layer's *label*; with stacked layers (n, layers), a label for each vector of the row.
        token_idx: The content token, from 0; -1 stands for the special token (CLS).
    """

    example_idx: IntArray
    layer: IntArray
    token_idx: IntArray


@dataclass(eq=False)
class RowSpace:
    """The vectors chosen by layers x tokens x examples, minus those of tokens that are left out. Not to be changed.

    Attributes:
        examples: The chosen examples, by position.
        layer_idx: The chosen layers, by position on the layer axis.
        tokens: The chosen tokens; a contiguous run on the token axis.
        kept: Which content tokens stay, bool (n_examples, content tokens) of all examples; None if all do.
        stacks_layers: True if a row is the vectors of all chosen layers of one token.
        ends: Only with `kept`: rows up to and including each chosen example, int64.
        row_layers: The layers of a row's vectors, by position: int64 (rows_per_token, vectors_per_row).
        rows_per_token: Rows of a token of an example: one for each chosen layer, or one with stacked layers.
        vectors_per_row: 1, or with stacked layers the number of chosen layers.
        row_nbytes: Bytes of a row, as it is stored.
        n_examples: How many examples are chosen (also counting those of which no token is left).
        rows_per_example: Rows of an example of which no token is left out.
        n_rows: All rows; also `len(space)`.
    """

    layout: Layout
    examples: Axis
    layer_idx: tuple[int, ...]
    tokens: range
    kept: TokenMask | None = None
    stacks_layers: bool = False
    ends: IntArray | None = field(init=False, default=None)
    row_layers: IntArray = field(init=False)
    rows_per_token: int = field(init=False)
    vectors_per_row: int = field(init=False)
    row_nbytes: int = field(init=False)
    n_examples: int = field(init=False)
    rows_per_example: int = field(init=False)
    n_rows: int = field(init=False)

    def __post_init__(self) -> None:
        self.n_examples = len(self.examples)
        self.row_layers = np.array(self.layer_idx, dtype=np.int64).reshape((1, -1) if self.stacks_layers else (-1, 1))
        self.rows_per_token, self.vectors_per_row = self.row_layers.shape
        self.row_nbytes = self.vectors_per_row * self.layout.vector_nbytes
        self.rows_per_example = self.rows_per_token * len(self.tokens)
        self.n_rows = self.n_examples * self.rows_per_example
        if self.kept is not None:
            of_example = np.count_nonzero(self.kept, axis=1) + self.n_special
            self.ends = np.cumsum(of_example[self.example(np.arange(self.n_examples))] * np.int64(self.rows_per_token))
            self.n_rows = int(self.ends[-1]) if len(self.ends) else 0

    def __len__(self) -> int:
        return self.n_rows

    @property
    def n_special(self) -> int:
        """How many special tokens are chosen, of a space with content tokens."""
        return len(self.tokens) - self.layout.content_tokens_per_example

    def locate(self, rows: npt.ArrayLike) -> tuple[IntArray, IntArray, IntArray]:
        """(example, layer, token) *positions* of rows, vectorised; rows must be from 0 to `len(self) - 1`.

        With stacked layers the layers have one axis more, of the vectors of a row.
        """
        row = np.asarray(rows, dtype=np.int64)
        if self.ends is not None and self.kept is not None:
            return self._locate_kept(row, self.ends, self.kept)
        ordinal, within = np.divmod(row, np.int64(self.rows_per_example))
        layer, token = np.divmod(within, np.int64(len(self.tokens)))
        return self.example(ordinal), self._layer(layer), self.tokens.start + token

    def vectors(self, rows: npt.ArrayLike) -> tuple[IntArray, IntArray, IntArray]:
        """(example, layer, token) *positions* of all vectors of n rows, row after row: int64 (n * vectors_per_row,)."""
        example, layer, token = self.locate(rows)
        return example.repeat(self.vectors_per_row), layer.reshape(-1), token.repeat(self.vectors_per_row)

    def coordinates(self, rows: npt.ArrayLike) -> Coordinates:
        """Example, layer *label* and content token of rows."""
        example, layer, token = self.locate(rows)
        return Coordinates(example, np.array(self.layout.layers)[layer], token - self.layout.n_special_tokens)

    def example(self, ordinal: IntArray) -> IntArray:
        """Positions on the example axis of chosen examples."""
        if isinstance(self.examples, range):
            return self.examples.start + self.examples.step * ordinal
        return self.examples[ordinal]

    def _layer(self, ordinal: IntArray) -> IntArray:
        return self.row_layers[ordinal] if self.stacks_layers else self.row_layers[ordinal, 0]

    def _locate_kept(self, row: IntArray, ends: IntArray, kept: TokenMask) -> tuple[IntArray, IntArray, IntArray]:
        ordinal = np.searchsorted(ends, row, side="right")
        rows_before = np.where(ordinal > 0, ends[ordinal - 1], 0)
        per_layer = (ends[ordinal] - rows_before) // self.rows_per_token
        layer, nth = np.divmod(row - rows_before, per_layer)
        # The nth kept token: look only at the examples that occur, once each.
        seen, which = np.unique(self.example(ordinal), return_inverse=True)
        stays = np.ones((len(seen), len(self.tokens)), dtype=np.bool_)
        stays[:, self.n_special :] = kept[seen]
        token_of = np.nonzero(stays)[1]
        starts = np.concatenate(([0], np.cumsum(stays.sum(axis=1))))
        token = self.tokens.start + token_of[starts[which.reshape(row.shape)] + nth]
        return self.example(ordinal), self._layer(layer), token


def row_space(
    layout: Layout,
    *,
    layer: Layers = "all",
    tokens: Tokens = "all",
    examples: object = None,
    kept: TokenMask | None = None,
    stack_layers: bool = False,
) -> RowSpace:
    """The rows that a labelled selection means.

    Args:
        layout: The geometry of the store.
        layer: A label, several labels (their order is the order of the rows), or `"all"`.
        tokens: `"content"`, `"special"` or `"all"`.
        examples: Positions: `None` for all, an integer, a slice, a list (repeats allowed) or a boolean mask.
        kept: Which content tokens stay, bool (n_examples, content tokens); borrowed. Special tokens stay.
        stack_layers: A row holds the vectors of all chosen layers of one token, in the order given.

    Raises:
        LayerNotFoundError: a label was not recorded.
        SelectionError: anything else that the store does not hold.

    >>> layout = Layout(7, (2, 5, 11), 4, True, 8, 3)
    >>> rows = row_space(layout, layer=5, tokens="content", examples=slice(2, 4))
    >>> len(rows), rows.coordinates([0, 4])
    (8, Coordinates(example_idx=array([2, 3]), layer=array([5, 5]), token_idx=array([0, 0])))
    """
    every = range(layout.n_examples)
    chosen = every if examples is None else parse_axis(examples, layout.n_examples, "example")
    if kept is not None and tokens == "special":
        raise SelectionError("special tokens are never left out", where="tokens", remedy="Choose tokens='content'.")
    return RowSpace(layout, chosen, _layers(layer, layout), _tokens(tokens, layout), kept, stack_layers)


def are_several(layer: Layers) -> bool:
    """True for several labels or pairs (label, hook point), or `"all"`; False for one."""
    if isinstance(layer, np.ndarray):
        return layer.ndim > 0
    return isinstance(layer, Sequence) and not is_layer_pair(layer)


def _layers(layer: Layers, layout: Layout) -> tuple[int, ...]:
    if isinstance(layer, str):
        positions = tuple(range(layout.n_layers)) if layer == "all" else ()
    else:
        wanted = list(cast("Sequence[LayerKey]", layer)) if are_several(layer) else [cast("LayerKey", layer)]
        positions = tuple(layout.layer_index(label) for label in wanted)
    if not positions or len(set(positions)) != len(positions):
        raise SelectionError(
            f"layer is {brief(layer)}; it must be 'all' or name layers, none of them twice", where="layer"
        )
    return positions


def _tokens(tokens: object, layout: Layout) -> range:
    n_special = layout.n_special_tokens
    if not isinstance(tokens, str) or tokens not in get_args(Tokens) or (tokens == "special" and not n_special):
        choices = "'content', 'special' or 'all'" if n_special else "'content' or 'all': there are no special tokens"
        raise SelectionError(f"tokens is {brief(tokens)}; it must be {choices}", where="tokens")
    if tokens == "special":
        return range(n_special)
    first = 0 if tokens == "all" else n_special
    return range(first, layout.tokens_per_example)
