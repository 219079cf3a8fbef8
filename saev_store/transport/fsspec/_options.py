"""How fsspec's file systems are set up for many ranges at once; the caller's options win."""

from __future__ import annotations

import os
from collections.abc import Mapping
from typing import cast

from saev_store.transport._tls import authorities, context_of, read_authorities

#: Protocols whose listings fsspec caches without a limit by default, and that have an option against it.
_LISTING_PROTOCOLS = {"s3", "s3a", "gs", "gcs", "http", "https", "abfs", "abfss", "az"}
#: Protocols whose certificates are checked as `verify` says; the others follow the library that serves them.
_TLS_PROTOCOLS = {"s3", "s3a", "http", "https"}
#: Requests of one file system that are under way at the same time; botocore's default is 10 connections.
_IN_FLIGHT = 64
_CONNECT_TIMEOUT_S, _READ_TIMEOUT_S = 5, 10


def tuned(protocol: str, options: Mapping[str, object]) -> dict[str, object]:
    """The options of one file system with ours added where the caller gives none.

    >>> tuned("s3", {"anon": True})["config_kwargs"]["max_pool_connections"]
    64
    """
    found: dict[str, object] = {"use_listings_cache": False} if protocol in _LISTING_PROTOCOLS else {}
    found |= options
    if protocol in _TLS_PROTOCOLS:
        found |= _trusting(protocol, found.pop("verify", None), options.get("client_kwargs"))
    if protocol in {"s3", "s3a"}:
        given = cast("Mapping[str, object]", options.get("config_kwargs") or {})
        found["config_kwargs"] = {
            "max_pool_connections": _IN_FLIGHT,
            "connect_timeout": _CONNECT_TIMEOUT_S,
            "read_timeout": _READ_TIMEOUT_S,
            # s3fs retries too, and the two multiply. The one retry of botocore is for status 429, which s3fs does not retry.
            "retries": {"max_attempts": 1, "mode": "standard"},
            **given,
        }
    if protocol in {"gs", "gcs"}:
        if options.get("endpoint_url") or os.environ.get("STORAGE_EMULATOR_HOST"):
            # Must be set before gcsfs is imported: it would request every bucket's type over gRPC, which no emulator serves.
            os.environ.setdefault("GCSFS_EXPERIMENTAL_ZB_HNS_SUPPORT", "false")
        if "requests_timeout" not in options:
            found["requests_timeout"] = _quick_to_notice()
    return found


def _trusting(protocol: str, verify: object, client_kwargs: object) -> dict[str, object]:
    """The options of one file system that say which certificate authorities it trusts."""
    client = dict(cast("Mapping[str, object]", client_kwargs or {}))
    inner = client.pop("verify", None)
    authority = authorities(protocol, inner if verify is None else verify)
    found: dict[str, object] = {"client_kwargs": client} if client_kwargs else {}
    if isinstance(authority, str):
        read_authorities(authority)
    if authority is True:
        return found
    if protocol in {"s3", "s3a"}:  # botocore takes a path, and knows AWS_CA_BUNDLE but not SSL_CERT_FILE
        return {"client_kwargs": {**client, "verify": authority}}
    return {**found, "ssl": context_of(authority)}


def _quick_to_notice() -> object:
    """The time-outs of gcsfs, which has none of its own."""
    try:
        from aiohttp import ClientTimeout
    except ImportError:
        return None
    return ClientTimeout(total=None, sock_connect=_CONNECT_TIMEOUT_S, sock_read=_READ_TIMEOUT_S)
