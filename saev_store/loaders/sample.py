"""A fixed sample of rows."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import numpy.typing as npt

from saev_store.order import Permutation
from saev_store.store.selection import Selection

Floats = npt.NDArray[np.float64]
#: Rows whose norms are averaged: the standard error of the mean is then a hundredth of the norms' spread.
_N_ROWS = 8192
#: They are taken from this many places, in runs, so that few requests bring them.
_N_RUNS = 64
_SEED = 0x5A4E


def sampled_rows(rows: Selection) -> Floats:
    """Return the vectors of a fixed, seeded sample of at most 8,192 rows, fresh float64: the same rows in every process."""
    n, length = len(rows), min(_N_ROWS // _N_RUNS, max(len(rows), 1))
    n_places = -(-n // length)
    places = Permutation(max(n_places, 1), _SEED).at(np.arange(min(n_places, _N_RUNS)))
    picked = (np.sort(places)[:, None] * length + np.arange(length)).reshape(-1)
    return rows.rows(picked[picked < n]).astype(np.float64)


def samples_by_layer(rows: Selection) -> list[Floats]:
    """Return `sampled_rows` of each chosen layer by itself."""
    space = rows.space
    parts = [replace(space, layer_idx=(layer,), stacks_layers=False) for layer in space.layer_idx]
    return [sampled_rows(Selection(rows.reader, part)) for part in parts]
