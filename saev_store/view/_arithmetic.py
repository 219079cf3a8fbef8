"""Arithmetic of the page: norms, neighbours, principal components as colours, similarity of representations. NumPy only."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

Floats = npt.NDArray[np.float64]
Singles = npt.NDArray[np.float32]
Ints = npt.NDArray[np.int64]

N_COMPONENTS = 3
#: Of the projected vectors, the share below the darkest and above the brightest colour.
_CLIPPED = 0.01


def norms_of(vectors: Singles) -> Floats:
    """The L2 norms of vectors (n, d_model), in float64; NaN where a vector has a number that is not finite.

    >>> norms_of(np.array([[3, 4], [0, np.inf]], np.float32)).tolist()
    [5.0, nan]
    """
    norms = np.empty(len(vectors), np.float64)
    step = max(1, (1 << 20) // max(1, vectors.shape[1]))
    for first in range(0, len(vectors), step):
        with np.errstate(invalid="ignore"):  # signalling NaNs
            piece = vectors[first : first + step].astype(np.float64)
        norms[first : first + step] = np.sqrt(np.vecdot(piece, piece))
    norms[~np.isfinite(norms)] = np.nan
    return norms


def unit_vectors(vectors: Singles, norms: Floats) -> Singles:
    """The vectors divided by their norms, float32; zeros for vectors of norm 0 or NaN."""
    usable = norms > 0
    units = np.zeros(vectors.shape, np.float32)
    units[usable] = vectors[usable] / norms[usable, np.newaxis]
    return units


def nearest(query: Singles, units: Singles, usable: npt.NDArray[np.bool_], k: int) -> tuple[Ints, Floats]:
    """The `k` vectors with the largest cosine similarity to a query, largest first; of equal ones the first.

    Args:
        query: A unit vector (d_model,).
        units: The vectors to compare with, unit length (n, d_model).
        usable: Which of them may be found, (n,).
        k: How many; fewer are returned where fewer are usable.

    Returns:
        Positions, int64, and cosine similarities.
    """
    similarities = (units @ query).astype(np.float64)
    similarities[~usable] = -np.inf
    found = largest(similarities, min(k, int(usable.sum())))
    return found, similarities[found]


def largest(values: Floats, k: int) -> Ints:
    """Positions of the `k` largest numbers, largest first; of equal ones the first.

    >>> largest(np.array([1.0, 3.0, 2.0, 3.0]), 3).tolist()
    [1, 3, 2]
    """
    if k <= 0:
        return np.empty(0, np.int64)
    some = np.arange(len(values))
    if k < len(values):
        least = np.partition(values, len(values) - k)[len(values) - k]
        some = np.flatnonzero(values >= least)
    return some[np.argsort(-values[some], kind="stable")[:k]].astype(np.int64)


@dataclass(frozen=True, eq=False)
class Components:
    """The first principal components of some vectors.

    Attributes:
        mean: The mean of the vectors, (d_model,).
        axes: Unit vectors, (3, d_model), by falling variance; fewer where the vectors span fewer dimensions.
        variance_share: The share of the variance along each of them.
        low, high: What becomes the darkest and the brightest colour, along each of them.
    """

    mean: Floats
    axes: Floats
    variance_share: Floats
    low: Floats
    high: Floats

    def project(self, vectors: Singles) -> Floats:
        """Coordinates of vectors along the axes, (n, 3)."""
        return (vectors.astype(np.float64) - self.mean) @ self.axes.T

    def colours(self, vectors: Singles) -> npt.NDArray[np.uint8]:
        """RGB of vectors (n, d_model), uint8 (n, 3); middle grey where a vector has a number that is not finite."""
        found = np.full((len(vectors), N_COMPONENTS), 128, np.uint8)
        finite = np.isfinite(vectors).all(axis=1)
        span = np.where(self.high > self.low, self.high - self.low, 1)
        scaled = (self.project(vectors[finite]) - self.low) / span
        found[finite, : len(self.axes)] = np.round(np.clip(scaled, 0, 1) * 255).astype(np.uint8)
        return found


def principal_components(vectors: Singles) -> Components:
    """The first three principal components of vectors (n, d_model), all finite.

    The sign of an axis is arbitrary: its largest entry is made positive.
    """
    rows = vectors.astype(np.float64)
    mean = rows.mean(axis=0) if len(rows) else np.zeros(rows.shape[1])
    rows = rows - mean
    n, d_model = rows.shape
    # The eigenvectors of the smaller of two matrices with the same eigenvalues.
    if n <= d_model:
        values, left = np.linalg.eigh(rows @ rows.T)
        order = _leading(values)
        axes = (left[:, order].T @ rows) / np.sqrt(values[order])[:, np.newaxis]
    else:
        values, right = np.linalg.eigh(rows.T @ rows)
        order = _leading(values)
        axes = right[:, order].T
    strongest = np.abs(axes).argmax(axis=1)
    axes = axes * np.where(axes[np.arange(len(axes)), strongest] < 0, -1.0, 1.0)[:, np.newaxis]
    total = float(values.sum()) or 1.0
    if len(axes):
        low, high = np.quantile(rows @ axes.T, [_CLIPPED, 1 - _CLIPPED], axis=0)
    else:
        low = high = np.empty(0)
    return Components(mean, axes, values[order] / total, low, high)


def _leading(eigenvalues: Floats) -> Ints:
    """Positions of the largest eigenvalues, largest first, without those that are 0 but for rounding."""
    order = np.argsort(-eigenvalues)[:N_COMPONENTS]
    least = max(float(eigenvalues[order[0]]) * 1e-12, 0.0) if len(order) else 0.0
    return order[eigenvalues[order] > least].astype(np.int64)


def centred_gram(vectors: Singles) -> Floats:
    """The inner products of vectors (n, d_model) after their mean is subtracted, (n, n)."""
    rows = vectors.astype(np.float64)
    if len(rows):
        rows -= rows.mean(axis=0)
    return rows @ rows.T


def linear_cka(grams_a: list[Floats], grams_b: list[Floats]) -> Floats:
    """Linear centred kernel alignment between representations of the same tokens, each by its `centred_gram`.

    From 0 to 1, equal for rotated and scaled representations, and defined where the sizes of vectors differ; NaN where all
    vectors of a representation are equal. See Kornblith et al. 2019, arXiv:1905.00414.

    Returns:
        (len(grams_a), len(grams_b)).
    """
    a, b = (np.stack([gram.ravel() for gram in grams]) for grams in (grams_a, grams_b))
    norms = np.outer(np.linalg.norm(a, axis=1), np.linalg.norm(b, axis=1))
    norms[norms == 0] = np.nan
    return (a @ b.T) / norms


def cosine_rows(a: Singles, b: Singles) -> Floats:
    """The cosine similarity of each row of `a` with the same row of `b`; NaN where one has norm 0 or is not finite."""
    units = [unit_vectors(vectors, norms_of(vectors)).astype(np.float64) for vectors in (a, b)]
    found = np.vecdot(*units)
    found[~((norms_of(a) > 0) & (norms_of(b) > 0))] = np.nan
    return found
