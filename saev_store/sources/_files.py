"""Whole files of data sets: versions, chunks and digests."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence

import xxhash

from saev_store.core.arguments import check_choice
from saev_store.errors import CorruptShardError
from saev_store.sources._source import DigestScope
from saev_store.transport import Buffer, Transport

ALGORITHM = "xxh3_128"
#: Bytes of a file that are read or written at once.
CHUNK_BYTES = 8 << 20
_SAMPLES = 32
_SAMPLE_BYTES = 32 << 10


class DataFile:
    """A file of a data set, as it was when it was opened."""

    def __init__(self, transport: Transport, path: str) -> None:
        self.transport, self.path, self.url = transport, path, transport.where(path)
        self._stat = transport.stat(path)
        transport.version(path)  # pins the file, also if nothing is read yet
        self.nbytes = self._stat.nbytes

    def ranges(self, starts: Sequence[int], ends: Sequence[int]) -> Sequence[Buffer]:
        """Half-open ranges of bytes, as of `Transport.get_ranges`."""
        return self.transport.get_ranges(self.path, starts=starts, ends=ends)

    def readinto(self, starts: Sequence[int], buffers: Sequence[memoryview]) -> None:
        """Fill buffers, as `Transport.readinto`."""
        self.transport.readinto(self.path, starts=starts, buffers=buffers)

    def head(self, nbytes: int) -> bytes:
        """The first `nbytes`, or all of a shorter file."""
        return bytes(self.ranges([0], [min(nbytes, self.nbytes)])[0])

    def check_unchanged(self) -> None:
        """Raise `CorruptShardError` if another file has the name now."""
        if self.transport.stat(self.path) != self._stat:
            message = "another file has this name since the data set was opened"
            raise CorruptShardError(message, where=self.url, remedy="Open it again.")

    def close(self) -> None:
        """Release maps and connections; later reads open the file again."""
        self.transport.close()


def chunks(transport: Transport, path: str, nbytes: int, *, start: int = 0) -> Iterator[Buffer]:
    """The bytes of a file from `start` on, `CHUNK_BYTES` at a time."""
    for first in range(start, nbytes, CHUNK_BYTES):
        yield from transport.get_ranges(path, starts=[first], ends=[min(first + CHUNK_BYTES, nbytes)])


def digest_files(transport: Transport, files: Sequence[tuple[str, int]], *, scope: DigestScope) -> str:
    """The xxh3_128 digest of files (path and size of each) in order, as 32 hex digits.

    It covers each file's size (8 bytes, little-endian) and its bytes: all of them, or of a file beyond 1 MiB 32 even pieces.
    """
    check_choice(scope, ("sampled", "full"), name="digest")
    hasher = xxhash.xxh3_128()
    for path, nbytes in files:
        hasher.update(nbytes.to_bytes(8, "little"))
        parts: Iterable[Buffer] = chunks(transport, path, nbytes)
        if scope == "sampled":
            starts, ends = [0], [nbytes]
            if nbytes > _SAMPLES * _SAMPLE_BYTES:
                starts = [i * (nbytes - _SAMPLE_BYTES) // (_SAMPLES - 1) for i in range(_SAMPLES)]
                ends = [start + _SAMPLE_BYTES for start in starts]
            parts = transport.get_ranges(path, starts=starts, ends=ends)
        for part in parts:
            hasher.update(part)
    return hasher.hexdigest()


def describe_digest(transport: Transport, files: Sequence[tuple[str, int]], *, scope: DigestScope) -> dict[str, object]:
    """The digest of files as `Source.describe` returns it."""
    return {"algorithm": ALGORITHM, "scope": scope, "value": digest_files(transport, files, scope=scope)}
