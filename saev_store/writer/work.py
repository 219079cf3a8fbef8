"""An unfinished store: its folder, the work folder next to it, and one receipt for each shard that is durable.

```text
<root>/<HASH>/acts000123.bin                           the shard, at its place
<root>/.saev_store/<HASH>/metadata.json                what will be published
<root>/.saev_store/<HASH>/receipts/000123.json         the shard is durable: its size and digests
<root>/.saev_store/<HASH>/tokens/<array>/000123.bin    what was recorded for its tokens
<root>/.saev_store/<HASH>/locks/000123.lock            held while the shard is written
```

What is published follows from the receipts alone, so any process can finish what others began, and several may try at once.
"""

from __future__ import annotations

import json
import os
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext, suppress
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Any, TypeVar, cast

from saev_store._runtime.threads import ahead
from saev_store.core.layout import shard_name
from saev_store.errors import (
    IncompleteStoreError,
    NotFoundError,
    SaevStoreError,
    StoreExistsError,
    TransportError,
    WriterConflictError,
)
from saev_store.names import METADATA_NAME, WORK_FOLDER
from saev_store.transport import Sink, Transport
from saev_store.transport.durable import TEMP_PREFIX
from saev_store.writer.digests import BLOCK_BYTES, MAX_DOCUMENT_BYTES, FileDigests, digest, is_digest, n_blocks

if TYPE_CHECKING:
    from saev_store.core.token_arrays import TokenArray
    from saev_store.documents import Metadata


S = TypeVar("S")
T = TypeVar("T")

VERSION = 1
#: Small requests to a service that are made at once.
N_AHEAD = 32
_N_TRIES = 20


def stat(place: Transport, path: str) -> tuple[int, str]:
    """The size of a file, and its version in a bucket ("" where the service does not name one, and on a disk)."""
    nbytes, version = place.stat(path)
    return nbytes, "" if place.local_path is not None else version


def read(place: Transport, path: str, *, max_bytes: int = MAX_DOCUMENT_BYTES) -> bytes | None:
    """A small file; None where there is none, or an empty one: a kill can leave that where there are no hard links."""
    try:
        return bytes(place.read(path, max_bytes=max_bytes)) or None
    except NotFoundError:
        return None


def create(place: Transport, path: str, data: bytes) -> bool:
    """Create a small file, unless it is there with the same bytes: then False.

    The answer to a creation that succeeded can be lost, so after an error the file is read back.

    Raises:
        StoreExistsError: the name is taken by a file of other bytes.
    """
    try:
        place.create(path, data)
    except (StoreExistsError, TransportError) as error:
        there = read(place, path)
        if there == data:
            return False
        if there is not None or not isinstance(error, StoreExistsError):
            raise
        place.put(path, data)  # an empty file, of a kill
    return True


def each(place: Transport, ask: Callable[[S], T], items: Sequence[S]) -> list[T]:
    """The answers about many items, in order: several at once from a service, one by one from a disk."""
    return [*map(ask, items)] if place.local_path is not None else [*ahead(ask, items, N_AHEAD)]


def delete_work(root: Transport, name: str) -> None:
    """Delete the work folder of a store that is published or gone, and the folder of all work folders if it is empty."""
    root.delete(f"{WORK_FOLDER}/{name}")
    if root.local_path is not None:
        with suppress(OSError):  # other stores are written
            os.rmdir(f"{root.local_path}/{WORK_FOLDER}")


