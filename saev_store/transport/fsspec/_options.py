"""The options of fsspec's file systems, with ours where the caller gives none: connections, time-outs, certificate authorities."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Mapping
from typing import cast

from saev_store.transport._remote import CONNECT_TIMEOUT_S, READ_TIMEOUT_S
from saev_store.transport._tls import authorities, context_of, read_authorities
from saev_store.transport.base import IN_FLIGHT

#: Protocols whose listings fsspec caches without a limit by default, and that have an option against it.
_LISTING_PROTOCOLS = {"s3", "s3a", "gs", "gcs", "http", "https", "abfs", "abfss", "az"}
#: Protocols whose certificates are checked as `verify` says; the others follow the library that serves them.
_TLS_PROTOCOLS = {"s3", "s3a", "http", "https"}
#: With less, as by default, aiohttp stops and resumes the socket several times for each answer, which is kept whole anyway.
_BUFFER_BYTES = 8 << 20


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
            "max_pool_connections": IN_FLIGHT,  # botocore's default is 10
            "connect_timeout": CONNECT_TIMEOUT_S,
            "read_timeout": READ_TIMEOUT_S,
            # s3fs retries too, and the two multiply. The one retry of botocore is for status 429, which s3fs does not retry.
            "retries": {"max_attempts": 1, "mode": "standard"},
            **given,
        }
    if protocol in {"gs", "gcs"}:
        if options.get("endpoint_url") or os.environ.get("STORAGE_EMULATOR_HOST"):
            # Must be set before gcsfs is imported: it would request every bucket's type over gRPC, which no emulator serves.
            os.environ.setdefault("GCSFS_EXPERIMENTAL_ZB_HNS_SUPPORT", "false")
        # gcsfs has none of its own.
        if "requests_timeout" not in options and (timeout := _timeout(sock_read=READ_TIMEOUT_S)):
            found["requests_timeout"] = timeout
    if protocol in {"http", "https"} and (timeout := _timeout(sock_read=None)):
        # aiohttp gives up any answer after five minutes, however much of it comes; we have limits of our own.
        given = cast("Mapping[str, object]", found.get("client_kwargs") or {})
        found["client_kwargs"] = {"timeout": timeout, "read_bufsize": _BUFFER_BYTES, **given}
    return found


def _timeout(*, sock_read: float | None) -> object:
    """Aiohttp's time-outs of a connection and of parts, with none of a whole answer; None where it is not installed."""
    with contextlib.suppress(ImportError):
        from aiohttp import ClientTimeout

        return ClientTimeout(total=None, sock_connect=CONNECT_TIMEOUT_S, sock_read=sock_read)
    return None


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
    if protocol in {"s3", "s3a"}:  # botocore takes a path, and reads AWS_CA_BUNDLE but not SSL_CERT_FILE
        return {"client_kwargs": {**client, "verify": authority}}
    return {**found, "ssl": context_of(authority)}
