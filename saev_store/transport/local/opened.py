"""What the files of a store were when it was opened, so that no other ones are read in their place."""

from __future__ import annotations

import os
from collections.abc import Callable
from dataclasses import dataclass, field

import xxhash

from saev_store.errors import CorruptShardError, SaevStoreError
from saev_store.names import DIGESTS_NAME

#: Of a digests.json: a hundred times what a store of 1 TB has.
_MOST_DIGESTS_BYTES = 64 << 20


def digest_of(read: Callable[..., bytes]) -> bytes:
    """A digest of the store's digests.json; empty where there is none that can be read.

    Args:
        read: `Transport.read`.
    """
    try:
        raw = read(DIGESTS_NAME, max_bytes=_MOST_DIGESTS_BYTES)
    except SaevStoreError:
        return b""
    return xxhash.xxh3_128_digest(raw)


@dataclass(slots=True)
class OpenedFiles:
    """The files of an opened store.

    Attributes:
        files: Size, and time (ns) of the last change, of each by its path.
        digests: `digest_of` the store. Files of the same sizes with other times are taken where it is the same: those of a copy
            on the disk of another machine, or after `touch`.
    """

    files: dict[str, tuple[int, int]] = field(default_factory=dict[str, tuple[int, int]])
    digests: bytes = b""

    def check(self, path: str, status: os.stat_result, *, where: str, read: Callable[..., bytes]) -> None:
        """Refuse another file in the place of the one that was there.

        Args:
            path: Its path.
            status: That of the file that is read now.
            where: What errors call it.
            read: `Transport.read`.

        Raises:
            CorruptShardError: it is another one, or it was changed.
        """
        size, modified_ns = self.files.get(path, (status.st_size, status.st_mtime_ns))
        if (status.st_size, status.st_mtime_ns) == (size, modified_ns):
            return
        if status.st_size == size and self.digests and digest_of(read) == self.digests:
            return
        raise CorruptShardError(
            "another file has taken the place of the one that was there when the store was opened, or it was changed: it had "
            f"{size:,} bytes and has {status.st_size:,} bytes",
            where=where,
            remedy="Open the store again to read the new one.",
        )
