"""Whole files of data sets: versions, chunks and digests, and the base class of formats of one or two large files."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence

import xxhash

from saev_store.core.arguments import check_choice
from saev_store.errors import DocumentError
from saev_store.sources._source import DigestScope, SampleT_co, Source
from saev_store.transport import Buffer, Entry, Transport

ALGORITHM = "xxh3_128"
#: Bytes of a file that are read or written at once.
CHUNK_BYTES = 8 << 20
#: Folders below the root at most this deep; a link to a folder above itself would have no end.
_MAX_DEPTH = 32
_SAMPLES = 32
_SAMPLE_BYTES = 32 << 10


def chunks(transport: Transport, path: str, nbytes: int) -> Iterator[Buffer]:
    """The bytes of a file, `CHUNK_BYTES` at a time."""
    for first in range(0, nbytes, CHUNK_BYTES):
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


def pinned_nbytes(transport: Transport, path: str) -> int:
    """The size of a file, which reads compare from now on."""
    transport.version(path)
    return transport.size(path)


def files_below(transport: Transport, folder: str = "", depth: int = 0) -> Iterator[Entry]:
    """The files of a folder and of those below it, without hidden ones."""
    if depth > _MAX_DEPTH:
        message = f"folders are nested more than {_MAX_DEPTH} deep: does a link lead to a folder above it?"
        raise DocumentError(message, where=transport.where(folder))
    for entry in transport.list(folder):
        if entry.is_dir and not entry.name.startswith("."):
            yield from files_below(transport, entry.path.rstrip("/"), depth + 1)
        elif not entry.name.startswith("."):
            yield entry


class FileSource(Source[SampleT_co]):
    """A source of large files: `_files` has their paths and sizes (bytes), `_described` what `describe` adds."""

    transport: Transport
    _files: Sequence[tuple[str, int]]
    _described: Mapping[str, object]

    def describe(self, *, digest: DigestScope = "sampled") -> dict[str, object]:
        """Describe the data set for `metadata.data` of a store that is recorded from it."""
        found = {"format": self.format, "url": self.url, "n_samples": len(self), **self._described}
        return {**found, "digest": describe_digest(self.transport, self._files, scope=digest)}

    def _checks(self, deep: bool) -> Iterator[tuple[Callable[[], int], int, int]]:
        if deep:
            yield self._check_files, 0, len(self)

    def _check_files(self) -> int:
        digest_files(self.transport, self._files, scope="full")
        return sum(nbytes for _, nbytes in self._files)

    def close(self) -> None:
        """Release maps and connections; returned views stay valid, and later reads open the files again."""
        self.transport.close()
