"""How well batches were mixed, measured."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
import numpy.typing as npt

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


@dataclass(frozen=True, slots=True)
class BatchEntropy:
    """How evenly a batch is spread over examples, or over tokens.

    Attributes:
        nats: Entropy of the batch's distribution, natural logarithm.
        normalized: That, as a share of the entropy of a uniform distribution over everything there is.
        coverage: Different ones in the batch, as a share of everything there is.
    """

    nats: float
    normalized: float
    coverage: float


def batch_entropy(indices: npt.ArrayLike, n: int) -> BatchEntropy:
    """The entropy of one batch: of its `example_idx` with all examples, or of its `token_idx` with all content tokens.

    Args:
        indices: Of the rows of the batch, integers from 0 to `n - 1`.
        n: How many there are.

    Raises:
        ArgumentError: the batch is empty, or `n` is below 1.

    >>> batch_entropy([0, 0, 1, 1], n=4)
    BatchEntropy(nats=0.6931471805599453, normalized=0.5, coverage=0.5)
    """
    found = np.asarray(indices).reshape(-1)
    if not len(found) or n < 1:
        raise ArgumentError(f"{len(found)} rows out of {n}: there must be at least one of each", where="indices, n")
    distinct, _, bits = _measures(found)
    nats = bits * math.log(2)
    return BatchEntropy(nats, nats / math.log(n) if n > 1 else 1.0, distinct / n)


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
    found, drawn = list[tuple[float, float, float]](), list[float]()
    for number in numbers.tolist():
        found.append(_measures(loader.examples_of(number)))
        drawn.append(_measures(rng.integers(0, loader.n_examples, loader.batch_size))[2])
    distinct, effective, entropy = (float(value) for value in np.mean(found, axis=0))
    expected = loader.explain().mixing
    if expected is None:  # pragma: no cover - for the type checker: explain() of a shuffled loader has it
        raise ArgumentError("the loader does not shuffle", where="loader")
    return ShuffleQuality(
        len(numbers), distinct, effective, entropy, entropy / max(float(np.mean(drawn)), 1e-12), expected
    )


def _measures(examples: np.ndarray) -> tuple[float, float, float]:
    """Distinct examples, inverse Simpson index and entropy in bits of the rows of a batch."""
    share = np.unique(examples, return_counts=True)[1] / len(examples)
    return float(len(share)), float(1 / (share**2).sum()), float(-(share * np.log2(share)).sum())
