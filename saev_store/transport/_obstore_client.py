"""The client of one bucket through obstore: how it is opened, waits and errors."""

from __future__ import annotations

import asyncio
import contextlib
import re
import urllib.error
import urllib.request
from collections.abc import Awaitable, Callable, Mapping
from datetime import timedelta
from importlib.util import find_spec
from typing import TYPE_CHECKING, TypeVar

from saev_store.errors import (
    AccessError,
    DeadlineError,
    MissingDependencyError,
    NotFoundError,
    SaevStoreError,
    StoreExistsError,
    TransportError,
)
from saev_store.transport._loop import awaited, limit_s, own_loop, run
from saev_store.transport._obstore_options import Place, place_of
from saev_store.transport._options import (
    CONDITIONAL_CREATE,
    conditional_create,
    read_authorities,
    redacted,
    refused_certificate,
)
from saev_store.transport._remote import CONNECT_TIMEOUT_S, IN_FLIGHT, READ_TIMEOUT_S, RETRY_S

if TYPE_CHECKING:
    from obstore.store import ObjectStore

T = TypeVar("T")

_NOT_LET_IN = {"ExpiredToken", "InvalidAccessKeyId", "InvalidToken", "SignatureDoesNotMatch", "TokenRefreshRequired"}


class ObstoreClient:
    """The bucket behind an address, shared by all transports below it; thread-safe. Its pickles contain the options.

    Args:
        url: The address.
        options: Storage options.
        timeout_s: Time-out of an operation, beside the time for its bytes.

    Attributes:
        options: Storage options.
        place: The address and its options, as obstore takes them.
        slots: Held by each request while it is under way.
        is_conditional: False if the service does not know conditional creation.

    Raises:
        ArgumentError: obstore has no equivalent for an option, or no store for the address.
        MissingDependencyError: obstore is not installed.
    """

    def __init__(self, url: str, options: Mapping[str, object], timeout_s: float) -> None:
        self._arguments = (url, options, timeout_s)
        self.options, self.timeout_s = options, timeout_s
        self.is_conditional, rest = conditional_create(options)
        self.place = place_of(url, rest)
        if find_spec("obstore") is None:
            raise MissingDependencyError(
                "the engine obstore is not installed", where=url, remedy="pip install 'saev_store[obstore]'"
            )
        self.slots = asyncio.Semaphore(IN_FLIGHT)
        self._store: ObjectStore | None = None

    def __reduce__(self) -> tuple[object, ...]:
        return ObstoreClient, self._arguments

    @property
    def store(self) -> ObjectStore:
        """The client object of obstore."""
        if self._store is None:
            self._store = _open(self.place)
        return self._store

    def call(self, doing: str, where: str, work: Callable[[], Awaitable[T]], *, nbytes: int = 0) -> T:
        """The result of `work()`, waited for in this thread, for as long as `nbytes` may take.

        Raises:
            ForkError: the process was forked after a bucket was read.
            DeadlineError: it took too long, and was cancelled.
            SaevStoreError: the equivalent of obstore's error.
        """
        loop = own_loop()
        try:
            _ = self.store  # opened here, not on the loop: it may ask for the bucket's region
            return run(work, loop, limit_s=limit_s(self.timeout_s, nbytes))
        except Exception as error:
            ours = self.translated(error, doing=doing, where=where)
        raise ours  # not `from error`: its text contains whole answers of the server, addresses and headers

    async def awaited(self, doing: str, where: str, work: Callable[[], Awaitable[T]], *, nbytes: int) -> T:
        """As `call`, awaited in any event loop."""
        loop = own_loop()
        try:
            return await awaited(work, loop, limit_s=limit_s(self.timeout_s, nbytes))
        except Exception as error:
            ours = self.translated(error, doing=doing, where=where)
        raise ours

    def translated(self, error: Exception, *, doing: str, where: str) -> SaevStoreError:
        """Our error for one of obstore's; ours stay as they are."""
        if isinstance(error, SaevStoreError):
            return error
        kind, text = type(error).__name__, str(error)
        found = re.search(r"<Code>(\w{1,60})</Code>", text)
        code, status = found[1] if found else None, status_of(error)
        if refused := refused_certificate(text, where=where):
            return refused
        message = redacted(f"could not {doing}: {_brief(text, code, status)}", self.options)
        if isinstance(error, FileNotFoundError) or status == 404:
            return NotFoundError(message, where=where)
        if doing == "create" and (kind in {"AlreadyExistsError", "PreconditionError"} or status == 412):
            return StoreExistsError("the file already exists", where=where)
        if status == 501 and doing == "create":
            remedy = f"The service has no conditional requests. Pass storage_options={{{CONDITIONAL_CREATE!r}: False}}."
            return TransportError(message, where=where, remedy=remedy)
        denied = kind in {"PermissionDeniedError", "UnauthenticatedError"} or status in {401, 403}
        if denied or code in _NOT_LET_IN or "redential" in text.partition("\n")[0]:
            return AccessError(
                message,
                where=where,
                remedy="Check the credentials in storage_options or the environment, and the clock.",
            )
        if isinstance(error, TimeoutError) or re.search(r"\btimed? ?out\b", text.partition("\n")[0], re.IGNORECASE):
            return DeadlineError(message, where=where, transient=True)
        remedy, is_elsewhere = None, "Received redirect without LOCATION" in text
        if (is_elsewhere or status in {301, 307, 308, 400}) and self.place.kind == "s3":
            remedy = 'Check the region: storage_options={"client_kwargs": {"region_name": …}}.'
        passes = not is_elsewhere if status is None else may_pass(status)
        return TransportError(
            message, where=where, remedy=remedy, transient=passes and not isinstance(error, (TypeError, ValueError))
        )


