"""The client of one fsspec file system: opening it, again after a fork, waits, and its errors."""

from __future__ import annotations

import asyncio
import contextlib
import os
import re
from collections.abc import AsyncGenerator, Awaitable, Callable, Generator, Mapping, Sequence
from contextlib import AbstractContextManager
from functools import partial
from importlib import import_module
from typing import BinaryIO, NoReturn, Protocol, TypeVar, cast

from saev_store._runtime.threads import ForkSafeLock, hidden_interrupt, raise_hidden_interrupt
from saev_store.errors import (
    AccessError,
    ArgumentError,
    MissingDependencyError,
    SaevStoreError,
    TransportError,
)
from saev_store.transport._remote import (
    READ_TIMEOUT_S,
    SLOWEST_BYTES_PER_S,
    again,
    awaited_in_loop,
    notes_of,
    run_in_loop,
    within,
)
from saev_store.transport.checks import RequestCounter
from saev_store.transport.credentials import StorageOptions
from saev_store.transport.fsspec._failures import chain, status_of, translated
from saev_store.transport.fsspec._options import tuned
from saev_store.transport.fsspec._ranges import Get, cat_document, getter

#: Protocols that answer within microseconds and hold whole files in this process or on this machine.
NEAR_PROTOCOLS = {"file", "local", "memory", "zip", "tar"}
#: The protocols of plain web addresses, whose file system is opened without a request, so also inside an event loop.
WEB = {("http",), ("https",)}
_WEB_READS = {"cat_file", "info", "ls"}
_EXTRAS = {"s3": "s3", "s3a": "s3", "gs": "gcs", "gcs": "gcs"}
_VERSIONED = re.compile(r"^[^?]*\?versionId=[^/?#]*$")
#: Protocols whose open files (or whose `cat_file`) do not disturb each other.
_OWN_POSITIONS = {"file", "local", "memory"}
# All members of an archive are read through one file object, and `zipfile` of Python 3.13 seeks in a stored member
# relative to wherever the last reader left it: two readers at a time would get wrong bytes. A cache downloads a file when
# it is opened, two readers into the same place. One lock for all, for two clients may stand on the same archive.
_TURN = ForkSafeLock()
# File systems that belong to a parent process: closing their connections here would wait for a dead thread.
_INHERITED: list[object] = []


T = TypeVar("T")


class FileSystem(Protocol):
    """The part of fsspec's file systems that we call, `loop` of asynchronous ones; fsspec itself has no types."""

    loop: asyncio.AbstractEventLoop

    def cat_file(self, path: str, start: int | None = None, end: int | None = None, **options: object) -> bytes: ...
    def info(self, path: str, **options: object) -> Mapping[str, object]: ...
    def exists(self, path: str) -> bool: ...
    def ls(self, path: str, *, detail: bool) -> Sequence[object]: ...
    def makedirs(self, path: str, exist_ok: bool) -> None: ...
    def open(self, path: str, mode: str) -> AbstractContextManager[BinaryIO]: ...
    def invalidate_cache(self, path: str | None = None) -> None: ...


class _Session(Protocol):
    async def close(self) -> None: ...


class _WebFileSystem(FileSystem, Protocol):
    async def set_session(self) -> _Session: ...


class _Loops(Protocol):
    loop: list[object]
    iothread: list[object]


@contextlib.contextmanager
def _whole_loop(asyn: _Loops) -> Generator[None]:
    """A block that may start the loop of fsspec: one whose start is interrupted never runs, and all requests would wait for it."""
    try:
        yield
    except BaseException as error:
        if isinstance(error, KeyboardInterrupt) or hidden_interrupt(error) is not None:
            if asyn.iothread[0] is None:
                asyn.loop[0] = None
            raise_hidden_interrupt(error)
        raise


