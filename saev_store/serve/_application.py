"""The ASGI application: keys of the Zarr view are paths, values are bodies. Damage is an error, never zeros."""

from __future__ import annotations

import hashlib
import json
import os
import re
import time
from collections.abc import AsyncIterator, Sequence
from contextlib import suppress
from pathlib import PureWindowsPath
from typing import TYPE_CHECKING, Literal, cast

from starlette.applications import Starlette
from starlette.concurrency import run_in_threadpool
from starlette.middleware import Middleware
from starlette.middleware.cors import CORSMiddleware
from starlette.requests import Request
from starlette.responses import JSONResponse, PlainTextResponse, Response, StreamingResponse
from starlette.routing import Route
from zarr.abc.store import RangeByteRequest

from saev_store.core.chunk_grid import Extent, default_chunk
from saev_store.errors import ArgumentError, CorruptShardError, DocumentError, SaevStoreError, TransportError, brief
from saev_store.serve.hosts import is_known_host
from saev_store.store.identity import recording_identity
from saev_store.validation import local_folder

if TYPE_CHECKING:
    from saev_store.store.store import ShardStore
    from saev_store.zarr import ZarrView

#: Clients pay for each request, however the store itself is read.
_MAX_GAP_BYTES = 1 << 20
#: Bytes of a value that are read at once and held for each client; a piece is one request where the store is remote.
_PIECE_BYTES = 1 << 20
_REMOTE_PIECE_BYTES = 4 << 20
_EXPOSED = ("Accept-Ranges", "Content-Length", "Content-Range", "ETag")
#: As browsers send it: without a path, also without the slash of an empty one.
_ORIGIN = re.compile(r"[a-z][a-z0-9+.-]*://(\[[0-9a-f:.]+\]|[^\s/?#@:\[\]]+)(:\d{1,5})?")
_ONE_RANGE = re.compile(r"bytes=(?:(\d{1,999})-(\d{1,999})?|-(\d{1,999}))", re.ASCII | re.IGNORECASE)


def application(
    store: ShardStore,
    *,
    chunks: Literal["auto"] | Sequence[int] = "auto",
    origins: Sequence[str] = (),
    hosts: Sequence[str] = (),
) -> Starlette:
    """An ASGI application that answers GET and HEAD for the keys of the store's Zarr view.

    Args:
        store: An opened store. It must stay open.
        chunks: As in `ShardStore.as_zarr`; `"auto"` suits clients that pay for each request.
        origins: Origins of web pages that may read the answers (CORS), `scheme://host[:port]`; `"*"` for all, `"null"` for pages
            out of files. Default: none.
        hosts: Names under which clients reach the server. Numeric addresses and `localhost` are always allowed; `"*"` allows
            all names. Requests for other names are refused, because a web page could use its own name to reach a server that
            listens on this machine only (DNS rebinding).

    Raises:
        ArgumentError: `chunks` is not a legal shape, or `origins` holds something else.
    """
    for name, texts in (("origins", origins), ("hosts", hosts)):
        if not isinstance(texts, (list, tuple, set, frozenset)):
            raise ArgumentError(f"{name} is {brief(texts)}; it must be a list of texts", where=name)
    for host in hosts:
        if not isinstance(host, str):  # pyright: ignore[reportUnnecessaryIsInstance]  # callers may not check types
            raise ArgumentError(f"{brief(host)} is no name of a host", where="hosts")
    for origin in origins:
        if not isinstance(origin, str) or (origin not in ("*", "null") and not _ORIGIN.fullmatch(origin)):  # pyright: ignore[reportUnnecessaryIsInstance]  # callers may not check types
            raise ArgumentError(
                f"{brief(origin)} is no origin, which is scheme://host[:port] in small letters and without a path",
                where="origins",
                remedy="Write for example https://viewer.example, or * for all pages.",
            )
    shape = default_chunk(store.layout, max_gap_bytes=_MAX_GAP_BYTES) if chunks == "auto" else chunks
    store = store.unmapped()  # a file that is cut while a client reads it must not end the server
    answers = _Answers(store.as_zarr(chunks=shape), store, frozenset(map(str.lower, hosts)))
    cors = Middleware(
        CORSMiddleware,
        allow_origins=list(origins),
        allow_methods=["GET", "HEAD"],
        allow_headers=["Range", "If-Range", "If-None-Match", "Cache-Control"],
        expose_headers=list(_EXPOSED),
    )
    routes = [Route("/{key:path}", answers.answer, methods=["GET", "HEAD"])]
    return Starlette(routes=routes, middleware=[cors] if origins else [])


