"""The address, options and errors of one file system, as fsspec takes and has them."""

from __future__ import annotations

import contextlib
import errno
import os
import re
import traceback
from collections.abc import Mapping
from importlib import import_module
from typing import Any, cast

from saev_store.errors import ArgumentError, MissingDependencyError, ReadOnlyError, SaevStoreError
from saev_store.transport import base
from saev_store.transport._options import authorities, redacted, tls_context
from saev_store.transport._remote import CONNECT_TIMEOUT_S, IN_FLIGHT, service_error
from saev_store.transport.checks import from_os_error

#: Protocols that hold whole files in this process or on this machine.
NEAR_PROTOCOLS = {"file", "local", "memory", "zip", "tar"}
_EXTRAS = {"s3": "s3", "s3a": "s3", "gs": "gcs", "gcs": "gcs"}
#: Protocols whose listings fsspec caches without a limit by default, and that have an option against it.
_LISTING_PROTOCOLS = {"s3", "s3a", "gs", "gcs", "http", "https", "abfs", "abfss", "az"}
#: With less, as by default, aiohttp stops and resumes the socket several times for each answer.
_BUFFER_BYTES = 8 << 20
_PRECONDITION = re.compile(r"PreconditionFailed|pre-?condition|\b412\b|already exists", re.IGNORECASE)


def open_filesystem(url: str, options: Mapping[str, object]) -> tuple[Any, str]:
    """The file system behind an address, and its name of the address.

    Raises:
        MissingDependencyError: no installed package serves the protocol.
        ArgumentError: the file system refuses the options.
    """
    if "credential_provider" in options:
        raise ArgumentError(
            "fsspec takes no credential_provider",
            where="storage_options",
            remedy="Install obstore, and leave out the options that it does not know.",
        )
    protocols, shown = protocols_of(url), safe_url(url)
    try:
        ours = tuned(protocols[0], options) if len(protocols) == 1 else dict(options)
        for protocol in set(protocols) if len(protocols) > 1 else ():
            if found := tuned(protocol, cast("Mapping[str, object]", ours.get(protocol) or {})):
                ours[protocol] = found
        return import_module("fsspec.core").url_to_fs(url, **ours)
    except SaevStoreError:
        raise
    except Exception as error:
        text = redacted(str(error), options)
        if isinstance(error, ImportError) or "Protocol not known" in text:
            extras = sorted({_EXTRAS[protocol] for protocol in protocols if protocol in _EXTRAS})
            raise MissingDependencyError(
                f"this address needs more than is installed: {text}",
                where=shown,
                remedy=f"pip install 'saev_store[{','.join(extras)}]'" if extras else "Check the address.",
            ) from error
        if isinstance(error, (TypeError, ValueError)):
            message = f"{shown} cannot be opened with these options: {text}"
            raise ArgumentError(message, where="storage_options") from None
        raise translated(error, options, doing="open", where=shown) from None


def translated(error: Exception, options: Mapping[str, object], *, doing: str, where: str) -> SaevStoreError:
    """Our error for one of fsspec's, or of the client of a service below it."""
    if isinstance(error, SaevStoreError):
        return error
    reason = error.__cause__
    if isinstance(error, FileNotFoundError) and isinstance(reason, Exception) and not _is_absence(reason):
        error = reason  # fsspec's web client calls every failure so, refused connections included
    text, status, kind = redacted(str(error), options).strip(), _status_of(error), type(error).__name__
    message = f"could not {doing}: {kind}{f': {text}' if text else ''}"
    code = error.errno if isinstance(error, OSError) else None
    if isinstance(error, NotImplementedError):
        return ReadOnlyError(f"this kind of file system cannot {doing}", where=where)
    if isinstance(error, FileExistsError) or (doing == "create" and _PRECONDITION.search(text)):
        status = 412  # gcsfs makes this of it, whatever was asked
    elif isinstance(error, FileNotFoundError) or (isinstance(error, KeyError) and "in the archive" in text):
        status = 404  # `zipfile` has no member of that name, through older fsspec
    elif isinstance(error, PermissionError) or "Credentials" in kind or text.startswith("Forbidden:"):  # of gcsfs
        status = 403
    elif isinstance(error, TimeoutError) or "Timeout" in kind:
        status = 408
    elif status is None and code in errno.errorcode and code not in {errno.EIO, errno.EBUSY}:
        return from_os_error(OSError(code, text), where=where, doing=doing)
    passes = not isinstance(error, (TypeError, ValueError)) and kind not in {
        "TooManyRedirects",
        "ClientConnectorDNSError",
    }
    texts = "".join(traceback.format_exception(error))  # also of what it came from
    return service_error(status, message, text=texts, doing=doing, where=where, passes=passes)


