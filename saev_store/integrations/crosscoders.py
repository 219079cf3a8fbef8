"""What crosscoders and transcoders are trained on: several layers, two models, or source and target, of the same tokens.

for acts in layer_batches(loader):  # (batch, layers, d_model)
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TypeAlias

import torch
from torch.utils.data import Dataset

from saev_store.errors import ArgumentError
from saev_store.integrations._provider import Provider, TensorLoader, rows_of
from saev_store.store.pair import PairSelection
from saev_store.torch import ExampleBatch, tensors

#: Source and target of a transcoder.
SourceTarget: TypeAlias = tuple[torch.Tensor, torch.Tensor]


def layer_batches(loader: TensorLoader) -> Provider[torch.Tensor]:
    """Activations of several layers for a crosscoder: tensors (batch, layers, d_model), epoch after epoch.

    Args:
        loader: Of one store, with `stack_layers=True`. The layers come in the order in which the loader was given them.

    Raises (from the provider):
        ArgumentError: batches are not of stacked layers.

    >>> from saev_store.torch import StoreLoader
    >>> loader = StoreLoader(SAMPLE, layer=(11, 2), stack_layers=True, batch_size=8)
    >>> with layer_batches(loader) as batches:
    ...     next(batches).shape
    torch.Size([8, 2, 8])
    """
    return Provider(loader, _layers)


def model_batches(loader: TensorLoader) -> Provider[torch.Tensor]:
    """Activations of two models for a crosscoder: tensors (batch, 2, d_model), first those of store `a`, epoch after epoch.

    Tensors are copies: the two stores are read into memory of their own.

    Args:
        loader: Of two stores, one layer of each, of the same width: `StoreLoader(pair(a, b).sel(…))`.

    Raises (from the provider):
        ArgumentError: batches are not of two stores, or have several layers or two widths.

    >>> from saev_store import ShardStore, pair
    >>> from saev_store.torch import StoreLoader
    >>> store = ShardStore.open(SAMPLE)
    >>> loader = StoreLoader(pair(store, store).sel(layer_a=5, layer_b=5), batch_size=8)
    >>> with model_batches(loader) as batches:
    ...     next(batches).shape
    torch.Size([8, 2, 8])
    """
    return Provider(loader, _models)


def transcoder_batches(loader: TensorLoader) -> Provider[SourceTarget]:
    """Source and target for a transcoder: two tensors of the same tokens, epoch after epoch.

    Args:
        loader: Of two layers of one store, with `stack_layers=True`: the first is the source, the second the target, each (batch,
            d_model), views of one batch. Or of two stores: `a` has the source and `b` the target, each (batch, d_model), or (batch,
            layers, d_model) where several layers of it were chosen.

    Raises (from the provider):
        ArgumentError: batches are of one store, but not of two stacked layers.

    >>> from saev_store.torch import StoreLoader
    >>> loader = StoreLoader(SAMPLE, layer=(2, 5), stack_layers=True, batch_size=8)
    >>> with transcoder_batches(loader) as batches:
    ...     source, target = next(batches)
    >>> source.shape, target.shape
    (torch.Size([8, 8]), torch.Size([8, 8]))
    """
    return Provider(loader, _source_and_target)


def _layers(batch: ExampleBatch) -> torch.Tensor:
    """(batch, layers, d_model)."""
    return rows_of(batch, stacked=True)


def _models(batch: ExampleBatch) -> torch.Tensor:
    """(batch, 2, d_model)."""
    a, b = rows_of(batch, "act_a"), rows_of(batch, "act_b")
    _check_widths(a.shape[1], b.shape[1])
    return torch.stack((a, b), dim=1)


def _source_and_target(batch: ExampleBatch) -> SourceTarget:
    """Out of a pair of stores, or of two layers of one."""
    source, target = batch.get("act_a"), batch.get("act_b")
    if isinstance(source, torch.Tensor) and isinstance(target, torch.Tensor):
        return source, target
    rows = rows_of(batch, stacked=True)
    if rows.shape[1] != 2:
        raise ArgumentError(
            f"a row has {rows.shape[1]} layers; it must have the source and the target",
            where="loader",
            remedy="Choose two layers, or use a loader of two stores.",
        )
    return rows[:, 0], rows[:, 1]


def _check_widths(a: int, b: int) -> None:
    """Refuse vectors that cannot be stacked."""
    if a != b:
        raise ArgumentError(
            f"vectors of the first store have {a} numbers, those of the second {b}; they must have the same width",
            where="loader",
            remedy="Use transcoder_batches, which keeps them apart.",
        )


class PairedActivations(Dataset[torch.Tensor]):
    """Rows of two stores by number, as crosscoder_learning has them: `[i]` is (2, d_model), `[i:j]` is (j - i, 2, d_model).

    For `torch.utils.data.DataLoader`, `random_split` and analyses. A batch is gathered at once, but from places all over both stores:
    train with `model_batches`, which reads them in order. Rows are copies, float32 unless the selection says otherwise. Can be
    pickled and inherited by workers.

    Args:
        rows: `pair(a, b).sel(…)` of one layer of each store.

    Raises:
        ArgumentError: several layers of a store were chosen, or the widths differ.

    >>> from saev_store import ShardStore, pair
    >>> store = ShardStore.open(SAMPLE)
    >>> rows = PairedActivations(pair(store, store).sel(layer_a=5, layer_b=11))
    >>> len(rows), rows[3].shape, rows[4:10].shape
    (28, torch.Size([2, 8]), torch.Size([6, 2, 8]))
    """

    def __init__(self, rows: PairSelection) -> None:
        if len(rows.a.shape) != 2 or len(rows.b.shape) != 2:
            raise ArgumentError(
                f"rows are {rows.a.shape[1:]} and {rows.b.shape[1:]}; they must be of one layer of each store",
                where="rows",
            )
        _check_widths(rows.a.shape[1], rows.b.shape[1])
        self.rows = rows

    def __len__(self) -> int:
        return len(self.rows)

    def __getitem__(self, index: int | slice | Sequence[int] | torch.Tensor) -> torch.Tensor:
        """One row (2, d_model), or several (n, 2, d_model).

        Raises:
            SelectionError: a row is out of range.
            CorruptShardError: a shard of those rows is missing or short.
        """
        given = index.numpy() if isinstance(index, torch.Tensor) else index
        is_one = hasattr(given, "__index__") and getattr(given, "ndim", 0) == 0
        found = tensors(self.rows.rows(given)._asdict())
        rows = _models(found)
        return rows[0] if is_one else rows

    def __getitems__(self, indices: Sequence[int]) -> list[torch.Tensor]:
        """Several rows, gathered at once; how a `DataLoader` asks for a batch."""
        return list(_models(tensors(self.rows.rows(list(indices))._asdict())))
