"""Large files behind a descriptor: `LocalSink` writes one in place, `FdSink` is what it shares with spooled uploads."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Callable, Sequence

from saev_store.errors import SaevStoreError, StoreExistsError, TransportError
from saev_store.transport._sink import BaseSink
from saev_store.transport.checks import RequestCounter, check_ranges, os_errors
from saev_store.transport.local.files import check_regular
from saev_store.transport.local.write import flush, fsync_folder, make_folders, preallocate, write_all


class FdSink(BaseSink):
    """Writes blocks with `pwritev`, also from several threads; subclasses open the descriptor and say what `commit` is."""

    #: Where what is written is counted.
    requests: RequestCounter | None = None
    _fd = -1

    def write(self, offset: int, buffers: Sequence[memoryview], done: Callable[[], object] | None = None) -> None:
        """Write the buffers one after the other at `offset`."""
        views, end = self._checked(offset, buffers)
        with self._errors("write"):
            write_all(self._descriptor(), views, offset)
        if self.requests is not None:
            self.requests.add("sink.write", written=end - offset)
        self._add(offset, end)
        if done is not None:
            done()

    def abort(self) -> None:
        """Close the descriptor; a file that has a name on the disk stays."""
        fd, self._fd = self._fd, -1
        if fd >= 0:
            os.close(fd)

    def __del__(self) -> None:
        self.abort()

    def _descriptor(self) -> int:
        if self._fd < 0:
            raise TransportError("this file is committed or aborted already", where=self._where)
        return self._fd

    def _errors(self, doing: str) -> contextlib.AbstractContextManager[None]:
        return os_errors(self._where, doing)


class LocalSink(FdSink):
    """A file under construction at its final place: reserved first, then filled, then cut to its exact size.

    A crash leaves a file of full size whose unwritten blocks are zeros, which a resumed writer judges by what it has
    recorded elsewhere. Blocks may be written by several threads.
    """

    def __init__(self, where: str, *, used_nbytes: int, file_nbytes: int, resume: bool) -> None:
        super().__init__(where, used_nbytes=used_nbytes, file_nbytes=file_nbytes)
        self._tail_is_zero = True
        try:
            with self._errors("open for writing"):
                make_folders(os.path.dirname(where))
                created = self._open(resume=resume)
            try:
                with self._errors(f"reserve {used_nbytes:,} bytes"):
                    preallocate(self._fd, used_nbytes)
                    if os.fstat(self._fd).st_size < file_nbytes:
                        os.ftruncate(self._fd, file_nbytes)
            except SaevStoreError:
                if created:
                    os.unlink(where)
                raise
        except BaseException:
            self.abort()
            raise

    def _open(self, *, resume: bool) -> bool:
        """Open the file; False if it was there before."""
        flags = os.O_RDWR | os.O_CLOEXEC | os.O_NONBLOCK
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

    def sync(self) -> int:
        """Flush to the disk; the number of leading bytes that are safe now."""
        prefix = self._prefix()  # before the flush: a block written meanwhile is not promised
        with self._errors("sync"):
            flush(self._descriptor())
        return prefix

    def read_back(self, start: int, end: int) -> bytes:
        """What the file holds in that range."""
        check_ranges(self._where, (start,), (end,))
        end, parts = min(end, self._used), list[bytes]()
        with self._errors("read"):
            while start < end and (part := os.pread(self._descriptor(), end - start, start)):
                parts.append(part)
                start += len(part)
        return b"".join(parts)

    def commit(self, *, check_size: bool = True) -> None:  # noqa: ARG002  # it is cut to its size
        """Cut to exactly `file_nbytes`, flush file and folder, close.

        Raises:
            ArgumentError: not all of `used_nbytes` were written.
        """
        self._check_complete()
        with self._errors("commit"):
            fd = self._descriptor()
            if not self._tail_is_zero:
                os.ftruncate(fd, self._used)
            os.ftruncate(fd, self._file_nbytes)
            os.fsync(fd)
            fsync_folder(os.path.dirname(self._where))
        self.abort()
