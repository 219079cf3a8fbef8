"""Files through fsspec: object stores, web servers, archives, and caches in front of them."""

from __future__ import annotations

import html
import os
import tempfile
import threading
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from datetime import datetime
from typing import Any, cast

from saev_store.errors import NotFoundError, TransportError, kind_of
from saev_store.transport._fsspec_client import NEAR_PROTOCOLS, FsspecClient, safe_url
from saev_store.transport._remote import RemoteTransport
from saev_store.transport.base import Entry, FileStat, Transport, UnfinishedUpload
from saev_store.transport.checks import Buffer, ReadCost, os_errors, too_big, too_short
from saev_store.transport.durable import FdSink

#: A request through fsspec's clients is about a millisecond of Python: the time of 180 kB at 1 Gbit/s, with its latency.
_FAR = ReadCost(180_000, 8 << 20)
_NEAR = ReadCost(256 << 10, 64 << 20)
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


class FsspecTransport(RemoteTransport[FsspecClient]):
    """Any fsspec URL. Each returned buffer is memory of its own.

    Asynchronous file systems (object stores, HTTP) read all ranges of a call side by side, with a time-out of a minute plus one
    second per MiB. The others (archives, caches, SFTP, …) read one range after the other, in one thread at a time, with the
    time-outs of their library.

    fsspec's answers have no version. The version of a file is looked up before its first range is read, and again by `recheck`: an
    object that is replaced in between by one of the same length is noticed only then. `ObstoreTransport` compares each answer.

    Args:
        url: The root; chained URLs (`simplecache::s3://…`, `zip://…::file://…`) work.
        storage_options: fsspec's own, and `verify` and `conditional_create`.

    Raises:
        MissingDependencyError: no installed package serves the protocol.
        ArgumentError: the file system refuses the options.
    """

    def __init__(self, url: str, storage_options: Mapping[str, object] | None = None) -> None:
        self.client = FsspecClient(url, storage_options or {})
        super().__init__(safe_url(url))
        self.name = f"fsspec:{'::'.join(self.client.protocols)}"
        self.cost = _NEAR if NEAR_PROTOCOLS.issuperset(self.client.protocols) else _FAR

    def key(self, path: str) -> str:
        return self.client.key(self._below(path))

    # -- reading -------------------------------------------------------------------------------------------------------

    def read(self, path: str, *, max_bytes: int | None = None) -> bytes:
        """The whole of a small file in one request; no more than `max_bytes + 1` bytes travel."""
        where, key = self.where(path), self.key(path)
        limits: dict[str, int] = {} if max_bytes is None else {"start": 0, "end": max_bytes + 1}
        with self.client.errors("read", where):
            try:
                found = self.client.ask("cat_file", key, nbytes=max_bytes or 0, **limits)  # pyright: ignore[reportArgumentType]  # `nbytes` is not among them
            except Exception:
                # Servers refuse any range of an empty file.
                with suppress(Exception):
                    if limits and self.stat(path).nbytes == 0:
                        return b""
                raise
        self.tally.add(read=len(found))
        if max_bytes is not None and len(found) > max_bytes:
            raise too_big(where, size=None, max_bytes=max_bytes)
        return found

    def stat(self, path: str) -> FileStat:
        client, key = self.client, self.key(path)
        with client.errors("look at it", self.where(path)):
            client.fs.invalidate_cache(key)
            found = client.ask("info", key)
            # Caches look sizes up in a list of the folder, which may lack them: the file system behind them knows.
            behind = getattr(client.fs, "fs", None) if found.get("size") is None else None
            return self._file_stat(path, found if behind is None else behind.info(key))

    def _file_stat(self, path: str, found: Mapping[str, object]) -> FileStat:
        self.tally.add()
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

    def _fetch(self, ranges: Sequence[tuple[str, int, int]], use: Callable[[int, Buffer], object]) -> None:
        needed: dict[str, int] = {}
        for path, _, end in ranges:
            needed[path] = max(end, needed.get(path, 0))
        for path, end in needed.items():
            self._check_length(path, end)

        client, where = self.client, self.where(ranges[-1][0]) if ranges else self.url
        try:
            with client.errors("read", where):
                if client.is_async and ranges:
                    nbytes = sum(end - start for _, start, end in ranges)
                    client.run(lambda: self._get_all(ranges, use), nbytes=nbytes)
                    return
                for number, (path, start, end) in enumerate(ranges):
                    data = client.ask("cat_file", self.key(path), start=start, end=end)
                    use(number, self._checked(data, path, start, end))
        except TransportError:
            for path, end in needed.items():
                if (size := self.stat(path).nbytes) < end:  # it was cut in the meantime
                    raise too_short(self.where(path), size=size, needed=end) from None
            raise

    async def _get(self, path: str, start: int, end: int) -> bytes:
        """The bytes of one request, on the loop of the file system."""
        client, key = self.client, self.key(path)
        cat, info = (getattr(client.fs, name) for name in ("_cat_file", "_info"))
        if (pinned := self._pins.get(self._below(path))) is None:
            pinned = self._file_stat(path, await client.again(lambda: info(key)))
        self._pin(path, pinned, end)

        async def once() -> bytes:
            async with client.slots:  # free between two tries
                return self._checked(await cat(key, start=start, end=end), path, start, end)

        return await client.again(once)

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

    def list(self, path: str = "") -> Sequence[Entry]:
        """The names directly in a folder, sorted; never from a cache."""
        client, key = self.client, self.key(path)
        with client.errors("list", self.where(path) if path else self.url):
            client.fs.invalidate_cache(key)
            self.tally.add()
            found = client.ask("ls", key, detail=True)
            if not found and path:
                client.ask("info", key)  # archives of older releases list a folder that does not exist as empty
        entries: dict[str, Entry] = {}
        for info in found:
            named, size = str(info["name"]), info.get("size")
            if client.protocols[0] in _WEB:  # what a page links to, in this folder or elsewhere
                named, above = html.unescape(named).partition("?")[0], f"{key.partition('?')[0].rstrip('/')}/"
                if not named.startswith(above) or "/" in named.removeprefix(above).rstrip("/"):
                    continue
            name = named.rstrip("/")
            if not name.strip("/") or name.strip("/") == key.strip("/"):  # the folder's own placeholder
                continue
            relative = f"{path}/{name.rpartition('/')[2]}" if path else name.rpartition("/")[2]
            is_dir = info.get("type") == "directory" or (named.endswith("/") and not size)
            nbytes = size if isinstance(size, int) and not is_dir else None
            entries[relative] = Entry(relative, is_dir, nbytes, None if is_dir else _modified_s(info))
        return [entries[name] for name in sorted(entries)]

    # -- writing -------------------------------------------------------------------------------------------------------

    def put(self, path: str, data: Buffer) -> None:
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
        client = self.client
        if not client.is_async or not client.is_conditional:
            with _CREATING:
                self._check_absent(path)
                self.put(path, data)
            return
        with client.errors("create", self.where(path)):
            client.ask("pipe_file", self.key(path), bytes(data), mode="create", nbytes=len(data))
        self.tally.add(written=len(data))

    def delete(self, path: str) -> None:
        client, key = self.client, self.key(path)
        self.unpin(path)
        self.tally.add()
        with suppress(NotFoundError), client.errors("delete", self.where(path)):
            client.fs.invalidate_cache(key)
            if client.protocols[0] in {"file", "local"}:
                client.ask("rm", key, recursive=True)
                return
            # Not `rm`, to which some names are patterns.
            infos = client.ask("find", key, detail=True, withdirs=not client.is_async)
            for name in sorted(infos, reverse=True):  # what is in a folder before the folder
                client.ask("rmdir" if infos[name].get("type") == "directory" else "rm_file", name)

    def open_sink(self, path: str, *, used_nbytes: int, file_nbytes: int, replace: bool = False) -> SpooledSink:
        """A file that is collected on this machine and uploaded when it is committed."""
        if not replace:
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
                for upload in cast("list[dict[str, Any]]", page.get("Uploads") or []):
                    key = str(upload["Key"])
                    if not prefix or key == prefix or key.startswith(f"{prefix}/"):
                        below = f"{bucket}/{key}".removeprefix(folder).lstrip("/")
                        found.append(UnfinishedUpload(below, upload["UploadId"], upload["Initiated"].timestamp()))
                if not page.get("IsTruncated"):
                    return found
                markers = {"KeyMarker": page["NextKeyMarker"], "UploadIdMarker": page["NextUploadIdMarker"]}

    def abort_upload(self, upload: UnfinishedUpload) -> None:
        """Abort an upload and delete its parts."""
        with suppress(NotFoundError), self.client.errors("abort an unfinished upload", self.where(upload.path)):
            bucket, _, key = self.key(upload.path).partition("/")
            self.client.ask("abort_mpu", bucket, key, upload.upload_id)

    def make_parent(self, path: str) -> None:
        """Make the folder of a file if the file system has folders."""
        if not self.client.is_async:
            self.client.fs.makedirs(self.key(path).rpartition("/")[0] or "/", exist_ok=True)


