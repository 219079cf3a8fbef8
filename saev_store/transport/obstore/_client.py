"""The client of one obstore store: its event loop, time-outs and errors."""

from __future__ import annotations

import asyncio
import atexit
import contextlib
import math
import os
import re
import sys
import threading
import time
from collections import deque
from collections.abc import Awaitable, Callable, Coroutine, Mapping
from datetime import timedelta
from functools import cached_property
from importlib.util import find_spec
from typing import TYPE_CHECKING, TypeVar

from saev_store._runtime.threads import Flag, ForkSafeLock, start_thread
from saev_store.errors import (
    AccessError,
    DeadlineError,
    ForkError,
    MissingDependencyError,
    NotFoundError,
    SaevStoreError,
    StoreExistsError,
    TransportError,
)
from saev_store.transport._remote import (
    CONNECT_TIMEOUT_S,
    READ_TIMEOUT_S,
    SLOWEST_BYTES_PER_S,
    STUCK_S,
    may_pass,
    notes_of,
    run_in_loop,
)
from saev_store.transport._tls import read_authorities, refused_certificate
from saev_store.transport.base import IN_FLIGHT
from saev_store.transport.checks import RequestCounter
from saev_store.transport.credentials import StorageOptions
from saev_store.transport.obstore._options import Place, place_of

if TYPE_CHECKING:
    from obstore.store import ObjectStore

T = TypeVar("T")

#: Parts of one upload that are under way at the same time: with the one being filled, all the memory a sink takes.
PARTS_IN_FLIGHT = 8
_NOT_LET_IN = {"ExpiredToken", "InvalidAccessKeyId", "InvalidToken", "SignatureDoesNotMatch", "TokenRefreshRequired"}
_OTHER_RANGE = re.compile(r"error: (Requested \d+\.\.\d+, got|Received non-partial response)")
#: A first answer that takes longer may never come: the certificate is looked at.
_QUICK_S = 0.05
#: At exit: the longest wait for each of the loop and obstore's threads; what those take to see that a request is cancelled.
_LONGEST_STOP_S, _CANCELLED_S = 1.0, 0.05
_RETRIES, _FIRST_WAIT_S, _LONGEST_WAIT_S = 6, 0.1, 3.0


class _Loop:
    """The event loop of this process that all clients share, in a thread of its own: callers may have loops too."""

    def __init__(self) -> None:
        self.pid = os.getpid()
        self._has_cancelled = False
        self.loop = asyncio.new_event_loop()
        self.thread = threading.Thread(target=self.loop.run_forever, name="saev_store-obstore", daemon=True)
        try:
            start_thread(self.thread, where="obstore")
        except TransportError:
            self.loop.close()
            raise

    def stop(self) -> None:
        """Cancel what is under way, and wait until no thread of obstore is inside Python.

        Before 3.14, Python ends a thread that wants the GIL while the interpreter shuts down; inside Rust that aborts the
        whole process. A thread of obstore hands over its answer by a call of `loop.call_soon_threadsafe`, which releases
        the GIL half-way: the reader of the answer may be at the end of its program by then.
        """
        if self.pid != os.getpid() or self.loop.is_closed():
            return
        self.loop.call_soon_threadsafe(self._cancel)
        self.thread.join(_LONGEST_STOP_S)
        ends_s = time.monotonic() + _LONGEST_STOP_S
        pause_s = _CANCELLED_S if self._has_cancelled else 0.0
        while (pause_s or _foreign_threads()) and time.monotonic() < ends_s:
            time.sleep(pause_s or 0.001)
            pause_s = 0.0

    def _cancel(self) -> None:
        tasks = asyncio.all_tasks(self.loop)
        self._has_cancelled = bool(tasks)
        for task in tasks:
            task.cancel()
        self.loop.call_soon(self.loop.stop)


