"""Ranges through the file systems for S3, Google and web servers, with the version of the object.

`cat_ranges` returns bytes alone. Here the headers of the answer are read too: its ETag or generation, and its range.
"""

from __future__ import annotations

import asyncio
import re
import weakref
from collections.abc import Awaitable, Callable, Iterable, Mapping, Sequence
from typing import Any, BinaryIO, cast

from saev_store.errors import TransportError
from saev_store.transport._remote import READ_TIMEOUT_S, Version
from saev_store.transport.base import IN_FLIGHT

#: How often what has arrived is told at most: loaders wait while it is.
_TELL_S = 0.05
#: A part of an answer at most.
_PART_BYTES = 1 << 20
#: Headers of range requests that are not the caller's to choose.
_OURS = {"accept-encoding", "range"}
_RANGE = re.compile(r"\s*bytes\s+(\d+)-(\d+)/(\d+|\*)\s*", re.IGNORECASE)

Answer = tuple[bytes, Version]
#: fsspec and its file systems have no types.
_FileSystem = Any
#: Told how many bytes have arrived, while they do.
_Arrived = Callable[[int], None]
#: Bytes and headers; these are found by their names in lower case, whatever the server writes.
Get = Callable[[_FileSystem, str, int, int, _Arrived], Awaitable[tuple[bytes, Mapping[str, str]]]]
#: Requests under way at once, in each loop: what is under way shares the line, and more of it would only end later.
_SLOTS: weakref.WeakKeyDictionary[asyncio.AbstractEventLoop, asyncio.Semaphore] = weakref.WeakKeyDictionary()


async def _s3(fs: _FileSystem, path: str, start: int, end: int, arrived: _Arrived) -> tuple[bytes, Mapping[str, str]]:
    bucket, key, version = fs.split_path(path)
    chosen = {"VersionId": version} if version else {}
    answer = await fs._call_s3("get_object", Bucket=bucket, Key=key, Range=f"bytes={start}-{end - 1}", **chosen)
    body, parts, nbytes = answer["Body"], list[bytes](), 0
    try:
        # What is there already, up to a part; what is too long is refused by its length, without waiting for its end.
        while nbytes <= end - start and (part := await body.read(_PART_BYTES)):
            arrived(len(part))
            parts.append(part)
            nbytes += len(part)
        return b"".join(parts), answer["ResponseMetadata"]["HTTPHeaders"]
    finally:
        body.close()


async def _gs(fs: _FileSystem, path: str, start: int, end: int, arrived: _Arrived) -> tuple[bytes, Mapping[str, str]]:
    headers, data = await fs._call("GET", fs.url(path), headers={"Range": f"bytes={start}-{end - 1}"})
    arrived(len(data))
    return data, headers


async def _http(
    fs: _FileSystem, path: str, start: int, end: int, arrived: _Arrived, *, takes_whole: bool = False
) -> tuple[bytes, Mapping[str, str]]:
    options = dict(fs.kwargs)
    # To a client that takes compressed answers nginx sends the whole file, compressed; aiohttp says that it does.
    given: Mapping[str, str] = options.get("headers") or {}
    headers = {name: value for name, value in given.items() if name.lower() not in _OURS}
    options["headers"] = {**headers, "Accept-Encoding": "identity", "Range": f"bytes={start}-{end - 1}"}
    session, patience_s, now_s = await fs.set_session(), _patience_s(fs), asyncio.get_running_loop().time
    parts, nbytes, n_told, told_s = list[bytes](), 0, 0, now_s()
    # aiohttp's own time-out of reads costs a timer for each part.
    async with asyncio.timeout(patience_s) as patience, session.get(fs.encode_url(path), **options) as answer:
        fs._raise_not_found_for_status(answer, path)
        is_whole = answer.status == 200 and (start > 0 or answer.content_length not in {None, end - start})
        if (is_whole and not takes_whole) or answer.headers.get("Content-Type", "").lower().startswith("multipart/"):
            raise _NoRangeError
        if (now := now_s()) - told_s > _TELL_S:
            patience.reschedule(now + patience_s)
            told_s = now
        try:
            while nbytes <= end - start and (part := await answer.content.readany()):
                parts.append(part)
                nbytes += len(part)
                if (now := now_s()) - told_s > _TELL_S:
                    patience.reschedule(now + patience_s)
                    arrived(nbytes - n_told)
                    n_told, told_s = nbytes, now
        finally:
            arrived(nbytes - n_told)
        return b"".join(parts), answer.headers


