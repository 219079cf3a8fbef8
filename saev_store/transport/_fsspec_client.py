"""The client of one fsspec file system: how it is opened, its options, waits and errors."""

from __future__ import annotations

import asyncio
import contextlib
import errno
import os
import re
import socket
import threading
from collections.abc import Awaitable, Callable, Mapping, Sequence
from importlib import import_module
from typing import Any, TypeVar, cast

from saev_store._runtime.threads import after_fork_in_child
from saev_store.errors import (
    ArgumentError,
    MissingDependencyError,
    ReadOnlyError,
    SaevStoreError,
    StoreExistsError,
    TransportError,
)
from saev_store.transport import base
from saev_store.transport._loop import check_fork
from saev_store.transport._options import authorities, redacted, tls_context
from saev_store.transport._remote import CONNECT_TIMEOUT_S, IN_FLIGHT, Client, service_error
from saev_store.transport.checks import from_os_error

T = TypeVar("T")

#: Protocols that hold whole files in this process or on this machine.
NEAR_PROTOCOLS = {"file", "local", "memory", "zip", "tar"}
_EXTRAS = {"s3": "s3", "s3a": "s3", "gs": "gcs", "gcs": "gcs"}
#: Protocols whose listings fsspec caches without a limit by default, and that have an option against it.
_LISTING_PROTOCOLS = {"s3", "s3a", "gs", "gcs", "http", "https", "abfs", "abfss", "az"}
#: With less, as by default, aiohttp stops and resumes the socket several times for each answer.
_BUFFER_BYTES = 8 << 20
_FIRST_WAIT_S, _LONGEST_WAIT_S = 0.1, 3.0
_PRECONDITION = re.compile(r"PreconditionFailed|pre-?condition|\b412\b|already exists", re.IGNORECASE)


class _Turn:
    """All members of an archive are read through one file object, and a cache downloads a file where it opens it.

    So one thread at a time reads through file systems that are not asynchronous, whatever client it has.
    """

    lock = threading.Lock()


after_fork_in_child(lambda: setattr(_Turn, "lock", threading.Lock()))


