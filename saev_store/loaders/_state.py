"""What a loader's state says, checked before anything of it is believed."""

from __future__ import annotations

import hashlib
import math
from collections.abc import Mapping

import numpy as np

from saev_store.core.indexing import Progression
from saev_store.core.rows import RowSpace
from saev_store.errors import ArgumentError

STATE_VERSION = 1


def checked(
    state: Mapping[str, object], identity: Mapping[str, object], *, n_batches: int, scales: bool
) -> tuple[int, int, float | None]:
    """(epoch, batch, scale) of a state.

    Args:
        state: What somebody saved.
        identity: What has to be equal for it to make sense.
        n_batches: Batches of an epoch.
        scales: Whether the loader scales activations.

    Raises:
        ArgumentError: it belongs to another loader, or no loader wrote it; the message says what is wrong.
    """
    if not isinstance(state, Mapping):
        raise ArgumentError(f"the state is a {type(state).__name__}; it must be what state_dict() gave", where="state")
    for name, mine in identity.items():
        if state.get(name) != mine:
            raise ArgumentError(
                f"the state was saved with {name} = {state.get(name)!r}, but this loader has {mine!r}",
                where="load_state_dict",
                remedy="Make the loader with the same rows and options.",
            )
    epoch, batch = whole_number(state, "epoch", 0), whole_number(state, "batch", 0, n_batches)
    scale = state.get("scale")
    if scale is None and not scales:
        return epoch, batch, None
    if scales and type(scale) is float and 0 < scale < math.inf:
        return epoch, batch, scale
    raise ArgumentError(
        f"the state has scale = {scale!r}, but this loader {'scales' if scales else 'does not scale'}",
        where="load_state_dict",
        remedy="Make the loader with the same scale_norm.",
    )


def whole_number(state: Mapping[str, object], name: str, low: int, high: int = 2**63 - 1) -> int:
    """An integer out of a state, checked.

    Raises:
        ArgumentError: it is missing, no integer, or out of range.
    """
    value = state.get(name)
    if type(value) is not int or not low <= value <= high:
        raise ArgumentError(
            f"the state has {name} = {value!r}, which this loader never writes", where="load_state_dict"
        )
    return value


def fingerprint(space: RowSpace) -> str:
    """16 hex digits that tell row spaces apart: what was chosen of what, and what was left out.

    Not where it lies, nor beside which other layers and tokens, nor how it is cut into shards: a staged copy continues a
    state.
    """
    layout = space.layout
    layers = tuple(layout.layers[position] for position in space.layer_idx)
    tokens = (space.tokens.start - layout.n_special_tokens, space.tokens.count)
    digest = hashlib.sha256(repr((layout.n_examples, layout.d_model, layers, tokens, len(space))).encode())
    if isinstance(space.examples, Progression):
        digest.update(repr(space.examples).encode())
    else:
        digest.update(np.ascontiguousarray(space.examples, dtype="<i8").tobytes())
    if space.kept is not None:
        digest.update(space.kept.tobytes())
    return digest.hexdigest()[:16]