def part_shards(n_shards: int, rank: int, world: int) -> range:
    """The shards that one of `world` parts writes: contiguous, disjoint, together all, sizes at most one apart."""
    return range(n_shards * rank // world, n_shards * (rank + 1) // world)


@dataclass(frozen=True)
class Receipt(FileDigests):
    """One shard, whole and durable: its entry in digests.json, and the length of its file.

    `tokens` has the digest of what was recorded for each token array; `version` is the ETag of the file in a bucket, or "".
    """

    file_nbytes: int
    tokens: Mapping[str, str]
    version: str


class Target(ABC):
    """Purpose of written shards: a new store, or the repair of one. `arrays` are appended for each content token."""

    def __init__(self, store: Transport, metadata: Metadata, block_bytes: int) -> None:
        self.store, self.metadata, self.block_bytes = store, metadata, block_bytes
        # A disk has locks and renames; in a bucket a file appears when it is complete.
        self.url, self.layout, self.is_disk = store.url, metadata.layout, store.local_path is not None
        self.arrays: Sequence[TokenArray] = metadata.recordable

    def lock(self, what: str) -> AbstractContextManager[object]:  # noqa: ARG002  # a repair has one lock for all
        """Hold a lock; `WriterConflictError` if another process does."""
        return nullcontext()

    def check(self, shard_idx: int) -> None:  # noqa: B027  # likewise
        """Look, under the lock of a shard, whether it still has to be written; `WriterConflictError` if not."""

    @abstractmethod
    def open_shard(self, shard_idx: int) -> Sink:
        """The file of a shard."""

    @abstractmethod
    def finish_shard(self, shard_idx: int, sink: Sink, digests: Sequence[str], tokens: Mapping[str, bytes]) -> None:
        """Commit the file of a shard, and record it with what belongs to its tokens."""


class Work(Target):
    """An unfinished store in a folder of stores; its name is the hash of the metadata if it is "". `work` is the work folder."""

    def __init__(self, root: Transport, metadata: Metadata, *, name: str = "", block_bytes: int = BLOCK_BYTES) -> None:
        self.name = name or metadata.hash
        super().__init__(root.at(self.name), metadata, block_bytes)
        self.work, self._root = root.at(f"{WORK_FOLDER}/{self.name}"), root

    def lock(self, what: str) -> AbstractContextManager[object]:
        """Hold a lock; `WriterConflictError` if another process does. Nothing in a bucket."""
        return self.work.lock(f"locks/{what}.lock")

    def is_published(self) -> bool:
        """Return True if metadata.json is there; `StoreExistsError` if it is another one."""
        there = read(self.store, METADATA_NAME)
        if there not in (None, self.metadata.raw):
            raise StoreExistsError(
                "another store of that name, with other metadata, is there",
                where=f"{self.url}/{METADATA_NAME}",
                remedy="Open it to see what it is; write elsewhere, or change the metadata.",
            )
        return there is not None

    def begin(self) -> tuple[bool, Sequence[str]]:
        """Begin the store; False if it was begun before, and the names that its work folder had. Files of others are refused."""
        there, begun = each(self.store, names, (self.store, self.work))
        if METADATA_NAME in there and self.is_published():
            raise StoreExistsError("the store is complete", where=self.url)
        foreign = [name for name in there if not name.startswith(TEMP_PREFIX)]
        # Of what was begun before, the document may be gone: of a killed `discard_unfinished`.
        if foreign and not begun:
            raise refused(self.url, foreign)
        return self.claim(), begun

    def claim(self) -> bool:
        """Create the document of the work folder; False if it was there. `StoreExistsError` if it is another one."""
        for _ in range(_N_TRIES):
            with suppress(NotFoundError):  # another store's writer has just removed the folder of all work folders
                return create(self.work, METADATA_NAME, self.metadata.raw)
        return create(self.work, METADATA_NAME, self.metadata.raw)

    def remove(self) -> None:
        """Delete the work folder; what cannot be deleted does no harm once the store is published."""
        with suppress(SaevStoreError):
            delete_work(self._root, self.name)

    # -- shards --------------------------------------------------------------------------------------------------------

    def receipt(self, shard_idx: int) -> Receipt | None:
        """The receipt of a shard; None if it has to be written: there is none, or it is not one of a shard of this geometry."""
        used, full = self.layout.used_nbytes(shard_idx), self.layout.shard_nbytes
        try:
            found = cast("dict[str, Any]", json.loads(read(self.work, f"receipts/{shard_idx:06d}.json") or b""))
            digests, tokens = tuple(found["digests"]), found["tokens"]
            is_right = (
                found["format"] == VERSION
                and found["nbytes"] == used
                and found["file_nbytes"] in (used, full)
                and len(digests) == n_blocks(used, self.block_bytes)
                and tokens.keys() in (set[str](), {array.name for array in self.arrays})
                and all(map(is_digest, (*digests, *tokens.values())))
                and isinstance(found["version"], str)
            )
        except (ValueError, KeyError, TypeError, AttributeError, RecursionError):
            return None
        return Receipt(used, digests, found["file_nbytes"], tokens, found["version"]) if is_right else None

    def receipts(self, shards: Sequence[int]) -> dict[int, Receipt]:
        """The receipts of those of some shards that are durable, in order."""
        there = set(names(self.work, "receipts"))
        begun = [shard_idx for shard_idx in shards if f"{shard_idx:06d}.json" in there]
        found = zip(begun, each(self.store, self.receipt, begun), strict=True)
        return {shard_idx: receipt for shard_idx, receipt in found if receipt is not None}

    def check(self, shard_idx: int) -> None:
        """Look, under the lock of a shard, whether it still has to be written; `WriterConflictError` if not."""
        if self.is_published():
            self.remove()  # the lock that was just made
            raise conflict("the store was published", self.url, "Open it.")
        if self.is_disk and read(self.work, METADATA_NAME) != self.metadata.raw:
            raise conflict("the unfinished store was discarded", self.url, "Create it again.")
        if self.is_disk and self.receipt(shard_idx) is not None:
            raise conflict(f"shard {shard_idx} was written", self.url, "Create the writer again with resume=True.")

    def open_shard(self, shard_idx: int) -> Sink:
        """The file of a shard. In a bucket an old one stays until it is committed: it may be that of a store just published."""
        used = self.layout.used_nbytes(shard_idx)
        file_nbytes = self.layout.shard_nbytes if self.is_disk else used  # zeros at the end are a hole on a disk
        return self.store.open_sink(shard_name(shard_idx), used_nbytes=used, file_nbytes=file_nbytes, replace=True)

    def finish_shard(self, shard_idx: int, sink: Sink, digests: Sequence[str], tokens: Mapping[str, bytes]) -> None:
        """Make a shard durable, then record it."""
        if not self.is_disk:  # there is no lock: the last moment to see that the store was published
            self.check(shard_idx)
        sink.commit()
        self.record(shard_idx, digests, tokens)

    def record(self, shard_idx: int, digests: Sequence[str], tokens: Mapping[str, bytes]) -> None:
        """Record that a shard is durable, with what belongs to its tokens."""
        for name, rows in tokens.items():
            self.work.put(tokens_path(name, shard_idx), rows)
        file_nbytes, version = stat(self.store, shard_name(shard_idx))
        of_tokens = {name: digest(rows) for name, rows in tokens.items()}
        receipt = Receipt(self.layout.used_nbytes(shard_idx), tuple(digests), file_nbytes, of_tokens, version)
        self.work.put(f"receipts/{shard_idx:06d}.json", json.dumps({"format": VERSION, **asdict(receipt)}).encode())

    def read_tokens(self, array: TokenArray, shard_idx: int, receipt: Receipt) -> bytes | None:
        """Values recorded for the tokens of a shard; None if they are missing, or are something else."""
        nbytes = self.layout.examples_in(shard_idx) * array.example_nbytes(self.layout)
        raw = read(self.work, tokens_path(array.name, shard_idx), max_bytes=nbytes)
        return raw if raw is not None and digest(raw) == receipt.tokens[array.name] else None


def tokens_path(name: str, shard_idx: int) -> str:
    """Path, in the work folder, of what was recorded of a token array for a shard."""
    return f"tokens/{name}/{shard_idx:06d}.bin"


def conflict(message: str, where: str, remedy: str) -> WriterConflictError:
    """The error of a writer that another process has overtaken."""
    return WriterConflictError(f"{message} by another process", where=where, remedy=remedy)


def names(place: Transport, path: str = "") -> list[str]:
    """The names in a folder; empty where there is none."""
    try:
        return [entry.name for entry in place.list(path)]
    except NotFoundError:
        return []


def refused(url: str, foreign: Sequence[str]) -> IncompleteStoreError:
    """The error for a folder that this version cannot continue."""
    if WORK_FOLDER in foreign:
        return IncompleteStoreError(
            "an older version of this package has begun this store; its format is not continued",
            where=url,
            remedy="Finish it with that version, or throw it away: `saev-store clean`.",
        )
    return IncompleteStoreError(
        f"the folder holds {foreign[0]} and no metadata.json: another program's unfinished store",
        where=url,
        remedy="Finish it with that program, or move the folder away.",
    )
