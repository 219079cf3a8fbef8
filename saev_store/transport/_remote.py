"""The base of transports of services: names below one address, and versions of the files that were read."""

from __future__ import annotations

import asyncio
import contextlib
import os
import threading
from abc import abstractmethod
from collections.abc import Awaitable, Callable, Generator, Iterable, Mapping, Sequence
from typing import Self, TypeVar

from saev_store.core.arguments import check_flag
from saev_store.errors import ForkError, NotFoundError, SaevStoreError, StoreExistsError, TransportError
from saev_store.names import joined_url
from saev_store.transport._errors import CONDITIONAL_CREATE, translated
from saev_store.transport.base import FileReads, FileStat, Transport
from saev_store.transport.checks import Buffer, check_path, check_ranges, fill, requests_into, requests_of, too_short

T = TypeVar("T")

#: Requests under way at once: what is under way shares the line, and more of it would only end later.
IN_FLIGHT = 64
#: How long a busy service is asked again; time-outs of a connection, and of an answer of which nothing comes any more.
RETRY_S, CONNECT_TIMEOUT_S, READ_TIMEOUT_S = 15.0, 5, 10.0
#: Time-out of an operation, and the speed that is as good as stalled: its share of the bytes is added.
TIMEOUT_S, SLOWEST_BYTES_PER_S = 60.0, 1 << 20
#: Seconds that a loop may take to notice that work is cancelled.
_STUCK_S = 10.0


