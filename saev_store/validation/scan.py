"""`scan_piece` finds zeros and non-finite numbers in pieces of shards. Pure."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from saev_store.core.dtypes import INFINITY_BITS, ITEMSIZES, are_finite
from saev_store.core.layout import IntArray

NO_RUNS: IntArray = np.empty((0, 2), dtype=np.int64)
_Bits = npt.NDArray[np.uint32] | npt.NDArray[np.uint16]


def scan_piece(piece: memoryview, *, start: int, d_model: int, dtype: str = "float32") -> tuple[IntArray, int]:
    """Find zero vectors and non-finite numbers in consecutive bytes of a shard; `start` is their first element's position in it.

    A vector is zero if all its bits are, as in a row of a sparse file that was never written.

    Returns:
        Half-open ranges of *elements* of the shard that are zero, int64 (k, 2), each either whole vectors or the part of a vector at
        the piece's edge; and the count of elements that are infinite or NaN.
    """
    bits = np.frombuffer(piece, dtype=f"<u{ITEMSIZES[dtype]}")
    if not bits.size:
        return NO_RUNS, 0
    if not bits[:1024].any() and not bits.any():
        return np.array([[start, start + bits.size]], dtype=np.int64), 0
    return _zero_runs(bits, start, d_model), _count_nonfinite(bits, dtype)


def _count_nonfinite(bits: _Bits, dtype: str) -> int:
    if dtype != "float32":
        if are_finite(bits.view(np.uint16), dtype):
            return 0
        exponent = np.uint16(INFINITY_BITS[dtype])  # all of its bits, in NaN too
        return int(np.count_nonzero((bits & exponent) == exponent))
    # One dot product reads the piece once. It is finite unless an element is not, or elements exceed about 1e16.
    values = bits.view(np.float32)
    with np.errstate(all="ignore"):
        if np.isfinite(np.dot(values, values)):
            return 0
    return values.size - int(np.count_nonzero(np.isfinite(values)))


def _zero_runs(bits: _Bits, start: int, d_model: int) -> IntArray:
    edge = min((-start) % d_model, bits.size)
    n_vectors = (bits.size - edge) // d_model
    runs: list[IntArray] = []
    if edge and not bits[:edge].any():
        runs.append(np.array([[start, start + edge]], dtype=np.int64))
    if n_vectors:
        vectors = bits[edge : edge + n_vectors * d_model].reshape(n_vectors, d_model)
        zero = _zero_vectors(vectors)
        if zero.size:
            first = start + edge + zero.astype(np.int64) * d_model
            runs.append(merge_runs(np.stack([first, first + d_model], axis=1)))
    tail = edge + n_vectors * d_model
    if tail < bits.size and not bits[tail:].any():
        runs.append(np.array([[start + tail, start + bits.size]], dtype=np.int64))
    return np.concatenate(runs) if runs else NO_RUNS


def _zero_vectors(vectors: _Bits) -> npt.NDArray[np.intp]:
    # Comparing a few columns touches one cache line per vector and excludes nearly all vectors, also sparse ones.
    d_model = vectors.shape[1]
    suspects = np.flatnonzero(vectors[:, 0] == 0)
    for column in dict.fromkeys((d_model - 1, d_model // 2, d_model // 3, d_model // 5)):
        if not suspects.size:
            return suspects
        suspects = suspects[vectors[suspects, column] == 0]
    return suspects[~vectors[suspects].any(axis=1)] if suspects.size else suspects


def merge_runs(runs: IntArray) -> IntArray:
    """Merge ascending ranges that touch."""
    if len(runs) < 2:
        return runs
    gap = runs[1:, 0] != runs[:-1, 1]
    starts = runs[np.concatenate([[True], gap]), 0]
    ends = runs[np.concatenate([gap, [True]]), 1]
    return np.stack([starts, ends], axis=1)


def whole_units(runs: IntArray, unit: int) -> IntArray:
    """The units of `unit` elements that lie entirely within merged runs, as non-empty ranges of units."""
    units = np.stack([-(-runs[:, 0] // unit), runs[:, 1] // unit], axis=1)
    return units[units[:, 0] < units[:, 1]]
