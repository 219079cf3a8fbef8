"""The other faces of a store: the same tensor for the tools of array people. Each loads its library when it is asked for."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Literal, cast

if TYPE_CHECKING:
    import dask.array
    import distributed
    import icechunk
    import xarray

    from saev_store.formats import Source
    from saev_store.formats.provenance import Origin
    from saev_store.stats import Stats
    from saev_store.store import ShardStore
    from saev_store.zarr import ZarrView

#: What xarray takes for `chunks`.
TaskSizes = Mapping[str, int | tuple[int, ...] | Literal["auto"]] | Literal["auto"] | int | None


class Faces:
    """What `ShardStore` inherits: `as_zarr`, `as_xarray`, `as_dask`, exports, and statistics."""

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
        chunks: TaskSizes = None,
        zarr_chunks: Literal["auto"] | Sequence[int] = "auto",
        sharded: Literal["auto"] | bool = "auto",
    ) -> xarray.Dataset:
        """A lazy `xarray.Dataset` of the activations with dimension names, layer labels and token numbers (-1 is CLS).

        Args:
            chunks: As in `xarray.open_dataset`: None reads without dask when it is asked for values, `{}` makes dask arrays
                of few tasks that follow the shards and read through this store, as those of `as_dask` do.
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

    def to_kerchunk(
        self,
        path: str | os.PathLike[str],
        *,
        format: Literal["json", "parquet"] = "json",
        chunks: Literal["auto"] | Sequence[int] = "auto",
        base: str | None = None,
        storage_options: Mapping[str, object] | None = None,
    ) -> None:
        """Write references that fsspec's `reference://` reads, and so zarr and xarray where this package is unknown.

        Args:
            path: The JSON document, or the folder of Parquet files (new, or an earlier export); any fsspec URL.
            format: One JSON document, relocated by its template `u`; or Parquet, for very many references.
            chunks: As in `as_zarr`; `"auto"` cuts as `as_zarr` does far away, with no chunk larger than is worth a request.
            base: Where readers will find the store's folder; default: its address here. With `""` Parquet files name only
                the shards, for readers that bring a file system of their own.
            storage_options: For writing to `path`.

        Raises:
            ArgumentError: `chunks` is no legal shape, or the store has no address that others could use.
            CorruptShardError: shards are missing or short.
            MissingDependencyError: `"parquet"` without fastparquet.
            StoreExistsError: the folder holds something else.

        Warns:
            SaevStoreWarning: there are a million references or more.
        """
        from saev_store.export import write_kerchunk

        write_kerchunk(
            cast("ShardStore", self),
            os.fspath(path),
            format=format,
            chunks=chunks,
            base=base,
            storage_options=storage_options,
        )

    def to_icechunk(
        self,
        target: str | os.PathLike[str] | icechunk.Storage,
        *,
        chunks: Literal["auto"] | Sequence[int] = "auto",
        base: str | None = None,
        container: icechunk.VirtualChunkContainer | None = None,
    ) -> str:
        """Create an Icechunk repository whose chunks are ranges of the shards; returns the commit's id.

        Args:
            target: A new folder, an `s3://` or `gs://` URL (credentials from the environment), or an `icechunk.Storage`.
            chunks: As in `to_kerchunk`.
            base: As in `to_kerchunk`.
            container: What lets Icechunk read the shards; default: what suits `base`.

        Raises:
            ArgumentError: `chunks` is no legal shape, or Icechunk cannot read `base` or write to `target`.
            CorruptShardError: shards are missing or short.
            MissingDependencyError: icechunk or virtualizarr is not installed.
            StoreExistsError: a repository is there already.
        """
        from saev_store.export import write_icechunk

        where = os.fspath(target) if isinstance(target, (str, os.PathLike)) else target
        return write_icechunk(cast("ShardStore", self), where, chunks=chunks, base=base, container=container)

    def to_tensorstore_spec(
        self, array: str = "activations", *, base: str | Mapping[str, object] | None = None
    ) -> dict[str, object]:
        """What `tensorstore.open` takes to read one array: plain JSON types, each shard as one chunk.

        Args:
            array: `"activations"`, `"layer"`, `"token"`, and where there are labels `"labels"` and `"content_token"`.
            base: Where readers will find the store's folder: an address, or TensorStore's own JSON for it (a kvstore).

        Raises:
            ArgumentError: there is no such array, or TensorStore has no driver for the address.
            CorruptShardError: shards are missing or short.

        >>> from saev_store import ShardStore
        >>> spec = ShardStore.open(SAMPLE).to_tensorstore_spec("token")
        >>> spec["array"]
        [-1, 0, 1, 2, 3]
        """
        from saev_store.export import tensorstore_spec

        return tensorstore_spec(cast("ShardStore", self), array, base=base)

    def source(
        self,
        storage_options: Mapping[str, object] | None = None,
        *,
        url: str | os.PathLike[str] | None = None,
        outside_ok: bool = False,
    ) -> Source[object]:
        """The data set that this store was recorded from, opened, once its digest was compared.

        Args:
            storage_options: What fsspec hands to the file system of the data set.
            url: Where the data set is now, if not where it was.
            outside_ok: Send requests to the server that the metadata name; paths of this machine need no permission.

        Raises:
            UnsafeContentError: the metadata name a server, and neither `url` nor `outside_ok` is given.
            DocumentError: `metadata.data` names no source; see `saev_store.formats.recorded_from`.
            NotFoundError: there is nothing at its address any more.
            CorruptShardError: other data lie there by now.
        """
        from saev_store.formats.provenance import source_of

        return source_of(cast("ShardStore", self).metadata, storage_options, url=url, outside_ok=outside_ok)

    def origin(
        self,
        example_idx: int,
        token_idx: int | None = None,
        *,
        source: Source[object] | None = None,
        neighbours: int = 8,
    ) -> Origin:
        """The sample that a vector comes from and the place in it: a token with its neighbours, or the box of a patch.

        Args:
            example_idx: Position of the example, such as `batch["example_idx"]` has it.
            token_idx: The content token; -1 is CLS. None for the example as a whole.
            source: What `source()` gave; default: `source()`, called once. Where that needs arguments, call it yourself.
            neighbours: So many tokens of a text to each side.

        Raises:
            SelectionError: there is no such example or token.
            DocumentError, NotFoundError, CorruptShardError, UnsafeContentError: as `source`.
        """
        from saev_store.formats.provenance import origin_of

        if source is None:
            source = self.__dict__.get("_source")
            if source is None:
                source = self.__dict__["_source"] = self.source()
        return origin_of(cast("ShardStore", self).metadata, source, example_idx, token_idx, neighbours=neighbours)

    def stats(
        self,
        *,
        sample: int | None = None,
        seed: int = 0,
        client: distributed.Client | str | None = None,
        refresh: bool = False,
        save: bool = True,
        progress: bool | None = None,
    ) -> Stats:
        """Count, mean, std, mean norm, min, max, zeros and non-finite values for each layer and token position.

        Computed with dask in float64, holding some tens of MiB for each worker. They are kept beside the store as
        `stats.json` where that may be written, and read from there the next time.

        Args:
            sample: Look at so many examples only, drawn without repeats; statistics of all examples that lie beside the
                store are preferred.
            seed: Of the sample.
            client: A `distributed.Client`, or the address of a scheduler whose workers can read the store. Default: the
                active client, if there is one, else threads of this process.
            refresh: Compute anew what is kept.
            save: Keep the result beside the store.
            progress: Show a bar on stderr; default: when it is a terminal.

        Raises:
            ArgumentError: the sample is no positive number.
            CorruptShardError: a shard is missing or short.
            MissingDependencyError: dask (or distributed, with `client`) is not installed.
            TransportError: no scheduler answers.

        Warns:
            SaevStoreWarning: what is kept is broken or about another store; it is replaced.

        >>> from saev_store import ShardStore
        >>> stats = ShardStore.open(SAMPLE).stats(save=False)
        >>> stats.mean_norm.shape, int(stats.count[0, 0])
        ((3, 5), 56)
        """
        from saev_store.stats import store_stats

        return store_stats(
            cast("ShardStore", self),
            sample=sample,
            seed=seed,
            client=client,
            refresh=refresh,
            save=save,
            progress=progress,
        )
