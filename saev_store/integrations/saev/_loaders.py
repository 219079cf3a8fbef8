"""Configs and loaders of the reference project, on those of `saev_store.torch`."""

from __future__ import annotations

import logging
import multiprocessing
import os
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, fields
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Literal

import torch

from saev_store import torch as ours
from saev_store.core.arguments import check_count
from saev_store.core.rows import Tokens
from saev_store.errors import ArgumentError
from saev_store.integrations.saev._documents import IndexMap, Metadata
from saev_store.loaders.options import WINDOW_BYTES

_SHARDS = Path("$SAEV_SCRATCH/saev/shards/abcdefg")
_N_THREADS = 4


@dataclass(frozen=True)
class _Config:
    """The path of a store's folder. The loader that is made of a config checks its other values.

    Raises:
        ArgumentError: `shards` is a URL.
    """

    shards: Path

    def __post_init__(self) -> None:
        if "://" in str(self.shards):
            remedy = "Use a path, or saev_store.torch, which takes URLs."
            raise ArgumentError(f"shards is {str(self.shards)!r}, which is not a path", where="shards", remedy=remedy)
        object.__setattr__(self, "shards", Path(self.shards))


@dataclass(frozen=True)
class IndexedConfig(_Config):
    """Rows of an `IndexedDataset`."""

    shards: Path = _SHARDS
    tokens: Tokens = "content"
    layer: int | Literal["all"] = -2
    debug: bool = False


@dataclass(frozen=True)
class OrderedConfig(_Config):
    """Options of an `OrderedDataLoader`. `buffer_size`, `debug` and `log_every_s` are understood, and not needed."""

    shards: Path = _SHARDS
    tokens: Tokens = "content"
    layer: int | Literal["all"] = -2
    batch_size: int = 16_384
    batch_timeout_s: float = 30.0
    drop_last: bool = False
    buffer_size: int = 64
    debug: bool = False
    log_every_s: float = 30.0


@dataclass(frozen=True)
class ShuffledConfig(_Config):
    """Options of a `ShuffledDataLoader`. With 4 threads, the default, the storage decides how many.

    The window holds `buffer_size` batches, at most 4 GiB. With `min_buffer_fill` an epoch begins with a full pool.
    """

    shards: Path = _SHARDS
    tokens: Tokens = "content"
    layer: int | Literal["all"] = -1
    batch_size: int = 16_384
    drop_last: bool = False
    scale_norm: bool = False
    ignore_labels: list[int] = field(default_factory=list[int])
    n_threads: int = _N_THREADS
    buffer_size: int = 64
    min_buffer_fill: float = 0.0
    batch_timeout_s: float = 30.0
    seed: int = 17
    debug: bool = False
    log_every_s: float = 30.0
    use_tmpdir: bool = False


def make_ordered_config(shuffled_cfg: ShuffledConfig, **overrides: object) -> OrderedConfig:
    """Return an `OrderedConfig` with the values of `shuffled_cfg` where both have the field, and with `overrides`, which win.

    Raises:
        TypeError: `OrderedConfig` has no field of a name in `overrides`.
        ArgumentError: `shards` is a URL.
    """
    names = {field.name for field in fields(OrderedConfig)} & vars(shuffled_cfg).keys()
    values: dict[str, object] = {name: getattr(shuffled_cfg, name) for name in names}
    make: type = OrderedConfig  # checks the types of its values itself
    found: OrderedConfig = make(**values | overrides)
    return found


class Reservoir:
    """The rows that are read and not handed out: `qsize()` of `capacity`, a share `fill()` from 0 to 1."""

    def __init__(self, loader: ours.StoreLoader, capacity: int) -> None:
        self._loader, self.capacity = loader, capacity

    def fill(self) -> float:
        return self._loader.fill

    def qsize(self) -> int:
        return round(self.fill() * self.capacity)


