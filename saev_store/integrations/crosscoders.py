"""Input of crosscoders and transcoders: several layers, two models, or source and target, of the same tokens.

for acts in layer_batches(loader):  # (batch, layers, d_model)
"""

from __future__ import annotations

from functools import partial

import torch

from saev_store.errors import ArgumentError
from saev_store.integrations._provider import Provider, rows_of
from saev_store.torch import Consumer, ExampleBatch, StoreLoader


def layer_batches(loader: StoreLoader | Consumer) -> Provider[torch.Tensor]:
    """Activations of several layers for a crosscoder: tensors (batch, layers, d_model), epoch after epoch.

    Args:
        loader: Of one store, with `stack_layers=True`. The layers come in the order in which the loader was given them.

    Raises (from the provider):
        ArgumentError: batches are not of stacked layers.

    >>> loader = StoreLoader(SAMPLE, layer=(11, 2), stack_layers=True, batch_size=8)
    >>> with layer_batches(loader) as batches:
    ...     next(batches).shape
    torch.Size([8, 2, 8])
    """
    return Provider(loader, partial(rows_of, stacked=True))


def model_batches(loader: StoreLoader | Consumer) -> Provider[torch.Tensor]:
    """Activations of two models for a crosscoder: tensors (batch, 2, d_model), first those of store `a`, epoch after epoch.

    Tensors are copies: the two stores are read into memory of their own.

    Args:
        loader: Of two stores, one layer of each, of the same width: `StoreLoader(pair(a, b).sel(…))`.

    Raises (from the provider):
        ArgumentError: batches are not of two stores, or have several layers or two widths.

    >>> from saev_store import ShardStore, pair
    >>> store = ShardStore.open(SAMPLE)
    >>> loader = StoreLoader(pair(store, store).sel(layer_a=5, layer_b=5), batch_size=8)
    >>> with model_batches(loader) as batches:
    ...     next(batches).shape
    torch.Size([8, 2, 8])
    """
    return Provider(loader, _models)


def transcoder_batches(loader: StoreLoader | Consumer) -> Provider[tuple[torch.Tensor, torch.Tensor]]:
    """Source and target for a transcoder: two tensors of the same tokens, epoch after epoch.

    Args:
        loader: Of two layers of one store, with `stack_layers=True`: the first is the source, the second the target, each (batch,
            d_model), views of one batch. Or of two stores: `a` has the source and `b` the target, each (batch, d_model), or (batch,
            layers, d_model) where several layers of it were chosen.

    Raises (from the provider):
        ArgumentError: batches are of one store, but not of two stacked layers.

    >>> loader = StoreLoader(SAMPLE, layer=(2, 5), stack_layers=True, batch_size=8)
    >>> with transcoder_batches(loader) as batches:
    ...     source, target = next(batches)
    >>> source.shape, target.shape
    (torch.Size([8, 8]), torch.Size([8, 8]))
    """
    return Provider(loader, _source_and_target)


def _models(batch: ExampleBatch) -> torch.Tensor:
    """(batch, 2, d_model)."""
    a, b = rows_of(batch, "act_a"), rows_of(batch, "act_b")
    if a.shape[1] != b.shape[1]:
        raise ArgumentError(
            f"vectors of the first store have {a.shape[1]} numbers, those of the second {b.shape[1]}; they must have the same width",
            where="loader",
            remedy="Use transcoder_batches, which keeps them apart.",
        )
    return torch.stack((a, b), dim=1)


def _source_and_target(batch: ExampleBatch) -> tuple[torch.Tensor, torch.Tensor]:
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
