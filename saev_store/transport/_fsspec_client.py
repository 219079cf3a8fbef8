"""The client of one fsspec file system: how it is opened, its options, waits and errors."""

from __future__ import annotations

import asyncio
import contextlib
import os
import re
import threading
from collections.abc import Awaitable, Callable, Generator, Mapping, Sequence
from contextlib import AbstractContextManager
from importlib import import_module
from typing import Protocol, TypeVar, cast

from saev_store._runtime.threads import after_fork_in_child
from saev_store.errors import ArgumentError, MissingDependencyError, TransportError
from saev_store.transport._fsspec_errors import translated
from saev_store.transport._loop import check_fork, limit_s, run
from saev_store.transport._options import authorities, conditional_create, redacted, tls_context
from saev_store.transport._remote import CONNECT_TIMEOUT_S, IN_FLIGHT, READ_TIMEOUT_S, RETRY_S

T = TypeVar("T")

#: Protocols that hold whole files in this process or on this machine.
NEAR_PROTOCOLS = {"file", "local", "memory", "zip", "tar"}
_EXTRAS = {"s3": "s3", "s3a": "s3", "gs": "gcs", "gcs": "gcs"}
#: Protocols whose listings fsspec caches without a limit by default, and that have an option against it.
_LISTING_PROTOCOLS = {"s3", "s3a", "gs", "gcs", "http", "https", "abfs", "abfss", "az"}
#: Protocols whose open files do not disturb each other.
_OWN_POSITIONS = {"file", "local", "memory"}
#: With less, as by default, aiohttp stops and resumes the socket several times for each answer.
_BUFFER_BYTES = 8 << 20
_FIRST_WAIT_S, _LONGEST_WAIT_S = 0.1, 3.0


class FileSystem(Protocol):
    """The part of fsspec's file systems that is called by name; fsspec itself has no types."""

    loop: asyncio.AbstractEventLoop

    def exists(self, path: str) -> bool: ...
    def ls(self, path: str, *, detail: bool) -> Sequence[object]: ...
    def makedirs(self, path: str, exist_ok: bool) -> None: ...
    def invalidate_cache(self, path: str | None = None) -> None: ...


class _Turn:
    """All members of an archive are read through one file object, and a cache downloads a file where it opens it.

    So one thread at a time reads through file systems that are not asynchronous, whatever client it has.
    """

    lock = threading.Lock()

    @classmethod
    def renew(cls) -> None:
        """Make a lock that is free: the thread that held it does not exist in a forked child."""
        cls.lock = threading.Lock()


after_fork_in_child(_Turn.renew)