class _Answers:
    """Answers requests for one view."""

    def __init__(self, view: ZarrView, store: ShardStore, hosts: frozenset[str]) -> None:
        self._view, self._store, self._hosts = view, store, hosts
        self._is_local = local_folder(store.transport) is not None
        self._piece_bytes = _PIECE_BYTES if self._is_local else _REMOTE_PIECE_BYTES
        self._group = _without_paths(view.keys.find("zarr.json"))
        self._about = (
            f"saev_store: {store.name}, shape {store.shape} of {store.dims}, layers {list(store.layers)}.\n\n"
            "This is a Zarr v3 group. In Python: zarr.open_group(url) or xarray.open_zarr(url);\n"
            'in JavaScript: zarr.open(zarr.root(new zarr.FetchStore(url)).resolve("activations"), { kind: "array" }).\n'
        )
        started = b"" if self._is_local else time.time_ns().to_bytes(8, "big")
        self._tag_seed = b"".join([store.metadata.raw, repr(view).encode(), started])

    async def answer(self, request: Request) -> Response:
        """The response to one request."""
        if not is_known_host(request.headers.get("host", ""), self._hosts):
            return PlainTextResponse("this server does not answer for this host name\n", status_code=421)
        key = cast("str", request.path_params["key"])
        if key == "":
            return PlainTextResponse(self._about)
        value = self._group if key == "zarr.json" else self._view.keys.find(key)
        if value is None:
            return PlainTextResponse("there is no such key\n", status_code=404)
        try:
            return await self._answer_value(request, key, value)
        except SaevStoreError as error:
            return _refusal(error)

    async def _answer_value(self, request: Request, key: str, value: bytes | Extent) -> Response:
        nbytes = self._view.shown_nbytes(value)
        etag = self._etag(value)
        headers = {"Accept-Ranges": "bytes", "Cache-Control": "no-cache", "ETag": etag}
        unwanted = request.headers.get("if-none-match", "").strip()
        if unwanted == "*" or etag in unwanted:
            return Response(status_code=304, headers=headers)
        is_current = request.headers.get("if-range", etag) == etag  # else the client has a part of another version
        has_range = (
            is_current and request.method == "GET"
        )  # ranges of other methods are to be ignored (RFC 9110, section 14.2)
        try:
            asked = parse_range(request.headers.get("range"), nbytes) if has_range else None
        except UnsatisfiableError:
            return Response(status_code=416, headers={**headers, "Content-Range": f"bytes */{nbytes}"})
        start, end = asked or (0, nbytes)
        status = 206 if asked else 200
        headers["Content-Length"] = str(end - start)
        is_document = isinstance(value, bytes) and key.rsplit("/", 1)[-1] == "zarr.json"
        headers["Content-Type"] = "application/json" if is_document else "application/octet-stream"
        if asked:
            headers["Content-Range"] = f"bytes {start}-{end - 1}/{nbytes}"
        if isinstance(value, bytes):
            body = b"" if request.method == "HEAD" else value[start:end]
            return Response(body, status_code=status, headers=headers)
        if request.method == "HEAD":
            await run_in_threadpool(self._check_ends, key, value, start, end)
            return Response(status_code=status, headers=headers)
        if end - start <= self._piece_bytes:
            body = await run_in_threadpool(self._read_of, etag, key, value, start, end)
            return Response(body, status_code=status, headers=headers)
        # Once the headers are sent, damage can only break the connection: look for it before.
        await run_in_threadpool(self._check_ends, key, value, start, end)
        return StreamingResponse(self._pieces(etag, key, value, start, end), status_code=status, headers=headers)

    def _etag(self, value: bytes | Extent) -> str:
        """The tag of a value: of a local file's size and times; of this run where the store is remote."""
        if isinstance(value, bytes):
            version = value
        elif self._is_local:
            identity = recording_identity(
                self._store.transport, self._store.layout, files=[value.path], prefer="versions"
            )
            version = str(identity).encode()
        else:
            version = b""
        return f'"{hashlib.blake2b(self._tag_seed + version, digest_size=12).hexdigest()}"'

    def _read(self, key: str, start: int, end: int) -> bytes:
        found = self._view.get_sync(key, byte_range=RangeByteRequest(start, end))
        if found is None:
            raise CorruptShardError("the value has disappeared", where=key)
        return found.to_bytes()

    def _read_of(self, etag: str, key: str, value: Extent, start: int, end: int) -> bytes:
        """The bytes of the file that has this tag; an error if it was changed in place before they were read."""
        found = self._read(key, start, end)
        if self._etag(value) != etag:
            where = f"{self._store.url}/{value.path}"
            raise TransportError("the file was changed while it was sent", where=where, transient=True)
        return found

    def _check_ends(self, key: str, value: Extent, start: int, end: int) -> None:
        """Read the first and last byte that have to be in the file; a `CorruptShardError` where they are not."""
        last = min(end, self._view.shown_nbytes_in_file(value))
        if start < last:
            self._read(key, start, start + 1)
            self._read(key, last - 1, last)

    async def _pieces(self, etag: str, key: str, value: Extent, start: int, end: int) -> AsyncIterator[bytes]:
        for at in range(start, end, self._piece_bytes):
            yield await run_in_threadpool(self._read_of, etag, key, value, at, min(at + self._piece_bytes, end))