class FsspecClient:
    """The file system behind a URL, shared by all transports below it; thread-safe.

    It is opened by the first call of `fs`, so a pickle opens also where credentials are missing. `FsspecTransport` says what
    the arguments are.
    """

    def __init__(self, url: str, options: StorageOptions, timeout_s: float) -> None:
        self.url, self.options, self.timeout_s = url, options, timeout_s
        self.requests = RequestCounter()
        self.protocols = tuple(_protocol(link) for link in url.split("::"))
        self.safe_url = safe_url(url)
        self._lock = ForkSafeLock()
        self._pid = -1
        self._fs: FileSystem | None = None
        self._in_loops: dict[asyncio.AbstractEventLoop, tuple[FileSystem, AsyncGenerator[FileSystem]]] = {}
        self.root = self._above = self._query = ""
        self.is_async = self.has_cat_file = False
        #: How ranges are requested with the version of the object, or None.
        self.get: Get | None = None

    def __reduce__(self) -> tuple[object, ...]:
        return (_reopen, (self.url, self.options, self.timeout_s))

    def fs(self) -> FileSystem:
        """The file system of this process; a forked child gets a new one, because threads and sockets do not fork.

        Raises:
            MissingDependencyError: no installed package serves the protocol.
            ArgumentError: the file system refuses the options.
            AccessError: the options were in another process.
        """
        pid = os.getpid()
        if self._fs is not None and self._pid == pid:
            return self._fs
        with self._lock.mutex:
            if self._fs is None or self._pid != pid:
                if self._pid != -1:
                    _INHERITED.extend([self._fs, self._in_loops])
                    self._in_loops = {}
                self._fs = self._open()  # fsspec keeps no instances across a fork
                self._pid = pid
            return self._fs

    def _open(self, loop: asyncio.AbstractEventLoop | None = None) -> FileSystem:
        # By name, for these modules have no types; `FileSystem` above is what we rely on.
        core, asyn, spec = (import_module(f"fsspec.{name}") for name in ("core", "asyn", "spec"))
        options: dict[str, object] = {} if loop is None else {"loop": loop, "skip_instance_cache": True}
        if len(self.protocols) == 1:
            options |= tuned(self.protocols[0], self.options.all)
        else:
            options |= self.options.all
            for protocol in set(self.protocols):
                inner = cast("Mapping[str, object]", options.get(protocol) or {})
                if found := tuned(protocol, inner):
                    options[protocol] = found
        if drive := next((link for link in self.url.split("::") if re.match(r"[a-zA-Z]://", link)), None):
            raise self._missing(f"Protocol not known: {drive[0]}")  # fsspec takes it for a drive of Windows
        if re.search(r"://[^/]*\[[^]/]*::", self.url):
            raise ArgumentError(
                "fsspec takes the two colons in the IPv6 address for the end of a link of a chain",
                where=self.safe_url,
                remedy="Write all its parts: http://[0:0:0:0:0:0:0:1]:8000/…",
            )
        with self.errors("open", self.safe_url):
            try:
                with _whole_loop(cast("_Loops", asyn)):
                    found = core.url_to_fs(self.url, **options)
            except ImportError as error:
                raise self._missing(str(error)) from error
            except (TypeError, ValueError) as error:
                text = self.redact(str(error))
                if "Protocol not known" in text:
                    raise self._missing(text) from error
                raise ArgumentError(
                    f"{self.safe_url} cannot be opened with these options: {text}", where="storage_options"
                ) from None
        fs, root = cast("tuple[FileSystem, str]", found)
        self.root = root.rstrip("/") if root.strip("/") else root
        if self.protocols[0] == "tar" and self.root.partition("/")[0] != "." and fs.exists("."):
            # `tar cf x.tar .` and `shutil.make_archive` put this before each name.
            is_there = fs.exists(self.root) if self.root else len(fs.ls("", detail=False)) > 1
            self.root = self.root if is_there else f"./{self.root}".rstrip("/")
        # Addresses of web servers have queries, and those of S3 versions; elsewhere a name may hold what begins a query.
        has_query = "://" in self.root or _VERSIONED.search(self.root) is not None
        above, question, query = self.root.partition("?") if has_query else (self.root, "", "")
        if "://" not in self.root and self.protocols[-1] not in NEAR_PROTOCOLS and re.search(r"[?#]", above):
            raise ArgumentError(f"{above!r} has '?' or '#', which end the path of an address", where="url")
        self._above, self._query = f"{above.rstrip('/')}/" if above else "", question + query
        self.get = getter(self.protocols, fs)
        # By type: a caching file system pretends to have the attributes of the one it wraps. `dir::` can wrap either.
        self.is_async = issubclass(type(fs), cast("type", asyn.AsyncFileSystem)) and self.protocols[0] != "dir"
        self.has_cat_file = type(fs).cat_file is not cast("object", spec.AbstractFileSystem.cat_file)
        return fs

    def _missing(self, text: str) -> MissingDependencyError:
        extras = sorted({_EXTRAS[protocol] for protocol in self.protocols if protocol in _EXTRAS})
        remedy = (
            f"pip install 'saev_store[{','.join(extras)}]'"
            if extras
            else "Check the address, or install the package that serves it."
        )
        return MissingDependencyError(
            f"this address needs more than is installed: {text}", where=self.safe_url, remedy=remedy
        )

    def key(self, below: str) -> str:
        """The file system's name of a file below the root."""
        return f"{self._above}{below}{self._query}" if below else self.root

    def turn(self) -> AbstractContextManager[object]:
        """A block in which files may be open."""
        return contextlib.nullcontext() if self.is_async or self.protocols[0] in _OWN_POSITIONS else _TURN.mutex

    def make_parent(self, key: str) -> None:
        """Make the folder of a file where the file system has folders."""
        if not self.is_async:
            self.fs().makedirs(key.rpartition("/")[0] or "/", exist_ok=True)

    def inner_size(self, key: str) -> object:
        """What the file system behind caches says of a file's size; they look it up in a list of the folder, which may lack it."""
        fs: object = self.fs()
        # By the object's own dictionary: a caching file system gives the attributes of the one that it wraps as its own.
        while (inner := object.__getattribute__(fs, "__dict__").get("fs")) is not None:
            fs = inner
        return cast("FileSystem", fs).info(key).get("size")

    def ask(self, operation: str, *arguments: object, nbytes: int = 0, once: bool = False, **options: object) -> object:
        """What an operation of the file system gives; `once` asks a busy server no second time.

        An asynchronous operation has the time-out for `nbytes` and is cancelled then: if it went on, it could change the object
        after another writer has. The others have no time-out.
        """
        fs = self.fs()
        if not self.is_async:
            return getattr(fs, operation)(*arguments, **options)
        begin = getattr(fs, f"_{operation}")
        is_web = self.protocols in WEB
        # The file systems of object stores try reads again themselves, but for answers without a body, which have no code.
        if once or operation not in (_WEB_READS if is_web else {"info"}):
            return self.run(lambda: begin(*arguments, **options), nbytes=nbytes)
        if is_web and operation == "cat_file" and options.get("end") is not None and self.get is not None:
            begin = partial(cat_document, fs)  # fsspec's reads all of an answer, whatever was asked for

        def is_busy(error: Exception) -> bool:
            """Whether it answered. A server that does not may be a mistaken address, so that is told at once."""
            name = type(error).__name__
            if is_web:
                return (status_of(error) is not None or name == "ClientPayloadError") and self.passes(error)
            return name == "OSError" and self.passes(error)  # s3fs has other classes for time-outs and connections

        def work() -> Awaitable[object]:
            """The operation; what has no body is soon there, or will never be."""
            begun = partial(begin, *arguments, **options)
            return within(begun, READ_TIMEOUT_S) if is_web and operation == "info" else begun()

        return self.run(lambda: again(work, is_busy), nbytes=nbytes)

    def passes(self, error: Exception) -> bool:
        """Whether an error of the library may pass, so that another try is worthwhile."""
        if isinstance(error, SaevStoreError):
            return False
        ours = self._translated(error, doing="read", where="")
        return isinstance(ours, TransportError) and ours.transient

    def run(self, work: Callable[[], Awaitable[T]], *, nbytes: int) -> T:
        """What `work()` gives in the loop of an asynchronous file system; its errors are the library's own.

        Raises:
            TimeoutError: it took longer than is allowed for `nbytes`, and was cancelled.
        """
        return run_in_loop(work, self.fs().loop, limit_s=self.timeout_s + nbytes / SLOWEST_BYTES_PER_S)

    async def awaited(self, work: Callable[[FileSystem], Awaitable[T]], *, nbytes: int) -> T:
        """What `work(fs)` gives, awaited in the running event loop; cancelling it cancels the work.

        On web servers `fs` is the file system of that loop: to hand requests to the loop of another thread costs as much
        as the requests.

        Raises:
            TimeoutError: it took longer than is allowed for `nbytes`, and was cancelled.
        """
        fs, loop = self.fs(), asyncio.get_running_loop()
        limit_s = self.timeout_s + nbytes / SLOWEST_BYTES_PER_S
        if self.protocols not in WEB:
            return await awaited_in_loop(lambda: work(fs), fs.loop, limit_s=limit_s)
        if loop not in self._in_loops:
            for closed in [other for other in list(self._in_loops) if other.is_closed()]:
                self._in_loops.pop(closed, None)
            kept = self._kept(loop)
            self._in_loops[loop] = (await anext(kept), kept)  # without a wait: no other task runs in between
        own, _ = self._in_loops[loop]
        async with asyncio.timeout(limit_s):
            return await work(own)

    async def _kept(self, loop: asyncio.AbstractEventLoop) -> AsyncGenerator[FileSystem]:
        """The file system of the running loop, until the loop shuts down its generators: connections do not outlive it."""
        fs = self._open(loop)
        try:
            yield fs
        finally:
            self._in_loops.pop(loop, None)
            session = await cast("_WebFileSystem", fs).set_session()
            await session.close()

    def redact(self, text: str) -> str:
        """`text` without any of the options' values and without what URLs may carry."""
        text = self.options.redact(text)
        return re.sub(r"\b\w+(?:::\w+)*://\S+", lambda match: safe_url(match.group()), text)[:400]

    def errors(self, doing: str, where: str) -> AbstractContextManager[None]:
        """A block whose errors become ours."""
        return _Errors(self, doing, where)

    def raise_ours(self, error: Exception, *, doing: str, where: str) -> NoReturn:
        """Raise what an error of the library, which is being handled, is among ours."""
        # A traceback shows the cause as well, and tools that pickle errors take all that hangs on it: one that tells a
        # secret anywhere is left out; so is one that hangs on a thousand frames (s3fs, sent in circles by a server).
        text = str(error)
        hangs_on_it = "".join(f"{link!s} {link.args!r} {vars(link)!r}" for link in chain(error))
        is_harmless = self.redact(text) == text[:400] and self.options.redact(hangs_on_it) == hangs_on_it
        is_harmless &= not isinstance(error, RecursionError)
        cause = error if is_harmless else None
        ours = self._translated(error, doing=doing, where=where)
        ours.message += notes_of(error)
        raise ours from cause

    def _translated(self, error: Exception, *, doing: str, where: str) -> SaevStoreError:
        endpoint = str(self.options.all.get("endpoint_url") or self.safe_url.rpartition("::")[2])
        return translated(error, redact=self.redact, endpoint=endpoint, doing=doing, where=where)


