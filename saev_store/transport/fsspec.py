"""Files through fsspec: object stores, web servers, archives, and caches in front of them."""

from __future__ import annotations

import asyncio
import os
import re
import tempfile
import threading
from collections.abc import Awaitable, Callable, Mapping, Sequence
from contextlib import suppress
from datetime import datetime
from importlib import import_module
from typing import Any, TypeVar, cast

from saev_store.errors import ArgumentError, MissingDependencyError, NotFoundError, TransportError
from saev_store.transport import _remote
from saev_store.transport._errors import shown, translated
from saev_store.transport._remote import CONNECT_TIMEOUT_S, IN_FLIGHT, RemoteTransport, check_fork, run
from saev_store.transport.base import Entry, FileStat, Sink
from saev_store.transport.checks import Buffer, ReadCost, os_errors, too_big, too_short

T = TypeVar("T")

#: Protocols that hold whole files in this process or on this machine.
_NEAR_PROTOCOLS = {"file", "local", "memory", "zip", "tar"}
_S3, _GOOGLE, _WEB = {"s3", "s3a"}, {"gs", "gcs"}, {"http", "https"}
_EXTRAS = {**dict.fromkeys(_S3, "s3"), **dict.fromkeys(_GOOGLE, "gcs")}
#: With less, as by default, aiohttp stops and resumes the socket several times for each answer.
_BUFFER_BYTES = 8 << 20
#: Names of what distinguishes a file from others of its name, as file systems have it.
_VERSIONS = ("generation", "ETag", "etag", "Last-Modified", "LastModified", "mtime", "modified", "created")
_MODIFIED = ("LastModified", "mtime", "updated", "last_modified", "modified")
_FIRST_WAIT_S, _LONGEST_WAIT_S = 0.1, 3.0
#: Threads take turns: all members of an archive are read through one file object, a cache downloads a file where it opens it,
#: and on some file systems "exists" and "write" are two steps.
_TURN = threading.RLock()


