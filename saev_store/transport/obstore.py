"""Object stores through obstore: ranges, documents, listings and uploads."""

from __future__ import annotations

import asyncio
import atexit
import contextlib
import os
import sys
import threading
import time
from collections.abc import Awaitable, Callable, Mapping, Sequence
from datetime import timedelta
from functools import partial
from typing import TYPE_CHECKING, Literal, NamedTuple, cast

from saev_store._runtime.optional import need
from saev_store.errors import ArgumentError, NotFoundError, SaevStoreError, TransportError
from saev_store.transport import _remote
from saev_store.transport._errors import shown, status_of
from saev_store.transport._remote import CONNECT_TIMEOUT_S, IN_FLIGHT, RemoteTransport, check_fork
from saev_store.transport.base import Entry, FileStat, Sink
from saev_store.transport.checks import Buffer, ReadCost, too_big

if TYPE_CHECKING:
    from obstore import AsyncWritableFile, ObjectMeta
    from obstore.store import ObjectStore

_KINDS = {"s3": "s3", "s3a": "s3", "gs": "gs", "gcs": "gs"}
#: obstore's names of s3fs's options; the last one wins.
_RENAMED = {
    "anon": "skip_signature",
    "requester_pays": "request_payer",
    "key": "access_key_id",
    "secret": "secret_access_key",
    "token": "session_token",
    "endpoint_url": "endpoint",
    "client_kwargs.endpoint_url": "endpoint",
    "client_kwargs.region_name": "region",
}
#: Options that give the credentials.
_GIVEN = {"access_key_id", "credential_provider", "application_credentials"}
#: Longest request, and length of the parts of an upload; S3 requires at least 5 MiB and at most 10,000 parts.
REQUEST_BYTES, _MAX_PARTS = 8 << 20, 9_000
#: Parts of one upload that are under way at the same time.
PARTS_IN_FLIGHT = 8
#: One event loop for all clients of a process, like the threads of obstore itself.
_lock = threading.Lock()
_loop: asyncio.AbstractEventLoop | None = None
_pid = -1


class ObstoreTransport(RemoteTransport):
    """`s3://` and `gs://` through obstore. Each answer has the ETag of its object: one that is replaced while it is read is an error."""

    #: A request costs its share of the latency (30 ms, 64 in flight) and 0.1 ms of CPU: the time of 70 kB at 1 Gbit/s.
    cost = ReadCost(70_000, REQUEST_BYTES)

    def __init__(self, url: str, storage_options: Mapping[str, object] | None = None) -> None:
        super().__init__(url, storage_options or {}, safe_url=url.rstrip("/"))
        need("obstore", install="saev-store[obstore]", where=url)
        import obstore

        self.api = obstore
        self.place = _place_of(url, self.options)
        self.name = f"obstore:{self.place.kind}"
        try:
            self.store: ObjectStore = _open_store(self.place)
        except Exception as error:
            message = f"the engine obstore refuses these options: {shown(error, self.options)}"
            raise ArgumentError(message, where="storage_options", remedy='Or use engine="fsspec".') from None

    def loop(self) -> asyncio.AbstractEventLoop:
        global _loop, _pid
        with _lock:
            if _loop is None:
                _loop, _pid = asyncio.new_event_loop(), os.getpid()
                thread = threading.Thread(target=_loop.run_forever, name="saev_store-loop", daemon=True)
                thread.start()
                atexit.register(_stop, _loop, thread)
        check_fork(_pid, where=self.url)
        return _loop

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
            raise
        if len(data) != end - start:
            message = f"{len(data):,} bytes came for the range {start:,}:{end:,}"
            raise TransportError(message, where=self.where(path), transient=True)
        return data

    def list(self, path: str = "") -> Sequence[Entry]:
        key, where = self.key(path), self.where(path) if path else self.url
        found = self.call("list", where, lambda: self.api.list_with_delimiter_async(self.store, key or None))  # pyright: ignore[reportUnknownMemberType]  # Arrow tables
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
            # A prefix is whole parts of names: "a" finds "a/b", not "ab", and not "a" itself.
            listed = await self.api.list(self.store, prefix=key).collect_async()  # pyright: ignore[reportUnknownMemberType] (Arrow tables)
            if found := [meta["path"] for meta in listed]:
                await self.api.delete_async(self.store, found)
                return
            with contextlib.suppress(FileNotFoundError):
                await self.api.delete_async(self.store, key)

        self.unpin(path)
        self.call("delete", self.where(path), delete)

    def open_sink(self, path: str, *, used_nbytes: int, file_nbytes: int, replace: bool = False) -> ObstoreSink:
        self.loop()  # or a ForkError, before anything is written
        if not replace:
            self._check_absent(path)
        return ObstoreSink(self, path, used_nbytes=used_nbytes, file_nbytes=file_nbytes)


