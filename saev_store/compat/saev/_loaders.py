"""Configs and loaders: those of `saev_store.torch` with the fields, attributes and dtypes of the reference project."""

from __future__ import annotations

import logging
import multiprocessing
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, fields
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Literal, TypeVar

import torch

from saev_store import torch as ours
from saev_store.compat.saev._documents import IndexMap, Metadata, path_of
from saev_store.core.rows import Tokens
from saev_store.errors import ArgumentError

Ours = TypeVar("Ours", ours.IndexedConfig, ours.OrderedConfig, ours.ShuffledConfig)
_SHARDS = Path("$SAEV_SCRATCH/saev/shards/abcdefg")
_N_THREADS = 4


@dataclass(frozen=True)
class _Config:
    """The path of a store's folder.

    Raises:
        ConfigError: an option makes no sense.
        ArgumentError: `shards` is a URL, or no path.
    """

    shards: Path

    def check(self, make: type[Ours]) -> Ours:
        """The same as a config of `saev_store.torch`, which checks it."""
        path = path_of(self.shards, "shards")
        if "://" in str(self.shards):
            remedy = "Use a path, or saev_store.torch, which takes URLs."
            raise ArgumentError(f"shards is {str(self.shards)!r}, which is no path", where="shards", remedy=remedy)
        object.__setattr__(self, "shards", path)
        values = {field.name: getattr(self, field.name) for field in fields(self)}
        if values.get("n_threads") == _N_THREADS:
            del values["n_threads"]
        return make(**values)


@dataclass(frozen=True)
class IndexedConfig(_Config):
    """Which rows an `IndexedDataset` has; see `saev_store.torch.IndexedConfig`."""

    shards: Path = _SHARDS
    tokens: Tokens = "content"
    layer: int | Literal["all"] = -2
    debug: bool = False

    def __post_init__(self) -> None:
        self.check(ours.IndexedConfig)


@dataclass(frozen=True)
class OrderedConfig(_Config):
    """What an `OrderedDataLoader` loads; see `saev_store.torch.OrderedConfig`."""

    shards: Path = _SHARDS
    tokens: Tokens = "content"
    layer: int | Literal["all"] = -2
    batch_size: int = 16_384
    batch_timeout_s: float = 30.0
    drop_last: bool = False
    buffer_size: int = 64
    debug: bool = False
    log_every_s: float = 30.0

    def __post_init__(self) -> None:
        self.check(ours.OrderedConfig)


@dataclass(frozen=True)
class ShuffledConfig(_Config):
    """What a `ShuffledDataLoader` loads; see `saev_store.torch.ShuffledConfig`. With 4 threads the medium decides how many."""

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

    def __post_init__(self) -> None:
        self.check(ours.ShuffledConfig)


def make_ordered_config(shuffled_cfg: ShuffledConfig, **overrides: object) -> OrderedConfig:
    """An `OrderedConfig` with the values of `shuffled_cfg` where both have the field, and with `overrides`, which win.

    Raises:
        TypeError: a name in `overrides` is no field of `OrderedConfig`.
        ConfigError, ArgumentError: a value breaks its rule.
    """
    names = {field.name for field in fields(OrderedConfig)} & vars(shuffled_cfg).keys()
    values: dict[str, object] = {name: getattr(shuffled_cfg, name) for name in names}
    make: type = OrderedConfig  # checks the types of its values itself
    found: OrderedConfig = make(**values | overrides)
    return found


class Reservoir:
    """The rows that are read and not handed out: `qsize()` of `capacity`, a share `fill()` from 0 to 1."""

    def __init__(self, loader: ours.OrderedDataLoader | ours.ShuffledDataLoader, capacity: int) -> None:
        self._loader, self.capacity = loader, capacity

    def fill(self) -> float:
        return self._loader.metrics().window_fill

    def qsize(self) -> int:
        return round(self.fill() * self.capacity)


class _DataLoader:
    """What both loaders have. An iteration is an epoch; methods are those of `saev_store.torch`."""

    ExampleBatch = ours.ExampleBatch

    def __init__(
        self, cfg: OrderedConfig | ShuffledConfig, loader: ours.OrderedDataLoader | ours.ShuffledDataLoader
    ) -> None:
        self.cfg = cfg
        self.metadata = self.md = Metadata.load(cfg.shards)
        self.n_samples, self.batch_size, self.drop_last = loader.n_samples, cfg.batch_size, cfg.drop_last
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
        return self._loader.manager_pid

    @property
    def manager_proc(self) -> BaseProcess | None:
        """The process that makes batches: this one during an iteration, else None."""
        return multiprocessing.current_process() if self.manager_pid > 0 else None

    @property
    def reservoir(self) -> Reservoir | None:
        """How full the window is; None without an iteration."""
        return Reservoir(self._loader, self.cfg.buffer_size * self.batch_size) if self.manager_pid > 0 else None


class OrderedDataLoader(_DataLoader):
    """Batches in storage order; a batch is that of `saev_store.torch`."""

    def __init__(self, cfg: OrderedConfig) -> None:
        super().__init__(cfg, ours.OrderedDataLoader(cfg.check(ours.OrderedConfig)))
        self.logger = logging.getLogger("ordered.DataLoader")


class ShuffledDataLoader(_DataLoader):
    """Batches of a seeded shuffle; a batch is that of `saev_store.torch`, but with int32 for `example_idx` and `token_idx`.

    `labels_mmap` is the store's labels, uint8 (n_examples, content tokens), if some are ignored, else None.
    """

    def __init__(self, cfg: ShuffledConfig) -> None:
        loader = ours.ShuffledDataLoader(cfg.check(ours.ShuffledConfig))
        super().__init__(cfg, loader)
        self.logger = logging.getLogger("shuffled.DataLoader")
        self.labels_mmap = loader.store.labels if cfg.ignore_labels else None

    def __iter__(self) -> Iterator[ours.ExampleBatch]:
        return map(_with_int32, super().__iter__())


def _with_int32(batch: ours.ExampleBatch) -> ours.ExampleBatch:
    for name in ("example_idx", "token_idx"):
        batch[name] = torch.as_tensor(batch[name]).to(torch.int32)
    return batch


class IndexedDataset(torch.utils.data.Dataset[ours.ExampleBatch]):
    """Rows by number; an example is that of `saev_store.torch.IndexedDataset`.

    Attributes:
        md: What metadata.json says.
        index_map: Where each row lies.
        labels_mmap: The store's labels, uint8 (n_examples, content tokens), or None.
    """

    Example = ours.ExampleBatch

    def __init__(self, cfg: IndexedConfig) -> None:
        self.cfg = cfg
        self._rows = ours.IndexedDataset(cfg.check(ours.IndexedConfig))
        self.md = Metadata.load(cfg.shards)
        self.d_model = self.md.d_model
        self.index_map = IndexMap(self.md, cfg.tokens, cfg.layer, rows=self._rows.rows.space)
        self.labels_mmap = self._rows.store.labels
        self.transform = self._rows.transform

    def __len__(self) -> int:
        return len(self._rows)

    def __getitem__(self, i: int) -> ours.ExampleBatch:
        return self._rows[i]

    def __getitems__(self, indices: list[int]) -> Sequence[ours.ExampleBatch]:
        """Several rows, read at once."""
        return self._rows.__getitems__(indices)
