"""`RoundingReport`: what storing numbers in another dtype has changed, counted and measured."""

from __future__ import annotations

import json
import math
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, NamedTuple, cast

import numpy as np

from saev_store.core.dtypes import FLOAT32, numpy_dtype, stored_as

if TYPE_CHECKING:
    from collections.abc import Mapping

    from saev_store.store.reader import FloatArray, NumberArray

#: Bytes of float32 that are compared at a time. The copies in float64 stay in the CPU's cache, and are small enough for the allocator
#: to keep their memory: with four times as many bytes this is six times slower.
_PIECE_BYTES = 256 << 10
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


class Counts(NamedTuple):
    """What some of the vectors add to the report.

    Attributes:
        n_vectors, n_changed_vectors, n_became_infinite, max_abs_error: See `RoundingReport`.
        n_relative: Numbers whose relative error counts.
        rel_error_sum: The sum of these errors.
    """

    n_vectors: int = 0
    n_changed_vectors: int = 0
    n_became_infinite: int = 0
    n_relative: int = 0
    max_abs_error: float = 0.0
    rel_error_sum: float = 0.0

    def with_(self, other: Counts) -> Counts:
        """Both together; errors are added in this order, so that the same shards give the same report."""
        return Counts(
            self.n_vectors + other.n_vectors,
            self.n_changed_vectors + other.n_changed_vectors,
            self.n_became_infinite + other.n_became_infinite,
            self.n_relative + other.n_relative,
            max(self.max_abs_error, other.max_abs_error),
            self.rel_error_sum + other.rel_error_sum,
        )

    def report(self, source_dtype: str, dtype: str) -> RoundingReport:
        """The report on vectors of these counts."""
        return RoundingReport(
            source_dtype,
            dtype,
            n_vectors=self.n_vectors,
            n_changed_vectors=self.n_changed_vectors,
            max_abs_error=self.max_abs_error,
            mean_rel_error=self.rel_error_sum / max(self.n_relative, 1),
            n_became_infinite=self.n_became_infinite,
        )

    def to_bytes(self) -> bytes:
        """The document of a shard."""
        return json.dumps(self).encode()


def parse_counts(raw: bytes | None) -> Counts | None:
    """The counts in a document; None if there is none, or something else."""
    try:
        found = cast("object", json.loads(raw or b""))
    except (ValueError, RecursionError):
        return None
    if not isinstance(found, list) or [type(value) for value in cast("list[object]", found)] != [int] * 4 + [float] * 2:
        return None
    return Counts(*found)  # pyright: ignore[reportUnknownArgumentType]  # each has just been looked at


def rounded(before: NumberArray, checked: NumberArray, dtype: str) -> tuple[NumberArray, Counts]:
    """Numbers in another dtype, as a fresh array, and what that has changed.

    Args:
        before: The numbers of the source, (…, d_model); float32 holds them exactly.
        checked: What of them is rounded: the same numbers, or with some of them saturated.
        dtype: The other dtype.
    """
    d_model = before.shape[-1]
    old, given = before.reshape(-1, d_model), checked.reshape(-1, d_model)
    new, counts = np.empty(old.shape, dtype=numpy_dtype(dtype)), Counts()
    step = max(1, _PIECE_BYTES // (FLOAT32.itemsize * d_model))
    for at in range(0, len(old), step):
        rows = slice(at, at + step)
        new[rows] = stored_as(given[rows], new.dtype)
        counts = counts.with_(_compared(old[rows], new[rows]))
    return new.reshape(before.shape), counts


def _compared(before: NumberArray, after: NumberArray) -> Counts:
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
            is_other = ~(np.isfinite(old) & np.isfinite(new))
            error[is_other], wide[is_other] = 0.0, 0.0
            worst = float(error.max())
    n_relative = int(np.count_nonzero(wide))
    size = np.maximum(np.abs(wide), _SMALLEST)  # a zero has no error
    return Counts(len(old), n_changed, n_became_infinite, n_relative, worst, float((error / size).sum()))
