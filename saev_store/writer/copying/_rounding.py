"""`RoundingReport`: what storing numbers in another dtype has changed, counted and measured."""

from __future__ import annotations

import math
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, NamedTuple, cast

import numpy as np

from saev_store._runtime.threads import ahead, n_threads
from saev_store.core.dtypes import FLOAT32, numpy_dtype, stored_as

if TYPE_CHECKING:
    from collections.abc import Mapping

    from saev_store.store.reader import FloatArray, NumberArray

#: Bytes of float32 that are compared at a time. The copies in float64 stay in the CPU's cache, and are small enough for the allocator
#: to keep their memory: with four times as many bytes this is six times slower.
_PIECE_BYTES = 256 << 10
#: What a thread takes at a time.
_THREAD_BYTES = 4 << 20
#: Smaller than every float32 number but zero.
_SMALLEST = 2.0**-150


@dataclass(frozen=True)
class RoundingReport:
    """What a copy in another dtype has changed; `str()` is one sentence.

    `old` is a number of the source and `new` the number that the copy holds in its place, both exact in float64. Numbers
    that are NaN or infinite in either are left out of the errors.

    Attributes:
        source_dtype: What the source holds.
        dtype: What the copy holds.
        n_vectors: Vectors of the copy.
        n_changed_vectors: Vectors with at least one number that reads as other bits of a float32. NaN payloads and the
            signs of zeros count.
        max_abs_error: The largest |new - old|; 0 where there is none.
        mean_rel_error: The mean of |new - old| / |old| over all numbers whose `old` is not 0; 0 where there is none.
        n_became_infinite: Finite numbers that became infinite, which happens with `on_overflow="warn"` only.

    >>> report = RoundingReport("float32", "bfloat16", n_vectors=200, n_changed_vectors=50, max_abs_error=0.25,
    ...                         mean_rel_error=0.001, n_became_infinite=0)
    >>> report.changed_fraction, report.is_bit_lossless
    (0.25, False)
    >>> print(report)
    float32 to bfloat16: 25% of 200 vectors changed, max absolute error 0.25, mean relative error 0.001
    """

    source_dtype: str
    dtype: str
    n_vectors: int
    n_changed_vectors: int
    max_abs_error: float
    mean_rel_error: float
    n_became_infinite: int

    @property
    def changed_fraction(self) -> float:
        """The fraction of vectors that changed."""
        return self.n_changed_vectors / self.n_vectors

    @property
    def is_bit_lossless(self) -> bool:
        """Whether both stores read as the same float32 numbers, bit for bit."""
        return self.n_changed_vectors == 0

    def to_dict(self) -> dict[str, object]:
        """Plain JSON types: the attributes, `changed_fraction` and `is_bit_lossless`."""
        return {**asdict(self), "changed_fraction": self.changed_fraction, "is_bit_lossless": self.is_bit_lossless}

    def __str__(self) -> str:
        pair = f"{self.source_dtype} to {self.dtype}"
        if self.is_bit_lossless:
            return f"{pair}: bit-lossless, none of {self.n_vectors:,} vectors changed"
        text = (
            f"{pair}: {100 * self.changed_fraction:.4g}% of {self.n_vectors:,} vectors changed, max absolute error "
            f"{self.max_abs_error:.4g}, mean relative error {self.mean_rel_error:.4g}"
        )
        if self.n_became_infinite:
            text += f", {self.n_became_infinite:,} numbers became infinite"
        return text


def unchanged(dtype: str, n_vectors: int) -> RoundingReport:
    """The report of a copy in the dtype of its source."""
    return RoundingReport(dtype, dtype, n_vectors, 0, 0.0, 0.0, 0)


def parse_report(value: object) -> RoundingReport | None:
    """The report that `to_dict` gave, after a way through JSON; None if it is something else."""
    if not isinstance(value, dict):
        return None
    given = cast("Mapping[str, object]", value)
    types = {"source_dtype": str, "dtype": str, "max_abs_error": float, "mean_rel_error": float}
    fields = {name: given.get(name) for name in RoundingReport.__dataclass_fields__}
    if any(type(field) is not types.get(name, int) for name, field in fields.items()):
        return None
    report = RoundingReport(**fields)  # pyright: ignore[reportArgumentType]  # each has just been looked at
    return report if report.n_vectors > 0 else None


