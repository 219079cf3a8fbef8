"""The interface of storage back ends.

A *path* is relative to the transport's root and uses `/`. The package computed or checked it: it never comes unchecked from a file.
All back ends raise only errors of `saev_store.errors`.
"""

from __future__ import annotations

import threading
from abc import ABC, abstractmethod
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import NamedTuple, Self

import numpy as np

from saev_store._runtime.threads import off_loop
from saev_store.core.coalesce import coalesce
from saev_store.errors import ReadOnlyError, TransportError
from saev_store.names import joined_url
from saev_store.transport.checks import Buffer, check_path, check_ranges

#: Ranges of one file, and the memory that each fills: path, first bytes, writable buffers.
FileReads = tuple[str, Sequence[int], Sequence[memoryview]]


@dataclass(frozen=True, slots=True)
class ReadCost:
    """Rule for merging and cutting ranges.

    Attributes:
        max_gap_bytes: Reading this many unneeded bytes costs at most as much as another request.
        max_request_bytes: A request is at most this long: longer ranges are cut, and merged ones stop growing.
    """

    max_gap_bytes: float
    max_request_bytes: float


@dataclass(frozen=True, slots=True)
class Entry:
    """One name found by `Transport.list`.

    Attributes:
        path: Relative to the transport's root.
        is_dir: True for a folder.
        size: Bytes; None for folders.
        modified_s: Time of the last change, in seconds since 1970; None if the service does not report it.
    """

    path: str
    is_dir: bool
    size: int | None
    modified_s: float | None = None

    @property
    def name(self) -> str:
        """The last part of the path."""
        return self.path.rstrip("/").rpartition("/")[2]


class FileStat(NamedTuple):
    """Size and version of a file.

    Attributes:
        nbytes: Its size.
        version: Text that differs for another file of the same name: the ETag or generation, or inode, time and size.
    """

    nbytes: int
    version: str


@dataclass(frozen=True, slots=True)
class UnfinishedUpload:
    """A multipart upload that was begun and neither completed nor aborted.

    Attributes:
        path: The file that it would become, relative to the transport's root.
        upload_id: The service's name for it.
        begun_s: When it was begun, in seconds since 1970; None if the service does not report it.
    """

    path: str
    upload_id: str
    begun_s: float | None


@dataclass(frozen=True, slots=True)
class Counters:
    """Totals of a transport and of all transports that were opened below it; retries inside a client are not counted.

    Attributes:
        requests: Requests to a server, or system calls on files.
        bytes_read: Bytes returned; of a mapped file, bytes made visible.
        bytes_written: Bytes accepted for writing.
    """

    requests: int = 0
    bytes_read: int = 0
    bytes_written: int = 0


