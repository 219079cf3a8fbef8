"""Options of the loaders for PyTorch, and the rows that they choose of a store."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields, replace
from typing import get_args

from saev_store.core.arguments import check_choice, check_flag, check_number
from saev_store.core.rows import Layers, Tokens
from saev_store.errors import ArgumentError, kind_of
from saev_store.loaders import LoaderOptions, filtered, stage
from saev_store.store.pair import PairSelection
from saev_store.store.selection import Selection
from saev_store.store.store import ShardStore
from saev_store.torch.normalize import DType, Normalize, read_dtype

#: What is loaded: a store, its address, or chosen rows of one store or of two.
Source = str | os.PathLike[str] | ShardStore | Selection | PairSelection


@dataclass(frozen=True, kw_only=True)
class RowOptions:
    """Which rows of a store; the arguments of `ShardStore.sel`, and what trainers leave out. Not for rows that are chosen already.

    Attributes:
        layer: A recorded layer's label, or a pair (label, hook point); several of them; or `"all"`.
        tokens: `"content"`, `"special"` or `"all"`.
        examples: Positions, a slice, or a mask over all examples; default: all.
        ignore_labels: Leave out content tokens with these labels.
        where: Only content tokens whose token arrays have these values, such as `{"document_ids": (3, 7)}`.
        masked: Have also tokens whose `mask` is false.
        dtype: Of the vectors: "float32", "stored", or another one that `ShardStore.read` takes.
        stack_layers: A row holds the vectors of all chosen layers of one token: (layers, d_model).
        remove_bos: Leave out the first token of each context, as `saev_store.loaders.filtered` does.
        max_norm_multiple: Leave out tokens whose vectors are longer than so many mean norms, likewise. The chosen layers are read once.
        storage_options: What fsspec hands to the file system, if the source is an address.
        damaged_ok: Open also if shards are missing or short. Choose `examples` that are left: others raise.
    """

    layer: Layers = "all"
    tokens: Tokens = "content"
    examples: object = None
    ignore_labels: Sequence[int] | None = None
    where: Mapping[str, object] | None = None
    masked: bool = False
    dtype: DType = "float32"
    stack_layers: bool = False
    remove_bos: bool = False
    max_norm_multiple: float | None = None
    storage_options: Mapping[str, object] | None = None
    damaged_ok: bool = False


@dataclass(frozen=True, kw_only=True)
class StoreOptions(RowOptions, LoaderOptions):
    """Options of a `StoreLoader`: the fields of `LoaderOptions` and `RowOptions`, and these.

    Attributes:
        labels: Have `token_labels` in the batches if the store has labels; True by default.
        device: Where batches are wanted, such as `"cuda"`.
        scale_norm: The same as `normalize="scale_norm"`; or a factor.
        normalize: What is done to vectors, after they are on the device: `"scale_norm"` multiplies all by one factor, so that the mean
            norm is sqrt(d_model); `"scale_norm_per_layer"` each layer by a factor of its own; `"center"` subtracts the mean vector of the
            layer; `"center_and_scale_norm"` does both. Means and factors come from a fixed, seeded sample of the rows.
        use_tmpdir: With $TMPDIR set, first copy the layers that are wanted there, once per machine.

    Raises:
        ArgumentError: an option is out of range, or two contradict each other.
    """

    labels: bool = True
    device: str = "cpu"
    scale_norm: bool | float = False
    normalize: Normalize | None = None
    use_tmpdir: bool = False

    def __post_init__(self) -> None:
        super().__post_init__()
        check_flag(self.use_tmpdir, name="use_tmpdir")
        if not isinstance(self.scale_norm, bool):
            check_number(self.scale_norm, name="scale_norm")
        if self.normalize is not None:
            check_choice(self.normalize, get_args(Normalize), name="normalize")
            if self.scale_norm:
                raise ArgumentError("scale_norm and normalize are both given", where="normalize")

    @property
    def does(self) -> Normalize | None:
        """Options that change vectors."""
        return "scale_norm" if self.scale_norm else self.normalize


def choose_rows(
    source: Source, options: RowOptions, normalize: Normalize | None = None
) -> tuple[ShardStore | None, Selection | PairSelection]:
    """Return the store that a source names, and the rows of it; no store if they are chosen already.

    Raises:
        ArgumentError: the source is something else, or it is chosen rows, and an option is given that chooses rows.
        NotFoundError, DocumentError, CorruptShardError: see `ShardStore.open`.
        LayerNotFoundError, SelectionError: the store does not hold what is asked for.
    """
    if isinstance(source, (Selection, PairSelection)):
        given = [
            field.name for field in fields(RowOptions) if repr(getattr(options, field.name)) != repr(field.default)
        ]
        if given:
            raise ArgumentError(f"{given[0]} cannot be given with rows that are chosen already", where=given[0])
        return None, source
    store = source
    if not isinstance(store, ShardStore):
        if not isinstance(source, (str, os.PathLike)):
            raise ArgumentError(f"the source is {kind_of(source)}; it must be a store or its address", where="source")
        store = ShardStore.open(os.fspath(source), options.storage_options, damaged_ok=options.damaged_ok)
    rows = store.sel(
        layer=options.layer, tokens=options.tokens, examples=options.examples,
        ignore_labels=options.ignore_labels, where=options.where, masked=options.masked,
        dtype=read_dtype(normalize, options.dtype), stack_layers=options.stack_layers,
    )  # fmt: skip
    return store, filtered(rows, remove_bos=options.remove_bos, max_norm_multiple=options.max_norm_multiple)


def near_copy(source: Source, options: StoreOptions) -> tuple[Source, StoreOptions]:
    """Return the source, or a checked copy of its layers and tokens in $TMPDIR if `use_tmpdir` asks for it, and the options for it.

    Raises:
        ArgumentError: the source is not an address.
        SaevStoreError: see `saev_store.loaders.stage`.
    """
    folder = os.environ.get("TMPDIR")
    if not options.use_tmpdir or not folder:
        return source, options
    if not isinstance(source, (str, os.PathLike)):
        raise ArgumentError("only a store at an address can be copied", where="use_tmpdir", remedy="Pass its address.")
    address = os.fspath(source)
    if options.remove_bos:
        with ShardStore.open(address, options.storage_options) as store:
            # A copy of the content tokens alone does not show whether there was a special one.
            options = replace(options, remove_bos=not store.layout.cls_token)
    near = stage(address, folder, layers=options.layer, tokens=options.tokens, storage_options=options.storage_options)
    return near, replace(options, storage_options=None)
