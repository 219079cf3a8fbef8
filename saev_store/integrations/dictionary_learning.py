"""Input of `trainSAE` and `evaluate` of dictionary_learning: activations without end, and a description of them.

    buffer = activation_buffer(loader)
    trainSAE(data=buffer, trainer_configs=[...], steps=50_000)

Written for dictionary_learning 0.1.
"""

from __future__ import annotations

import torch

from saev_store.core.layout import layer_name
from saev_store.integrations._provider import Provider, rows_of, rows_of_one_store
from saev_store.torch import StoreLoader


class ActivationBatches(Provider[torch.Tensor]):
    """Activations (batch, d_model), and what `trainSAE` writes about them beside the dictionaries; made by `activation_buffer`."""

    def __init__(self, loader: StoreLoader) -> None:
        super().__init__(loader, rows_of)
        self._described = loader

    @property
    def config(self) -> dict[str, object]:
        """Description of what is loaded, plain JSON: dictionary_learning's keys for width, batch size and device, and the store, layers and seed."""
        loader = self._described
        rows, options = rows_of_one_store(loader), loader.options
        return {
            "d_submodule": loader.d_model,
            "out_batch_size": options.batch_size,
            "device": options.device,
            "store": rows.reader.transport.url,
            "layers": [layer_name(key) for key in rows.layer_keys],
            "tokens": options.tokens,
            "dtype": options.dtype,
            "n_samples": loader.n_samples,
            "scale": loader.scale,
            "normalize": options.normalize,
            "seed": options.seed if options.order == "shuffled" else None,
        }


def activation_buffer(loader: StoreLoader) -> ActivationBatches:
    """Activations for `trainSAE` and `evaluate`: tensors (batch, d_model), epoch after epoch.

    It replaces an `ActivationBuffer`, but holds no model: `evaluate` measures the reconstruction, not the model's loss.
    With `normalize_activations=True`, `trainSAE` takes its first 102 batches for the norm and trains on those that follow.

    Args:
        loader: Without `stack_layers`; with `drop_last=True`, so that all batches have one size.

    Raises (from the buffer):
        ArgumentError: batches are of stacked layers.

    >>> loader = StoreLoader(SAMPLE, layer=5, batch_size=8, drop_last=True)
    >>> with activation_buffer(loader) as buffer:
    ...     tuple(next(buffer).shape), buffer.config["layers"], buffer.config["out_batch_size"]
    ((8, 8), ['5'], 8)
    """
    rows_of_one_store(loader)
    return ActivationBatches(loader)
