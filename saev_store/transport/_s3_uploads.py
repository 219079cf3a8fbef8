"""Multipart uploads through s3fs, with what S3 tells about unfinished ones."""

from __future__ import annotations

import contextlib
from collections.abc import Mapping, Sequence
from typing import Protocol, cast

from saev_store.transport._base import Buffer
from saev_store.transport._fsspec_client import Client
from saev_store.transport._parts import Part

#: The name of the object's metadata that says which upload it came from.
TOKEN = "saev-store-upload"  # noqa: S105 - a name


class _S3(Protocol):
    """The part of s3fs that we call; it has no types."""

    def split_path(self, path: str) -> tuple[str, str, str | None]: ...
    async def _call_s3(self, method: str, **arguments: object) -> Mapping[str, object]: ...
    def invalidate_cache(self, path: str | None = None) -> None: ...


class S3Service:
    """S3's multipart calls; botocore signs and adds a checksum to every part.

    Args:
        client: A client of an `s3://` address.
    """

    def __init__(self, client: Client) -> None:
        self._client = client

    async def _call(self, method: str, key: str, **arguments: object) -> Mapping[str, object]:
        fs = cast("_S3", self._client.fs())
        bucket, name, _ = fs.split_path(key)
        if method != "list_multipart_uploads":
            arguments["Key"] = name
        return await fs._call_s3(method, Bucket=bucket, **arguments)  # pyright: ignore[reportPrivateUsage] (its coroutines)

    async def start(self, key: str, token: str) -> str:
        found = await self._call("create_multipart_upload", key, Metadata={TOKEN: token})
        return str(found["UploadId"])

    async def send(self, key: str, upload: str, number: int, data: Buffer) -> str:
        found = await self._call("upload_part", key, UploadId=upload, PartNumber=number, Body=bytes(data))
        return str(found["ETag"]).strip('"')

    async def parts(self, key: str, upload: str) -> list[Part]:
        parts: list[Part] = []
        marker = 0
        while True:
            try:
                found = await self._call("list_parts", key, UploadId=upload, PartNumberMarker=marker)
            except FileNotFoundError:  # what s3fs makes of NoSuchUpload
                return []
            listed = cast("list[Mapping[str, object]]", found.get("Parts") or [])
            for part in listed:
                number, size = cast("int", part["PartNumber"]), cast("int", part["Size"])
                parts.append(Part(number, size, str(part["ETag"]).strip('"')))
            if not found.get("IsTruncated") or not listed:
                return parts
            marker = parts[-1].number

    async def finish(self, key: str, upload: str, token: str, parts: Sequence[Part]) -> None:  # noqa: ARG002 (others need it)
        listed = [{"PartNumber": part.number, "ETag": f'"{part.etag}"'} for part in parts]
        await self._call("complete_multipart_upload", key, UploadId=upload, MultipartUpload={"Parts": listed})
        cast("_S3", self._client.fs()).invalidate_cache(key)

    async def give_up(self, key: str, upload: str) -> None:
        with contextlib.suppress(FileNotFoundError):
            await self._call("abort_multipart_upload", key, UploadId=upload)

    async def unfinished(self, prefix: str) -> list[tuple[str, str]]:
        fs = cast("_S3", self._client.fs())
        bucket, name, _ = fs.split_path(prefix)
        uploads: list[tuple[str, str]] = []
        markers: dict[str, object] = {}
        while True:
            found = await self._call("list_multipart_uploads", prefix, Prefix=name, **markers)
            listed = cast("list[Mapping[str, object]]", found.get("Uploads") or [])
            uploads += [(f"{bucket}/{upload['Key']}", str(upload["UploadId"])) for upload in listed]
            if not found.get("IsTruncated") or not listed:
                return uploads
            markers = {"KeyMarker": found["NextKeyMarker"], "UploadIdMarker": found["NextUploadIdMarker"]}

    async def look(self, key: str) -> tuple[int, str]:
        found = await self._call("head_object", key)
        metadata = cast("Mapping[str, str]", found.get("Metadata") or {})
        return cast("int", found["ContentLength"]), metadata.get(TOKEN, "")

    async def put(self, key: str, token: str, data: Buffer) -> None:
        await self._call("put_object", key, Body=bytes(data), Metadata={TOKEN: token})
        cast("_S3", self._client.fs()).invalidate_cache(key)
