"""Which object a name meant when it was first read: reading another one later is an error (decision 6)."""

from __future__ import annotations

from saev_store.errors import TransportError

#: An ETag, a generation or a time, and the size in bytes; None where the server tells neither.
Version = tuple[str | None, int | None]


class Pins:
    """The versions of the files that were read, by path. All transports below one root share them; pickles carry them."""

    def __init__(self, versions: dict[str, Version] | None = None) -> None:
        self.versions = dict(versions or {})

    def check(self, path: str, version: Version, *, where: str) -> None:
        """Pin a file that is read for the first time.

        Raises:
            TransportError: it is another one than the time before.
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
        """A file, or everything in a folder, was changed through this transport."""
        for pinned in [name for name in self.versions if name == path or name.startswith(f"{path}/")]:
            self.versions.pop(pinned, None)


def _bytes(size: int | None) -> str:
    return "an unknown size" if size is None else f"{size:,} bytes"