def may_pass(status: int) -> bool:
    """Return True if a later request may succeed after an answer with this status."""
    return status in {408, 409, 429} or (status >= 500 and status not in {501, 505})


def status_of(error: Exception) -> int | None:
    """The HTTP status in an error of obstore."""
    found = re.search(r"status code: (\d{3})|status: (\d{3})|error status (\d{3})|returned (\d{3})", str(error))
    return int(next(group for group in found.groups() if group)) if found else None


def _brief(text: str, code: str | None, status: int | None) -> str:
    """The first line up to the server's answer, which may repeat what was signed; of that, the code alone."""
    head = text.partition("\n")[0].partition("<?xml")[0].partition("<Error")[0]
    head = re.sub(r"\b(https?://)([^/\s?]*@)?([^\s?]*)(\?\S*)?", r"\1\3", head).strip(" :")[:300]
    return f"{head} ({code})" if code and (status or code) else head


def _open(place: Place) -> ObjectStore:
    from obstore import store as stores

    client_options: dict[str, object] = {
        "allow_http": place.allow_http,
        "connect_timeout": timedelta(seconds=CONNECT_TIMEOUT_S),
        "read_timeout": timedelta(seconds=READ_TIMEOUT_S),
        # For the whole request, body included: the deadline of `ObstoreClient.call` is what counts.
        "timeout": timedelta(hours=1),
        # A request that begins before the last connection is back opens another one.
        "pool_max_idle_per_host": str(2 * IN_FLIGHT),
    }
    if isinstance(place.verify, str):
        client_options["root_certificate"] = read_authorities(place.verify)
    elif not place.verify:
        client_options["allow_invalid_certificates"] = True
    if place.headers:
        client_options["default_headers"] = dict(place.headers)
    retry: dict[str, object] = {
        # The waits are random: only their sum is limited.
        "max_retries": 1000,
        "retry_timeout": timedelta(seconds=RETRY_S),
        "backoff": {"init_backoff": timedelta(seconds=0.1), "max_backoff": timedelta(seconds=3), "base": 3},
    }
    shared: Mapping[str, object] = {"client_options": client_options, "retry_config": retry}
    config = dict(place.config)
    if place.kind == "http":
        return stores.HTTPStore(place.bucket, **shared)  # pyright: ignore[reportArgumentType]  # typed dictionaries
    if place.kind == "s3" and "region" not in config:
        config["region"] = bucket_region(place.bucket) or "us-east-1"
    provider = config.pop("credential_provider", None)
    given = {} if provider is None else {"credential_provider": provider}
    make = {"s3": stores.S3Store, "gs": stores.GCSStore, "az": stores.AzureStore}[place.kind]
    return make(place.bucket, config=config, **given, **shared)  # pyright: ignore[reportArgumentType]  # typed dictionaries


def bucket_region(bucket: str, *, endpoint: str = "https://s3.amazonaws.com") -> str | None:
    """The region of a bucket, which AWS returns without credentials; None without an answer."""
    request = urllib.request.Request(f"{endpoint}/{bucket}", method="HEAD")  # noqa: S310 - the scheme is ours
    with contextlib.suppress(OSError):
        try:
            with urllib.request.urlopen(request, timeout=CONNECT_TIMEOUT_S) as answer:  # noqa: S310  # the scheme is ours
                return answer.headers.get("x-amz-bucket-region")
        except urllib.error.HTTPError as error:  # 301, 403 and 404 have it too
            return error.headers.get("x-amz-bucket-region")
    return None
