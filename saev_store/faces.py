"""The other faces of a store: the same tensor for the tools of array people. Each loads its library when it is asked for."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Literal, cast

if TYPE_CHECKING:
    import dask.array
    import xarray

    from saev_store.store import ShardStore
    from saev_store.zarr import ZarrView


class Faces:
    """What `ShardStore` inherits: `as_zarr`, `as_xarray`, `as_dask`."""

    def as_zarr(
        self, *, chunks: Literal["auto"] | Sequence[int] = "auto", sharded: Literal["auto"] | bool = "auto"
    ) -> ZarrView:
        """A read-only Zarr store: `activations`, its coordinates `layer` and `token`, and `labels` where they exist.

        Nothing is copied, rewritten or listed: each chunk is a range of bytes of a shard.

        Args:
            chunks: Shape of a chunk over (example, layer, token, d_model). `"auto"` takes what suits the transport:
                many whole examples of a local store, single layers of single examples elsewhere. Axes left of one pivot
                have length 1, axes right of it are whole, and the length on the pivot divides its axis.
            sharded: Make each shard one key with `chunks` as its inner chunks, which are then read many at a time.
                `"auto"` does so far away, if zarr is 3.3 or newer; before, it cannot.

        Raises:
            ArgumentError: `chunks` is no such shape (the message has the nearest ones), or zarr is too old for `sharded`.
            DocumentError: `labels.bin` has another size than the documents imply.

        >>> import zarr
        >>> from saev_store import ShardStore
        >>> group = zarr.open_group(ShardStore.open(SAMPLE).as_zarr(), mode="r")
        >>> group["activations"][2:4, 0, 1].shape, group["layer"][:].tolist()
        ((2, 8), [2, 5, 11])
        """
        from saev_store.zarr import open_view

        return open_view(cast("ShardStore", self), chunks=chunks, sharded=sharded)

    def as_xarray(
        self,
        *,
        chunks: Mapping[str, object] | Literal["auto"] | int | None = None,
        zarr_chunks: Literal["auto"] | Sequence[int] = "auto",
        sharded: Literal["auto"] | bool = "auto",
    ) -> xarray.Dataset:
        """A lazy `xarray.Dataset` of the activations with dimension names, layer labels and token numbers (-1 is CLS).

        Args:
            chunks: As in `xarray.open_dataset`: None reads without dask when it is asked for values, `{}` makes dask arrays
                of few tasks that follow the shards.
            zarr_chunks: `chunks` of `as_zarr`.
            sharded: As in `as_zarr`.

        Raises:
            MissingDependencyError: xarray (or dask, with `chunks`) is not installed.
        """
        from saev_store.xarray import open_store

        return open_store(cast("ShardStore", self), chunks=chunks, zarr_chunks=zarr_chunks, sharded=sharded)

    def as_dask(self, *, chunks: Literal["auto"] | Sequence[object] = "auto") -> dask.array.Array:
        """A lazy `dask.array.Array` of the tensor. Its tasks read through this store, so slices fetch only what they keep.

        Blocks of a local store are read-only views of the mapped file: copy before changing one in place.

        Args:
            chunks: As dask takes them; `"auto"` follows the shards, in tasks of about 128 MiB.

        Raises:
            MissingDependencyError: dask is not installed.
        """
        from saev_store.dask import from_store

        return from_store(cast("ShardStore", self), chunks=chunks)
