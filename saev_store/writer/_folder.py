"""One store's folder below a transport's root, and the names that exist in it only while it is being written."""

from __future__ import annotations

from collections.abc import Callable, Generator, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Literal, TypeVar

from saev_store._threads import ahead
from saev_store.errors import NotFoundError, ReadOnlyError, StoreExistsError, TransportError, WriterConflictError
from saev_store.layout import shard_name
from saev_store.transport._base import Buffer, Lists, Sink, Transport, Upload, Uploads, Writes
from saev_store.writer._blocks import digest

S = TypeVar("S")
T = TypeVar("T")

METADATA = "metadata.json"
SHARDS = "shards.json"
LABELS = "labels.bin"
DIGESTS = "digests.json"

#: Everything a writer needs only until the store is published. Readers ignore it; the last step removes it.
HIDDEN = ".saev_store"
CLAIM = f"{HIDDEN}/claim.json"
LABELLED = f"{HIDDEN}/labelled.json"
PUBLISHER = f"{HIDDEN}/publisher.json"
REPAIR = f"{HIDDEN}/repair"

#: Files that a crashed process left half-written start with this; nobody needs them.
TEMPORARY = ".saev_store.tmp-"

#: Our own small documents are never longer than this: nobody can make us load more by replacing one.
MAX_DOCUMENT_BYTES = 256 << 20

#: Questions about shards that are on their way together, where an answer takes long.
MOST_AHEAD = 32
#: What they may bring along is held in memory until its turn comes.
_AHEAD_BYTES = 64 << 20


def receipt_path(shard_idx: int) -> str:
    return f"{HIDDEN}/receipts/acts{shard_idx:06d}.json"


def tail_path(shard_idx: int, which: int) -> str:
    """Where what has not left in a part of the upload waits: two places, for one is replaced while the other counts."""
    return f"{HIDDEN}/tails/acts{shard_idx:06d}-{which}.bin"


def label_part_path(shard_idx: int) -> str:
    return f"{HIDDEN}/labels/{shard_name(shard_idx)}"


def owner_path(rank: int) -> str:
    return f"{HIDDEN}/owners/part{rank:05d}.json"


def lock_path(what: str) -> str:
    return f"{HIDDEN}/locks/{what}.lock"


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

    def read(self, path: str, *, max_bytes: int = MAX_DOCUMENT_BYTES) -> bytes:
        return self.transport.read(self.path(path), max_bytes=max_bytes)

    def read_or_none(self, path: str, *, max_bytes: int = MAX_DOCUMENT_BYTES) -> bytes | None:
        try:
            return self.read(path, max_bytes=max_bytes)
        except NotFoundError:
            return None

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

    def create(self, path: str, data: Buffer) -> bool:
        """Create a small file; False where something else lies under that name already. See `creation`."""
        return self.creation(path, data) != "taken"

    def creation(self, path: str, data: Buffer) -> Literal["ours", "same", "taken"]:
        """Create a small file, and say what came of it.

        A lost response must not count as a defeat: where creating fails, what lies there is read back. The same bytes
        are ours if they carry an attempt's identity; otherwise somebody else may have created them.
        """
        try:
            self.writes.create(self.path(path), data)
        except (StoreExistsError, TransportError, NotFoundError):
            found = self.read_or_none(path)
            if found is None:
                raise
            return "same" if found == bytes(data) else "taken"
        return "ours"

    def delete(self, path: str) -> None:
        self.writes.delete(self.path(path))

    def new_sink(self, path: str, *, used_nbytes: int, file_nbytes: int, block_bytes: int = 1) -> Sink | Upload:
        """A large file from scratch; what an earlier, crashed attempt left under that name is thrown away."""

        def opened() -> Sink | Upload:
            if isinstance(self.transport, Uploads):
                return self.transport.open_upload(
                    self.path(path), used_nbytes=used_nbytes, file_nbytes=file_nbytes, block_bytes=block_bytes
                )
            return self.writes.open_sink(self.path(path), used_nbytes=used_nbytes, file_nbytes=file_nbytes)

        try:
            return opened()
        except StoreExistsError:
            self.delete(path)
            return opened()

    def replacing_sink(self, path: str, *, used_nbytes: int, file_nbytes: int) -> Sink | Upload:
        """A large file from scratch; where that is one step, what lies under that name stays until the new one is complete."""
        if isinstance(self.transport, Uploads):
            return self.transport.open_upload(
                self.path(path), used_nbytes=used_nbytes, file_nbytes=file_nbytes, block_bytes=1, bookmark=""
            )
        return self.new_sink(path, used_nbytes=used_nbytes, file_nbytes=file_nbytes)

    def continued_upload(self, path: str, bookmark: str, *, used_nbytes: int, file_nbytes: int) -> Upload | None:
        """An upload that another process has begun; None where the back end has no uploads."""
        if not isinstance(self.transport, Uploads):
            return None
        return self.transport.open_upload(
            self.path(path), used_nbytes=used_nbytes, file_nbytes=file_nbytes, block_bytes=1, bookmark=bookmark
        )

    def drop_uploads(self) -> None:
        """Give up all unfinished uploads of files in this folder."""
        if isinstance(self.transport, Uploads):
            self.transport.drop_uploads(self.name)

    def resumed_sink(self, path: str, *, used_nbytes: int, file_nbytes: int) -> Sink:
        return self.writes.open_sink(self.path(path), used_nbytes=used_nbytes, file_nbytes=file_nbytes, resume=True)

    def each(self, ask: Callable[[S], T], items: Sequence[S], *, most_nbytes: int = 0) -> Generator[T]:
        """The answers to questions about many shards, in order: a service is asked several at once, a disk one by one.

        The error of the first item that has one comes out in its place. Only for questions: nothing that changes anything.

        Args:
            ask: The question; called in other threads.
            items: What to ask about.
            most_nbytes: The longest answer, where that matters.
        """
        if self.transport.is_local:
            return ahead(ask, items, 1)
        return ahead(ask, items, max(1, min(MOST_AHEAD, _AHEAD_BYTES // max(1, most_nbytes))))

    def digests(self, path: str, ranges: Sequence[tuple[int, int]]) -> Generator[str]:
        """The digest of each of some ranges of a file, in order."""

        def read(wanted: tuple[int, int]) -> str:
            return digest(memoryview(self.get_range(path, *wanted)))

        return self.each(read, ranges, most_nbytes=max((end - start for start, end in ranges), default=0))

    def lock(self, what: str) -> AbstractContextManager[object]:
        return self.writes.lock(self.path(lock_path(what)))

    def lock_is_real(self, what: str) -> bool:
        """Whether a lock that we hold now would stop anybody: taking it once more must fail."""
        try:
            with self.lock(what):
                return False
        except WriterConflictError:
            return True

    def names(self) -> Sequence[str] | None:
        """What lies directly in the folder, or None where the back end does not list."""
        if not isinstance(self.transport, Lists):
            return None
        try:
            entries = self.transport.list(self.name)
        except NotFoundError:
            return ()
        return [entry.path.rstrip("/").rsplit("/", 1)[-1] for entry in entries]
