"""Block digests: taken from bytes in memory, and kept in digests.json for every large file of a published store."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any, cast

import xxhash

from saev_store.errors import DocumentError, NotFoundError
from saev_store.names import DIGESTS_NAME
from saev_store.transport import Buffer, Transport

#: Documents of this package are never longer: a replaced one cannot make us load more.
MAX_DOCUMENT_BYTES = 256 << 20
VERSION = 1
#: Length of a block, unless a store has another one.
BLOCK_BYTES, _MAX_BLOCK_BYTES = 8 << 20, 1 << 30
ALGORITHM = "xxh3_128"
#: Length of a digest in hexadecimal digits.
DIGEST_DIGITS = 32
_DIGEST = re.compile(f"[0-9a-f]{{{DIGEST_DIGITS}}}")


#: The xxh3_128 of some bytes, in hexadecimal.
digest: Callable[[Buffer], str] = xxhash.xxh3_128_hexdigest


def is_digest(value: object) -> bool:
    """Return True if a value from a document has the form of a digest."""
    return isinstance(value, str) and _DIGEST.fullmatch(value) is not None


def n_blocks(nbytes: int, block_bytes: int) -> int:
    """Number of blocks that some bytes are cut into; the last one may be short."""
    return -(-nbytes // block_bytes)


def block_ranges(nbytes: int, block_bytes: int) -> Iterator[tuple[int, int]]:
    """The half-open byte range of every block."""
    for start in range(0, nbytes, block_bytes):
        yield start, min(start + block_bytes, nbytes)


class BlockDigester:
    """The digests of a stream's consecutive blocks, fed in pieces of any size; `nbytes` counts what was fed."""

    def __init__(self, block_bytes: int) -> None:
        self._block_bytes, self._done = block_bytes, list[str]()
        self._state, self._fill = xxhash.xxh3_128(), 0
        self.nbytes = 0

    def update(self, data: Buffer) -> None:
        """Feed the next bytes."""
        view = memoryview(data)
        self.nbytes += len(view)
        while len(view) > 0:
            piece = view[: self._block_bytes - self._fill]
            self._state.update(piece)
            self._fill += len(piece)
            if self._fill == self._block_bytes:
                self._done.append(self._state.hexdigest())
                self._state.reset()
                self._fill = 0
            view = view[len(piece) :]

    def digests(self) -> list[str]:
        """One digest per block so far; the last one stands for the part of a block that has arrived."""
        return [*self._done, self._state.hexdigest()] if self._fill else list(self._done)


@dataclass(frozen=True)
class FileDigests:
    """The digests of the first `nbytes` of one file, one per block, in hexadecimal; the rest of a padded file is zeros."""

    nbytes: int
    digests: tuple[str, ...]


@dataclass(frozen=True)
class Digests:
    """The digests of a store's files, by their names; a block has `block_bytes`, the last one of a file perhaps fewer."""

    block_bytes: int
    files: Mapping[str, FileDigests]

    def to_bytes(self) -> bytes:
        """The document, the same bytes for the same digests; files in the order of their names."""
        document = {
            "version": VERSION,
            "algorithm": ALGORITHM,
            "block_bytes": self.block_bytes,
            "files": {
                name: {"nbytes": file.nbytes, "digests": file.digests} for name, file in sorted(self.files.items())
            },
        }
        return (json.dumps(document, separators=(",", ":")) + "\n").encode()


def parse_digests(raw: bytes, *, where: str) -> Digests:
    """Read digests.json; `DocumentError` if it breaks a rule."""
    try:
        document = cast("dict[str, Any]", json.loads(raw))
        for key, known in (("version", VERSION), ("algorithm", ALGORITHM)):
            if document[key] != known:
                raise ValueError(f"{key} is {document[key]!r}; this package knows {known!r}")
        block_bytes, files = document["block_bytes"], dict[str, FileDigests]()
        if not _is_count(block_bytes) or not 0 < block_bytes <= _MAX_BLOCK_BYTES:  # a block is held in memory
            raise ValueError(f"block_bytes is {block_bytes!r}; it must be from 1 to {_MAX_BLOCK_BYTES}")
        for name, entry in document["files"].items():
            nbytes, digests = entry["nbytes"], cast("tuple[object, ...]", tuple(entry["digests"]))
            n = n_blocks(nbytes, block_bytes) if _is_count(nbytes) else -1
            if len(digests) != n or not all(map(is_digest, digests)):
                raise ValueError(f"{name} has {nbytes!r} bytes, and other digests than {n} of {DIGEST_DIGITS} digits")
            files[name] = FileDigests(nbytes, cast("tuple[str, ...]", digests))
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        raise DocumentError(
            f"it is not what digests.json must be: {error!r}",
            where=where,
            remedy="Delete it: the store stays readable, only unchecked.",
        ) from error
    return Digests(block_bytes, files)


def _is_count(value: object) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and 0 <= value < 2**63


def load_digests(store_transport: Transport) -> Digests | None:
    """The digests of the store at a transport's root; None where it has none; `DocumentError` if they break a rule."""
    try:
        raw = store_transport.read(DIGESTS_NAME, max_bytes=MAX_DOCUMENT_BYTES)
    except NotFoundError:
        return None
    return parse_digests(bytes(raw), where=f"{store_transport.url}/{DIGESTS_NAME}")
