"""Lists unfinished multipart uploads through s3fs."""

from __future__ import annotations

from collections.abc import Mapping
from datetime import datetime
from typing import cast

from saev_store.transport.base import UnfinishedUpload
from saev_store.transport.fsspec._client import FsspecClient


def list_uploads(client: FsspecClient, bucket: str, prefix: str, *, folder: str) -> list[UnfinishedUpload]:
    """The unfinished uploads of a bucket whose keys lie in the folder `prefix`, all pages of the listing.

    Args:
        client: A client of an `s3://` address.
        bucket: The bucket's name.
        prefix: A folder in it, `""` for all of it.
        folder: Bucket and folder that the paths of the answer are relative to.
    """
    found: list[UnfinishedUpload] = []
    markers: dict[str, object] = {}
    while True:
        # s3fs's own listing gives the first page only.
        page = client.ask("call_s3", "list_multipart_uploads", Bucket=bucket, Prefix=prefix, **markers)  # pyright: ignore[reportArgumentType]  # `nbytes` is not among them
        answer = cast("Mapping[str, object]", page)
        listed = cast("list[Mapping[str, object]]", answer.get("Uploads") or [])
        for upload in listed:
            key, begun = str(upload["Key"]), upload.get("Initiated")
            if not prefix or key == prefix or key.startswith(f"{prefix}/"):
                path = f"{bucket}/{key}".removeprefix(folder).lstrip("/")
                begun_s = begun.timestamp() if isinstance(begun, datetime) else None
                found.append(UnfinishedUpload(path, str(upload["UploadId"]), begun_s))
        if not answer.get("IsTruncated") or not listed:
            return found
        markers = {"KeyMarker": answer["NextKeyMarker"], "UploadIdMarker": answer["NextUploadIdMarker"]}
