"""The base of transports of services: names below one address, versions of the files that were read, errors of answers."""

from __future__ import annotations

import asyncio
import contextlib
import copy
import re
from abc import ABC, abstractmethod
from collections.abc import Awaitable, Callable, Generator, Iterable, Mapping, Sequence
from typing import Generic, Self, TypeVar

from saev_store.errors import (
    AccessError,
    DeadlineError,
    NotFoundError,
    SaevStoreError,
    StoreExistsError,
    TransportError,
)
from saev_store.names import joined_url
from saev_store.transport._loop import awaited, gathered, run
from saev_store.transport._options import CONDITIONAL_CREATE, conditional_create
from saev_store.transport.base import FileReads, FileStat, Transport
from saev_store.transport.checks import Buffer, check_path, check_ranges, fill, requests_into, requests_of, too_short

T = TypeVar("T")

#: Requests under way at once: what is under way shares the line, and more of it would only end later.
IN_FLIGHT = 64
CONNECT_TIMEOUT_S = 5
#: Time-out of an operation, and the speed that is as good as stalled: its share of the bytes is added.
TIMEOUT_S, SLOWEST_BYTES_PER_S = 60.0, 1 << 20


class Client(ABC):
    """The client of a service behind an address, shared by all transports below it; thread-safe. Pickles contain the options.

    Args:
        url: The address.
        options: Storage options.

    Attributes:
        options: Storage options of the client's own.
        is_async: False if it has no event loop, and blocks.
        is_conditional: False if the service does not know conditional creation.
        slots: Held by each request while it is under way.
    """

    is_async = True

    def __init__(self, url: str, options: Mapping[str, object]) -> None:
        self._arguments, self.url = (url, options), url
        self.is_conditional, self.options = conditional_create(options)
        self.slots = asyncio.Semaphore(IN_FLIGHT)

    def __reduce__(self) -> tuple[object, ...]:
        return type(self), self._arguments

    @abstractmethod
    def loop(self) -> asyncio.AbstractEventLoop:
        """The event loop on which requests run, in a thread of its own.

        Raises:
            ForkError: a parent process has used it.
        """

    @abstractmethod
    def translated(self, error: Exception, *, doing: str, where: str) -> SaevStoreError:
        """Our error for one of the client's; ours stay as they are."""

    @contextlib.contextmanager
    def errors(self, doing: str, where: str) -> Generator[None]:
        """A block in which errors of the client become ours."""
        try:
            yield
        except Exception as error:
            ours = self.translated(error, doing=doing, where=where)
            if ours is error:
                raise
            raise ours from None  # the text of the first one may contain what was signed

    def run(self, work: Callable[[], Awaitable[T]], *, nbytes: int = 0) -> T:
        """The result of `work()`, waited for in this thread; it is cancelled after the time that `nbytes` may take."""
        return run(work, self.loop(), limit_s=TIMEOUT_S + nbytes / SLOWEST_BYTES_PER_S)

    def call(self, doing: str, where: str, work: Callable[[], Awaitable[T]], *, nbytes: int = 0) -> T:
        """As `run`, with our errors."""
        with self.errors(doing, where):
            return self.run(work, nbytes=nbytes)

    async def awaited(self, doing: str, where: str, work: Callable[[], Awaitable[T]], *, nbytes: int) -> T:
        """As `call`, awaited in any event loop."""
        with self.errors(doing, where):
            return await awaited(work, self.loop(), limit_s=TIMEOUT_S + nbytes / SLOWEST_BYTES_PER_S)


C = TypeVar("C", bound=Client)


