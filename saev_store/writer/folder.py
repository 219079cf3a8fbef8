"""One store's folder below a transport's root, and the names that exist in it only while it is being written."""

from __future__ import annotations

import contextlib
from collections import deque
from collections.abc import Callable, Generator, Sequence
from concurrent.futures import Future
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Literal, TypeVar

from saev_store._runtime.threads import ahead, share
from saev_store.core.layout import shard_name
from saev_store.errors import (
    AccessError,
    NotFoundError,
    ReadOnlyError,
    StoreExistsError,
    TransportError,
    WriterConflictError,
)
from saev_store.names import CLAIM_PATH, DIGESTS_NAME, LABELS_NAME, METADATA_NAME, SHARDS_NAME, WORK_FOLDER
from saev_store.transport import Buffer, Lists, Moves, Sink, Transport, Writes
from saev_store.writer._digests import MAX_DOCUMENT_BYTES, digest

S = TypeVar("S")
T = TypeVar("T")

METADATA, SHARDS, LABELS, DIGESTS = METADATA_NAME, SHARDS_NAME, LABELS_NAME, DIGESTS_NAME

#: Everything a writer needs only until the store is published. Readers ignore it; the last step removes it.
HIDDEN = WORK_FOLDER
CLAIM = CLAIM_PATH
LABELLED = f"{HIDDEN}/labelled.json"
PUBLISHER = f"{HIDDEN}/publisher.json"
REPAIR = f"{HIDDEN}/repair"
#: Where labels.bin is built on a disk.
BUILDING_LABELS = f"{HIDDEN}/labels.bin"

#: Files that a crashed process left half-written start with this.
TEMPORARY = ".saev_store.tmp-"

#: Requests of one kind in flight, and how much memory their answers may take.
MOST_AHEAD, _AHEAD_BYTES = 32, 64 << 20


def receipt_path(shard_idx: int) -> str:
    """Path of the receipt of a shard."""
    return f"{HIDDEN}/receipts/acts{shard_idx:06d}.json"


def label_part_path(shard_idx: int) -> str:
    """Path of the labels of a shard."""
    return f"{HIDDEN}/labels/{shard_name(shard_idx)}"


def owner_path(rank: int) -> str:
    """Path of the document that names the writer of a part."""
    return f"{HIDDEN}/owners/part{rank:05d}.json"


@dataclass(frozen=True)
class Folder:
    """A store's folder: a transport plus the folder's name below the root (`""` where the root is the store)."""

    transport: Transport
    name: str

    @property
    def writes(self) -> Writes:
        """The transport's write half.

        Raises:
            ReadOnlyError: it has none.
        """
        if not isinstance(self.transport, Writes):
            raise ReadOnlyError(
                f"the engine {self.transport.name!r} only reads",
                where=self.transport.url,
                remedy="Write to a local folder, or to a bucket through fsspec.",
            )
        return self.transport

    @property
    def url(self) -> str:
        return f"{self.transport.url}/{self.name}" if self.name else self.transport.url

    def path(self, path: str) -> str:
        return f"{self.name}/{path}" if self.name else path

    def where(self, path: str) -> str:
        """The full address of a file, for messages."""
        return f"{self.url}/{path}"

    def read_or_none(self, path: str, *, max_bytes: int = MAX_DOCUMENT_BYTES) -> bytes | None:
        try:
            return self.transport.read(self.path(path), max_bytes=max_bytes)
        except NotFoundError:
            return None

    def document(self, path: str) -> bytes | None:
        """A small document; None where there is none, or where a kill has left an empty file (without hard links)."""
        return self.read_or_none(path) or None

    def size(self, path: str) -> int | None:
        """The size of a file, or None where there is none."""
        try:
            return self.transport.size(self.path(path))
        except NotFoundError:
            return None

    def exists(self, path: str) -> bool:
        return self.size(path) is not None

    def get_range(self, path: str, start: int, end: int) -> Buffer:
        return self.transport.get_ranges(self.path(path), starts=[start], ends=[end])[0]

    def put(self, path: str, data: Buffer) -> None:
        self.writes.put(self.path(path), data)

    def create(self, path: str, data: Buffer) -> Literal["ours", "same", "taken"]:
        """Create a small file, and tell whether it is ours.

        The response to a successful request can be lost, so after an error the file is read back. The same bytes are ours
        if they carry an attempt's identity; otherwise another writer may have created them.
        """
        try:
            self.writes.create(self.path(path), data)
        except (StoreExistsError, TransportError, NotFoundError):
            found = self.read_or_none(path)
            if found == b"" and not self.is_far:  # of a kill where there are no hard links
                self.put(path, data)
                found = self.read_or_none(path)
                return "ours" if found == bytes(data) else "taken"
            if found is None:
                raise
            return "same" if found == bytes(data) else "taken"
        return "ours"

    def delete(self, path: str) -> None:
        self.writes.delete(self.path(path))

    @property
    def is_far(self) -> bool:
        """Whether files are sent to a service: each request takes long, and a file appears only when it is complete."""
        return not isinstance(self.transport, Moves)

    def open_sink(self, path: str, *, used_nbytes: int, file_nbytes: int, resume: bool = False) -> Sink:
        """A large file, from scratch unless `resume`: then an old one is deleted, or (in a bucket) replaced by committing."""
        writes, path = self.writes, self.path(path)
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
            return ahead(ask, items, 1)
        return ahead(ask, items, max(1, min(MOST_AHEAD, _AHEAD_BYTES // max(1, most_nbytes))))

    def together(self, *calls: Callable[[], T]) -> list[T]:
        """Make independent requests: at once to a service, one after the other on a disk.

        To a service all are made, and the first error in this order is raised when all are done; a disk stops at the first.
        """
        if self.transport.is_local or not self.is_far:
            return [call() for call in calls]
        answers: list[Future[T]] = [Future() for _ in calls]

        def make(number: int) -> None:
            try:
                answers[number].set_result(calls[number]())
            except BaseException as error:
                answers[number].set_exception(error)

        share(make, deque(range(len(calls))), len(calls))
        return [answer.result() for answer in answers]

    def digests(self, path: str, ranges: Sequence[tuple[int, int]]) -> Generator[str]:
        """The digest of each of some ranges of a file, in order."""

        def read(wanted: tuple[int, int]) -> str:
            return digest(memoryview(self.get_range(path, *wanted)))

        return self.each(read, ranges, most_nbytes=max((end - start for start, end in ranges), default=0))

    def lock(self, what: str) -> AbstractContextManager[object]:
        return self.writes.lock(self.path(f"{HIDDEN}/locks/{what}.lock"))

    def lock_is_real(self, what: str) -> bool:
        """Whether a lock that we hold now keeps others out: taking it once more must fail."""
        try:
            with self.lock(what):
                return False
        except WriterConflictError:
            return True

    def names(self) -> Sequence[str] | None:
        """The names directly in the folder, or None where the back end cannot list or may not."""
        if not isinstance(self.transport, Lists):
            return None
        try:
            entries = self.transport.list(self.name)
        except NotFoundError:
            return ()
        except AccessError:
            return None
        return [entry.path.rstrip("/").rsplit("/", 1)[-1] for entry in entries]
