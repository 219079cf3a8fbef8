"""Virtual datasets: the arrays of a store as VirtualiZarr manifests, and a parser for `virtualizarr.open_virtual_dataset`.

Other readers do not pad, so every chunk is a whole range of one file: numbers of examples in a chunk divide those of the last
shard, too.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from typing import TYPE_CHECKING

import numpy as np

from saev_store._runtime.optional import need
from saev_store.core.chunk_grid import ChunkShape, Shape, chunk_shape, divisors
from saev_store.core.layout import Layout, shard_name
from saev_store.errors import ArgumentError, brief
from saev_store.zarr.arrays import ChunkedArray, stored_arrays
from saev_store.zarr.documents import attributes_of, coordinates, token_variables

if TYPE_CHECKING:
    import xarray
    from obspec_utils.protocols import ReadableStore
    from obspec_utils.registry import ObjectStoreRegistry
    from virtualizarr.manifests import ManifestArray, ManifestStore

    from saev_store.store.store import ShardStore

#: Readers make a request for each chunk, so chunks suit remote stores.
_CHUNK_BYTES = 1 << 20


def to_virtual_dataset(store: ShardStore, *, chunks: ChunkShape = "auto", base: str | None = None) -> xarray.Dataset:
    """Implements `ShardStore.to_virtual_dataset`: `activations` and token arrays as `ManifestArray`s, coordinates as NumPy arrays.

    Nothing is read but the store's documents. Arrays have the stored dtype. The dataset can be concatenated with others and written
    with VirtualiZarr's `dataset.vz.to_icechunk` or `dataset.vz.to_kerchunk`. It is valid as long as the shards keep their address.

    Args:
        store: An opened store without damage.
        chunks: Shape of a chunk of `activations`, as in `ShardStore.as_zarr`. Its number of examples must divide those of the
            last shard; token arrays are cut into as many examples. Default: chunks of about 1 MiB.
        base: Address of the store's folder for readers; default: its address here.

    Raises:
        ArgumentError: `chunks` is not a legal shape, or the store has no address for other processes and `base` is missing.
        CorruptShardError: shards are missing or short; other readers would return fill values.
        MissingDependencyError: virtualizarr is not installed.
    """
    arrays = _manifests(store, chunks, _address(store, base), where="to_virtual_dataset")
    import xarray

    variables = {name: xarray.Variable(array.metadata.dimension_names, array) for name, array in arrays.items()}
    values = coordinates(store.layout, labelled=len(arrays) > 1)
    return xarray.Dataset(
        variables,
        coords={name: xarray.Variable((name,), each) for name, each in values.items()},
        attrs=dict(attributes_of(store.metadata, url=_address(store, base))),
    )


class SaevParser:
    """A parser for `virtualizarr.open_virtual_dataset`: opens the store at a URL and describes its arrays.

    The registry reads the chunks; the documents are read through this package, with `storage_options`. VirtualiZarr has no
    manifests of values, so the coordinates `layer` and `token` are left out; `ShardStore.to_virtual_dataset` has them.

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
        chunks: ChunkShape = "auto",
        skip_variables: Iterable[str] = (),
        storage_options: Mapping[str, object] | None = None,
    ) -> None:
        self._chunks: ChunkShape = chunks
        self._skipped, self._options = frozenset(skip_variables), storage_options

    def __call__(self, url: str, registry: ObjectStoreRegistry[ReadableStore]) -> ManifestStore:
        """The arrays of the store at `url`, which `registry` reads.

        Raises:
            ArgumentError, CorruptShardError, MissingDependencyError: as in `to_virtual_dataset`.
            NotFoundError: `url` does not hold a store.
        """
        from saev_store.store import ShardStore

        with ShardStore.open(url, storage_options=self._options) as store:
            arrays = _manifests(store, self._chunks, url.rstrip("/"), where="SaevParser")
            attributes = dict(attributes_of(store.metadata, url=url))
        from virtualizarr.manifests import ManifestGroup, ManifestStore

        kept = {name: array for name, array in arrays.items() if name not in self._skipped}
        return ManifestStore(ManifestGroup(arrays=kept, attributes=attributes), registry=registry)


