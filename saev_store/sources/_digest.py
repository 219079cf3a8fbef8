"""Digests of data sets: of everything, or of enough to notice that another one lies there."""

from __future__ import annotations

from collections.abc import Sequence

import xxhash

from saev_store._runtime.progress import Progress
from saev_store.errors import ArgumentError
from saev_store.sources._source import DigestScope
from saev_store.transport import Transport

ALGORITHM = "xxh3_128"
#: Bytes read at once when a whole file is digested.
CHUNK_BYTES = 8 << 20
_SAMPLES = 32
_SAMPLE_BYTES = 32 << 10


def sample_ranges(nbytes: int) -> tuple[list[int], list[int]]:
    """Starts and ends of the pieces of a file that a sampled digest sees: all of it up to a MiB, else 32 pieces.

    The first and the last 32 KiB are among them; the others lie evenly between.

    >>> sample_ranges(10)
    ([0], [10])
    """
    if nbytes <= _SAMPLES * _SAMPLE_BYTES:
        return [0], [nbytes]
    starts = [i * (nbytes - _SAMPLE_BYTES) // (_SAMPLES - 1) for i in range(_SAMPLES)]
    return starts, [start + _SAMPLE_BYTES for start in starts]


def digest_files(
    transport: Transport,
    files: Sequence[tuple[str, int]],
    *,
    scope: DigestScope,
    progress: bool | None = False,
) -> str:
    """The xxh3_128 digest of files in order, as 32 hex digits.

    Digested are, file by file, its size (8 bytes, little-endian) and its bytes: all of them, or those of `sample_ranges`.

    Args:
        transport: Where the files are.
        files: Path and size of each.
        scope: `"full"` or `"sampled"`.
        progress: As everywhere; by default no bar.
    """
    if scope not in {"sampled", "full"}:
        raise ArgumentError(f"{scope!r} is no scope of a digest: 'sampled' or 'full'", where="digest")
    hasher = xxhash.xxh3_128()
    total = sum(nbytes for _, nbytes in files) if scope == "full" else 0
    with Progress(total, "digest", shown=progress if scope == "full" else False) as bar:
        for path, nbytes in files:
            hasher.update(nbytes.to_bytes(8, "little"))
            if scope == "sampled":
                starts, ends = sample_ranges(nbytes)
                for part in transport.get_ranges(path, starts=starts, ends=ends):
                    hasher.update(part)
                continue
            for start in range(0, nbytes, CHUNK_BYTES):
                (part,) = transport.get_ranges(path, starts=[start], ends=[min(start + CHUNK_BYTES, nbytes)])
                hasher.update(part)
                bar.advance(len(part))
    return hasher.hexdigest()


def describe_digest(transport: Transport, files: Sequence[tuple[str, int]], *, scope: DigestScope) -> dict[str, object]:
    """The digest as `describe` shows it."""
    return {"algorithm": ALGORITHM, "scope": scope, "value": digest_files(transport, files, scope=scope)}