class RequestCounter:
    """A thread-safe count of requests and bytes. A pickle starts again from zero."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._n: Counter[str] = Counter()

    def __reduce__(self) -> tuple[type[RequestCounter], tuple[()]]:
        return RequestCounter, ()

    def add(self, *, requests: int = 1, read: int = 0, written: int = 0) -> None:
        """Count requests and their bytes."""
        with self._lock:
            self._n.update(requests=requests, bytes_read=read, bytes_written=written)

    @property
    def counters(self) -> Counters:
        """A snapshot."""
        with self._lock:
            return Counters(**self._n)


class Sink(ABC):
    """One file under construction, written from its first byte to its last; made by `Transport.open_sink`."""

    @abstractmethod
    def write(self, offset: int, buffers: Sequence[memoryview], done: Callable[[], object] | None = None) -> None:
        """Append buffers.

        Args:
            offset: Number of bytes that were written before.
            buffers: C-contiguous memory. It may be reused when the call returns; with `done`, when `done` is called.
            done: Called when the memory may be reused, in any thread, also after an error.

        Raises:
            ArgumentError: `offset` is not the next byte, or the buffers exceed the file.
            TransportError: the bytes could not be written.
        """

    @abstractmethod
    def commit(self) -> None:
        """Make the file durable under its name, exactly `file_nbytes` long; what was not written at its end reads as zeros.

        Raises:
            ArgumentError: some of `used_nbytes` were not written.
            TransportError: the file could not be completed.
        """

    @abstractmethod
    def abort(self) -> None:
        """Release resources without committing; a second call does nothing."""

    # -- for writers that resume within a file: only local files can -----------------------------------------------------

    def sync(self) -> int:
        """Make written bytes durable; return how many leading bytes are. 0 if only `commit` persists."""
        return 0

    def keep(self, nbytes: int) -> None:
        """Count the first `nbytes` of a resumed file as written."""
        raise TransportError(f"{nbytes} bytes cannot be kept: uploads start over", where="keep")

    def read_back(self, start: int, end: int) -> bytes:  # noqa: ARG002  # uploads hold nothing to read back
        """Return that range of a resumed file; shorter than requested where the file ends."""
        return b""


class Transport(ABC):
    """Reads and writes files below one root; thread-safe.

    The first read of a file pins its version. If another file takes its name, reads raise `CorruptShardError` or `TransportError` or
    continue with the first one; they never mix the two. `close` unpins all files.

    Attributes:
        url: The root, without credentials and trailing slash.
        name: The engine, such as `"mmap"` or `"fsspec:s3"`.
        cost: How ranges are merged and cut.
        is_local: True for files of this machine or memory of this process.
        local_path: The root's absolute path on this machine; None elsewhere.
        pads: True if a tail of zeros costs nothing (POSIX): the last shard is then written at full size.
    """

    url: str
    name: str
    cost: ReadCost
    is_local = False
    local_path: str | None = None
    pads = False

    def __init__(self) -> None:
        self.tally = RequestCounter()

    def __repr__(self) -> str:
        return f"{type(self).__name__}({self.url!r})"

    @property
    def counters(self) -> Counters:
        """Requests and bytes so far."""
        return self.tally.counters

    def where(self, path: str) -> str:
        """The full name of a file, for messages.

        Raises:
            UnsafeContentError: `path` would leave the root.
        """
        return joined_url(self.url, check_path(path))

    # -- reading -------------------------------------------------------------------------------------------------------

    @abstractmethod
    def at(self, path: str) -> Self:
        """The transport whose root is the folder `path`, which need not exist; `""` is the same root."""

    @abstractmethod
    def read(self, path: str, *, max_bytes: int | None = None) -> bytes:
        """The whole of a small file, as it is now.

        Raises:
            TransportError: it is longer than `max_bytes`; no more than that is loaded.
        """

    @abstractmethod
    def stat(self, path: str) -> FileStat:
        """Size and version of a file, as it is now."""

    def size(self, path: str) -> int:
        """The size of a file in bytes, as it is now."""
        return self.stat(path).nbytes

    @abstractmethod
    def version(self, path: str) -> str:
        """The pinned version of a file, which is pinned now if it was not before."""

    def get_ranges(self, path: str, *, starts: Sequence[int], ends: Sequence[int]) -> Sequence[Buffer]:
        """Read half-open ranges, in any order; neighbours share requests as `cost` says.

        Returns:
            One read-only buffer per range, in order, each exactly `end - start` bytes long. Ranges that shared a request share its
            memory.

        Raises:
            NotFoundError: there is no such file.
            CorruptShardError: the file ends before a range does.
            TransportError: it could not be read, or another file has taken its place.

        >>> from saev_store.transport import open_transport
        >>> [len(part) for part in open_transport(SAMPLE).get_ranges("shards.json", starts=[0, 1], ends=[1, 5])]
        [1, 4]
        """
        check_ranges(self.where(path), starts, ends)
        longest = self.cost.max_request_bytes
        if len(starts) == 1 and 0 < ends[0] - starts[0] <= longest:
            return self._fetch(path, starts, ends)
        low, high = np.asarray(starts, np.int64), np.asarray(ends, np.int64)
        found: list[Buffer] = [b""] * len(low)
        wanted = np.flatnonzero(high > low)
        order = wanted[np.argsort(low[wanted], kind="stable")]
        is_long = high[order] - low[order] > longest
        for number in order[is_long].tolist():
            found[number] = self._fetch_long(path, int(low[number]), int(high[number]))
        order = order[~is_long]
        low, high = low[order], high[order]
        spans = coalesce(low, high, max_gap_bytes=self.cost.max_gap_bytes, max_request_bytes=longest)
        parts = self._fetch(path, spans.starts.tolist(), spans.ends.tolist()) if len(spans) else ()
        for part, first, last in zip(parts, spans.first.tolist(), spans.first[1:].tolist(), strict=False):
            view, base = memoryview(part), int(low[first])
            for at in range(first, last):
                found[order[at]] = view[int(low[at]) - base : int(high[at]) - base]
        return found

    def _fetch_long(self, path: str, start: int, end: int) -> Buffer:
        """Read a range in several requests; its memory is allocated after the size of the file is known."""
        self._check_length(path, end)
        memory = memoryview(bytearray(end - start))
        self.readinto(path, starts=[start], buffers=[memory])
        return memory.toreadonly()

    @abstractmethod
    def _check_length(self, path: str, needed: int) -> None:
        """Raise `CorruptShardError` if a file is shorter than `needed` bytes."""

    @abstractmethod
    def _fetch(self, path: str, starts: Sequence[int], ends: Sequence[int]) -> Sequence[Buffer]:
        """Read ranges, none empty, each in one request."""

    def readinto(self, path: str, *, starts: Sequence[int], buffers: Sequence[memoryview]) -> None:
        """Fill each buffer from the bytes that begin at its start.

        When the call has ended in any way, no byte of the buffers changes any more; without an error every byte is filled.

        Raises:
            ArgumentError: a buffer is read-only or not C-contiguous.
            NotFoundError, CorruptShardError, TransportError: as `get_ranges`.
        """
        self.readinto_files([(path, starts, buffers)])

    @abstractmethod
    def readinto_files(self, reads: Iterable[FileReads]) -> None:
        """Fill buffers from several files at once, each as `readinto`; remote requests of all files run side by side."""

    async def get_range_async(self, path: str, *, start: int, end: int) -> Buffer:
        """As `get_ranges` of one range, without blocking the running event loop; cancelling it cancels the request."""
        return (await off_loop(lambda: self.get_ranges(path, starts=[start], ends=[end])))[0]

    def map_prefix(self, path: str, nbytes: int) -> memoryview | None:
        """A read-only view of the first bytes of a file, for back ends that map; None if it cannot be mapped.

        Raises:
            CorruptShardError: the file is shorter.
        """
        del path, nbytes
        return None

    def check_mapped(self, path: str, nbytes: int) -> None:  # noqa: B027  # only maps need it
        """Compare the file behind a map with `nbytes`, before bytes are copied out of it; nothing where files are not mapped.

        Raises:
            CorruptShardError: it is shorter now, or another one has taken its place.
        """

    @abstractmethod
    def list(self, path: str = "") -> Sequence[Entry]:
        """The names directly in a folder, sorted, never from a cache; links are followed.

        Raises:
            NotFoundError: there is no such folder.
        """

    def recheck(self) -> None:  # noqa: B027  # only fsspec needs it
        """Compare each pinned file with the one that has its name now.

        For back ends that do not learn a version with each answer, such as s3fs. The others check every read, and do nothing here.

        Raises:
            TransportError: a file was replaced since it was first read.
        """

    @abstractmethod
    def close(self) -> None:
        """Unpin files and release descriptors and maps; using the transport again reopens them."""

    # -- writing -------------------------------------------------------------------------------------------------------

    def put(self, path: str, data: Buffer) -> None:
        """Create or replace a small file, atomically and durably."""
        raise self._read_only(path, data)

    def create(self, path: str, data: Buffer) -> None:
        """Create a small file atomically, also against racing processes.

        A lost answer of a service can make a creation that succeeded look failed: read the file back to know.

        Raises:
            StoreExistsError: the name is taken.
        """
        raise self._read_only(path, data)

    def delete(self, path: str) -> None:
        """Delete a file, or a folder with all that is in it; a missing one is fine."""
        raise self._read_only(path)

    def move(self, source: str, target: str) -> None:
        """Rename a finished file, durably; a file of that name is replaced. Local files only."""
        raise self._read_only(source, target)

    @property
    def moves(self) -> bool:
        """True if `move` works, and a large file appears before it is complete."""
        return False

    def open_sink(self, path: str, *, used_nbytes: int, file_nbytes: int, resume: bool = False) -> Sink:
        """Start a large file of `file_nbytes`, of which `used_nbytes` will be written.

        Args:
            path: Its name.
            used_nbytes: Number of bytes that will be written.
            file_nbytes: Its final length; the rest reads as zeros (sparse where possible).
            resume: Continue an existing file; where that is impossible, replace it on `commit`.

        Raises:
            StoreExistsError: the file exists, and `resume` is false.
            TransportError: there is not enough space, as far as that can be known.
        """
        raise self._read_only(path, used_nbytes, file_nbytes, resume)

    def lock(self, path: str) -> AbstractContextManager[object]:
        """A block that holds an advisory lock, which the system releases with the process; nothing where there are no locks.

        Raises:
            WriterConflictError: another process holds it.
        """
        check_path(path)
        return nullcontext()

    def copy_within(self, source: Transport, source_path: str, path: str) -> bool:
        """Let the service copy a file without this machine; return False, with nothing done, if it cannot."""
        del source, source_path, path
        return False

    def list_uploads(self, path: str = "") -> Sequence[UnfinishedUpload] | None:
        """Unfinished multipart uploads of files below a folder; None if this client cannot list them."""
        del path
        return None

    def abort_upload(self, upload: UnfinishedUpload) -> None:
        """Abort an upload and delete its parts; an upload that no longer exists is fine."""
        raise self._read_only(upload.path)

    def _read_only(self, path: str, *_rest: object) -> ReadOnlyError:
        return ReadOnlyError(f"nothing can be written through {self.name}", where=self.where(path))
