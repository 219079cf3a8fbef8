"""Which of fsspec's file systems keep the parts of unfinished uploads, and who speaks to them."""

from __future__ import annotations

from typing import cast

from saev_store.transport._fsspec_client import Client
from saev_store.transport._gcs_uploads import GcsService
from saev_store.transport._multipart_sink import Service, Uploader
from saev_store.transport._s3_uploads import S3Service

_SERVICES: dict[str, type[S3Service | GcsService]] = {
    "s3": S3Service, "s3a": S3Service, "gs": GcsService, "gcs": GcsService,
}  # fmt: skip


def uploader_of(client: Client) -> Uploader | None:
    """Who uploads for a client, the same each time; None where files have to be collected before they are sent."""
    if len(client.protocols) != 1 or client.protocols[0] not in _SERVICES or not client.is_async:
        return None
    if "uploader" not in client.kept:
        service: Service = _SERVICES[client.protocols[0]](client)
        client.kept["uploader"] = Uploader(client, service)
    return cast("Uploader", client.kept["uploader"])


def gcs_service_of(client: Client) -> GcsService | None:
    """What speaks to Google for a client; None if the client speaks to somebody else."""
    uploader = uploader_of(client)
    return uploader.service if uploader is not None and isinstance(uploader.service, GcsService) else None