def _foreign_threads() -> bool:
    """Whether a thread that Python did not start is running Python code."""
    running = sys._current_frames()  # noqa: SLF001 # pyright: ignore[reportPrivateUsage] - documented, in spite of its name
    return bool(running.keys() - {thread.ident for thread in threading.enumerate()})


_lock = ForkSafeLock()
_loop: _Loop | None = None


def is_forked() -> bool:
    """Whether obstore was used before this process was forked: it has no threads here, so every call would hang."""
    return _loop is not None and _loop.pid != os.getpid()


def fork_error(reason: str = "") -> ForkError:
    """The error for using obstore in a forked child."""
    return ForkError(
        f"obstore was used before this process was forked, and does not work in it{reason}",
        where="engine",
        remedy='Start workers with "spawn" or "forkserver", or open the store with engine="fsspec".',
    )


def running_loop() -> asyncio.AbstractEventLoop:
    """The loop of this process.

    Raises:
        ForkError: obstore was used before this process was forked.
    """
    global _loop  # noqa: PLW0603 - one per process, like obstore's own threads
    if is_forked():
        raise fork_error()
    with _lock.mutex:
        if _loop is None:
            begun = _Loop()
            atexit.register(begun.stop)  # first: an interrupt may come behind it
            _loop = begun
        return _loop.loop