class FsspecTransport(RemoteTransport):
    """Files at any fsspec URL.

    Asynchronous file systems (object stores, HTTP) read all ranges of a call side by side, with time-outs. The others (archives,
    caches, SFTP, …) read one range after the other, in one thread at a time.

    fsspec's answers have no version. That of a file is looked up before its first range is read: an object that is replaced later by
    one of the same length is not noticed.
    """

    #: A request is about a millisecond of Python: the time of 180 kB at 1 Gbit/s, with its latency.
    cost = ReadCost(180_000, 8 << 20)

    def __init__(self, url: str, storage_options: Mapping[str, object] | None = None) -> None:
        super().__init__(url, storage_options or {}, safe_url=_safe_url(url))
        if "credential_provider" in self.options:
            raise ArgumentError("only obstore takes a credential_provider", where="storage_options")
        self.protocols = [_protocol(link) for link in url.split("::")]
        self.name = f"fsspec:{'::'.join(self.protocols)}"
        self._pid = os.getpid()
        self.fs, root = _open_filesystem(url, self.protocols, self.options)
        # By type: a caching file system pretends to have the attributes of the one it wraps.
        self.is_async = self.protocols[0] != "dir" and issubclass(
            type(self.fs), import_module("fsspec.asyn").AsyncFileSystem
        )
        self._root = root.rstrip("/") if root.strip("/") else root
        above, question, query = self._root.partition("?") if "://" in self._root else (self._root, "", "")
        self._above, self._query = f"{above.rstrip('/')}/" if above else "", question + query

    def loop(self) -> asyncio.AbstractEventLoop:
        check_fork(self._pid, where=self.url)
        return self.fs.loop

    def key(self, path: str) -> str:
        below = self._below(path)
        return f"{self._above}{below}{self._query}" if below else self._root

    def ask(self, operation: str, *arguments: object, nbytes: int = 0, **options: Any) -> Any:  # noqa: ANN401  # fsspec has no types
        """The result of an operation; an asynchronous one is tried again, and has the time-out for `nbytes`."""
        if self.is_async:
            begin = getattr(self.fs, f"_{operation}")
            return run(lambda: self.again(lambda: begin(*arguments, **options)), self.loop(), nbytes=nbytes)
        check_fork(self._pid, where=self.url)
        with _TURN:
            return getattr(self.fs, operation)(*arguments, **options)

    async def again(self, work: Callable[[], Awaitable[T]]) -> T:
        """The result of `work()`; errors of a busy or broken service are tried again for `RETRY_S`."""
        wait_s, now_s = _FIRST_WAIT_S, asyncio.get_running_loop().time
        ends_s = now_s() + _remote.RETRY_S
        while True:
            try:
                return await work()
            except Exception as error:
                ours = translated(error, self.options, doing="read", where="")
                if not (isinstance(ours, TransportError) and ours.transient) or now_s() + wait_s > ends_s:
                    raise
            await asyncio.sleep(wait_s)
            wait_s = min(2 * wait_s, _LONGEST_WAIT_S)

    def read(self, path: str, *, max_bytes: int | None = None) -> bytes:
        where, key = self.where(path), self.key(path)
        limits: dict[str, int] = {} if max_bytes is None else {"start": 0, "end": max_bytes + 1}
        with self.errors("read", where):
            try:
                found: bytes = self.ask("cat_file", key, nbytes=max_bytes or 0, **limits)
            except Exception:
                if not limits or self.stat(path).nbytes > 0:
                    raise
                return b""  # servers refuse any range of an empty file
        if max_bytes is not None and len(found) > max_bytes:
            raise too_big(where, size=len(found), max_bytes=max_bytes)
        return found

    def stat(self, path: str) -> FileStat:
        key = self.key(path)
        with self.errors("look at it", self.where(path)):
            self.fs.invalidate_cache(key)
            found = self.ask("info", key)
            # Caches look sizes up in a list of the folder, which may lack them: the file system behind them knows.
            behind = getattr(self.fs, "fs", None) if found.get("size") is None else None
            return self._file_stat(path, found if behind is None else behind.info(key))

    def _file_stat(self, path: str, found: Mapping[str, object]) -> FileStat:
        size = found.get("size")
        if not isinstance(size, int) or found.get("type") == "directory":
            raise TransportError("the size of this file is not known, or it is a folder", where=self.where(path))
        return FileStat(size, next((str(found[name]) for name in _VERSIONS if found.get(name) is not None), ""))

    def _fetch(self, ranges: Sequence[tuple[str, int, int]], use: Callable[[int, Buffer], object]) -> None:
        for path in {path for path, _, _ in ranges}:
            self._pinned(path)
        if self.is_async:
            super()._fetch(ranges, use)
            return
        for number, (path, start, end) in enumerate(ranges):
            with self.errors("read", self.where(path)):
                data = self.ask("cat_file", self.key(path), start=start, end=end)
            use(number, self._checked(data, path, start, end))

    async def _get(self, path: str, start: int, end: int) -> bytes:
        key = self.key(path)
        cat, info = (getattr(self.fs, name) for name in ("_cat_file", "_info"))
        if (pinned := self._pins.get(self._below(path))) is None:
            pinned = self._file_stat(path, await self.again(lambda: info(key)))
        self._pin(path, pinned, end)

        async def once() -> bytes:
            async with self.slots:  # free between two tries
                return self._checked(await cat(key, start=start, end=end), path, start, end)

        return await self.again(once)

    def _checked(self, data: bytes, path: str, start: int, end: int) -> bytes:
        """The bytes, of the length that was requested: servers may ignore ranges."""
        missing = end - start - len(data)
        if missing > 0 and not self.is_async:  # a file that was cut
            raise too_short(self.where(path), size=start + len(data), needed=end)
        if missing:
            message = f"{len(data):,} bytes came for the range {start:,}:{end:,}"
            remedy = "Use a server that answers range requests; `python -m http.server` does not."
            raise TransportError(message, where=self.where(path), remedy=remedy, transient=missing > 0)
        return data

    def list(self, path: str = "") -> Sequence[Entry]:
        key = self.key(path)
        with self.errors("list", self.where(path) if path else self.url):
            self.fs.invalidate_cache(key)
            found = self.ask("ls", key, detail=True)
            if not found:  # an archive lists a folder that it does not have
                self.ask("info", key)
        entries: dict[str, Entry] = {}
        for info in found:
            named, size = str(info["name"]), info.get("size")
            name = named.rstrip("/")
            if not name.strip("/") or name.strip("/") == key.strip("/"):  # the folder's own placeholder
                continue
            relative = f"{path}/{name.rpartition('/')[2]}" if path else name.rpartition("/")[2]
            is_dir = info.get("type") == "directory" or (named.endswith("/") and not size)
            nbytes = size if isinstance(size, int) and not is_dir else None
            entries[relative] = Entry(relative, is_dir, nbytes, None if is_dir else _modified_s(info))
        return [entries[name] for name in sorted(entries)]

    def put(self, path: str, data: Buffer) -> None:
        with self.errors("write", self.where(path)):
            self.make_parent(path)
            self.unpin(path)
            self.ask("pipe_file", self.key(path), bytes(data), nbytes=len(data))

    def create(self, path: str, data: Buffer) -> None:
        """Create a file unless its name is taken; where a service has no conditional writes, two processes may both succeed."""
        if not self.is_async or not self.is_conditional:
            with _TURN:
                self._check_absent(path)
                self.put(path, data)
            return
        with self.errors("create", self.where(path)):
            self.ask("pipe_file", self.key(path), bytes(data), mode="create", nbytes=len(data))

    def delete(self, path: str) -> None:
        key = self.key(path)
        self.unpin(path)
        with suppress(NotFoundError), self.errors("delete", self.where(path)):
            self.fs.invalidate_cache(key)
            # Not `rm`, to which some names are patterns.
            infos = self.ask("find", key, detail=True, withdirs=not self.is_async)
            for name in sorted(infos, reverse=True):  # what is in a folder before the folder
                self.ask("rmdir" if infos[name].get("type") == "directory" else "rm_file", name)

    def open_sink(self, path: str, *, used_nbytes: int, file_nbytes: int, replace: bool = False) -> SpooledSink:
        if not replace:
            self._check_absent(path)
        return SpooledSink(self, path, used_nbytes=used_nbytes, file_nbytes=file_nbytes)

    def make_parent(self, path: str) -> None:
        if not self.is_async:
            self.fs.makedirs(self.key(path).rpartition("/")[0] or "/", exist_ok=True)


