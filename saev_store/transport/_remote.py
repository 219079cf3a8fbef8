"""The base of transports of services: names below one address, and the versions of the files that were read."""

from __future__ import annotations

import contextlib
import copy
from abc import abstractmethod
from typing import Self

from saev_store.errors import NotFoundError, StoreExistsError, TransportError
from saev_store.names import joined_url
from saev_store.transport.base import FileStat, Transport
from saev_store.transport.checks import check_path

#: Requests under way at once: what is under way shares the line, and more of it would only end later.
IN_FLIGHT = 64
#: Time-outs of connections, and of answers of which nothing comes any more.
CONNECT_TIMEOUT_S, READ_TIMEOUT_S = 5, 10
#: How long a busy service is asked again.
RETRY_S = 15


class RemoteTransport(Transport):
    """A transport of which several share one client and one set of pinned versions.

    Args:
        safe_url: The address, without credentials.
    """

    def __init__(self, safe_url: str) -> None:
        super().__init__()
        self._safe_url, self._folder = safe_url, ""
        #: The version of each file that was read, by its path below the address. Pickles carry them.
        self._pins: dict[str, FileStat] = {}

    @property
    def url(self) -> str:  # pyright: ignore[reportIncompatibleVariableOverride]  # an attribute elsewhere
        """The root, without credentials and query."""
        return joined_url(self._safe_url, self._folder)

    def at(self, path: str) -> Self:
        """The same client, one folder deeper."""
        child = copy.copy(self)
        child._folder = self._below(path) if path else self._folder  # noqa: SLF001  # of the same class
        return child

    def close(self) -> None:
        """Unpin all files; connections stay open for other transports."""
        self._pins.clear()

    def version(self, path: str) -> str:
        """The pinned version of a file; one request if none is pinned."""
        pinned = self._pins.get(self._below(path)) or self._pin(path, self.stat(path))
        return f"{pinned.version} {pinned.nbytes}" if pinned.version else ""

    @abstractmethod
    def key(self, path: str) -> str:
        """The client's name of a file below the root; `""` is the root."""

    def _below(self, path: str) -> str:
        """The path of a file below the client's address."""
        checked = check_path(path, root_ok=True)
        return "/".join(part for part in (self._folder, checked) if part)

    def _pin(self, path: str, found: FileStat) -> FileStat:
        """Pin the version of a file at its first read.

        Raises:
            TransportError: another version is pinned.
        """
        pinned = self._pins.setdefault(self._below(path), found)
        if pinned != found:
            raise TransportError(
                f"the object was replaced while it was being read: it had {pinned.nbytes:,} bytes and version {pinned.version}, "
                f"now {found.nbytes:,} and {found.version}",
                where=self.where(path),
                remedy="Open the store again to read the new one.",
            )
        return pinned

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
