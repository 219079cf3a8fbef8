"""A store's tensor and token arrays as xarray's lazy variables, and what dask makes of these."""

# pyright: reportMissingTypeStubs=false

from __future__ import annotations

from collections.abc import Mapping
from functools import partial
from typing import TYPE_CHECKING, Self, TypeVar, cast

import numpy as np
import numpy.typing as npt
import xarray
from xarray.backends import BackendArray
from xarray.core import indexing

from saev_store._runtime.threads import off_loop
from saev_store.core.dtypes import FLOAT32
from saev_store.core.indexing import Item, outer_block
from saev_store.dask import computed_beside, read_into_result, sliced
from saev_store.store.store import ShardStore

if TYPE_CHECKING:
    import dask.array

#: Arguments of `xarray.Variable.chunk`, in order.
_OF_CHUNK = ("chunks", "name", "lock", "inline_array", "chunked_array_type", "from_array_kwargs")
#: Begins names of tasks that tell the recording already: that takes requests, which one for each variable would repeat.
NAMED = "saev-recording-"


class StoreArray(BackendArray):
    """The tensor as xarray indexes it: a key reads the bytes that it selects, through the store."""

    def __init__(self, store: ShardStore) -> None:
        self.store = store
        self.shape = store.shape
        self.dtype = FLOAT32

    def __getitem__(self, key: indexing.ExplicitIndexer) -> npt.NDArray[np.generic]:
        if not isinstance(key, indexing.VectorizedIndexer):
            return self.store.read(outer_block(key.tuple, self.shape))
        found = self.store.read(key.tuple)
        # NumPy leaves the dimensions of neighbouring lists in place; xarray expects them in front.
        lists = [axis for axis, item in enumerate(key.tuple) if isinstance(item, np.ndarray)]
        if not lists or lists[-1] - lists[0] + 1 > len(lists):
            return found
        n_dims = np.ndim(key.tuple[lists[0]])
        return np.moveaxis(found, range(lists[0], lists[0] + n_dims), range(n_dims))

    async def async_getitem(self, key: indexing.ExplicitIndexer) -> npt.NDArray[np.generic]:
        """The same in a thread, for `load_async`."""
        return await off_loop(partial(self.__getitem__, key))

    def __dask_tokenize__(self) -> object:
        return self.store.__dask_tokenize__()


class TokenVariable(StoreArray):
    """A token array, such as labels, as xarray indexes it; its file is read, or mapped, when a value is needed."""

    def __init__(self, store: ShardStore, name: str) -> None:
        super().__init__(store)
        self._name = name
        self.shape = (len(store), store.layout.content_tokens_per_example)
        self.dtype = store.token_arrays.declared(name).numpy_dtype

    def __getitem__(self, key: indexing.ExplicitIndexer) -> npt.NDArray[np.generic]:
        values = self.store.token_arrays[self._name]

        def copied(part: tuple[int | slice, ...]) -> npt.NDArray[np.generic]:
            return values[part].copy()

        return indexing.explicit_indexing_adapter(key, self.shape, indexing.IndexingSupport.BASIC, copied)

    def __dask_tokenize__(self) -> object:
        return *self.store.__dask_tokenize__(), self._name


def _selects_nothing(item: object, size: int) -> bool:
    """Whether a key of one axis is a slice without any of so many positions."""
    return isinstance(item, slice) and not range(size)[cast("slice[None]", item)]


class LazyArray(indexing.LazilyIndexedArray):
    """xarray's lazy array, with empty slices that stay empty.

    xarray 2026.9 makes `slice(-9, None, -3)` of seven positions the three from the last one on, for any back end.
    """

    def _updated_key(self, new_key: indexing.ExplicitIndexer) -> indexing.BasicIndexer | indexing.OuterIndexer:
        items = cast("tuple[object, ...]", indexing.expanded_indexer(new_key.tuple, self.ndim))  # pyright: ignore[reportUnknownMemberType]  # partly annotated
        key = tuple(
            slice(0, 0) if _selects_nothing(item, size) else item for item, size in zip(items, self.shape, strict=True)
        )
        return super()._updated_key(type(new_key)(key))


