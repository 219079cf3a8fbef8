"""`ZarrView`: a read-only `zarr.abc.store.Store` whose values are byte ranges of shards.

Zarr calls from event loops: its own, in a thread of its own, or the caller's. Views of mapped memory are returned directly;
other reads are awaited.
"""

from __future__ import annotations

import asyncio
import math
from collections.abc import AsyncIterator, Iterable
from typing import TYPE_CHECKING

import numpy as np
from zarr.abc.store import ByteRequest, OffsetByteRequest, RangeByteRequest, Store, SuffixByteRequest
from zarr.core.buffer import Buffer, BufferPrototype, default_buffer_prototype

from saev_store.core.chunk_grid import ChunkShape, chunk_shape
from saev_store.core.dtypes import FLOAT32, ReadDtype, converted, numpy_dtype, read_dtype
from saev_store.core.layout import shard_name
from saev_store.errors import ArgumentError, CorruptShardError, NotFoundError, brief
from saev_store.names import printable
from saev_store.store.token_arrays import check_values, find_token_array
from saev_store.transport import Buffer as Bytes
from saev_store.transport import Transport
from saev_store.zarr.arrays import Extent, TensorKeys, stored_arrays
from saev_store.zarr.documents import attributes_of, token_variables

if TYPE_CHECKING:
    from saev_store.store.store import ShardStore

#: A chunk of a token array has at most about this size.
_TOKEN_CHUNK_BYTES = 16 << 20