class ObstoreClient:
    """The store behind an address, shared by all transports below it; thread-safe.

    Making one reads no option, so a pickle opens also where credentials are missing; each request does. `ObstoreTransport`
    says what the arguments are.
    """

    def __init__(self, url: str, options: StorageOptions, timeout_s: float) -> None:
        self.url, self.options, self.timeout_s = url, options, timeout_s
        self.safe_url = url.rstrip("/")  # an address with credentials is refused
        self.requests = RequestCounter()
        #: Seconds that a byte of the last long piece of a range took; none came yet.
        self.s_per_byte = math.inf
        #: Memory for parts of uploads: fresh memory costs more than filling it.
        self.idle_parts: deque[bytearray] = deque(maxlen=PARTS_IN_FLIGHT + 2)
        self._lock = ForkSafeLock()
        self._store: ObjectStore | None = None
        self._has_answered = False
        self._slots = asyncio.Semaphore(IN_FLIGHT)

    def __reduce__(self) -> tuple[object, ...]:
        return ObstoreClient, (self.url, self.options, self.timeout_s)

    @cached_property
    def place(self) -> Place:
        """The address and its options, as obstore takes them.

        Raises:
            ArgumentError: obstore has no equivalent for an option, or no store for the address.
            MissingDependencyError: obstore is not installed.
        """
        place = place_of(self.url, self.options.all)
        if find_spec("obstore") is None:
            raise MissingDependencyError(
                "the engine obstore is not installed", where=self.safe_url, remedy="pip install 'saev_store[obstore]'"
            )
        return place

    @property
    def store(self) -> ObjectStore:
        """The client object of obstore."""
        with self._lock.mutex:
            if self._store is None:
                self._store = _open(self.place, timeout_s=self.timeout_s)
            return self._store

    def begin(self, work: Callable[[], Coroutine[object, object, object]]) -> None:
        """Begin `work()` where something has been begun, and wait for nothing, not even a lock; errors are dropped."""
        if _loop is not None and not is_forked():
            asyncio.run_coroutine_threadsafe(work(), _loop.loop)

    def call(self, doing: str, where: str, work: Callable[[], Awaitable[T]], *, nbytes: int = 0) -> T:
        """What `work()` gives, waited for in this thread, no longer than is allowed for `nbytes`.

        Raises:
            ForkError: obstore was used before this process was forked.
            DeadlineError: it took too long; what was under way is cancelled.
            SaevStoreError: what its error means.
        """
        limit_s = self.timeout_s + nbytes / SLOWEST_BYTES_PER_S
        begin = work if self._has_answered else lambda: self._first(work, where)
        try:
            return run_in_loop(begin, running_loop(), limit_s=limit_s)
        except SaevStoreError:
            raise
        except TimeoutError:
            raise DeadlineError(f"could not {doing} within {limit_s:g} s", where=where, transient=True) from None
        except Exception as error:
            # Not `from error`: its text holds whole answers of the server, addresses and headers.
            ours = self.translate(error, doing=doing, where=where)
            ours.message += notes_of(error)
            raise ours from None

    async def _first(self, work: Callable[[], Awaitable[T]], where: str) -> T:
        """What `work()` gives; an error at once if the server's certificate is refused.

        obstore tries again whatever the reason. So a request that is not answered quickly is accompanied by one that is not
        repeated, whose error says why.
        """
        if self.place.endpoint.lower().startswith("http://"):
            self._has_answered = True
            return await work()
        task = asyncio.ensure_future(work())
        try:
            done, _ = await asyncio.wait({task}, timeout=_QUICK_S)
            if not done:
                refusal = asyncio.ensure_future(self._refusal(where))
                await asyncio.wait({task, refusal}, return_when=asyncio.FIRST_COMPLETED)
                if refusal.done() and (error := refusal.result()) is not None:
                    raise error
                refusal.cancel()
            found = await task
        finally:
            task.cancel()
        self._has_answered = True
        return found

    async def _refusal(self, where: str) -> SaevStoreError | None:
        """The error of a refused certificate; None if the server's is accepted, or another error came first."""
        import obstore

        try:
            store = _open(self.place, timeout_s=self.timeout_s, retries=0)
            await obstore.head_async(store, self.place.prefix or "metadata.json")
        except Exception as error:
            return refused_certificate(str(error), where=where, endpoint=self.place.endpoint or self.safe_url)
        return None

    def in_loop(self, step: Callable[[], object]) -> None:
        """Carry out `step()` in the loop's thread, between two steps of what runs there, and wait for it."""
        done = Flag()
        running_loop().call_soon_threadsafe(lambda: (step(), done.set()))
        done.wait(STUCK_S)

    async def slot(self, work: Callable[[], Awaitable[T]]) -> T:
        """What `work()` gives, once fewer than `IN_FLIGHT` others are under way."""
        async with self._slots:
            return await work()

    def passes(self, error: Exception) -> bool:
        """Whether an error of the library may pass, so that another try is worthwhile. Answers of other ranges do not."""
        if isinstance(error, SaevStoreError) or _OTHER_RANGE.search(str(error)):
            return False
        ours = self.translate(error, doing="read", where="")
        return isinstance(ours, TransportError) and ours.transient

    def translate(self, error: Exception, *, doing: str, where: str) -> SaevStoreError:
        """Our error for one of obstore's."""
        kind, text = type(error).__name__, str(error)
        found = re.search(r"<Code>(\w{1,60})</Code>", text)
        code = found[1] if found else None
        if isinstance(error, FileNotFoundError):
            return NotFoundError(f"could not {doing}: there is no such object ({code or 404})", where=where)
        status = status_of(error)
        if refused := refused_certificate(text, where=where, endpoint=self.place.endpoint or self.safe_url):
            return refused
        message = self.options.redact(f"could not {doing}: {_brief(text, code, status)}")
        if status == 404:
            return NotFoundError(message, where=where)
        if doing == "create" and kind in {"AlreadyExistsError", "PreconditionError"}:
            return StoreExistsError(message, where=where)
        if code == "RequestTimeTooSkewed":
            return AccessError(message, where=where, remedy="Set this machine's clock: it is minutes off.")
        denied = kind in {"PermissionDeniedError", "UnauthenticatedError"} or status in {401, 403}
        if denied or code in _NOT_LET_IN or "redential" in text.partition("\n")[0]:
            return AccessError(
                message, where=where, remedy="Check the credentials in storage_options or the environment."
            )
        if isinstance(error, TimeoutError) or re.search(r"\btimed? ?out\b", text.partition("\n")[0], re.IGNORECASE):
            return DeadlineError(message, where=where, transient=True)
        remedy, elsewhere = None, "Received redirect without LOCATION" in text
        if (elsewhere or status in {301, 307, 308, 400}) and self.place.kind == "s3":
            remedy = 'Check the region: storage_options={"client_kwargs": {"region_name": …}}.'
        passing = not elsewhere if status is None else status == 409 or may_pass(status)
        transient = passing and not isinstance(error, (TypeError, ValueError))
        return TransportError(message, where=where, remedy=remedy, transient=transient)


