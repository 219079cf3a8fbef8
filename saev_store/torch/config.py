"""Options of the loaders, under the names of the protocol's specification; names of older versions are understood."""

from __future__ import annotations

import os
from typing import Annotated, Literal, cast

import numpy as np
import pydantic
from pydantic import AliasChoices, BeforeValidator, Field

from saev_store.core.rows import Tokens
from saev_store.errors import ArgumentError
from saev_store.loaders import ReadOptions, ShuffleOptions, options_class
from saev_store.loaders.options import Flag
from saev_store.torch.normalize import DType, Normalize

_OLD_TOKENS = {"image": "content", "cls": "special"}


class ConfigError(ArgumentError):
    """Options of a loader that make no sense; the message lists every one of them."""


config_class = options_class(ConfigError, kw_only=False)


def check_config(cfg: object, kind: type[object]) -> None:
    """Refuse what is no config of a loader.

    Raises:
        ConfigError: it is something else, or the config of another loader.
    """
    if not isinstance(cfg, kind):
        raise ConfigError(
            f"an object of type {type(cfg).__name__} is no config of this class; {kind.__name__}(…) is", where="cfg"
        )


def scaling(scale_norm: bool | float, normalize: Normalize | None) -> bool | float:
    """What the loader of NumPy batches does by itself.

    Raises:
        ConfigError: both are given.
    """
    if scale_norm and normalize is not None:
        raise ConfigError(
            f"scale_norm is {scale_norm} and normalize is {normalize!r}",
            where="normalize",
            remedy="Choose one of them.",
        )
    return scale_norm or normalize == "scale_norm"


def _tokens(value: object) -> object:
    """The present name of a choice of tokens."""
    return _OLD_TOKENS.get(value, value) if isinstance(value, str) else value


def text_of_path(value: object) -> object:
    """A path as text."""
    return os.fspath(cast("os.PathLike[str]", value)) if isinstance(value, os.PathLike) else value


def _examples(value: object) -> object:
    """Positions as integers, masks as booleans; `ShardStore.sel` compares these with the store."""
    if value is None or isinstance(value, slice):
        return cast("object", value)
    if not isinstance(value, (int, list, tuple, range, np.ndarray, np.generic)):
        raise ValueError("it must be a position, a list of them, a slice, or a mask")  # noqa: TRY004  # pydantic's way to say so
    found = np.asarray(value)
    listed = cast("tuple[object, ...]", value) if isinstance(value, (list, tuple)) else ()
    if found.dtype.kind != "b" and any(isinstance(one, (bool, np.bool_)) for one in listed):
        raise ValueError("it must be positions, or a mask of booleans")
    if found.ndim == 0 and found.dtype.kind == "b":
        raise ValueError("a boolean is no position")
    return (found.item(),) if found.ndim == 0 else tuple(found.tolist())


def _layers(value: object) -> object:
    """Labels of layers; a boolean is none, though Python counts it among the integers."""
    several = cast("tuple[object, ...]", value) if isinstance(value, (list, tuple)) else (value,)
    if isinstance(value, (set, frozenset)) or any(isinstance(one, (bool, np.bool_)) for one in several):
        raise ValueError("it must be a label of a layer, or several, which are integers")
    if isinstance(value, (list, tuple)):
        return tuple(one.item() if isinstance(one, np.integer) else one for one in several)
    return cast("object", value.item() if isinstance(value, np.integer) else value)


def _values(value: object) -> object:
    """Arrays and lists of values as tuples, NumPy's numbers as Python's."""
    if isinstance(value, (list, tuple, range, np.ndarray, np.generic)):
        found = np.asarray(value)
        return cast("object", tuple(found.tolist()) if found.ndim else found.item())
    return value


Shards = Annotated[str, BeforeValidator(text_of_path), Field(validation_alias=AliasChoices("shards", "shard_root"))]
WhichTokens = Annotated[Tokens, BeforeValidator(_tokens), Field(validation_alias=AliasChoices("tokens", "patches"))]
# Types are as exact as those of `ShardStore.sel`: no text and no fraction becomes an integer.
_Label = pydantic.StrictInt | tuple[pydantic.StrictInt, pydantic.StrictStr]
Layer = Annotated[_Label | tuple[_Label, ...] | Literal["all"], BeforeValidator(_layers)]
Examples = Annotated[
    tuple[pydantic.StrictBool, ...] | tuple[pydantic.StrictInt, ...] | slice, BeforeValidator(_examples)
]
_Value = pydantic.StrictBool | pydantic.StrictInt | pydantic.StrictFloat
#: Name of a token array to the value, or to the values, that a token may have.
Conditions = dict[str, Annotated[tuple[_Value, ...] | _Value, BeforeValidator(_values)]]
Count = Annotated[int, Field(ge=1)]
Seconds = Annotated[float, Field(gt=0)]
Multiple = Annotated[float, BeforeValidator(_values), Field(strict=True, gt=0, allow_inf_nan=False)]


