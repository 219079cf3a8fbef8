"""Mergeable moments of vectors, for each layer and token.

Mean and squared deviations are computed in two passes over small blocks, in float64, and merged pairwise (Chan, Golub and
LeVeque). A large offset or a long store therefore loses no digits. Memory: one block.
"""

from __future__ import annotations

from dataclasses import dataclass, fields, replace
from functools import reduce
from typing import TypeAlias

import numpy as np
import numpy.typing as npt

from saev_store.core.dtypes import LARGEST, SMALLEST_NORMAL

Floats: TypeAlias = npt.NDArray[np.float64]
Counts: TypeAlias = npt.NDArray[np.int64]

#: A piece and its copy in float64 fit into a core's cache; smaller pieces cost more merging.
_PIECE_BYTES = 1 << 20


@dataclass(frozen=True)
class Moments:
    """Moments of a set of vectors: arrays of shape (layer, token).

    Attributes:
        n_values: Count of numbers.
        n_finite: Count of finite numbers.
        mean: Mean of the finite numbers, 0 where there are none.
        m2: Sum of squared deviations of the finite numbers from `mean`.
        low: Smallest finite number, +inf where there are none.
        high: Largest finite number, -inf where there are none.
        n_zeros: Count of zeros.
        n_saturated: Count of numbers whose magnitude is the largest finite number of the stored dtype.
        n_subnormal: Count of numbers that are subnormal in the stored dtype: not zero, and smaller in magnitude than its
            smallest normal number.
        n_vectors: Count of vectors whose numbers are all finite.
        mean_norm: Mean L2 norm of these vectors, 0 where there are none.
    """

    n_values: Counts
    n_finite: Counts
    mean: Floats
    m2: Floats
    low: Floats
    high: Floats
    n_zeros: Counts
    n_saturated: Counts
    n_subnormal: Counts
    n_vectors: Counts
    mean_norm: Floats

    @classmethod
    def empty(cls, shape: tuple[int, ...]) -> Moments:
        """The moments of no vectors."""
        n_values, n_finite, n_zeros, n_saturated, n_subnormal, n_vectors = np.zeros((6, *shape), np.int64)
        mean, m2, mean_norm = np.zeros((3, *shape))
        low, high = np.full(shape, np.inf), np.full(shape, -np.inf)
        near_limits = (n_zeros, n_saturated, n_subnormal)
        return cls(n_values, n_finite, mean, m2, low, high, *near_limits, n_vectors, mean_norm)

    def at(self, where: object) -> Moments:
        """The moments of some layers and tokens, as views."""
        return Moments(**{field.name: getattr(self, field.name)[where] for field in fields(self)})

    def put(self, where: object, part: Moments) -> None:
        """Replace the moments of some layers and tokens, in place."""
        for field in fields(self):
            getattr(self, field.name)[where] = getattr(part, field.name)

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
        n_saturated=a.n_saturated + b.n_saturated,
        n_subnormal=a.n_subnormal + b.n_subnormal,
        n_vectors=a.n_vectors + b.n_vectors,
        mean_norm=mean_norm,
    )


def _merged_mean(n_a: Counts, n_b: Counts, mean_a: Floats, mean_b: Floats, m2: Floats) -> tuple[Floats, Floats]:
    share = n_b / np.maximum(n_a + n_b, 1)
    delta = mean_b - mean_a
    return mean_a + delta * share, m2 + delta * delta * (n_a * share)


