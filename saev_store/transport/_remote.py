"""What the transports of object stores and other servers share: names, versions of files, exclusive new files."""

from __future__ import annotations

import contextlib
from typing import Generic, Protocol, Self, TypeVar

from saev_store.errors import NotFoundError, StoreExistsError, TransportError
from saev_store.transport._counters import RequestCounter
from saev_store.transport.base import Counters
from saev_store.transport.checks import check_path

#: An ETag, a generation or a time, and the size in bytes; None where the server does not tell.
Version = tuple[str | None, int | None]


class Pins:
    """The versions of the files that were read, by path (decision 6). Transports below one root share them; pickles carry them."""

    def __init__(self, versions: dict[str, Version] | None = None) -> None:
        self.versions = dict(versions or {})

    def check(self, path: str, version: Version, *, where: str) -> None:
        """Pin a file at its first read.

        Raises:
            TransportError: another version is pinned.
        """
        pinned = self.versions.setdefault(path, version)
        if pinned != version:
            (old, old_size), (new, new_size) = pinned, version
            raise TransportError(
                f"the object was replaced while it was being read: it had {_bytes(old_size)} and the version {old}, now "
                f"{_bytes(new_size)} and {new}",
                where=where,
                remedy="Open the store again to read the new one.",
            )

    def told(self, path: str) -> str | None:
        """The version of a file as text; None if no range of it was read yet."""
        version = self.versions.get(path)
        return None if version is None else repr(version)

    def forget(self, path: str) -> None:
        """Unpin a file, or everything in a folder, that this transport has changed."""
        for pinned in [name for name in self.versions if name == path or name.startswith(f"{path}/")]:
            self.versions.pop(pinned, None)


class RemoteClient(Protocol):
    """What `RemoteTransport` needs of a client."""

    requests: RequestCounter
    safe_url: str


C = TypeVar("C", bound=RemoteClient)


class RemoteTransport(Generic[C]):
    """The base of transports that share one client and the pins of one root."""

    pads = False
    is_local = False
    local_path = None
    reads_into = False

    def __init__(self, client: C) -> None:
        self._client = client
        self._pins = Pins()
        self._folder = ""

    @property
    def url(self) -> str:
        """The root, without credentials and query."""
        return self._where(self._folder)

    @property
    def counters(self) -> Counters:
        """Requests of this client so far; its own retries are not counted."""
        return self._client.requests.counters

    def __repr__(self) -> str:
        return f"{type(self).__name__}({self.url!r})"

    def at(self, path: str) -> Self:
        """The same client, one folder deeper."""
        child = object.__new__(type(self))
        child.__dict__.update(self.__dict__, _folder=self._below(path) if path else self._folder)
        return child

    def close(self) -> None:
        """Unpin all files; connections stay open for other transports."""
        self._pins.versions.clear()

    def size(self, path: str) -> int:
        """The size of a file in bytes."""
        raise NotImplementedError

    def lock(self, path: str) -> contextlib.AbstractContextManager[None]:
        """Nothing: object stores have no locks; publication decides which writer wins."""
        check_path(path)
        return contextlib.nullcontext()

    def _check_absent(self, path: str) -> None:
        """Refuse to write a new file over an existing one."""
        with contextlib.suppress(NotFoundError):
            self.size(path)
            raise StoreExistsError(
                "the file already exists", where=self._where(self._below(path)), remedy="Resume, or delete it first."
            )

    def _below(self, path: str) -> str:
        """The path below the client's address."""
        checked = check_path(path)
        return f"{self._folder}/{checked}" if self._folder else checked

    def _where(self, below: str) -> str:
        """The name of a file for messages."""
        return f"{self._client.safe_url}/{below}" if below else self._client.safe_url


def _bytes(size: int | None) -> str:
    return "an unknown size" if size is None else f"{size:,} bytes"
