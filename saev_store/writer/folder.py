"""A store's folder while it is written: its hidden files, the claim of the store, and the owners of its parts.

The claim ties the hidden files to exact metadata and to the options that shape bytes. Every attempt has an identity. The
owner of a store with one part is named by the claim itself; with several parts each has an owner document. Resuming replaces
the owner's document, so an older attempt that is still alive finds at its next checkpoint that it has lost the part.
"""

from __future__ import annotations

import contextlib
import json
import os
import secrets
import socket
from collections.abc import Callable, Generator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from functools import partial
from typing import TYPE_CHECKING, Literal, TypeVar, cast

from saev_store._runtime.progress import Progress
from saev_store._runtime.threads import ahead
from saev_store.core.layout import Layout, shard_name
from saev_store.errors import (
    AccessError,
    IncompleteStoreError,
    NotFoundError,
    SaevStoreError,
    StoreExistsError,
    TransportError,
    WriterConflictError,
)
from saev_store.names import CLAIM_PATH, LABELS_NAME, SHARDS_NAME, WORK_FOLDER
from saev_store.transport import Buffer, Entry, Sink, Transport
from saev_store.writer._digests import MAX_DOCUMENT_BYTES, FileDigests, block_ranges, digest

if TYPE_CHECKING:
    from saev_store.documents import Metadata

S = TypeVar("S")
T = TypeVar("T")

# Everything in the work folder is needed only until the store is published. Readers ignore it; the last step removes it.
LABELLED = f"{WORK_FOLDER}/labelled.json"
PUBLISHER = f"{WORK_FOLDER}/publisher.json"
REPAIR = f"{WORK_FOLDER}/repair"
#: What a repair is about to do.
JOURNAL = f"{REPAIR}/journal.json"
#: Where the files of token arrays are built on a disk.
BUILDING = f"{WORK_FOLDER}/building"

#: Version of the claim and of the owners' documents.
VERSION = 1
#: Files that a crashed process left half-written start with this.
TEMPORARY = ".saev_store.tmp-"

#: Requests of one kind in flight, and how much memory their answers may take.
MOST_AHEAD, _AHEAD_BYTES = 32, 64 << 20


def receipt_path(shard_idx: int) -> str:
    """Path of the receipt of a shard."""
    return f"{WORK_FOLDER}/receipts/acts{shard_idx:06d}.json"


def token_rows_path(shard_idx: int) -> str:
    """Path of the token rows of a shard."""
    return f"{WORK_FOLDER}/tokens/{shard_name(shard_idx)}"


def owner_path(rank: int) -> str:
    """Path of the document that names the writer of a part."""
    return f"{WORK_FOLDER}/owners/part{rank:05d}.json"


