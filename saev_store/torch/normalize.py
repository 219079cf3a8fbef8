"""Activations as trainers want them: centred on the mean of each layer, or scaled, as a whole or layer by layer."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import Literal, cast

import numpy as np
import numpy.typing as npt
import torch

from saev_store.core.layout import LayerKey
from saev_store.errors import ArgumentError, brief
from saev_store.loaders.sample import is_factor, norm_scale, samples_by_layer
from saev_store.store.selection import Selection
from saev_store.torch.batch import ExampleBatch, tensor_of

Floats = npt.NDArray[np.float64]
#: What is done to activations; the configs of loaders describe each.
Normalize = Literal["scale_norm", "scale_norm_per_layer", "center", "center_and_scale_norm"]
#: What configs may want.
DType = Literal["float32", "float64", "bfloat16", "float16", "stored"]
#: What vectors are rounded to after they were normalized.
ROUNDED = {"bfloat16": torch.bfloat16, "float16": torch.float16}


@dataclass(frozen=True, eq=False)
class Normalization:
    """The normalization of a loader with `normalize=`: `(act - mean) * scale`, for each layer. `act / scale + mean` undoes it.

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
        """Return that of the mean and the mean norm of a fixed, seeded sample of at most 8,192 tokens of the rows: the same in every process.

        Raises:
            ArgumentError: there are no rows, or their mean or mean norm is zero or not finite.
            CorruptShardError: a shard of these rows is missing or short.
        """
        found: list[tuple[Floats, float]] = []
        for key, sample in zip(rows.layer_keys, samples_by_layer(rows), strict=True):
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
    """Return what is subtracted from vectors (n, d_model), and their factor; not finite if there are none."""
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
    """Normalizes the batches of a loader. What it needs is read with the first batch, and is part of a state.

    Args:
        kind: What to do.
        parts: Names of vectors in a batch, to the rows of the loader.
        factor: Of `"scale_norm"`; default: found by `norm_scale` for each part.
        dtype: What vectors are rounded to afterwards; None if they are of that dtype already.
    """

    def __init__(
        self, kind: Normalize, parts: Mapping[str, Selection], factor: float | None, dtype: torch.dtype | None
    ) -> None:
        self.kind: Normalize = kind
        self._parts, self._factor, self._dtype = dict(parts), factor, dtype

    @cached_property
    def found(self) -> dict[str, Normalization]:
        """Name of vectors in a batch to what is done to them; empty for `"scale_norm"`."""
        if self.kind == "scale_norm":
            return {}
        return {name: Normalization.of(rows, self.kind) for name, rows in self._parts.items()}

    @cached_property
    def scales(self) -> dict[str, float]:
        """Name of vectors in a batch to their factor; empty unless it is `"scale_norm"`."""
        if self.kind != "scale_norm":
            return {}
        return {name: self._factor or norm_scale(rows) for name, rows in self._parts.items()}

    def state(self) -> dict[str, object]:
        """Return what a state has of it."""
        return {"normalize": self.kind, **({"scale": self.scales} if self.kind == "scale_norm" else {})}

    def scales_of(self, state: Mapping[str, object]) -> dict[str, float]:
        """Return the factors of a state, so that a continued run has the same; none unless it is `"scale_norm"`.

        Raises:
            ArgumentError: it has none that a loader writes.
        """
        if self.kind != "scale_norm":
            return {}
        scale = state.get("scale")
        found = dict(cast("Mapping[str, object]", scale)) if isinstance(scale, Mapping) else {}
        if set(found) != set(self._parts) or not all(is_factor(one) for one in found.values()):
            raise ArgumentError(
                f"the state has scale = {brief(state.get('scale'))}, which this loader never writes",
                where="load_state_dict",
            )
        return cast("dict[str, float]", found)

    def __call__(self, batch: ExampleBatch) -> ExampleBatch:
        """Return the batch itself, whose vectors are normalized in place, and then rounded."""
        for name in self._parts:
            act = batch[name]
            if not isinstance(act, torch.Tensor):
                continue
            if self.kind == "scale_norm":
                act.mul_(self.scales[name])
                continue
            how = self.found[name]
            how.apply_(act, _layer_idx(batch, how.layer_keys))
            batch[name] = act if self._dtype is None else act.to(self._dtype)
        return batch


def read_dtype(kind: Normalize | None, dtype: DType) -> DType:
    """Return the dtype in which vectors are read: vectors that are normalized by layer are rounded to 16 bits once, at the end.

    >>> read_dtype("center", "bfloat16"), read_dtype("scale_norm", "bfloat16"), read_dtype("center", "stored")
    ('float32', 'bfloat16', 'stored')
    """
    return "float32" if kind not in (None, "scale_norm") and dtype in ROUNDED else dtype


def _layer_idx(batch: ExampleBatch, layer_keys: tuple[LayerKey, ...]) -> torch.Tensor | None:
    """Return the layer of each row, by position among the chosen ones; None if the batch has no such column."""
    layer, position = batch.get("layer"), batch.get("layer_key_idx")
    if isinstance(position, torch.Tensor):
        return position
    if not isinstance(layer, torch.Tensor):
        return None
    labels, order = torch.tensor(layer_keys, device=layer.device).sort()
    return order[torch.searchsorted(labels, layer)]
