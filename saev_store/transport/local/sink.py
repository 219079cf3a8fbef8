"""Large files behind a descriptor: `LocalSink` writes one in place, `FdSink` is what it shares with spooled uploads."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Callable, Sequence

from saev_store.errors import ArgumentError, SaevStoreError, StoreExistsError, TransportError
from saev_store.transport._counters import RequestCounter
from saev_store.transport.checks import Written, byte_views, check_ranges, os_errors
from saev_store.transport.local._libc import preallocate
from saev_store.transport.local.descriptors import check_regular

_IOV_MAX = min(1024, os.sysconf("SC_IOV_MAX"))


def write_all(fd: int, views: list[memoryview], offset: int) -> None:
    """Write all buffers, one after the other, however short the system's writes are."""
    first = 0
    while first < len(views):
        n_written = os.pwritev(fd, views[first : first + _IOV_MAX], offset)
        offset += n_written
        while first < len(views) and n_written >= views[first].nbytes:
            n_written -= views[first].nbytes
            first += 1
        if n_written:
            views[first] = views[first][n_written:]


class FdSink:
    """Writes blocks with `pwritev`, also from several threads; subclasses open the descriptor and say what `commit` is."""

    #: Where what is written is counted.
    requests: RequestCounter | None = None

    def __init__(self, where: str, *, used_nbytes: int, file_nbytes: int) -> None:
        self._fd = -1
        if not 0 <= used_nbytes <= file_nbytes:
            raise ArgumentError(f"{used_nbytes} used bytes do not fit a file of {file_nbytes}", where=where)
        self._where, self._used, self._file = where, used_nbytes, file_nbytes
        self._written = Written()

    def write(self, offset: int, buffers: Sequence[memoryview], done: Callable[[], object] | None = None) -> None:
        """Write the buffers one after the other at `offset`."""
        views = byte_views(buffers, writable=False)
        end = offset + sum(view.nbytes for view in views)
        if not 0 <= offset <= end <= self._used:
            raise ArgumentError(f"bytes {offset}:{end} are outside the {self._used:,} to be written", where=self._where)
        with self._errors("write"):
            write_all(self._descriptor(), views, offset)
        if self.requests is not None:
            self.requests.add("sink.write", written=end - offset)
        if end > offset:
            self._written.add(offset, end)
        if done is not None:
            done()

    def abort(self) -> None:
        """Close the descriptor; what lies on the disk under a name stays."""
        fd, self._fd = self._fd, -1
        if fd >= 0:
            os.close(fd)

    def __del__(self) -> None:
        self.abort()

    def _read(self, start: int, end: int) -> bytes:
        check_ranges(self._where, (start,), (end,))
        parts: list[bytes] = []
        with self._errors("read"):
            while start < end and (part := os.pread(self._descriptor(), end - start, start)):
                parts.append(part)
                start += len(part)
        return b"".join(parts)

    def _descriptor(self) -> int:
        if self._fd < 0:
            raise TransportError("this file is committed or given up already", where=self._where)
        return self._fd

    def _errors(self, doing: str) -> os_errors:
        return os_errors(self._where, doing)


def fsync_folder(folder: str) -> None:
    """Make the names in a folder survive a crash."""
    fd = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        os.fsync(fd)
    finally:
        os.close(fd)


def make_folders(folder: str) -> None:
    """Create a folder and its parents, each durable under its name."""
    if os.path.isdir(folder):
        return
    parent = os.path.dirname(folder)
    make_folders(parent)
    with contextlib.suppress(FileExistsError):  # another writer was quicker; a file of that name fails at its use
        os.mkdir(folder)
    fsync_folder(parent)


def _flush(fd: int) -> None:
    if hasattr(os, "fdatasync"):  # not everywhere
        os.fdatasync(fd)
    else:
        os.fsync(fd)


class LocalSink(FdSink):
    """A file under construction at its final place: reserved first, then filled, then cut to its exact size.

    A crash leaves a file of full size whose unwritten blocks are zeros, which a resumed writer judges by what it has
    recorded elsewhere. Blocks may be written by several threads.
    """

    def __init__(self, where: str, *, used_nbytes: int, file_nbytes: int, resume: bool) -> None:
        super().__init__(where, used_nbytes=used_nbytes, file_nbytes=file_nbytes)
        try:
            with self._errors("open for writing"):
                make_folders(os.path.dirname(where))
                created = self._open(resume=resume)
            try:
                with self._errors(f"reserve {used_nbytes:,} bytes"):
                    self._reserve()
            except SaevStoreError:
                if created:
                    os.unlink(where)
                raise
        except BaseException:
            self.abort()
            raise

    def _open(self, *, resume: bool) -> bool:
        flags = os.O_RDWR | os.O_CLOEXEC | os.O_NONBLOCK
        self._tail_is_zero = True
        if resume:
            with contextlib.suppress(FileNotFoundError):
                self._fd = os.open(self._where, flags)
                status = os.fstat(self._fd)
                check_regular(status.st_mode, where=self._where)
                self._tail_is_zero = status.st_size <= self._used
                return False
        try:
            self._fd = os.open(self._where, flags | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW, 0o666)
        except FileExistsError as error:
            raise StoreExistsError(
                "the file already exists", where=self._where, remedy="Resume, or delete it first."
            ) from error
        return True

    def _reserve(self) -> None:
        preallocate(self._fd, self._used)
        if os.fstat(self._fd).st_size < self._file:
            os.ftruncate(self._fd, self._file)

    def sync(self) -> int:
        """Flush to the disk; the number of leading bytes that are safe now."""
        prefix = self._written.prefix()  # before the flush: a block written meanwhile is not promised
        with self._errors("sync"):
            _flush(self._descriptor())
        return prefix

    def keep(self, nbytes: int) -> None:
        """Count the first `nbytes` of a resumed file as written: the caller has verified them."""
        if not 0 <= nbytes <= self._used:
            raise ArgumentError(f"{nbytes} bytes cannot be kept of {self._used:,}", where=self._where)
        if nbytes:
            self._written.add(0, nbytes)

    def read_back(self, start: int, end: int) -> bytes:
        """What the file holds in that range."""
        check_ranges(self._where, (start,), (end,))
        return self._read(start, min(end, max(start, self._used)))

    def commit(self, *, check_size: bool = True) -> None:  # noqa: ARG002  # it is cut to its size
        """Cut to exactly `file_nbytes`, flush file and folder, close.

        Raises:
            ArgumentError: not all of `used_nbytes` were written.
        """
        self._written.check_complete(self._used, where=self._where)
        with self._errors("commit"):
            fd = self._descriptor()
            if not self._tail_is_zero:
                os.ftruncate(fd, self._used)
            os.ftruncate(fd, self._file)
            os.fsync(fd)
            fsync_folder(os.path.dirname(self._where))
        self.abort()
