"""`ZarrView`: a read-only `zarr.abc.store.Store` whose values are byte ranges of shards.

Zarr calls from event loops: its own, in a thread of its own, or the caller's. Views of mapped memory are returned
directly. Reads that wait are awaited where the transport can be, or run in a pool of threads, so that a loop is never blocked
and many requests are in flight.
"""

from __future__ import annotations

import asyncio
import math
from collections.abc import AsyncIterator, Iterable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING

import numpy as np
from zarr.abc.store import ByteRequest, Store
from zarr.core.buffer import Buffer, BufferPrototype, default_buffer_prototype

from saev_store._runtime.threads import after_fork_in_child
from saev_store.core.chunk_grid import ChunkGrid, Extent
from saev_store.core.dtypes import FLOAT32, ReadDtype, numpy_dtype, read_dtype
from saev_store.errors import ArgumentError, CorruptShardError, DocumentError, NotFoundError, brief
from saev_store.names import printable
from saev_store.store.identity import recorded_files, recording_identity
from saev_store.store.token_arrays import check_values, find_token_array
from saev_store.transport import Buffer as Bytes
from saev_store.transport import Transport
from saev_store.validation import local_folder
from saev_store.zarr._keys import Chunks, TensorKeys, chunk_shape
from saev_store.zarr._parts import Parts, bounds, convert, nbytes_of, parts_of
from saev_store.zarr.documents import attributes_of, token_variables

if TYPE_CHECKING:
    from saev_store.core.token_arrays import TokenArray
    from saev_store.store.store import ShardStore

_REMEDY = "store.validate() lists everything that is lost, store.repair() records it again."
#: Requests in flight to remote storage: with 64, reading takes a third of the time that zarr's own 10 take.
_IN_FLIGHT = 64
_pools: dict[str, ThreadPoolExecutor] = {}
# The threads of a pool stay behind in the parent, so a child starts its own.
after_fork_in_child(_pools.clear)


def _pool() -> ThreadPoolExecutor:
    pool = _pools.get("reads")
    if pool is None:
        pool = _pools.setdefault("reads", ThreadPoolExecutor(_IN_FLIGHT, thread_name_prefix="saev_store-zarr"))
    return pool


def open_view(store: ShardStore, *, chunks: Chunks = "auto", dtype: ReadDtype = "float32") -> ZarrView:
    """A read-only Zarr store over a store's shards: what `ShardStore.as_zarr` gives.

    Args:
        store: The opened store.
        chunks: Shape of a chunk over (example, layer, token, d_model). `"auto"` suits the transport: many whole
            examples of a local store, single layers of single examples elsewhere. Axes left of one pivot axis have
            length 1, axes right of it are whole, and the length on the pivot divides its axis.
        dtype: "float32", to which a view of a 16-bit store converts what it reads, or "stored", without copying. The data
            type of stored bfloat16 is that of the zarr-extensions registry, `saev_store.zarr.BFloat16`.

    Raises:
        ArgumentError: `dtype` is neither float32 nor what is stored.
        ArgumentError: `chunks` is not such a shape (the message has the nearest ones).
        DocumentError: `labels.bin` has another size than the documents imply (those that documents declare are compared when a
            chunk is read).
    """
    store.check_wide()
    layout, max_gap_bytes = store.layout, store.transport.cost.max_gap_bytes
    shape = chunk_shape(layout, chunks, max_gap_bytes=max_gap_bytes)
    shown = read_dtype(dtype, layout.dtype).name
    if shown not in {"float32", layout.dtype}:
        raise ArgumentError(
            f"dtype is {brief(dtype)}; the view shows float32, or what is stored, which is {layout.dtype} here",
            where="dtype",
            remedy="Use float32, which holds every number of 16 bits exactly.",
        )
    attributes = attributes_of(store.metadata, url=store.url)
    arrays = token_variables(store.token_arrays.described())
    keys = TensorKeys(ChunkGrid(layout, shape), attributes, arrays, dtype=shown)
    readable = {shard: n * layout.example_nbytes for shard, n in store.readable_examples.items()}
    return ZarrView(store.transport, keys, readable=readable)