class _Counts(NamedTuple):
    """What a piece of the vectors adds to the report."""

    n_vectors: int
    n_changed_vectors: int
    n_became_infinite: int
    n_relative: int
    max_abs_error: float
    rel_error_sum: float

    def with_(self, other: _Counts) -> _Counts:
        """Both together."""
        return _Counts(
            self.n_vectors + other.n_vectors,
            self.n_changed_vectors + other.n_changed_vectors,
            self.n_became_infinite + other.n_became_infinite,
            self.n_relative + other.n_relative,
            max(self.max_abs_error, other.max_abs_error),
            self.rel_error_sum + other.rel_error_sum,
        )


class Measurement:
    """Rounds numbers to another dtype, batch by batch, and compares before and after.

    The same batches in the same order give the same report, bit for bit, with any number of threads.
    """

    def __init__(self, source_dtype: str, dtype: str) -> None:
        self._source_dtype, self._dtype = source_dtype, dtype
        self._total = _Counts(0, 0, 0, 0, 0.0, 0.0)

    def rounded(self, before: NumberArray, checked: NumberArray) -> NumberArray:
        """The numbers in the other dtype as a fresh array, counted.

        Args:
            before: The numbers of the source, (…, d_model); float32 holds them exactly.
            checked: What of them is rounded: the same numbers, or where some were saturated the result of that.
        """
        d_model = before.shape[-1]
        old, given = before.reshape(-1, d_model), checked.reshape(-1, d_model)
        new = np.empty(old.shape, dtype=numpy_dtype(self._dtype))

        step = max(1, _PIECE_BYTES // (FLOAT32.itemsize * d_model))

        def work(part: range) -> list[_Counts]:
            found: list[_Counts] = []
            for at in part:
                rows = slice(at, at + step)
                new[rows] = stored_as(given[rows], new.dtype)
                found.append(_compared(old[rows], new[rows]))
            return found

        pieces = range(0, len(old), step)
        n_together = max(1, _THREAD_BYTES // _PIECE_BYTES)
        parts = [pieces[at : at + n_together] for at in range(0, len(pieces), n_together)]
        for found in ahead(work, parts, n_threads(old.nbytes, part_bytes=_THREAD_BYTES)):
            for counts in found:
                self._total = self._total.with_(counts)
        return new.reshape(before.shape)

    def report(self) -> RoundingReport:
        """What was found so far."""
        total = self._total
        return RoundingReport(
            self._source_dtype,
            self._dtype,
            n_vectors=total.n_vectors,
            n_changed_vectors=total.n_changed_vectors,
            max_abs_error=total.max_abs_error,
            mean_rel_error=total.rel_error_sum / max(total.n_relative, 1),
            n_became_infinite=total.n_became_infinite,
        )


def _compared(before: NumberArray, after: NumberArray) -> _Counts:
    """The counts of some rows, (n, d_model)."""
    old, new = (cast("FloatArray", np.ascontiguousarray(stored_as(rows, FLOAT32))) for rows in (before, after))
    changed = (old.view(np.uint32) != new.view(np.uint32)).any(axis=1)
    n_changed = int(np.count_nonzero(changed))
    with np.errstate(invalid="ignore", over="ignore"):  # NaN and infinity
        wide = old.astype(np.float64)
        error = np.abs(new - wide)
        worst = float(error.max())
        if math.isfinite(worst):
            n_became_infinite = 0
        else:
            n_became_infinite = int(np.count_nonzero(np.isfinite(old) & np.isinf(new)))
            both = np.isfinite(old) & np.isfinite(new)
            error, wide = error[both], wide[both]
            worst = float(error.max(initial=0.0))
    n_relative = int(np.count_nonzero(wide))
    size = np.maximum(np.abs(wide), _SMALLEST)  # a zero has no error
    return _Counts(len(old), n_changed, n_became_infinite, n_relative, worst, float((error / size).sum()))
