"""One obstore store: in whose process it works, how long it is waited for, and what its errors mean."""

from __future__ import annotations

import asyncio
import atexit
import contextlib
import os
import re
import threading
import time
from collections.abc import Awaitable, Callable, Coroutine, Mapping, Sequence
from datetime import timedelta
from functools import partial
from importlib.util import find_spec
from typing import TYPE_CHECKING, TypeVar

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
from saev_store.transport._http_spare import SpareConnections
from saev_store.transport._locks import ForkSafeLock
from saev_store.transport._obstore_options import Place, place_of
from saev_store.transport._obstore_threads import Callers, Gate
from saev_store.transport._parts import Buffers
from saev_store.transport._secrets import LeftBehind, Options
from saev_store.transport._tally import Tally
from saev_store.transport._waits import awaited

if TYPE_CHECKING:
    from obstore.store import ObjectStore

T = TypeVar("T")

#: Requests of one client that are under way at the same time.
IN_FLIGHT = 64
#: Slower than this is as good as stalled, so it is part of every deadline.
SLOWEST_BYTES_PER_S = 1 << 20
_CONNECT_TIMEOUT_S, READ_TIMEOUT_S = 5.0, 10.0
_NOT_LET_IN = {"ExpiredToken", "InvalidAccessKeyId", "InvalidToken", "SignatureDoesNotMatch", "TokenRefreshRequired"}
_RETRIES, _FIRST_WAIT_S, _LONGEST_WAIT_S = 6, 0.1, 3.0


class _Loop:
    """The event loop of this process that all clients share, in a thread of its own: callers may have loops too."""

    def __init__(self) -> None:
        self.pid = os.getpid()
        self.loop = asyncio.new_event_loop()
        self.thread = threading.Thread(target=self.loop.run_forever, name="saev_store-obstore", daemon=True)
        self.thread.start()

    def stop(self) -> None:
        if self.pid == os.getpid() and not self.loop.is_closed():
            self.loop.call_soon_threadsafe(self.loop.stop)
            self.thread.join(1.0)


_lock = ForkSafeLock()
_loop: _Loop | None = None


def is_forked() -> bool:
    """Whether obstore was used before this process was forked: its threads stayed behind, every call would hang."""
    return _loop is not None and _loop.pid != os.getpid()


def _running() -> _Loop:
    global _loop  # noqa: PLW0603 - one per process, like obstore's own threads
    if is_forked():
        raise ForkError(
            "obstore was used before this process was forked, and does not work in it",
            remedy='Start workers with "spawn" or "forkserver", or open the store with engine="fsspec".',
        )
    with _lock:
        if _loop is None:
            _loop = _Loop()
            atexit.register(_loop.stop)
        return _loop


class _NotOurs(Exception):
    """Carries what a callback raised past those who translate errors."""

    def __init__(self, error: Exception) -> None:
        self.error = error


