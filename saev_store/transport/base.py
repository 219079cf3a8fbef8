"""The interface of storage back ends. A *path* is relative to the transport's root and uses `/`."""

from __future__ import annotations

import asyncio
from abc import ABC, abstractmethod
from collections.abc import Iterable, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import NamedTuple, Self

from saev_store.errors import ArgumentError, ReadOnlyError
from saev_store.names import joined_url
from saev_store.transport.checks import Buffer, ReadCost, byte_views, check_path

#: Ranges of one file, and the memory that each fills: path, first bytes, writable buffers.
FileReads = tuple[str, Sequence[int], Sequence[memoryview]]


class Entry(NamedTuple):
    """One name found by `Transport.list`. `size` (bytes) and `modified_s` (since 1970) are None if they are not reported."""

    path: str
    is_dir: bool
    size: int | None
    modified_s: float | None = None

    @property
    def name(self) -> str:
        """The last part of the path."""
        return self.path.rpartition("/")[2]


class FileStat(NamedTuple):
    """Size and version of a file: text that differs for another file of the same name, such as the ETag."""

    nbytes: int
    version: str


class Sink(ABC):
    """One file under construction, written from its first byte to its last; made by `Transport.open_sink`."""

    def __init__(self, where: str, *, used_nbytes: int, file_nbytes: int) -> None:
        self._where, self._used, self._file_nbytes = where, used_nbytes, file_nbytes
        self._written, self._is_open = 0, True

    def write(self, buffers: Sequence[memoryview]) -> None:
        """Append C-contiguous buffers, which may be reused when the call returns, or raise a `TransportError`."""
        views = byte_views(buffers)
        self._append(views)
        self._written += sum(map(len, views))

    def commit(self) -> None:
        """Make the file durable under its name, exactly `file_nbytes` long, with zeros at its end.

        Raises:
            ArgumentError: not exactly `used_nbytes` were written: a hole would read as vectors of zeros.
        """
        if self._written != self._used:
            raise ArgumentError(f"{self._written:,} of {self._used:,} bytes were written", where=self._where)
        self._finish()
        self.abort()

    def abort(self) -> None:
        """Release resources without committing; a second call does nothing."""
        if self._is_open:
            self._is_open = False
            self._release()

    @abstractmethod
    def _append(self, views: list[memoryview]) -> None: ...

    @abstractmethod
    def _finish(self) -> None: ...

    @abstractmethod
    def _release(self) -> None: ...


class Transport(ABC):
    """Reads and writes files below one root; thread-safe, with errors of `saev_store.errors`.

    The first read of a file pins its version. If another file takes its name, reads raise or continue with the first one; they never
    mix the two.

    Attributes:
        url: The root, without credentials and trailing slash.
        name: The engine, such as `"mmap"` or `"fsspec:s3"`.
        cost: How ranges are merged and cut.
        is_local: True for files of this machine.
        local_path: The root's absolute path on this machine; None elsewhere.
    """

    url: str
    name: str
    cost: ReadCost
    is_local = False
    local_path: str | None = None

    def where(self, path: str) -> str:
        """The full name of a file, for messages; `UnsafeContentError` if `path` would leave the root."""
        return joined_url(self.url, check_path(path))

    @abstractmethod
    def at(self, path: str) -> Self:
        """The transport whose root is the folder `path`, which need not exist; `""` is the same root."""

    @abstractmethod
    def read(self, path: str, *, max_bytes: int | None = None) -> bytes:
        """The whole of a small file, as it is now; no more than `max_bytes` are loaded, or it is a `TransportError`."""

    @abstractmethod
    def stat(self, path: str) -> FileStat:
        """Size and version of a file, as it is now."""

    def size(self, path: str) -> int:
        """The size of a file in bytes, as it is now."""
        return self.stat(path).nbytes

    @abstractmethod
    def version(self, path: str) -> str:
        """The pinned version of a file, which is pinned now if it was not before."""

    @abstractmethod
    def get_ranges(self, path: str, *, starts: Sequence[int], ends: Sequence[int]) -> Sequence[Buffer]:
        """Read half-open ranges, in any order; neighbours share requests according to `cost`.

        Returns:
            One read-only buffer per range, in order, each exactly `end - start` bytes long. Ranges that shared a request share its
            memory.

        Raises:
            NotFoundError: there is no such file.
            CorruptShardError: the file ends before a range does.
            TransportError: it could not be read, or another file has taken its place.
        """

    def load_ranges(
        self, path: str, *, starts: Sequence[int], ends: Sequence[int], memory: memoryview
    ) -> Iterable[Buffer]:
        """As `get_ranges`, but never maps: each range of a local file is read to the beginning of `memory` when it is asked for."""
        del memory
        return self.get_ranges(path, starts=starts, ends=ends)

    def readinto(self, path: str, *, starts: Sequence[int], buffers: Sequence[memoryview]) -> None:
        """Fill each buffer, which is writable and C-contiguous, from the bytes that begin at its start; errors as of `get_ranges`.

        When the call has ended in any way, no byte of the buffers changes any more; without an error every byte is filled.
        """
        self.readinto_files([(path, starts, buffers)])

    @abstractmethod
    def readinto_files(self, reads: Iterable[FileReads]) -> None:
        """Fill buffers from several files at once, each as `readinto`; remote requests of all files run side by side."""

    async def get_range_async(self, path: str, *, start: int, end: int) -> Buffer:
        """As `get_ranges` of one range, without blocking the running event loop; cancelling it cancels the request."""
        return (await asyncio.to_thread(self.get_ranges, path, starts=[start], ends=[end]))[0]

    def map_prefix(self, path: str, nbytes: int) -> memoryview | None:
        """A read-only view of the first bytes of a file; None if it cannot be mapped, `CorruptShardError` if it is shorter."""
        del path, nbytes
        return None

    def check_mapped(self, path: str, nbytes: int) -> None:  # noqa: B027  # only maps need it
        """Raise a `CorruptShardError` if the file behind a map is shorter than `nbytes` now, before bytes are copied out of it."""

    @abstractmethod
    def list(self, path: str = "") -> Sequence[Entry]:
        """The names directly in a folder, sorted, never from a cache; `NotFoundError` if there is no such folder."""

    @abstractmethod
    def close(self) -> None:
        """Unpin files and release descriptors and maps; using the transport again reopens them."""

    @abstractmethod
    def put(self, path: str, data: Buffer) -> None:
        """Create or replace a small file, atomically and durably."""

    @abstractmethod
    def create(self, path: str, data: Buffer) -> None:
        """Create a small file atomically, also against racing processes; `StoreExistsError` if the name is taken.

        A lost answer of a service can make a creation that succeeded look failed: read the file back to know.
        """

    @abstractmethod
    def delete(self, path: str) -> None:
        """Delete a file, or a folder with all that is in it; a missing one is fine."""

    def move(self, source: str, target: str) -> None:
        """Rename a finished file, durably; a file of that name is replaced. Local files only."""
        raise ReadOnlyError(f"{self.name} cannot rename {source}", where=self.where(target))

    @abstractmethod
    def open_sink(self, path: str, *, used_nbytes: int, file_nbytes: int, replace: bool = False) -> Sink:
        """Start a large file of `file_nbytes`, of which the first `used_nbytes` will be written; the rest reads as zeros.

        With `replace` a file of that name is replaced (on `commit`, or now if it is on this machine), else it is a
        `StoreExistsError`.
        """

    def lock(self, path: str) -> AbstractContextManager[object]:
        """A block that holds an advisory lock of this process, or `WriterConflictError`; nothing where there are no locks."""
        check_path(path)
        return nullcontext()
