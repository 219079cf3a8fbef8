"""The interface of storage back ends, as structural protocols.

A *path* is relative to the transport's root and uses `/`. It was computed by this package, or checked: it never comes
unchecked from a file. Every back end reads. Listing, writing and moving are separate protocols; callers test for them
with `isinstance`.

Every implementation raises only errors of `saev_store.errors`: `NotFoundError`, `AccessError`, `TransportError`
(`DeadlineError` for time-outs), `ForkError`, and `CorruptShardError` when a file ends before a range does.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from contextvars import ContextVar
from dataclasses import dataclass, field
from typing import Protocol, runtime_checkable

from saev_store._runtime.threads import Flag

Buffer = bytes | bytearray | memoryview

#: A flag that is set when what this thread reads is not wanted any more: requests to servers are then cancelled.
STOP: ContextVar[Flag | None] = ContextVar("saev_store.transport.STOP", default=None)


@dataclass(frozen=True, slots=True)
class ReadCost:
    """When two neighbouring ranges are cheaper to read as one.

    Attributes:
        max_gap_bytes: Reading this many unneeded bytes costs no more than another request.
        max_request_bytes: A merged range never grows past this.
        piece_bytes: A longer range is fetched in concurrent requests of this size.
    """

    max_gap_bytes: float
    max_request_bytes: float
    piece_bytes: float = math.inf


#: The cost of mapped memory: ranges are views, gaps are never touched.
FREE = ReadCost(math.inf, math.inf)

#: The network that `far_cost` assumes: 30 ms to the first byte, 64 requests in flight, 1 Gbit/s in total.
_LATENCY_S, IN_FLIGHT, _BYTES_PER_S = 0.03, 64, 125e6


def far_cost(*, cpu_s: float, piece_bytes: float = math.inf) -> ReadCost:
    """The cost of a network: reading a gap is cheaper than another request while its bytes take less time.

    With many requests in flight, one more request delays the others by its share of the latency and by the CPU time it
    costs on this machine.

    Args:
        cpu_s: CPU seconds of this machine for one request.
        piece_bytes: As in `ReadCost`.

    >>> far_cost(cpu_s=0.0).max_gap_bytes
    58593.75
    """
    return ReadCost((_LATENCY_S / IN_FLIGHT + cpu_s) * _BYTES_PER_S, 16 << 20, piece_bytes)


@dataclass(frozen=True, slots=True)
class Counters:
    """What a transport has done so far; retries inside a client are not counted.

    Attributes:
        requests: Requests to a server, or system calls on files. A range that is fetched in pieces counts once per piece,
            an empty one not at all.
        bytes_read: Bytes returned (of a mapped file: made visible).
        bytes_written: Bytes accepted for writing.
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
        modified_s: When it was last written, in seconds since 1970; None where the service does not tell.
    """

    path: str
    is_dir: bool
    size: int | None
    modified_s: float | None = None

    @property
    def name(self) -> str:
        """The last part of the path."""
        return self.path.rstrip("/").rpartition("/")[2]


@runtime_checkable
class Transport(Protocol):
    """Reads whole small files and ranges of large ones, below one root.

    Attributes:
        url: The root, safe to show: no credentials, no trailing slash.
        name: The engine, such as `"mmap"` or `"fsspec:s3"`, shown on the card.
        cost: What the read planner compares gaps and requests with.
        counters: Requests and bytes so far, of this transport and those that share its client.
        is_local: True where a request costs microseconds: files of this machine, memory of this process.
        local_path: The folder on this machine that is the root; None elsewhere.
        reads_into: True where `readinto` writes straight into the caller's memory. False where the bytes arrive in the
            client's memory and `readinto` copies them: `get_ranges` then saves a copy.
    """

    @property
    def url(self) -> str: ...
    @property
    def name(self) -> str: ...
    @property
    def cost(self) -> ReadCost: ...
    @property
    def counters(self) -> Counters: ...
    @property
    def is_local(self) -> bool: ...
    @property
    def local_path(self) -> str | None: ...
    @property
    def reads_into(self) -> bool: ...

    def at(self, path: str) -> Transport:
        """The transport whose root is the folder `path`, which need not exist; `""` is the same root."""
        ...

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

    def readinto(self, path: str, *, starts: Sequence[int], buffers: Sequence[memoryview]) -> None:
        """Fill each buffer from the bytes that begin at its start; never returns short.

        Buffers that follow each other in the file, in the order given, are read as one range.
        """
        ...

    def version(self, path: str) -> str | None:
        """What tells the file that is read from another one of its name, such as its ETag; "" where that is not known.

        None before a range of it was read: an object store returns it with the first range.
        """
        ...

    def close(self) -> None:
        """Release descriptors and maps that are not in use; using the transport afterwards reopens them."""
        ...


@runtime_checkable
class Awaits(Protocol):
    """Reads ranges for callers that run in an event loop, without a thread for each."""

    async def get_range_async(self, path: str, *, start: int, end: int) -> Buffer:
        """As `get_ranges` of one range, awaited in any event loop; to cancel it cancels the request."""
        ...


@runtime_checkable
class Lists(Protocol):
    """Lists one level of names: to find stores below a root, never to read one."""

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

    def commit(self, *, check_size: bool = True) -> None:
        """The file is complete: make it durable under its name, exactly `file_nbytes` long.

        Where files are sent to a service, its size there is compared, unless the caller says that it will do so.

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
            StoreExistsError: the file exists and `resume` is false; delete it first to start over.
            TransportError: there is not enough space for `used_nbytes`, as far as that can be known.
        """
        ...

    def lock(self, path: str) -> AbstractContextManager[object]:
        """Hold an advisory lock that dies with the process; `WriterConflictError` if another process holds it.

        Does nothing where the back end has no locks; publication alone then decides.
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