def open_view(store: ShardStore, *, chunks: ChunkShape = "auto", dtype: ReadDtype = "float32") -> ZarrView:
    """Implements `ShardStore.as_zarr`: a read-only Zarr store over a store's shards.

    Args:
        store: The opened store.
        chunks: Shape of a chunk over (example, layer, token, d_model): some whole examples, or some layers of one example.
            `"auto"` suits the transport: many whole examples of a local store, single layers of single examples elsewhere.
        dtype: "float32", to which a view of a 16-bit store converts what it reads, or "stored", without copying. The data
            type of stored bfloat16 is that of the zarr-extensions registry, `saev_store.zarr.BFloat16`.

    Raises:
        ArgumentError: `dtype` is neither float32 nor what is stored, or `chunks` is not such a shape (the remedy has the rule).
        DocumentError: `labels.bin` has another size than the documents imply (those that documents declare are compared when a
            chunk is read).
    """
    store.check_wide()
    layout = store.layout
    shown = read_dtype(dtype, layout.dtype).name
    if shown not in {"float32", layout.dtype}:
        raise ArgumentError(
            f"dtype is {brief(dtype)}; the view shows float32, or what is stored, which is {layout.dtype} here",
            where="dtype",
            remedy="Use float32, which holds every number of 16 bits exactly.",
        )
    shape = chunk_shape(layout, chunks, max_gap_bytes=store.transport.cost.max_gap_bytes)
    tokens = token_variables(store.token_arrays.described())
    most = min(layout.n_examples, layout.examples_per_shard)
    rows = {
        name: max(1, min(most, _TOKEN_CHUNK_BYTES // array.example_nbytes(layout))) for name, array in tokens.items()
    }
    arrays = stored_arrays(layout, shape, tokens, dtype=shown, token_rows=rows)
    files = {array.file_name: array for array in tokens.values()}
    readable = {shard_name(shard_idx): n * layout.example_nbytes for shard_idx, n in store.readable_examples.items()}
    attributes = attributes_of(store.metadata, url=store.url)
    return ZarrView(store.transport, TensorKeys(layout, arrays, files, attributes, readable))


class ZarrView(Store):
    """The tensor of a store, its coordinates and token arrays as a Zarr v3 group; made by `store.as_zarr()`.

    Values are verified by length when they are read: a shard that is missing or short raises `CorruptShardError`, and
    never reads as fill values. A token array whose file has another size than the documents imply raises `DocumentError`;
    so does one of bools that holds something other than 0 and 1. Picklable; may be shared between threads, and with forked
    children where the transport may.

    Args:
        transport: Where the shards are.
        keys: The keys and the places of their values.
    """

    def __init__(self, transport: Transport, keys: TensorKeys) -> None:
        super().__init__(read_only=True)
        self._transport = transport
        self._keys = keys
        #: Files of token arrays whose sizes were compared.
        self._compared: set[str] = set()
        self._is_mapped = math.isinf(transport.cost.max_gap_bytes)

    # -- reading -------------------------------------------------------------------------------------------------------

    async def get(
        self, key: str, prototype: BufferPrototype | None = None, byte_range: ByteRequest | None = None
    ) -> Buffer | None:
        """The value of a key, or a part of it, or None if there is no such key; a view where memory is mapped.

        Raises:
            CorruptShardError: the file is missing, or ends before the value does.
            DocumentError: the file of a token array has another size than the documents imply, or holds no bools.
            ValueError: `byte_range` is not a byte request.
        """
        value = self._keys.find(key)
        if value is None:
            return None
        if isinstance(value, bytes):
            found: Bytes = value if byte_range is None else value[_bounds(byte_range, len(value))]
        else:
            found = await self._read(value, byte_range)
        return (prototype or default_buffer_prototype()).buffer.from_bytes(found)  # no copy, except to a GPU

    async def _read(self, extent: Extent, part: ByteRequest | None) -> Bytes:
        """A part of a chunk as readers see it: with the zeros after its end, converted."""
        path, nbytes = extent.path, extent.nbytes
        array = self._keys.token_arrays.get(path)
        if array is not None and path not in self._compared:
            layout = self._keys.layout
            await asyncio.to_thread(find_token_array, self._transport, layout, array)
            self._compared.add(path)
        # Numbers are converted as a whole.
        wanted = slice(0, nbytes) if part is None or extent.dtype else _bounds(part, nbytes)
        start, end = (min(extent.start + at, extent.end) for at in (wanted.start, wanted.stop))
        if end > self._keys.readable.get(path, end):
            raise CorruptShardError(
                f"the bytes {start} to {end - 1} hold examples that were lost",
                where=f"{self._transport.url}/{path}",
                remedy="store.validate() lists everything that is lost, store.repair() records it again.",
            )
        try:
            if start == end:
                found: Bytes = b""
            elif self._is_mapped:
                (found,) = self._transport.get_ranges(path, starts=[start], ends=[end])
            else:
                found = await self._transport.get_range_async(path, start=start, end=end)
        except NotFoundError as error:
            # Not a `FileNotFoundError`, which servers and readers of Zarr take for a chunk of fill values.
            raise CorruptShardError(
                "the file is missing, although the store's documents list it",
                where=f"{self._transport.url}/{path}",
                remedy="store.validate() lists everything that is lost, store.repair() records it again.",
            ) from error
        if array is not None:
            check_values(array, found, where=f"{self._transport.url}/{path}")
        if end - start < wanted.stop - wanted.start:
            found = bytes(found).ljust(wanted.stop - wanted.start, b"\0")
        if not extent.dtype:
            return found
        shown = converted(np.frombuffer(found, numpy_dtype(extent.dtype)), FLOAT32).view(np.uint8).data
        return shown if part is None else shown[_bounds(part, len(shown))]

    async def get_partial_values(
        self, prototype: BufferPrototype, key_ranges: Iterable[tuple[str, ByteRequest | None]]
    ) -> list[Buffer | None]:
        """Parts of many values, in order."""
        return list(await asyncio.gather(*(self.get(key, prototype, part) for key, part in key_ranges)))

    async def exists(self, key: str) -> bool:
        """Return True if the view has the key, without looking at the file."""
        return self._keys.find(key) is not None

    async def getsize(self, key: str) -> int:
        """Bytes of a value, computed.

        Raises:
            FileNotFoundError: there is no such key.
        """
        value = self._keys.find(key)
        if value is None:
            raise FileNotFoundError(key)
        if isinstance(value, bytes):
            return len(value)
        return value.nbytes * 2 if value.dtype else value.nbytes

    # -- listing, which is arithmetic ----------------------------------------------------------------------------------

    async def list(self) -> AsyncIterator[str]:
        """All keys; a store of millions of chunks has millions."""
        for key in self._keys.list():
            yield key

    async def list_prefix(self, prefix: str) -> AsyncIterator[str]:
        """The keys that begin with `prefix`; goes through all keys."""
        for key in self._keys.list():
            if key.startswith(prefix):
                yield key

    async def list_dir(self, prefix: str) -> AsyncIterator[str]:
        """The names directly below the folder `prefix`."""
        for name in self._keys.children(prefix.rstrip("/")):
            yield name

    # -- refused -------------------------------------------------------------------------------------------------------

    async def set(self, key: str, value: Buffer) -> None:
        """Refused with zarr's own error: the view is read-only."""
        del key, value
        self._check_writable()

    async def delete(self, key: str) -> None:
        """Refused with zarr's own error: the view is read-only."""
        del key
        self._check_writable()

    @property
    def supports_writes(self) -> bool:
        """Never."""
        return False

    @property
    def supports_deletes(self) -> bool:
        """Never."""
        return False

    @property
    def supports_listing(self) -> bool:
        """Always: listing is arithmetic."""
        return True

    # -- identity ------------------------------------------------------------------------------------------------------

    def __eq__(self, value: object) -> bool:
        if not isinstance(value, ZarrView):
            return NotImplemented
        return self._transport.url == value._transport.url and self._keys == value._keys

    def __hash__(self) -> int:
        return hash((type(self), self._transport.url))

    def __repr__(self) -> str:
        return f"<{type(self).__name__} of {self}>"

    def __str__(self) -> str:
        return printable(self._transport.url)


def _bounds(request: ByteRequest, nbytes: int) -> slice[int, int, None]:
    """The bytes of a part of a value of that length."""
    match request:
        case RangeByteRequest(start, end):
            start = min(start, nbytes)
            return slice(start, max(start, min(end, nbytes)))
        case OffsetByteRequest(offset):
            return slice(min(offset, nbytes), nbytes)
        case SuffixByteRequest(suffix):
            return slice(max(nbytes - suffix, 0), nbytes)
        case _:
            raise ValueError(f"Unexpected byte_range, got {request!r}")  # zarr's own words
