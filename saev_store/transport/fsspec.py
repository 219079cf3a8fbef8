"""Files through fsspec: object stores, web servers, archives, and caches in front of them."""

from __future__ import annotations

import asyncio
import html
import os
import tempfile
import threading
from collections.abc import Iterable, Mapping, Sequence
from contextlib import nullcontext, suppress
from datetime import datetime
from typing import cast
from urllib.parse import urljoin, urlsplit

from saev_store.errors import NotFoundError, StoreExistsError, TransportError, kind_of
from saev_store.transport._fsspec_client import NEAR_PROTOCOLS, FsspecClient, safe_url
from saev_store.transport._fsspec_errors import means_exists
from saev_store.transport._loop import awaited, gathered, limit_s
from saev_store.transport._remote import IN_FLIGHT, RemoteTransport
from saev_store.transport.base import Entry, FileReads, FileStat, ReadCost, Transport, UnfinishedUpload
from saev_store.transport.checks import (
    Buffer,
    Request,
    check_ranges,
    os_errors,
    requests_of,
    temporary_folder,
    too_big,
    too_short,
)
from saev_store.transport.durable import FdSink, preallocate

#: A request through fsspec's clients is about a millisecond of Python: the time of 180 kB at 1 Gbit/s, with its latency.
_FAR = ReadCost(180_000, 8 << 20)
_NEAR = ReadCost(256 << 10, 64 << 20)
#: Bytes of the answers that are held before they are copied to where they are wanted.
_HELD_BYTES = 256 << 20
_S3, _WEB = {"s3", "s3a"}, {"http", "https"}
#: Services that copy objects by themselves.
_COPYING = _S3 | {"gs", "gcs"}
#: Names of what distinguishes a file from others of its name, as file systems have it.
_VERSIONS = ("generation", "ETag", "etag", "Last-Modified", "LastModified", "mtime", "modified", "created")
_MODIFIED = ("LastModified", "mtime", "updated", "last_modified", "modified")
#: gcsfs compares no checksum unless it is asked to; s3fs adds a CRC32 to every part by itself.
_CHECKSUMS: Mapping[str, Mapping[str, object]] = {"gs": {"consistency": "md5"}, "gcs": {"consistency": "md5"}}
#: For file systems on which "exists" and "write" are two steps, at least the threads of this process take turns.
_CREATING = threading.Lock()