class FsspecClient(Client):
    """The file system behind a URL.

    Args:
        url: The address; may be chained.
        options: fsspec's storage options.

    Attributes:
        protocols: That of each link of the address.
        fs: The file system.
        is_async: True if requests run side by side on fsspec's loop.
        root: The file system's name of the address.

    Raises:
        MissingDependencyError: no installed package serves the protocol.
        ArgumentError: the file system refuses the options.
    """

    def __init__(self, url: str, options: Mapping[str, object]) -> None:
        super().__init__(url, options)
        if "credential_provider" in options:
            raise ArgumentError(
                "fsspec takes no credential_provider",
                where="storage_options",
                remedy="Install obstore, and leave out the options that it does not know.",
            )
        self.protocols: Sequence[str] = tuple(_protocol(link) for link in url.split("::"))
        self._pid = os.getpid()
        self.fs, root = self._open()  # fsspec has no types
        # By type: a caching file system pretends to have the attributes of the one it wraps.
        kind = import_module("fsspec.asyn").AsyncFileSystem
        self.is_async = issubclass(type(self.fs), kind) and self.protocols[0] != "dir"
        self.root = root.rstrip("/") if root.strip("/") else root
        if self.protocols[0] == "tar" and self.root.partition("/")[0] != "." and self.fs.exists("."):
            # `tar cf x.tar .` and `shutil.make_archive` put this before each name.
            is_there = self.fs.exists(self.root) if self.root else len(self.fs.ls("", detail=False)) > 1
            self.root = self.root if is_there else f"./{self.root}".rstrip("/")
        above, question, query = self.root.partition("?") if "://" in self.root else (self.root, "", "")
        self._above, self._query = f"{above.rstrip('/')}/" if above else "", question + query

    def loop(self) -> asyncio.AbstractEventLoop:
        """The loop of an asynchronous file system."""
        check_fork(self._pid, where=safe_url(self.url))
        return self.fs.loop

    def _open(self) -> tuple[Any, str]:
        """The file system, and its name of the address."""
        options = dict(self.options) if len(self.protocols) > 1 else tuned(self.protocols[0], self.options)
        if len(self.protocols) > 1:
            for protocol in set(self.protocols):
                if found := tuned(protocol, cast("Mapping[str, object]", options.get(protocol) or {})):
                    options[protocol] = found
        if drive := next((link for link in self.url.split("::") if re.match(r"[a-zA-Z]://", link)), None):
            raise self._missing(f"Protocol not known: {drive[0]}")  # fsspec takes it for a drive of Windows
        with self.errors("open", safe_url(self.url)):
            try:
                return import_module("fsspec.core").url_to_fs(self.url, **options)
            except ImportError as error:
                raise self._missing(str(error)) from error
            except (TypeError, ValueError) as error:
                text = redacted(str(error), self.options)
                if "Protocol not known" in text:
                    raise self._missing(text) from error
                raise ArgumentError(
                    f"{safe_url(self.url)} cannot be opened with these options: {text}", where="storage_options"
                ) from None

    def _missing(self, text: str) -> MissingDependencyError:
        extras = sorted({_EXTRAS[protocol] for protocol in self.protocols if protocol in _EXTRAS})
        return MissingDependencyError(
            f"this address needs more than is installed: {text}",
            where=safe_url(self.url),
            remedy=f"pip install 'saev_store[{','.join(extras)}]'" if extras else "Check the address.",
        )

    def key(self, below: str) -> str:
        """The file system's name of a file below the root."""
        return f"{self._above}{below}{self._query}" if below else self.root

    def ask(self, operation: str, *arguments: object, nbytes: int = 0, **options: object) -> Any:  # noqa: ANN401  # fsspec has no types
        """The result of an operation of the file system.

        An asynchronous operation has the time-out for `nbytes`, is cancelled then, and is tried again. The others are not.
        """
        if self.is_async:
            begin = getattr(self.fs, f"_{operation}")
            return self.run(lambda: self.again(lambda: begin(*arguments, **options)), nbytes=nbytes)
        with _Turn.lock:
            return getattr(self.fs, operation)(*arguments, **options)

    async def again(self, work: Callable[[], Awaitable[T]]) -> T:
        """The result of `work()`; errors of a busy or broken service are tried again for `RETRY_S`."""
        wait_s, now_s = _FIRST_WAIT_S, asyncio.get_running_loop().time
        ends_s = now_s() + base.RETRY_S
        while True:
            try:
                return await work()
            except Exception as error:
                ours = self.translated(error, doing="read", where="")
                if not (isinstance(ours, TransportError) and ours.transient) or now_s() + wait_s > ends_s:
                    raise
            await asyncio.sleep(wait_s)
            wait_s = min(2 * wait_s, _LONGEST_WAIT_S)

    def translated(self, error: Exception, *, doing: str, where: str) -> SaevStoreError:
        """Our error for one of fsspec's, or of the client of a service below it."""
        if isinstance(error, SaevStoreError):
            return error
        reason = error.__cause__
        if isinstance(error, FileNotFoundError) and isinstance(reason, Exception) and not _is_absence(reason):
            error = reason  # fsspec's web client calls every failure so, refused connections included
        text, status, kind = redacted(str(error), self.options).strip(), _status_of(error), type(error).__name__
        message, links = f"could not {doing}: {kind}{f': {text}' if text else ''}", _chain(error)
        if doing == "create" and (isinstance(error, FileExistsError) or status == 412 or _PRECONDITION.search(text)):
            return StoreExistsError("the file already exists", where=where)
        if isinstance(error, NotImplementedError):
            return ReadOnlyError(f"this kind of file system cannot {doing}", where=where)
        is_unknown_host = any(isinstance(getattr(link, "os_error", link), socket.gaierror) for link in links)
        code = error.errno if isinstance(error, OSError) else None
        if isinstance(error, FileNotFoundError) or (isinstance(error, KeyError) and "in the archive" in text):
            status = 404  # `zipfile` has no member of that name, through older fsspec
        elif isinstance(error, PermissionError) or "Credentials" in kind or text.startswith("Forbidden:"):  # of gcsfs
            status = 403
        elif isinstance(error, FileExistsError):
            status = 412  # gcsfs makes this of it, whatever was asked
        elif isinstance(error, TimeoutError) or "Timeout" in kind:
            status = 408
        elif status is None and not is_unknown_host and code not in {None, errno.EIO, errno.EBUSY}:
            return from_os_error(OSError(code, text), where=where, doing=doing)
        remedy = "Check the host's name in the address." if is_unknown_host else None
        passes = not isinstance(error, (TypeError, ValueError)) and kind != "TooManyRedirects"
        texts = " ".join(map(str, links))
        return service_error(status, message, text=texts, doing=doing, where=where, remedy=remedy, passes=passes)


def _chain(error: BaseException) -> list[BaseException]:
    """An error and all that it came from."""
    found, todo = list[BaseException](), [error]
    while todo:
        link = todo.pop()
        if not any(link is known for known in found):
            found.append(link)
            todo += [other for other in (link.__cause__, link.__context__) if other is not None]
    return found


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


def _protocol(link: str) -> str:
    head, separator, _ = link.partition("://")
    return head.lower() if separator or head.isidentifier() else "file"
