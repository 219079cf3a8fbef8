"""Object stores through obstore: ranges, documents, listings and uploads."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Awaitable, Callable, Mapping, Sequence
from functools import partial
from typing import TYPE_CHECKING, Literal

from saev_store._runtime.optional import need
from saev_store.errors import ArgumentError, NotFoundError, SaevStoreError, TransportError
from saev_store.transport._errors import shown, status_of, translated
from saev_store.transport._loop import own_loop
from saev_store.transport._obstore_options import open_store, place_of
from saev_store.transport._remote import CONNECT_TIMEOUT_S, IN_FLIGHT, RemoteTransport
from saev_store.transport.base import Entry, FileStat, Sink, Transport
from saev_store.transport.checks import Buffer, ReadCost, too_big

if TYPE_CHECKING:
    from obstore import AsyncWritableFile, ObjectMeta
    from obstore.store import ObjectStore

#: Longest request, and length of the parts of an upload; S3 requires at least 5 MiB and at most 10,000 parts.
REQUEST_BYTES, _MAX_PARTS = 8 << 20, 9_000
#: Parts of one upload that are under way at the same time.
PARTS_IN_FLIGHT = 8
#: S3 copies larger objects in parts only.
_MAX_COPY_BYTES = 5 << 30
_ABORT_TIMEOUT_S = 10


class ObstoreTransport(RemoteTransport):
    """`s3://` and `gs://` through obstore. Each answer has the ETag of its object: one that is replaced while it is read is an error."""

    #: A request costs its share of the latency (30 ms, 64 in flight) and 0.1 ms of CPU: the time of 70 kB at 1 Gbit/s.
    cost = ReadCost(70_000, REQUEST_BYTES)

    def __init__(self, url: str, storage_options: Mapping[str, object] | None = None) -> None:
        super().__init__(url, storage_options or {}, safe_url=url.rstrip("/"))
        need("obstore", install="saev-store[obstore]", where=url)
        import obstore

        self.api = obstore
        self.place = place_of(url, self.options)
        self.name = f"obstore:{self.place.kind}"
        try:
            self.store: ObjectStore = open_store(self.place, connect_timeout_s=CONNECT_TIMEOUT_S, connections=IN_FLIGHT)
        except Exception as error:
            message = f"the engine obstore refuses these options: {shown(error, self.options)}"
            raise ArgumentError(message, where="storage_options", remedy='Or use engine="fsspec".') from None

    def loop(self) -> asyncio.AbstractEventLoop:
        return own_loop()

    def key(self, path: str) -> str:
        return "/".join(part for part in (self.place.prefix, self._below(path)) if part)

    def read(self, path: str, *, max_bytes: int | None = None) -> bytes:
        where, key = self.where(path), self.key(path)

        async def get() -> bytes:
            async with self.slots:
                answer = await self.api.get_async(self.store, key)
                if max_bytes is not None and answer.meta["size"] > max_bytes:
                    raise too_big(where, size=answer.meta["size"], max_bytes=max_bytes)
                return bytes(await answer.bytes_async())

        return self.call("read", where, get, nbytes=max_bytes or 0)

    def stat(self, path: str) -> FileStat:
        return self.call("look at it", self.where(path), partial(self._stat, path))

    async def _stat(self, path: str) -> FileStat:
        return _file_stat(await self.api.head_async(self.store, self.key(path)))

    async def _get(self, path: str, start: int, end: int) -> memoryview:
        """The bytes of one request, of the object that was read before, or an error."""
        try:
            async with self.slots:
                answer = await self.api.get_async(self.store, self.key(path), options={"range": (start, end)})
                self._pin(path, _file_stat(answer.meta), end)
                data = memoryview(await answer.bytes_async())
        except Exception as error:
            if status_of(error) == 416:
                self._pin(path, await self._stat(path), end)
            raise translated(error, self.options, doing="read", where=self.where(path)) from None
        if len(data) != end - start:
            message = f"{len(data):,} bytes came for the range {start:,}:{end:,}"
            raise TransportError(message, where=self.where(path), transient=True)
        return data

    def list(self, path: str = "") -> Sequence[Entry]:
        key, where = self.key(path), self.where(path) if path else self.url
        work = partial(self.api.list_with_delimiter_async, self.store, key or None)  # pyright: ignore[reportUnknownMemberType]  # Arrow tables
        found = self.call("list", where, work)
        base = f"{path}/" if path else ""
        folders = [base + name.rstrip("/").rpartition("/")[2] for name in found["common_prefixes"]]
        entries = {name: Entry(name, is_dir=True, size=None) for name in folders}
        for meta in found["objects"]:
            name = base + meta["path"].rpartition("/")[2]
            if meta["path"] != key:  # a placeholder for the folder itself
                entries.setdefault(name, Entry(name, False, meta["size"], meta["last_modified"].timestamp()))
        if not entries and key:
            raise NotFoundError("there is no such folder", where=where)
        return [entries[name] for name in sorted(entries)]

    def put(self, path: str, data: Buffer) -> None:
        self._put("write", path, bytes(data), mode="overwrite")

    def create(self, path: str, data: Buffer) -> None:
        if not self.is_conditional:
            self._check_absent(path)
        self._put("create", path, bytes(data), mode="create" if self.is_conditional else "overwrite")

    def _put(self, doing: str, path: str, data: bytes, *, mode: Literal["create", "overwrite"]) -> None:
        key, in_parts = self.key(path), mode == "overwrite" and len(data) > REQUEST_BYTES

        async def put() -> None:
            async with self.slots:
                await self.api.put_async(self.store, key, data, mode=mode, use_multipart=in_parts)

        self.unpin(path)
        self.call(doing, self.where(path), put, nbytes=len(data))

    def delete(self, path: str) -> None:
        key = self.key(path)

        async def delete() -> None:
            with contextlib.suppress(FileNotFoundError):
                await self.api.delete_async(self.store, key)
            # A prefix is whole parts of names: "a" finds "a/b", not "ab", and not "a" itself.
            listed = await self.api.list(self.store, prefix=key).collect_async()  # pyright: ignore[reportUnknownMemberType] (Arrow tables)
            if found := [meta["path"] for meta in listed]:
                await self.api.delete_async(self.store, found)

        self.unpin(path)
        self.call("delete", self.where(path), delete)

    def open_sink(self, path: str, *, used_nbytes: int, file_nbytes: int, replace: bool = False) -> ObstoreSink:
        self.loop()  # or a ForkError, before anything is written
        if not replace:
            self._check_absent(path)
        return ObstoreSink(self, path, used_nbytes=used_nbytes, file_nbytes=file_nbytes)

    def copy_within(self, source: Transport, source_path: str, path: str) -> bool:
        """Let the service copy an object; False from another bucket or client, and for objects above 5 GiB."""
        if not isinstance(source, ObstoreTransport):
            return False
        same = (self.place.bucket, self.options) == (source.place.bucket, source.options) and self.name == source.name
        if not same or (nbytes := source.size(source_path)) > _MAX_COPY_BYTES:
            return False
        old, new = source.key(source_path), self.key(path)
        self.unpin(path)
        # Services answer only when they have finished; up to a minute for each GiB.
        self.call("copy", self.where(path), lambda: self.api.copy_async(self.store, old, new), nbytes=nbytes // 16)
        return True


class ObstoreSink(Sink):
    """A multipart upload that appears under its name when it is committed, and never in part."""

    def __init__(self, transport: ObstoreTransport, path: str, *, used_nbytes: int, file_nbytes: int) -> None:
        where, key = transport.where(path), transport.key(path)
        super().__init__(where, used_nbytes=used_nbytes, file_nbytes=file_nbytes)
        self._transport, self._path, self._key = transport, path, key
        self._part_bytes = part_bytes(file_nbytes)
        self._writer: AsyncWritableFile = transport.api.open_writer_async(
            transport.store, key, buffer_size=self._part_bytes, max_concurrency=PARTS_IN_FLIGHT
        )

    def _append(self, views: list[memoryview]) -> None:
        data = b"".join(views)
        self._call(lambda: self._writer.write(data), nbytes=len(data) + self._part_bytes * PARTS_IN_FLIGHT)

    def _finish(self) -> None:
        async def finish() -> None:
            for start in range(self._written, self._file_nbytes, self._part_bytes):
                await self._writer.write(bytes(min(self._part_bytes, self._file_nbytes - start)))
            await self._writer.close()

        self._call(finish, nbytes=self._file_nbytes)
        self._is_open = False
        self._transport.unpin(self._path)

    def _release(self) -> None:
        with contextlib.suppress(SaevStoreError):
            self._transport.call("abort the upload", self._where, partial(_abort, self._writer))

    def _call(self, work: Callable[[], Awaitable[object]], *, nbytes: int) -> None:
        try:
            self._transport.call("upload", self._where, work, nbytes=nbytes)
        except BaseException:
            self.abort()  # a failed upload cannot continue, and its parts cost money
            raise


def part_bytes(file_nbytes: int) -> int:
    """Bytes of a part of a file of that length."""
    return max(REQUEST_BYTES, -(-file_nbytes // _MAX_PARTS))


def _file_stat(meta: ObjectMeta) -> FileStat:
    return FileStat(meta["size"], meta.get("e_tag") or str(meta.get("last_modified")))


async def _abort(writer: AsyncWritableFile) -> None:
    async with asyncio.timeout(_ABORT_TIMEOUT_S):
        await writer.__aexit__(RuntimeError, RuntimeError("aborted"), None)  # pyright: ignore[reportUnknownMemberType]  # declared without types
