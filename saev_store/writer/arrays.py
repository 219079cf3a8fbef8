"""Arrays of what callers hand over: NumPy arrays, torch tensors, one array for each layer."""

from __future__ import annotations

import sys
from collections.abc import Mapping
from typing import Protocol, cast

import numpy as np
import numpy.typing as npt

from saev_store.core.arguments import BOOLEANS
from saev_store.core.dtypes import numpy_dtype
from saev_store.core.layout import RESID_POST, Layout, transformer_lens_name
from saev_store.errors import ArgumentError, brief, kind_of


class _Tensor(Protocol):
    """The part of a torch tensor that is used here."""

    @property
    def dtype(self) -> object: ...
    def view(self, dtype: object) -> _Tensor: ...
    def cpu(self) -> _Tensor: ...
    def resolve_neg(self) -> _Tensor: ...
    def numpy(self) -> object: ...


def as_array(value: object, *, where: str) -> npt.NDArray[np.generic]:
    """A NumPy array, also of a torch tensor, which is found by its methods: this module must not import torch."""
    if isinstance(value, np.ma.MaskedArray):
        raise ArgumentError("a masked array; a store has no mask", where=where, remedy="Call `.filled(…)` first.")
    detach = getattr(value, "detach", None)
    try:
        if not callable(detach):
            return np.asarray(value)
        tensor = cast("_Tensor", detach()).resolve_neg()  # negative views, such as the imaginary part of a conjugate
        if str(tensor.dtype) == "torch.bfloat16":  # NumPy takes its bits only
            bits = np.asarray(tensor.cpu().view(sys.modules["torch"].int16).numpy())
            return bits.view(numpy_dtype("bfloat16"))
        return np.asarray(tensor.cpu().numpy())
    except (TypeError, ValueError, RuntimeError, NotImplementedError, AttributeError) as error:
        raise ArgumentError(
            f"{kind_of(value)} that does not become a NumPy array: {error}",
            where=where,
            remedy="Pass a dense tensor, or a NumPy array.",
        ) from error


def stacked_layers(acts: Mapping[object, object], layout: Layout) -> npt.NDArray[np.generic]:
    """One array (k, layers, tokens, d_model) of arrays for single layers, in the order of the layer axis.

    Args:
        acts: Name of each entry of the layer axis to (k, tokens, d_model), or (tokens, d_model) for one example. An entry is
            named by its label, by the pair (label, hook point), or by TransformerLens's name, such as
            "blocks.5.hook_resid_post"; by its label alone only where that has one hook point.
        layout: The geometry of the store.

    Raises:
        ArgumentError: a name is not one of the store's layers, or another name of one that was given; a layer is missing; the
            arrays have several shapes or dtypes, or do not fit.
    """
    found: dict[int, npt.NDArray[np.generic]] = {}
    positions = _layer_positions(layout)
    for name, value in acts.items():
        position = None if isinstance(name, BOOLEANS) else positions.get(name)
        if position is None or position in found:
            raise ArgumentError(
                f"{brief(name)} is not one of the layers {list(layout.layer_keys)} of the store, or one that has come already",
                where="acts",
                remedy='Name layers 5, (5, "resid_post") or "blocks.5.hook_resid_post", and leave other hook points out.',
            )
        found[position] = as_array(value, where=f"acts[{name!r}]")
    kinds = {(array.shape, array.dtype.name) for array in found.values()}
    if len(found) < layout.n_layers or len(kinds) > 1 or any(len(shape) not in {2, 3} for shape, _ in kinds):
        raise ArgumentError(
            f"{len(found)} layers of shapes and dtypes {sorted(kinds)}; there must be all {layout.n_layers}, of one shape and dtype: "
            f"(k, {layout.tokens_per_example}, {layout.d_model}), or one example without the first axis",
            where="acts",
        )
    return np.stack([found[position] for position in range(layout.n_layers)], axis=-3)


def _layer_positions(layout: Layout) -> dict[object, int]:
    """Every name of each entry of the layer axis, and its position."""
    hook_points = layout.hook_points or (RESID_POST,) * layout.n_layers
    positions: dict[object, int] = {}
    short: dict[object, int] = {}
    for position, (label, hook_point) in enumerate(zip(layout.layers, hook_points, strict=True)):
        positions |= {(label, hook_point): position, f"blocks.{label}.{hook_point}": position}
        short[transformer_lens_name((label, hook_point))] = position
        if layout.layers.count(label) == 1:
            short[label] = position
    return short | positions
