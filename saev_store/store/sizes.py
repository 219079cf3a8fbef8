"""Size of a store on a disk, in each dtype that it could have; computed from its metadata, so also before it is recorded."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import asdict, dataclass

from saev_store.core.dtypes import ITEMSIZES
from saev_store.core.layout import Layout
from saev_store.core.token_arrays import TokenArray


@dataclass(frozen=True, slots=True)
class StoreSize:
    """Bytes of a store with its numbers in one dtype. The padding of the last shard and small documents are not counted.

    Attributes:
        vectors_nbytes: Of all vectors.
        token_arrays_nbytes: Of all token arrays; they are the same in every dtype of the vectors.
    """

    vectors_nbytes: int
    token_arrays_nbytes: int

    @property
    def nbytes(self) -> int:
        """Both together."""
        return self.vectors_nbytes + self.token_arrays_nbytes

    def to_dict(self) -> dict[str, int]:
        """Plain JSON types: the attributes and `nbytes`."""
        return {**asdict(self), "nbytes": self.nbytes}


def sizes_by_dtype(layout: Layout, token_arrays: Iterable[TokenArray] = ()) -> dict[str, StoreSize]:
    """Size of a store in each dtype that a store may have.

    Args:
        layout: Its geometry; the dtype in it does not matter.
        token_arrays: What it records for each content token.

    >>> from saev_store import new_metadata
    >>> metadata = new_metadata(family="gpt2", ckpt="small", layers=[6], content_tokens_per_example=128, cls_token=False,
    ...                         d_model=768, n_examples=1000, token_arrays={"token_ids": "int32"})
    >>> sizes = sizes_by_dtype(metadata.layout, metadata.token_arrays)
    >>> {dtype: size.nbytes for dtype, size in sizes.items()}
    {'float32': 393728000, 'bfloat16': 197120000, 'float16': 197120000}
    """
    n_numbers = layout.n_examples * layout.vectors_per_example * layout.d_model
    beside = sum(array.nbytes(layout) for array in token_arrays)
    return {dtype: StoreSize(n_numbers * itemsize, beside) for dtype, itemsize in ITEMSIZES.items()}
