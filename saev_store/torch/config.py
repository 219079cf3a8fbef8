"""Options of the loaders, under the names of the protocol's specification; names of older versions are understood."""

from __future__ import annotations

import os
from collections.abc import Callable
from functools import wraps
from typing import Annotated, Literal, TypeVar, cast, dataclass_transform

import pydantic
from pydantic import AliasChoices, BeforeValidator, ConfigDict, Field
from pydantic.dataclasses import dataclass
from pydantic_core import ErrorDetails

from saev_store.errors import ArgumentError, brief
from saev_store.loaders._medium import Kind
from saev_store.selection import Tokens

_SETTINGS = ConfigDict(frozen=True, extra="forbid", arbitrary_types_allowed=True)
T = TypeVar("T")

_OLD_TOKENS = {"image": "content", "cls": "special"}


class ConfigError(ArgumentError):
    """Options of a loader that make no sense; the message lists every one of them."""


@dataclass_transform(frozen_default=True, kw_only_default=False, field_specifiers=(Field,))
def _config(cls: type[T]) -> type[T]:
    """A frozen dataclass whose values pydantic checks, and whose errors are ours."""
    made = cast("type[T]", dataclass(config=_SETTINGS)(cls))
    check: Callable[..., None] = made.__init__

    @wraps(check)
    def init(self: object, *args: object, **kwargs: object) -> None:
        try:
            check(self, *args, **kwargs)
        except pydantic.ValidationError as error:
            raise ConfigError("; ".join(map(_problem, error.errors())), where=cls.__name__) from None

    made.__init__ = init  # type: ignore[method-assign]  # the same arguments, another error
    return made


def _problem(found: ErrorDetails) -> str:
    """One problem as text; options for file systems hold credentials, so their values are not shown, however misspelled."""
    place = ".".join(map(str, found["loc"]))
    secret = place.startswith("storage") or found["type"] == "unexpected_keyword_argument"
    shown = "" if secret else f" (it is {brief(found['input'])})"
    return f"{place}: {found['msg']}{shown}"


def _tokens(value: object) -> object:
    return _OLD_TOKENS.get(value, value) if isinstance(value, str) else value


def _url(value: object) -> object:
    return os.fspath(value) if isinstance(value, os.PathLike) else value


Shards = Annotated[str, BeforeValidator(_url), Field(validation_alias=AliasChoices("shards", "shard_root"))]
WhichTokens = Annotated[Tokens, BeforeValidator(_tokens), Field(validation_alias=AliasChoices("tokens", "patches"))]
Layer = int | tuple[int, ...] | Literal["all"]
Count = Annotated[int, Field(ge=1)]
Seconds = Annotated[float, Field(gt=0)]


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


@_config
class IndexedConfig(_OldNames):
    """Which rows an `IndexedDataset` has.

    Attributes:
        shards: The store: a folder or any URL. Older name: `shard_root`.
        tokens: `"content"`, `"special"` or `"all"`. Older: `patches`, with `"image"`, `"cls"` and `"all"`.
        layer: A recorded layer's label, literally; several of them; or `"all"`.
        seed: Unused; understood because older scripts pass it.
        debug: Log what is done.
        ignore_labels: Leave out content tokens with these labels.
        storage_options: What fsspec hands to the file system.
    """

    shards: Shards = "./shards"
    tokens: WhichTokens = "content"
    layer: Layer = -2
    seed: int = 17
    debug: bool = False
    ignore_labels: tuple[int, ...] = ()
    storage_options: dict[str, object] | None = None


@_config
class OrderedConfig(_OldNames):
    """How an `OrderedDataLoader` loads; what is not listed is as in `IndexedConfig`.

    Attributes:
        batch_size: Rows of a batch of this rank.
        batch_timeout_s: How long to wait for a batch.
        drop_last: Leave out a last batch that is not full.
        buffer_size: Batches that may be ready and wait; never more than `buffer_bytes` of them.
        log_every_s: How often measures are logged while `debug` is set.
        n_threads: Reads in flight; default: what suits the medium.
        medium: What the shards lie on, where what is found out is not right; see `saev_store.loaders.OrderedLoader`.
        read_bytes: About how much one read brings; default: what suits the medium.
        keep_pages: Whether what was read stays in the page cache; default: unless the store is much larger than memory.
        buffer_bytes: Memory for batches that are ready.
        scale_norm: Scale activations so that their mean L2 norm is sqrt(d_model).
        use_tmpdir: With $TMPDIR set, first copy the layers that are asked for there, once per machine.
        cache_dir: Keep what was read of a remote store in this folder.
        cache_bytes: How much of it.
        device: Where batches are wanted, such as `"cuda"`.
        rank: This process among `world`; default: as torch.distributed says where it is initialised.
        world: How many processes share the work.
    """

    shards: Shards = "./shards"
    tokens: WhichTokens = "content"
    layer: Layer = -2
    batch_size: Count = 16_384
    batch_timeout_s: Seconds = 30.0
    drop_last: bool = False
    buffer_size: Count = 64
    debug: bool = False
    log_every_s: Seconds = 30.0
    n_threads: Count | None = None
    buffer_bytes: Count = 256 << 20
    ignore_labels: tuple[int, ...] = ()
    scale_norm: bool = False
    use_tmpdir: bool = False
    storage_options: dict[str, object] | None = None
    cache_dir: str | None = None
    cache_bytes: Count = 64 << 30
    device: str = "cpu"
    medium: Kind | None = None
    read_bytes: Count | None = None
    keep_pages: bool | None = None
    rank: Annotated[int, Field(ge=0)] | None = None
    world: Count | None = None


@_config
class ShuffledConfig(_OldNames):
    """How a `ShuffledDataLoader` loads; what is not listed is as in `OrderedConfig`.

    Attributes:
        seed: Any integer; the order is a function of it and of the epoch.
        buffer_size: How many batches the shuffle may hold: sets the window where `window_bytes` does not, up to 2 GiB.
        min_buffer_fill: Understood and met: the window is full before the first batch.
        window_bytes: Memory for the window.
        slots: `"batch"`, `"block"` or `"row"`, see `saev_store.loaders.ShuffledLoader`.
        examples_per_block: Likewise.
        n_partitions: Likewise.
        window_device: Keep the window on that device, which must be `device`: vectors are gathered there, and this
            machine's memory only holds what is being read. Default: in this machine's memory.
    """

    shards: Shards = "./shards"
    tokens: WhichTokens = "content"
    layer: Layer = -2
    batch_size: Count = 16_384
    drop_last: bool = False
    scale_norm: bool = False
    ignore_labels: tuple[int, ...] = ()
    n_threads: Count | None = None
    buffer_size: Count = 64
    min_buffer_fill: Annotated[float, Field(ge=0, le=1)] = 0.0
    batch_timeout_s: Seconds = 30.0
    seed: int = 17
    debug: bool = False
    log_every_s: Seconds = 30.0
    use_tmpdir: bool = False
    buffer_bytes: Count = 256 << 20
    window_bytes: Count | None = None
    slots: Literal["batch", "block", "row"] | None = None
    examples_per_block: Count | None = None
    n_partitions: Count | None = None
    storage_options: dict[str, object] | None = None
    cache_dir: str | None = None
    cache_bytes: Count = 64 << 30
    device: str = "cpu"
    window_device: str | None = None
    medium: Kind | None = None
    read_bytes: Count | None = None
    keep_pages: bool | None = None
    rank: Annotated[int, Field(ge=0)] | None = None
    world: Count | None = None
