"""The loaders for training: configs in, dicts of tensors out."""

from __future__ import annotations

import logging
import os
import time
from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping
from types import TracebackType
from typing import Generic, Self, TypeVar

import torch
import torch.distributed
from torch.utils.data import IterableDataset, get_worker_info

from saev_store.documents import Metadata
from saev_store.errors import ArgumentError
from saev_store.loaders import BatchIterator, Explanation, Metrics, OrderedLoader, ShuffledLoader
from saev_store.loaders._base import Loader, Options
from saev_store.loaders._memory import HostWindow, Outputs, WindowMemory
from saev_store.loaders._scale import stored_scale
from saev_store.loaders.staging import open_for_training
from saev_store.selected import Selection
from saev_store.store import ShardStore
from saev_store.torch._device import PlainCopies, copies_to, moved, pinned
from saev_store.torch._window import DeviceWindow
from saev_store.torch.batch import ExampleBatch, tensors
from saev_store.torch.config import OrderedConfig, ShuffledConfig

Config = TypeVar("Config", OrderedConfig, ShuffledConfig)

_logger = logging.getLogger("saev_store.torch")
#: The window where neither `window_bytes` nor a smaller `buffer_size` says otherwise.
_WINDOW_BYTES = 2 << 30


def rank_and_world(rank: int | None, world: int | None) -> tuple[int, int]:
    """This process and how many there are: as given, else as torch.distributed says where it is initialised."""
    distributed = torch.distributed.is_available() and torch.distributed.is_initialized()
    if world is None:
        world = torch.distributed.get_world_size() if distributed and rank is None else 1
    if rank is None:
        rank = torch.distributed.get_rank() if distributed and world > 1 else 0
    return rank, world


class TorchLoader(ABC, Generic[Config]):
    """What `OrderedDataLoader` and `ShuffledDataLoader` share.

    Iterate it once per epoch; a batch is an `ExampleBatch`, a dict of tensors: `act` float32 (n, d_model), `example_idx`
    and `token_idx` int64 (n,), with several layers `layer` int64 (n,), and `token_labels` int64 (n,) where the store has
    labels (255 for special tokens). On the CPU a batch is a view of memory that is used again once nobody holds the batch.
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
        )
        self._loader: Loader = self._make()
        self._at: tuple[int, int] | None = None

    @abstractmethod
    def _make(self) -> Loader:
        """The loader of NumPy batches."""

    def _common(self) -> Options:
        cfg = self.cfg
        rank, world = rank_and_world(cfg.rank, cfg.world)
        batch_bytes = cfg.batch_size * self.store.layout.vector_nbytes
        return {
            "batch_size": cfg.batch_size,
            "drop_last": cfg.drop_last,
            "labels": self.store.labels,
            "rank": rank,
            "world": world,
            "n_threads": cfg.n_threads,
            "prefetch_batches": max(1, min(cfg.buffer_size, cfg.buffer_bytes // batch_bytes)),
            "batch_timeout_s": cfg.batch_timeout_s,
            "scale_norm": self._scale_norm(),
            "medium": cfg.medium,
            "read_bytes": cfg.read_bytes,
            "keep_pages": cfg.keep_pages,
            "make_buffer": pinned(cfg.device),
        }

    def _scale_norm(self) -> bool | float:
        """The factor by the statistics beside the store; those say nothing about vectors without the ignored ones."""
        cfg = self.cfg
        if not cfg.scale_norm or cfg.ignore_labels:
            return cfg.scale_norm
        return stored_scale(self.store, cfg.layer, cfg.tokens)

    def _rows(self) -> Selection:
        cfg = self.cfg
        return self.store.sel(layer=cfg.layer, tokens=cfg.tokens, ignore_labels=cfg.ignore_labels or None)

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
    def scale(self) -> float | None:
        """What activations are multiplied by with `scale_norm`, else None."""
        return self._loader.scale

    @property
    def manager_pid(self) -> int:
        """The process that makes batches: this one while an iteration is under way (threads do it), else -1."""
        return os.getpid() if self._loader._is_iterating else -1

    # -- iterating -----------------------------------------------------------------------------------------------------

    def __iter__(self) -> Iterator[ExampleBatch]:
        """The epoch's batches; after `load_state_dict`, those that had not been handed out."""
        epoch = self._loader.epoch
        batches = iter(self._loader)
        self._at = None
        return _Batches(self, batches, epoch, self._loader.next_batch)

    @property
    def epoch(self) -> int:
        """The epoch that the next iteration gives; it advances by itself when an epoch has been handed out."""
        return self._loader.epoch

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
        return (type(self), (self.cfg,), {"state": self.state_dict()})

    def __setstate__(self, state: Mapping[str, Mapping[str, object]]) -> None:
        self.load_state_dict(state["state"])


class _Batches(Iterator[ExampleBatch]):
    """The consumer's end of an epoch, from batch `number` on.

    No generator: one that is collected as garbage runs to its end there, wherever that is, and what ends threads takes locks.
    """

    def __init__(self, loader: TorchLoader[Config], batches: BatchIterator, epoch: int, number: int) -> None:
        self._loader, self._batches, self._at = loader, batches, (epoch, number)
        self._found: Iterator[ExampleBatch] = map(tensors, batches)
        if loader._copies is not None:
            self._found = moved(self._found, loader._copies)
        self._logged, self._ended = time.monotonic(), False

    def __iter__(self) -> _Batches:
        return self

    def __next__(self) -> ExampleBatch:
        if self._ended:
            raise StopIteration
        loader = self._loader
        try:
            batch = next(self._found)
        except StopIteration:
            loader._at = None
            self.close()
            raise
        except BaseException:
            self.close()
            raise
        epoch, number = self._at
        self._at = loader._at = epoch, number + 1
        if loader.cfg.debug and time.monotonic() - self._logged > loader.cfg.log_every_s:
            self._logged = time.monotonic()
            _logger.debug("%s", loader.metrics())
        return batch

    def close(self) -> None:
        """End the iteration; there are no more batches."""
        self._ended = True
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
        return OrderedLoader(self._rows(), **self._common())


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
        cfg = self.cfg
        if cfg.window_device is not None and torch.device(cfg.window_device) != torch.device(cfg.device):
            raise ArgumentError(
                f"the window is wanted on {cfg.window_device!r} and batches on {cfg.device!r}; it must be the same device",
                where="window_device",
            )
        window = cfg.buffer_size * cfg.batch_size * self.store.layout.vector_nbytes
        return ShuffledLoader(
            self._rows(),
            seed=cfg.seed,
            window_bytes=cfg.window_bytes or min(window, _WINDOW_BYTES),
            slots=cfg.slots,
            examples_per_block=cfg.examples_per_block,
            n_partitions=cfg.n_partitions,
            make_window=HostWindow if cfg.window_device is None else self._new_window,
            **self._common(),
        )

    def _new_window(self, outputs: Outputs) -> WindowMemory:
        del outputs
        copies = self._copies or PlainCopies(torch.device("cpu"))
        return DeviceWindow(copies, self._loader.n_threads, pinned(self.cfg.device))


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
