"""What the transports of object stores and other servers share: waits for their loops, versions of files, names."""

from __future__ import annotations

import asyncio
import contextlib
import random
import time
from collections.abc import AsyncGenerator, Awaitable, Callable
from concurrent.futures import CancelledError
from typing import Generic, Protocol, Self, TypeVar

from saev_store._runtime.threads import Flag
from saev_store.errors import NotFoundError, StoreExistsError, TransportError
from saev_store.names import joined_url
from saev_store.transport.base import STOP, Counters
from saev_store.transport.checks import RequestCounter, check_path

T = TypeVar("T")

#: Slower than this is as good as stalled, so it is part of every deadline.
SLOWEST_BYTES_PER_S = 1 << 20
#: Longest time until `STOP`, or a Ctrl-C that the system delivers to another thread, is noticed.
_SLICE_S = 0.2
#: A loop that is this late is stuck.
STUCK_S = 10.0
#: How long a range is requested again whose service is busy or away for a moment; less than loaders wait for progress.
RETRY_S = 15.0
_FIRST_WAIT_S, _LONGEST_WAIT_S = 0.1, 3.0
#: By these names, so that tests can count waits instead of waiting.
_sleep, _now_s = asyncio.sleep, time.monotonic
#: Time-outs of connections, and of answers of which nothing comes any more.
CONNECT_TIMEOUT_S, READ_TIMEOUT_S = 5, 10


def run_in_loop(work: Callable[[], Awaitable[T]], loop: asyncio.AbstractEventLoop, *, limit_s: float) -> T:
    """What `work()` gives in a loop that runs in another thread; it is cancelled when the wait ends without a result.

    The wait is divided: a thread in a long wait is not woken by a Ctrl-C that the system delivers to another thread.

    Raises:
        TimeoutError: it took longer than `limit_s`.
        TransportError: `STOP` was set.
        Exception: its own error.
    """
    task: asyncio.Task[T] | None = None
    is_wanted, ended, stop = True, Flag(), STOP.get()
    if stop is not None and stop.is_set():
        raise _stopped()

    async def wanted() -> T:
        if not is_wanted:
            raise asyncio.CancelledError
        return await within(work, limit_s)

    def end(task: asyncio.Task[T]) -> None:
        if not task.cancelled():
            task.exception()  # seen: nobody may be left who raises it
        ended.set()

    def begin() -> None:
        nonlocal task
        task = loop.create_task(wanted())
        task.add_done_callback(end)

    # The loop keeps the time-out; this thread does so where the loop itself is stuck.
    deadline = time.monotonic() + limit_s + STUCK_S
    try:
        # Without a future of `concurrent`: an interrupt within its methods leaves it locked, and the loop would wait for it.
        loop.call_soon_threadsafe(begin)
        while not ended.wait(_SLICE_S):
            if time.monotonic() > deadline:
                raise TimeoutError
            if stop is not None and stop.is_set():
                raise _stopped()
        assert task is not None  # noqa: S101  # the flag is set by it
        if task.cancelled():
            raise CancelledError
        return task.result()
    except BaseException:
        # Not only the task: a Ctrl-C may come before there is one.
        is_wanted = False
        with contextlib.suppress(RuntimeError):  # the loop is closed
            loop.call_soon_threadsafe(lambda: task is not None and task.cancel())
        raise


def _stopped() -> TransportError:
    """Raised in a thread whose result nobody waits for, so no user sees it."""
    return TransportError("not wanted any more: what it was for has been closed", where="a request")


async def awaited_in_loop(work: Callable[[], Awaitable[T]], loop: asyncio.AbstractEventLoop, *, limit_s: float) -> T:
    """What `work()` gives in a loop that runs in another thread, awaited in this one; cancelled when the wait ends.

    Raises:
        TimeoutError: it took longer than `limit_s`.
        Exception: its own error.
    """
    async with asyncio.timeout(limit_s + STUCK_S):
        return await asyncio.wrap_future(asyncio.run_coroutine_threadsafe(within(work, limit_s), loop))


async def within(work: Callable[[], Awaitable[T]], limit_s: float) -> T:
    """What `work()` gives, within a time.

    Raises:
        TimeoutError: it took longer than `limit_s`, and was cancelled.
    """
    async with asyncio.timeout(limit_s):
        return await work()


async def again(
    work: Callable[[], Awaitable[T]], passes: Callable[[Exception], bool], *, for_s: float | None = None
) -> T:
    """What `work()` gives; an error that `passes` is tried again, after growing, random waits, for so long after the first one.

    Args:
        work: Begins it.
        passes: Whether another try is worthwhile.
        for_s: Seconds; default: `RETRY_S`.
    """
    for_s = RETRY_S if for_s is None else for_s
    wait_s, n_tries, began_s, last_s = _FIRST_WAIT_S, 0, _now_s(), float("inf")
    while True:
        n_tries += 1
        try:
            return await work()
        except Exception as error:
            last_s = min(last_s, _now_s() + for_s)
            if not passes(error) or _now_s() + wait_s > last_s:
                if n_tries > 1:
                    error.add_note(f"tried {n_tries} times in {_now_s() - began_s:.0f} s")
                raise
        await _sleep(wait_s * random.uniform(0.5, 1.0))  # noqa: S311  # spreads clients that failed together
        wait_s = min(2 * wait_s, _LONGEST_WAIT_S)


