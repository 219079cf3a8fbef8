"""Batches of the same rows of two stores, as tensors: configs in, dicts of tensors out."""

from __future__ import annotations

from abc import abstractmethod
from dataclasses import replace
from typing import Annotated, TypeVar, cast

from pydantic import BeforeValidator

from saev_store.core.rows import Labels, Tokens
from saev_store.loaders import (
    Explanation,
    Metrics,
    OrderedPairLoader,
    PairLoader,
    ReadOptions,
    ShuffledPairLoader,
    ShuffleOptions,
    filtered_pair,
)
from saev_store.store.pair import PairSelection, pair
from saev_store.store.store import ShardStore
from saev_store.torch._device import copies_to
from saev_store.torch._epochs import EpochLoader, options_of
from saev_store.torch.config import (
    Conditions,
    Examples,
    Layer,
    Multiple,
    check_config,
    config_class,
    scaling,
    text_of_path,
)
from saev_store.torch.normalize import DType, Normalization, Normalize, normalizer_of, read_dtype

Address = Annotated[str, BeforeValidator(text_of_path)]


@config_class
class _PairConfig:
    """What both loaders of pairs need to know besides how rows are read; described in `OrderedPairConfig`."""

    shards_a: Address = "./shards_a"
    shards_b: Address = "./shards_b"
    layer_a: Layer = -2
    layer_b: Layer = -2
    tokens: Tokens = "content"
    ignore_labels: tuple[int, ...] = ()
    masked: bool = False
    dtype: DType = "float32"
    examples: Examples | None = None
    storage_options_a: dict[str, object] | None = None
    storage_options_b: dict[str, object] | None = None
    device: str = "cpu"
    where: Conditions | None = None
    remove_bos: bool = False
    max_norm_multiple: Multiple | None = None
    normalize: Normalize | None = None


@config_class
class OrderedPairConfig(_PairConfig, ReadOptions):
    """How an `OrderedPairDataLoader` loads: the fields of `saev_store.loaders.ReadOptions`, and these.

    Attributes:
        shards_a, shards_b: The stores: folders or any URLs. They are of the same tokens.
        layer_a, layer_b: Which layer of each: a label, or a pair (label, hook point); several of them, or `"all"`, are stacked.
        tokens: `"content"`, `"special"` or `"all"`.
        ignore_labels, where, masked, dtype, examples: As in `StorePair.sel`.
        remove_bos, max_norm_multiple: As in `IndexedConfig`; a token is left out where either store leaves it out.
        normalize: As in `OrderedConfig`, of each store by itself.
        storage_options_a, storage_options_b: What fsspec hands to the file systems.
        device: Where batches are wanted, such as `"cuda"`.
    """


@config_class
class ShuffledPairConfig(_PairConfig, ShuffleOptions):
    """How a `ShuffledPairDataLoader` loads: as `OrderedPairConfig`, with the fields of `saev_store.loaders.ShuffleOptions`."""


PairConfig = TypeVar("PairConfig", OrderedPairConfig, ShuffledPairConfig)