def _patience_s(fs: _FileSystem) -> float:
    """Seconds without a part after which an answer is given up: ours, or what the caller gave."""
    given: Mapping[str, object] = fs.client_kwargs or {}
    return getattr(given.get("timeout"), "sock_read", None) or READ_TIMEOUT_S


class _NoRangeError(Exception):
    """A web server answers with something else than one range."""


_GET: dict[str, tuple[Get, str]] = {
    **dict.fromkeys(("s3", "s3a"), (_s3, "s3fs")),
    **dict.fromkeys(("gs", "gcs"), (_gs, "gcsfs")),
    **dict.fromkeys(("http", "https"), (_http, "fsspec.implementations.http")),
}


def getter(protocols: Sequence[str], fs: _FileSystem) -> Get | None:
    """How to request ranges of a file system, or None where only `cat_ranges` can."""
    get, module = _GET.get(protocols[0], (None, "")) if len(protocols) == 1 else (None, "")
    return get if type(fs).__module__.startswith(module) else None


async def get_range(
    get: Get, fs: _FileSystem, path: str, start: int, end: int, *, where: str, arrived: _Arrived
) -> Answer:
    """A range of an object, and the version of the object that it is of.

    Args:
        get: Requests it.
        fs: The file system.
        path: The object's name there.
        start: First byte.
        end: The byte after the last one.
        where: The object's name in messages.
        arrived: Told of what has come.

    Raises:
        TransportError: the answer is of another range than the one requested.
        Exception: whatever the file system raises.
    """
    loop = asyncio.get_running_loop()
    slots = _SLOTS.get(loop)
    if slots is None:
        slots = _SLOTS.setdefault(loop, asyncio.Semaphore(IN_FLIGHT))
    try:
        async with slots:
            data, headers = await get(fs, path, start, end, arrived)
    except _NoRangeError:
        raise TransportError(
            f"the server sends the whole file, or several parts, where bytes {start:,} to {end:,} were asked for",
            where=where,
            remedy="Use a web server that answers range requests with status 206; `python -m http.server` does not.",
        ) from None
    text = headers.get("content-range", "")
    said = _RANGE.fullmatch(text)
    size = None if said is None or said[3] == "*" else int(said[3])
    is_other = said is None or (int(said[1]), int(said[2]) + 1) != (start, end)
    if text and is_other and len(data) == end - start:
        raise TransportError(
            f"the answer says {text!r}, but bytes {start:,} to {end:,} were asked for", where=where, transient=True
        )
    return data, (headers.get("x-goog-generation") or headers.get("etag") or headers.get("last-modified"), size)


async def cat_document(fs: _FileSystem, path: str, *, start: int, end: int) -> bytes:
    """The first bytes of a file of a web server, also of one that answers with the whole file, which is then not read on.

    Raises:
        Exception: whatever the file system raises.
    """
    data, _ = await _http(fs, path, start, end, lambda _: None, takes_whole=True)
    return data[: end - start]


async def cat_ranges(fs: _FileSystem, path: str, starts: Sequence[int], ends: Sequence[int]) -> list[bytes]:
    """The ranges of one object through an asynchronous file system that tells no versions.

    Raises:
        Exception: whatever the file system raises.
    """
    found = await fs._cat_ranges([path] * len(starts), list(starts), list(ends), on_error="raise")
    # Older releases of fsspec return errors as data whatever `on_error` says.
    for part in found:
        if isinstance(part, OSError):
            raise part
    return found


def read_ranges(
    fs: _FileSystem, path: str, starts: Sequence[int], ends: Sequence[int], *, by_range: bool
) -> list[bytes]:
    """The ranges of one file through a file system that is not asynchronous; `by_range` where it gives parts by itself.

    Raises:
        Exception: whatever the file system raises.
    """
    ranges = zip(starts, ends, strict=True)
    if by_range:
        return [fs.cat_file(path, start, end) for start, end in ranges]
    with fs.open(path, "rb") as file:  # once: what is compressed is unpacked from its beginning
        # Files of SFTP have many requests under way at a time only so; `read` waits for each 32 KiB.
        many = cast("Callable[[list[tuple[int, int]]], Iterable[bytes]] | None", getattr(file, "readv", None))
        if many is not None:
            return list(many([(start, end - start) for start, end in ranges]))
        return [_read_range(file, start, end) for start, end in ranges]


def _read_range(file: BinaryIO, start: int, end: int) -> bytes:
    file.seek(start)
    data = file.read(end - start)
    while len(data) < end - start and (more := file.read(end - start - len(data))):
        data += more
    return data
