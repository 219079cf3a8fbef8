"""Files through fsspec: object stores, web servers, archives, caches in front of them."""

from __future__ import annotations

import contextlib
import html
import os
import re
import stat
from collections.abc import Mapping, Sequence
from datetime import datetime
from functools import partial
from typing import cast
from urllib.parse import urljoin, urlsplit

from saev_store._runtime.threads import ForkSafeLock, off_loop
from saev_store.errors import DeadlineError, NotFoundError, SaevStoreError, StoreExistsError, TransportError, kind_of
from saev_store.transport._remote import Pins, RemoteTransport, Version, again, task_group
from saev_store.transport.base import Buffer, Entry, ReadCost, Transport, UnfinishedUpload, far_cost
from saev_store.transport.checks import check_ranges, readinto_by_ranges, too_big, too_short
from saev_store.transport.credentials import StorageOptions
from saev_store.transport.fsspec._client import NEAR_PROTOCOLS, WEB, FileSystem, FsspecClient
from saev_store.transport.fsspec._failures import means_exists
from saev_store.transport.fsspec._ranges import cat_ranges, get_range, read_ranges
from saev_store.transport.fsspec._sink import SpooledSink, list_uploads
from saev_store.transport.local.files import check_regular

#: A request through fsspec's clients is about a millisecond of Python.
_FAR = far_cost(cpu_s=1e-3)
_NEAR = ReadCost(256 << 10, 64 << 20)
#: Services that copy objects by themselves, and of these the ones whose client lists unfinished uploads.
_COPYING = {"s3", "s3a", "gs", "gcs"}
_LISTING_UPLOADS = {"s3", "s3a"}
#: Files of this machine.
_HERE = {"file", "local"}
#: What makes a name a pattern to fsspec.
_PATTERN = re.compile(r"[*?[]")
# Where "exists" and "write" are two steps, at least the threads of this process take turns.
_CREATE_LOCK = ForkSafeLock()


