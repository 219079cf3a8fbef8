"""The tensor as an `xarray.Dataset`, and `engine="saev"`.

`xr.open_dataset(url, engine="saev", storage_options=…)` works wherever the package is installed, without importing it.
"""

from __future__ import annotations

import asyncio
import json
import os
from collections.abc import Iterable, Mapping
from typing import TYPE_CHECKING, cast

import numpy as np
import numpy.typing as npt

from saev_store.core.chunk_grid import task_lengths
from saev_store.core.indexing import outer_block
from saev_store.core.layout import DIMS
from saev_store.errors import ArgumentError, MissingDependencyError
from saev_store.names import METADATA_NAME, SHARDS_NAME
from saev_store.store.store import ShardStore
from saev_store.zarr.documents import ARRAY, CONTENT, LABELS, attributes_of

try:
    import xarray
    from xarray.backends import BackendArray, BackendEntrypoint
    from xarray.core import indexing
except ImportError as error:
    raise MissingDependencyError(
        "xarray is not installed", where="as_xarray", remedy="pip install 'saev_store[xarray]'"
    ) from error

if TYPE_CHECKING:
    from saev_store.store.store import TaskSizes


class StoreArray(BackendArray):
    """The tensor as xarray indexes it: a key reads the bytes that it selects, through the store."""

    def __init__(self, store: ShardStore) -> None:
        self.store = store
        self.shape = store.shape
        self.dtype = store.dtype

    def __getitem__(self, key: indexing.ExplicitIndexer) -> npt.NDArray[np.generic]:
        if not isinstance(key, indexing.VectorizedIndexer):
            return self.store.read(outer_block(key.tuple, self.shape))
        found = self.store.read(key.tuple)
        # NumPy leaves the dimensions of neighbouring lists in place; xarray wants them in front.
        lists = [axis for axis, item in enumerate(key.tuple) if isinstance(item, np.ndarray)]
        if not lists or lists[-1] - lists[0] + 1 > len(lists):
            return found
        n_dims = np.ndim(key.tuple[lists[0]])
        return np.moveaxis(found, range(lists[0], lists[0] + n_dims), range(n_dims))

    async def async_getitem(self, key: indexing.ExplicitIndexer) -> npt.NDArray[np.generic]:
        """The same in a thread, for `load_async`."""
        return await asyncio.to_thread(self.__getitem__, key)

    def __dask_tokenize__(self) -> object:
        return self.store.__dask_tokenize__()


class LabelsArray(StoreArray):
    """The labels of content tokens as xarray indexes them; `labels.bin` is read, or mapped, when a value is needed."""

    def __init__(self, store: ShardStore) -> None:
        super().__init__(store)
        self.shape = (len(store), store.layout.content_tokens_per_example)
        self.dtype = np.dtype(np.uint8)

    def __getitem__(self, key: indexing.ExplicitIndexer) -> npt.NDArray[np.generic]:
        labels = np.asarray(self.store.labels)
        return indexing.explicit_indexing_adapter(
            key, self.shape, indexing.IndexingSupport.BASIC, lambda part: labels[part].copy()
        )


