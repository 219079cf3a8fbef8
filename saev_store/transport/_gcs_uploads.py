"""Uploads in parts through gcsfs: each part is an object of its own below `.saev_store`, and Google puts them together.

Unlike the address of one of Google's resumable uploads, which lets everybody who reads it write, the name of such a part
is no secret; and parts may arrive in any order, side by side.
"""

from __future__ import annotations

import asyncio
import base64
import binascii
import contextlib
import hashlib
import io
import json
import secrets
from collections.abc import Mapping, Sequence
from typing import Protocol, cast
from urllib.parse import quote

from saev_store.errors import TransportError
from saev_store.transport._base import Buffer
from saev_store.transport._fsspec_client import Client
from saev_store.transport._parts import Part
from saev_store.transport._s3_uploads import TOKEN

#: Google composes so many objects at once.
_MOST_SOURCES = 32


class _Gcs(Protocol):
    """The part of gcsfs that we call; it has no types."""

    @property
    def _location(self) -> str: ...
    def split_path(self, path: str) -> tuple[str, str, str | None]: ...
    def invalidate_cache(self, path: str | None = None) -> None: ...
    async def _call(self, method: str, path: str, *args: str, **options: object) -> Mapping[str, object]: ...
    async def _rm_file(self, path: str) -> object: ...