class FsspecTransport(RemoteTransport):
    """Any fsspec URL. Each returned buffer is memory of its own.

    Asynchronous file systems (object stores, HTTP) read all ranges of a call side by side, with a time-out of `timeout_s` plus one
    second per MiB. The others (archives, caches, SFTP, …) read one range after the other, in one thread at a time, with the
    time-outs of their library.

    fsspec's answers have no version. The version of a file is looked up before its first range is read, and again by `recheck`: an
    object that is replaced in between by one of the same length is noticed only then. `ObstoreTransport` compares each answer.

    Args:
        url: The root; chained URLs (`simplecache::s3://…`, `zip://…::file://…`) work.
        storage_options: fsspec's own, and `verify` and `conditional_create`.
        timeout_s: Time-out of an operation.

    Raises:
        MissingDependencyError: no installed package serves the protocol.
        ArgumentError: the file system refuses the options.
    """

    def __init__(
        self, url: str, storage_options: Mapping[str, object] | None = None, *, timeout_s: float = 60.0
    ) -> None:
        self.client = FsspecClient(url, storage_options or {}, timeout_s)
        super().__init__(safe_url(url))
        self.client.fs()
        self.name = f"fsspec:{'::'.join(self.client.protocols)}"
        self.cost = _NEAR if NEAR_PROTOCOLS.issuperset(self.client.protocols) else _FAR

    # -- reading -------------------------------------------------------------------------------------------------------

    def read(self, path: str, *, max_bytes: int | None = None) -> bytes:
        """The whole of a small file in one request; no more than `max_bytes + 1` bytes travel."""
        client, where, key = self.client, self.where(path), self.key(path)
        limits: dict[str, int] = {} if max_bytes is None else {"start": 0, "end": max_bytes + 1}
        with client.errors("read", where):
            try:
                if client.is_async:
                    cat = getattr(client.fs(), "_cat_file")  # noqa: B009  # fsspec has no types
                    data = client.run(lambda: client.again(lambda: cat(key, **limits)), nbytes=max_bytes or 0)
                else:
                    data = client.ask("cat_file", key, **limits)
            except Exception:
                # Servers refuse any range of an empty file.
                with suppress(Exception):
                    if limits and self.stat(path).nbytes == 0:
                        return b""
                raise
        found = cast("bytes", data)
        self.tally.add(read=len(found))
        if max_bytes is not None and len(found) > max_bytes:
            raise too_big(where, size=None, max_bytes=max_bytes)
        return found

    def stat(self, path: str) -> FileStat:
        """Size and version of a file, as it is now."""
        client, key = self.client, self.key(path)
        with client.errors("look at it", self.where(path)):
            fs = client.fs()
            fs.invalidate_cache(key)
            if not client.is_async:
                found = cast("Mapping[str, object]", client.ask("info", key))
                # Caches look sizes up in a list of the folder, which may lack them: the file system behind them knows.
                behind = getattr(fs, "fs", None) if found.get("size") is None else None
                return self._file_stat(path, found if behind is None else behind.info(key))
            return client.run(lambda: self._stat(path), nbytes=0)

    async def _stat(self, path: str) -> FileStat:
        info = getattr(self.client.fs(), "_info")  # noqa: B009  # fsspec has no types
        return self._file_stat(path, await self.client.again(lambda: info(self.key(path))))

    def _file_stat(self, path: str, info: object) -> FileStat:
        self.tally.add()
        found = cast("Mapping[str, object]", info)
        size = found.get("size")
        if not isinstance(size, int) or found.get("type") == "directory":
            raise TransportError("the size of this file is not known, or it is a folder", where=self.where(path))
        return FileStat(size, next((str(found[name]) for name in _VERSIONS if found.get(name) is not None), ""))

    def recheck(self) -> None:
        """Compare each file that was read with the one that has its name now; one request for each."""
        for below, pinned in list(self._pins.items()):
            path = below.removeprefix(self._folder).lstrip("/")
            if below.startswith(self._folder) and self.stat(path) != pinned:
                self._pin(path, self.stat(path))

    def _check_length(self, path: str, needed: int) -> None:
        pinned = self._pins.get(self._below(path)) or self._pin(path, self.stat(path))
        if pinned.nbytes < needed:
            raise too_short(self.where(path), size=pinned.nbytes, needed=needed)

    def _fetch(self, path: str, starts: Sequence[int], ends: Sequence[int]) -> Sequence[Buffer]:
        self._check_length(path, max(ends))
        return self._cat([(path, start, end) for start, end in zip(starts, ends, strict=True)])

    def _cat(self, ranges: Sequence[tuple[str, int, int]]) -> Sequence[Buffer]:
        """Ranges of several files, of which the lengths were compared."""
        where = self.where(ranges[0][0])
        nbytes = sum(end - start for _, start, end in ranges)
        try:
            return self._cat_all(ranges, nbytes=nbytes, where=where)
        except TransportError:
            for path, end in {path: end for path, _, end in sorted(ranges, key=lambda one: one[2])}.items():
                if (size := self.stat(path).nbytes) < end:  # it was cut meanwhile
                    raise too_short(self.where(path), size=size, needed=end) from None
            raise

    def _cat_all(self, ranges: Sequence[tuple[str, int, int]], *, nbytes: int, where: str) -> Sequence[Buffer]:
        client = self.client
        with client.errors("read", where):
            if client.is_async:
                slots = asyncio.Semaphore(IN_FLIGHT)
                return client.run(lambda: gathered([self._get(*one, slots=slots) for one in ranges]), nbytes=nbytes)
            found = [client.ask("cat_file", self.key(path), start=start, end=end) for path, start, end in ranges]
            return [self._checked(data, *one) for data, one in zip(found, ranges, strict=True)]

    async def _get(self, path: str, start: int, end: int, *, slots: asyncio.Semaphore | None = None) -> bytes:
        """The bytes of one request, on the loop of the file system."""
        cat, key = getattr(self.client.fs(), "_cat_file"), self.key(path)  # noqa: B009  # fsspec has no types

        async def once() -> bytes:
            async with slots or nullcontext():  # free between two tries
                return self._checked(await cat(key, start=start, end=end), path, start, end)

        return await self.client.again(once)

    def _checked(self, data: object, path: str, start: int, end: int) -> bytes:
        """The bytes, of the length that was requested: fsspec can return errors as data, and servers may ignore ranges."""
        if not isinstance(data, bytes) or len(data) != end - start:
            got = f"{len(data):,} bytes" if isinstance(data, bytes) else kind_of(data)
            raise TransportError(
                f"{got} came for the range {start:,}:{end:,}",
                where=self.where(path),
                remedy="Use a server that answers range requests; `python -m http.server` does not.",
                transient=isinstance(data, bytes) and len(data) < end - start,
            )
        self.tally.add(read=len(data))
        return data

    def readinto_files(self, reads: Iterable[FileReads]) -> None:
        """Read the ranges of all files side by side, `_HELD_BYTES` at a time, and copy each to its place."""
        cost, held, nbytes = self.cost, list[tuple[str, Request]](), 0
        for path, starts, buffers in reads:
            requests = requests_of(
                self.where(path), starts, buffers,
                max_gap_bytes=cost.max_gap_bytes, max_request_bytes=cost.max_request_bytes,
            )  # fmt: skip
            if requests:
                self._check_length(path, max(request.end for request in requests))
            for request in requests:
                if held and nbytes + request.end - request.start > _HELD_BYTES:
                    self._fill(held)
                    held, nbytes = [], 0
                held.append((path, request))
                nbytes += request.end - request.start
        if held:
            self._fill(held)

    def _fill(self, held: Sequence[tuple[str, Request]]) -> None:
        found = self._cat([(path, request.start, request.end) for path, request in held])
        for data, (_, request) in zip(found, held, strict=True):
            request.fill(data)

    async def get_range_async(self, path: str, *, start: int, end: int) -> Buffer:
        """As `get_ranges` of one range, without blocking the running event loop."""
        client, where = self.client, self.where(path)
        check_ranges(where, [start], [end])
        if not client.is_async or start == end or end - start > self.cost.max_request_bytes:
            return await super().get_range_async(path, start=start, end=end)

        async def get() -> bytes:
            pinned = self._pins.get(self._below(path)) or self._pin(path, await self._stat(path))
            if pinned.nbytes < end:
                raise too_short(where, size=pinned.nbytes, needed=end)
            return await self._get(path, start, end)

        with client.errors("read", where):
            return await awaited(get, client.fs().loop, limit_s=limit_s(client.timeout_s, end - start))

    def list(self, path: str = "") -> Sequence[Entry]:
        """The names directly in a folder, sorted; never from a cache."""
        client, key = self.client, self.key(path)
        with client.errors("list", self.where(path) if path else self.url):
            client.fs().invalidate_cache(key)
            self.tally.add()
            found = cast("list[Mapping[str, object]]", client.ask("ls", key, detail=True))
            if not found and path:
                client.ask("info", key)  # archives of older releases list a folder that does not exist as empty
        entries: dict[str, Entry] = {}
        for info in found:
            named, size = str(info["name"]), info.get("size")
            if client.protocols[0] in _WEB:
                named = _linked(named, key)
            name = named.rstrip("/")
            if not name or name == key.strip("/") or name == key.rstrip("/"):  # the folder's own placeholder
                continue
            relative = f"{path}/{name.rpartition('/')[2]}" if path else name.rpartition("/")[2]
            is_dir = info.get("type") == "directory" or (named.endswith("/") and not size)
            nbytes = size if isinstance(size, int) and not is_dir else None
            entries[relative] = Entry(relative, is_dir, nbytes, None if is_dir else _modified_s(info))
        return [entries[name] for name in sorted(entries)]

    # -- writing -------------------------------------------------------------------------------------------------------

    def put(self, path: str, data: Buffer) -> None:
        """Create or replace a file; atomic on object stores, as good as the file system elsewhere."""
        with self.client.errors("write", self.where(path)):
            self.make_parent(path)
            self.unpin(path)
            self.client.ask("pipe_file", self.key(path), bytes(data), nbytes=len(data))
        self.tally.add(written=len(data))

    def create(self, path: str, data: Buffer) -> None:
        """Create a file unless its name is taken.

        Exclusive against all writers if the service has conditional writes (S3, GCS); elsewhere, and with
        `conditional_create=False`, only against the threads of this process.
        """
        client, where = self.client, self.where(path)
        if not client.is_async or not client.is_conditional:
            with _CREATING:
                self._check_absent(path)
                self.put(path, data)
            return
        with client.errors("create", where):
            try:
                client.ask("pipe_file", self.key(path), bytes(data), mode="create", nbytes=len(data))
            except Exception as error:
                if not means_exists(error):
                    raise
                raise StoreExistsError("the file already exists", where=where) from None
        self.tally.add(written=len(data))

    def delete(self, path: str) -> None:
        """Delete a file, or a folder with all that is in it."""
        client, key = self.client, self.key(path)
        self.unpin(path)
        self.tally.add()
        with suppress(NotFoundError), client.errors("delete", self.where(path)):
            client.fs().invalidate_cache(key)
            if client.protocols[0] in {"file", "local"}:
                client.ask("rm", key, recursive=True)
                return
            # Not `rm`, to which some names are patterns.
            found = client.ask("find", key, detail=True, withdirs=not client.is_async)
            infos = cast("Mapping[str, Mapping[str, object]]", found)
            for name in sorted(infos, reverse=True):  # what is in a folder before the folder
                client.ask("rmdir" if infos[name].get("type") == "directory" else "rm_file", name)

    def open_sink(self, path: str, *, used_nbytes: int, file_nbytes: int, resume: bool = False) -> SpooledSink:
        """A file that is collected on this machine and uploaded when it is committed."""
        if not resume:
            self._check_absent(path)
        return SpooledSink(self, path, used_nbytes=used_nbytes, file_nbytes=file_nbytes)

    def copy_within(self, source: Transport, source_path: str, path: str) -> bool:
        """Let S3 or Google copy a file; False for other services, or if the two are opened differently."""
        if not isinstance(source, FsspecTransport) or len(self.client.protocols) > 1:
            return False
        ours, theirs = self.client, source.client
        if (theirs.protocols, theirs.options) != (ours.protocols, ours.options) or not _COPYING & set(ours.protocols):
            return False
        self.unpin(path)
        with ours.errors("copy", self.where(path)):
            self.tally.add()
            # Services answer only when they have finished; up to a minute for each GiB.
            nbytes = source.size(source_path) // 16
            ours.ask("cp_file", source.key(source_path), self.key(path), nbytes=nbytes)  # of the same class
        return True

    def list_uploads(self, path: str = "") -> Sequence[UnfinishedUpload] | None:
        """Unfinished multipart uploads below a folder of a bucket on S3; None for other services."""
        client = self.client
        if not client.is_async or client.protocols[0] not in _S3:
            return None
        folder = self.key("").strip("/")
        bucket, _, prefix = self.key(path).strip("/").partition("/")
        found: list[UnfinishedUpload] = []
        markers: dict[str, object] = {}
        with client.errors("list unfinished uploads", self.url):
            while True:
                # s3fs's own listing gives the first page only.
                page = client.ask("call_s3", "list_multipart_uploads", Bucket=bucket, Prefix=prefix, **markers)  # pyright: ignore[reportArgumentType]  # `nbytes` is not among them
                self.tally.add()
                answer = cast("Mapping[str, object]", page)
                for upload in cast("list[Mapping[str, object]]", answer.get("Uploads") or []):
                    key, begun = str(upload["Key"]), upload.get("Initiated")
                    if not prefix or key == prefix or key.startswith(f"{prefix}/"):
                        below = f"{bucket}/{key}".removeprefix(folder).lstrip("/")
                        begun_s = begun.timestamp() if isinstance(begun, datetime) else None
                        found.append(UnfinishedUpload(below, str(upload["UploadId"]), begun_s))
                if not answer.get("IsTruncated"):
                    return found
                markers = {"KeyMarker": answer["NextKeyMarker"], "UploadIdMarker": answer["NextUploadIdMarker"]}

    def abort_upload(self, upload: UnfinishedUpload) -> None:
        """Abort an upload and delete its parts."""
        with suppress(NotFoundError), self.client.errors("abort an unfinished upload", self.where(upload.path)):
            bucket, _, key = self.key(upload.path).partition("/")
            self.client.ask("abort_mpu", bucket, key, upload.upload_id)

    def make_parent(self, path: str) -> None:
        """Make the folder of a file if the file system has folders."""
        if not self.client.is_async:
            self.client.fs().makedirs(self.key(path).rpartition("/")[0] or "/", exist_ok=True)

    def key(self, path: str) -> str:
        return self.client.key(self._below(path))


