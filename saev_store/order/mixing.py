"""Mixing of a batch, predicted before anything is read."""

from __future__ import annotations

import math
from dataclasses import dataclass

from saev_store.order.pools import Epoch


@dataclass(frozen=True, slots=True)
class Mixing:
    """Composition of a batch of a full pool.

    Attributes:
        batch_size: Rows of the batch, of one rank.
        pool_examples: Examples that have rows in the pool.
        distinct_examples: Expected number of different examples in the batch.
        full_shuffle: The same for a permutation of all rows.
    """

    batch_size: int
    pool_examples: float
    distinct_examples: float
    full_shuffle: float

    def variance_inflation(self, correlation: float) -> float:
        """Return how much larger the variance of a batch mean is than with independent rows.

        Args:
            correlation: Between two rows of one example, from 0 to 1.
        """
        return 1 + (self.batch_size - 1) * correlation / max(self.distinct_examples, 1.0)


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
    cut, blocks = epoch.cut, epoch.blocks
    n_examples, n_layers = blocks.space.n_examples, blocks.n_layers
    batch, rows = cut.batch_size, cut.n_rows
    if not rows:
        return Mixing(batch, 0.0, 0.0, 0.0)
    in_pool = min(cut.pool_batches * batch, rows)
    n_blocks = in_pool / rows * blocks.n_blocks
    met = n_blocks * _met(rows / blocks.n_blocks, batch / in_pool)
    # Blocks of other layers may be of the same example.
    of_all = min(met / (n_examples * n_layers), 1.0)
    distinct = n_examples * (1 - (1 - of_all) ** n_layers)
    full = n_examples * _met(rows / n_examples, batch / rows)
    return Mixing(batch, min(n_blocks, float(n_examples)), distinct, full)


def _met(size: float, share: float) -> float:
    """Return the probability that one of `size` rows is in a share of the rows drawn without replacement."""
    return -math.expm1(size * math.log1p(-share)) if share < 1 else 1.0
