"""Claims and owners: one claim for a store's folder, one owner for each part of it.

The claim is created once and never changes: it ties the hidden files to exact metadata and to the options that shape
bytes. An owner document says which attempt writes a part; resuming replaces it, and an older attempt that is still
alive somewhere finds at its next checkpoint that the part is no longer its own.
"""

from __future__ import annotations

import json
import os
import secrets
import socket
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from typing import TYPE_CHECKING, cast

from saev_store.errors import IncompleteStoreError, ResumeError, WriterConflictError
from saev_store.writer.folder import CLAIM, HIDDEN, Folder, owner_path

if TYPE_CHECKING:
    from saev_store.documents import Metadata

VERSION = 1


def new_attempt() -> str:
    """An identity that no other attempt has."""
    return secrets.token_hex(8)


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
    """The document that makes a folder ours until it is published."""

    metadata: str
    options: ShapingOptions
    attempt: str = field(default_factory=new_attempt, compare=False)

    @classmethod
    def of(cls, metadata: Metadata, options: ShapingOptions) -> Claim:
        return cls(metadata.to_bytes().decode("utf-8", "surrogateescape"), options)

    def to_bytes(self) -> bytes:
        return json.dumps({"version": VERSION, **asdict(self)}, indent=1).encode()


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
        metadata, attempt = document["metadata"], document["attempt"]
        if not (
            isinstance(pad, bool)
            and isinstance(block_bytes, int)
            and isinstance(world, int)
            and isinstance(metadata, str)
            and isinstance(attempt, str)
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
    return Claim(metadata, ShapingOptions(pad, block_bytes, world), attempt)


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


@dataclass(frozen=True)
class Owner:
    """One attempt's hold on one part of a store."""

    folder: Folder
    rank: int
    attempt: str

    def _document(self) -> bytes:
        who = {"version": VERSION, "attempt": self.attempt, "pid": os.getpid(), "host": socket.gethostname()}
        return json.dumps(who).encode()

    def create(self) -> bool:
        """Take a part that was not begun; False where it was."""
        return self.folder.create(owner_path(self.rank), self._document())

    def take_over(self) -> None:
        """Take a part from an attempt that has crashed."""
        self.folder.put(owner_path(self.rank), self._document())

    def check(self) -> None:
        """Check that no other attempt has taken this part.

        Raises:
            WriterConflictError: a later attempt has resumed it, or the store was published or discarded meanwhile.
        """
        raw = self.folder.document(owner_path(self.rank))
        try:
            document = cast("dict[str, object]", json.loads(raw)) if raw is not None else None
        except ValueError:
            document = {}
        if document is None:
            raise self.superseded()
        if document.get("attempt") != self.attempt:
            raise WriterConflictError(
                f"process {document.get('pid')} on {document.get('host')} has resumed this part and owns it now",
                where=self.folder.where(owner_path(self.rank)),
                remedy="Let only one writer live.",
            )

    def superseded(self) -> WriterConflictError:
        """The error for a store that was published or discarded meanwhile."""
        return WriterConflictError(
            "the store was published or discarded while this writer was at work",
            where=self.folder.where(HIDDEN),
            remedy="Open the store to see what is there; nothing of this writer was added since its last checkpoint.",
        )


def check_claim(folder: Folder, there: Claim, here: Claim) -> None:
    """A claim that was found is the one this call would make.

    Raises:
        ResumeError: it is not; every field that differs is named.
    """
    if found := differences(there, here):
        raise ResumeError(
            f"the unfinished store there is another one: {'; '.join(found)}",
            where=folder.url,
            remedy="Use the same metadata and options, or throw it away with `discard_unfinished`.",
        )
