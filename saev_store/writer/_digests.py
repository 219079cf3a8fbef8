"""digests.json: one digest per block of every large file of a published store."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import cast

from saev_store.errors import DocumentError, NotFoundError
from saev_store.problems import Problem
from saev_store.transport import Transport
from saev_store.writer._blocks import ALGORITHM, DIGEST_DIGITS, n_blocks
from saev_store.writer.folder import DIGESTS, MAX_DOCUMENT_BYTES

VERSION = 1
_DIGEST = re.compile(f"[0-9a-f]{{{DIGEST_DIGITS}}}")


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
    """Read digests.json.

    Raises:
        DocumentError: it breaks a rule; all broken rules are listed.
    """
    problems: list[Problem] = []

    def bad(message: str, *loc: str | int) -> None:
        problems.append(Problem("digests", message, where=DIGESTS, loc=loc))

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
    elif not _is_count(block_bytes) or block_bytes == 0:
        bad(f"block_bytes is {block_bytes!r}; it must be a positive integer", "block_bytes")
    elif not isinstance(top.get("files"), dict):
        bad("files must be an object", "files")
    else:
        for name, entry in cast("dict[str, object]", top["files"]).items():
            fields = cast("dict[str, object]", entry) if isinstance(entry, dict) else {}
            nbytes, digests = fields.get("nbytes"), fields.get("digests")
            if not _is_count(nbytes):
                bad(f"nbytes is {nbytes!r}; it must be an integer of 0 or more", "files", name, "nbytes")
            elif not isinstance(digests, list) or not all(
                isinstance(item, str) and _DIGEST.fullmatch(item) for item in cast("list[object]", digests)
            ):
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
        raw = store_transport.read(DIGESTS, max_bytes=MAX_DOCUMENT_BYTES)
    except NotFoundError:
        return None
    return parse_digests(bytes(raw), where=f"{store_transport.url}/{DIGESTS}")