class TorchPairLoader(EpochLoader[PairConfig, PairLoader]):
    """What `OrderedPairDataLoader` and `ShuffledPairDataLoader` share.

    Iterate it once per epoch; a batch is an `ExampleBatch`, a dict of tensors: `act_a` and `act_b` float32 (n, d_model), or (n,
    layers, d_model) where several layers were chosen, `example_idx` and `token_idx` int64 (n,), `token_labels` int64 (n,)
    where one of the stores has labels, and the token arrays that the config names. All else is as in `saev_store.loaders`.

    Attributes:
        a, b: The stores.
    """

    #: The class of its configs.
    _config: type[OrderedPairConfig | ShuffledPairConfig]

    def __init__(self, cfg: PairConfig) -> None:
        check_config(cfg, self._config)
        copies = copies_to(cfg.device)
        self.a = ShardStore.open(cfg.shards_a, cfg.storage_options_a)
        self.b = ShardStore.open(cfg.shards_b, cfg.storage_options_b)
        rows = pair(self.a, self.b).sel(
            layer_a=cfg.layer_a,
            layer_b=cfg.layer_b,
            tokens=cfg.tokens,
            examples=list(cfg.examples) if isinstance(cfg.examples, tuple) else cfg.examples,
            ignore_labels=cfg.ignore_labels or None,
            where=cfg.where,
            masked=cfg.masked,
            dtype=read_dtype(cfg.normalize, cfg.dtype),
        )
        rows = filtered_pair((self.a, self.b), rows, remove_bos=cfg.remove_bos, max_norm_multiple=cfg.max_norm_multiple)
        labels = self.a.labels if self.a.has_labels else self.b.labels
        scale_norm = scaling(cfg.scale_norm, cfg.normalize)
        normalizer = normalizer_of(cfg.normalize, {"act_a": rows.a, "act_b": rows.b}, cfg.dtype)
        super().__init__(
            cfg, self._make(replace(cfg, normalize=None, scale_norm=scale_norm), rows, labels), copies, normalizer
        )

    @abstractmethod
    def _make(self, cfg: PairConfig, rows: PairSelection, labels: Labels | None) -> PairLoader:
        """The loader of NumPy batches."""

    @property
    def scale(self) -> tuple[float | None, float | None]:
        """What the activations of each store are multiplied by with `scale_norm`, else None."""
        return self._loader.scale

    @property
    def normalization(self) -> tuple[Normalization, Normalization] | None:
        """What is done to the vectors of each store with `normalize`, else None; a sample is read for it when it is first asked for."""
        found = None if self._normalizer is None else self._normalizer.found
        return None if found is None else (found["act_a"], found["act_b"])

    def metrics(self) -> tuple[Metrics, Metrics]:
        """Measures of the latest iteration, of each store."""
        return self._loader.metrics()

    def explain(self) -> tuple[Explanation, Explanation]:
        """What will be read of each store, how, and what it costs; nothing is read for it."""
        return self._loader.explain()

    def _put_place(self, state: dict[str, object], epoch: int, batch: int) -> None:
        """Write into the states of both stores which batch comes next."""
        for name in ("a", "b"):
            super()._put_place(cast("dict[str, object]", state[name]), epoch, batch)


class OrderedPairDataLoader(TorchPairLoader[OrderedPairConfig]):
    """Batches of the same rows of two stores in storage order; see `TorchPairLoader` for what a batch is.

    Args:
        cfg: What and how.

    Raises:
        NotFoundError, DocumentError, CorruptShardError: see `ShardStore.open`.
        LayerNotFoundError, SelectionError: a store does not hold what is asked for, or the stores are of other tokens.

    >>> cfg = OrderedPairConfig(shards_a=SAMPLE, shards_b=SAMPLE, layer_a=5, layer_b=(2, 11), batch_size=16)
    >>> [(tuple(batch["act_a"].shape), tuple(batch["act_b"].shape)) for batch in OrderedPairDataLoader(cfg)]
    [((16, 8), (16, 2, 8)), ((12, 8), (12, 2, 8))]
    """

    _config = OrderedPairConfig

    def _make(self, cfg: OrderedPairConfig, rows: PairSelection, labels: Labels | None) -> PairLoader:
        """See `TorchPairLoader`."""
        return OrderedPairLoader(rows, options_of(cfg, ReadOptions), labels=labels)


class ShuffledPairDataLoader(TorchPairLoader[ShuffledPairConfig]):
    """Batches of a seeded shuffle of the same rows of two stores; see `TorchPairLoader` for what a batch is.

    Args:
        cfg: What and how.

    Raises:
        NotFoundError, DocumentError, CorruptShardError: see `ShardStore.open`.
        LayerNotFoundError, SelectionError: a store does not hold what is asked for, or the stores are of other tokens.

    >>> cfg = ShuffledPairConfig(shards_a=SAMPLE, shards_b=SAMPLE, layer_a=5, layer_b=2, batch_size=8, drop_last=True)
    >>> len(ShuffledPairDataLoader(cfg))
    3
    """

    _config = ShuffledPairConfig

    def _make(self, cfg: ShuffledPairConfig, rows: PairSelection, labels: Labels | None) -> PairLoader:
        """See `TorchPairLoader`."""
        return ShuffledPairLoader(rows, options_of(cfg, ShuffleOptions), labels=labels)
