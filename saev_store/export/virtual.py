"""Virtual datasets: the arrays of a store as VirtualiZarr manifests, and a parser for `virtualizarr.open_virtual_dataset`."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import TYPE_CHECKING

import numpy as np

from saev_store._runtime.optional import need
from saev_store.export._references import ArrayReferences, References, check_text, references
from saev_store.zarr import Chunks
from saev_store.zarr.documents import array_document

if TYPE_CHECKING:
    import xarray
    from obspec_utils.protocols import ReadableStore
    from obspec_utils.registry import ObjectStoreRegistry
    from virtualizarr.manifests import ManifestArray, ManifestStore

    from saev_store.store.store import ShardStore


def to_virtual_dataset(store: ShardStore, *, chunks: Chunks = "auto", base: str | None = None) -> xarray.Dataset:
    """A virtual dataset of a store: `activations` and `labels` as `ManifestArray`s, coordinates as NumPy arrays.

    Nothing is read but the store's documents. Arrays have the stored dtype. The dataset can be concatenated with others and written with
    `dataset.vz.to_icechunk` or `dataset.vz.to_kerchunk`. Each chunk is a range of one file.

    Args:
        store: An opened store without damage.
        chunks: Shape of a chunk of `activations`, as in `ShardStore.as_zarr`. The examples of the last shard must be a multiple
            of its first number. Default: chunks of about 1 MiB for which that holds.
        base: Address of the store's folder for readers; default: its address here.

    Raises:
        ArgumentError: `chunks` is not a legal shape, or the store has no address for other processes and `base` is missing.
        CorruptShardError: shards are missing or short; other readers would return fill values.
        MissingDependencyError: virtualizarr is not installed.
    """
    need("virtualizarr", install="saev-store[icechunk]", where="to_virtual_dataset")
    check_text(store, base)
    return virtual_dataset(references(store, chunks=chunks, base=base, inline=False))


def virtual_dataset(found: References) -> xarray.Dataset:
    """The dataset of an export. Chunks that are exported as bytes have no reference in it."""
    import xarray

    variables = {array.name: xarray.Variable(array.dims, manifest(array, found.base)) for array in found.arrays}
    coordinates = {name: xarray.Variable((name,), values) for name, values in found.coordinates.items()}
    return xarray.Dataset(variables, coords=coordinates, attrs=dict(found.attributes))


def manifest(array: ArrayReferences, base: str) -> ManifestArray:
    """An array with the byte ranges of its chunks; those that are exported as bytes have none."""
    from virtualizarr.manifests import ChunkManifest, ManifestArray
    from zarr.core.metadata.v3 import ArrayV3Metadata

    files, offsets = array.locate(np.arange(array.n_chunks))
    names = np.array([f"{base}/{name}" for name in array.files], dtype=np.dtypes.StringDType())
    paths, sizes = names[files], np.full(array.n_chunks, array.chunk_nbytes, dtype=np.uint64)
    for number in array.inline:
        paths[number], offsets[number], sizes[number] = "", 0, 0
    ranges = ChunkManifest.from_arrays(
        paths=paths.reshape(array.counts),  # pyright: ignore[reportArgumentType]  # variable-width strings, which the annotation does not know yet
        offsets=offsets.astype(np.uint64).reshape(array.counts),
        lengths=sizes.reshape(array.counts),
        validate_paths=False,
    )
    document = array_document(array.data_type, array.shape, array.chunk, array.dims)
    return ManifestArray(
        metadata=ArrayV3Metadata.from_dict(dict(document)),  # pyright: ignore[reportUnknownMemberType]  # a dict without types
        chunkmanifest=ranges,
    )


class SaevParser:
    """A parser for `virtualizarr.open_virtual_dataset`: opens the store at a URL and describes its arrays.

    Implements `virtualizarr.parsers.typing.Parser`. The registry reads the chunks; the documents are read through this package,
    with `storage_options`. The coordinates `layer` and `token` are not virtual: VirtualiZarr 2.5 has no manifests of values.
    `ShardStore.to_virtual_dataset` gives them too, and needs no registry.

    Args:
        chunks: As in `to_virtual_dataset`.
        skip_variables: Names of arrays to leave out.
        storage_options: For opening the store, as in `ShardStore.open`.

    Example:
        ```python
        from obspec_utils.registry import ObjectStoreRegistry
        from obstore.store import LocalStore
        from virtualizarr import open_virtual_dataset

        registry = ObjectStoreRegistry({"file://": LocalStore()})
        dataset = open_virtual_dataset("file:///data/shards/0a1b…", registry, SaevParser())
        ```
    """

    def __init__(
        self,
        *,
        chunks: Chunks = "auto",
        skip_variables: Iterable[str] = (),
        storage_options: Mapping[str, object] | None = None,
    ) -> None:
        need("virtualizarr", install="saev-store[icechunk]", where="SaevParser")
        self._chunks: Chunks = chunks
        self._skipped, self._options = frozenset(skip_variables), storage_options

    def __call__(self, url: str, registry: ObjectStoreRegistry[ReadableStore]) -> ManifestStore:
        """The arrays of the store at `url`, which `registry` reads.

        Raises:
            ArgumentError, CorruptShardError: as in `to_virtual_dataset`.
            NotFoundError: there is no store at `url`.
        """
        from virtualizarr.manifests import ManifestGroup, ManifestStore

        from saev_store.store import ShardStore

        with ShardStore.open(url, storage_options=self._options) as store:
            found = references(store, chunks=self._chunks, base=url, inline=False)
        arrays = {array.name: manifest(array, found.base) for array in found.arrays if array.name not in self._skipped}
        return ManifestStore(ManifestGroup(arrays=arrays, attributes=dict(found.attributes)), registry=registry)