def _without_paths(document: bytes | Extent | None) -> bytes | None:
    """The group's document without the places of the store and of its data set: clients have no use for them."""
    if not isinstance(document, bytes):
        return None
    group = cast("dict[str, object]", json.loads(document))
    attributes = cast("dict[str, object]", group["attributes"])
    attributes.pop("url", None)
    group["attributes"] = _basenames(attributes)
    return json.dumps(group, ensure_ascii=False, allow_nan=False).encode()


def _basenames(value: object) -> object:
    """The value with the last component of each string that is an absolute path or a URL, also in JSON within a string."""
    if isinstance(value, str):
        if value[:1] in {"{", "["}:  # protocol 2.1 has the description of the data as text
            with suppress(ValueError, RecursionError):
                return json.dumps(_basenames(json.loads(value)), ensure_ascii=False, separators=(",", ":"))
        is_windows = PureWindowsPath(value).is_absolute()
        is_place = is_windows or os.path.isabs(value) or "://" in value
        return re.split(r"[/\\]" if is_windows else "/", value.rstrip("/\\"))[-1] if is_place else value
    if isinstance(value, dict):
        items = cast("dict[str, object]", value).items()
        return {str(_basenames(name)): _basenames(item) for name, item in items}
    if isinstance(value, list):
        return [_basenames(item) for item in cast("list[object]", value)]
    return value


def _refusal(error: SaevStoreError) -> Response:
    """The error as JSON, without the place of the store."""
    # 410 for damage: it is permanent, so clients do not try again, and no Zarr client takes it for a missing chunk. 503 where
    # trying again may help; 502 for other failures of the storage behind this server.
    if isinstance(error, (CorruptShardError, DocumentError)):
        status = 410
    elif isinstance(error, TransportError) and error.transient:
        status = 503
    else:
        status = 502
    where = (error.where or "").rsplit("/", 1)[-1]
    document = {"error": {"kind": error.kind, "type": type(error).__name__, "message": error.message, "where": where}}
    return JSONResponse(document, status_code=status, headers={"Cache-Control": "no-store"})


class UnsatisfiableError(Exception):
    """No byte of the range exists."""


def parse_range(header: str | None, nbytes: int) -> tuple[int, int] | None:
    """The half-open range that a `Range` header requests (RFC 9110, section 14), or None for the whole value.

    A malformed header and one with several ranges are ignored, as the standard allows.

    Raises:
        UnsatisfiableError: no byte of the range exists.

    >>> parse_range("bytes=0-9", 100), parse_range("bytes=90-", 100), parse_range("bytes=-5", 100)
    ((0, 10), (90, 100), (95, 100))
    >>> parse_range("bytes=0-1,5-6", 100) is None
    True
    """
    match = _ONE_RANGE.fullmatch(header.strip(" \t")) if header else None
    if match is None:
        return None
    first, last, suffix = match.groups()
    if suffix is not None:
        if int(suffix) == 0 or nbytes == 0:
            raise UnsatisfiableError
        return max(nbytes - int(suffix), 0), nbytes
    start = int(first)
    if last is not None and int(last) < start:
        return None  # malformed according to the standard
    if start >= nbytes:
        raise UnsatisfiableError
    return start, nbytes if last is None else min(int(last) + 1, nbytes)
