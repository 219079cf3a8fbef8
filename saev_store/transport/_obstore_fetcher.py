"""Ranges fetched ahead from where obstore reads, when the server speaks HTTP without TLS: MinIO, Ceph or a file server nearby."""

from __future__ import annotations

import os
import socket
import time
from collections.abc import Callable
from datetime import timedelta
from typing import TYPE_CHECKING
from urllib.parse import quote, urlsplit
from urllib.request import getproxies, proxy_bypass

from saev_store.transport._base import Buffer
from saev_store.transport._http_fetcher import IS_POSSIBLE, HttpFetcher
from saev_store.transport._http_range import Wanted
from saev_store.transport._obstore_client import READ_TIMEOUT_S, Client, is_forked
from saev_store.transport._obstore_options import Place
from saev_store.transport._pins import Pins

if TYPE_CHECKING:
    from saev_store.transport._base import Fetcher

#: Who does not answer in this time is left to obstore.
_CONNECT_TIMEOUT_S = 2.0
#: A signed address is used for half of the time that it is good for.
_SIGNED_FOR_S = 900.0
#: More threads than this would wait for the interpreter's lock.
_MOST_THREADS, _MOST_CONNECTIONS = 4, 128


class ObstoreFetcher:
    """Fetches ranges of objects that obstore has read before: it is sure by then which object is meant.

    Args:
        client: Signs addresses, and counts.
        pins: What objects looked like when they were first read.
        address: The server's.
        below: From a path to the path that is pinned.
        key: From there to the object's name in the bucket.
        in_flight_bytes: Bytes under way at most.
    """

    def __init__(
        self,
        client: Client,
        pins: Pins,
        address: tuple[int, tuple[object, ...]],
        below: Callable[[str], str],
        key: Callable[[str], str],
        in_flight_bytes: int,
    ) -> None:
        self._client, self._pins, self._below, self._key = client, pins, below, key
        self._pid = os.getpid()
        self._signed: dict[str, tuple[float, bytes]] = {}
        self._http = HttpFetcher(
            address,
            client.spare,
            n_threads=min(len(os.sched_getaffinity(0)), _MOST_THREADS),
            n_connections=_MOST_CONNECTIONS,
            in_flight_bytes=in_flight_bytes,
            timeout_s=min(READ_TIMEOUT_S, client.timeout_s),
        )
        self.close, self.join = self._http.close, self._http.join

    @property
    def is_alive(self) -> bool:
        """See `Fetcher`."""
        return self._http.is_alive

    def fetch(
        self, path: str, *, start: int, end: int, item_nbytes: int, take: Callable[[int, Buffer], None],
        done: Callable[[bool], None],
    ) -> bool:  # fmt: skip
        """See `Fetcher`."""
        below = self._below(path)
        etag, size = self._pins.versions.get(below, (None, None))
        if os.getpid() != self._pid or not _is_etag(etag) or size is None or not 0 <= start < end <= size:
            return False
        head = self._head(below)
        if head is None:
            return False

        def ended(whole: bool) -> None:
            if whole:
                self._client.tally.add("get_ranges", read=end - start)
            else:
                self._signed.pop(below, None)
            done(whole)

        request = b"%sRange: bytes=%d-%d\r\n\r\n" % (head, start, end - 1)
        return self._http.fetch(Wanted(request, start, end, etag, size, item_nbytes, take, ended))

    def _head(self, below: str) -> bytes | None:
        """A request but for its range; None where the address is not plain after all."""
        now = time.monotonic()
        until, head = self._signed.get(below, (0.0, b""))
        if now < until:
            return head
        try:
            parts = urlsplit(_address_of(self._client, self._key(below)))
            target = f"{parts.path}?{parts.query}" if parts.query else parts.path
            head = f"GET {target} HTTP/1.1\r\nHost: {parts.netloc}\r\nAccept-Encoding: identity\r\n".encode("ascii")
        except Exception:  # obstore meets the same trouble where it reads, and has words for it
            return None
        if parts.scheme != "http" or parts.username is not None:
            return None
        self._signed[below] = now + _SIGNED_FOR_S / 2, head
        return head


def open_fetcher(
    client: Client, pins: Pins, below: Callable[[str], str], key: Callable[[str], str], in_flight_bytes: int
) -> Fetcher | None:
    """A fetcher for a client's server, if it can have one."""
    base = _base_of(client.place)
    if not IS_POSSIBLE or is_forked() or base is None:
        return None
    parts = urlsplit(base)
    host, port = parts.hostname, parts.port or 80
    if parts.scheme != "http" or host is None or _has_proxy(host):
        return None
    try:
        # Of several addresses of a host not all may have somebody who listens.
        with socket.create_connection((host, port), timeout=min(_CONNECT_TIMEOUT_S, client.timeout_s)) as sock:
            address = sock.family, sock.getpeername()
        return ObstoreFetcher(client, pins, address, below, key, in_flight_bytes)
    except (OSError, RuntimeError):  # no such host, no more descriptors or threads: obstore has words for it
        return None


def _base_of(place: Place) -> str | None:
    """The address of a server that can be asked without obstore; None where more than an address is needed."""
    config = place.config
    if place.kind == "http":
        return place.bucket if not place.headers else None
    plain = {"access_key_id", "endpoint", "region", "secret_access_key", "session_token", "skip_signature"}
    # What obstore writes with (checksums, encryption by default) does not matter to those who read.
    writes = {"checksum_algorithm", "conditional_put", "unsigned_payload"}
    known = "access_key_id" in config or config.get("skip_signature") or "AWS_ACCESS_KEY_ID" in os.environ
    if place.kind != "s3" or not set(config) <= plain | writes or not known or place.headers:
        return None
    endpoint = config.get("endpoint")
    return endpoint.rstrip("/") if isinstance(endpoint, str) else None


def _address_of(client: Client, key: str) -> str:
    """Where an object is, signed for a while."""
    import obstore

    place = client.place
    if place.kind == "http" or place.config.get("skip_signature"):
        folder = place.bucket if place.kind == "http" else f"{_base_of(place)}/{place.bucket}"
        return f"{folder}/{quote(key)}"
    store = client.store
    return obstore.sign(store, "GET", key, timedelta(seconds=_SIGNED_FOR_S))  # type: ignore[arg-type]  # it is an S3Store


def _has_proxy(host: str) -> bool:
    proxies = getproxies()
    return ("http" in proxies or "all" in proxies) and not proxy_bypass(host)


def _is_etag(version: str | None) -> bool:
    """Whether a pinned version can be compared with an answer's ETag: where there is none, it is a time."""
    return version is not None and version.endswith('"')
