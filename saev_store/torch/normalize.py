"""Activations as trainers want them: centred on the mean of each layer, or scaled layer by layer. `scale_norm` is the loaders' own."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Literal

import numpy as np
import numpy.typing as npt
import torch

from saev_store.core.layout import LayerKey
from saev_store.errors import ArgumentError
from saev_store.loaders import sampled_rows
from saev_store.store.selection import Selection
from saev_store.torch.batch import ExampleBatch, tensor_of

Floats = npt.NDArray[np.float64]
#: What is done to activations; the configs of loaders say what each means.
Normalize = Literal["scale_norm", "scale_norm_per_layer", "center", "center_and_scale_norm"]
#: What configs may want.
DType = Literal["float32", "float64", "bfloat16", "float16", "stored"]
#: What vectors are rounded to after they were normalized.
_ROUNDED = {"bfloat16": torch.bfloat16, "float16": torch.float16}


@dataclass(frozen=True, eq=False)
class Normalization:
    """What a loader with `normalize=` does: `(act - mean) * scale`, for each layer. `act / scale + mean` undoes it.

    Attributes:
        layer_keys: The layers, in the order of the loader.
        mean: float32 (layers, d_model), on the CPU.
        scale: float32 (layers,), on the CPU.
    """

    layer_keys: tuple[LayerKey, ...]
    mean: torch.Tensor
    scale: torch.Tensor

    @classmethod
    def of(cls, rows: Selection, kind: Normalize) -> Normalization:
        """Of the mean and the mean norm of a fixed, seeded sample of at most 8,192 tokens of the rows: the same in every process.

        Raises:
            ArgumentError: there are no rows, or their mean or mean norm is zero or not finite.
            CorruptShardError: a shard of these rows is missing or short.
        """
        space = rows.space
        ends = None if space.ends is None else space.ends // space.rows_per_token  # of one layer
        found: list[tuple[Floats, float]] = []
        for layer, key in zip(space.layer_idx, rows.layer_keys, strict=True):
            part = replace(space, layer_idx=(layer,), ends=ends, stacks_layers=False)
            sample = sampled_rows(Selection(rows.reader, part))
            mean, scale = _mean_and_scale(sample, kind)
            if not (np.isfinite(mean).all() and 0 < scale < math.inf):
                raise ArgumentError(
                    f"of {len(sample)} sampled rows of layer {key} the mean or the mean norm is zero or not finite",
                    where="normalize",
                    remedy="max_norm_multiple leaves out tokens whose vectors are not finite.",
                )
            found.append((mean, scale))
        means, scales = (np.array(values, dtype=np.float32) for values in zip(*found, strict=True))
        return cls(rows.layer_keys, tensor_of(means), tensor_of(scales))

    def apply_(self, act: torch.Tensor, layer_idx: torch.Tensor | None = None) -> None:
        """Normalize vectors in place, computed in float32, or in float64 where they are.

        Args:
            act: (n, d_model), or (n, layers, d_model).
            layer_idx: Of (n, d_model) of several layers: the layer of each row, by position in `layer_keys`.
        """
        kind = torch.promote_types(act.dtype, torch.float32)
        mean, scale = self.mean.to(act.device, kind), self.scale.to(act.device, kind)[:, None]
        if layer_idx is not None:
            mean, scale = mean[layer_idx], scale[layer_idx]
        elif act.ndim == 2:
            mean, scale = mean[0], scale[0]
        if act.dtype == kind:
            act.sub_(mean).mul_(scale)
        else:
            act.copy_(act.to(kind).sub_(mean).mul_(scale))


def _mean_and_scale(sample: Floats, kind: Normalize) -> tuple[Floats, float]:
    """What is subtracted from vectors (n, d_model), and what they are then multiplied by; not finite where there are none."""
    d_model = int(sample.shape[1])
    if not len(sample):
        return np.full(d_model, np.nan), math.nan
    mean: Floats = np.zeros(d_model)
    scale = 1.0
    with np.errstate(invalid="ignore"):  # infinities: the caller refuses what comes of them
        if kind in ("center", "center_and_scale_norm"):
            np.mean(sample, axis=0, out=mean)
        if kind in ("scale_norm_per_layer", "center_and_scale_norm"):
            norm = float(np.linalg.norm(sample - mean, axis=1).mean())
            scale = math.sqrt(d_model) / norm if norm > 0 else math.inf
    return mean, scale


class Normalizer:
    """Normalizes the batches of a loader; what it needs is read with the first batch.

    Args:
        kind: What to do; part of a loader's state.
        parts: Names of vectors in a batch, to the rows of the loader.
        dtype: What they are rounded to afterwards; None where they are of that dtype already.
    """

    def __init__(self, kind: Normalize, parts: Mapping[str, Selection], dtype: torch.dtype | None) -> None:
        self.kind: Normalize = kind
        self._parts, self._dtype = dict(parts), dtype

    @cached_property
    def found(self) -> dict[str, Normalization]:
        """Name of vectors in a batch to what is done to them."""
        return {name: Normalization.of(rows, self.kind) for name, rows in self._parts.items()}

    def __call__(self, batch: ExampleBatch) -> ExampleBatch:
        """The batch itself, whose vectors are normalized in place, and then rounded."""
        for name, how in self.found.items():
            act = batch[name]
            if isinstance(act, torch.Tensor):
                how.apply_(act, _layer_idx(batch, how.layer_keys))
                batch[name] = act if self._dtype is None else act.to(self._dtype)
        return batch


def is_of_batches(kind: Normalize | None) -> bool:
    """Whether batches are normalized after they were made; `"scale_norm"` is of the loader of NumPy batches."""
    return kind is not None and kind != "scale_norm"


def read_dtype(kind: Normalize | None, dtype: DType) -> DType:
    """The dtype in which vectors are read: what is normalized is rounded to 16 bits once, at the end.

    >>> read_dtype("center", "bfloat16"), read_dtype("scale_norm", "bfloat16"), read_dtype("center", "stored")
    ('float32', 'bfloat16', 'stored')
    """
    return "float32" if is_of_batches(kind) and dtype in _ROUNDED else dtype


def normalizer_of(kind: Normalize | None, parts: Mapping[str, Selection], dtype: str) -> Normalizer | None:
    """What normalizes batches; None where nothing is to be done, or where the loader of NumPy batches does it.

    Args:
        kind: What to do.
        parts: Names of vectors in a batch, to the rows of the loader, read in `read_dtype`.
        dtype: What the config wants.
    """
    if kind is None or not is_of_batches(kind):
        return None
    return Normalizer(kind, parts, _ROUNDED.get(dtype))


def _layer_idx(batch: ExampleBatch, layer_keys: tuple[LayerKey, ...]) -> torch.Tensor | None:
    """The layer of each row, by position among the chosen ones; None where the vectors say it."""
    layer, position = batch.get("layer"), batch.get("layer_key_idx")
    if isinstance(position, torch.Tensor):
        return position
    if not isinstance(layer, torch.Tensor):
        return None
    labels, order = torch.tensor(layer_keys, device=layer.device).sort()
    return order[torch.searchsorted(labels, layer)]