class Client:
    """The store behind an address, shared by all transports below it; thread-safe.

    Args:
        url: An address that `_obstore_options.place_of` knows.
        options: What it is opened with; never shown.
        timeout_s: Longest wait for one operation, retries included, plus one second per MiB that it moves.

    Raises:
        ArgumentError: obstore has no equivalent for an option, or no store for the address.
        MissingDependencyError: obstore is not installed.
    """

    def __init__(self, url: str, options: Options, *, timeout_s: float) -> None:
        self.url, self.options, self.timeout_s = url.rstrip("/"), options, timeout_s
        self.place = place_of(url, options.all)
        self.tally = Tally()
        self.buffers = Buffers()
        self.spare = SpareConnections()
        # Of each client its own: calls that hang must not hold up those to another service.
        self._callers = Callers(IN_FLIGHT)
        self._lock = ForkSafeLock()
        self._store: ObjectStore | None = None
        self._slots: asyncio.Semaphore | None = None
        if find_spec("obstore") is None:
            raise MissingDependencyError(
                "the engine obstore is not installed", where=self.url, remedy="pip install 'saev_store[fast]'"
            )

    def __reduce__(self) -> tuple[object, ...]:
        return _reopen, (self.url, self.options, self.timeout_s)

    @property
    def store(self) -> ObjectStore:
        """The object that obstore knows."""
        with self._lock:
            if self._store is None:
                self._store = _open(self.place, timeout_s=self.timeout_s)
            return self._store

    def begin(self, work: Callable[[], Coroutine[object, object, object]]) -> None:
        """Begin `work()` where something has been begun, and wait for nothing, not even a lock; its errors are nobody's."""
        if _loop is not None and not is_forked():
            asyncio.run_coroutine_threadsafe(work(), _loop.loop)

    def call(self, doing: str, where: str, work: Callable[[], Coroutine[object, object, T]], *, nbytes: int = 0) -> T:
        """What `work()` gives, waited for in this thread, no longer than is allowed for `nbytes`.

        Raises:
            ForkError: obstore was used before this process was forked.
            DeadlineError: it took too long; what was under way is cancelled.
            SaevStoreError: what its error means.
        """
        running = _running()
        timeout_s = self.timeout_s + nbytes / SLOWEST_BYTES_PER_S

        async def within() -> T:
            async with asyncio.timeout(timeout_s):
                return await work()

        future = asyncio.run_coroutine_threadsafe(within(), running.loop)
        try:
            # The loop keeps the deadline; should the loop itself be stuck, so does this thread.
            return awaited(future, timeout_s + 10)
        except SaevStoreError:
            raise
        except TimeoutError:
            raise DeadlineError(f"could not {doing} within {timeout_s:g} s", where=where, transient=True) from None
        except Exception as error:
            # Not `from error`: its text holds whole answers of the server, addresses and headers.
            raise self.translate(error, doing=doing, where=where) from None

    def blocking(
        self, doing: str, where: str, works: Sequence[Callable[[], T]], done: Callable[[int, T], None], *, nbytes: int
    ) -> None:
        """As `call`, for work that waits inside obstore instead of in our loop: cheaper, for few large requests.

        All is under way together. `done(number, result)` is called in the thread that waited, which has the result in its
        core's cache; never after this has returned. What is still under way when the time is over cannot be cancelled: what it
        brings is forgotten, and its thread goes on when obstore's own limits end it.

        Raises:
            ForkError, DeadlineError, SaevStoreError: as `call`.
        """
        _running()  # obstore's threads are there from now on, and not in a forked child
        timeout_s = self.timeout_s + nbytes / SLOWEST_BYTES_PER_S
        deadline, gate = time.monotonic() + timeout_s, Gate()

        def whole(number: int, work: Callable[[], T]) -> None:
            result = work()
            try:
                gate.enter(lambda: done(number, result))
            except Exception as error:
                raise _NotOurs(error) from None

        futures = [self._callers.begin(partial(whole, number, work)) for number, work in enumerate(works)]
        try:
            for future in futures:
                awaited(future, deadline - time.monotonic())
        except SaevStoreError:
            raise
        except _NotOurs as error:
            raise error.error from None
        except TimeoutError:
            raise DeadlineError(f"could not {doing} within {timeout_s:g} s", where=where, transient=True) from None
        except Exception as error:
            raise self.translate(error, doing=doing, where=where) from None
        finally:
            gate.close()
            for future in futures:
                future.cancel()

    async def slot(self, work: Callable[[], Awaitable[T]]) -> T:
        """What `work()` gives, once fewer than `IN_FLIGHT` others are under way."""
        if self._slots is None:
            self._slots = asyncio.Semaphore(IN_FLIGHT)
        async with self._slots:
            return await work()

    def translate(self, error: Exception, *, doing: str, where: str) -> SaevStoreError:
        """Our error for one of obstore's."""
        kind, text = type(error).__name__, str(error)
        code, status = _code(text), _status(text)
        message = self.options.redact(f"could not {doing}: {_brief(text, code, status)}")
        if isinstance(error, FileNotFoundError) or status == 404:
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
        if isinstance(error, TimeoutError) or re.search(r"timed? ?out", text.partition("\n")[0], re.IGNORECASE):
            return DeadlineError(message, where=where, transient=True)
        remedy, elsewhere = None, "Received redirect without LOCATION" in text
        if (elsewhere or status in {301, 307, 308, 400}) and self.place.kind == "s3":
            remedy = 'Check the region: storage_options={"client_kwargs": {"region_name": …}}.'
        passing = (status is None and not elsewhere) or (status or 0) >= 500 or status in {408, 409, 429}
        transient = passing and not isinstance(error, (TypeError, ValueError))
        return TransportError(message, where=where, remedy=remedy, transient=transient)


