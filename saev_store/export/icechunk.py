"""Icechunk repositories whose chunks are ranges of the shards (virtual references), written through VirtualiZarr."""

from __future__ import annotations

from typing import TYPE_CHECKING
from urllib.parse import quote, urlsplit

import numpy as np

from saev_store._runtime.optional import need
from saev_store.errors import ArgumentError, StoreExistsError
from saev_store.export._references import ArrayReferences, References, references, warn_if_many
from saev_store.zarr import Chunks
from saev_store.zarr.documents import array_document

if TYPE_CHECKING:
    import icechunk
    import xarray

    from saev_store.store.store import ShardStore

_BRANCH = "main"


def write_icechunk(
    store: ShardStore,
    target: str | icechunk.Storage,
    *,
    chunks: Chunks = "auto",
    base: str | None = None,
    container: icechunk.VirtualChunkContainer | None = None,
) -> str:
    """Create an Icechunk repository whose chunks are ranges of the shards; returns the commit's id.

    Args:
        store: The opened store.
        target: A new folder, an `s3://` or `gs://` URL (credentials from the environment), or an `icechunk.Storage`.
        chunks: As in `write_kerchunk`.
        base: As in `write_kerchunk`.
        container: How Icechunk reads the shards; default: by the scheme of `base`.

    Raises:
        ArgumentError: `chunks` is not a legal shape, or Icechunk cannot read `base` or write to `target`.
        CorruptShardError: shards are missing or short.
        MissingDependencyError: icechunk or virtualizarr is not installed.
        StoreExistsError: the repository exists.
    """
    for library in ("icechunk", "virtualizarr"):
        need(library, install="saev-store[icechunk]", where="to_icechunk")
    import icechunk

    found = references(store, chunks=chunks, base=base)
    if quote(found.base, safe=":/") != found.base:
        raise ArgumentError(
            f"{found.base!r} has characters that URLs escape; Icechunk finds no chunk in such a folder",
            where="base",
            remedy="Name the store by another path, such as a symbolic link.",
        )
    warn_if_many(found, what="manifests")
    container = container or _container(found.base)
    config = icechunk.RepositoryConfig.default()
    config.set_virtual_chunk_container(container)
    storage = _storage(target) if isinstance(target, str) else target
    if icechunk.Repository.exists(storage):
        raise StoreExistsError("the repository already exists", where=str(target), remedy="Name a new folder.")
    dataset = _dataset(found)
    repository = icechunk.Repository.create(storage, config=config)
    repository.save_config()
    session = repository.writable_session(_BRANCH)
    _write(dataset, found, session.store)
    return session.commit(f"References to the shards of {found.base}")


def _write(dataset: xarray.Dataset, found: References, target: icechunk.IcechunkStore) -> None:
    import zarr
    from virtualizarr.writers.icechunk import virtual_dataset_to_icechunk

    virtual_dataset_to_icechunk(dataset, target)
    for array in found.arrays:
        for number, data in array.inline.items():
            # A short chunk is copied into the repository.
            starts = [int(at) * n for at, n in zip(np.unravel_index(number, array.counts), array.chunk, strict=True)]
            ends = [min(at + n, full) for at, n, full in zip(starts, array.chunk, array.shape, strict=True)]
            values = np.frombuffer(data, np.dtype(array.data_type).newbyteorder("<")).reshape(array.chunk)
            there = tuple(slice(a, b) for a, b in zip(starts, ends, strict=True))
            here = tuple(slice(b - a) for a, b in zip(starts, ends, strict=True))
            opened = zarr.open_array(target, path=array.name, mode="r+")  # pyright: ignore[reportUnknownMemberType]  # a partial type
            opened[there] = values[here]


def _dataset(found: References) -> xarray.Dataset:
    import xarray

    variables = {array.name: xarray.Variable(array.dims, _manifest(array, found.base)) for array in found.arrays}
    coordinates = {name: xarray.Variable((name,), values) for name, values in found.coordinates.items()}
    return xarray.Dataset(variables, coords=coordinates, attrs=dict(found.attributes))


def _manifest(array: ArrayReferences, base: str) -> object:
    from virtualizarr.manifests import ChunkManifest, ManifestArray
    from zarr.core.metadata.v3 import ArrayV3Metadata

    files, offsets = array.locate(np.arange(array.n_chunks))
    names = np.array([f"{base}/{name}" for name in array.files], dtype=np.dtypes.StringDType())
    paths, sizes = names[files], np.full(array.n_chunks, array.chunk_nbytes, dtype=np.uint64)
    for number in array.inline:
        # Without references; `_write` adds them.
        paths[number], offsets[number], sizes[number] = "", 0, 0
    manifest = ChunkManifest.from_arrays(
        paths=paths.reshape(array.counts),  # pyright: ignore[reportArgumentType]  # variable-width strings, which the annotation does not know yet
        offsets=offsets.astype(np.uint64).reshape(array.counts),
        lengths=sizes.reshape(array.counts),
        validate_paths=False,
    )
    document = array_document(array.data_type, array.shape, array.chunk, array.dims)
    return ManifestArray(
        metadata=ArrayV3Metadata.from_dict(dict(document)),  # pyright: ignore[reportUnknownMemberType]  # a dict without types
        chunkmanifest=manifest,
    )


def _container(base: str) -> icechunk.VirtualChunkContainer:
    """A container that allows reading below the store's folder, with credentials of the environment."""
    import icechunk

    prefix, parts = f"{base}/", urlsplit(base)
    match parts.scheme:
        case "file":
            return icechunk.VirtualChunkContainer(prefix, icechunk.local_filesystem_store(parts.path))
        case "s3":
            return icechunk.VirtualChunkContainer(prefix, icechunk.s3_store())
        case "gs" | "gcs":
            return icechunk.VirtualChunkContainer(prefix, icechunk.gcs_store())
        case "http" | "https":
            return icechunk.VirtualChunkContainer(prefix, icechunk.http_store())
        case _:
            raise ArgumentError(
                f"Icechunk has no reader for {base!r}",
                where="base",
                remedy="Pass a VirtualChunkContainer as `container`.",
            )


def _storage(target: str) -> icechunk.Storage:
    import icechunk

    parts = urlsplit(target)
    path = parts.path.strip("/")
    match parts.scheme:
        case "" | "file":
            return icechunk.local_filesystem_storage(target.removeprefix("file://"))
        case "s3":
            return icechunk.s3_storage(bucket=parts.netloc, prefix=path, from_env=True)
        case "gs" | "gcs":
            return icechunk.gcs_storage(bucket=parts.netloc, prefix=path, from_env=True)
        case _:
            raise ArgumentError(
                f"Icechunk cannot write to {target!r}", where="target", remedy="Pass an icechunk.Storage of your own."
            )
