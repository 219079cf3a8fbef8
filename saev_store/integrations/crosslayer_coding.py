"""What the trainer of crosslayer-coding takes: sources and targets of all layers of the same tokens.

    activations = CrosslayerActivations(loader, source="resid_mid", target="mlp_out")

Written after the base class `BaseActivationStore` of its repository, which is not on the package index.
"""

from __future__ import annotations

import numpy as np
import torch

from saev_store.core.layout import RESID_POST
from saev_store.errors import ArgumentError
from saev_store.integrations._provider import Provider, rows_of, rows_of_one_store
from saev_store.torch import ExampleBatch, StoreLoader
from saev_store.torch.batch import tensor_of
from saev_store.torch.normalize import ROUNDED

#: Label of each layer to (batch, d_model): sources and targets.
LayerBatches = tuple[dict[int, torch.Tensor], dict[int, torch.Tensor]]


class CrosslayerActivations(Provider[LayerBatches]):
    """Batches for a cross-layer transcoder, with the names of crosslayer-coding's `BaseActivationStore`.

    A batch is a pair of dicts, label of each layer to a tensor (batch, d_model): the sources, and the targets, of the same tokens.
    Tensors are views of one batch. They come epoch after epoch, and `len` is that of one epoch.

    Args:
        loader: Of a store with hook points, with `stack_layers=True`: the source and the target of each layer.
        source, target: Their hook points.

    Attributes:
        layer_indices: The labels, in the loader's order.
        d_model, dtype, device: Of the tensors.
        train_batch_size_tokens: Rows of a batch of this rank.
        total_tokens: Rows of an epoch, over all ranks.

    Raises:
        ArgumentError: a layer has no source or no target, the loader has other hook points, or its layers are not stacked.

    >>> from saev_store.torch import StoreLoader
    >>> loader = StoreLoader(SAMPLE, layer=5, batch_size=8)
    >>> CrosslayerActivations(loader, source="mlp_in", target="mlp_out")
    Traceback (most recent call last):
    saev_store.errors.ArgumentError: loader: the loader has the layers [(5, 'resid_post')]; ...
    """

    def __init__(self, loader: StoreLoader, *, source: str, target: str) -> None:
        rows = rows_of_one_store(loader)
        keys = [(key, RESID_POST) if not isinstance(key, tuple) else key for key in rows.layer_keys]
        self._sources = {label: at for at, (label, point) in enumerate(keys) if point == source}
        self._targets = {label: at for at, (label, point) in enumerate(keys) if point == target}
        others = [key for key in keys if key[1] not in {source, target}]
        if others or self._sources.keys() != self._targets.keys() or source == target:
            raise ArgumentError(
                f"the loader has the layers {keys}; it must have {source!r} and {target!r} of each layer, and no others",
                where="loader",
                remedy=f"Make it with layer=((0, {source!r}), (1, {source!r}), …, (0, {target!r}), (1, {target!r}), …).",
            )
        if not rows.space.stacks_layers:
            raise ArgumentError(
                "the loader has each layer in rows of its own; it must have them in one row",
                where="loader",
                remedy="Make it with stack_layers=True.",
            )
        super().__init__(loader, self._split)
        self.layer_indices = list(self._sources)
        self.d_model, self.device = loader.d_model, torch.device(loader.options.device)
        self.dtype = ROUNDED.get(loader.options.dtype, tensor_of(np.empty(0, rows.dtype)).dtype)
        self.train_batch_size_tokens, self.total_tokens = loader.options.batch_size, loader.n_samples
        self._n_batches = len(loader)

    def __len__(self) -> int:
        return self._n_batches

    def _split(self, batch: ExampleBatch) -> LayerBatches:
        """By layer."""
        rows = rows_of(batch, stacked=True)
        sources = {label: rows[:, at] for label, at in self._sources.items()}
        return sources, {label: rows[:, at] for label, at in self._targets.items()}

    def get_batch(self) -> LayerBatches:
        """The next batch; see `Provider.__next__`."""
        return next(self)
