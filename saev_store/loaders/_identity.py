"""What a loader's state says, checked before use, and the factor that is a part of it."""

# pyright: reportUnnecessaryIsInstance=false

from __future__ import annotations

import contextlib
import hashlib
import json
import math
from collections.abc import Mapping
from typing import TYPE_CHECKING

import numpy as np
import numpy.typing as npt

from saev_store.core.indexing import Progression
from saev_store.core.rows import Layers, Tokens
from saev_store.errors import ArgumentError, brief, kind_of
from saev_store.loaders.options import is_factor
from saev_store.order import shuffled
from saev_store.stats import sampled_stats
from saev_store.store.selection import Selection
from saev_store.store.store import ShardStore

if TYPE_CHECKING:
    from saev_store.documents import Metadata

STATE_VERSION = 1

Floats = npt.NDArray[np.float64]


def checked(
    state: Mapping[str, object], identity: Mapping[str, object], *, n_batches: int, scales: bool
) -> tuple[int, int, float | None]:
    """(epoch, batch, scale) of a state.

    Args:
        state: The saved state.
        identity: What has to be equal for it to make sense.
        n_batches: Batches of an epoch.
        scales: Whether the loader scales activations.

    Raises:
        ArgumentError: it belongs to another loader, or no loader wrote it; the message says what is wrong.
    """
    if not isinstance(state, Mapping):
        raise ArgumentError(f"the state is {kind_of(state)}; it must be what state_dict() gave", where="state")
    for name, mine in identity.items():
        if not same_value(state.get(name), mine):
            raise ArgumentError(
                f"the state was saved with {name} = {brief(state.get(name))}, but this loader has {mine!r}",
                where="load_state_dict",
                remedy="Make the loader with the same rows and options.",
            )
    epoch, batch = whole_number(state, "epoch", 0), whole_number(state, "batch", 0, n_batches)
    scale = state.get("scale")
    if scale is None and not scales:
        return epoch, batch, None
    if scales and type(scale) is float and is_factor(scale):
        return epoch, batch, scale
    raise ArgumentError(
        f"the state has scale = {brief(scale)}, but this loader {'scales' if scales else 'does not scale'}",
        where="load_state_dict",
        remedy="Make the loader with the same scale_norm.",
    )


def same_value(found: object, mine: object) -> bool:
    """Whether a value of a state is of the same type and equal: arrays, which are not equal or different as a whole, never are."""
    return type(found) is type(mine) and found == mine


def whole_number(state: Mapping[str, object], name: str, low: int, high: int = 2**63 - 1) -> int:
    """An integer out of a state, checked.

    Raises:
        ArgumentError: it is missing, no integer, or out of range.
    """
    value = state.get(name)
    if type(value) is not int or not low <= value <= high:
        raise ArgumentError(
            f"the state has {name} = {brief(value)}, which this loader never writes", where="load_state_dict"
        )
    return value


def truth(state: Mapping[str, object], name: str, *, default: bool) -> bool:
    """A yes or no out of a state, checked; `default` where the state does not have it.

    Raises:
        ArgumentError: it is neither.
    """
    value = state.get(name, default)
    if not isinstance(value, bool):
        raise ArgumentError(
            f"the state has {name} = {brief(value)}, which this loader never writes", where="load_state_dict"
        )
    return value


def fingerprint(rows: Selection) -> str:
    """16 hex digits that tell rows apart: what was recorded, what was chosen of it, what was left out, and whether layers are stacked.

    Not where it lies, nor beside which other layers and tokens, nor how it is cut into shards: a staged copy continues a
    state.
    """
    space, layout = rows.space, rows.space.layout
    layers = tuple(layout.layer_keys[position] for position in space.layer_idx)
    tokens = (space.tokens.start - layout.n_special_tokens, space.tokens.count)
    digest = hashlib.sha256(repr((layout.n_examples, layout.d_model, layers, tokens, len(space))).encode())
    if isinstance(space.examples, Progression):
        digest.update(repr(space.examples).encode())
    else:
        digest.update(np.ascontiguousarray(space.examples, dtype="<i8").tobytes())
    if space.kept is not None:
        digest.update(space.kept.tobytes())
    digest.update(space.condition)
    if space.stacks_layers:
        digest.update(b"stacked")
    if rows.metadata is not None:
        digest.update(_recorded(rows.metadata))
    return digest.hexdigest()[:16]


def _recorded(metadata: Metadata) -> bytes:
    """Which model and which data were recorded, the same in every version of the protocol."""
    model, data = (metadata.family, metadata.ckpt), metadata.data
    if isinstance(data, str):
        with contextlib.suppress(ValueError, RecursionError):  # protocol 2.1 has the object as text, or any other text
            return json.dumps([*model, json.loads(data)], sort_keys=True, default=repr).encode()
    return json.dumps([*model, data], sort_keys=True, default=repr).encode()


#: Rows whose norms are averaged: the standard error of the mean is then a hundredth of the norms' spread.
_N_ROWS = 8192
#: They are taken from this many places, in runs, so that few requests bring them.
_N_RUNS = 64


#: Examples whose vectors are looked at for `stats.json`: so many bytes' worth of all layers, within bounds.
_SAMPLE_BYTES, _MIN_EXAMPLES, _MAX_EXAMPLES = 128 << 20, 64, 1024


def stored_scale(store: ShardStore, layer: Layers, tokens: Tokens) -> float:
    """`sqrt(d_model)` over the mean norm, by the statistics beside the store; a sample's are made and kept where none are.

    Raises:
        ArgumentError: the mean norm is zero or not finite.
    """
    n = min(max(_SAMPLE_BYTES // store.layout.example_nbytes, _MIN_EXAMPLES), _MAX_EXAMPLES)
    return sampled_stats(store, n).scale(layer, tokens)


def sampled_rows(rows: Selection) -> Floats:
    """The vectors of a fixed, seeded sample of at most 8,192 rows, fresh float64: the same rows in every process."""
    n, length = len(rows), min(_N_ROWS // _N_RUNS, max(len(rows), 1))
    n_places = -(-n // length)
    # The first places of a permutation of at most a million: no table grows with the data.
    stride = max(1, n_places // (1 << 20))
    places = shuffled(0x5A4E, min(n_places, 1 << 20))[:_N_RUNS] * stride
    picked = (np.sort(places)[:, None] * length + np.arange(length)).reshape(-1)
    return rows.rows(picked[picked < n]).astype(np.float64)


def norm_scale(rows: Selection) -> float:
    """`sqrt(d_model)` over the mean norm of the vectors of a fixed, seeded sample of the rows: the same in every process.

    Raises:
        ArgumentError: the sample's mean norm is zero, not finite, or so small that vectors would become infinite.
    """
    sample = sampled_rows(rows)
    mean = float(np.linalg.norm(sample, axis=-1).mean()) if len(sample) else 0.0
    factor = math.sqrt(rows.shape[-1]) / mean if mean > 0 else 0.0
    if not is_factor(factor):
        raise ArgumentError(f"the mean norm of {len(sample)} sampled rows is {mean}", where="scale_norm")
    return factor