class _DataLoader:
    """Base of both loaders. An iteration is an epoch; methods are those of `saev_store.torch`."""

    ExampleBatch = ours.ExampleBatch

    def __init__(self, cfg: OrderedConfig | ShuffledConfig, loader: ours.StoreLoader) -> None:
        self.cfg = cfg
        self.metadata = self.md = Metadata.load(cfg.shards)
        self.n_samples, self.batch_size, self.drop_last = len(loader.rows), cfg.batch_size, cfg.drop_last
        self.state_dict, self.load_state_dict, self.shutdown = loader.state_dict, loader.load_state_dict, loader.close
        self._loader = loader

    def __len__(self) -> int:
        return len(self._loader)

    def __iter__(self) -> Iterator[ours.ExampleBatch]:
        return iter(self._loader)

    @property
    def n_batches(self) -> int:
        return len(self._loader)

    @property
    def manager_pid(self) -> int:
        """The process that makes batches: this one during an iteration (its threads do), otherwise -1."""
        return os.getpid() if self._loader.is_iterating else -1

    @property
    def manager_proc(self) -> BaseProcess | None:
        """The process that makes batches: this one during an iteration, otherwise None."""
        return multiprocessing.current_process() if self.manager_pid > 0 else None

    @property
    def reservoir(self) -> Reservoir | None:
        """Share of the window that is full; None without an iteration."""
        return Reservoir(self._loader, self.cfg.buffer_size * self.batch_size) if self.manager_pid > 0 else None


class OrderedDataLoader(_DataLoader):
    """Batches in storage order; a batch is that of `saev_store.torch`."""

    def __init__(self, cfg: OrderedConfig) -> None:
        loader = ours.StoreLoader(
            cfg.shards, order="stored", layer=cfg.layer, tokens=cfg.tokens, batch_size=cfg.batch_size,
            batch_timeout_s=cfg.batch_timeout_s, drop_last=cfg.drop_last,
        )  # fmt: skip
        super().__init__(cfg, loader)
        self.logger = logging.getLogger("ordered.DataLoader")


class ShuffledDataLoader(_DataLoader):
    """Batches of a seeded shuffle; a batch is that of `saev_store.torch`, but with int32 for `example_idx` and `token_idx`.

    `labels_mmap` is the store's labels, uint8 (n_examples, content tokens), if some are ignored, otherwise None.
    """

    def __init__(self, cfg: ShuffledConfig) -> None:
        n_batches = check_count(cfg.buffer_size, name="buffer_size")
        window = n_batches * check_count(cfg.batch_size, name="batch_size") * Metadata.load(cfg.shards).d_model * 4
        loader = ours.StoreLoader(
            cfg.shards, layer=cfg.layer, tokens=cfg.tokens, batch_size=cfg.batch_size, drop_last=cfg.drop_last,
            scale_norm=cfg.scale_norm, ignore_labels=cfg.ignore_labels, seed=cfg.seed, batch_timeout_s=cfg.batch_timeout_s,
            n_threads=16 if cfg.n_threads == _N_THREADS else cfg.n_threads, window_bytes=min(window, WINDOW_BYTES),
            early_start=not cfg.min_buffer_fill, use_tmpdir=cfg.use_tmpdir,
        )  # fmt: skip
        super().__init__(cfg, loader)
        self.logger = logging.getLogger("shuffled.DataLoader")
        self.labels_mmap = loader.store.labels if cfg.ignore_labels and loader.store is not None else None

    def __iter__(self) -> Iterator[ours.ExampleBatch]:
        return map(_with_int32, super().__iter__())


def _with_int32(batch: ours.ExampleBatch) -> ours.ExampleBatch:
    for name in ("example_idx", "token_idx"):
        batch[name] = torch.as_tensor(batch[name]).to(torch.int32)
    return batch


class IndexedDataset(torch.utils.data.Dataset[ours.ExampleBatch]):
    """Rows by number; an example is that of `saev_store.torch.StoreDataset`.

    Attributes:
        md: The content of metadata.json.
        index_map: The place of each row.
        labels_mmap: The store's labels, uint8 (n_examples, content tokens), or None.
    """

    Example = ours.ExampleBatch

    def __init__(self, cfg: IndexedConfig) -> None:
        self.cfg = cfg
        self._rows = ours.StoreDataset(cfg.shards, layer=cfg.layer, tokens=cfg.tokens)
        self.md = Metadata.load(cfg.shards)
        self.d_model = self.md.d_model
        self.index_map = IndexMap(self.md, cfg.tokens, cfg.layer, rows=self._rows.rows.space)
        self.labels_mmap = self._rows.store.labels if self._rows.store is not None else None

    def transform(self, act: object) -> torch.Tensor:
        """Return a vector as a tensor of its own."""
        return torch.tensor(act, dtype=torch.float32)

    def __len__(self) -> int:
        return len(self._rows)

    def __getitem__(self, i: int) -> ours.ExampleBatch:
        return self._rows[i]

    def __getitems__(self, indices: list[int]) -> Sequence[ours.ExampleBatch]:
        """Several rows, read at once."""
        return self._rows.__getitems__(indices)