class RemoteTransport(Transport):
    """A transport whose client and pinned versions are shared by all that are opened below it. Pickles contain the options."""

    #: False if the client has no event loop, and blocks.
    is_async = True

    def __init__(self, url: str, options: Mapping[str, object], *, safe_url: str) -> None:
        self._arguments, self._safe_url, self._folder = (url, options), safe_url, ""
        self.options = dict(options)
        self.is_conditional = check_flag(self.options.pop(CONDITIONAL_CREATE, True), name=CONDITIONAL_CREATE)
        #: Held by each request while it is under way.
        self.slots = asyncio.Semaphore(IN_FLIGHT)
        #: The version of each file that was read, by its path below the address.
        self._pins: dict[str, FileStat] = {}

    def __reduce__(self) -> tuple[object, ...]:
        return type(self), self._arguments, {"_folder": self._folder, "_pins": self._pins}

    @property
    def url(self) -> str:  # pyright: ignore[reportIncompatibleVariableOverride]  # an attribute elsewhere
        return joined_url(self._safe_url, self._folder)

    def at(self, path: str) -> Self:
        child = object.__new__(type(self))  # `copy` would open another client
        vars(child).update(vars(self), _folder=self._below(path) if path else self._folder)
        return child

    def close(self) -> None:
        self._pins.clear()

    @abstractmethod
    def loop(self) -> asyncio.AbstractEventLoop:
        """The event loop on which requests run, in a thread of its own; `ForkError` if a parent process has used it."""

    @abstractmethod
    async def _get(self, path: str, start: int, end: int) -> Buffer:
        """The bytes of one request."""

    @contextlib.contextmanager
    def errors(self, doing: str, where: str) -> Generator[None]:
        try:
            yield
        except SaevStoreError:
            raise
        except Exception as error:
            # The text of the first one may contain what was signed.
            raise translated(error, self.options, doing=doing, where=where) from None

    def call(self, doing: str, where: str, work: Callable[[], Awaitable[T]], *, nbytes: int = 0) -> T:
        with self.errors(doing, where):
            return run(work, self.loop(), nbytes=nbytes)

    def get_ranges(self, path: str, *, starts: Sequence[int], ends: Sequence[int]) -> Sequence[Buffer]:
        check_ranges(self.where(path), starts, ends)
        found: list[Buffer] = [b""] * len(starts)
        pieces = list[tuple[int, int, int]]()
        for n, (start, end) in enumerate(zip(starts, ends, strict=True)):
            if end - start > self.cost.max_request_bytes:
                self._pin(path, self._pinned(path), end)  # before memory is allocated for it
                memory = memoryview(bytearray(end - start))
                self.readinto(path, starts=[start], buffers=[memory])
                found[n] = memory.toreadonly()
            elif end > start:
                pieces.append((int(start), int(end), n))
        requests = requests_of(pieces, self.cost)

        def cut(number: int, data: Buffer) -> None:
            first, view = requests[number].start, memoryview(data)
            for start, end, n in requests[number].pieces:
                found[n] = view[start - first : end - first]

        self._fetch([(path, request.start, request.end) for request in requests], cut)
        return found

    def readinto_files(self, reads: Iterable[FileReads]) -> None:
        works = [
            (path, request)
            for path, starts, buffers in reads
            for request in requests_into(self.where(path), starts, buffers, self.cost)
        ]
        ranges = [(path, request.start, request.end) for path, request in works]
        self._fetch(ranges, lambda number, data: fill(works[number][1], data))

    def _fetch(self, ranges: Sequence[tuple[str, int, int]], use: Callable[[int, Buffer], object]) -> None:
        """Read ranges (path, start, end) side by side, each in one request; `use` gets each with its number as it arrives."""

        async def one(number: int, path: str, start: int, end: int) -> None:
            with self.errors("read", self.where(path)):
                use(number, await self._get(path, start, end))

        async def every() -> None:
            try:
                async with asyncio.TaskGroup() as group:
                    for number, place in enumerate(ranges):
                        group.create_task(one(number, *place))
            except ExceptionGroup as failed:
                raise failed.exceptions[0] from failed.exceptions[0].__cause__

        if ranges:
            self.call("read", self.where(ranges[-1][0]), every, nbytes=sum(end - start for _, start, end in ranges))

    async def get_range_async(self, path: str, *, start: int, end: int) -> Buffer:
        where = self.where(path)
        check_ranges(where, [start], [end])
        if not self.is_async or not 0 < end - start <= self.cost.max_request_bytes:
            return await super().get_range_async(path, start=start, end=end)
        loop, limit_s = self.loop(), TIMEOUT_S + (end - start) / SLOWEST_BYTES_PER_S
        with self.errors("read", where):
            work = asyncio.wait_for(self._get(path, start, end), limit_s)
            return await asyncio.wrap_future(asyncio.run_coroutine_threadsafe(work, loop))

    def _below(self, path: str) -> str:
        checked = check_path(path, root_ok=True)
        return "/".join(part for part in (self._folder, checked) if part)

    def version(self, path: str) -> str:
        pinned = self._pinned(path)
        return f"{pinned.version} {pinned.nbytes}" if pinned.version else ""

    def _pinned(self, path: str) -> FileStat:
        return self._pins.get(self._below(path)) or self._pin(path, self.stat(path))

    def _pin(self, path: str, found: FileStat, needed: int = 0) -> FileStat:
        """Pin the version of a file at its first read; an error if another one is pinned, or it is shorter than `needed`."""
        pinned = self._pins.setdefault(self._below(path), found)
        if pinned != found:
            raise TransportError(
                "the object was replaced while it was being read",
                where=self.where(path),
                remedy="Open the store again to read the new one.",
            )
        if found.nbytes < needed:
            raise too_short(self.where(path), size=found.nbytes, needed=needed)
        return pinned

    def unpin(self, path: str) -> None:
        """Unpin a file, or everything in a folder, that this transport changes."""
        below = self._below(path)
        for name in [name for name in list(self._pins) if name == below or name.startswith(f"{below}/")]:
            self._pins.pop(name, None)

    def _check_absent(self, path: str) -> None:
        with contextlib.suppress(NotFoundError):
            self.stat(path)
            raise StoreExistsError("the file already exists", where=self.where(path))


def check_fork(pid: int, *, where: str) -> None:
    if pid != os.getpid():
        raise ForkError(
            "a bucket or server was read before this process was forked; its client does not work in the child",
            where=where,
            remedy='Start workers with multiprocessing_context="spawn" (or "forkserver").',
        )


def run(work: Callable[[], Awaitable[T]], loop: asyncio.AbstractEventLoop, *, nbytes: int) -> T:
    """The result of `work()` on a loop that runs in another thread.

    When this ends in any way, the work has ended too: after Ctrl-C, or a `TimeoutError` after the time that `nbytes` may take, it is
    cancelled and waited for. On the thread of the loop, which would wait for itself, it is a `TransportError`.
    """
    limit_s = TIMEOUT_S + nbytes / SLOWEST_BYTES_PER_S
    with contextlib.suppress(RuntimeError):
        if asyncio.get_running_loop() is loop:
            raise TransportError("a blocking call on the event loop that has to answer it", where="loop")
    ended = threading.Event()

    async def whole() -> T:
        try:
            return await asyncio.wait_for(work(), limit_s)
        finally:
            ended.set()

    future = asyncio.run_coroutine_threadsafe(whole(), loop)
    try:
        return future.result(limit_s + _STUCK_S)
    except BaseException:
        future.cancel()
        ended.wait(_STUCK_S)
        raise
