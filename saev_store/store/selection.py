"""`Selection`: chosen vectors as the rows of a lazy array (n, d_model), or (n, layers, d_model)."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, cast

import numpy as np
import numpy.typing as npt
from xxhash import xxh3_128

from saev_store.core.arguments import check_flag
from saev_store.core.dtypes import FLOAT32
from saev_store.core.indexing import Axis, Block, Progression, length, parse_axis
from saev_store.core.layout import LayerKey, Layout
from saev_store.core.plan import Part
from saev_store.core.rows import Coordinates, Labels, Layers, RowSpace, Tokens, keeping, row_space
from saev_store.errors import ArgumentError, SelectionError, brief
from saev_store.store.identity import recorded_files, recording_identity
from saev_store.store.reader import FloatArray, NumberArray
from saev_store.store.token_arrays import MASK, TokenArrays, kept_tokens

if TYPE_CHECKING:
    from saev_store.documents import Metadata
    from saev_store.store.estimate import Estimate
    from saev_store.store.reader import Reader

#: A slice of rows is read in pieces of about this size.
PIECE_BYTES = 64 << 20
#: Of tokens that are labelled 1 or 0, those with 1 stay.
_STAYS = np.arange(256) > 0


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
        self,
        reader: Reader,
        space: RowSpace,
        dtype: np.dtype[np.generic] = FLOAT32,
        token_arrays: TokenArrays | None = None,
        metadata: Metadata | None = None,
    ) -> None:
        self.reader = reader
        self.space = space
        #: Of the store, where the rows come from one.
        self.metadata = metadata
        #: Of the store, where the rows come from one.
        self.token_arrays = token_arrays
        #: Of the vectors that come out.
        self.dtype = dtype

    def __len__(self) -> int:
        return len(self.space)

    @property
    def shape(self) -> tuple[int, ...]:
        """(rows, d_model), with stacked layers (rows, layers, d_model)."""
        return self._shape_of(len(self.space))

    @property
    def ndim(self) -> int:
        """2, with stacked layers 3."""
        return len(self.shape)

    def _shape_of(self, n_rows: int) -> tuple[int, ...]:
        """The shape of some rows."""
        layers = (self.space.vectors_per_row,) if self.space.stacks_layers else ()
        return n_rows, *layers, self.space.layout.d_model

    @property
    def nbytes(self) -> int:
        """Bytes of all rows, as they come out."""
        return len(self.space) * self.space.vectors_per_row * self.space.layout.d_model * self.dtype.itemsize

    @property
    def layers(self) -> tuple[int, ...]:
        """Labels of the chosen layers, in the order of the rows, or of the vectors of a stacked row."""
        return tuple(self.space.layout.layers[position] for position in self.space.layer_idx)

    @property
    def layer_keys(self) -> tuple[LayerKey, ...]:
        """The same layers as `layers`, in stores with hook points as pairs (label, hook point)."""
        return tuple(self.space.layout.layer_keys[position] for position in self.space.layer_idx)

    @property
    def kept(self) -> npt.NDArray[np.bool_]:
        """Which content tokens stay, fresh bool (n_examples, content tokens), whether or not their examples are chosen."""
        space, layout = self.space, self.space.layout
        if space.labels is None or space.kept is None:
            self.reader.check_large(layout.n_examples * layout.content_tokens_per_example // 64)
            return np.ones((layout.n_examples, layout.content_tokens_per_example), dtype=np.bool_)
        return space.kept[space.labels]

    def only(self, tokens: npt.NDArray[np.bool_]) -> Selection:
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
        layout = self.space.layout
        shape = (layout.n_examples, layout.content_tokens_per_example)
        try:
            given = np.asarray(tokens)
        except ValueError:  # lists of unequal lengths
            raise SelectionError(f"tokens is {brief(tokens)}; it must be bool {shape}", where="tokens") from None
        if given.dtype != np.bool_ or given.shape != shape:
            raise SelectionError(
                f"tokens is {given.dtype} {given.shape}; it must be bool {shape}, a value for each content token",
                where="tokens",
            )
        if self.space.tokens.start + self.space.tokens.count <= layout.n_special_tokens:
            raise SelectionError("special tokens alone are chosen", where="tokens", remedy="Choose tokens='content'.")
        kept = (self.kept & given).view(np.uint8)
        space = keeping(self.space, kept, _STAYS, xxh3_128(np.packbits(kept).data).digest())
        return Selection(self.reader, space, self.dtype, self.token_arrays, self.metadata)

    def coordinates(self, rows: object = slice(None)) -> Coordinates:
        """Example, layer label and content token (-1 for CLS) of rows; reads at most labels, never activations.

        Raises:
            SelectionError: a row is out of range.
        """
        picked = parse_axis(rows, len(self), "row")
        return self.space.coordinates(picked.positions() if isinstance(picked, Progression) else picked)

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
        out = prepared(out, self._shape_of(length(picked)), self.dtype)
        self.reader.execute(self._plan(picked), out)
        return out

    def _plan(self, picked: Axis) -> Iterator[Part]:
        """Cost of reading rows; a slice is planned in pieces."""
        if not isinstance(picked, Progression):
            yield self.reader.plan_rows(*self.space.vectors(picked))
            return
        step, n_vectors = max(1, PIECE_BYTES // self.space.row_nbytes), self.space.vectors_per_row
        for start in range(0, picked.count, step):
            end = min(start + step, picked.count)
            positions = picked.start + picked.step * np.arange(start, end, dtype=np.int64)
            part = self.reader.plan_rows(*self.space.vectors(positions))
            yield part._replace(rows=slice(start * n_vectors, end * n_vectors))

    def estimate(self, rows: object = slice(None)) -> Estimate:
        """Requests and bytes of `self.rows(rows)`; see `ShardStore.estimate`.

        Raises:
            SelectionError: a row is out of range.
            CorruptShardError: the first shard has another size than the documents imply.
        """
        from saev_store.store.estimate import count_plan

        picked = parse_axis(rows, len(self), "row")
        self.reader.check_large(max(self.space.layout.vectors_per_example, length(picked) * self.space.vectors_per_row))
        return count_plan(self.reader, self._plan(picked), length(picked) * self.space.row_nbytes)

    def __getitem__(self, row: object) -> FloatArray:
        """One row as (d_model,) or (layers, d_model) for an integer, else `rows(…)`; `[row, ...]` and `[row, :]` are the same."""
        given: object = row
        if isinstance(given, tuple):
            row = self._row_of(cast("tuple[object, ...]", given))
        found = self.rows(row)
        is_one = hasattr(row, "__index__") and getattr(row, "ndim", 0) == 0
        return found[0] if is_one else found

    def _row_of(self, key: tuple[object, ...]) -> object:
        """The rows that a key names whose columns are whole, as scikit-learn's `train_test_split` writes it."""
        columns = key[1:]
        is_whole = all(column is ... or (isinstance(column, slice) and column == slice(None)) for column in columns)
        n_ellipses = sum(column is ... for column in columns)
        if not key or not is_whole or n_ellipses > 1 or len(columns) - n_ellipses >= self.ndim:
            raise SelectionError(
                f"{brief(key)} has {len(key)} indices; rows take one, columns are always whole", where="index"
            )
        return key[0]

    def __iter__(self) -> Iterator[FloatArray]:
        """Row by row; for speed ask for many rows at once."""
        step = max(1, PIECE_BYTES // self.space.row_nbytes)
        for start in range(0, len(self), step):
            yield from self.rows(slice(start, start + step))

    def as_numpy(self, *, copy: bool | None = None) -> FloatArray:
        """All rows as one array (n, d_model), with stacked layers (n, layers, d_model).

        Args:
            copy: `True` for fresh memory, `False` for a read-only view of the mapped shard or an error where there is
                none, `None` for a view where there is one.

        Raises:
            ArgumentError: `copy=False`, but the rows are not contiguous in one mapped shard.
        """
        copy = check_flag(copy, name="copy", other=None)
        if copy is not True:
            view = self._view()
            if view is not None:
                return view
            if copy is False:
                raise ArgumentError(
                    "these rows are not contiguous in mapped memory (one shard, a local file, neighbouring tokens)",
                    where="copy=False",
                    remedy="Use copy=None for a copy where needed, or store.as_numpy(key, copy=False) for a strided view.",
                )
        block = self._block()
        if block is None or self.space.vectors_per_row > 1:
            return self.rows(slice(None))
        out = prepared(None, block.full_shape, self.dtype)
        self.reader.execute(self.reader.plan(block), out)
        return out.reshape(self.shape)

    def _block(self) -> Block | None:
        """The same vectors as a block of the tensor, where nothing is ignored and layers are evenly spaced."""
        space = self.space
        steps = set(np.diff(space.layer_idx).tolist())
        if space.ends is not None or len(steps) > 1:
            return None
        layers = Progression(space.layer_idx[0], steps.pop() if steps else 1, len(space.layer_idx))
        columns = Progression(0, 1, space.layout.d_model)
        return Block((space.examples, layers, space.tokens, columns), (False,) * 4)

    def _view(self) -> FloatArray | None:
        block = self._block()
        strided = self.reader.view(block) if block is not None else None
        if strided is None or strided.dtype != self.dtype:
            return None
        if self.space.stacks_layers:
            strided = strided.swapaxes(1, 2)
            if min(strided.shape[:3]) > 1:
                return None  # the tokens of two examples are not evenly spaced
        rows = cast("FloatArray", strided.reshape(self.shape))
        return rows if np.shares_memory(rows, strided) else None

    def __dask_tokenize__(self) -> tuple[str, ...]:
        # As for a store; and by token arrays, where they decide which tokens stay.
        space, transport = self.space, self.reader.transport
        declared = self.token_arrays.described() if space.ends is not None and self.token_arrays is not None else ()
        files = recorded_files(transport, space.layout, declared)
        recording = recording_identity(transport, space.layout, files=files, prefer="versions")
        chosen = xxh3_128(repr((space.layer_idx, space.tokens, space.stacks_layers, self.dtype.name)).encode())
        is_regular = isinstance(space.examples, Progression)
        chosen.update(repr(space.examples).encode() if is_regular else np.ascontiguousarray(space.examples).data)
        chosen.update(b"" if space.kept is None else space.kept.tobytes() + space.condition)
        return "saev_store", transport.url, recording, chosen.hexdigest()

    def __repr__(self) -> str:
        space = self.space
        ignored = " minus ignored labels" if space.ends is not None else ""
        row = " x ".join(map(str, self.shape[1:]))
        return f"<Selection {self.shape[0]:,} rows x {row} of layers {list(self.layers)}, {space.tokens.count} tokens{ignored}>"


def prepared(out: NumberArray | None, shape: tuple[int, ...], dtype: np.dtype[np.generic]) -> FloatArray:
    """Fresh memory of a shape and dtype, or the caller's after a check."""
    if out is None:
        try:
            return cast("FloatArray", np.empty(shape, dtype=dtype))
        except (MemoryError, ValueError) as error:
            nbytes = dtype.itemsize * int(np.prod(np.array(shape, dtype=object)))
            raise ArgumentError(
                f"a result of shape {shape} needs {nbytes:,} bytes, which this machine does not give",
                where="index",
                remedy="Ask for less at once, or use a lazy view.",
            ) from error
    given = cast("object", out)  # callers may not check types
    if (
        not isinstance(given, np.ndarray)
        or out.dtype != dtype
        or out.shape != shape
        or not out.flags.c_contiguous
        or not out.flags.writeable
    ):
        found = f"{out.dtype} {out.shape}" if isinstance(given, np.ndarray) else type(given).__name__
        raise ArgumentError(
            f"out is {found}; it must be a writable {dtype.name} array of shape {shape} in C order", where="out"
        )
    return cast("FloatArray", out)


def not_conditions(where: object) -> SelectionError:
    """The refusal of a `where` that is not a mapping."""
    return SelectionError(
        f"where is {brief(where)}; it must be a mapping of names of token arrays to values", where="where"
    )


def chosen_rows(
    layout: Layout,
    arrays: TokenArrays,
    *,
    layer: Layers,
    tokens: Tokens,
    examples: object,
    ignore_labels: Sequence[int] | None,
    where: Mapping[str, object] | None,
    masked: bool,
    stack_layers: bool,
) -> RowSpace:
    """The rows that `ShardStore.sel` chooses; see there. Conditions on tokens are evaluated now.

    Raises:
        SelectionError: there is no such array, or a value is not one of its dtype.
        ArgumentError: `masked` or `stack_layers` is not a boolean.
    """
    for name, flag in (("masked", masked), ("stack_layers", stack_layers)):
        if not isinstance(flag, bool):  # pyright: ignore[reportUnnecessaryIsInstance]  # callers may not check types
            check_flag(flag, name=name)
    ignored, condition, labels = ignore_labels, b"", None
    hides = not masked and tokens != "special" and arrays.is_declared and MASK in arrays
    if where is not None and not isinstance(where, Mapping):  # pyright: ignore[reportUnnecessaryIsInstance]  # callers may not check types
        raise not_conditions(where)
    if where and tokens == "special":
        raise SelectionError("special tokens have no token arrays", where="where", remedy="Drop one of the two.")
    if where or hides:
        labels = kept_tokens(arrays, where or {}, hides=hides, ignore_labels=ignore_labels)
        ignored, condition = (0,), xxh3_128(np.packbits(labels).data).digest()
    elif ignore_labels is not None and "labels" in arrays:
        labels = cast("Labels", arrays["labels"])
    space = row_space(
        layout, layer=layer, tokens=tokens, examples=examples, ignore_labels=ignored, labels=labels, stack_layers=stack_layers
    )  # fmt: skip
    space.condition = condition
    return space
