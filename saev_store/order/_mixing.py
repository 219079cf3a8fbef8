"""How well a batch is mixed, before anything is read."""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np

from saev_store.order._partition import Partition
from saev_store.order._shuffle import ShuffledOrder

#: Batches, spread over the middle half of the epoch, that are looked at.
_N_BATCHES = 16


@dataclass(frozen=True, slots=True)
class Mixing:
    """What a batch in the middle of an epoch is made of.

    Attributes:
        batch_size: Rows of the batch.
        window_examples: Examples that have rows in the window (E).
        distinct_examples: Expected number of different examples in the batch.
        independent_draws: `E * (1 - exp(-B / E))`: what B independent draws from the window would give; the schedule of
            the window does a little better, because no block may hand out more than its share.
        full_shuffle: What a permutation of all rows would give.
    """

    batch_size: int
    window_examples: float
    distinct_examples: float
    independent_draws: float
    full_shuffle: float

    def variance_inflation(self, correlation: float) -> float:
        """How much larger the variance of a batch mean is than with independent rows.

        Args:
            correlation: Between two rows of one example, from 0 to 1.
        """
        return 1 + (self.batch_size - 1) * correlation / max(self.distinct_examples, 1.0)


def predict_mixing(order: ShuffledOrder, batch_size: int, n_partitions: int | None = None) -> Mixing:
    """The expected mixing of a batch that takes `batch_size` rows from `n_partitions` of the partitions; default: all.

    >>> from saev_store.core.layout import Layout
    >>> from saev_store.core.rows import row_space
    >>> from saev_store.order import Blocks
    >>> rows = row_space(Layout(1_281_167, (11,), 196, True, 768, 4000), tokens="content")
    >>> order = ShuffledOrder(Blocks(rows), 17, 0, n_partitions=8, window_blocks=446, rows_per_tick=2048)
    >>> mixing = predict_mixing(order, 16_384)
    >>> round(mixing.distinct_examples), round(mixing.full_shuffle)
    (3570, 16280)
    """
    n_partitions = n_partitions or order.n_partitions
    part = Partition(order, order.n_partitions // 2)
    n_examples = order.blocks.space.n_examples
    n_layers = order.blocks.n_layers
    if part.n_rows == 0:
        return Mixing(batch_size, 0.0, 0.0, 0.0, 0.0)
    blocks, there = _blocks_met(part, min(-(-batch_size // n_partitions), part.n_rows))
    # A layer's block and another layer's block may stand for the same example.
    of_all = min(blocks * n_partitions / (n_examples * n_layers), 1.0)
    distinct = n_examples * (1 - (1 - of_all) ** n_layers)
    window = min(there * n_partitions, float(n_examples))
    rows_per_example = order.n_rows / n_examples
    full = n_examples * -math.expm1(-batch_size * _slope(rows_per_example, order.n_rows))
    independent = window * -math.expm1(-batch_size / window)
    return Mixing(batch_size, window, distinct, independent, full)


def _slope(rows_per_example: float, n_rows: int) -> float:
    """-log of the chance that one drawn row is not of a given example."""
    share = min(rows_per_example / n_rows, 1.0)
    return -math.log1p(-share) if share < 1 else math.inf


def _blocks_met(part: Partition, batch: int) -> tuple[float, float]:
    """Examples' worth of blocks met by `batch` consecutive rows of a partition, and of those in the window, on average."""
    group, size = part.order.blocks.examples_per_block, max(1, round(part.n_rows / part.n_blocks))
    starts = (np.linspace(0.25, 0.75, _N_BATCHES) * max(part.n_rows / batch - 1, 0)).astype(np.int64) * batch
    n_met = n_there = 0.0
    for start in starts.tolist():
        stop = min(start + batch, part.n_rows)
        first, last = part.tick_of(start), part.tick_of(stop - 1)
        bounds = np.array([part.emitted_before(tick) for tick in range(first, last + 2)])
        # Of the rows of each tick, how many are in the batch.
        share = (np.minimum(bounds[1:], stop) - np.maximum(bounds[:-1], start)) / np.maximum(np.diff(bounds), 1)
        share = np.clip(share, 0, 1 - 1e-12)
        n_blocks = np.diff([part.first_block(cohort) for cohort in range(first, part.entered(last) + 1)])
        enters, life = part.lives(np.arange(first, part.entered(last)))
        life, age = life[:, None], np.arange(first, last + 1) - enters[:, None]  # (cohorts, ticks)
        handed_out = np.where((age >= 0) & (age < life), (age + 1) * size // life - age * size // life, 0)
        met = -np.expm1(handed_out @ np.log1p(-share / group))
        n_met += float(met @ n_blocks) * group
        n_there += (part.first_block(part.entered(first)) - part.first_block(first)) * group
    return n_met / len(starts), n_there / len(starts)