class StoreVariable(xarray.Variable):
    """The tensor, or a token array, as a variable. Tasks that dask makes of it are named after the recording.

    Once chunked, the tensor and what is selected of it are computed without a second copy, whatever the order of variables.
    """

    __slots__ = ()

    def chunk(self, *args: object, **options: object) -> Self:  # pyright: ignore[reportIncompatibleMethodOverride]  # handed on
        """As `xarray.Variable.chunk`."""
        options = {**dict(zip(_OF_CHUNK, args, strict=False)), **options}
        data = _data_of(self)
        lazy = _lazy_array(data)
        if lazy is not None and _is_by_dask(options.get("chunked_array_type")):
            options = _named(lazy, options)
        chunked = super().chunk(**options)  # pyright: ignore[reportArgumentType]  # handed on
        array = _dask_array(chunked)
        more = cast("Mapping[str, object]", options.get("from_array_kwargs") or {})
        if array is None or options.get("lock") or more.get("lock"):
            return chunked
        if lazy is None or type(lazy.array) is not StoreArray:
            return _with_data(chunked, computed_beside(array))
        store = lazy.array.store
        block = outer_block(cast("tuple[Item, ...]", lazy.key.tuple), store.shape)  # pyright: ignore[reportUnknownMemberType]  # partly annotated
        return _with_data(chunked, read_into_result(array, store, block, valid=lambda: _lazy_array(data) is lazy))

    def __getitem__(self, key: object) -> Self:
        """As `xarray.Variable[key]`."""
        found = super().__getitem__(key)  # pyright: ignore[reportUnknownMemberType]  # partly annotated
        array, part = _dask_array(self), _dask_array(found)
        if array is None or part is None:
            return found
        _, indexer, _ = self._broadcast_indexes(key)  # pyright: ignore[reportUnknownMemberType, reportUnknownVariableType]  # partly annotated
        items = cast("tuple[object, ...]", indexer.tuple)
        is_known = all(isinstance(item, (int, np.integer, slice, np.ndarray)) for item in items)  # no dask array
        if isinstance(indexer, indexing.VectorizedIndexer) or not is_known:
            return found
        return _with_data(found, sliced(array, part, outer_block(cast("tuple[Item, ...]", items), self.shape)))


def _is_by_dask(manager: object) -> bool:
    """Whether it is dask that cuts a variable, as it does by default: other libraries take no names."""
    return manager is None or manager == "dask" or type(manager).__name__ == "DaskManager"


def _named(lazy: LazyArray, options: Mapping[str, object]) -> dict[str, object]:
    """The options of `chunk` with a name that tells the recording: xarray knows its address, at most."""
    from dask.base import tokenize

    sizes = {name: value for name, value in options.items() if name == "chunks" or name not in _OF_CHUNK}
    made = {**cast("Mapping[str, object]", options.get("from_array_kwargs") or {})}
    key = cast("tuple[object, ...]", lazy.key.tuple)  # pyright: ignore[reportUnknownMemberType]  # partly annotated
    name = str(options.get("name") or made.get("name") or f"saev-{tokenize(key, str(sizes))}")
    made["name"] = name if name.startswith(NAMED) else f"{name}-{tokenize(lazy.array)}"
    return {**options, "name": None, "from_array_kwargs": made}


_AnyVariable = TypeVar("_AnyVariable", bound=xarray.Variable)


def _with_data(variable: _AnyVariable, data: dask.array.Array) -> _AnyVariable:
    return variable._replace(data=data)  # pyright: ignore[reportPrivateUsage, reportArgumentType]  # keeps the class


def _data_of(variable: xarray.Variable) -> object:
    """Its data as they are; `variable.data` would read what is lazy."""
    return cast("object", variable._data)  # noqa: SLF001  # pyright: ignore[reportPrivateUsage, reportUnknownMemberType]  # xarray has no public way


def _lazy_array(data: object) -> LazyArray | None:
    """What reads a store behind data of xarray; None once values were loaded or assigned."""
    while isinstance(data, (indexing.CopyOnWriteArray, indexing.MemoryCachedArray)):
        data = cast("object", data.array)
    return data if isinstance(data, LazyArray) else None


def _dask_array(variable: xarray.Variable) -> dask.array.Array | None:
    """Its data if they are a dask array: not lazy, in memory, or of another library of chunks."""
    data = _data_of(variable)
    return cast("dask.array.Array", data) if type(data).__module__.startswith("dask.array.") else None
