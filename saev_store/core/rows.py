"""A row space: which vectors of a store are chosen, counted and indexed without reading any of them.

Pure. `row_space` makes one from layer labels, kinds of tokens, examples and ignored labels. A row is one vector of `d_model`
numbers, or, with stacked layers, the vectors of all chosen layers of one token. Rows are numbered in storage order: by example
(in the order the examples were given), then by layer unless layers are stacked, then by token.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Literal, NamedTuple, cast, get_args

import numpy as np
import numpy.typing as npt

from saev_store.core.indexing import Axis, Progression, parse_axis
from saev_store.core.layout import IntArray, LayerKey, Layout, is_layer_pair
from saev_store.errors import SelectionError, brief

Labels = npt.NDArray[np.uint8]
#: Which tokens of an example: those that stand for content, the special ones before them (CLS), or all.
Tokens = Literal["content", "special", "all"]
#: Which layers, by label or pair (label, hook point): one, several in the order given, or every recorded one.
Layers = LayerKey | Sequence[LayerKey] | Literal["all"]

#: Labels are counted in pieces of this many bytes, so that a mapped labels file never has to fit in memory.
COUNT_CHUNK_BYTES = 16 << 20


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
    """The vectors chosen by layers x tokens x examples, minus those whose label is ignored. Not to be changed.

    Attributes:
        layout: The geometry of the store.
        examples: The chosen examples, by position.
        layer_idx: The chosen layers, by position on the layer axis.
        tokens: The chosen tokens; a contiguous run on the token axis.
        ends: Only with ignored labels: rows up to and including each chosen example, int64.
        labels: Only with ignored labels: the store's labels (n_examples, content tokens), borrowed.
        kept: Only with ignored labels: a table of 256 booleans, true for labels that stay.
        condition: Digest of `labels` that were derived from a condition; empty for a store's own.
        stacks_layers: Whether a row is the vectors of all chosen layers of one token.
        row_layers: The layers of a row's vectors, by position: int64 (rows_per_token, vectors_per_row).
        rows_per_token: Rows of a token of an example: one for each chosen layer, or one with stacked layers.
        vectors_per_row: 1, or with stacked layers the number of chosen layers.
        row_nbytes: Bytes of a row, as it is stored.
        n_examples: How many examples are chosen (also counting those of which no token is left).
        rows_per_example: Rows of an example of which nothing is ignored.
        n_rows: All rows; also `len(space)`.
    """

    layout: Layout
    examples: Axis
    layer_idx: tuple[int, ...]
    tokens: Progression
    ends: IntArray | None = None
    labels: Labels | None = None
    kept: npt.NDArray[np.bool_] | None = None
    condition: bytes = b""
    stacks_layers: bool = False
    row_layers: IntArray = field(init=False)
    rows_per_token: int = field(init=False)
    vectors_per_row: int = field(init=False)
    row_nbytes: int = field(init=False)
    n_examples: int = field(init=False)
    rows_per_example: int = field(init=False)
    n_rows: int = field(init=False)

    def __post_init__(self) -> None:
        self.n_examples = self.examples.count if isinstance(self.examples, Progression) else len(self.examples)
        self.row_layers = np.array(self.layer_idx, dtype=np.int64).reshape((1, -1) if self.stacks_layers else (-1, 1))
        self.rows_per_token, self.vectors_per_row = self.row_layers.shape
        self.row_nbytes = self.vectors_per_row * self.layout.vector_nbytes
        self.rows_per_example = self.rows_per_token * self.tokens.count
        if self.ends is None:
            self.n_rows = self.n_examples * self.rows_per_example
        else:
            self.n_rows = int(self.ends[-1]) if len(self.ends) else 0

    def __len__(self) -> int:
        return self.n_rows

    def locate(self, rows: npt.ArrayLike) -> tuple[IntArray, IntArray, IntArray]:
        """(example, layer, token) *positions* of rows, vectorised; rows must be from 0 to `len(self) - 1`.

        With stacked layers the layers have one axis more, of the vectors of a row.
        """
        row = np.asarray(rows, dtype=np.int64)
        if self.ends is not None and self.labels is not None and self.kept is not None:
            return self._locate_kept(row, self.ends, self.labels, self.kept)
        ordinal, within = np.divmod(row, np.int64(self.rows_per_example))
        layer, token = np.divmod(within, np.int64(self.tokens.count))
        return self.example(ordinal), self._layer(layer), self.tokens.start + token

    def vectors(self, rows: npt.ArrayLike) -> tuple[IntArray, IntArray, IntArray]:
        """(example, layer, token) *positions* of all vectors of n rows, row after row: int64 (n * vectors_per_row,)."""
        example, layer, token = self.locate(rows)
        return example.repeat(self.vectors_per_row), layer.reshape(-1), token.repeat(self.vectors_per_row)

    def coordinates(self, rows: npt.ArrayLike) -> Coordinates:
        """Example, layer *label* and content token of rows."""
        example, layer, token = self.locate(rows)
        labels = np.array(self.layout.layers)[layer]
        return Coordinates(example, labels, token - self.layout.n_special_tokens)

    def example(self, ordinal: IntArray) -> IntArray:
        """Positions on the example axis of chosen examples."""
        if isinstance(self.examples, Progression):
            return self.examples.start + self.examples.step * ordinal
        return self.examples[ordinal]

    def _layer(self, ordinal: IntArray) -> IntArray:
        return self.row_layers[ordinal] if self.stacks_layers else self.row_layers[ordinal, 0]

    def _locate_kept(
        self, row: IntArray, ends: IntArray, labels: Labels, kept: npt.NDArray[np.bool_]
    ) -> tuple[IntArray, IntArray, IntArray]:
        flat = row.ravel()
        ordinal = np.searchsorted(ends, flat, side="right")
        rows_before = np.where(ordinal > 0, ends[ordinal - 1], 0)
        per_layer = (ends[ordinal] - rows_before) // self.rows_per_token
        layer, nth = np.divmod(flat - rows_before, per_layer)
        # The nth kept token: look only at the examples that occur, once each.
        seen, which = np.unique(self.example(ordinal), return_inverse=True)
        stays = np.ones((len(seen), self.tokens.count), dtype=np.bool_)
        n_special = self.tokens.count - self.layout.content_tokens_per_example
        stays[:, n_special:] = kept[labels[seen]]
        token_of = np.nonzero(stays)[1]
        starts = np.concatenate(([0], np.cumsum(stays.sum(axis=1))))
        token = self.tokens.start + token_of[starts[which] + nth]
        shape = row.shape
        return self.example(ordinal).reshape(shape), self._layer(layer.reshape(shape)), token.reshape(shape)


def row_space(
    layout: Layout,
    *,
    layer: Layers = "all",
    tokens: Tokens = "all",
    examples: object = None,
    ignore_labels: Sequence[int] | None = None,
    labels: Labels | None = None,
    stack_layers: bool = False,
) -> RowSpace:
    """The rows that a labelled selection means.

    Args:
        layout: The geometry of the store.
        layer: A label, several labels (their order is the order of the rows), or `"all"`.
        tokens: `"content"`, `"special"` or `"all"`.
        examples: Positions: `None` for all, an integer, a slice, a list (repeats allowed) or a boolean mask.
        ignore_labels: Content tokens that carry one of these labels are left out. Special tokens have no label and stay.
        labels: The store's labels, uint8 (n_examples, content tokens); needed with `ignore_labels`.
        stack_layers: A row holds the vectors of all chosen layers of one token, in the order given.

    Raises:
        LayerNotFoundError: a label was not recorded.
        SelectionError: anything else that the store does not hold.

    >>> layout = Layout(7, (2, 5, 11), 4, True, 8, 3)
    >>> rows = row_space(layout, layer=5, tokens="content", examples=slice(2, 4))
    >>> len(rows), rows.coordinates([0, 4])
    (8, Coordinates(example_idx=array([2, 3]), layer=array([5, 5]), token_idx=array([0, 0])))
    """
    every = Progression(0, 1, layout.n_examples)
    chosen = every if examples is None else parse_axis(examples, layout.n_examples, "example")
    space = RowSpace(layout, chosen, _layers(layer, layout), _tokens(tokens, layout), stacks_layers=stack_layers)
    kept = None if ignore_labels is None else labels_that_stay(ignore_labels)
    if kept is None:
        return space
    if tokens == "special":
        raise SelectionError(
            "special tokens have no labels to ignore", where="ignore_labels", remedy="Drop one of the two."
        )
    if labels is None:
        raise no_labels()
    return keeping(space, labels, kept)


def keeping(space: RowSpace, labels: Labels, kept: npt.NDArray[np.bool_], condition: bytes = b"") -> RowSpace:
    """The rows of a space without content tokens whose label does not stay, whatever was left out of it before.

    Args:
        space: The rows.
        labels: A label for each content token, uint8 (n_examples, content tokens); borrowed.
        kept: A table of 256 booleans, true for labels that stay.
        condition: See `RowSpace`.
    """
    ends = np.cumsum(_kept_per_example(space, labels, kept) * np.int64(space.rows_per_token))
    return replace(space, ends=ends, labels=labels, kept=kept, condition=condition)


def are_several(layer: Layers) -> bool:
    """True for several labels or pairs (label, hook point), or `"all"`; False for one."""
    if isinstance(layer, np.ndarray):
        return layer.ndim > 0
    return isinstance(layer, Sequence) and not is_layer_pair(layer)


def _layers(layer: Layers, layout: Layout) -> tuple[int, ...]:
    if isinstance(layer, str):
        if layer != "all":
            raise SelectionError(
                f"layer is {brief(layer)}; it must be a label out of {list(layout.layer_keys)}, a list of them, or 'all'",
                where="layer",
            )
        return tuple(range(layout.n_layers))
    wanted = list(cast("Sequence[LayerKey]", layer)) if are_several(layer) else [cast("LayerKey", layer)]
    if not wanted:
        raise SelectionError(
            f"no layer was chosen; the store holds the layers {list(layout.layer_keys)}", where="layer"
        )
    positions = tuple(layout.layer_index(label) for label in wanted)
    if len(set(positions)) != len(positions):
        raise SelectionError(f"layers {wanted} names a layer twice", where="layer")
    return positions


def _tokens(tokens: Tokens, layout: Layout) -> Progression:
    if tokens not in get_args(Tokens):
        raise SelectionError(f"tokens is {brief(tokens)}; it must be 'content', 'special' or 'all'", where="tokens")
    if tokens == "all":
        return Progression(0, 1, layout.tokens_per_example)
    if tokens == "content":
        return Progression(layout.n_special_tokens, 1, layout.content_tokens_per_example)
    if not layout.n_special_tokens:
        raise SelectionError(
            "the store has no special tokens (cls_token is false)", where="tokens", remedy="Use tokens='content'."
        )
    return Progression(0, 1, layout.n_special_tokens)


def no_labels() -> SelectionError:
    """The refusal to ignore labels of a store without any."""
    return SelectionError(
        "the store has no labels.bin, so no label can be ignored", where="ignore_labels", remedy="Drop ignore_labels."
    )


def labels_that_stay(ignore_labels: Sequence[int] | None) -> npt.NDArray[np.bool_] | None:
    """A table of 256 booleans, true for labels that are not ignored; None where nothing is.

    Raises:
        SelectionError: these are not labels.
    """
    if ignore_labels is None or (isinstance(ignore_labels, (list, tuple)) and not ignore_labels):
        return None
    refusal = SelectionError(
        f"ignore_labels is {brief(ignore_labels)}; labels are integers from 0 to 255", where="ignore_labels"
    )
    try:
        given = np.atleast_1d(np.asarray(ignore_labels))
    except ValueError:  # lists of unequal lengths
        raise refusal from None
    if given.dtype.kind not in "iu" or given.ndim != 1:
        raise refusal
    if given.size and not 0 <= int(given.min()) <= int(given.max()) < 256:
        raise refusal
    kept = np.ones(256, dtype=np.bool_)
    kept[given.astype(np.int64)] = False
    return kept


def _kept_per_example(space: RowSpace, labels: Labels, kept: npt.NDArray[np.bool_]) -> IntArray:
    """Tokens of one layer that stay, per chosen example; reads the labels once, in pieces."""
    counts = np.empty(space.n_examples, dtype=np.int64)
    chunk = max(1, COUNT_CHUNK_BYTES // space.layout.content_tokens_per_example)
    for start in range(0, space.n_examples, chunk):
        ordinals = np.arange(start, min(start + chunk, space.n_examples))
        if isinstance(space.examples, Progression) and space.examples.step == 1:
            first = space.examples.start + start
            piece = labels[first : first + len(ordinals)]
        else:
            piece = labels[space.example(ordinals)]
        counts[start : start + len(ordinals)] = np.count_nonzero(kept[piece], axis=1)
    return counts + (space.tokens.count - space.layout.content_tokens_per_example)