def status_of(error: Exception) -> int | None:
    """The HTTP status in an error of obstore."""
    found = re.search(r"status code: (\d{3})", str(error))
    return int(found[1]) if found else None


def _open(place: Place, *, timeout_s: float, retries: int = _RETRIES) -> ObjectStore:
    from obstore import store as stores

    client_options: dict[str, object] = {
        "allow_http": place.allow_http,
        "connect_timeout": timedelta(seconds=min(CONNECT_TIMEOUT_S, timeout_s)),
        "read_timeout": timedelta(seconds=min(READ_TIMEOUT_S, timeout_s)),
        # For the whole request, body included: the deadline of `ObstoreClient.call` is what counts.
        "timeout": timedelta(seconds=timeout_s + (1 << 30) / SLOWEST_BYTES_PER_S),
        # A request that begins before the connection of the last one is back opens another; with room for them all, the
        # connections of an epoch are those of its first seconds.
        "pool_max_idle_per_host": str(2 * IN_FLIGHT),
    }
    if isinstance(place.verify, str):
        client_options["root_certificate"] = read_authorities(place.verify)
    elif not place.verify:
        client_options["allow_invalid_certificates"] = True
    if place.headers:
        client_options["default_headers"] = dict(place.headers)
    retry: dict[str, object] = {
        "max_retries": retries,
        "retry_timeout": timedelta(seconds=timeout_s),
        "backoff": {
            "init_backoff": timedelta(seconds=_FIRST_WAIT_S),
            "max_backoff": timedelta(seconds=_LONGEST_WAIT_S),
            "base": 2,
        },
    }
    shared: Mapping[str, object] = {"client_options": client_options, "retry_config": retry}
    config = dict(place.config)
    if place.kind == "http":
        return stores.HTTPStore(place.bucket, **shared)  # pyright: ignore[reportArgumentType]  # the options come as a mapping
    if place.kind == "s3" and "region" not in config:
        config["region"] = bucket_region(place.bucket) or "us-east-1"
    store = {"s3": stores.S3Store, "gs": stores.GCSStore, "az": stores.AzureStore}[place.kind]
    return store(place.bucket, config=config, **shared)  # pyright: ignore[reportArgumentType]  # as above


def bucket_region(bucket: str, *, endpoint: str = "https://s3.amazonaws.com") -> str | None:
    """The region of a bucket, which AWS returns without credentials; None without an answer."""
    import urllib.error
    import urllib.request

    request = urllib.request.Request(f"{endpoint}/{bucket}", method="HEAD")  # noqa: S310 - the scheme is ours
    with contextlib.suppress(OSError):
        try:
            with urllib.request.urlopen(request, timeout=CONNECT_TIMEOUT_S) as answer:  # noqa: S310  # the scheme is ours
                return answer.headers.get("x-amz-bucket-region")
        except urllib.error.HTTPError as error:  # 301, 403 and 404 tell it too
            return error.headers.get("x-amz-bucket-region")
    return None


def _brief(text: str, code: str | None, status: int | None) -> str:
    """The first line up to the server's answer, which may repeat what was signed; of that, the code alone."""
    head = text.partition("\n")[0].partition("<?xml")[0].partition("<Error")[0]
    head = re.sub(r"\b(https?://)([^/\s?]*@)?([^\s?]*)(\?\S*)?", r"\1\3", head).strip(" :")[:300]
    return f"{head} ({code})" if code and (status or code) else head
