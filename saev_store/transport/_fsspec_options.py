"""The file system behind an address, with our options where the caller gives none."""

from __future__ import annotations

import re
from collections.abc import Mapping
from importlib import import_module
from typing import Any, cast

from saev_store.errors import ArgumentError, MissingDependencyError
from saev_store.transport import base
from saev_store.transport._errors import shown, translated
from saev_store.transport._remote import CONNECT_TIMEOUT_S, IN_FLIGHT

#: Protocols that hold whole files in this process or on this machine.
NEAR_PROTOCOLS = {"file", "local", "memory", "zip", "tar"}
S3, GOOGLE, WEB = {"s3", "s3a"}, {"gs", "gcs"}, {"http", "https"}
_EXTRAS = {**dict.fromkeys(S3, "s3"), **dict.fromkeys(GOOGLE, "gcs")}
#: With less, as by default, aiohttp stops and resumes the socket several times for each answer.
_BUFFER_BYTES = 8 << 20


def open_filesystem(url: str, options: Mapping[str, object]) -> tuple[Any, str]:
    """The file system behind an address, and its name of the address.

    Raises:
        MissingDependencyError: no installed package serves the protocol.
        ArgumentError: the file system refuses the options.
    """
    protocols, where = protocols_of(url), safe_url(url)
    try:
        ours = _tuned(protocols[0], options) if len(protocols) == 1 else dict(options)
        for protocol in set(protocols) if len(protocols) > 1 else ():
            if found := _tuned(protocol, cast("Mapping[str, object]", ours.get(protocol) or {})):
                ours[protocol] = found
        return import_module("fsspec.core").url_to_fs(url, **ours)
    except Exception as error:
        text = shown(error, options)
        if isinstance(error, ImportError) or "Protocol not known" in text:
            extras = sorted({_EXTRAS[protocol] for protocol in protocols if protocol in _EXTRAS})
            raise MissingDependencyError(
                f"this address needs more than is installed: {text}",
                where=where,
                remedy=f"pip install 'saev_store[{','.join(extras)}]'" if extras else "Check the address.",
            ) from error
        if isinstance(error, (AttributeError, TypeError, ValueError)):
            raise ArgumentError(f"{where} cannot be opened so: {text}", where="storage_options") from None
        raise translated(error, options, doing="open", where=where) from None


def _tuned(protocol: str, options: Mapping[str, object]) -> dict[str, object]:
    """The options of one file system, with ours if the caller gives none: connections and time-outs."""
    if protocol in S3:
        config = {
            "max_pool_connections": IN_FLIGHT,  # botocore's default is 10
            "connect_timeout": CONNECT_TIMEOUT_S,
            "read_timeout": base.READ_TIMEOUT_S,
            # s3fs retries too, and the two multiply. This one is for status 429, which s3fs does not retry.
            "retries": {"max_attempts": 1, "mode": "standard"},
            **cast("Mapping[str, object]", options.get("config_kwargs") or {}),
        }
        return {"use_listings_cache": False, **options, "config_kwargs": config}
    if protocol not in GOOGLE | WEB:
        return dict(options)
    from aiohttp import ClientTimeout

    timeout = ClientTimeout(total=None, sock_connect=CONNECT_TIMEOUT_S, sock_read=base.READ_TIMEOUT_S)
    if protocol in GOOGLE:
        return {"use_listings_cache": False, "requests_timeout": timeout, **options}
    client = cast("Mapping[str, object]", options.get("client_kwargs") or {})
    # To a client that takes compressed answers some servers send the whole file, compressed.
    headers = {"Accept-Encoding": "identity", **cast("Mapping[str, str]", options.get("headers") or {})}
    ours = {"timeout": timeout, "read_bufsize": _BUFFER_BYTES, **client}
    return {"use_listings_cache": False, **options, "client_kwargs": ours, "headers": headers}


def safe_url(url: str) -> str:
    """A URL that may be shown: without user, password, query and trailing slash.

    >>> safe_url("simplecache::https://me:secret@host/x/?token=1")
    'simplecache::https://host/x'
    """
    links: list[str] = []
    for link in url.split("::"):
        is_near = _protocol(link) in NEAR_PROTOCOLS
        shown = link if is_near else re.sub(r"://[^/]*@", "://", re.split(r"[?#]", link, maxsplit=1)[0])
        links.append(shown if shown.endswith("://") else shown.rstrip("/"))
    return "::".join(links)


def protocols_of(url: str) -> tuple[str, ...]:
    """The protocol of each link of an address."""
    return tuple(_protocol(link) for link in url.split("::"))


def _protocol(link: str) -> str:
    head, separator, _ = link.partition("://")
    return head.lower() if separator or head.isidentifier() else "file"
