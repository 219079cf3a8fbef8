"""The loaders for training: configs in, dicts of tensors out."""

from __future__ import annotations

import logging
import os
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping
from dataclasses import fields, replace
from functools import cached_property, partial
from multiprocessing.context import get_spawning_popen
from types import TracebackType
from typing import Generic, Self, TypeVar

import torch
from torch.utils.data import IterableDataset, get_worker_info

from saev_store.core.layout import LayerKey
from saev_store.documents import Metadata
from saev_store.errors import ArgumentError
from saev_store.loaders import (
    WINDOW_BYTES,
    BatchIterator,
    Explanation,
    Loader,
    Metrics,
    OrderedLoader,
    ReadArguments,
    ReadOptions,
    ShuffledLoader,
    ShuffleOptions,
    open_for_training,
    stored_scale,
)
from saev_store.store.selection import Selection
from saev_store.store.store import ShardStore
from saev_store.torch._device import Copies, DeviceMemory, PlainCopies, copies_to, moved, pinned
from saev_store.torch.batch import ExampleBatch, tensors
from saev_store.torch.config import OrderedConfig, ShuffledConfig

Config = TypeVar("Config", OrderedConfig, ShuffledConfig)
Options = TypeVar("Options", ReadOptions, ShuffleOptions)

_logger = logging.getLogger("saev_store.torch")


def _fields_of(cfg: OrderedConfig | ShuffledConfig, options: Options) -> Options:
    """The options that a config has, without what only the config has."""
    return replace(options, **{field.name: getattr(cfg, field.name) for field in fields(options)})


