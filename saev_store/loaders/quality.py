"""How well batches were mixed, measured."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from saev_store.errors import ArgumentError
from saev_store.order import Mixing

if TYPE_CHECKING:
    from saev_store.loaders.shuffled import ShuffledLoader


@dataclass(frozen=True, slots=True)
class ShuffleQuality:
    """What batches were made of; means over the batches looked at.

    Attributes:
        n_batches: How many were looked at.
        distinct_examples: Different examples in a batch.
        effective_examples: As many equally frequent examples would be as mixed (inverse Simpson index).
        entropy_bits: Entropy of the batch's distribution over examples.
        entropy_share: That, as a share of what as many uniform draws from all examples give.
        expected: What was predicted before reading.
    """

    n_batches: int
    distinct_examples: float
    effective_examples: float
    entropy_bits: float
    entropy_share: float
    expected: Mixing


def shuffle_quality(loader: ShuffledLoader, *, n_batches: int = 10) -> ShuffleQuality:
    """The mixing of the batches that `loader` will hand out in the middle of its epoch. Reads no activations.

    Args:
        loader: What is judged.
        n_batches: How many batches are looked at, evenly spread over the middle half of the epoch.

    Raises:
        ArgumentError: the epoch has no full batch.
    """
    n_full = loader.n_samples // (loader.batch_size * loader.world)
    if n_full < 1 or n_batches < 1:
        raise ArgumentError(
            f"{n_batches} batches out of {n_full} full ones: there must be at least one of each", where="n_batches"
        )
    numbers = np.unique(np.linspace(n_full // 4, max(n_full - 1 - n_full // 4, n_full // 4), n_batches).astype(int))
    rng = np.random.default_rng(0)
    found, drawn = [], []
    for number in numbers.tolist():
        found.append(_measures(loader.examples_of(number)))
        drawn.append(_measures(rng.integers(0, loader.n_examples, loader.batch_size))[2])
    distinct, effective, entropy = (float(value) for value in np.mean(found, axis=0))
    expected = loader.explain().mixing
    if expected is None:  # pragma: no cover - shuffled loaders always say
        raise ArgumentError("the loader does not shuffle", where="loader")
    return ShuffleQuality(
        len(numbers), distinct, effective, entropy, entropy / max(float(np.mean(drawn)), 1e-12), expected
    )


def _measures(examples: np.ndarray) -> tuple[float, float, float]:
    share = np.unique(examples, return_counts=True)[1] / len(examples)
    return float(len(share)), float(1 / (share**2).sum()), float(-(share * np.log2(share)).sum())
