"""A store's tensor and token arrays as xarray's lazy arrays."""

from __future__ import annotations

import asyncio
from typing import cast

import numpy as np
import numpy.typing as npt
from xarray.backends import BackendArray
from xarray.core import indexing

from saev_store.core.dtypes import FLOAT32
from saev_store.core.indexing import Item, outer_block
from saev_store.store.store import ShardStore

Values = npt.NDArray[np.generic]
Key = tuple[Item, ...]


class StoreArray(BackendArray):
    """The tensor as xarray indexes it: a key reads the bytes that it selects, through the store."""

    def __init__(self, store: ShardStore) -> None:
        self.store = store
        self.shape: tuple[int, ...] = store.shape
        self.dtype: np.dtype[np.generic] = FLOAT32

    def __getitem__(self, key: indexing.ExplicitIndexer) -> Values:
        items = cast("Key", key.tuple)
        # `LazyArray` makes points of several axes positions on all of them, whose dimensions NumPy puts in front, too.
        return self.points(items) if isinstance(key, indexing.VectorizedIndexer) else self.outer(items)

    async def async_getitem(self, key: indexing.ExplicitIndexer) -> Values:
        """The same in a thread, for `load_async`."""
        return await asyncio.to_thread(self.__getitem__, key)

    def outer(self, key: Key) -> Values:
        """The product of what each item selects on its axis."""
        return self.store.read(outer_block(key, self.store.shape))

    def points(self, key: Key) -> Values:
        """The selection as NumPy does it."""
        return self.store.read(key)


class TokenVariable(StoreArray):
    """A token array, such as labels, as xarray indexes it; its file is read, or mapped, when a value is needed."""

    def __init__(self, store: ShardStore, name: str) -> None:
        super().__init__(store)
        self._name = name
        self.shape = (len(store), store.layout.content_tokens_per_example)
        self.dtype = store.token_arrays.declared(name).numpy_dtype

    def outer(self, key: Key) -> Values:
        """The product of what each item selects on its axis, as a copy."""
        example, token = key
        return np.array(self.store.token_arrays[self._name][example][..., token])

    def points(self, key: Key) -> Values:
        """The selection as NumPy does it, as a copy."""
        return np.array(self.store.token_arrays[self._name][key])


class LazyArray(indexing.LazilyIndexedArray):
    """xarray's lazy array, with empty slices that stay empty.

    xarray 2026.9 makes `slice(-9, None, -3)` of seven positions the three from the last one on, for any back end.
    """

    def _updated_key(self, new_key: indexing.ExplicitIndexer) -> indexing.BasicIndexer | indexing.OuterIndexer:
        items = cast("Key", indexing.expanded_indexer(new_key.tuple, self.ndim))  # pyright: ignore[reportUnknownMemberType]  # partly annotated
        key = [
            slice(0, 0) if isinstance(item, slice) and not len(range(size)[cast("slice[int]", item)]) else item
            for item, size in zip(items, self.shape, strict=True)
        ]
        return super()._updated_key(type(new_key)(tuple(key)))