class TorchLoader(ABC, Generic[Config]):
    """What `OrderedDataLoader` and `ShuffledDataLoader` share.

    Iterate it once per epoch; a batch is an `ExampleBatch`, a dict of tensors: `act` float32 (n, d_model), `example_idx`
    and `token_idx` int64 (n,), with several layers `layer` int64 (n,), with hook points also `layer_key_idx` int64 (n,), the
    position in `layer_keys`, `token_labels` int64 (n,) where the store has
    labels (255 for special tokens), and the token arrays that the config names. With `stack_layers` `act` is (n, layers,
    d_model), and there is no `layer`. On the CPU a batch is a view of memory that is used again once no reference to the batch
    is left.
    """

    ExampleBatch = ExampleBatch

    def __init__(self, cfg: Config) -> None:
        self.cfg = cfg
        self._copies = copies_to(cfg.device)
        self.store: ShardStore = open_for_training(
            cfg.shards,
            cfg.storage_options,
            layer=cfg.layer,
            tokens=cfg.tokens,
            use_tmpdir=cfg.use_tmpdir,
            cache_dir=cfg.cache_dir,
            cache_bytes=cfg.cache_bytes,
            damaged_ok=cfg.damaged_ok,
        )
        self._loader: Loader = self._make()
        #: Epoch and number of the batch that comes next, where the loader below is ahead of what was handed out.
        self._at: tuple[int, int] | None = None
        self._logged_s = 0.0

    @abstractmethod
    def _make(self) -> Loader:
        """The loader of NumPy batches."""

    def _changed(self) -> ReadArguments:
        """Options that the config says in another way."""
        cfg = self.cfg
        batch_bytes = cfg.batch_size * self._rows.space.row_nbytes
        ready = max(1, min(cfg.buffer_size, cfg.buffer_bytes // batch_bytes))
        return {"prefetch_batches": cfg.prefetch_batches or ready, "scale_norm": self._scale_norm()}

    def _scale_norm(self) -> bool | float:
        """The factor by the statistics beside the store; those say nothing about vectors without the ignored ones."""
        cfg = self.cfg
        if not cfg.scale_norm or self._rows.space.ends is not None:
            return cfg.scale_norm
        return stored_scale(self.store, cfg.layer, cfg.tokens)

    @cached_property
    def _rows(self) -> Selection:
        """The rows that the config chooses."""
        cfg = self.cfg
        examples = list(cfg.examples) if isinstance(cfg.examples, tuple) else cfg.examples
        return self.store.sel(
            layer=cfg.layer,
            tokens=cfg.tokens,
            ignore_labels=cfg.ignore_labels or None,
            where=cfg.where,
            examples=examples,
            masked=cfg.masked,
            dtype=cfg.dtype,
            stack_layers=cfg.stack_layers,
        )

    # -- sizes ---------------------------------------------------------------------------------------------------------

    def __len__(self) -> int:
        return len(self._loader)

    @property
    def n_batches(self) -> int:
        """Batches of an epoch, the same on every rank."""
        return len(self._loader)

    @property
    def n_samples(self) -> int:
        """Rows of an epoch, over all ranks."""
        return self._loader.n_samples

    @property
    def batch_size(self) -> int:
        return self.cfg.batch_size

    @property
    def drop_last(self) -> bool:
        return self.cfg.drop_last

    @property
    def metadata(self) -> Metadata:
        return self.store.metadata

    @property
    def md(self) -> Metadata:
        return self.store.metadata

    @property
    def d_model(self) -> int:
        return self._loader.d_model

    @property
    def layer_keys(self) -> tuple[LayerKey, ...]:
        """The chosen layers: labels, or with hook points pairs, in which `layer_key_idx` of a batch counts."""
        return self._loader.layer_keys

    @property
    def scale(self) -> float | None:
        """What activations are multiplied by with `scale_norm`, else None."""
        return self._loader.scale

    @property
    def manager_pid(self) -> int:
        """The process that makes batches: this one while an iteration is under way (threads do it), else -1."""
        return os.getpid() if self._loader.is_iterating else -1

    # -- iterating -----------------------------------------------------------------------------------------------------

    def __iter__(self) -> Iterator[ExampleBatch]:
        """The epoch's batches; after `load_state_dict`, those that had not been handed out."""
        if self._at is not None and self._at[0] != self._loader.epoch:
            # Its last batch was copied ahead of time, but not handed out.
            self._loader.set_epoch(self._at[0])
        epoch = self._loader.epoch
        batches = iter(self._loader)
        self._at, self._logged_s = None, time.monotonic()
        return _Batches(batches, self._copies, (epoch, self._loader.next_batch), len(self._loader), self._advance)

    def _advance(self, at: tuple[int, int]) -> None:
        """Note the epoch and the number of the batch that comes next, and log measures now and then."""
        self._at = at
        if self.cfg.debug and time.monotonic() - self._logged_s > self.cfg.log_every_s:
            self._logged_s = time.monotonic()
            _logger.debug("%s", self.metrics())

    @property
    def epoch(self) -> int:
        """The epoch that the next iteration gives; it advances when the last batch of an epoch is handed out."""
        return self._loader.epoch if self._at is None else self._at[0]

    def set_epoch(self, epoch: int) -> None:
        """Choose the epoch of the next iteration, from its beginning."""
        self._loader.set_epoch(epoch)
        self._at = None

    def state_dict(self) -> dict[str, object]:
        """Where the loader stands: JSON, below 1 kB. Counts batches that were handed out, not those made ahead."""
        state = self._loader.state_dict()
        if self._at is not None:
            state["epoch"], state["batch"] = self._at
        return state

    def load_state_dict(self, state: Mapping[str, object]) -> None:
        """Continue where `state_dict` was taken; see `saev_store.loaders`.

        Raises:
            ArgumentError: the state is of other rows, another batch size, seed or version; the message says which.
        """
        self._loader.load_state_dict(state)
        self._at = None

    def metrics(self) -> Metrics:
        """Measures of the latest iteration, since it began."""
        return self._loader.metrics()

    def explain(self) -> Explanation:
        """What will be read, how, and what it costs; nothing is read for it. `print` it."""
        return self._loader.explain()

    def as_iterable_dataset(self) -> BatchDataset[Config]:
        """A dataset of whole batches, for `DataLoader(dataset, batch_size=None)` and for torchdata's stateful one."""
        return BatchDataset(self)

    def close(self) -> None:
        """End the current iteration and its threads, and give back all memory. The loader can be used again."""
        self._loader.close()

    def shutdown(self) -> None:
        """The same as `close`: the name that older training scripts call."""
        self.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def __reduce__(self) -> tuple[object, ...]:
        cfg = self.cfg
        if get_spawning_popen() is not None and self._loader.world > 1:
            # For a worker of PyTorch's DataLoader, where torch.distributed is not initialised.
            cfg = replace(cfg, rank=self._loader.rank, world=self._loader.world)
        return (type(self), (cfg,), {"state": self.state_dict()})

    def __setstate__(self, state: Mapping[str, Mapping[str, object]]) -> None:
        self.load_state_dict(state["state"])


class _Batches(Iterator[ExampleBatch]):
    """The consumer's end of an epoch.

    No generator: one that is collected as garbage runs to its end there, wherever that is, and what ends threads takes locks.

    Args:
        batches: Of NumPy arrays.
        copies: How to get to the device; None where batches are there.
        at: Epoch and number of the first batch.
        n_batches: Batches of an epoch.
        advance: Called with each batch that is handed out: epoch and number of the one that comes next.
    """

    def __init__(
        self,
        batches: BatchIterator,
        copies: Copies | None,
        at: tuple[int, int],
        n_batches: int,
        advance: Callable[[tuple[int, int]], None],
    ) -> None:
        self._batches, self._at, self._n_batches, self._advance = batches, at, n_batches, advance
        found = map(tensors, batches)
        self._found: Iterator[ExampleBatch] = found if copies is None else moved(found, copies)
        self._has_ended = False

    def __iter__(self) -> _Batches:
        return self

    def __next__(self) -> ExampleBatch:
        if self._has_ended:
            raise StopIteration
        try:
            batch = next(self._found)
        except BaseException:
            self.close()
            raise
        epoch, number = self._at
        self._at = (epoch, number + 1) if number + 1 < self._n_batches else (epoch + 1, 0)
        self._advance(self._at)
        return batch

    def close(self) -> None:
        """End the iteration; there are no more batches."""
        self._has_ended = True
        self._batches.close()


class OrderedDataLoader(TorchLoader[OrderedConfig]):
    """Batches in storage order, always the same; see `TorchLoader` for what a batch is.

    Args:
        cfg: What and how.

    Raises:
        NotFoundError, DocumentError, CorruptShardError: see `ShardStore.open`.
        LayerNotFoundError, SelectionError: the store does not hold what is asked for.

    >>> loader = OrderedDataLoader(OrderedConfig(shards=SAMPLE, layer=5, batch_size=8))
    >>> [tuple(batch["act"].shape) for batch in loader]
    [(8, 8), (8, 8), (8, 8), (4, 8)]
    """

    def _make(self) -> Loader:
        """See `TorchLoader`."""
        options = _fields_of(self.cfg, ReadOptions())
        return OrderedLoader(
            self._rows, options, labels=self.store.labels, make_buffer=pinned(self.cfg.device), **self._changed()
        )


class ShuffledDataLoader(TorchLoader[ShuffledConfig]):
    """Batches of a seeded shuffle, the same on every machine; see `TorchLoader` for what a batch is.

    Args:
        cfg: What and how.

    Raises:
        NotFoundError, DocumentError, CorruptShardError: see `ShardStore.open`.
        LayerNotFoundError, SelectionError: the store does not hold what is asked for.

    >>> loader = ShuffledDataLoader(ShuffledConfig(shards=SAMPLE, layer=5, batch_size=8, drop_last=True))
    >>> len(loader), loader.n_samples
    (3, 28)
    """

    def _make(self) -> Loader:
        """See `TorchLoader`."""
        cfg = self.cfg
        if cfg.window_device is not None and torch.device(cfg.window_device) != torch.device(cfg.device):
            raise ArgumentError(
                f"batches to come are wanted on {cfg.window_device!r} and batches on {cfg.device!r}; it must be the same device",
                where="window_device",
            )
        memory, rows = None, self._rows
        window = cfg.buffer_size * cfg.batch_size * rows.space.row_nbytes
        if cfg.window_device is not None:
            memory = partial(
                DeviceMemory,
                copies=self._copies or PlainCopies(torch.device("cpu")),
                stored=self.store.dtype,
                dtype=rows.dtype,
            )
        return ShuffledLoader(
            rows,
            _fields_of(cfg, ShuffleOptions()),
            labels=self.store.labels,
            make_buffer=pinned(cfg.device),
            memory=memory,
            window_bytes=cfg.window_bytes or min(window, WINDOW_BYTES),
            **self._changed(),
        )


class BatchDataset(IterableDataset[ExampleBatch], Generic[Config]):
    """Whole batches of a loader as a dataset: `DataLoader(dataset, batch_size=None, num_workers=0 or 1)`."""

    def __init__(self, loader: TorchLoader[Config]) -> None:
        self.loader = loader

    def __len__(self) -> int:
        return len(self.loader)

    def __iter__(self) -> Iterator[ExampleBatch]:
        worker = get_worker_info()
        if worker is not None and worker.num_workers > 1:
            raise ArgumentError(
                f"num_workers is {worker.num_workers}: each worker would hand out every batch",
                where="DataLoader",
                remedy="Use num_workers=0 (the loader has threads of its own) or 1.",
            )
        return iter(self.loader)

    def state_dict(self) -> dict[str, object]:
        """The loader's."""
        return self.loader.state_dict()

    def load_state_dict(self, state: Mapping[str, object]) -> None:
        """The loader's."""
        self.loader.load_state_dict(state)