class FsspecTransport(RemoteTransport[FsspecClient]):
    """Any fsspec URL. Each returned buffer is memory of its own.

    Asynchronous file systems (object stores, HTTP) fetch all ranges of a call concurrently, with a time-out of `timeout_s` plus
    one second per MiB. The others (archives, caches, SFTP, …) read one range after the other, in one thread at a time, with the
    time-outs of their library.

    On S3, Google and web servers the first range of a file pins its ETag or generation and its size: if they change, reading the
    file is an error, never a mixture of two objects; `close` unpins all files. Elsewhere only a changed length is noticed.

    Args:
        url: The root; chained URLs (`simplecache::s3://…`, `zip://…::file://…`) work.
        storage_options: fsspec's own; never part of a message, of `repr` or of a pickle that outlives this process and its
            children.
        timeout_s: Time-out of one operation.
        pins: Versions of files that another client of the same service has read.

    Raises:
        MissingDependencyError: no installed package serves the protocol.
        ArgumentError: the file system refuses the options.
    """

    def __init__(
        self,
        url: str,
        storage_options: Mapping[str, object] | None = None,
        *,
        timeout_s: float = 60.0,
        pins: Pins | None = None,
    ) -> None:
        super().__init__(FsspecClient(url, StorageOptions(storage_options or {}), timeout_s), pins)
        self.client.fs()
        self.name = f"fsspec:{'::'.join(self.client.protocols)}"
        # Few large requests for remote files; more, smaller ones for files of this machine.
        self.cost = _NEAR if NEAR_PROTOCOLS.issuperset(self.client.protocols) else _FAR

    def read(self, path: str, *, max_bytes: int | None = None) -> bytes:
        """The whole of a small file in one request; no more than `max_bytes + 1` bytes travel."""
        below = self.below(path)
        # A range, even one without an end, makes s3fs skip the request for the size.
        end = None if max_bytes is None else max_bytes + 1
        self._check_regular(below)
        try:
            with self.client.errors("read", self.where(below)), self.client.turn():
                data = cast("bytes", self.client.ask("cat_file", self.key(below), start=0, end=end, nbytes=end or 0))
        except TransportError as error:
            if error.transient:  # who does not answer is not asked again: a client may take a minute to give up
                raise
            # Servers refuse any range of an empty file.
            with contextlib.suppress(SaevStoreError):
                if self._size(below, once=True) == 0:
                    return b""
            raise
        self.client.requests.add("read", read=len(data))
        if max_bytes is not None and len(data) > max_bytes:
            raise too_big(self.where(below), size=None, max_bytes=max_bytes)
        return bytes(data)

    def size(self, path: str) -> int:
        return self._size(self.below(path))

    def _size(self, below: str, *, once: bool = False) -> int:
        """The size of a file; `once` after a failure, where a server that is busy was waited for before."""
        with self.client.errors("look at it", self.where(below)):
            self.client.requests.add("size")
            try:
                info = cast("Mapping[str, object]", self.client.ask("info", self.key(below), once=once))
            except FileNotFoundError:
                self._check_link(below)
                raise
            size = info.get("size")
            if size is None and info.get("type") == "file" and not self.client.is_async:
                size = self.client.inner_size(self.key(below))
        if info.get("type") == "directory":
            raise TransportError("this is a folder, but a file is needed", where=self.where(below))
        if not isinstance(size, int):
            raise TransportError("the server does not tell the size of this file", where=self.where(below))
        return size

    def get_ranges(self, path: str, *, starts: Sequence[int], ends: Sequence[int]) -> Sequence[Buffer]:
        """One fresh buffer per range, each of exactly the length asked for; empty ranges cost no request.

        Raises:
            CorruptShardError: the file ends before a range does.
            TransportError: the server sent something else than the range.
        """
        below = self.below(path)
        needed = check_ranges(self.where(below), starts, ends)
        wanted = [index for index, (start, end) in enumerate(zip(starts, ends, strict=True)) if end > start]
        parts: list[Buffer] = [b""] * len(starts)
        if wanted:
            self._check_regular(below)
            try:
                found = self._fetch(below, [starts[index] for index in wanted], [ends[index] for index in wanted])
            except DeadlineError:
                raise
            except TransportError as error:
                self._blame(path, needed, error)
                raise
            for index, part in zip(wanted, found, strict=True):
                parts[index] = part
        return parts

    async def get_range_async(self, path: str, *, start: int, end: int) -> Buffer:
        """As `get_ranges` of one range, awaited in any event loop; where the file system is not asynchronous, in a thread."""
        below = self.below(path)
        where = self.where(below)
        check_ranges(where, [start], [end])
        if not self.client.is_async or start == end:
            return (await off_loop(partial(self.get_ranges, path, starts=[start], ends=[end])))[0]
        try:
            with self.client.errors("read", where):
                work = partial(self._requested, below, [start], [end], where)
                return (await self.client.awaited(work, nbytes=end - start))[0]
        except DeadlineError:
            raise
        except TransportError as error:
            await off_loop(partial(self._blame, path, end, error))
            raise

    def readinto(self, path: str, *, starts: Sequence[int], buffers: Sequence[memoryview]) -> None:
        readinto_by_ranges(self, path, starts, buffers, where=self.where(self.below(path)))

    def _fetch(self, below: str, starts: list[int], ends: list[int]) -> list[bytes]:
        """Each range, of the version of the file that was read before."""
        client, full, where = self.client, self.key(below), self.where(below)
        with client.errors("read", where):
            if client.is_async:
                work = partial(self._requested, below, starts, ends, where, client.fs())
                return client.run(work, nbytes=sum(ends) - sum(starts))
            fs = client.fs()
            with client.turn():
                # Before the read: what is replaced in between is then an error of the next read.
                is_told = len(client.protocols) == 1 and not _HERE & set(client.protocols)
                version = _version(fs.info(full)) if is_told else None
                found = read_ranges(fs, full, starts, ends, by_range=client.has_cat_file)
            self._count(_nbytes(found))
            ranges = zip(starts, ends, found, strict=True)
            return [self._checked(below, *of, version=version, where=where) for of in ranges]

    def _check_regular(self, below: str) -> None:
        """Refuse a pipe, a socket or a device of this machine: to open one may wait for ever."""
        if len(self.client.protocols) > 1 or not _HERE.issuperset(self.client.protocols):
            return
        try:
            mode = os.stat(self.key(below)).st_mode
        except OSError:  # is told by opening it
            return
        if not stat.S_ISDIR(mode):
            check_regular(mode, where=self.where(below))

    def _check_link(self, below: str) -> None:
        """Refuse a link of this machine that leads to nothing: the file is lost, which is not to have none."""
        full = self.key(below)
        if len(self.client.protocols) == 1 and _HERE.issuperset(self.client.protocols) and os.path.islink(full):
            raise TransportError(
                f"it is a symbolic link to {os.readlink(full)!r}, where nothing is", where=self.where(below)
            )

    async def _requested(
        self, below: str, starts: list[int], ends: list[int], where: str, fs: FileSystem
    ) -> list[bytes]:
        """Each range, concurrently, in the loop of an asynchronous file system."""
        get, full = self.client.get, self.key(below)
        if get is None:
            found = await cat_ranges(fs, full, starts, ends)
            self._count(_nbytes(found))
            ranges = zip(starts, ends, found, strict=True)
            return [self._checked(below, *of, version=None, where=where) for of in ranges]

        async def once(start: int, end: int) -> bytes:
            """One try. Between two of them its slot is free: all stores share them, and others may be well."""
            data, version = await get_range(get, fs, full, start, end, where=where, arrived=self._count)
            return self._checked(below, start, end, data, version=version, where=where)

        passes = self.client.passes
        if len(starts) == 1:
            return [await again(partial(once, starts[0], ends[0]), passes)]
        async with task_group() as group:
            pairs = zip(starts, ends, strict=True)
            tasks = [group.create_task(again(partial(once, *pair), passes)) for pair in pairs]
        return [task.result() for task in tasks]

    def _count(self, nbytes: int) -> None:
        """Count bytes that have come, of requests that are counted when they end."""
        self.client.requests.add("get_ranges", read=nbytes, requests=0)

    def _checked(self, below: str, start: int, end: int, part: bytes, *, version: Version | None, where: str) -> bytes:
        """The bytes, of the length asked for and of one version of the file."""
        # fsspec can return exceptions as data, and servers may ignore ranges.
        if not isinstance(part, bytes) or len(part) != end - start:  # pyright: ignore[reportUnnecessaryIsInstance]  # whatever it declares
            got = f"{len(part):,} bytes" if hasattr(part, "__len__") else kind_of(part)
            raise TransportError(f"{got} came for the range {start:,}:{end:,}", where=where, transient=True)
        self.client.requests.add("get_ranges")
        if version is not None:
            self.pins.check(below, version, where=where)
        return part

    def _blame(self, path: str, needed: int, error: TransportError) -> None:
        """Raise `CorruptShardError` if a failed range is beyond the end of the file; servers answer that with different errors."""
        size = needed
        with contextlib.suppress(SaevStoreError):
            size = self._size(self.below(path), once=True)
        if size < needed:
            raise too_short(error.where or path, size=size, needed=needed) from None

    def list(self, path: str = "") -> Sequence[Entry]:
        """The names in a folder, sorted; never from a cache."""
        below = self.below(path) if path else self._folder
        full = self.key(below)
        with self.client.errors("list", self.where(below)):
            fs = self.client.fs()
            fs.invalidate_cache(full)
            self.client.requests.add("list")
            found = cast("list[Mapping[str, object]]", self.client.ask("ls", full, detail=True))
            if not found and path:
                fs.info(full)  # archives of older releases list a folder that is not there as empty
        entries: dict[str, Entry] = {}
        for info in found:
            named = str(info["name"])
            if self.client.protocols in WEB and (named := _linked(named, full)) is None:
                continue
            name = (named.partition("?")[0] if "://" in named else named).rstrip("/")
            if name == full.strip("/") or name == full.rstrip("/"):  # object stores list the folder's own placeholder
                continue
            relative = f"{path}/{name.rpartition('/')[2]}" if path else name.rpartition("/")[2]
            size = info.get("size")
            is_dir = info.get("type") == "directory" or (named.endswith("/") and not size)
            entries[relative] = Entry(
                relative,
                is_dir=is_dir,
                size=None if is_dir or not isinstance(size, int) else size,
                modified_s=None if is_dir else _modified_s(info),
            )
        return [entries[name] for name in sorted(entries)]

    def put(self, path: str, data: Buffer) -> None:
        """Create or replace a file; atomic on object stores, as good as the file system elsewhere."""
        below = self.below(path)
        self._check_regular(below)
        with self.client.errors("write", self.where(below)):
            self.client.make_parent(self.key(below))
            self.client.requests.add("put", written=len(data))
            self.pins.forget(below)
            self.client.ask("pipe_file", self.key(below), bytes(data), nbytes=len(data))

    def create(self, path: str, data: Buffer) -> None:
        """Create a file unless its name is taken.

        Exclusive against all writers where the service has conditional writes (S3, GCS); elsewhere only against the
        threads of this process. A lost answer can make a creation that succeeded look failed, also as
        `StoreExistsError`: read the file back to know.
        """
        below = self.below(path)
        full = self.key(below)
        with (
            self.client.errors("create", self.where(below)),
            _CREATE_LOCK.mutex if not self.client.is_async else contextlib.nullcontext(),
        ):
            fs = self.client.fs()
            self.client.make_parent(self.key(below))
            self.client.requests.add("create", written=len(data))
            self.pins.forget(below)
            if not self.client.is_async or type(fs).__module__.startswith("obstore"):  # it ignores the mode
                self._check_absent(path)
                self.client.ask("pipe_file", full, bytes(data), nbytes=len(data))
                return
            try:
                self.client.ask("pipe_file", full, bytes(data), mode="create", nbytes=len(data))
            except Exception as error:
                if means_exists(error):
                    raise StoreExistsError("the file already exists", where=self.where(below)) from None
                raise

    def delete(self, path: str) -> None:
        below = self.below(path)
        with contextlib.suppress(NotFoundError), self.client.errors("delete", self.where(below)):
            fs = self.client.fs()
            fs.invalidate_cache(self.key(below))
            self.client.requests.add("delete")
            self.pins.forget(below)
            self._remove(self.key(below))

    def _remove(self, full: str) -> None:
        """Delete a file or a folder of exactly this name: to `rm` some names are patterns, which others match."""
        ask = self.client.ask
        if not _PATTERN.search(full):
            ask("rm", full, recursive=True)
        elif self.client.is_async:  # object stores, which have no folders
            for name in cast("Sequence[str]", ask("find", full)):
                ask("rm_file", name)
        else:
            listed = ask("find", full, detail=True, withdirs=True, on_error="raise")
            found = cast("Mapping[str, Mapping[str, object]]", listed)
            for name in sorted(found, reverse=True):  # what is in a folder before the folder
                ask("rmdir" if found[name].get("type") == "directory" else "rm_file", name)

    def open_sink(self, path: str, *, used_nbytes: int, file_nbytes: int, resume: bool = False) -> SpooledSink:
        """A file that is collected on this machine and uploaded when it is committed; `resume` then replaces the old one."""
        self.pins.forget(self.below(path))
        if not resume:
            self._check_absent(path)
        return SpooledSink(self, path, used_nbytes=used_nbytes, file_nbytes=file_nbytes)

    def list_uploads(self, path: str = "") -> Sequence[UnfinishedUpload] | None:
        """The unfinished multipart uploads below a folder of a bucket on S3; None for other services."""
        if not self._speaks(_LISTING_UPLOADS):
            return None
        below = self.below(path) if path else self._folder
        with self.client.errors("list unfinished uploads", self.where(below)):
            self.client.requests.add("uploads")
            bucket, _, prefix = self.key(below).strip("/").partition("/")
            return list_uploads(self.client, bucket, prefix, folder=self.key(self._folder).strip("/"))

    def abort_upload(self, upload: UnfinishedUpload) -> None:
        below = self.below(upload.path)
        with contextlib.suppress(NotFoundError), self.client.errors("abort an unfinished upload", self.where(below)):
            self.client.requests.add("uploads")
            bucket, _, key = self.key(below).partition("/")
            self.client.ask("abort_mpu", bucket, key, upload.upload_id)

    def copy_within(self, source: Transport, source_path: str, path: str) -> bool:
        """Let S3 or Google copy a file; False for other services, or where the two are opened differently."""
        ours, below = self.client, self.below(path)
        if not isinstance(source, FsspecTransport) or not self._speaks(_COPYING):
            return False
        theirs, from_below = source.client, source.below(source_path)
        if set(theirs.protocols) != set(ours.protocols) or theirs.options.all != ours.options.all:
            return False
        self.pins.forget(below)
        with ours.errors("copy", self.where(below)):
            ours.requests.add("copy_within")
            # Up to a minute for each GiB: services copy faster, but answer only when they have finished.
            nbytes = source.size(source_path) // 16
            ours.ask("cp_file", source.key(from_below), self.key(below), nbytes=nbytes)
        return True

    def _speaks(self, protocols: set[str]) -> bool:
        """Whether the client speaks one of these protocols, with nothing in front of it."""
        return self.client.is_async and len(self.client.protocols) == 1 and self.client.protocols[0] in protocols

    def key(self, below: str) -> str:
        return self.client.key(below)