class RemoteTransport(Transport, Generic[C]):
    """A transport of which several share one client and one set of pinned versions.

    Args:
        safe_url: The address, without credentials.
    """

    client: C

    def __init__(self, safe_url: str) -> None:
        super().__init__()
        self._safe_url, self._folder = safe_url, ""
        #: The version of each file that was read, by its path below the address. Pickles carry them.
        self._pins: dict[str, FileStat] = {}

    @property
    def url(self) -> str:  # pyright: ignore[reportIncompatibleVariableOverride]  # an attribute elsewhere
        return joined_url(self._safe_url, self._folder)

    def at(self, path: str) -> Self:
        child = copy.copy(self)
        child._folder = self._below(path) if path else self._folder  # noqa: SLF001  # of the same class
        return child

    def close(self) -> None:
        """Unpin all files; connections stay open for other transports."""
        self._pins.clear()

    # -- reading -------------------------------------------------------------------------------------------------------

    def get_ranges(self, path: str, *, starts: Sequence[int], ends: Sequence[int]) -> Sequence[Buffer]:
        """One read-only buffer per range; a range that is longer than a request is read in several."""
        check_ranges(self.where(path), starts, ends)
        found: list[Buffer] = [b""] * len(starts)
        pieces = [
            (int(start), int(end), n) for n, (start, end) in enumerate(zip(starts, ends, strict=True)) if end > start
        ]
        longest = self.cost.max_request_bytes
        for start, end, n in [piece for piece in pieces if piece[1] - piece[0] > longest]:
            self._check_length(path, end)  # before memory is allocated for it
            memory = memoryview(bytearray(end - start))
            self.readinto(path, starts=[start], buffers=[memory])
            found[n] = memory.toreadonly()
        requests = requests_of([piece for piece in pieces if piece[1] - piece[0] <= longest], self.cost)

        def cut(number: int, data: Buffer) -> None:
            first, view = requests[number].start, memoryview(data)
            for start, end, n in requests[number].pieces:
                found[n] = view[start - first : end - first]

        self._fetch([(path, request.start, request.end) for request in requests], cut)
        return found

    def readinto_files(self, reads: Iterable[FileReads]) -> None:
        """Fetch the ranges of all files side by side, and copy each to its place as it arrives."""
        works = [
            (path, request)
            for path, starts, buffers in reads
            for request in requests_into(self.where(path), starts, buffers, self.cost)
        ]
        ranges = [(path, request.start, request.end) for path, request in works]
        self._fetch(ranges, lambda number, data: fill(works[number][1], data))

    @abstractmethod
    def _fetch(self, ranges: Sequence[tuple[str, int, int]], use: Callable[[int, Buffer], object]) -> None:
        """Read ranges (path, start, end), none empty, each in one request; `use` gets each with its number as it arrives."""

    async def _get_all(self, ranges: Sequence[tuple[str, int, int]], use: Callable[[int, Buffer], object]) -> None:
        """Read ranges side by side."""

        async def one(number: int, path: str, start: int, end: int) -> None:
            use(number, await self._get(path, start, end))

        await gathered([one(number, *place) for number, place in enumerate(ranges)])

    @abstractmethod
    async def _get(self, path: str, start: int, end: int) -> Buffer:
        """The bytes of one request."""

    async def get_range_async(self, path: str, *, start: int, end: int) -> Buffer:
        where = self.where(path)
        check_ranges(where, [start], [end])
        if not self.client.is_async or not 0 < end - start <= self.cost.max_request_bytes:
            return await super().get_range_async(path, start=start, end=end)
        return await self.client.awaited("read", where, lambda: self._get(path, start, end), nbytes=end - start)

    # -- names and versions --------------------------------------------------------------------------------------------

    @abstractmethod
    def key(self, path: str) -> str:
        """The client's name of a file below the root; `""` is the root."""

    def _below(self, path: str) -> str:
        """The path of a file below the client's address."""
        checked = check_path(path, root_ok=True)
        return "/".join(part for part in (self._folder, checked) if part)

    def version(self, path: str) -> str:
        pinned = self._pinned(path)
        return f"{pinned.version} {pinned.nbytes}" if pinned.version else ""

    def _pinned(self, path: str) -> FileStat:
        return self._pins.get(self._below(path)) or self._pin(path, self.stat(path))

    def _pin(self, path: str, found: FileStat, needed: int = 0) -> FileStat:
        """Pin the version of a file at its first read.

        Raises:
            TransportError: another version is pinned.
            CorruptShardError: the file is shorter than `needed` bytes.
        """
        pinned = self._pins.setdefault(self._below(path), found)
        if pinned != found:
            raise TransportError(
                f"the object was replaced while it was being read: it had {pinned.nbytes:,} bytes and version {pinned.version}, "
                f"now {found.nbytes:,} and {found.version}",
                where=self.where(path),
                remedy="Open the store again to read the new one.",
            )
        if found.nbytes < needed:
            raise too_short(self.where(path), size=found.nbytes, needed=needed)
        return pinned

    def _check_length(self, path: str, needed: int) -> None:
        """Raise `CorruptShardError` if a file is shorter than `needed` bytes."""
        self._pin(path, self._pinned(path), needed)

    def unpin(self, path: str) -> None:
        """Unpin a file, or everything in a folder, that this transport changes."""
        below = self._below(path)
        for name in [name for name in list(self._pins) if name == below or name.startswith(f"{below}/")]:
            self._pins.pop(name, None)

    def _check_absent(self, path: str) -> None:
        """Raise `StoreExistsError` if a file exists."""
        with contextlib.suppress(NotFoundError):
            self.stat(path)
            raise StoreExistsError(
                "the file already exists", where=self.where(path), remedy="Resume, or delete it first."
            )


def may_pass(status: int) -> bool:
    """Return True if a later request may succeed after an answer with this status."""
    return status in {408, 409, 429} or (status >= 500 and status not in {501, 505})


def service_error(
    status: int | None,
    message: str,
    *,
    text: str,
    doing: str,
    where: str,
    remedy: str | None = None,
    passes: bool = True,
) -> SaevStoreError:
    """Our error for the answer of a service.

    Args:
        status: The HTTP status, or that of a similar answer; None if there was none.
        message: The error's message, without secrets.
        text: All that the client has reported.
        doing: The operation in the infinitive, such as `"read"`.
        where: The file, shown first.
        remedy: Advice, if there is no better one.
        passes: Whether a later request may succeed, if there was no status.

    >>> type(service_error(404, "no such key", text="", doing="read", where="s3://lab/a.bin")).__name__
    'NotFoundError'
    """
    if re.search(r"InvalidCertificate|invalid peer certificate|certificate verify failed", text):
        remedy = (
            'Name the file of the authority that signed it, storage_options={"verify": "/path/to/ca.pem"}, or set '
            "SSL_CERT_FILE (for s3:// also AWS_CA_BUNDLE); check the host name in the address."
        )
        return TransportError(f"the server's certificate is not trusted: {message}", where=where, remedy=remedy)
    if status == 404:
        return NotFoundError(message, where=where)
    if status in {401, 403}:
        remedy = "Check the credentials in storage_options or the environment, and the clock."
        return AccessError(message, where=where, remedy=remedy)
    if status == 412 and doing == "create":
        return StoreExistsError("the file already exists", where=where)
    if status == 408:
        return DeadlineError(message, where=where, transient=True)
    if status == 501 and doing == "create":
        remedy = f"The service has no conditional requests. Pass storage_options={{{CONDITIONAL_CREATE!r}: False}}."
    return TransportError(message, where=where, remedy=remedy, transient=passes if status is None else may_pass(status))
