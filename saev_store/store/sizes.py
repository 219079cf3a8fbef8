"""Size of a store on a disk, in each dtype that it could have; computed from its metadata, so also before it is recorded."""

from __future__ import annotations

from collections.abc import Iterable
from typing import NamedTuple

from saev_store.core.dtypes import ITEMSIZES
from saev_store.core.layout import Layout
from saev_store.core.token_arrays import TokenArray


class StoreSize(NamedTuple):
    """Bytes of all vectors and of all token arrays; padding and small documents are not counted."""

    vectors_nbytes: int
    token_arrays_nbytes: int

    def to_dict(self) -> dict[str, int]:
        """Plain JSON types: both, and their sum as `nbytes`."""
        return {**self._asdict(), "nbytes": sum(self)}


def sizes_by_dtype(layout: Layout, token_arrays: Iterable[TokenArray] = ()) -> dict[str, StoreSize]:
    """Size of a store in each dtype that a store may have."""
    n_numbers = layout.n_examples * layout.vectors_per_example * layout.d_model
    beside = sum(array.nbytes(layout) for array in token_arrays)
    return {dtype: StoreSize(n_numbers * itemsize, beside) for dtype, itemsize in ITEMSIZES.items()}