class ObstoreSink(Sink):
    """A multipart upload that appears under its name when it is committed, and never in part."""

    def __init__(self, transport: ObstoreTransport, path: str, *, used_nbytes: int, file_nbytes: int) -> None:
        super().__init__(transport.where(path), used_nbytes=used_nbytes, file_nbytes=file_nbytes)
        self._transport, self._path = transport, path
        self._part_bytes = max(REQUEST_BYTES, -(-file_nbytes // _MAX_PARTS))
        self._writer: AsyncWritableFile = transport.api.open_writer_async(
            transport.store, transport.key(path), buffer_size=self._part_bytes, max_concurrency=PARTS_IN_FLIGHT
        )

    def _append(self, views: list[memoryview]) -> None:
        data = b"".join(views)  # a copy: the client keeps what it is given until that is sent
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
        abort = partial(self._writer.__aexit__, RuntimeError, RuntimeError("aborted"), None)  # pyright: ignore[reportUnknownMemberType]  # declared without types
        with contextlib.suppress(SaevStoreError):
            self._transport.call("abort the upload", self._where, abort)

    def _call(self, work: Callable[[], Awaitable[object]], *, nbytes: int) -> None:
        try:
            self._transport.call("upload", self._where, work, nbytes=nbytes)
        except BaseException:
            self.abort()  # a failed upload cannot continue, and its parts cost money
            raise


def _stop(loop: asyncio.AbstractEventLoop, thread: threading.Thread) -> None:
    """End the loop at exit, and wait for the client's threads: before 3.14, Python aborts the process if one is inside Rust then."""
    loop.call_soon_threadsafe(loop.stop)
    thread.join(1.0)
    ends_s = time.monotonic() + 1.0
    while time.monotonic() < ends_s:
        running = sys._current_frames()  # noqa: SLF001 # pyright: ignore[reportPrivateUsage]  # documented, in spite of its name
        if not running.keys() - {known.ident for known in threading.enumerate()}:
            return
        time.sleep(0.001)


def _file_stat(meta: ObjectMeta) -> FileStat:
    return FileStat(meta["size"], meta.get("e_tag") or str(meta.get("last_modified")))


class Bucket(NamedTuple):
    """An address, its path without slashes at its ends, and options of obstore."""

    kind: str
    bucket: str
    prefix: str
    config: Mapping[str, object]


def _place_of(url: str, options: Mapping[str, object]) -> Bucket:
    """An address with options, as obstore takes them; `ArgumentError` if it has no store for the address."""
    scheme, _, rest = url.partition("://")
    bucket, kind = rest.partition("/")[0], _KINDS.get(scheme)
    if kind is None or not bucket or not {"?", "#", "@"}.isdisjoint(url) or "::" in url:
        raise ArgumentError(
            f"obstore serves {', '.join(_KINDS)}, a bucket and a path, without user, '?' and '#'",
            where="url",
        )
    config = dict(options)
    if isinstance(client := config.get("client_kwargs"), Mapping):
        del config["client_kwargs"]
        config |= {f"client_kwargs.{name}": item for name, item in cast("Mapping[str, object]", client).items()}
    if kind == "s3":
        _complete_s3(config)
    elif (token := config.pop("token", None)) == "anon":
        config["skip_signature"] = True
    elif token is not None:  # a file
        config["application_credentials"] = token
    return Bucket(kind, bucket, rest.partition("/")[2].strip("/"), config)


def _complete_s3(config: dict[str, object]) -> None:
    """Give s3fs's options obstore's names, and add what s3fs takes from the environment."""
    for theirs, ours in _RENAMED.items():
        if (value := config.pop(theirs, None)) is not None:
            config[ours] = value
    endpoint = os.environ.get("AWS_ENDPOINT_URL_S3") or os.environ.get("AWS_ENDPOINT_URL")
    if "endpoint" in config or endpoint:
        # obstore reads the environment too, and the second key of it would win over every option.
        config["endpoint"] = config["aws_endpoint_url_s3"] = endpoint = config.get("endpoint", endpoint)
        if not str(endpoint).startswith(("http://", "https://")):
            raise ArgumentError("the end point must begin with http:// or https://", where="storage_options")
    if bundle := os.environ.get("AWS_CA_BUNDLE"):
        config.setdefault("client_kwargs.verify", bundle)
    region = os.environ.get("AWS_REGION") or os.environ.get("AWS_DEFAULT_REGION")
    if "region" not in config and (region or "endpoint" in config):  # only AWS itself minds
        config["region"] = region or "us-east-1"
    if {"access_key_id", "secret_access_key"} <= config.keys():
        config.setdefault("skip_signature", False)
        # The token of the environment belongs to other keys, and only a provider leaves it out.
        if "session_token" not in config:
            key, secret = config.pop("access_key_id"), config.pop("secret_access_key")
            config["credential_provider"] = partial(_credential, key, secret)


def _credential(key: object, secret: object) -> dict[str, object]:
    return {"access_key_id": key, "secret_access_key": secret, "token": None, "expires_at": None}


def resolves_alike(place: Bucket) -> bool:
    """Return True if obstore finds what fsspec's file systems find, which also read files, profiles and the machine's identity."""
    given, environment = place.config, os.environ
    has_keys = given.get("skip_signature") is True or bool(_GIVEN & given.keys())
    if place.kind == "gs":  # emulators speak the other one of Google's two interfaces
        has_keys |= "GOOGLE_APPLICATION_CREDENTIALS" in environment
        return has_keys and "STORAGE_EMULATOR_HOST" not in environment
    if "AWS_PROFILE" not in environment:
        has_keys |= {"AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY"} <= environment.keys()
    profiles = os.path.expanduser(environment.get("AWS_CONFIG_FILE", "~/.aws/config"))
    # The variable may give obstore an end point, and the file s3fs.
    may_differ = "AWS_ENDPOINT" in environment or os.path.exists(profiles)
    return has_keys and ("endpoint" in given or ("region" in given and not may_differ))


def _open_store(place: Bucket) -> ObjectStore:
    """The client of a bucket; any exception if obstore refuses an option."""
    from obstore import store as stores

    config = dict(place.config)
    verify = config.pop("client_kwargs.verify", None)
    client: dict[str, object] = {
        "allow_http": any(str(value).lower().startswith("http://") for value in config.values()),
        "connect_timeout": timedelta(seconds=CONNECT_TIMEOUT_S),
        "read_timeout": timedelta(seconds=_remote.READ_TIMEOUT_S),
        # For the whole request, body included: the deadline of `run` is what counts.
        "timeout": timedelta(hours=1),
        # A request that begins before the last connection is back opens another one.
        "pool_max_idle_per_host": str(2 * IN_FLIGHT),
    }
    if isinstance(verify, str):
        with open(verify, encoding="latin-1") as file:
            client["root_certificate"] = file.read()
    elif verify is False:
        client["allow_invalid_certificates"] = True
    provider = config.pop("credential_provider", None)
    retry: dict[str, object] = {
        # The waits are random: only their sum is limited.
        "max_retries": 1000,
        "retry_timeout": timedelta(seconds=_remote.RETRY_S),
        "backoff": {"init_backoff": timedelta(seconds=0.1), "max_backoff": timedelta(seconds=3), "base": 3},
    }
    make = stores.S3Store if place.kind == "s3" else stores.GCSStore
    return make(place.bucket, config=config, client_options=client, retry_config=retry, credential_provider=provider)  # pyright: ignore[reportArgumentType]  # typed dictionaries
