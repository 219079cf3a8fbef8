"""Mergeable moments of vectors, for each layer and token.

Mean and squared deviations are computed in two passes over small blocks, in float64, and merged pairwise (Chan, Golub and
LeVeque). A large offset or a long store therefore loses no digits. Memory: one block.
"""

from __future__ import annotations

from functools import reduce
from typing import NamedTuple, TypeAlias

import numpy as np
import numpy.typing as npt

Floats: TypeAlias = npt.NDArray[np.float64]
Counts: TypeAlias = npt.NDArray[np.int64]

#: A piece and its copy in float64 fit into a core's cache; smaller pieces cost more merging.
_PIECE_BYTES = 1 << 20


class Moments(NamedTuple):
    """Moments of a set of vectors: arrays of shape (layer, token).

    `mean`, `m2` (the sum of squared deviations from it), `low` and `high` are of the finite numbers, `mean_norm` is of the
    `n_vectors` vectors whose numbers are all finite. Of an empty set they are 0, `low` is +inf and `high` -inf.
    """

    n_values: Counts
    n_finite: Counts
    mean: Floats
    m2: Floats
    low: Floats
    high: Floats
    n_zeros: Counts
    n_vectors: Counts
    mean_norm: Floats

    @classmethod
    def empty(cls, shape: tuple[int, ...]) -> Moments:
        """The moments of no vectors."""
        n_values, n_finite, n_zeros, n_vectors = np.zeros((4, *shape), np.int64)
        mean, m2, mean_norm = np.zeros((3, *shape))
        low, high = np.full(shape, np.inf), np.full(shape, -np.inf)
        return cls(n_values, n_finite, mean, m2, low, high, n_zeros, n_vectors, mean_norm)

    def at(self, where: object) -> Moments:
        """The moments of some layers and tokens, as views."""
        return Moments(*(array[where] for array in self))  # pyright: ignore[reportArgumentType, reportCallIssue]

    def put(self, where: object, part: Moments) -> None:
        """Replace the moments of some layers and tokens, in place."""
        for mine, other in zip(self, part, strict=True):
            mine[where] = other  # pyright: ignore[reportArgumentType, reportCallIssue]

    def over(self, axis: int) -> Moments:
        """The moments merged over one axis."""
        n = self.n_values.shape[axis]
        return reduce(merge, (self.at((slice(None),) * axis + (place,)) for place in range(n)))


def merge(a: Moments, b: Moments) -> Moments:
    """The moments of both sets together."""
    mean, m2 = _merged_mean(a.n_finite, b.n_finite, a.mean, b.mean, a.m2 + b.m2)
    mean_norm, _ = _merged_mean(a.n_vectors, b.n_vectors, a.mean_norm, b.mean_norm, a.mean_norm)
    return Moments(
        n_values=a.n_values + b.n_values,
        n_finite=a.n_finite + b.n_finite,
        mean=mean,
        m2=m2,
        low=np.minimum(a.low, b.low),
        high=np.maximum(a.high, b.high),
        n_zeros=a.n_zeros + b.n_zeros,
        n_vectors=a.n_vectors + b.n_vectors,
        mean_norm=mean_norm,
    )


def _merged_mean(n_a: Counts, n_b: Counts, mean_a: Floats, mean_b: Floats, m2: Floats) -> tuple[Floats, Floats]:
    share = n_b / np.maximum(n_a + n_b, 1)
    delta = mean_b - mean_a
    return mean_a + delta * share, m2 + delta * delta * (n_a * share)


def moments_of(block: npt.NDArray[np.float32], kept: npt.NDArray[np.bool_] | None = None) -> Moments:
    """The moments of a block (example, layer, token, d_model), of the tokens (example, token) that are `kept`; None: of all."""
    n_examples, n_layers, n_tokens, d_model = block.shape
    found = Moments.empty((n_layers, n_tokens))
    kept = np.ones((n_examples, n_tokens), np.bool_) if kept is None else kept
    tokens = max(1, min(n_tokens, _PIECE_BYTES // (4 * d_model)))
    examples = max(1, _PIECE_BYTES // (4 * d_model * tokens))
    for layer in range(n_layers):
        for first in range(0, n_tokens, tokens):
            where = (layer, slice(first, first + tokens))
            places = (slice(at, at + examples) for at in range(0, n_examples, examples))
            parts = (_piece(block[place, *where], kept[place, where[1]]) for place in places)
            found.put(where, reduce(merge, parts, found.at(where)))
    return found


def _piece(piece: npt.NDArray[np.float32], kept: npt.NDArray[np.bool_]) -> Moments:
    """The moments of a piece (example, token, d_model), in two passes; the second finds it in the cache."""
    counted = kept[:, :, np.newaxis]
    with np.errstate(invalid="ignore"):  # raised by signalling NaNs, and by inf - inf
        values = piece.astype(np.float64)
        sums: Floats = values.sum(axis=2)
    finite, zeros = (
        np.isfinite(sums)[:, :, np.newaxis] & counted,
        piece == 0,
    )  # adding float32 does not overflow float64
    where = True
    if not finite.all():
        where = finite = np.isfinite(piece) & counted
        values[~finite] = 0.0
        sums, zeros = values.sum(axis=2), zeros & counted
    n_finite: Counts = finite.sum(axis=(0, 2)) * (piece.shape[2] // finite.shape[2])
    whole = finite.all(axis=2)
    n_vectors: Counts = whole.sum(axis=0)
    norms: Floats = np.sqrt(np.vecdot(values, values)) * whole
    mean = sums.sum(axis=0) / np.maximum(n_finite, 1)
    values -= mean[:, np.newaxis]
    if where is not True:
        values *= where
    return Moments(
        n_values=kept.sum(axis=0) * piece.shape[2],
        n_finite=n_finite,
        mean=mean,
        m2=np.vecdot(values, values).sum(axis=0),
        low=piece.min(axis=(0, 2), where=where, initial=np.inf).astype(np.float64),
        high=piece.max(axis=(0, 2), where=where, initial=-np.inf).astype(np.float64),
        n_zeros=zeros.sum(axis=(0, 2)) if zeros.any() else np.zeros_like(n_finite),
        n_vectors=n_vectors,
        mean_norm=norms.sum(axis=0) / np.maximum(n_vectors, 1),
    )