def moments_of(
    block: npt.NDArray[np.float32], stored_dtype: str = "float32", kept: npt.NDArray[np.bool_] | None = None
) -> Moments:
    """The moments of a block of vectors, float32 (example, layer, token, d_model).

    Args:
        block: The vectors.
        stored_dtype: What they were before they were widened; whether a number is saturated or subnormal is about that dtype.
        kept: Which tokens count, bool (example, token), such as those that are not padding; None for all.

    >>> found = moments_of(np.array([[[[3.0, 4.0]]], [[[0.0, np.nan]]]], np.float32))
    >>> found.n_finite.item(), found.n_zeros.item(), round(found.mean.item(), 3), found.mean_norm.item()
    (3, 1, 2.333, 5.0)
    """
    n_examples, n_layers, n_tokens, d_model = block.shape
    found = Moments.empty((n_layers, n_tokens))
    tokens = max(1, min(n_tokens, _PIECE_BYTES // (4 * d_model)))
    examples = max(1, _PIECE_BYTES // (4 * d_model * tokens))
    for layer in range(n_layers):
        for first in range(0, n_tokens, tokens):
            where = (layer, slice(first, first + tokens))
            places = (slice(at, at + examples) for at in range(0, n_examples, examples))
            parts = (
                _piece(block[place, *where], stored_dtype, None if kept is None else kept[place, where[1]])
                for place in places
            )
            found.put(where, reduce(merge, parts, found.at(where)))
    return found


def _piece(piece: npt.NDArray[np.float32], stored_dtype: str, kept: npt.NDArray[np.bool_] | None) -> Moments:
    """The moments of a piece (example, token, d_model), in two passes; the second finds it in the cache."""
    n_examples, _, d_model = piece.shape
    per_token = n_examples * d_model
    with np.errstate(invalid="ignore"):  # raised by signalling NaNs, and by inf - inf
        values = piece.astype(np.float64)
        sums = values.sum(axis=2)
    has_gaps = not np.isfinite(sums).all()  # adding float32 numbers cannot overflow float64
    if has_gaps or (kept is not None and not kept.all()):
        return _piece_with_gaps(piece, values, stored_dtype, kept)
    norms: Floats = np.sqrt(np.vecdot(values, values))
    mean = sums.sum(axis=0) / per_token
    values -= mean[:, np.newaxis]
    counts = _equal_counts(per_token, like=norms)
    return Moments(
        n_values=counts,
        n_finite=counts,
        mean=mean,
        m2=np.vecdot(values, values).sum(axis=0),
        low=piece.min(axis=(0, 2)).astype(np.float64),
        high=piece.max(axis=(0, 2)).astype(np.float64),
        **_near_limits(piece, stored_dtype),
        n_vectors=_equal_counts(n_examples, like=norms),
        mean_norm=norms.mean(axis=0),
    )


def _equal_counts(count: int, *, like: Floats) -> Counts:
    """The same count for each token of `like`, (example, token)."""
    return np.repeat(np.int64(count), like.shape[1])


def _near_limits(piece: npt.NDArray[np.float32], stored_dtype: str) -> dict[str, Counts]:
    """Counts of zero, saturated and subnormal numbers, for each token.

    The bits are compared, without the sign: that is exact and quiet also for NaN, and where a thread treats subnormal numbers
    as zeros.
    """
    magnitude = piece.view(np.uint32) & np.uint32(0x7FFFFFFF)
    largest, normal = (np.float32(limit[stored_dtype]).view(np.uint32) for limit in (LARGEST, SMALLEST_NORMAL))
    none = np.zeros(piece.shape[1], np.int64)

    def count(chosen: npt.NDArray[np.bool_]) -> Counts:
        found: Counts = chosen.sum(axis=(0, 2)) if chosen.any() else none
        return found

    n_small = count(magnitude < normal)
    n_zeros = count(magnitude == 0) if n_small.any() else none
    return {"n_zeros": n_zeros, "n_saturated": count(magnitude == largest), "n_subnormal": n_small - n_zeros}


def _piece_with_gaps(
    piece: npt.NDArray[np.float32], values: Floats, stored_dtype: str, kept: npt.NDArray[np.bool_] | None
) -> Moments:
    """The moments of a piece in which some numbers are NaN or infinite, or some vectors do not count."""
    counts = np.ones((*piece.shape[:2], 1), np.bool_) if kept is None else kept[:, :, np.newaxis]
    finite = np.isfinite(piece) & counts
    n_finite: Counts = finite.sum(axis=(0, 2))
    values[~finite] = 0.0
    whole = finite.all(axis=2)
    norms: Floats = np.sqrt(np.vecdot(values, values)) * whole
    n_vectors: Counts = whole.sum(axis=0)
    mean = values.sum(axis=(0, 2)) / np.maximum(n_finite, 1)
    deviations = (values - mean[:, np.newaxis]) * finite
    return Moments(
        n_values=counts.sum(axis=(0, 2)) * piece.shape[2],
        n_finite=n_finite,
        mean=mean,
        m2=np.vecdot(deviations, deviations).sum(axis=0),
        low=piece.min(axis=(0, 2), where=finite, initial=np.inf).astype(np.float64),
        high=piece.max(axis=(0, 2), where=finite, initial=-np.inf).astype(np.float64),
        **_near_limits(np.where(counts, piece, np.float32(1)), stored_dtype),
        n_vectors=n_vectors,
        mean_norm=norms.sum(axis=0) / np.maximum(n_vectors, 1),
    )


def of_none_as_nan(moments: Moments) -> Moments:
    """The same with NaN for every statistic of an empty set."""
    none, no_vector = moments.n_finite == 0, moments.n_vectors == 0
    return replace(
        moments,
        mean=np.where(none, np.nan, moments.mean),
        m2=np.where(none, np.nan, moments.m2),
        low=np.where(none, np.nan, moments.low),
        high=np.where(none, np.nan, moments.high),
        mean_norm=np.where(no_vector, np.nan, moments.mean_norm),
    )
