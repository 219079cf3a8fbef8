"""The one seam between us and bytes: small protocols that a back end satisfies by shape alone.

A *path* is always relative to the transport's root, uses `/`, and was computed by us or checked: it never comes
unchecked from a file. Reading is the only capability everybody has; filling the caller's memory, listing and
writing are separate protocols that a consumer asks for with `isinstance`.

Every implementation raises only errors of `saev_store.errors`: `NotFoundError`, `AccessError`, `TransportError`
(`DeadlineError` for time-outs), `ForkError`, and `CorruptShardError` when a file ends before a range does.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from typing import Protocol, runtime_checkable

Buffer = bytes | bytearray | memoryview


@dataclass(frozen=True, slots=True)
class ReadCost:
    """When two neighbouring ranges are better read as one.

    Attributes:
        max_gap_bytes: Reading this many unneeded bytes costs no more than another request.
        max_request_bytes: A merged range never grows past this.
        piece_bytes: A longer range travels as several requests of this size, side by side.
    """

    max_gap_bytes: float
    max_request_bytes: float
    piece_bytes: float = math.inf


#: Ranges are views of memory that is mapped already: one span per shard, gaps are never touched.
FREE = ReadCost(math.inf, math.inf)

#: What clients of object stores reckon with: 30 ms to the first byte, 64 requests on their way together, 1 Gbit/s for all.
_LATENCY_S, IN_FLIGHT, _BYTES_PER_S = 0.03, 64, 125e6


def far_cost(*, cpu_s: float, piece_bytes: float = math.inf) -> ReadCost:
    """What reading costs over a network: a gap is read along as long as its bytes take less time than a request of its own.

    With many requests on their way together a request holds the others up by its share of the latency, and by the work
    that this machine has with it.

    Args:
        cpu_s: Seconds of this machine for one request.
        piece_bytes: As in `ReadCost`.

    >>> far_cost(cpu_s=0.0).max_gap_bytes
    58593.75
    """
    return ReadCost((_LATENCY_S / IN_FLIGHT + cpu_s) * _BYTES_PER_S, 16 << 20, piece_bytes)


@dataclass(frozen=True, slots=True)
class Counters:
    """What a transport has done so far; what a client tries again by itself is not counted.

    Attributes:
        requests: Requests to a server, system calls on files: a range that is fetched in pieces is one for each piece, one
            that is empty is none.
        bytes_read: Bytes handed out (of a mapped file: made visible).
        bytes_written: Bytes taken in.
        operations: Requests by kind, such as `{"read": 2, "get_ranges": 1, "sink.write": 3}`.
    """

    requests: int = 0
    bytes_read: int = 0
    bytes_written: int = 0
    operations: Mapping[str, int] = field(default_factory=dict[str, int])


@dataclass(frozen=True, slots=True)
class Entry:
    """One name found by `Lists.list`.

    Attributes:
        path: Relative to the transport's root.
        is_dir: Whether it is a folder.
        size: Bytes; None for folders.
        modified_s: When it was last written, in seconds since 1970; None where that is not told.
    """

    path: str
    is_dir: bool
    size: int | None
    modified_s: float | None = None


@runtime_checkable
class Transport(Protocol):
    """Reads whole small files and ranges of big ones, below one root.

    Attributes:
        url: Where the root is, safe to show: no credentials, no trailing slash.
        cost: What the read planner needs to know.
        name: The engine, such as `"mmap"` or `"fsspec:s3"`, shown on the card.
        counters: What was done so far, by this transport and those that share its client.
    """

    @property
    def url(self) -> str: ...
    @property
    def cost(self) -> ReadCost: ...
    @property
    def name(self) -> str: ...
    @property
    def counters(self) -> Counters: ...

    def read(self, path: str, *, max_bytes: int | None = None) -> bytes:
        """The whole of a small file; a file longer than `max_bytes` is a `TransportError`, before it is loaded where possible."""
        ...

    def size(self, path: str) -> int:
        """The size of a file in bytes."""
        ...

    def get_ranges(self, path: str, *, starts: Sequence[int], ends: Sequence[int]) -> Sequence[Buffer]:
        """One read-only buffer per half-open range, in order, each exactly `end - start` bytes long.

        Memory belongs to the buffers; a mapped transport returns views that keep the map alive.
        """
        ...

    def close(self) -> None:
        """Release descriptors and maps that nobody views any more; using the transport afterwards reopens them."""
        ...


@runtime_checkable
class ReadsInto(Protocol):
    """Fills memory that the caller owns (`preadv` locally, one copy elsewhere)."""

    def readinto(self, path: str, *, start: int, buffers: Sequence[memoryview]) -> None:
        """Fill all `buffers`, one after the other, from the bytes that begin at `start`; never returns short."""
        ...


@runtime_checkable
class ReadsRuns(Protocol):
    """Fills memory from many places of one file in one call, where a call for each would cost as much as its bytes."""

    def read_runs(self, path: str, *, starts: Sequence[int], buffers: Sequence[memoryview]) -> None:
        """Fill each buffer from the bytes that begin at its start; never returns short."""
        ...


@runtime_checkable
class LendsRuns(Protocol):
    """Shows the bytes of many places of one file where they arrived, to whoever copies them elsewhere anyway."""

    def lend_runs(
        self, path: str, *, starts: Sequence[int], ends: Sequence[int], take: Callable[[int, Buffer], None]
    ) -> None:
        """Call `take(number, bytes)` for each range, in this thread, whole, in any order; they may be gone when it returns.

        After an error some may have been taken.
        """
        ...


class Fetcher(Protocol):
    """Fetches ranges ahead of time, in threads of its own."""

    def fetch(
        self, path: str, *, start: int, end: int, item_nbytes: int, take: Callable[[int, Buffer], None],
        done: Callable[[bool], None],
    ) -> bool:  # fmt: skip
        """Ask for a range and return; False, and nothing is done, where the range had better be read in another way.

        `take(at, bytes)` is called in one of the fetcher's threads, with whole items of `item_nbytes` in their order; what it
        is shown may be gone when it returns. `done` is called once, last: with False where not all was taken, for whatever
        reason. The range is to be read in another way then, which has errors with names.
        """
        ...

    def close(self) -> None:
        """Ask for nothing more. `done` is called for all that is under way, before `is_alive` ends."""
        ...

    def join(self, deadline: float) -> None:
        """Wait for the threads until `time.monotonic()` is `deadline`."""
        ...

    @property
    def is_alive(self) -> bool:
        """Whether `take` may still be called."""
        ...


@runtime_checkable
class FetchesAhead(Protocol):
    """Can be asked for ranges before anybody waits for them, where the way to the server is simple enough."""

    def open_fetcher(self, *, in_flight_bytes: int) -> Fetcher | None:
        """A fetcher, which belongs to whoever opened it and has no more bytes under way; None where there can be none."""
        ...


@runtime_checkable
class Nests(Protocol):
    """Has folders that can be roots of their own, through the same client."""

    def at(self, path: str) -> Transport:
        """The transport whose root is the folder `path`, which need not exist; `""` is the same root."""
        ...


@runtime_checkable
class Lists(Protocol):
    """Lists one level of names: only for finding stores below a root, never for reading one."""

    def list(self, path: str = "") -> Sequence[Entry]:
        """The names directly in the folder `path`, in any order."""
        ...


class Sink(Protocol):
    """One file under construction, written in blocks; its final size is known from the start."""

    def write(self, offset: int, buffers: Sequence[memoryview], done: Callable[[], object] | None = None) -> None:
        """Write the buffers one after the other at `offset`; they may be reused when it returns.

        With `done` they may not be reused before `done` is called, in any thread, also after an error: a sink may then send
        them without a copy.
        """
        ...

    def sync(self) -> int:
        """Make what was written survive a crash; the number of leading bytes that now do (0 where only `commit` persists)."""
        ...

    def keep(self, nbytes: int) -> None:
        """Count the first `nbytes` of a resumed file as written; the caller has verified them. Refused where `sync` gives 0."""
        ...

    def read_back(self, start: int, end: int) -> bytes:
        """What a resumed file holds in that range, to verify it; shorter than asked, or empty, where it is not there."""
        ...

    def commit(self) -> None:
        """The file is complete: make it durable under its name, exactly `file_nbytes` long.

        Raises:
            ArgumentError: some of `used_nbytes` were neither written nor kept; a hole would read as zeros.
        """
        ...

    def abort(self) -> None:
        """Release resources without committing; what `sync` promised stays."""
        ...


@runtime_checkable
class Writes(Protocol):
    """Creates, replaces and deletes files below the root."""

    def put(self, path: str, data: Buffer) -> None:
        """Create or replace a small file atomically and durably."""
        ...

    def create(self, path: str, data: Buffer) -> None:
        """Create a small file atomically, or raise `StoreExistsError` if the name is taken (also by a racing writer)."""
        ...

    def delete(self, path: str) -> None:
        """Delete a file, or a folder with all that is in it; deleting nothing is fine."""
        ...

    def open_sink(self, path: str, *, used_nbytes: int, file_nbytes: int, resume: bool = False) -> Sink:
        """Start a large file. With `resume`, continue it; where files cannot be continued, replace it on `commit`.

        `used_nbytes` will be written, the rest up to `file_nbytes` reads as zeros (sparse where possible).

        Raises:
            StoreExistsError: a file lies there and `resume` is false; delete it first to start over.
            TransportError: there is not enough space for `used_nbytes`, as far as that can be known.
        """
        ...

    def lock(self, path: str) -> AbstractContextManager[object]:
        """Hold an advisory lock that dies with the process; `WriterConflictError` if another process holds it.

        Where a back end has no such thing it is a no-op, and publication alone decides.
        """
        ...

    @property
    def pads(self) -> bool:
        """True where a zero tail costs nothing (POSIX): the last shard is then written at full size by default."""
        ...


@dataclass(frozen=True, slots=True)
class UnfinishedUpload:
    """A multipart upload that was begun and neither completed nor aborted.

    Attributes:
        path: The file that it would become, relative to the transport's root.
        upload_id: The service's name for it.
        begun_s: When it was begun, in seconds since 1970; None where the service does not tell.
    """

    path: str
    upload_id: str
    begun_s: float | None


@runtime_checkable
class CleansUploads(Protocol):
    """Lists and aborts unfinished multipart uploads, which killed writers leave and which cost money."""

    def list_uploads(self, path: str = "") -> Sequence[UnfinishedUpload] | None:
        """The unfinished uploads of all files below the folder `path`; None where this client cannot list them."""
        ...

    def abort_upload(self, upload: UnfinishedUpload) -> None:
        """Abort an upload and delete its parts; an upload that no longer exists is fine."""
        ...


@runtime_checkable
class CopiesWithin(Protocol):
    """Copies files inside its service, without a byte passing through this machine."""

    def copy_within(self, source: Transport, source_path: str, path: str) -> bool:
        """Make `path` a copy of another transport's file; False, and nothing done, where only this machine can.

        That is the case where `source` is another service, or is opened with other options.
        """
        ...


@runtime_checkable
class Moves(Protocol):
    """Renames files atomically; object stores cannot, but there a large file appears only when it is complete anyway."""

    def move(self, source: str, target: str) -> None:
        """Give a finished file another name, durably; a file of that name is replaced, and readers see one or the other."""
        ...