class SpooledSink(FdSink):
    """A file that is collected in `$TMPDIR` and uploaded by `commit`; a killed process leaves nothing behind."""

    def __init__(self, transport: FsspecTransport, path: str, *, used_nbytes: int, file_nbytes: int) -> None:
        super().__init__(
            transport.where(path),
            transport.tally,  # made by it
            used_nbytes=used_nbytes,
            file_nbytes=file_nbytes,
        )
        self._transport, self._path = transport, path
        with os_errors(temporary_folder(), f"reserve {used_nbytes:,} bytes to collect {self._where}"):
            with tempfile.TemporaryFile() as spool:  # without a name
                self._fd = os.dup(spool.fileno())
            preallocate(self._fd, used_nbytes)
            os.ftruncate(self._fd, file_nbytes)

    def commit(self) -> None:
        """Upload the whole file under its name, and compare its size there."""
        self._check_complete()
        transport, client, fd = self._transport, self._transport.client, self._descriptor()
        os.lseek(fd, 0, os.SEEK_SET)  # on some systems, opening /dev/fd/N shares the position
        with client.errors("upload", self._where):
            transport.make_parent(self._path)
            options: Mapping[str, object] = _CHECKSUMS.get("::".join(client.protocols)) or {}
            key = transport.key(self._path)
            client.ask("put_file", f"/dev/fd/{fd}", key, nbytes=self._file_nbytes, **options)  # pyright: ignore[reportArgumentType]  # `nbytes` is not among them
        transport.unpin(self._path)
        if (size := transport.size(self._path)) != self._file_nbytes:
            raise TransportError(f"{size} bytes arrived of {self._file_nbytes:,}", where=self._where, transient=True)
        self.abort()


def _linked(link: str, folder: str) -> str:
    """The address of what a page of a web server links to; "" for what is not directly in the folder."""
    above = f"{folder.partition('?')[0].rstrip('/')}/"
    target = urlsplit(urljoin(above, html.unescape(link.removeprefix(above))))
    host, root = urlsplit(above)[1:3]
    name = target.path.removeprefix(root)
    is_here = (target.netloc, target.path) == (host, root + name) and "/" not in name.rstrip("/")
    return f"{above}{name}" if name and is_here else ""


def _modified_s(info: Mapping[str, object]) -> float | None:
    """Time of the last change of a file; the key differs between file systems."""
    found = next((info[name] for name in _MODIFIED if name in info), None)
    if isinstance(found, str):
        with suppress(ValueError):
            found = datetime.fromisoformat(found)
    if isinstance(found, datetime):
        return found.timestamp()
    return float(found) if isinstance(found, (int, float)) else None