def _manifests(store: ShardStore, chunks: ChunkShape, base: str, *, where: str) -> dict[str, ManifestArray]:
    """The arrays of a store by name, with the ranges of their chunks."""
    need("virtualizarr", install="virtualizarr", where=where)
    store.validate(progress=False).raise_if_bad()
    layout, tokens = store.layout, token_variables(store.token_arrays.described())
    chunk = _whole_chunk(layout, chunks)
    n_divisors = divisors(layout.n_examples)
    rows = {
        name: chunk[0] if chunks != "auto" else _largest(n_divisors, _CHUNK_BYTES // array.example_nbytes(layout))
        for name, array in tokens.items()
    }
    arrays = stored_arrays(layout, chunk, tokens, dtype=layout.dtype, token_rows=rows)
    return {name: _manifest(array, base) for name, array in arrays.items()}


def _whole_chunk(layout: Layout, chunks: ChunkShape) -> Shape:
    """The shape of a chunk of which the last shard has a whole number.

    Raises:
        ArgumentError: it has not.
    """
    shape = chunk_shape(layout, chunks, max_gap_bytes=_CHUNK_BYTES)
    n_last = layout.examples_in(layout.n_shards - 1)
    if n_last % shape[0] == 0:
        return shape
    common = n_last if layout.n_shards == 1 else math.gcd(n_last, layout.examples_per_shard)
    whole = _largest(divisors(common), shape[0])
    if chunks != "auto":
        raise ArgumentError(
            f"chunks of {shape[0]} examples do not divide the last shard, which has {n_last}",
            where="chunks",
            remedy=f"Take {whole} examples.",
        )
    return (whole, *shape[1:])


def _largest(numbers: list[int], most: int) -> int:
    return max((n for n in numbers if n <= most), default=1)


def _manifest(array: ChunkedArray, base: str) -> ManifestArray:
    """An array with the byte ranges of its chunks."""
    from virtualizarr.manifests import ChunkManifest, ManifestArray
    from zarr.core.metadata.v3 import ArrayV3Metadata

    n_chunks = math.prod(array.counts)
    files, starts = np.divmod(np.arange(n_chunks, dtype=np.int64) * array.chunk_nbytes, array.file_nbytes)
    paths = np.array(
        [f"{base}/{array.file_name or shard_name(number)}" for number in range(int(files[-1]) + 1)],
        dtype=np.dtypes.StringDType(),
    )
    ranges = ChunkManifest.from_arrays(
        paths=paths[files].reshape(array.counts),  # pyright: ignore[reportArgumentType]  # variable-width strings, which the annotation does not know yet
        offsets=starts.astype(np.uint64).reshape(array.counts),
        lengths=np.full(array.counts, array.chunk_nbytes, dtype=np.uint64),
        validate_paths=False,
    )
    metadata = ArrayV3Metadata.from_dict(dict(array.document))  # pyright: ignore[reportUnknownMemberType]  # a dict without types
    return ManifestArray(metadata=metadata, chunkmanifest=ranges)


def _address(store: ShardStore, base: str | None) -> str:
    """The address of the store's folder for readers, without a slash at its end.

    Raises:
        ArgumentError: there is none.
    """
    if base is None and ("::" in store.url or store.url.startswith("memory://")):
        raise ArgumentError(
            f"{store.url!r} has no meaning for other processes",
            where="base",
            remedy="Pass the address for readers, such as base='s3://bucket/shards/<HASH>'.",
        )
    if base is not None and (not isinstance(base, str) or not base.strip("/")):  # pyright: ignore[reportUnnecessaryIsInstance]  # callers may not check types
        raise ArgumentError(f"{brief(base)} is not an address of a store's folder", where="base")
    return (base or f"{'file://' if store.url.startswith('/') else ''}{store.url}").rstrip("/")
