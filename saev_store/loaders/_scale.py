"""The factor that brings the mean L2 norm of vectors to sqrt(d_model)."""

from __future__ import annotations

import math

import numpy as np

from saev_store.core.rows import Layers, Tokens
from saev_store.errors import ArgumentError
from saev_store.order import shuffled
from saev_store.stats import sampled_stats
from saev_store.store.selection import Selection
from saev_store.store.store import ShardStore

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


def norm_scale(rows: Selection) -> float:
    """`sqrt(d_model)` over the mean norm of a fixed, seeded sample of the rows: the same in every process.

    Raises:
        ArgumentError: the sample's mean norm is zero or not finite.
    """
    n, length = len(rows), min(_N_ROWS // _N_RUNS, max(len(rows), 1))
    n_places = -(-n // length)
    # The first places of a permutation of at most a million: no table grows with the data.
    stride = max(1, n_places // (1 << 20))
    places = shuffled(0x5A4E, min(n_places, 1 << 20))[:_N_RUNS] * stride
    picked = (np.sort(places)[:, None] * length + np.arange(length)).reshape(-1)
    picked = picked[picked < n]
    norms = np.linalg.norm(rows.rows(picked).astype(np.float64), axis=1) if len(picked) else np.zeros(1)
    mean = float(norms.mean())
    if not (math.isfinite(mean) and mean > 0):
        raise ArgumentError(f"the mean norm of {len(picked)} sampled rows is {mean}", where="scale_norm")
    return math.sqrt(rows.shape[1]) / mean
