"""`RoundingReport`: what storing numbers in another dtype has changed, counted and measured."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, cast

import numpy as np

from saev_store.core.dtypes import FLOAT32, stored_as

if TYPE_CHECKING:
    from collections.abc import Mapping

    from saev_store.store.reader import FloatArray, NumberArray

#: Bytes of float32 that are compared at a time; they and their copies in float64 stay in the CPU's cache.
_PIECE_BYTES = 1 << 20


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


class Measurement:
    """Compares numbers before and after a conversion, batch by batch.

    The same batches in the same order give the same report, bit for bit.
    """

    def __init__(self, source_dtype: str, dtype: str) -> None:
        self._dtypes = source_dtype, dtype
        self._n_vectors = self._n_changed = self._n_became_infinite = 0
        self._max_abs_error = self._rel_error_sum = 0.0
        self._n_relative = 0

    def add(self, before: NumberArray, after: NumberArray) -> None:
        """Count vectors, both (…, d_model), of two dtypes that float32 holds exactly."""
        for old, new in zip(before, after, strict=True):
            old_rows, new_rows = old.reshape(-1, old.shape[-1]), new.reshape(-1, new.shape[-1])
            step = max(1, _PIECE_BYTES // (FLOAT32.itemsize * old.shape[-1]))
            for at in range(0, len(old_rows), step):
                self._add_rows(old_rows[at : at + step], new_rows[at : at + step])

    def _add_rows(self, before: NumberArray, after: NumberArray) -> None:
        old, new = (cast("FloatArray", np.ascontiguousarray(stored_as(rows, FLOAT32))) for rows in (before, after))
        changed = (old.view(np.uint32) != new.view(np.uint32)).any(axis=1)
        self._n_vectors += len(old)
        self._n_changed += int(changed.sum())
        finite = np.isfinite(old) & np.isfinite(new)
        self._n_relative += int(np.count_nonzero(old[finite]))
        if not changed.any():
            return
        self._n_became_infinite += int((np.isfinite(old) & np.isinf(new)).sum())
        size = np.abs(old[finite].astype(np.float64))
        error = np.abs(new[finite].astype(np.float64) - old[finite])
        self._max_abs_error = max(self._max_abs_error, float(error.max(initial=0.0)))
        not_zero = size > 0
        self._rel_error_sum += float((error[not_zero] / size[not_zero]).sum())

    def report(self) -> RoundingReport:
        """What was found so far."""
        return RoundingReport(
            *self._dtypes,
            n_vectors=self._n_vectors,
            n_changed_vectors=self._n_changed,
            max_abs_error=self._max_abs_error,
            mean_rel_error=self._rel_error_sum / max(self._n_relative, 1),
            n_became_infinite=self._n_became_infinite,
        )
