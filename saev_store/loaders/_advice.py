"""What the system is told about how files are going to be read."""

from __future__ import annotations

import contextlib
import os

from saev_store.core.layout import Layout, shard_name
from saev_store.errors import SaevStoreError
from saev_store.transport.local.descriptors import DESCRIPTORS

#: From this many times the machine's memory on, what was read is forgotten: keeping it would only push out other things.
_MUCH_LARGER = 2


class Advice:
    """Tells the system that a local store's shards are read in extents far apart, and takes it back at the end.

    Without it, read-ahead fetches the neighbouring layers as well: on a cold disk about half of the speed.

    Args:
        folder: Where the shards are.
        layout: Their geometry.
        keep_pages: Whether what was read stays in the page cache; None: unless the store is much larger than memory.
    """

    def __init__(self, folder: str, layout: Layout, keep_pages: bool | None) -> None:
        self._folder = folder
        self._advised: dict[int, int] = {}
        self._forgets = self.forgets(layout, keep_pages)

    @staticmethod
    def forgets(layout: Layout, keep_pages: bool | None) -> bool:
        """Whether pages are dropped once they were read."""
        if keep_pages is not None or not hasattr(os, "sysconf"):
            return keep_pages is False
        return layout.nbytes > _MUCH_LARGER * os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")

    def _path(self, shard: int) -> str:
        return os.path.join(self._folder, shard_name(shard))

    def before(self, shard: int) -> None:
        """A shard is about to be read; costs nothing once it is known."""
        file = DESCRIPTORS.peek(self._path(shard))
        if file is None:
            # What cannot be opened is said by the read itself.
            with contextlib.suppress(OSError, SaevStoreError):
                file = DESCRIPTORS.open(self._path(shard))
        if file is not None and self._advised.get(shard) != id(file):
            self._advised[shard] = id(file)
            os.posix_fadvise(file.fd, 0, 0, os.POSIX_FADV_RANDOM)

    def soon(self, shard: int, starts: list[int], ends: list[int]) -> None:
        """Small extents are about to be read, one after the other: the system begins with all of them at once."""
        if (file := DESCRIPTORS.peek(self._path(shard))) is not None:
            with contextlib.suppress(OSError):  # a file system that does not know how
                for start, end in zip(starts, ends, strict=True):
                    os.posix_fadvise(file.fd, start, end - start, os.POSIX_FADV_WILLNEED)

    def after(self, shard: int, start: int, end: int) -> None:
        """An extent was read."""
        if self._forgets and (file := DESCRIPTORS.peek(self._path(shard))) is not None:
            os.posix_fadvise(file.fd, start, end - start, os.POSIX_FADV_DONTNEED)

    def close(self) -> None:
        """Others who use the same open files read as before."""
        for shard in self._advised:
            file = DESCRIPTORS.peek(self._path(shard))
            if file is not None:
                os.posix_fadvise(file.fd, 0, 0, os.POSIX_FADV_NORMAL)
        self._advised.clear()


def advice_for(folder: str | None, layout: Layout, keep_pages: bool | None) -> Advice | None:
    """Advice about a local folder, where the system takes any."""
    return Advice(folder, layout, keep_pages) if folder is not None and hasattr(os, "posix_fadvise") else None
