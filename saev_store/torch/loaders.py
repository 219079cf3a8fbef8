"""The loaders for training: configs in, dicts of tensors out."""

from __future__ import annotations

import logging
import os
import time
from abc import abstractmethod
from collections.abc import Iterator
from functools import cached_property, partial
from typing import TypeVar

import torch

from saev_store.core.layout import LayerKey
from saev_store.documents import Metadata
from saev_store.errors import ArgumentError
from saev_store.loaders import (
    WINDOW_BYTES,
    Explanation,
    Loader,
    Metrics,
    OrderedLoader,
    ReadArguments,
    ReadOptions,
    ShuffledLoader,
    ShuffleOptions,
    filtered,
    open_for_training,
    stored_scale,
)
from saev_store.store.selection import Selection
from saev_store.store.store import ShardStore
from saev_store.torch._device import DeviceMemory, PlainCopies, copies_to, device_of, pinned
from saev_store.torch._epochs import EpochLoader, options_of
from saev_store.torch.batch import ExampleBatch
from saev_store.torch.config import OrderedConfig, ShuffledConfig, check_config, scaling
from saev_store.torch.normalize import Normalization, normalizer_of, read_dtype

Config = TypeVar("Config", OrderedConfig, ShuffledConfig)

_logger = logging.getLogger("saev_store.torch")


class TorchLoader(EpochLoader[Config, Loader]):
    """What `OrderedDataLoader` and `ShuffledDataLoader` share.

    Iterate it once per epoch; a batch is an `ExampleBatch`, a dict of tensors: `act` float32 (n, d_model), `example_idx`
    and `token_idx` int64 (n,), with several layers `layer` int64 (n,), with hook points also `layer_key_idx` int64 (n,), the
    position in `layer_keys`, `token_labels` int64 (n,) where the store has labels (255 for special tokens), and the token
    arrays that the config names. With `stack_layers` `act` is (n, layers, d_model), and there is no `layer`. On the CPU a
    batch is a view of memory that is used again once no reference to the batch is left.
    """

    #: The class of its configs.
    _config: type[OrderedConfig | ShuffledConfig]

    def __init__(self, cfg: Config) -> None:
        check_config(cfg, self._config)
        self.cfg = cfg
        copies = self._copies = copies_to(cfg.device)
        self.store: ShardStore = open_for_training(
            cfg.shards,
            cfg.storage_options,
            layer=cfg.layer,
            tokens=cfg.tokens,
            use_tmpdir=cfg.use_tmpdir,
            damaged_ok=cfg.damaged_ok,
        )
        super().__init__(cfg, self._make(), copies, normalizer_of(cfg.normalize, {"act": self._rows}, cfg.dtype))
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
        """The factor by the statistics beside the store.

        Those say nothing about vectors without the ignored ones, and cannot be made of a store that has lost examples.
        """
        cfg = self.cfg
        scale_norm = scaling(cfg.scale_norm, cfg.normalize)
        if scale_norm is not True or self._rows.space.ends is not None or self.store.readable_examples:
            return scale_norm
        return stored_scale(self.store, cfg.layer, cfg.tokens)

    @cached_property
    def _rows(self) -> Selection:
        """The rows that the config chooses."""
        cfg = self.cfg
        examples = list(cfg.examples) if isinstance(cfg.examples, tuple) else cfg.examples
        rows = self.store.sel(
            layer=cfg.layer,
            tokens=cfg.tokens,
            ignore_labels=cfg.ignore_labels or None,
            where=cfg.where,
            examples=examples,
            masked=cfg.masked,
            dtype=read_dtype(cfg.normalize, cfg.dtype),
            stack_layers=cfg.stack_layers,
        )
        remove_bos = cfg.remove_bos
        if remove_bos and cfg.use_tmpdir and not self.store.layout.cls_token:
            # A copy of the content tokens alone does not say whether there was a special one.
            with ShardStore.open(cfg.shards, cfg.storage_options) as source:
                remove_bos = not source.layout.cls_token
        return filtered(self.store, rows, remove_bos=remove_bos, max_norm_multiple=cfg.max_norm_multiple)

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
    def normalization(self) -> Normalization | None:
        """What is done to vectors with `normalize`, else None; a sample is read for it when it is first asked for."""
        return None if self._normalizer is None else self._normalizer.found["act"]

    @property
    def manager_pid(self) -> int:
        """The process that makes batches: this one while an iteration is under way (threads do it), else -1."""
        return os.getpid() if self._loader.is_iterating else -1

    # -- iterating -----------------------------------------------------------------------------------------------------

    def __iter__(self) -> Iterator[ExampleBatch]:
        """The epoch's batches; after `load_state_dict`, those that had not been handed out."""
        batches = super().__iter__()
        self._logged_s = time.monotonic()
        return batches

    def _advance(self, at: tuple[int, int]) -> None:
        """Also log measures now and then."""
        super()._advance(at)
        if self.cfg.debug and time.monotonic() - self._logged_s > self.cfg.log_every_s:
            self._logged_s = time.monotonic()
            _logger.debug("%s", self.metrics())

    def metrics(self) -> Metrics:
        """Measures of the latest iteration, since it began."""
        return self._loader.metrics()

    def explain(self) -> Explanation:
        """What will be read, how, and what it costs; nothing is read for it. `print` it."""
        return self._loader.explain()


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

    _config = OrderedConfig

    def _make(self) -> Loader:
        """See `TorchLoader`."""
        options = options_of(self.cfg, ReadOptions)
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

    _config = ShuffledConfig

    def _make(self) -> Loader:
        """See `TorchLoader`."""
        cfg = self.cfg
        window = cfg.window_device
        if window is not None and device_of(window, where="window_device") != torch.device(cfg.device):
            raise ArgumentError(
                f"batches to come are wanted on {window!r} and batches on {cfg.device!r}; it must be the same device",
                where="window_device",
            )
        memory, rows = None, self._rows
        most = cfg.buffer_size * cfg.batch_size * rows.space.row_nbytes
        if window is not None:
            memory = partial(
                DeviceMemory,
                copies=self._copies or PlainCopies(torch.device("cpu")),
                stored=self.store.dtype,
                dtype=rows.dtype,
            )
        return ShuffledLoader(
            rows,
            options_of(cfg, ShuffleOptions),
            labels=self.store.labels,
            make_buffer=pinned(cfg.device),
            memory=memory,
            window_bytes=cfg.window_bytes or min(most, WINDOW_BYTES),
            **self._changed(),
        )