def notes_of(error: BaseException) -> str:
    """What `again` says of an error, to stand behind its text."""
    return "".join(f" ({note})" for note in getattr(error, "__notes__", ()) if note.startswith("tried "))


def may_pass(status: int) -> bool:
    """Whether a later request may succeed after an answer with this status; 501 and 505 say that it is not implemented."""
    return status in {408, 429} or (status >= 500 and status not in {501, 505})


@contextlib.asynccontextmanager
async def task_group() -> AsyncGenerator[asyncio.TaskGroup]:
    """A task group that raises the first error of its tasks as it is, and cancels the others."""
    first = None
    try:
        async with asyncio.TaskGroup() as group:
            yield group
    except BaseExceptionGroup as errors:
        first = errors.exceptions[0]
    # Not in the `except` block, where the group, which contains the error, would become its context: whatever follows that
    # circle, as the picklers of dask do, never ends.
    if first is not None:
        raise first


#: An ETag, a generation or a time, and the size in bytes; None where the server does not tell.
Version = tuple[str | None, int | None]


class Pins(dict[str, Version]):
    """The versions of the files that were read, by path (decision 6). Transports below one root share them; pickles carry them."""

    def check(self, path: str, version: Version, *, where: str) -> None:
        """Pin a file at its first read.

        Raises:
            TransportError: another version is pinned.
        """
        pinned = self.setdefault(path, version)
        if pinned == version:
            return
        # A server that answers a range with the whole file, as it may, does not tell the size.
        if None in {pinned[1], version[1]} and pinned[0] == version[0] is not None:
            self[path] = pinned[0], pinned[1] or version[1]
        else:
            (old, old_size), (new, new_size) = pinned, version
            raise TransportError(
                f"the object was replaced while it was being read: it had {_bytes(old_size)} and the version {old}, now "
                f"{_bytes(new_size)} and {new}",
                where=where,
                remedy="Open the store again to read the new one.",
            )

    def forget(self, path: str) -> None:
        """Unpin a file, or everything in a folder, that this transport has changed."""
        for pinned in [name for name in list(self) if name == path or name.startswith(f"{path}/")]:
            self.pop(pinned, None)


def _bytes(size: int | None) -> str:
    return "an unknown size" if size is None else f"{size:,} bytes"


class RemoteClient(Protocol):
    """What `RemoteTransport` needs of a client."""

    requests: RequestCounter
    safe_url: str


C = TypeVar("C", bound=RemoteClient)


class RemoteTransport(Generic[C]):
    """The base of transports that share one client and the pins of one root.

    Attributes:
        client: Makes the requests.
        pins: The versions of the files that were read.
    """

    pads = False
    is_local = False
    local_path = None
    reads_into = False

    def __init__(self, client: C, pins: Pins | None = None) -> None:
        self.client = client
        self.pins = Pins() if pins is None else pins
        self._folder = ""

    @property
    def url(self) -> str:
        """The root, without credentials and query."""
        return self.where(self._folder)

    @property
    def counters(self) -> Counters:
        """Requests of this client so far; its own retries are not counted."""
        return self.client.requests.counters

    def __repr__(self) -> str:
        return f"{type(self).__name__}({self.url!r})"

    def at(self, path: str) -> Self:
        """The same client, one folder deeper."""
        child = object.__new__(type(self))
        child.__dict__.update(self.__dict__, _folder=self.below(path) if path else self._folder)
        return child

    def close(self) -> None:
        """Unpin all files; connections stay open for other transports."""
        self.pins.clear()

    def key(self, below: str) -> str:
        """The client's name of a file below its address."""
        raise NotImplementedError

    def size(self, path: str) -> int:
        """The size of a file in bytes, asked anew each time."""
        raise NotImplementedError

    def version(self, path: str) -> str | None:
        """The pinned ETag, generation or time, with the size, as text; None if no range of the file was read yet."""
        version = self.pins.get(self.below(path))
        return None if version is None else repr(version)

    def lock(self, path: str) -> contextlib.AbstractContextManager[None]:
        """Nothing: object stores have no locks; publication decides which writer wins."""
        check_path(path)
        return contextlib.nullcontext()

    def below(self, path: str) -> str:
        """The path of a file below the client's address."""
        checked = check_path(path)
        return f"{self._folder}/{checked}" if self._folder else checked

    def _check_absent(self, path: str) -> None:
        """Refuse to write a new file over an existing one."""
        with contextlib.suppress(NotFoundError):
            self.size(path)
            raise StoreExistsError(
                "the file already exists", where=self.where(self.below(path)), remedy="Resume, or delete it first."
            )

    def where(self, below: str) -> str:
        """The name of a file for messages."""
        return joined_url(self.client.safe_url, below)
