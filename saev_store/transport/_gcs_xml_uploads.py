"""Multipart uploads in Google's XML interface, which obstore speaks: gcsfs asks about them, with its connections and credentials.

The interface is S3's in another dress (https://cloud.google.com/storage/docs/multipart-uploads): the same requests and
documents, other headers. What gcsfs uploads by itself are other things, see `_gcs_uploads`.
"""

from __future__ import annotations

import base64
import contextlib
import hashlib
import re
from collections.abc import Mapping, Sequence
from typing import Protocol, cast
from xml.etree import ElementTree as ET

from saev_store.errors import TransportError
from saev_store.transport._base import Buffer
from saev_store.transport._fsspec_client import Client
from saev_store.transport._gcs_uploads import Body
from saev_store.transport._parts import Part
from saev_store.transport._s3_uploads import TOKEN

_TOKEN_HEADER = f"x-goog-meta-{TOKEN}"
#: What `_gcs_uploads` calls its uploads, which this interface knows nothing of.
_OF_GCSFS = re.compile(r"[0-9a-f]{16}")


class _Gcs(Protocol):
    """The part of gcsfs that we call; it has no types."""

    @property
    def _location(self) -> str: ...
    def split_path(self, path: str) -> tuple[str, str, str | None]: ...
    def invalidate_cache(self, path: str | None = None) -> None: ...
    async def _call(self, method: str, path: str, *args: str, **options: object) -> tuple[Mapping[str, str], bytes]: ...


class GcsXmlService:
    """Google's multipart calls; every part carries its MD5, which Google compares.

    Args:
        client: A client of a `gs://` address.
    """

    def __init__(self, client: Client) -> None:
        self._client = client

    async def _call(
        self, method: str, key: str, query: Mapping[str, object], *, data: Buffer | None = None,
        headers: Mapping[str, str] | None = None,
    ) -> tuple[Mapping[str, str], bytes]:  # fmt: skip
        fs = cast("_Gcs", self._client.fs())
        bucket, name, _ = fs.split_path(key)
        options: dict[str, object] = {**query, "headers": dict(headers or {})}
        if data is not None:
            options["data"] = Body(data)
            digest = hashlib.md5(data, usedforsecurity=False).digest()
            options["headers"] = {**(headers or {}), "Content-MD5": base64.b64encode(digest).decode()}
        names = (bucket, name) if name else (bucket,)
        where = f"{fs._location}{'/{}' * len(names)}"  # pyright: ignore[reportPrivateUsage] (where it asks)
        return await fs._call(method, where, *names, **options)  # pyright: ignore[reportPrivateUsage] (its coroutines)

    async def start(self, key: str, token: str) -> str:
        _, text = await self._call("POST", key, {"uploads": ""}, headers={_TOKEN_HEADER: token})
        if upload := _text(self._parsed(text), "UploadId"):
            return upload
        raise TransportError("the server began an upload without a name", where=self._client.safe_url, transient=True)

    async def send(self, key: str, upload: str, number: int, data: Buffer) -> str:
        headers, _ = await self._call("PUT", key, {"partNumber": number, "uploadId": upload}, data=data)
        return headers["ETag"].strip('"')

    async def parts(self, key: str, upload: str) -> list[Part]:
        parts: list[Part] = []
        if _OF_GCSFS.fullmatch(upload):
            return []
        while True:
            marker = {"part-number-marker": parts[-1].number} if parts else {}
            try:
                _, text = await self._call("GET", key, {"uploadId": upload, **marker})
            except FileNotFoundError:
                return []
            document = self._parsed(text)
            listed = [
                Part(int(_text(part, "PartNumber")), int(_text(part, "Size")), _text(part, "ETag").strip('"'))
                for part in document.iterfind("{*}Part")
            ]
            parts += listed
            if _text(document, "IsTruncated") != "true" or not listed:
                return parts

    async def finish(self, key: str, upload: str, token: str, parts: Sequence[Part]) -> None:  # noqa: ARG002 (others need it)
        document = ET.Element("CompleteMultipartUpload")
        for part in parts:
            element = ET.SubElement(document, "Part")
            ET.SubElement(element, "PartNumber").text = str(part.number)
            ET.SubElement(element, "ETag").text = f'"{part.etag}"'
        _, text = await self._call("POST", key, {"uploadId": upload}, data=ET.tostring(document))
        if text:
            self._parsed(text)
        cast("_Gcs", self._client.fs()).invalidate_cache(key)

    async def give_up(self, key: str, upload: str) -> None:
        with contextlib.suppress(FileNotFoundError):
            await self._call("DELETE", key, {"uploadId": upload})

    async def unfinished(self, prefix: str) -> list[tuple[str, str]]:
        bucket, name, _ = cast("_Gcs", self._client.fs()).split_path(prefix)
        uploads: list[tuple[str, str]] = []
        markers: dict[str, str] = {}
        while True:
            _, text = await self._call("GET", bucket, {"uploads": "", "prefix": name, **markers})
            document = self._parsed(text)
            listed = [(_text(found, "Key"), _text(found, "UploadId")) for found in document.iterfind("{*}Upload")]
            uploads += [(f"{bucket}/{key}", upload) for key, upload in listed]
            if _text(document, "IsTruncated") != "true" or not listed:
                return uploads
            markers = dict(zip(("key-marker", "upload-id-marker"), listed[-1], strict=True))

    async def look(self, key: str) -> tuple[int, str]:
        headers, _ = await self._call("HEAD", key, {}, headers={"Accept-Encoding": "identity"})
        size = headers.get("x-goog-stored-content-length") or headers["Content-Length"]
        return int(size), headers.get(_TOKEN_HEADER, "")

    async def put(self, key: str, token: str, data: Buffer) -> None:
        await self._call("PUT", key, {}, data=data, headers={_TOKEN_HEADER: token} if token else {})
        cast("_Gcs", self._client.fs()).invalidate_cache(key)

    def _parsed(self, text: bytes) -> ET.Element:
        """An answer's document; one that tells of an error is one, whatever the status was."""
        where = self._client.safe_url
        try:
            document = ET.fromstring(text)  # noqa: S314 - the service's own; expat bounds what entities grow to
        except ET.ParseError:
            raise TransportError("the server's answer is no XML", where=where, transient=True) from None
        if document.tag.rpartition("}")[2] == "Error":
            message = f"the server answered {_text(document, 'Code')}: {_text(document, 'Message')}"
            raise TransportError(self._client.redact(message), where=where, transient=True)
        return document


def _text(element: ET.Element, name: str) -> str:
    return element.findtext(f"{{*}}{name}") or ""
