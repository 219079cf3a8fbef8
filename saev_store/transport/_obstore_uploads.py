"""What obstore does not tell about unfinished uploads: s3fs or gcsfs asks the same service, with the same credentials."""

from __future__ import annotations

import json
from collections.abc import Mapping
from importlib.util import find_spec

from saev_store.errors import SaevStoreError
from saev_store.transport._multipart_sink import Uploader
from saev_store.transport._obstore_client import Client
from saev_store.transport._obstore_options import Place, is_true, only_obstore_obeys
from saev_store.transport._secrets import Options

#: obstore's names for what s3fs calls otherwise.
_RENAMED = {"access_key_id": "key", "secret_access_key": "secret", "session_token": "token", "endpoint": "endpoint_url"}
#: What says nothing to the calls that are made here. What parts are summed up with does: those of one upload have to agree.
_IDLE = {"conditional_put", "unsigned_payload"}
#: What every part of an upload has to say again, or the object would be another.
_ENCRYPTION = {
    "server_side_encryption": "ServerSideEncryption",
    "sse_kms_key_id": "SSEKMSKeyId",
    "sse_bucket_key_enabled": "BucketKeyEnabled",
}


def uploader_of(client: Client) -> Uploader | None:
    """Who lists and continues the uploads of a client; None where nobody can.

    Without s3fs or gcsfs, with options that they do not know, and on other services, a shard that was interrupted is sent
    again from its start.
    """
    kind = client.place.kind
    if (kind == "s3" and find_spec("s3fs") is not None) or (kind == "gs" and find_spec("gcsfs") is not None):
        return _asking(client, s3fs_options(client.place) if kind == "s3" else gcsfs_options(client.place))
    return None


def _asking(client: Client, options: dict[str, object] | None) -> Uploader | None:
    if options is None or only_obstore_obeys(client.place):
        return None
    from saev_store.transport._fsspec_client import Client as FsspecClient
    from saev_store.transport._gcs_xml_uploads import GcsXmlService
    from saev_store.transport._s3_uploads import S3Service

    service = S3Service if client.place.kind == "s3" else GcsXmlService
    # A token that is part of a header is a secret by itself, too.
    hidden = Options(
        options, secrets=tuple(str(value) for name, value in client.place.config.items() if "token" in name)
    )
    try:
        found = FsspecClient(f"{client.place.kind}://{client.place.bucket}", hidden, timeout_s=client.timeout_s)
    except SaevStoreError:
        return None
    found.safe_url = client.url
    found.tally = client.tally
    return Uploader(found, service(found))


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
            options["requester_pays"] = is_true(value)
        elif name == "skip_signature":
            options["anon"] = is_true(value)
        elif name == "virtual_hosted_style_request":
            options["config_kwargs"] = {"s3": {"addressing_style": "virtual" if is_true(value) else "path"}}
        elif name in _ENCRYPTION:
            extra[_ENCRYPTION[name]] = value
        elif name not in _IDLE:
            return None
    if extra:
        options["s3_additional_kwargs"] = extra
    return options


def gcsfs_options(place: Place) -> dict[str, object] | None:
    """Options of gcsfs for the same bucket; None if one of them has no equivalent.

    >>> from saev_store.transport._obstore_options import place_of
    >>> gcsfs_options(place_of("gs://lab", {"token": "anon", "requester_pays": "my-project"}))
    {'token': 'anon', 'requester_pays': 'my-project'}
    """
    config = dict(place.config)
    # Not what it takes by itself, which would be nobody's credentials where it finds none.
    options: dict[str, object] = {"token": "anon" if is_true(config.pop("skip_signature", False)) else "google_default"}
    bearer, key = config.pop("bearer_token", None), config.pop("service_account_key", None)
    if bearer is not None:  # as a token of its own gcsfs would ask Google about it first
        options |= {"token": "anon", "session_kwargs": {"headers": {"Authorization": f"Bearer {bearer}"}}}
    if key is not None:
        try:
            options["token"] = json.loads(str(key))
        except ValueError:
            return None
    for name in ("service_account", "application_credentials"):
        if (path := config.pop(name, None)) is not None:
            options["token"] = path
    if (url := config.pop("base_url", None)) is not None:
        options["endpoint_url"] = str(url).rstrip("/")
    headers = dict(place.headers)
    if (payer := headers.pop("x-goog-user-project", None)) is not None:
        options["requester_pays"] = payer
    return None if config or headers else options