class GcsService:
    """Parts as objects, composed in the end; each part's checksum is compared with Google's answer.

    Args:
        client: A client of a `gs://` address.
    """

    def __init__(self, client: Client) -> None:
        self._client = client

    def _fs(self) -> _Gcs:
        return cast("_Gcs", self._client.fs())

    async def start(self, key: str, token: str) -> str:  # noqa: ARG002 (others need it)
        return secrets.token_hex(8)

    async def send(self, key: str, upload: str, number: int, data: Buffer) -> str:
        name = f"{_folder(key)}{upload}/{number:05d}"
        await self._send(name, data)
        return (await self._info(name))[1]

    async def parts(self, key: str, upload: str) -> list[Part]:
        folder = f"{_folder(key)}{upload}/"
        return [
            Part(int(number), size, etag)
            for name, size, etag in await self._list(folder)
            if (number := name.removeprefix(folder)).isdecimal()
        ]

    async def finish(self, key: str, upload: str, token: str, parts: Sequence[Part]) -> None:
        folder = f"{_folder(key)}{upload}/"
        names, level = [f"{folder}{part.number:05d}" for part in parts], 0
        while len(names) > _MOST_SOURCES:
            level += 1
            groups = [names[i : i + _MOST_SOURCES] for i in range(0, len(names), _MOST_SOURCES)]
            names = [f"{folder}{level}-{number:05d}" for number in range(len(groups))]
            await asyncio.gather(*(self._compose(name, group, "") for name, group in zip(names, groups, strict=True)))
        await self._compose(key, names, token)
        await self.give_up(key, upload)
        self._fs().invalidate_cache(key)

    async def _compose(self, key: str, sources: Sequence[str], token: str) -> None:
        bucket, name, _ = self._fs().split_path(key)
        about: dict[str, object] = {"contentType": "application/octet-stream"}
        if token:
            about["metadata"] = {TOKEN: token}
        await self._fs()._call(  # pyright: ignore[reportPrivateUsage] (its coroutines)
            "POST",
            "b/{}/o/{}/compose",
            bucket,
            name,
            headers={"Content-Type": "application/json"},
            json={
                "sourceObjects": [{"name": self._fs().split_path(source)[1]} for source in sources],
                "destination": about,
            },
        )

    async def give_up(self, key: str, upload: str) -> None:
        async def remove(name: str) -> None:
            with contextlib.suppress(FileNotFoundError):
                await self._fs()._rm_file(name)  # pyright: ignore[reportPrivateUsage] (its coroutines)

        await asyncio.gather(*(remove(name) for name, _, _ in await self._list(f"{_folder(key)}{upload}/")))

    async def unfinished(self, prefix: str) -> list[tuple[str, str]]:
        """Of one file, or of the files that lie directly in one folder."""
        found: set[tuple[str, str]] = set()
        for folder in {prefix, prefix.rpartition("/")[0]}:
            base = f"{folder}/.saev_store/parts/"
            for name, _, _ in await self._list(base):
                file, _, rest = name.removeprefix(base).partition("/")
                key = f"{folder}/{file}"
                if key.startswith(prefix):
                    found.add((key, rest.partition("/")[0]))
        return sorted(found)

    async def look(self, key: str) -> tuple[int, str]:
        size, _, metadata = await self._info(key)
        return size, metadata.get(TOKEN, "")

    async def put(self, key: str, token: str, data: Buffer) -> None:
        await self._send(key, data, token)
        self._fs().invalidate_cache(key)

    async def _send(self, key: str, data: Buffer, token: str = "") -> None:
        """One object in one request, so that it is there as a whole or not at all.

        gcsfs's own `pipe_file` hands aiohttp raw bytes, which it warns of when they are many.
        """
        fs = self._fs()
        bucket, name, _ = fs.split_path(key)
        about = {"name": name, **({"metadata": {TOKEN: token}} if token else {})}
        border = f"=={secrets.token_hex(16)}==".encode()
        body = Body()
        body.write(b"--%b\r\nContent-Type: application/json; charset=UTF-8\r\n\r\n" % border)
        body.write(json.dumps(about).encode())
        body.write(b"\r\n--%b\r\nContent-Type: application/octet-stream\r\n\r\n" % border)
        body.write(data)
        body.write(b"\r\n--%b--" % border)
        answer = await fs._call(  # pyright: ignore[reportPrivateUsage] (its coroutines)
            "POST",
            f"{fs._location}/upload/storage/v1/b/{quote(bucket)}/o",  # pyright: ignore[reportPrivateUsage] (where it asks)
            uploadType="multipart",
            headers={"Content-Type": f'multipart/related; boundary="{border.decode()}"'},
            data=body,
            json_out=True,
        )
        if "md5Hash" in answer and _hex(answer) != hashlib.md5(data, usedforsecurity=False).hexdigest():
            raise TransportError("the server has stored other bytes than were sent", where=key, transient=True)

    async def _info(self, key: str) -> tuple[int, str, Mapping[str, str]]:
        bucket, name, _ = self._fs().split_path(key)
        found = await self._fs()._call("GET", "b/{}/o/{}", bucket, name, json_out=True)  # pyright: ignore[reportPrivateUsage] (its coroutines)
        return int(str(found["size"])), _hex(found), cast("Mapping[str, str]", found.get("metadata") or {})

    async def _list(self, prefix: str) -> list[tuple[str, int, str]]:
        """(key, size, MD5) of each object whose key begins so."""
        bucket, name, _ = self._fs().split_path(prefix)
        found: list[tuple[str, int, str]] = []
        page: dict[str, object] = {}
        while True:
            answer = await self._fs()._call("GET", "b/{}/o", bucket, prefix=name, json_out=True, **page)  # pyright: ignore[reportPrivateUsage] (its coroutines)
            items = cast("list[Mapping[str, object]]", answer.get("items") or [])
            found += [(f"{bucket}/{item['name']}", int(str(item["size"])), _hex(item)) for item in items]
            if not answer.get("nextPageToken"):
                return found
            page = {"pageToken": answer["nextPageToken"]}


class Body(io.BytesIO):
    """A body that can be sent again: aiohttp closes what it has sent."""

    def close(self) -> None:
        self.seek(0)


def _folder(key: str) -> str:
    folder, _, name = key.rpartition("/")
    return f"{folder}/.saev_store/parts/{name}/"


def _hex(about: Mapping[str, object]) -> str:
    """The MD5 of an object as S3 would write it; its generation where it has none."""
    try:
        return base64.b64decode(str(about["md5Hash"]), validate=True).hex()
    except (KeyError, binascii.Error):
        return str(about.get("generation", ""))
