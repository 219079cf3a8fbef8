"""Block digests: taken from bytes in memory, and kept in digests.json for every large file of a published store."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import cast

import xxhash

from saev_store.errors import DocumentError, NotFoundError
from saev_store.names import DIGESTS_NAME
from saev_store.problems import Problem
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
    """Whether a value from a document has the form of a digest."""
    return isinstance(value, str) and _DIGEST.fullmatch(value) is not None


def n_blocks(nbytes: int, block_bytes: int) -> int:
    """How many blocks some bytes are cut into; the last one may be short.

    >>> n_blocks(17, 8), n_blocks(16, 8), n_blocks(0, 8)
    (3, 2, 0)
    """
    return -(-nbytes // block_bytes)


def block_ranges(nbytes: int, block_bytes: int) -> Iterator[tuple[int, int]]:
    """The half-open byte range of every block.

    >>> list(block_ranges(17, 8))
    [(0, 8), (8, 16), (16, 17)]
    """
    for start in range(0, nbytes, block_bytes):
        yield start, min(start + block_bytes, nbytes)


class BlockDigester:
    """The digests of a stream's consecutive blocks, fed in pieces of any size.

    Args:
        block_bytes: Length of a block.
        done: Digests of whole blocks that were fed before, by an earlier process.

    Attributes:
        nbytes: How many bytes the digests stand for.

    >>> digester = BlockDigester(4)
    >>> digester.update(b"abcde")
    >>> digester.nbytes, digester.digests() == [digest(b"abcd"), digest(b"e")]
    (5, True)
    """

    def __init__(self, block_bytes: int, done: Iterable[str] = ()) -> None:
        self.block_bytes = block_bytes
        self._done = list(done)
        self._state = xxhash.xxh3_128()
        self._fill = 0
        self.nbytes = len(self._done) * block_bytes

    def update(self, data: Buffer) -> None:
        """Feed the next bytes."""
        view = memoryview(data)
        self.nbytes += len(view)
        while len(view) > 0:
            piece = view[: self.block_bytes - self._fill]
            if self._fill == 0 and len(piece) == self.block_bytes:
                self._done.append(digest(piece))
            else:
                self._state.update(piece)
                self._fill += len(piece)
                if self._fill == self.block_bytes:
                    self._done.append(self._state.hexdigest())
                    self._state.reset()
                    self._fill = 0
            view = view[len(piece) :]

    def digests(self) -> list[str]:
        """One digest per block so far; the last one stands for the part of a block that has arrived."""
        return [*self._done, self._state.hexdigest()] if self._fill else list(self._done)


@dataclass(frozen=True)
class FileDigests:
    """The digests of one file.

    Attributes:
        nbytes: They stand for this many leading bytes; the rest of a padded file is zeros.
        digests: One per block, in hexadecimal.
    """

    nbytes: int
    digests: tuple[str, ...]


@dataclass(frozen=True)
class Digests:
    """The digests of a store's files.

    Attributes:
        block_bytes: Length of a block; the last one of a file may be shorter.
        files: By file name.
    """

    block_bytes: int
    files: Mapping[str, FileDigests]

    def to_bytes(self) -> bytes:
        """The document, the same bytes for the same digests; files in the order of their names."""
        document = {
            "version": VERSION,
            "algorithm": ALGORITHM,
            "block_bytes": self.block_bytes,
            "files": {
                name: {"nbytes": self.files[name].nbytes, "digests": list(self.files[name].digests)}
                for name in sorted(self.files)
            },
        }
        return (json.dumps(document, separators=(",", ":")) + "\n").encode()


def parse_digests(raw: bytes, *, where: str) -> Digests:
    """Read digests.json, or another document of that form; `DocumentError` lists all rules that it breaks."""
    problems: list[Problem] = []

    def bad(message: str, *loc: str | int) -> None:
        problems.append(Problem("digests", message, where=DIGESTS_NAME, loc=loc))

    try:
        document = cast("object", json.loads(raw))
    except (ValueError, RecursionError) as error:
        raise DocumentError(
            f"no JSON: {error}", where=where, remedy="Delete it: the store stays readable, only unchecked."
        ) from error
    top = cast("dict[str, object]", document) if isinstance(document, dict) else {}
    files: dict[str, FileDigests] = {}
    block_bytes = top.get("block_bytes")
    if top.get("version") != VERSION:
        bad(f"version is {top.get('version')!r}; this package knows {VERSION}", "version")
    elif top.get("algorithm") != ALGORITHM:
        bad(f"algorithm is {top.get('algorithm')!r}; this package knows {ALGORITHM!r}", "algorithm")
    elif (
        not _is_count(block_bytes) or not 0 < cast("int", block_bytes) <= _MAX_BLOCK_BYTES
    ):  # a block is held in memory
        bad(f"block_bytes is {block_bytes!r}; it must be an integer from 1 to {_MAX_BLOCK_BYTES}", "block_bytes")
    elif not isinstance(top.get("files"), dict):
        bad("files must be an object", "files")
    else:
        for name, entry in cast("dict[str, object]", top["files"]).items():
            fields = cast("dict[str, object]", entry) if isinstance(entry, dict) else {}
            nbytes, digests = fields.get("nbytes"), fields.get("digests")
            if not _is_count(nbytes):
                bad(f"nbytes is {nbytes!r}; it must be an integer of 0 or more", "files", name, "nbytes")
            elif not isinstance(digests, list) or not all(is_digest(item) for item in cast("list[object]", digests)):
                bad(f"digests must be a list of strings of {DIGEST_DIGITS} hexadecimal digits", "files", name)
            elif len(found := cast("list[str]", digests)) != (
                expected := n_blocks(cast("int", nbytes), cast("int", block_bytes))
            ):
                bad(f"{len(found)} digests for {nbytes} bytes; there must be {expected}", "files", name)
            else:
                files[name] = FileDigests(cast("int", nbytes), tuple(found))
    if problems:
        raise DocumentError(
            "; ".join(str(problem) for problem in problems[:5]),
            where=where,
            remedy="Delete it: the store stays readable, only unchecked.",
            problems=problems,
        )
    return Digests(cast("int", block_bytes), files)


def _is_count(value: object) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and 0 <= value < 2**63


def load_digests(store_transport: Transport) -> Digests | None:
    """The digests of the store at a transport's root; None where it has none (other tools write none).

    Raises:
        DocumentError: there is a digests.json, but it breaks a rule.
    """
    try:
        raw = store_transport.read(DIGESTS_NAME, max_bytes=MAX_DOCUMENT_BYTES)
    except NotFoundError:
        return None
    return parse_digests(bytes(raw), where=f"{store_transport.url}/{DIGESTS_NAME}")