def is_beyond_the_end(error: Exception) -> bool:
    """Whether a request failed because the object ends before its range begins."""
    return _status(str(error)) == 416


def is_busy(error: Exception) -> bool:
    """Whether a conditional write met another one under way: nothing is decided yet."""
    return _status(str(error)) == 409


def _open(place: Place, *, timeout_s: float) -> ObjectStore:
    from obstore import store as stores

    client_options: dict[str, object] = {
        "allow_http": place.allow_http,
        "connect_timeout": timedelta(seconds=min(_CONNECT_TIMEOUT_S, timeout_s)),
        "read_timeout": timedelta(seconds=min(READ_TIMEOUT_S, timeout_s)),
        # For the whole request, body included: the deadline of `Client.call` is what counts.
        "timeout": timedelta(seconds=timeout_s + (1 << 30) / SLOWEST_BYTES_PER_S),
        "pool_max_idle_per_host": str(IN_FLIGHT),
    }
    if place.headers:
        client_options["default_headers"] = dict(place.headers)
    retry: dict[str, object] = {
        "max_retries": _RETRIES,
        "retry_timeout": timedelta(seconds=timeout_s),
        "backoff": {
            "init_backoff": timedelta(seconds=_FIRST_WAIT_S),
            "max_backoff": timedelta(seconds=_LONGEST_WAIT_S),
            "base": 2,
        },
    }
    shared: Mapping[str, object] = {"client_options": client_options, "retry_config": retry}
    config = dict(place.config)
    if place.kind == "s3":
        if "region" not in config:
            config["region"] = bucket_region(place.bucket) or "us-east-1"
        return stores.S3Store(place.bucket, config=config, **shared)  # pyright: ignore[reportArgumentType]  # the options come as a mapping
    if place.kind == "gs":
        return stores.GCSStore(place.bucket, config=config, **shared)  # pyright: ignore[reportArgumentType]  # as above
    if place.kind == "az":
        return stores.AzureStore(place.bucket, config=config, **shared)  # pyright: ignore[reportArgumentType]  # as above
    return stores.HTTPStore(place.bucket, **shared)  # pyright: ignore[reportArgumentType]  # as above


def bucket_region(bucket: str, *, endpoint: str = "https://s3.amazonaws.com") -> str | None:
    """The region that AWS says a bucket is in, to anybody who asks; None where nobody answers."""
    import urllib.error
    import urllib.request

    request = urllib.request.Request(f"{endpoint}/{bucket}", method="HEAD")  # noqa: S310 - the scheme is ours
    with contextlib.suppress(OSError):
        try:
            with urllib.request.urlopen(request, timeout=_CONNECT_TIMEOUT_S) as answer:  # noqa: S310  # the scheme is ours
                return answer.headers.get("x-amz-bucket-region")
        except urllib.error.HTTPError as error:  # 301, 403 and 404 tell it too
            return error.headers.get("x-amz-bucket-region")
    return None


def _status(text: str) -> int | None:
    found = re.search(r"status code: (\d{3})", text)
    return int(found[1]) if found else None


def _code(text: str) -> str | None:
    found = re.search(r"<Code>(\w{1,60})</Code>", text)
    return found[1] if found else None


def _brief(text: str, code: str | None, status: int | None) -> str:
    """The first line up to the server's answer, which may repeat what was signed; of that, the code alone."""
    head = text.partition("\n")[0].partition("<?xml")[0].partition("<Error")[0]
    head = re.sub(r"\b(https?://)([^/\s?]*@)?([^\s?]*)(\?\S*)?", r"\1\3", head).strip(" :")[:300]
    return f"{head} ({code})" if code and (status or code) else head


def _reopen(url: str, options: Options, timeout_s: float) -> Client | LeftBehind:
    try:
        return Client(url, options, timeout_s=timeout_s)
    except AccessError as error:
        return LeftBehind(_reopen, (url, options, timeout_s), error, url=url.rstrip("/"))
