"""Activations as trainers want them: centred on the mean of each layer, or scaled, as a whole or layer by layer."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import Literal, cast

import numpy as np
import torch

from saev_store.core.layout import LayerKey
from saev_store.errors import ArgumentError
from saev_store.loaders.sample import Floats, sampled_rows, samples_by_layer
from saev_store.store.selection import Selection
from saev_store.torch.batch import ExampleBatch, tensor_of

#: What is done to activations; `StoreOptions` describes each.
Normalize = Literal["scale_norm", "scale_norm_per_layer", "center", "center_and_scale_norm"]
DType = Literal["float32", "float64", "bfloat16", "float16", "stored"]
#: What vectors are rounded to after they were normalized.
ROUNDED = {"bfloat16": torch.bfloat16, "float16": torch.float16}


@dataclass(frozen=True, eq=False)
class Normalization:
    """Normalization of vectors: `(act - mean) * scale`, for each layer. `act / scale + mean` undoes it.

    Attributes:
        layer_keys: The layers, in the order of the loader.
        mean: float32 (layers, d_model), on the CPU; zeros unless vectors are centred.
        scale: float32 (layers,), on the CPU.
    """

    layer_keys: tuple[LayerKey, ...]
    mean: torch.Tensor
    scale: torch.Tensor


def normalization_of(rows: Selection, kind: Normalize, factor: float | None) -> Normalization:
    """Return that of the mean and the mean norm of a fixed, seeded sample of at most 8,192 tokens of the rows: the same in every process.

    Args:
        rows: The rows.
        kind: What to do.
        factor: The factor of `"scale_norm"`, if it is known.

    Raises:
        ArgumentError: there are no rows, or their mean or mean norm is zero or not finite.
        CorruptShardError: a shard of these rows is missing or short.
    """
    d_model, keys = rows.shape[-1], rows.layer_keys
    samples: list[Floats] = []
    if factor is None:
        samples = [sampled_rows(rows)] if kind == "scale_norm" else samples_by_layer(rows)
    means, scales = np.zeros((len(keys), d_model), np.float32), np.full(len(keys), factor or 1.0, np.float32)
    for number, sample in enumerate(samples):
        if kind.startswith("center") and len(sample):
            with np.errstate(invalid="ignore"):  # infinities are refused below
                means[number] = sample.mean(axis=0)
        if kind != "center":
            with np.errstate(invalid="ignore"):
                norms = np.linalg.norm(sample - means[number].astype(np.float64), axis=-1)
            norm = float(norms.mean()) if len(sample) else 0.0
            scales[slice(None) if kind == "scale_norm" else number] = (
                math.sqrt(d_model) / norm if norm > 0 else math.nan
            )
        if not len(sample) or not np.isfinite(means).all() or not (np.isfinite(scales) & (scales > 0)).all():
            raise ArgumentError(
                f"of {len(sample)} sampled rows the mean or the mean norm is zero or not finite",
                where="normalize",
                remedy="max_norm_multiple leaves out tokens whose vectors are not finite.",
            )
    return Normalization(keys, tensor_of(means), tensor_of(scales))


class Normalizer:
    """Normalizes the batches of a loader. What it needs is read with the first batch.

    Args:
        kind: What to do.
        parts: Names of vectors in a batch, to the rows of the loader.
        factor: Of `"scale_norm"`, if it is known.
        dtype: What vectors are rounded to afterwards; None if they are of that dtype already.
    """

    def __init__(
        self, kind: Normalize, parts: Mapping[str, Selection], factor: float | None, dtype: torch.dtype | None
    ) -> None:
        self.kind: Normalize = kind
        self._parts, self.factor, self._dtype = dict(parts), factor, dtype

    @cached_property
    def found(self) -> dict[str, Normalization]:
        """Name of vectors in a batch to what is done to them."""
        return {name: normalization_of(rows, self.kind, self.factor) for name, rows in self._parts.items()}

    def __call__(self, batch: ExampleBatch) -> ExampleBatch:
        """Return the batch itself, whose vectors are normalized in place in float32, or in float64 where they are, and then rounded."""
        for name, how in self.found.items():
            act = cast("torch.Tensor", batch[name])
            wide = act.to(torch.promote_types(act.dtype, torch.float32))
            # Vectors of several layers are stacked, or each row has its layer.
            picked = _layer_idx(batch, how.layer_keys) if act.ndim == 2 else slice(None)
            if self.kind.startswith("center"):
                wide.sub_(how.mean.to(wide)[picked])
            wide.mul_(how.scale.to(wide)[:, None][picked])
            if wide is not act:
                act.copy_(wide)
            batch[name] = act if self._dtype is None else act.to(self._dtype)
        return batch


def read_dtype(kind: Normalize | None, dtype: DType) -> DType:
    """Return the dtype in which vectors are read: vectors that are normalized by layer are rounded to 16 bits once, at the end."""
    return "float32" if kind not in (None, "scale_norm") and dtype in ROUNDED else dtype


def _layer_idx(batch: ExampleBatch, layer_keys: tuple[LayerKey, ...]) -> torch.Tensor | int:
    """Return the layer of each row, by position among the chosen ones."""
    layer, position = batch.get("layer"), batch.get("layer_key_idx")
    if isinstance(position, torch.Tensor):
        return position
    if not isinstance(layer, torch.Tensor):
        return 0
    labels, order = torch.tensor(layer_keys, device=layer.device).sort()
    return order[torch.searchsorted(labels, layer)]