class Folder:
    """A store's folder.

    Attributes:
        transport: Reads and writes it.
        name: Its name below the transport's root; `""` where the root is the store.
        url: Its full address.
        is_far: Whether files are sent to a service: each request takes long, and a file appears only when it is complete.
    """

    def __init__(self, transport: Transport, name: str) -> None:
        self.transport, self.name = transport, name
        self.url = f"{transport.url}/{name}" if name else transport.url
        self.is_far = not transport.moves
        self._prefix = f"{name}/" if name else ""

    @property
    def writes(self) -> Transport:
        """The transport."""
        return self.transport

    def path(self, path: str) -> str:
        """A file's path below the transport's root."""
        return f"{self._prefix}{path}"

    def where(self, path: str) -> str:
        """The full address of a file, for messages."""
        return f"{self.url}/{path}"

    def read(self, path: str, *, max_bytes: int = MAX_DOCUMENT_BYTES) -> bytes | None:
        """A small file; None where there is none. Without hard links a kill can leave an empty one."""
        try:
            return self.transport.read(f"{self._prefix}{path}", max_bytes=max_bytes)
        except NotFoundError:
            return None

    def size(self, path: str) -> int | None:
        """The size of a file, or None where there is none."""
        try:
            return self.transport.size(f"{self._prefix}{path}")
        except NotFoundError:
            return None

    def exists(self, path: str) -> bool:
        return self.size(path) is not None

    def get_range(self, path: str, start: int, end: int) -> Buffer:
        """A range of a file."""
        return self.transport.get_ranges(f"{self._prefix}{path}", starts=[start], ends=[end])[0]

    def put(self, path: str, data: Buffer) -> None:
        self.writes.put(f"{self._prefix}{path}", data)

    def create(self, path: str, data: Buffer) -> Literal["ours", "same", "taken"]:
        """Create a small file, and tell whether it is ours.

        The response to a successful request can be lost, so after an error the file is read back. The same bytes are ours
        if they carry an attempt's identity; otherwise another writer may have created them.
        """
        try:
            self.writes.create(f"{self._prefix}{path}", data)
        except (StoreExistsError, TransportError, NotFoundError):
            found = self.read(path)
            if found == b"" and not self.is_far:  # of a kill where there are no hard links
                self.put(path, data)
                found = self.read(path)
                return "ours" if found == bytes(data) else "taken"
            if found is None:
                raise
            return "same" if found == bytes(data) else "taken"
        return "ours"

    def delete(self, path: str) -> None:
        self.writes.delete(f"{self._prefix}{path}")

    def open_sink(self, path: str, *, used_nbytes: int, file_nbytes: int, resume: bool = False) -> Sink:
        """A large file, from scratch unless `resume`: then an old one is deleted, or (in a bucket) replaced by committing."""
        writes, path = self.writes, f"{self._prefix}{path}"
        if not resume and not self.is_far:
            with contextlib.suppress(StoreExistsError):
                return writes.open_sink(path, used_nbytes=used_nbytes, file_nbytes=file_nbytes)
            writes.delete(path)
        return writes.open_sink(path, used_nbytes=used_nbytes, file_nbytes=file_nbytes, resume=resume or self.is_far)

    def each(self, ask: Callable[[S], T], items: Sequence[S], *, most_nbytes: int = 0) -> Generator[T]:
        """Read something about each of many items, in order: several at once from a service, one by one from a disk.

        An error is raised in the place of its item. `ask` must not change anything: some calls may still run afterwards.

        Args:
            ask: Reads; called in other threads.
            items: Its arguments.
            most_nbytes: Length of the longest answer.
        """
        if self.transport.is_local:
            yield from map(ask, items)
        else:
            yield from ahead(ask, items, max(1, min(MOST_AHEAD, _AHEAD_BYTES // max(1, most_nbytes))))

    def together(self, *calls: Callable[[], T]) -> list[T]:
        """Make independent requests: at once to a service, one after the other on a disk.

        To a service all are made, and the first error in this order is raised when all are done. A disk stops at the first.
        """
        if self.transport.is_local or not self.is_far:
            return [call() for call in calls]
        with ThreadPoolExecutor(max(1, len(calls))) as pool:
            futures = [pool.submit(call) for call in calls]
        return [future.result() for future in futures]

    def digests(self, path: str, ranges: Sequence[tuple[int, int]]) -> Generator[str]:
        """The digest of each of some ranges of a file, in order."""

        def read(wanted: tuple[int, int]) -> str:
            return digest(memoryview(self.get_range(path, *wanted)))

        return self.each(read, ranges, most_nbytes=max((end - start for start, end in ranges), default=0))

    def first_difference(
        self, path: str, written: FileDigests, block_bytes: int, bar: Progress | None = None
    ) -> tuple[int, int] | None:
        """The byte range of the first block that is not what was written; None where all are."""
        blocks = list(block_ranges(written.nbytes, block_bytes))
        with contextlib.closing(self.digests(path, blocks)) as found:
            for block, is_there, was_written in zip(blocks, found, written.digests, strict=True):
                if is_there != was_written:
                    return block
                if bar is not None:
                    bar.advance(block[1] - block[0])
        return None

    def is_as_written(self, path: str, written: FileDigests, block_bytes: int, bar: Progress | None = None) -> bool:
        """Whether a file can be read and holds what was written, block by block."""
        try:
            return self.first_difference(path, written, block_bytes, bar) is None
        except SaevStoreError:
            return False

    def move(self, path: str, to: str) -> None:
        """Move a file, replacing what is there. Only on a disk: does nothing if `is_far`."""
        if self.transport.moves:
            self.transport.move(self.path(path), self.path(to))

    def lock(self, what: str) -> AbstractContextManager[object]:
        return self.writes.lock(f"{self._prefix}{WORK_FOLDER}/locks/{what}.lock")

    def lock_is_real(self, what: str) -> bool:
        """Whether a lock that is held now keeps others out: taking it once more must fail."""
        try:
            with self.lock(what):
                return False
        except WriterConflictError:
            return True

    def entries(self, path: str = "") -> Sequence[Entry] | None:
        """What is directly in the folder, or in one below it; None where the back end cannot list or may not."""
        try:
            return self.transport.list(f"{self._prefix}{path}".rstrip("/"))
        except NotFoundError:
            return ()
        except AccessError:
            return None

    def names(self, path: str = "") -> Sequence[str] | None:
        """The names of the `entries`."""
        entries = self.entries(path)
        return None if entries is None else [entry.name for entry in entries]


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
    """The claim in a folder, None where there is none; `IncompleteStoreError` if this version does not understand it."""
    raw = folder.read(CLAIM_PATH)
    return parse_claim(raw, folder) if raw else None


#: Parts of a store. Each has a lock, and a file name with five digits.
MAX_WORLD = 99_999


def parse_claim(raw: bytes, folder: Folder) -> Claim:
    """The claim in a document; `IncompleteStoreError` if this version does not understand it."""
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
            and 0 < world <= MAX_WORLD
        ):
            raise TypeError("a value has the wrong type")
    except (ValueError, KeyError, TypeError, RecursionError) as error:
        raise IncompleteStoreError(
            f"the claim of an unfinished store cannot be understood: {error}",
            where=folder.where(CLAIM_PATH),
            remedy="If no process is writing there, delete the folder and start again.",
        ) from error
    return Claim(metadata, ShapingOptions(pad, block_bytes, world))


@dataclass(frozen=True)
class Owner:
    """A document that names the attempt that owns something: a store, one of its parts, or its publication.

    Attributes:
        path: The document.
        about: Further keys of the document.
        attempt: The identity of this attempt.
    """

    folder: Folder
    path: str
    about: Mapping[str, object] = field(default_factory=dict[str, object])
    attempt: str = field(default_factory=partial(secrets.token_hex, 8))

    def take(self, *, over: bool = False) -> bool:
        """Become the owner; False where there is one, unless it is taken `over` from an attempt that has crashed."""
        attempt = {"attempt": self.attempt, "pid": os.getpid(), "host": socket.gethostname()}
        document = {"version": VERSION, **self.about, **attempt, **({"has_overtaken": True} if over else {})}
        raw = json.dumps(document, indent=1).encode()
        if over:
            self.folder.put(self.path, raw)
        return over or self.folder.create(self.path, raw) != "taken"

    def holder(self) -> Mapping[str, object]:
        """The document that is there; an empty one where there is none or where it is damaged."""
        try:
            document = cast("object", json.loads(self.folder.read(self.path) or b"{}"))
        except (ValueError, RecursionError):
            document = {}
        return cast("dict[str, object]", document) if isinstance(document, dict) else {}

    def is_holder(self) -> bool:
        """Whether the document that is there is that of this attempt."""
        return self.holder().get("attempt") == self.attempt

    def check(self) -> None:
        """Raise `WriterConflictError` if a later attempt has taken over, or the store was published or discarded."""
        holder = self.holder()
        if holder.get("attempt") == self.attempt:
            return
        if not holder and not self.folder.read(self.path):
            raise self.superseded()
        raise WriterConflictError(
            f"process {holder.get('pid')} on {holder.get('host')} has taken over and is the owner now",
            where=self.folder.where(self.path),
            remedy="Let only one writer live; open the store when that one is done.",
        )

    def superseded(self) -> WriterConflictError:
        """The error for a store that was published or discarded meanwhile."""
        return WriterConflictError(
            "the store was published or discarded while this writer was at work",
            where=self.folder.where(WORK_FOLDER),
            remedy="Open the store to see what is there; nothing of this writer was added since its last checkpoint.",
        )


def check_no_foreigner(folder: Folder, names: Sequence[str] | None) -> None:
    """Refuse a folder that holds files but nothing of this package; `names` are None where they cannot be listed."""
    if names is None:  # look for what a store of any tool begins with
        names = [name for name in (shard_name(0), SHARDS_NAME, LABELS_NAME) if folder.exists(name)]
    found = sorted(name for name in names if name != WORK_FOLDER and not name.startswith(TEMPORARY))
    if found:
        shown = ", ".join(found[:3]) + (", …" if len(found) > 3 else "")
        raise IncompleteStoreError(
            f"the folder holds {shown}, but neither metadata.json nor a claim of this package: "
            "most likely another tool's dump that was cut short",
            where=folder.url,
            remedy="It cannot be resumed, and is never overwritten: move it away, or write elsewhere.",
        )