class SpooledSink(Sink):
    """A file that is collected in `$TMPDIR` and uploaded by `commit`; a killed process leaves nothing behind."""

    def __init__(self, transport: FsspecTransport, path: str, *, used_nbytes: int, file_nbytes: int) -> None:
        super().__init__(transport.where(path), used_nbytes=used_nbytes, file_nbytes=file_nbytes)
        self._transport, self._path = transport, path
        with os_errors("$TMPDIR", f"collect {self._where}"):
            self._spool = tempfile.TemporaryFile()  # noqa: SIM115  # until it is released

    def _append(self, views: list[memoryview]) -> None:
        with os_errors(self._where, "collect"):
            self._spool.writelines(views)

    def _finish(self) -> None:
        transport = self._transport
        with os_errors(self._where, "collect"):
            self._spool.truncate(self._file_nbytes)
            self._spool.seek(0)  # on some systems, opening /dev/fd/N shares the position
        with transport.errors("upload", self._where):
            transport.make_parent(self._path)
            # gcsfs compares no checksum unless it is asked to; s3fs adds a CRC32 to every part by itself.
            options = {"consistency": "md5"} if transport.protocols[0] in _GOOGLE else {}
            key = transport.key(self._path)
            transport.ask("put_file", f"/dev/fd/{self._spool.fileno()}", key, nbytes=self._file_nbytes, **options)
        transport.unpin(self._path)

    def _release(self) -> None:
        with suppress(OSError):  # of a full disk
            self._spool.close()


