"""What obstore does not tell about unfinished uploads: s3fs asks the same service, with the same credentials."""

from __future__ import annotations

from collections.abc import Mapping
from importlib.util import find_spec

from saev_store.errors import SaevStoreError
from saev_store.transport._multipart_sink import Uploader
from saev_store.transport._obstore_client import Client
from saev_store.transport._obstore_options import Place

#: obstore's names for what s3fs calls otherwise.
_RENAMED = {"access_key_id": "key", "secret_access_key": "secret", "session_token": "token", "endpoint": "endpoint_url"}
#: What says nothing to the calls that are made here.
_IDLE = {"checksum_algorithm", "conditional_put", "unsigned_payload"}
#: What every part of an upload has to say again, or the object would be another.
_ENCRYPTION = {
    "server_side_encryption": "ServerSideEncryption",
    "sse_kms_key_id": "SSEKMSKeyId",
    "sse_bucket_key_enabled": "BucketKeyEnabled",
}


def uploader_of(client: Client) -> Uploader | None:
    """Who lists and continues the uploads of a client; None where nobody can.

    Only S3 tells, and only s3fs asks: without it, or with options that it does not know, a shard that was interrupted is
    sent again from its start.
    """
    if client.place.kind != "s3" or find_spec("s3fs") is None:
        return None
    options = s3fs_options(client.place)
    if options is None:
        return None
    from saev_store.transport._fsspec_client import Client as FsspecClient
    from saev_store.transport._s3_uploads import S3Service

    try:
        found = FsspecClient(f"s3://{client.place.bucket}", options, timeout_s=client.timeout_s)
    except SaevStoreError:
        return None
    found.safe_url = client.url.removesuffix(client.place.prefix).rstrip("/")
    found.tally = client.tally
    return Uploader(found, S3Service(found))


def s3fs_options(place: Place) -> dict[str, object] | None:
    """s3fs's options for the same bucket; None if one of them has no equivalent.

    >>> from saev_store.transport._obstore_options import place_of
    >>> s3fs_options(place_of("s3://lab", {"key": "AKID", "secret": "s3cr3t", "requester_pays": True}))
    {'key': 'AKID', 'secret': 's3cr3t', 'requester_pays': True}
    """
    options: dict[str, object] = {}
    extra: dict[str, object] = {}
    config: Mapping[str, object] = place.config
    for name, value in config.items():
        if name in _RENAMED:
            options[_RENAMED[name]] = value
        elif name == "region":
            options["client_kwargs"] = {"region_name": value}
        elif name == "request_payer":
            options["requester_pays"] = value
        elif name == "skip_signature":
            options["anon"] = value
        elif name == "virtual_hosted_style_request":
            options["config_kwargs"] = {"s3": {"addressing_style": "virtual" if value else "path"}}
        elif name in _ENCRYPTION:
            extra[_ENCRYPTION[name]] = value
        elif name not in _IDLE:
            return None
    if extra:
        options["s3_additional_kwargs"] = extra
    return options
