"""Whole files of data sets: chunks, digests and identities."""

from __future__ import annotations

import math
import os
from collections.abc import Iterable, Iterator, Sequence

import xxhash

from saev_store.errors import ArgumentError
from saev_store.sources._source import DigestScope
from saev_store.transport import Buffer, Transport
from saev_store.transport.checks import os_errors

ALGORITHM = "xxh3_128"
#: Bytes of a file that are read or written at once.
CHUNK_BYTES = 8 << 20
_SAMPLES = 32
_SAMPLE_BYTES = 32 << 10


def is_resident(transport: Transport) -> bool:
    """Whether ranges are views of memory, so that a whole file is one array and nothing is fetched."""
    return math.isinf(transport.cost.max_gap_bytes) and math.isinf(transport.cost.max_request_bytes)


def chunks(transport: Transport, path: str, nbytes: int, *, start: int = 0) -> Iterator[Buffer]:
    """The bytes of a file from `start` on, `CHUNK_BYTES` at a time."""
    for first in range(start, nbytes, CHUNK_BYTES):
        yield from transport.get_ranges(path, starts=[first], ends=[min(first + CHUNK_BYTES, nbytes)])


def file_identity(transport: Transport, path: str) -> tuple[int, ...]:
    """Numbers that differ for another file of the same name: device, inode, size and times; elsewhere the size.

    It looks at the name again; `Transport.version` is that of the file that the transport has pinned.
    """
    folder = transport.local_path
    if folder is None:
        return (transport.size(path),)
    where = f"{folder}/{path}"
    with os_errors(where, "look at"):
        status = os.stat(where)
    return status.st_dev, status.st_ino, status.st_size, status.st_mtime_ns, status.st_ctime_ns


def sample_ranges(nbytes: int) -> tuple[list[int], list[int]]:
    """Starts and ends of the ranges that a sampled digest covers: the whole file up to 1 MiB, else 32 even pieces.

    >>> sample_ranges(10)
    ([0], [10])
    """
    if nbytes <= _SAMPLES * _SAMPLE_BYTES:
        return [0], [nbytes]
    starts = [i * (nbytes - _SAMPLE_BYTES) // (_SAMPLES - 1) for i in range(_SAMPLES)]
    return starts, [start + _SAMPLE_BYTES for start in starts]


def digest_files(transport: Transport, files: Sequence[tuple[str, int]], *, scope: DigestScope) -> str:
    """The xxh3_128 digest of files (path and size of each) in order, as 32 hex digits.

    The digest covers each file's size (8 bytes, little-endian) and its bytes: all of them, or those of `sample_ranges`.

    Raises:
        ArgumentError: `scope` is neither `"sampled"` nor `"full"`.
    """
    if scope not in {"sampled", "full"}:
        raise ArgumentError(f"{scope!r} is no scope of a digest: 'sampled' or 'full'", where="digest")
    hasher = xxhash.xxh3_128()
    for path, nbytes in files:
        hasher.update(nbytes.to_bytes(8, "little"))
        if scope == "sampled":
            starts, ends = sample_ranges(nbytes)
            parts: Iterable[Buffer] = transport.get_ranges(path, starts=starts, ends=ends)
        else:
            parts = chunks(transport, path, nbytes)
        for part in parts:
            hasher.update(part)
    return hasher.hexdigest()


def describe_digest(transport: Transport, files: Sequence[tuple[str, int]], *, scope: DigestScope) -> dict[str, object]:
    """The digest of files as `Source.describe` returns it."""
    return {"algorithm": ALGORITHM, "scope": scope, "value": digest_files(transport, files, scope=scope)}
