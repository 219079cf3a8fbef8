"""The ASGI application: keys of the view are paths, values are bodies, damage is an error and never zeros."""

from __future__ import annotations

import hashlib
import time
from collections.abc import AsyncIterator, Mapping, Sequence
from typing import TYPE_CHECKING, Literal

from starlette.applications import Starlette
from starlette.concurrency import run_in_threadpool
from starlette.middleware import Middleware
from starlette.middleware.cors import CORSMiddleware
from starlette.requests import Request
from starlette.responses import JSONResponse, PlainTextResponse, Response, StreamingResponse
from starlette.routing import Route
from zarr.abc.store import RangeByteRequest

from saev_store.chunks import Extent, default_chunk
from saev_store.errors import SaevStoreError
from saev_store.serve._ranges import UnsatisfiableError, parse_range

if TYPE_CHECKING:
    from saev_store.store import ShardStore
    from saev_store.zarr import ZarrView

#: Clients pay a request for each chunk, however the store itself is reached.
_MAX_GAP_BYTES = 1 << 20
#: Mapped memory is touched this much at a time, in a thread, so that a slow disk holds up nobody else.
_PIECE_BYTES = 1 << 20
_EXPOSED = ("Accept-Ranges", "Content-Length", "Content-Range", "ETag")


def application(
    store: ShardStore,
    *,
    chunks: Literal["auto"] | Sequence[int] = "auto",
    sharded: bool = False,
    origins: Sequence[str] = ("*",),
) -> Starlette:
    """An ASGI application that answers GET and HEAD for the keys of the store's Zarr view.

    Args:
        store: An opened store, which has to stay open.
        chunks: As in `ShardStore.as_zarr`; `"auto"` cuts for clients that pay for requests.
        sharded: As in `ShardStore.as_zarr`: one key for each shard, read by ranges.
        origins: Web pages that browsers let read the answers (CORS); `"*"` for all.

    Raises:
        ArgumentError: `chunks` is no legal shape.
    """
    shape = default_chunk(store.layout, max_gap_bytes=_MAX_GAP_BYTES) if chunks == "auto" else chunks
    answers = _Answers(store.as_zarr(chunks=shape, sharded=sharded), store)
    cors = Middleware(
        CORSMiddleware,
        allow_origins=list(origins),
        allow_methods=["GET", "HEAD"],
        allow_headers=["Range", "If-Range", "If-None-Match", "Cache-Control"],
        expose_headers=list(_EXPOSED),
    )
    return Starlette(routes=[Route("/{key:path}", answers.answer, methods=["GET", "HEAD"])], middleware=[cors])


class _Answers:
    def __init__(self, view: ZarrView, store: ShardStore) -> None:
        self._view = view
        self._about = (
            f"{store!r}\n\nThis is a Zarr v3 group. In Python: zarr.open_group(url) or xarray.open_zarr(url);\n"
            'in JavaScript: zarr.open(zarr.root(new zarr.FetchStore(url)).resolve("activations"), { kind: "array" }).\n'
        )
        # What was said by an earlier server, perhaps about other labels or chunks, does not count.
        told = b"".join([store.metadata.raw, repr(view).encode(), time.time_ns().to_bytes(8, "big")])
        self._etag = f'"{hashlib.blake2b(told, digest_size=12).hexdigest()}"'

    async def answer(self, request: Request) -> Response:
        """One request."""
        key = request.path_params["key"]
        if key == "":
            return PlainTextResponse(self._about)
        value = self._view.keys.find(key)
        if value is None:
            return PlainTextResponse("there is no such key\n", status_code=404)
        nbytes = len(value) if isinstance(value, bytes) else value.nbytes + value.index_nbytes
        headers = {"Accept-Ranges": "bytes", "Cache-Control": "no-cache", "ETag": self._etag}
        if self._etag in request.headers.get("if-none-match", ""):
            return Response(status_code=304, headers=headers)
        try:
            asked = parse_range(request.headers.get("range"), nbytes) if self._is_current(request.headers) else None
        except UnsatisfiableError:
            return Response(status_code=416, headers={**headers, "Content-Range": f"bytes */{nbytes}"})
        start, end = asked or (0, nbytes)
        status = 206 if asked else 200
        headers["Content-Length"] = str(end - start)
        headers["Content-Type"] = "application/json" if isinstance(value, bytes) and _is_document(key) else _BINARY
        if asked:
            headers["Content-Range"] = f"bytes {start}-{end - 1}/{nbytes}"
        if request.method == "HEAD":
            return Response(status_code=status, headers=headers)
        return await self._with_body(key, value, start, end, status, headers)

    async def _with_body(
        self, key: str, value: bytes | Extent, start: int, end: int, status: int, headers: Mapping[str, str]
    ) -> Response:
        if isinstance(value, bytes):
            return Response(value[start:end], status_code=status, headers=headers)
        try:
            # All of it, before the first byte is answered: after that an error could only break the connection.
            found = await run_in_threadpool(self._view.get_sync, key, byte_range=RangeByteRequest(start, end))
        except SaevStoreError as error:
            return _refusal(error)
        if found is None:
            return PlainTextResponse("there is no such key\n", status_code=404)
        body = memoryview(found.as_numpy_array()).cast("B")
        if len(body) <= _PIECE_BYTES:
            return Response(await run_in_threadpool(bytes, body), status_code=status, headers=headers)
        return StreamingResponse(_pieces(body), status_code=status, headers=headers)

    def _is_current(self, headers: Mapping[str, str]) -> bool:
        """Whether a range may be answered: not to somebody who has the beginning of something else."""
        return headers.get("if-range", self._etag) == self._etag


_BINARY = "application/octet-stream"


async def _pieces(body: memoryview) -> AsyncIterator[bytes]:
    for at in range(0, len(body), _PIECE_BYTES):
        yield await run_in_threadpool(bytes, body[at : at + _PIECE_BYTES])


def _is_document(key: str) -> bool:
    return key.rsplit("/", 1)[-1] == "zarr.json"


def _refusal(error: SaevStoreError) -> Response:
    """What is wrong, for people and for programs; where the store lies stays here."""
    where = (error.where or "").rsplit("/", 1)[-1]
    document = {"error": {"kind": error.kind, "type": type(error).__name__, "message": error.message, "where": where}}
    return JSONResponse(document, status_code=500, headers={"Cache-Control": "no-store"})
