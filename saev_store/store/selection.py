"""`Selection`: chosen vectors as the rows of a lazy array (n, d_model), or (n, layers, d_model)."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING, cast

import numpy as np

from saev_store.core.dtypes import FLOAT32
from saev_store.core.indexing import Axis, parse_axis, positions
from saev_store.core.layout import LayerKey
from saev_store.core.plan import PlanPart
from saev_store.core.rows import Coordinates, RowSpace, TokenMask
from saev_store.errors import ArgumentError, SelectionError, brief, kind_of
from saev_store.store.reader import FloatArray, NumberArray

if TYPE_CHECKING:
    from saev_store.documents import Metadata
    from saev_store.store.estimate import Estimate
    from saev_store.store.reader import Reader
    from saev_store.store.token_arrays import TokenArrays

#: A slice of rows is read in pieces of about this size.
PIECE_BYTES = 64 << 20


class Selection:
    """Chosen vectors as the rows of a lazy array (n, d_model): what `store.sel(…)` returns.

    Rows are in storage order: by example, in it by layer, in that by token. With `stack_layers=True` the array is (n, layers,
    d_model): a row holds all chosen layers of one token, in the order given, and rows are by example and token.
    `len(selection)` is exact.

    >>> from saev_store import ShardStore
    >>> rows = ShardStore.open(SAMPLE).sel(layer=5, tokens="content")
    >>> rows.shape, rows[0].shape, rows[[3, 1]].shape
    ((28, 8), (8,), (2, 8))
    >>> rows.coordinates([0, 5])
    Coordinates(example_idx=array([0, 1]), layer=array([5, 5]), token_idx=array([0, 1]))
    >>> ShardStore.open(SAMPLE).sel(layer=(11, 2), tokens="content", stack_layers=True).shape
    (28, 2, 8)
    """

    def __init__(
        self, reader: Reader, space: RowSpace, dtype: np.dtype[np.generic] = FLOAT32,
        token_arrays: TokenArrays | None = None, metadata: Metadata | None = None,
    ) -> None:  # fmt: skip
        self.reader, self.space, self.dtype = reader, space, dtype
        #: Of the store, where the rows come from one.
        self.token_arrays, self.metadata = token_arrays, metadata

    def __len__(self) -> int:
        return len(self.space)

    @property
    def shape(self) -> tuple[int, ...]:
        """(rows, d_model), with stacked layers (rows, layers, d_model)."""
        layers = (self.space.vectors_per_row,) if self.space.stacks_layers else ()
        return self.space.n_rows, *layers, self.space.layout.d_model

    @property
    def layers(self) -> tuple[int, ...]:
        """Labels of the chosen layers, in the order of the rows, or of the vectors of a stacked row."""
        return tuple(self.space.layout.layers[position] for position in self.space.layer_idx)

    @property
    def layer_keys(self) -> tuple[LayerKey, ...]:
        """The same layers as `layers`, in stores with hook points as pairs (label, hook point)."""
        return tuple(self.space.layout.layer_keys[position] for position in self.space.layer_idx)

    @property
    def kept(self) -> TokenMask:
        """Which content tokens stay, bool (n_examples, content tokens), whether or not their examples are chosen. Borrowed."""
        layout, kept = self.space.layout, self.space.kept
        self.reader.check_large(layout.n_examples * layout.content_tokens_per_example // 64)
        return np.broadcast_to(True if kept is None else kept, (layout.n_examples, layout.content_tokens_per_example))

    def only(self, tokens: TokenMask) -> Selection:
        """The same rows without those of some content tokens. Special tokens stay.

        Loaders take the result as any selection: lengths are exact, and a state is for the same tokens.

        Args:
            tokens: Which content tokens stay: bool (n_examples, content tokens), for all examples of the store.

        Raises:
            SelectionError: `tokens` is not a bool array of this shape, or only special tokens are chosen.

        >>> from saev_store import ShardStore
        >>> store = ShardStore.open(SAMPLE)
        >>> rows, tokens = store.sel(layer=5, tokens="content"), np.ones((7, 4), bool)
        >>> tokens[:, 0] = False  # without the first token of each example
        >>> len(rows), len(rows.only(tokens))
        (28, 21)
        """
        kept, space = self.kept, self.space
        given = cast("object", tokens)  # callers may not check types
        if not isinstance(given, np.ndarray) or tokens.dtype != np.bool_ or tokens.shape != kept.shape:
            found = f"{tokens.dtype} {tokens.shape}" if isinstance(given, np.ndarray) else kind_of(given)
            raise SelectionError(f"tokens is {found}; it must be an array of bool {kept.shape}", where="tokens")
        if space.tokens.stop <= space.layout.n_special_tokens:
            raise SelectionError("special tokens alone are chosen", where="tokens", remedy="Choose tokens='content'.")
        some = RowSpace(space.layout, space.examples, space.layer_idx, space.tokens, kept & tokens, space.stacks_layers)
        return Selection(self.reader, some, self.dtype, self.token_arrays, self.metadata)

    def coordinates(self, rows: object = slice(None)) -> Coordinates:
        """Example, layer label and content token (-1 for CLS) of rows; nothing is read.

        Raises:
            SelectionError: a row is out of range.
        """
        return self.space.coordinates(positions(parse_axis(rows, len(self), "row")))

    def rows(self, rows: object, out: NumberArray | None = None) -> FloatArray:
        """The vectors of many rows, (n, d_model) or (n, layers, d_model) of `dtype`, in the order given; rows may repeat.

        Args:
            rows: Row numbers: a list or array of integers (negative ones count from the end), a slice or a mask.
            out: Memory to fill instead of fresh memory: of `dtype`, C order, of the shape of the result.

        Raises:
            SelectionError: a row is out of range.
            ArgumentError: `out` has another shape, dtype or memory order.
            CorruptShardError: a shard of those rows is missing or short.
        """
        picked = parse_axis(rows, len(self), "row")
        out = prepared(out, (len(picked), *self.shape[1:]), self.dtype)
        self.reader.execute(self._plan(picked), out)
        return out

    def _plan(self, picked: Axis) -> Iterator[PlanPart]:
        """The plan of reading rows; a slice is planned in pieces."""
        if not isinstance(picked, range):
            yield self.reader.planner.rows(*self.space.vectors(picked))
            return
        step, n_vectors = max(1, PIECE_BYTES // self.space.row_nbytes), self.space.vectors_per_row
        for start in range(0, len(picked), step):
            end = min(start + step, len(picked))
            rows = positions(picked[start:end])
            part = self.reader.planner.rows(*self.space.vectors(rows))
            yield part._replace(rows=slice(start * n_vectors, end * n_vectors))

    def estimate(self, rows: object = slice(None)) -> Estimate:
        """Requests and bytes of `self.rows(rows)`; see `ShardStore.estimate`.

        Raises:
            SelectionError: a row is out of range.
            CorruptShardError: a shard of those rows is known to be missing or short.
        """
        from saev_store.store.estimate import count_plan

        picked = parse_axis(rows, len(self), "row")
        return count_plan(self.reader, self._plan(picked), len(picked) * self.space.row_nbytes)

    def __getitem__(self, row: object) -> FloatArray:
        """One row as (d_model,) or (layers, d_model) for an integer, else `rows(…)`."""
        if isinstance(row, tuple):
            raise SelectionError(f"{brief(row)} has several indices; rows take one", where="index")  # pyright: ignore[reportUnknownArgumentType]  # any items
        found = self.rows(row)
        return found[0] if hasattr(row, "__index__") and getattr(row, "ndim", 0) == 0 else found

    def __repr__(self) -> str:
        ignored = " minus ignored labels" if self.space.kept is not None else ""
        row = " x ".join(map(str, self.shape[1:]))
        n_tokens = len(self.space.tokens)
        return f"<Selection {len(self):,} rows x {row} of layers {list(self.layers)}, {n_tokens} tokens{ignored}>"


def prepared(out: NumberArray | None, shape: tuple[int, ...], dtype: np.dtype[np.generic]) -> FloatArray:
    """Fresh memory of a shape and dtype, or the caller's after a check."""
    if out is None:
        try:
            return cast("FloatArray", np.empty(shape, dtype=dtype))
        except (MemoryError, ValueError) as error:
            raise ArgumentError(
                f"a result of shape {shape} needs more bytes than this machine gives",
                where="index",
                remedy="Ask for less at once, or use a lazy view.",
            ) from error
    given = cast("object", out)  # callers may not check types
    is_array = isinstance(given, np.ndarray)
    is_right = is_array and (out.dtype, out.shape) == (dtype, shape)
    if not is_right or not out.flags.c_contiguous or not out.flags.writeable:
        found = f"{out.dtype} {out.shape}" if is_array else kind_of(given)
        raise ArgumentError(
            f"out is {found}; it must be a writable {dtype.name} array of shape {shape} in C order", where="out"
        )
    return cast("FloatArray", out)