def _linked(link: str, folder: str) -> str | None:
    """The address of what a link of a web server's page of a folder leads to; None for what is not directly in the folder.

    fsspec takes links as the page spells them, entities included, and puts the folder before those that are relative.
    """
    above = f"{folder.partition('?')[0].rstrip('/')}/"
    target = urlsplit(urljoin(above, html.unescape(link.removeprefix(f"{folder.rstrip('/')}/"))))
    host, root = urlsplit(above)[1:3]
    name = target.path.removeprefix(root)
    is_here = (target.netloc, target.path) == (host, root + name) and "/" not in name.rstrip("/")
    return f"{above}{name}" if name and is_here else None


def _version(info: Mapping[str, object]) -> Version | None:
    """When a file was made or last written, with its size, where the file system tells the time."""
    found, size = (
        next((info[name] for name in ("created", "mtime", "modified") if name in info), None),
        info.get("size"),
    )
    return None if found is None else (str(found), size if isinstance(size, int) else None)


def _modified_s(info: Mapping[str, object]) -> float | None:
    """When a file was last written; the key differs between file systems."""
    found = next((info[name] for name in ("LastModified", "mtime", "updated", "last_modified") if name in info), None)
    if isinstance(found, str):
        with contextlib.suppress(ValueError):
            found = datetime.fromisoformat(found)
    if isinstance(found, datetime):
        return found.timestamp()
    return float(found) if isinstance(found, (int, float)) else None


def _nbytes(parts: Sequence[object]) -> int:
    """The bytes among what a file system gave, which may be something else."""
    return sum(len(part) for part in parts if isinstance(part, bytes))