def safe_url(url: str) -> str:
    """A URL that may be shown: without user, password, query and trailing slash.

    >>> safe_url("simplecache::https://me:secret@host/x/?token=1")
    'simplecache::https://host/x'
    """
    links: list[str] = []
    for link in url.split("::"):
        if _protocol(link) not in NEAR_PROTOCOLS:
            link = re.sub(r"://[^/]*@", "://", re.split(r"[?#]", link, maxsplit=1)[0])  # noqa: PLW2901  # one link after the other is cleaned
        links.append(link if link.endswith("://") else link.rstrip("/"))
    return "::".join(links)


class _Errors:
    """What `FsspecClient.errors` gives; a class, for every request enters one, and generators take longer."""

    def __init__(self, client: FsspecClient, doing: str, where: str) -> None:
        self._client, self._doing, self._where = client, doing, where

    def __enter__(self) -> None:
        return None

    def __exit__(self, kind: object, error: BaseException | None, traceback: object) -> None:
        if isinstance(error, Exception) and not isinstance(error, SaevStoreError):
            self._client.raise_ours(error, doing=self._doing, where=self._where)


def _protocol(link: str) -> str:
    head, separator, _ = link.partition("://")
    return head.lower() if separator or head.isidentifier() else "file"


def _reopen(url: str, options: StorageOptions, timeout_s: float) -> FsspecClient:
    client = FsspecClient(url, options, timeout_s)
    # An error here would break the connections of dask's workers, which then hang; the first operation raises it.
    with contextlib.suppress(AccessError):
        client.fs()
    return client
