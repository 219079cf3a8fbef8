"""`RoundingReport`: what storing numbers in another dtype has changed, counted and measured."""

from __future__ import annotations

import math
from dataclasses import asdict, dataclass
from functools import reduce
from typing import TYPE_CHECKING, cast

import numpy as np

from saev_store.core.dtypes import FLOAT32, numpy_dtype, stored_as

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping

    from saev_store.store.reader import FloatArray, NumberArray

#: Bytes of float32 that are compared at a time. The copies in float64 stay in the CPU's cache, and are small enough for the allocator
#: to keep their memory: with four times as many bytes this is six times slower.
_PIECE_BYTES = 256 << 10
#: Smaller than every float32 number but zero.
_SMALLEST = 2.0**-150


@dataclass(frozen=True)
class RoundingReport:
    """Changes of a copy in another dtype; `str()` is one sentence.

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
        n_relative: Numbers of which `mean_rel_error` is the mean.

    >>> report = RoundingReport("float32", "bfloat16", n_vectors=200, n_changed_vectors=50, max_abs_error=0.25,
    ...                         mean_rel_error=0.001)
    >>> report.changed_fraction, report.is_bit_lossless
    (0.25, False)
    >>> print(report)
    float32 to bfloat16: 25% of 200 vectors changed, max absolute error 0.25, mean relative error 0.001
    """

    source_dtype: str
    dtype: str
    n_vectors: int
    n_changed_vectors: int = 0
    max_abs_error: float = 0.0
    mean_rel_error: float = 0.0
    n_became_infinite: int = 0
    n_relative: int = 0

    @property
    def changed_fraction(self) -> float:
        """The fraction of vectors that changed."""
        return self.n_changed_vectors / self.n_vectors

    @property
    def is_bit_lossless(self) -> bool:
        """True if both stores read as the same float32 numbers, bit for bit."""
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


def parse_report(value: object) -> RoundingReport | None:
    """The report that `to_dict` gave, after a way through JSON; None if it is something else."""
    given = cast("Mapping[str, object]", value if isinstance(value, dict) else {})
    fields = [given.get(name) for name in RoundingReport.__dataclass_fields__]
    if [type(field) for field in fields] != [str, str, int, int, float, float, int, int]:
        return None
    report = RoundingReport(*fields)  # pyright: ignore[reportArgumentType]  # each has just been looked at
    return report if report.n_vectors > 0 else None


def joined(reports: Iterable[RoundingReport]) -> RoundingReport:
    """One report on the vectors of several; the same reports in the same order give the same one."""
    return reduce(_both, reports)


def _both(one: RoundingReport, other: RoundingReport) -> RoundingReport:
    n = one.n_relative + other.n_relative
    rel_error_sum = one.mean_rel_error * one.n_relative + other.mean_rel_error * other.n_relative
    return RoundingReport(
        one.source_dtype,
        one.dtype,
        n_vectors=one.n_vectors + other.n_vectors,
        n_changed_vectors=one.n_changed_vectors + other.n_changed_vectors,
        max_abs_error=max(one.max_abs_error, other.max_abs_error),
        mean_rel_error=rel_error_sum / max(n, 1),
        n_became_infinite=one.n_became_infinite + other.n_became_infinite,
        n_relative=n,
    )


def rounded(before: NumberArray, checked: NumberArray, dtype: str) -> tuple[NumberArray, RoundingReport]:
    """Numbers in another dtype, as a fresh array, and what that has changed.

    Args:
        before: The numbers of the source, (…, d_model); float32 holds them exactly.
        checked: What of them is rounded: the same numbers, or with some of them saturated.
        dtype: The other dtype.
    """
    d_model = before.shape[-1]
    old, given = before.reshape(-1, d_model), checked.reshape(-1, d_model)
    new, reports = np.empty(old.shape, dtype=numpy_dtype(dtype)), list[RoundingReport]()
    step = max(1, _PIECE_BYTES // (FLOAT32.itemsize * d_model))
    for at in range(0, len(old), step):
        rows = slice(at, at + step)
        new[rows] = stored_as(given[rows], new.dtype)
        reports.append(_compared(old[rows], new[rows]))
    return new.reshape(before.shape), joined(reports)


def _compared(before: NumberArray, after: NumberArray) -> RoundingReport:
    """The report on some rows, (n, d_model)."""
    old, new = (cast("FloatArray", np.ascontiguousarray(stored_as(rows, FLOAT32))) for rows in (before, after))
    changed = (old.view(np.uint32) != new.view(np.uint32)).any(axis=1)
    n_changed = int(np.count_nonzero(changed))
    with np.errstate(invalid="ignore", over="ignore"):  # NaN and infinity
        wide = old.astype(np.float64)
        error = np.abs(new - wide)
        worst = float(error.max())
        n_became_infinite = 0
        if not math.isfinite(worst):
            n_became_infinite = int(np.count_nonzero(np.isfinite(old) & np.isinf(new)))
            is_other = ~(np.isfinite(old) & np.isfinite(new))
            error[is_other], wide[is_other] = 0.0, 0.0
            worst = float(error.max())
    n = int(np.count_nonzero(wide))
    size = np.maximum(np.abs(wide), _SMALLEST)  # a zero has no error
    mean = float((error / size).sum()) / max(n, 1)
    return RoundingReport(before.dtype.name, after.dtype.name, len(old), n_changed, worst, mean, n_became_infinite, n)