class FsspecClient:
    """The file system behind a URL, shared by all transports below it; thread-safe. Its pickles contain the options.

    It is opened by the first call of `fs`.

    Args:
        url: The address; may be chained.
        options: fsspec's storage options.
        timeout_s: Time-out of an operation, beside the time for its bytes; of asynchronous file systems only.

    Attributes:
        protocols: That of each link of the address.
        is_conditional: False if the service does not know conditional creation.
        root: The file system's name of the address.
    """

    def __init__(self, url: str, options: Mapping[str, object], timeout_s: float) -> None:
        self._arguments = (url, options, timeout_s)
        self.url, self.timeout_s = url, timeout_s
        self.is_conditional, self.options = conditional_create(options)
        if "credential_provider" in options:
            raise ArgumentError(
                "fsspec takes no credential_provider",
                where="storage_options",
                remedy="Install obstore, and leave out the options that it does not know.",
            )
        self.protocols: Sequence[str] = tuple(_protocol(link) for link in url.split("::"))
        self.root = self._above = self._query = ""
        self._is_async = False
        self._fs: FileSystem | None = None
        self._pid = os.getpid()
        self._opening = threading.RLock()

    def __reduce__(self) -> tuple[object, ...]:
        return FsspecClient, self._arguments

    def fs(self) -> FileSystem:
        """The file system.

        Raises:
            MissingDependencyError: no installed package serves the protocol.
            ArgumentError: the file system refuses the options.
            ForkError: a parent process has opened it, and it is asynchronous.
        """
        if self._fs is not None:
            if self._is_async:
                check_fork(self._pid, where=safe_url(self.url))
            return self._fs
        with self._opening:
            if self._fs is None:
                self._pid, self._fs = os.getpid(), self._open()
            return self._fs

    def _open(self) -> FileSystem:
        # By name, for these modules have no types.
        core, asyn = (import_module(f"fsspec.{name}") for name in ("core", "asyn"))
        options = dict(self.options) if len(self.protocols) > 1 else tuned(self.protocols[0], self.options)
        if len(self.protocols) > 1:
            for protocol in set(self.protocols):
                if found := tuned(protocol, cast("Mapping[str, object]", options.get(protocol) or {})):
                    options[protocol] = found
        if drive := next((link for link in self.url.split("::") if re.match(r"[a-zA-Z]://", link)), None):
            raise self._missing(f"Protocol not known: {drive[0]}")  # fsspec takes it for a drive of Windows
        with self.errors("open", safe_url(self.url)):
            try:
                found = core.url_to_fs(self.url, **options)
            except ImportError as error:
                raise self._missing(str(error)) from error
            except (TypeError, ValueError) as error:
                text = redacted(str(error), self.options)
                if "Protocol not known" in text:
                    raise self._missing(text) from error
                raise ArgumentError(
                    f"{safe_url(self.url)} cannot be opened with these options: {text}", where="storage_options"
                ) from None
        fs, root = cast("tuple[FileSystem, str]", found)
        root = root.rstrip("/") if root.strip("/") else root
        # By type: a caching file system pretends to have the attributes of the one it wraps.
        self._is_async = issubclass(type(fs), cast("type", asyn.AsyncFileSystem)) and self.protocols[0] != "dir"
        if self.protocols[0] == "tar" and root.partition("/")[0] != "." and fs.exists("."):
            # `tar cf x.tar .` and `shutil.make_archive` put this before each name.
            is_there = fs.exists(root) if root else len(fs.ls("", detail=False)) > 1
            root = root if is_there else f"./{root}".rstrip("/")
        self.root = root
        above, question, query = root.partition("?") if "://" in root else (root, "", "")
        self._above, self._query = f"{above.rstrip('/')}/" if above else "", question + query
        return fs

    @property
    def is_async(self) -> bool:
        """True if requests run side by side on fsspec's loop."""
        self.fs()
        return self._is_async

    def _missing(self, text: str) -> MissingDependencyError:
        extras = sorted({_EXTRAS[protocol] for protocol in self.protocols if protocol in _EXTRAS})
        return MissingDependencyError(
            f"this address needs more than is installed: {text}",
            where=safe_url(self.url),
            remedy=f"pip install 'saev_store[{','.join(extras)}]'" if extras else "Check the address.",
        )

    def key(self, below: str) -> str:
        """The file system's name of a file below the root."""
        self.fs()  # which learns the root
        return f"{self._above}{below}{self._query}" if below else self.root

    @contextlib.contextmanager
    def errors(self, doing: str, where: str) -> Generator[None]:
        """A block in which errors of fsspec, and of the clients of services below it, become ours."""
        try:
            yield
        except Exception as error:
            ours = translated(error, redact=lambda text: redacted(text, self.options), doing=doing, where=where)
            if ours is error:
                raise
            raise ours from None  # the text of the first one may contain what was signed

    def turn(self) -> AbstractContextManager[object]:
        """A block in which files may be open."""
        is_free = self.is_async or self.protocols[0] in _OWN_POSITIONS
        return contextlib.nullcontext() if is_free else _Turn.lock

    def ask(self, operation: str, *arguments: object, nbytes: int = 0, **options: object) -> object:
        """The result of an operation of the file system.

        An asynchronous operation has the time-out for `nbytes`, and is cancelled then. The others have none.
        """
        fs = self.fs()
        if self.is_async:
            begin = getattr(fs, f"_{operation}")
            return self.run(lambda: begin(*arguments, **options), nbytes=nbytes)
        with self.turn():
            return getattr(fs, operation)(*arguments, **options)

    def run(self, work: Callable[[], Awaitable[T]], *, nbytes: int) -> T:
        """The result of `work()` on the loop of an asynchronous file system; its errors are the library's own."""
        return run(work, self.fs().loop, limit_s=limit_s(self.timeout_s, nbytes))

    async def again(self, work: Callable[[], Awaitable[T]]) -> T:
        """The result of `work()`; errors of a busy or broken service are tried again for `RETRY_S`."""
        wait_s, now_s = _FIRST_WAIT_S, asyncio.get_running_loop().time
        ends_s = now_s() + RETRY_S
        while True:
            try:
                return await work()
            except Exception as error:
                ours = translated(error, redact=str, doing="read", where="")
                if not (isinstance(ours, TransportError) and ours.transient) or now_s() + wait_s > ends_s:
                    raise
            await asyncio.sleep(wait_s)
            wait_s = min(2 * wait_s, _LONGEST_WAIT_S)


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
            "read_timeout": READ_TIMEOUT_S,
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

        return ClientTimeout(total=None, sock_connect=CONNECT_TIMEOUT_S, sock_read=READ_TIMEOUT_S)
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