def _modified_s(info: Mapping[str, Any]) -> float | None:
    """Time of the last change of a file; the key differs between file systems."""
    found = next((info[name] for name in _MODIFIED if name in info), None)
    found = datetime.fromisoformat(found) if isinstance(found, str) else found
    return found.timestamp() if isinstance(found, datetime) else found


def _open_filesystem(url: str, protocols: Sequence[str], options: Mapping[str, object]) -> tuple[Any, str]:
    """The file system behind an address, and its name of the address."""
    where = _safe_url(url)
    try:
        ours = _tuned(protocols[0], options) if len(protocols) == 1 else dict(options)
        for protocol in set(protocols) if len(protocols) > 1 else ():
            if found := _tuned(protocol, cast("Mapping[str, object]", ours.get(protocol) or {})):
                ours[protocol] = found
        return import_module("fsspec.core").url_to_fs(url, **ours)
    except Exception as error:
        text = shown(error, options)
        if isinstance(error, ImportError) or "Protocol not known" in text:
            extras = sorted({_EXTRAS[protocol] for protocol in protocols if protocol in _EXTRAS})
            raise MissingDependencyError(
                f"this address needs more than is installed: {text}",
                where=where,
                remedy=f"Run: pip install 'saev-store[{','.join(extras)}]'." if extras else "Check the address.",
            ) from error
        if isinstance(error, (AttributeError, TypeError, ValueError)):
            raise ArgumentError(f"{where} cannot be opened so: {text}", where="storage_options") from None
        raise translated(error, options, doing="open", where=where) from None


def _tuned(protocol: str, options: Mapping[str, object]) -> dict[str, object]:
    """The options of one file system, with ours if the caller gives none: connections and time-outs."""
    if protocol in _S3:
        config = {
            "max_pool_connections": IN_FLIGHT,  # botocore's default is 10
            "connect_timeout": CONNECT_TIMEOUT_S,
            "read_timeout": _remote.READ_TIMEOUT_S,
            # s3fs retries too, and the two multiply. This one is for status 429, which s3fs does not retry.
            "retries": {"max_attempts": 1, "mode": "standard"},
            **cast("Mapping[str, object]", options.get("config_kwargs") or {}),
        }
        return {"use_listings_cache": False, **options, "config_kwargs": config}
    if protocol not in _GOOGLE | _WEB:
        return dict(options)
    from aiohttp import ClientTimeout

    timeout = ClientTimeout(total=None, sock_connect=CONNECT_TIMEOUT_S, sock_read=_remote.READ_TIMEOUT_S)
    if protocol in _GOOGLE:
        return {"use_listings_cache": False, "requests_timeout": timeout, **options}
    client = cast("Mapping[str, object]", options.get("client_kwargs") or {})
    # To a client that takes compressed answers some servers send the whole file, compressed.
    headers = {"Accept-Encoding": "identity", **cast("Mapping[str, str]", options.get("headers") or {})}
    ours = {"timeout": timeout, "read_bufsize": _BUFFER_BYTES, **client}
    return {"use_listings_cache": False, **options, "client_kwargs": ours, "headers": headers}


def _safe_url(url: str) -> str:
    """A URL that may be shown: without user, password, query and trailing slash."""
    links: list[str] = []
    for link in url.split("::"):
        is_near = _protocol(link) in _NEAR_PROTOCOLS
        safe = link if is_near else re.sub(r"://[^/]*@", "://", re.split(r"[?#]", link, maxsplit=1)[0])
        links.append(safe if safe.endswith("://") else safe.rstrip("/"))
    return "::".join(links)


def _protocol(link: str) -> str:
    head, separator, _ = link.partition("://")
    return head.lower() if separator or head.isidentifier() else "file"