class SaevBackend(BackendEntrypoint):
    """xarray's back end for `engine="saev"`, and for the folder of a store opened without an engine."""

    description = "Stores of transformer activations (metadata.json, shards.json, acts000000.bin, …)"

    def guess_can_open(self, filename_or_obj: object) -> bool:
        """Whether this is the folder of a store on this machine; two files are looked up, no server is contacted."""
        if not isinstance(filename_or_obj, (str, os.PathLike)):
            return False
        path = cast("object", os.fspath(cast("str | os.PathLike[str]", filename_or_obj)))
        if not isinstance(path, str) or "://" in path:
            return False
        return all(os.path.isfile(os.path.join(path, name)) for name in (METADATA_NAME, SHARDS_NAME))

    def open_dataset(  # pyright: ignore[reportIncompatibleMethodOverride]  # it takes stores, not xarray's data stores
        self,
        filename_or_obj: str | os.PathLike[str] | ShardStore,
        *,
        drop_variables: str | Iterable[str] | None = None,
        storage_options: Mapping[str, object] | None = None,
        damaged_ok: bool = False,
    ) -> xarray.Dataset:
        """The dataset of one store, with no activation read.

        Args:
            filename_or_obj: The store's folder, any address that fsspec knows, or an opened store.
            drop_variables: Names to leave out.
            storage_options: What fsspec hands to the file system.
            damaged_ok: As in `ShardStore.open`.
        """
        store = filename_or_obj
        if not isinstance(store, ShardStore):
            store = ShardStore.open(store, storage_options, damaged_ok=damaged_ok)
        layout = store.layout
        n_content = layout.content_tokens_per_example
        variables = {
            ARRAY: xarray.Variable(DIMS, indexing.LazilyIndexedArray(StoreArray(store))),
            "layer": xarray.Variable("layer", np.array(layout.layers, dtype=np.int64)),
            "token": xarray.Variable("token", np.arange(-layout.n_special_tokens, n_content)),
        }
        if store.has_labels:
            variables[CONTENT] = xarray.Variable(CONTENT, np.arange(n_content))
            variables[LABELS] = xarray.Variable(("example", CONTENT), indexing.LazilyIndexedArray(LabelsArray(store)))
        for variable in variables.values():  # else xarray would make each variable one dask task
            if "example" in variable.dims:
                variable.encoding["preferred_chunks"] = {**variable.sizes, "example": task_lengths(layout)}
        left_out = {drop_variables} if isinstance(drop_variables, str) else set(drop_variables or ())
        # netCDF has neither objects nor booleans as attributes.
        attributes = {
            name: json.dumps(value) if isinstance(value, dict) else int(value) if isinstance(value, bool) else value
            for name, value in attributes_of(store.metadata, url=store.url).items()
        }
        dataset = xarray.Dataset(
            {name: variable for name, variable in variables.items() if name not in left_out}, attrs=attributes
        )
        dataset.encoding["source"] = store.url
        dataset.set_close(store.close)
        return dataset


def open_store(store: ShardStore, *, chunks: TaskSizes) -> xarray.Dataset:
    """A lazy dataset of the activations: what `ShardStore.as_xarray` gives.

    Args:
        store: The opened store.
        chunks: As in `xarray.open_dataset`: None reads without dask; `{}` makes dask arrays of few tasks that follow the
            shards. Names of tasks contain the recording identity.

    Raises:
        MissingDependencyError: xarray (or dask, with `chunks`) is not installed.
        DocumentError: `labels.bin` has another size than the documents imply.

    >>> from saev_store import ShardStore
    >>> dataset = ShardStore.open(SAMPLE).as_xarray()
    >>> dict(dataset.sizes)
    {'example': 7, 'layer': 3, 'token': 5, 'd_model': 8, 'content_token': 4}
    >>> dataset.activations.sel(layer=11, token=-1).shape
    (7, 8)
    """
    dataset = xarray.open_dataset(  # pyright: ignore[reportUnknownMemberType]  # partly annotated
        store,  # pyright: ignore[reportArgumentType]  # handed on to the back end as it is
        engine=SaevBackend,
        cache=chunks is None,
    )
    if chunks is None:
        return dataset
    try:
        from dask.base import tokenize
    except ImportError as error:
        raise MissingDependencyError(
            "dask is not installed", where="as_xarray", remedy="pip install 'saev_store[xarray]'"
        ) from error
    sizes = {"example": task_lengths(store.layout)} if chunks in ("auto", {}) else chunks
    try:
        return dataset.chunk(sizes, token=cast("str", tokenize(store)))  # pyright: ignore[reportUnknownMemberType, reportUnknownVariableType, reportArgumentType]  # partly annotated
    except ValueError as error:
        raise ArgumentError(f"{chunks!r} cannot be laid over {dict(dataset.sizes)}: {error}", where="chunks") from error
