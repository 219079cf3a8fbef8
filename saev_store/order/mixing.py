"""Mixing of a batch, predicted before anything is read."""

from __future__ import annotations

import math
from typing import NamedTuple

from saev_store.order.pools import Epoch


class Mixing(NamedTuple):
    """Composition of a batch of a full pool.

    Attributes:
        pool_examples: Examples that have rows in the pool.
        distinct_examples: Expected number of different examples in a batch of one rank.
        full_shuffle: The same for a permutation of all rows.
    """

    pool_examples: float
    distinct_examples: float
    full_shuffle: float


def predict_mixing(epoch: Epoch) -> Mixing:
    """Return the expected mixing of a batch of a full pool.

    >>> from saev_store.core.layout import Layout
    >>> from saev_store.core.rows import row_space
    >>> from saev_store.order import Cut
    >>> rows = row_space(Layout(1_281_167, (11,), 196, True, 768, 4000), tokens="content")
    >>> cut = Cut(len(rows), 16_384, 1, False, n_partitions=8, pool_batches=42, early_start=True)
    >>> mixing = predict_mixing(Epoch(rows, cut, 17, 0))
    >>> round(mixing.distinct_examples), round(mixing.full_shuffle)
    (3480, 16280)
    """
    cut, space, rows = epoch.cut, epoch.space, epoch.cut.n_rows
    if not rows:
        return Mixing(0.0, 0.0, 0.0)
    in_pool = min(cut.pool_batches * cut.batch_size, rows)
    n_blocks = in_pool / rows * epoch.n_blocks
    met = n_blocks * _met(rows / epoch.n_blocks, cut.batch_size / in_pool)
    # Blocks of other layers may be of the same example.
    of_all = min(met / epoch.n_blocks, 1.0)
    distinct = space.n_examples * (1 - (1 - of_all) ** space.rows_per_token)
    full = space.n_examples * _met(rows / space.n_examples, cut.batch_size / rows)
    return Mixing(min(n_blocks, float(space.n_examples)), distinct, full)


def _met(size: float, share: float) -> float:
    """Return the probability that one of `size` rows is in a share of the rows drawn without replacement."""
    return -math.expm1(size * math.log1p(-share)) if share < 1 else 1.0
