"""One large file behind a descriptor: what a file at its final place and one that is only collected have in common."""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence

from saev_store.errors import ArgumentError, TransportError
from saev_store.transport._counters import RequestCounter
from saev_store.transport._written import Written
from saev_store.transport.checks import byte_views, check_ranges, os_errors

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
