"""The tensor as an `xarray.Dataset`, and `engine="saev"`: a thin layer over xarray's own Zarr back end.

`xr.open_dataset(url, engine="saev", storage_options=…)` works wherever the package is installed, without importing it.
"""

from __future__ import annotations

import os
from collections.abc import Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Literal, cast

from saev_store.core.chunk_grid import task_lengths
from saev_store.dask import from_store
from saev_store.errors import MissingDependencyError
from saev_store.names import METADATA_NAME, SHARDS_NAME
from saev_store.store.store import ShardStore
from saev_store.zarr import ARRAY, TensorKeys, open_view

try:
    import xarray
    from xarray.backends import BackendEntrypoint
except ImportError as error:
    raise MissingDependencyError(
        "xarray is not installed", where="as_xarray", remedy="pip install 'saev_store[xarray]'"
    ) from error

if TYPE_CHECKING:
    from saev_store.store.store import TaskSizes
    from saev_store.zarr import Chunks, Sharded


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
        zarr_chunks: Chunks = "auto",
        sharded: Sharded = "auto",
    ) -> xarray.Dataset:
        """The dataset of one store, with no activation read.

        Args:
            filename_or_obj: The store's folder, any address that fsspec knows, or an opened store.
            drop_variables: Names to leave out.
            storage_options: What fsspec hands to the file system.
            damaged_ok: As in `ShardStore.open`.
            zarr_chunks: `chunks` of `ShardStore.as_zarr`; xarray's own `chunks` are dask's.
            sharded: As in `ShardStore.as_zarr`.
        """
        if isinstance(filename_or_obj, ShardStore):
            store = filename_or_obj
        else:
            store = ShardStore.open(filename_or_obj, storage_options, damaged_ok=damaged_ok)
        view = open_view(store, chunks=zarr_chunks, sharded=sharded)
        # Values stay as stored: no masking, scaling or decoding of dates.
        dataset = xarray.open_zarr(  # pyright: ignore[reportUnknownMemberType]  # partly annotated
            view,
            chunks=None,
            consolidated=True,
            drop_variables=drop_variables,
            mask_and_scale=False,
            decode_times=False,
        )
        _hint(dataset, view.keys.grid.chunk[0] if isinstance(view.keys, TensorKeys) else 1, store)
        dataset.encoding["source"] = store.url
        return dataset


def open_store(
    store: ShardStore,
    *,
    chunks: TaskSizes,
    zarr_chunks: Literal["auto"] | Sequence[int],
    sharded: Sharded,
) -> xarray.Dataset:
    """A lazy dataset of the activations: what `ShardStore.as_xarray` gives.

    Args:
        store: The opened store.
        chunks: As in `xarray.open_dataset`: None reads without dask; `{}` makes dask arrays of few tasks that follow the
            shards and read through the store, as those of `ShardStore.as_dask` do.
        zarr_chunks: `chunks` of `saev_store.zarr.open_view`.
        sharded: As in `saev_store.zarr.open_view`.

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
    take_hints = chunks is None or chunks in ("auto", {})
    dataset = xarray.open_dataset(  # pyright: ignore[reportUnknownMemberType]  # partly annotated
        store,  # pyright: ignore[reportArgumentType]  # handed on to the back end as it is
        engine=SaevBackend,
        chunks=chunks if take_hints else None,
        cache=chunks is None,
        zarr_chunks=zarr_chunks,
        sharded=sharded,
    )
    if not take_hints:
        # Chunked afterwards: given sizes would make xarray warn that they differ from the hints.
        dataset = dataset.chunk(chunks)  # pyright: ignore[reportUnknownMemberType]  # partly annotated
    if chunks is None:
        return dataset
    # The same tasks, read through the store itself: requests are merged there.
    activations = dataset[ARRAY]
    return dataset.assign({ARRAY: activations.copy(data=from_store(store, chunks=activations.data.chunks))})


def _hint(dataset: xarray.Dataset, multiple_of: int, store: ShardStore) -> None:
    """Tell xarray what a good dask task is; else each Zarr chunk would be one."""
    lengths = task_lengths(store.layout, multiple_of=multiple_of)
    for variable in dataset.variables.values():
        sizes = dict(zip(variable.dims, variable.shape, strict=True))
        if "example" in sizes:
            variable.encoding["preferred_chunks"] = {**sizes, "example": lengths}