class ZarrView(Store):
    """The tensor of a store, its coordinates and token arrays as a Zarr v3 group; made by `store.as_zarr()`.

    Values are verified by length when they are read: a shard that is missing or short raises `CorruptShardError`, and
    never reads as fill values; so does a token array whose file has another size than the documents imply. One that is bool
    and holds something other than 0 and 1 raises `DocumentError`. Picklable; may be shared between threads, and with forked
    children where the transport may.

    Args:
        transport: Where the shards are.
        keys: The keys and the places of their values.
        readable: For shards known to be damaged: how many leading bytes can still be read.
    """

    def __init__(self, transport: Transport, keys: TensorKeys, *, readable: Mapping[int, int] | None = None) -> None:
        super().__init__(read_only=True)
        self._transport = transport
        self._keys = keys
        self._readable = dict(readable or {})
        self._token_files = {array.file_name: array for array in keys.token_arrays.values()}
        #: Those whose sizes were compared.
        self._whole: set[str] = set()
        self._is_mapped = math.isinf(transport.cost.max_gap_bytes)

    @property
    def keys(self) -> TensorKeys:
        """The arithmetic of keys: shapes, documents, places of chunks."""
        return self._keys

    # -- reading -------------------------------------------------------------------------------------------------------

    async def get(
        self, key: str, prototype: BufferPrototype | None = None, byte_range: ByteRequest | None = None
    ) -> Buffer | None:
        """The value of a key, or a part of it, or None if there is no such key; a view where memory is mapped.

        Raises:
            CorruptShardError: the file is missing, ends before the value does, is known to be damaged there, or is that of a
                token array and has another size than the documents imply.
            DocumentError: the file of a bool token array holds bytes other than 0 and 1.
            ValueError: `byte_range` is no byte request.
        """
        parts = self._find(key, [byte_range])
        if parts is None:
            return None
        found = self._finish(parts, await self._fetch_async(parts))
        return (prototype or default_buffer_prototype()).buffer.from_bytes(found[0])  # no copy, except to a GPU

    def get_sync(
        self, key: str, *, prototype: BufferPrototype | None = None, byte_range: ByteRequest | None = None
    ) -> Buffer | None:
        """What `get` awaits."""
        parts = self._find(key, [byte_range])
        if parts is None:
            return None
        found = self._finish(parts, self._fetch(parts))
        return (prototype or default_buffer_prototype()).buffer.from_bytes(found[0])

    async def get_partial_values(
        self, prototype: BufferPrototype, key_ranges: Iterable[tuple[str, ByteRequest | None]]
    ) -> list[Buffer | None]:
        """Parts of many values, in order."""
        return list(await asyncio.gather(*(self.get(key, prototype, part) for key, part in key_ranges)))

    async def get_ranges(
        self,
        key: str,
        byte_ranges: Sequence[ByteRequest | None],
        *,
        prototype: BufferPrototype,
        **limits: int,
    ) -> AsyncIterator[Sequence[tuple[int, Buffer | None]]]:
        """Many parts of one value, merged by the transport's limits instead of zarr's."""
        del limits
        if byte_ranges:
            parts = self._find_all(key, byte_ranges)
            found = self._finish(parts, await self._fetch_async(parts))
            yield [(number, prototype.buffer.from_bytes(part)) for number, part in enumerate(found)]

    def get_ranges_sync(
        self, key: str, byte_ranges: Sequence[ByteRequest | None], *, prototype: BufferPrototype, **limits: int
    ) -> Sequence[tuple[int, Buffer | None]]:
        """What `get_ranges` awaits."""
        del limits
        parts = self._find_all(key, byte_ranges)
        found = self._finish(parts, self._fetch(parts))
        return [(number, prototype.buffer.from_bytes(part)) for number, part in enumerate(found)]

    async def exists(self, key: str) -> bool:
        """Whether the view has the key; says nothing about the file, and reads nothing."""
        return self._keys.find(key) is not None

    async def getsize(self, key: str) -> int:
        """Bytes of a value, computed.

        Raises:
            FileNotFoundError: there is no such key.
        """
        value = self._keys.find(key)
        if value is None:
            raise FileNotFoundError(key)
        return self.shown_nbytes(value)

    # -- bytes ---------------------------------------------------------------------------------------------------------

    def _converts(self, value: bytes | Extent) -> bool:
        return self._keys.converts and not isinstance(value, bytes) and value.shard_idx is not None

    def shown_nbytes(self, value: bytes | Extent) -> int:
        """Bytes of a value as it is shown: numbers of 16 bits may be shown as float32, in twice the bytes."""
        return self._shown(value, nbytes_of(value))

    def shown_nbytes_in_file(self, value: Extent) -> int:
        """Those of them that come from the file; what follows is padding."""
        return self._shown(value, value.end - value.start)

    def _shown(self, value: bytes | Extent, nbytes: int) -> int:
        return nbytes // self._keys.grid.layout.itemsize * FLOAT32.itemsize if self._converts(value) else nbytes

    def _find(self, key: str, byte_ranges: Sequence[ByteRequest | None]) -> Parts | None:
        """Where the bytes of parts of a value are; None if there is no such key."""
        value = self._keys.find(key)
        if value is None:
            return None
        nbytes = self.shown_nbytes(value)
        shown = stored = [bounds(part, nbytes) for part in byte_ranges]
        if isinstance(value, bytes) or not shown:
            return parts_of(value, shown, stored, 0)
        if self._converts(value):
            size, stored_size = FLOAT32.itemsize, self._keys.grid.layout.itemsize
            stored = [(start // size * stored_size, -(-stop // size) * stored_size) for start, stop in shown]
        in_file = value.end - value.start
        if in_file < value.nbytes and in_file < max(stop for _, stop in stored) and self._is_padded(value):
            in_file = value.nbytes  # the last chunk needs no copy either
        parts = parts_of(value, shown, stored, in_file)
        if self._readable and parts.starts != parts.ends:
            pairs = zip(parts.starts, parts.ends, strict=True)
            self._check_readable(value, max(end for start, end in pairs if start < end))
        return parts

    def _find_all(self, key: str, byte_ranges: Sequence[ByteRequest | None]) -> Parts:
        parts = self._find(key, byte_ranges)
        if parts is None:
            raise BaseExceptionGroup("there is no such key", [FileNotFoundError(key)])
        return parts

    def _fetch(self, parts: Parts) -> Sequence[Bytes]:
        """What the file holds of each part."""
        if parts.starts == parts.ends:  # of zeros or of a document, which no file holds
            return [b""] * len(parts.starts)
        array = self._token_files.get(parts.path)
        if array is not None and (self._is_mapped or parts.path not in self._whole):
            self._check_size(array)
        try:
            return self._transport.get_ranges(parts.path, starts=parts.starts, ends=parts.ends)
        except NotFoundError as error:
            raise self._lost(parts) from error

    async def _fetch_async(self, parts: Parts) -> Sequence[Bytes]:
        """The same without blocking the event loop: awaited where the transport can be, else in a thread."""
        if self._is_mapped or parts.starts == parts.ends:
            return self._fetch(parts)
        start, end = parts.starts[0], parts.ends[0]
        is_request = len(parts.starts) == 1 and end - start <= self._transport.cost.max_request_bytes
        is_compared = parts.path in self._whole or parts.path not in self._token_files
        if not self._transport.is_local and is_request and is_compared:
            try:
                return [await self._transport.get_range_async(parts.path, start=start, end=end)]
            except NotFoundError as error:
                raise self._lost(parts) from error
        return await asyncio.get_running_loop().run_in_executor(_pool(), self._fetch, parts)

    def _check_size(self, array: TokenArray) -> None:
        """Compare the size of a token array's file; one that is missing is told by reading it."""
        try:
            find_token_array(self._transport, self._keys.grid.layout, array, is_declared=True)
        except DocumentError as error:
            raise CorruptShardError(error.message, where=error.where, remedy=error.remedy) from error
        self._whole.add(array.file_name)

    def _lost(self, parts: Parts) -> CorruptShardError:
        """What a missing file is."""
        return CorruptShardError(
            "the file is missing, although the store's documents list it",
            where=f"{self._transport.url}/{parts.path}",
            remedy=_REMEDY,
        )

    def _finish(self, parts: Parts, found: Sequence[Bytes]) -> list[Bytes]:
        """The parts as readers see them: what the file holds and the zeros after its end; converted."""
        value = parts.value
        if isinstance(value, bytes):
            return [memoryview(value)[start:stop] for start, stop in parts.stored]
        array = self._token_files.get(value.path)
        if array is not None:
            for part, start in zip(found, parts.starts, strict=True):
                check_values(array, part, where=f"{self._transport.url}/{value.path}", start=start)
        whole = [
            part if stop <= parts.in_file else bytes(part).ljust(stop - start, b"\0")
            for part, (start, stop) in zip(found, parts.stored, strict=True)
        ]
        if not self._converts(value):
            return whole
        stored = numpy_dtype(self._keys.grid.layout.dtype)
        return [convert(np.frombuffer(part, stored), *of) for part, of in zip(whole, parts.shown, strict=True)]

    def _is_padded(self, value: Extent) -> bool:
        """Whether a mapped file also has the zeros after the last example; not requested of remote files."""
        try:
            return self._is_mapped and self._transport.size(value.path) >= value.start + value.nbytes
        except NotFoundError:
            return False

    def _check_readable(self, value: Extent, end: int) -> None:
        readable = self._readable.get(value.shard_idx) if value.shard_idx is not None else None
        if readable is not None and min(end, value.end) > readable:
            raise CorruptShardError(
                f"the shard is damaged: only its first {readable:,} bytes can be read, and the chunk ends at {end:,}",
                where=f"{self._transport.url}/{value.path}",
                remedy=_REMEDY,
            )

    # -- listing, which is arithmetic ----------------------------------------------------------------------------------

    async def list(self) -> AsyncIterator[str]:
        """All keys; a store of millions of chunks has millions."""
        for key in self._keys.below(""):
            yield key

    async def list_prefix(self, prefix: str) -> AsyncIterator[str]:
        """The keys that begin with `prefix`."""
        for key in self._keys.below(prefix):
            yield key

    async def list_dir(self, prefix: str) -> AsyncIterator[str]:
        """The names directly below the folder `prefix`."""
        for name in self._keys.children(prefix.rstrip("/")):
            yield name

    # -- refused -------------------------------------------------------------------------------------------------------

    async def set(self, key: str, value: Buffer) -> None:
        """Refused with zarr's own error: the view reads only."""
        self.set_sync(key, value)

    async def delete(self, key: str) -> None:
        """Refused with zarr's own error: the view reads only."""
        self.delete_sync(key)

    def set_sync(self, key: str, value: Buffer) -> None:
        """Refused; exists because zarr reads without an event loop only from stores that have all three `_sync` methods."""
        del key, value
        self._check_writable()

    def delete_sync(self, key: str) -> None:
        """Refused, like `set_sync`."""
        del key
        self._check_writable()

    @property
    def _supports_sync_io(self) -> bool:
        # On this path zarr reads as many chunks at once as there are CPUs: right for memory, slow for a network.
        return self._is_mapped

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

    def __getstate__(self) -> dict[str, object]:
        state = {**vars(self)}
        if local_folder(self._transport) is not None:
            # dask names a `zarr.Array` after what its store is pickled to. Far away this would take requests.
            state["_recording"] = self.__dask_tokenize__()
        return state

    def __setstate__(self, state: Mapping[str, object]) -> None:
        vars(self).update({name: value for name, value in state.items() if name != "_recording"})

    def __dask_tokenize__(self) -> tuple[str, ...]:
        layout, arrays = self._keys.grid.layout, self._token_files.values()
        files = recorded_files(self._transport, layout, arrays)
        recording = recording_identity(self._transport, layout, files=files, prefer="versions")
        return "saev_store.zarr", self._transport.url, str(recording), repr(self._keys)

    def __repr__(self) -> str:
        grid = self._keys.grid
        n_chunks = math.prod(grid.counts)
        return printable(f"<{type(self).__name__} of {self._transport.url} in {n_chunks:,} chunks of {grid.chunk}>")

    def __str__(self) -> str:
        return printable(self._transport.url)
