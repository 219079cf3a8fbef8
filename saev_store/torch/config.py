"""Options of the loaders, under the names of the protocol's specification; names of older versions are understood."""

from __future__ import annotations

import os
from typing import Annotated, Literal

import pydantic
from pydantic import AliasChoices, BeforeValidator, ConfigDict, Field
from pydantic.dataclasses import dataclass

from saev_store.loaders._medium import Kind
from saev_store.selection import Tokens

_SETTINGS = ConfigDict(frozen=True, extra="forbid", arbitrary_types_allowed=True)
_OLD_TOKENS = {"image": "content", "cls": "special"}


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


@dataclass(config=_SETTINGS)
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


@dataclass(config=_SETTINGS)
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


@dataclass(config=_SETTINGS)
class ShuffledConfig(_OldNames):
    """How a `ShuffledDataLoader` loads; what is not listed is as in `OrderedConfig`.

    Attributes:
        seed: Any integer; the order is a function of it and of the epoch.
        buffer_size: How many batches the shuffle may hold: sets the window where `window_bytes` does not, up to 2 GiB.
        min_buffer_fill: Understood and met: the window is full before the first batch.
        window_bytes: Memory for the window.
        slots: `"block"` or `"row"`, see `saev_store.loaders.ShuffledLoader`.
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
    slots: Literal["block", "row"] = "block"
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


#: What a wrong option raises: pydantic's error is a `ValueError` that lists every problem.
ConfigError = pydantic.ValidationError