class _OldNames:
    """What a config is called in scripts for version 1 of the protocol."""

    shards: str
    tokens: Tokens

    @property
    def shard_root(self) -> str:
        return self.shards

    @property
    def patches(self) -> Literal["image", "cls", "all"]:
        old: dict[Tokens, Literal["image", "cls", "all"]] = {"content": "image", "special": "cls", "all": "all"}
        return old[self.tokens]


@config_class
class IndexedConfig(_OldNames):
    """Which rows an `IndexedDataset` has.

    Attributes:
        shards: The store: a folder or any URL. Older name: `shard_root`.
        tokens: `"content"`, `"special"` or `"all"`. Older: `patches`, with `"image"`, `"cls"` and `"all"`.
        layer: A recorded layer's label, literally, or a pair (label, hook point); several of them; or `"all"`.
        seed: Unused; understood because older scripts pass it.
        debug: Log what is done.
        ignore_labels: Leave out content tokens with these labels.
        masked: Hand out also tokens whose `mask` is false, in stores that record one.
        dtype: Of the vectors: "float32", or "stored", or another one that `ShardStore.read` takes.
        token_arrays: Names of token arrays of the store to have in examples and batches, such as `("token_ids",)`.
        stack_layers: A row holds the vectors of all chosen layers of one token: (layers, d_model).
        storage_options: What fsspec hands to the file system.
        where: Only content tokens whose token arrays have these values, such as `{"document_ids": (3, 7)}`.
        remove_bos: Leave out the first token of each context, as `saev_store.loaders.filtered` does.
        max_norm_multiple: Leave out tokens whose vectors are longer than so many mean norms, likewise. The chosen layers are read
            once for it.
    """

    shards: Shards = "./shards"
    tokens: WhichTokens = "content"
    layer: Layer = -2
    seed: int = 17
    debug: Flag = False
    ignore_labels: tuple[int, ...] = ()
    masked: Flag = False
    dtype: DType = "float32"
    token_arrays: tuple[str, ...] = ()
    stack_layers: Flag = False
    storage_options: dict[str, object] | None = None
    where: Conditions | None = None
    remove_bos: Flag = False
    max_norm_multiple: Multiple | None = None


@config_class
class _LoaderConfig(_OldNames):
    """What both loaders need to know besides how rows are read; described in `OrderedConfig`."""

    shards: Shards = "./shards"
    tokens: WhichTokens = "content"
    layer: Layer = -2
    ignore_labels: tuple[int, ...] = ()
    masked: Flag = False
    dtype: DType = "float32"
    stack_layers: Flag = False
    examples: Examples | None = None
    damaged_ok: Flag = False
    buffer_size: Count = 64
    buffer_bytes: Count = 256 << 20
    debug: Flag = False
    log_every_s: Seconds = 30.0
    use_tmpdir: Flag = False
    storage_options: dict[str, object] | None = None
    device: str = "cpu"
    where: Conditions | None = None
    remove_bos: Flag = False
    max_norm_multiple: Multiple | None = None
    normalize: Normalize | None = None


@config_class
class OrderedConfig(_LoaderConfig, ReadOptions):
    """How an `OrderedDataLoader` loads: the fields of `saev_store.loaders.ReadOptions`, and these.

    Attributes:
        prefetch_batches: Default: by `buffer_size` and `buffer_bytes`.
        scale_norm: `True` takes the statistics beside the store, and makes them of a sample where there are none.
        shards, tokens, layer, ignore_labels, where, masked, dtype, stack_layers, storage_options, remove_bos, max_norm_multiple: As
            in `IndexedConfig`.
        normalize: What is done to vectors, computed where batches are wanted: `"scale_norm"` as `scale_norm=True`;
            `"scale_norm_per_layer"` scales each layer by a factor of its own; `"center"` subtracts the mean vector of the layer;
            `"center_and_scale_norm"` scales each layer after that. The last three are by a fixed sample of these rows.
        examples: Which examples: positions, a slice, or a mask over all of them; default: all.
        damaged_ok: Open also where shards are missing or short. Choose `examples` that are left: others raise. `use_tmpdir` needs a
            whole store.
        buffer_size: Batches that may be ready and wait; never more than `buffer_bytes` of them.
        buffer_bytes: Memory for batches that are ready.
        debug: Log measures every `log_every_s` seconds.
        log_every_s: Seconds between two logs.
        use_tmpdir: With $TMPDIR set, first copy the layers that are wanted there, once per machine.
        device: Where batches are wanted, such as `"cuda"`.
    """


@config_class
class ShuffledConfig(_LoaderConfig, ShuffleOptions):
    """How a `ShuffledDataLoader` loads: as `OrderedConfig`, with the fields of `saev_store.loaders.ShuffleOptions`, and these.

    Attributes:
        buffer_size: Also how many batches the shuffle may hold: sets the window where `window_bytes` does not, up to 2 GiB.
        min_buffer_fill: Understood and met: the window is full before the first batch, unless `early_start` is set.
        window_device: Keep batches to come on that device, which must be `device`. This machine's memory then only holds what
            is being read. Default: in this machine's memory.
    """

    min_buffer_fill: Annotated[float, Field(ge=0, le=1)] = 0.0
    window_device: str | None = None
