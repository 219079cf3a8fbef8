"""The claim of a store's folder, the parts of a store, and the attempt that owns each of them.

The claim ties the hidden files to exact metadata and to the options that shape bytes. Every attempt has an identity. The
owner of a store with one part is named by the claim itself; with several parts each has an owner document. Resuming replaces
the owner's document, so an older attempt that is still alive finds at its next checkpoint that it has lost the part.
"""

from __future__ import annotations

import json
import os
import secrets
import socket
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from typing import TYPE_CHECKING, cast

from saev_store.core.layout import Layout
from saev_store.errors import IncompleteStoreError, ResumeError, WriterConflictError
from saev_store.writer.folder import CLAIM, HIDDEN, Folder

if TYPE_CHECKING:
    from saev_store.documents import Metadata

VERSION = 1


def new_attempt() -> str:
    """An identity that no other attempt has."""
    return secrets.token_hex(8)


def part_shards(n_shards: int, rank: int, world: int) -> range:
    """The shards that one of `world` parts writes: contiguous, disjoint, together all, sizes at most one apart.

    >>> [list(part_shards(5, rank, 3)) for rank in range(3)]
    [[0], [1, 2], [3, 4]]
    """
    return range(n_shards * rank // world, n_shards * (rank + 1) // world)


def part_examples(layout: Layout, shards: range) -> tuple[int, int]:
    """The half-open range of examples that some consecutive shards hold."""
    start = min(shards.start * layout.examples_per_shard, layout.n_examples)
    return start, max(start, min(shards.stop * layout.examples_per_shard, layout.n_examples))


@dataclass(frozen=True)
class ShapingOptions:
    """The options that shape the bytes of a store: every writer of one store must share them.

    Attributes:
        pad: The last shard's file is as long as the others, its tail zeros.
        block_bytes: Each digest stands for this many bytes.
        world: In how many parts the shards are written.
    """

    pad: bool
    block_bytes: int
    world: int


@dataclass(frozen=True)
class Claim:
    """What an unfinished store will be; two claims that differ are two stores."""

    metadata: str
    options: ShapingOptions

    @classmethod
    def of(cls, metadata: Metadata, options: ShapingOptions) -> Claim:
        return cls(metadata.raw.decode("utf-8", "surrogateescape"), options)


def read_claim(folder: Folder) -> Claim | None:
    """The claim in a folder, None where there is none.

    Raises:
        IncompleteStoreError: there is one that this version does not understand.
    """
    raw = folder.document(CLAIM)
    return None if raw is None else parse_claim(raw, folder)


def parse_claim(raw: bytes, folder: Folder) -> Claim:
    """The claim in a document that was read from a folder.

    Raises:
        IncompleteStoreError: this version does not understand it.
    """
    try:
        document = cast("dict[str, object]", json.loads(raw))
        if document["version"] != VERSION:
            raise ValueError(f"its version is {document['version']!r}, this package knows {VERSION}")
        options = cast("dict[str, object]", document["options"])
        pad, block_bytes, world = options["pad"], options["block_bytes"], options["world"]
        metadata = document["metadata"]
        if not (
            isinstance(pad, bool)
            and isinstance(block_bytes, int)
            and isinstance(world, int)
            and isinstance(metadata, str)
            and block_bytes > 0
            and world > 0
        ):
            raise TypeError("a value has the wrong type")
    except (ValueError, KeyError, TypeError, RecursionError) as error:
        raise IncompleteStoreError(
            f"the claim of an unfinished store cannot be understood: {error}",
            where=folder.where(CLAIM),
            remedy="If no process is writing there, delete the folder and start again.",
        ) from error
    return Claim(metadata, ShapingOptions(pad, block_bytes, world))


def differences(there: Claim, here: Claim) -> list[str]:
    """What differs between a claim that was found and the one this call would make, field by field, both values shown."""
    old, new = asdict(there.options), asdict(here.options)
    found = [f"{name} is {old[name]!r} there, {new[name]!r} in this call" for name in old if old[name] != new[name]]
    return metadata_differences(there.metadata, here.metadata) + found


def metadata_differences(there: str, here: str) -> list[str]:
    """Which keys differ between two metadata documents, both values shown.

    >>> metadata_differences('{"n_examples": 5, "ckpt": "a"}', '{"n_examples": 6, "ckpt": "a"}')
    ['n_examples is 5 there, 6 in this call']
    """
    if there == here:
        return []
    try:
        old, new = cast("object", json.loads(there)), cast("object", json.loads(here))
    except (ValueError, RecursionError):
        return ["the metadata there is no JSON"]
    if not isinstance(old, dict) or not isinstance(new, dict):
        return ["the metadata there is no JSON object"]
    olds, news = cast("Mapping[str, object]", old), cast("Mapping[str, object]", new)
    found = [
        f"{key} is {_shown(olds, key)} there, {_shown(news, key)} in this call"
        for key in [*olds, *(key for key in news if key not in olds)]
        if _shown(olds, key) != _shown(news, key)
    ]
    return found or ["the metadata says the same in other bytes (the order of its keys, or white space)"]


def _shown(mapping: Mapping[str, object], key: str) -> str:
    return repr(mapping[key])[:200] if key in mapping else "absent"


def check_claim(folder: Folder, there: Claim, here: Claim) -> None:
    """Check that a claim that was found is the one this call would make.

    Raises:
        ResumeError: it is not; every field that differs is named.
    """
    if found := differences(there, here):
        raise ResumeError(
            f"the unfinished store there is another one: {'; '.join(found)}",
            where=folder.url,
            remedy="Use the same metadata and options, or throw it away with `discard_unfinished`.",
        )


@dataclass(frozen=True)
class Owner:
    """A document that names the attempt that owns something: a store, one of its parts, or its publication.

    Attributes:
        path: The document.
        attempt: The identity of this attempt.
        about: Further keys of the document.
    """

    folder: Folder
    path: str
    attempt: str
    about: Mapping[str, object] = field(default_factory=dict[str, object])

    def create(self) -> bool:
        """Take what has no owner; False where it has one."""
        return self.folder.create(self.path, self._document()) != "taken"

    def take_over(self) -> None:
        """Take it from an attempt that has crashed."""
        self.folder.put(self.path, self._document(has_overtaken=True))

    def _document(self, **more: object) -> bytes:
        attempt = {"attempt": self.attempt, "pid": os.getpid(), "host": socket.gethostname()}
        return json.dumps({"version": VERSION, **self.about, **attempt, **more}, indent=1).encode()

    def holder(self) -> Mapping[str, object] | None:
        """The document that is there; None where there is none, and an empty one where it is damaged."""
        raw = self.folder.document(self.path)
        try:
            document = cast("object", json.loads(raw)) if raw is not None else None
        except (ValueError, RecursionError):
            document = {}
        if document is None or not isinstance(document, dict):
            return None if raw is None else {}
        return cast("dict[str, object]", document)

    def check(self) -> None:
        """Check that this attempt is still the owner.

        Raises:
            WriterConflictError: a later attempt has resumed it, or the store was published or discarded meanwhile.
        """
        holder = self.holder()
        if holder is None:
            raise self.superseded()
        if holder.get("attempt") != self.attempt:
            raise WriterConflictError(
                f"process {holder.get('pid')} on {holder.get('host')} has resumed this part and owns it now",
                where=self.folder.where(self.path),
                remedy="Let only one writer live.",
            )

    def superseded(self) -> WriterConflictError:
        """The error for a store that was published or discarded meanwhile."""
        return WriterConflictError(
            "the store was published or discarded while this writer was at work",
            where=self.folder.where(HIDDEN),
            remedy="Open the store to see what is there; nothing of this writer was added since its last checkpoint.",
        )