class SpooledSink(FdSink):
    """A file that is collected in `$TMPDIR` and uploaded by `commit`; a killed process leaves nothing behind."""

    def __init__(self, transport: FsspecTransport, path: str, *, used_nbytes: int, file_nbytes: int) -> None:
        super().__init__(transport.where(path), transport.tally, used_nbytes=used_nbytes, file_nbytes=file_nbytes)
        self._transport, self._path = transport, path
        with os_errors("$TMPDIR", f"reserve {used_nbytes:,} bytes to collect {self._where}"):
            with tempfile.TemporaryFile() as spool:  # without a name
                self._fd = os.dup(spool.fileno())
            self._reserve()

    def _finish(self) -> None:
        """Upload the whole file under its name, and compare its size there."""
        transport, client, fd = self._transport, self._transport.client, self._fd
        with os_errors(self._where, "upload"):
            os.ftruncate(fd, self._file_nbytes)
            os.lseek(fd, 0, os.SEEK_SET)  # on some systems, opening /dev/fd/N shares the position
        with client.errors("upload", self._where):
            transport.make_parent(self._path)
            options: Mapping[str, object] = _CHECKSUMS.get("::".join(client.protocols)) or {}
            key = transport.key(self._path)
            client.ask("put_file", f"/dev/fd/{fd}", key, nbytes=self._file_nbytes, **options)  # pyright: ignore[reportArgumentType]  # `nbytes` is not among them
        transport.unpin(self._path)
        if (size := transport.size(self._path)) != self._file_nbytes:
            raise TransportError(f"{size} bytes arrived of {self._file_nbytes:,}", where=self._where, transient=True)


def _modified_s(info: Mapping[str, object]) -> float | None:
    """Time of the last change of a file; the key differs between file systems."""
    found = next((info[name] for name in _MODIFIED if name in info), None)
    if isinstance(found, str):
        with suppress(ValueError):
            found = datetime.fromisoformat(found)
    if isinstance(found, datetime):
        return found.timestamp()
    return float(found) if isinstance(found, (int, float)) else None
