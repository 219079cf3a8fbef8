"""How fsspec's file systems are set up for many ranges at once; what the caller says wins."""

from __future__ import annotations

import os
from collections.abc import Mapping
from typing import cast

#: Protocols whose listings fsspec caches for ever unless it is told not to, and that accept being told.
_LISTING_PROTOCOLS = {"s3", "s3a", "gs", "gcs", "http", "https", "abfs", "abfss", "az"}
#: Requests of one file system that are under way at the same time; botocore keeps 10 connections on its own account.
_IN_FLIGHT = 64
_CONNECT_TIMEOUT_S, _READ_TIMEOUT_S = 5, 10


def tuned(protocol: str, options: Mapping[str, object]) -> dict[str, object]:
    """The options of one file system with ours added where the caller is silent.

    >>> tuned("s3", {"anon": True})["config_kwargs"]["max_pool_connections"]
    64
    """
    found: dict[str, object] = {"use_listings_cache": False} if protocol in _LISTING_PROTOCOLS else {}
    found |= options
    if protocol in {"s3", "s3a"}:
        given = cast("Mapping[str, object]", options.get("config_kwargs") or {})
        found["config_kwargs"] = {
            "max_pool_connections": _IN_FLIGHT,
            "connect_timeout": _CONNECT_TIMEOUT_S,
            "read_timeout": _READ_TIMEOUT_S,
            # s3fs tries again itself, and the two multiply; botocore's one more attempt is for the 429 that s3fs lets be.
            "retries": {"max_attempts": 1, "mode": "standard"},
            **given,
        }
    if protocol in {"gs", "gcs"}:
        if options.get("endpoint_url") or os.environ.get("STORAGE_EMULATOR_HOST"):
            # Before its first import: it would ask for every bucket's type over gRPC, which no emulator answers.
            os.environ.setdefault("GCSFS_EXPERIMENTAL_ZB_HNS_SUPPORT", "false")
        if "requests_timeout" not in options:
            found["requests_timeout"] = _quick_to_notice()
    return found


def _quick_to_notice() -> object:
    """The time-outs of gcsfs, which has none of its own and would wait for ever."""
    try:
        from aiohttp import ClientTimeout
    except ImportError:
        return None
    return ClientTimeout(total=None, sock_connect=_CONNECT_TIMEOUT_S, sock_read=_READ_TIMEOUT_S)