def _status_of(error: BaseException) -> int | None:
    """The HTTP status that an error of aiohttp, gcsfs, botocore or azure, or its cause, carries."""
    if type(error).__name__ == "ClientPayloadError":  # a broken body; its cause has a code, but no server sent it
        return None
    for attribute in ("status", "code", "status_code"):
        value = getattr(error, attribute, None)
        if isinstance(value, int) and 100 <= value < 600:
            return value
    response: object = getattr(error, "response", None)
    if isinstance(response, Mapping):
        about = cast("Mapping[str, Mapping[str, object]]", response).get("ResponseMetadata", {})
        if isinstance(value := about.get("HTTPStatusCode"), int):
            return value
    return None if error.__cause__ is None else _status_of(error.__cause__)


def _is_absence(error: Exception) -> bool:
    if isinstance(error, (FileNotFoundError, KeyError)) or _status_of(error) == 404:
        return True
    return not (isinstance(error, OSError) or _status_of(error) or type(error).__module__.startswith("aiohttp"))


def tuned(protocol: str, options: Mapping[str, object]) -> dict[str, object]:
    """The options of one file system, with ours if the caller gives none: connections, time-outs, authorities.

    >>> tuned("s3", {"anon": True})["config_kwargs"]["max_pool_connections"]
    64
    """
    found: dict[str, object] = {"use_listings_cache": False} if protocol in _LISTING_PROTOCOLS else {}
    found |= options
    client = dict(cast("Mapping[str, object]", options.get("client_kwargs") or {}))
    verify, inner = found.pop("verify", None), client.get("verify")
    authority = authorities(protocol, inner if verify is None else verify)
    if protocol in {"s3", "s3a"}:
        if authority is not True:  # botocore reads AWS_CA_BUNDLE but not SSL_CERT_FILE
            found["client_kwargs"] = {**client, "verify": authority}
        found["config_kwargs"] = {
            "max_pool_connections": IN_FLIGHT,  # botocore's default is 10
            "connect_timeout": CONNECT_TIMEOUT_S,
            "read_timeout": base.READ_TIMEOUT_S,
            # s3fs retries too, and the two multiply. This one is for status 429, which s3fs does not retry.
            "retries": {"max_attempts": 1, "mode": "standard"},
            **cast("Mapping[str, object]", options.get("config_kwargs") or {}),
        }
    elif protocol in {"gs", "gcs"}:
        if options.get("endpoint_url") or os.environ.get("STORAGE_EMULATOR_HOST"):
            # Before gcsfs is imported: it would request every bucket's type over gRPC, which no emulator serves.
            os.environ.setdefault("GCSFS_EXPERIMENTAL_ZB_HNS_SUPPORT", "false")
        found.setdefault("requests_timeout", _timeout())  # gcsfs has none of its own
    elif protocol in {"http", "https"}:
        client.pop("verify", None)
        found["client_kwargs"] = {"timeout": _timeout(), "read_bufsize": _BUFFER_BYTES, **client}
        # To a client that takes compressed answers some servers send the whole file, compressed.
        given = cast("Mapping[str, str]", options.get("headers") or {})
        found["headers"] = {"Accept-Encoding": "identity", **given}
        if authority is not True:
            found["ssl"] = tls_context(authority)
    return found


def _timeout() -> object:
    """Aiohttp's time-outs of a connection and of parts, with none of a whole answer; None if it is not installed."""
    with contextlib.suppress(ImportError):
        from aiohttp import ClientTimeout

        return ClientTimeout(total=None, sock_connect=CONNECT_TIMEOUT_S, sock_read=base.READ_TIMEOUT_S)
    return None


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
