"""The bases of all sinks: checks of arguments, and which bytes of the file were written."""

from __future__ import annotations

import threading
from collections.abc import Sequence
from typing import Generic

from saev_store.errors import ArgumentError
from saev_store.transport._remote import C, RemoteTransport
from saev_store.transport.checks import byte_views


class BaseSink:
    """A file under construction and its number of bytes so far; thread-safe.

    Raises:
        ArgumentError: `used_nbytes` do not fit into `file_nbytes`.
    """

    def __init__(self, where: str, *, used_nbytes: int, file_nbytes: int) -> None:
        if not 0 <= used_nbytes <= file_nbytes:
            raise ArgumentError(f"{used_nbytes} used bytes do not fit a file of {file_nbytes}", where=where)
        self._where, self._used, self._file_nbytes = where, used_nbytes, file_nbytes
        self._written: list[tuple[int, int]] = []  # disjoint intervals, sorted
        self._lock = threading.Lock()

    def keep(self, nbytes: int) -> None:
        """Count the first `nbytes` of a resumed file as written: the caller has verified them."""
        if not 0 <= nbytes <= self._used:
            raise ArgumentError(f"{nbytes} bytes cannot be kept of {self._used:,}", where=self._where)
        self._add(0, nbytes)

    def _checked(self, offset: int, buffers: Sequence[memoryview]) -> tuple[list[memoryview], int]:
        """The buffers as bytes, and the end of what they are written to."""
        views = byte_views(buffers, writable=False)
        end = offset + sum(view.nbytes for view in views)
        if not 0 <= offset <= end <= self._used:
            raise ArgumentError(f"bytes {offset}:{end} are outside the {self._used:,} to be written", where=self._where)
        return views, end

    def _add(self, start: int, end: int) -> None:
        """Bytes `start` to `end` are written."""
        if start == end:
            return
        with self._lock:
            merged: list[tuple[int, int]] = []
            for low, high in self._written:
                if high < start or end < low:
                    merged.append((low, high))
                else:
                    start, end = min(start, low), max(end, high)
            self._written = sorted([*merged, (start, end)])

    def _prefix(self) -> int:
        """How many leading bytes are written."""
        with self._lock:
            return self._written[0][1] if self._written and self._written[0][0] == 0 else 0

    def _check_complete(self) -> None:
        """Refuse to commit a file with holes, which would read as vectors of zeros."""
        if (prefix := self._prefix()) < self._used:
            raise ArgumentError(
                f"only the first {prefix:,} of {self._used:,} bytes were written without a gap",
                where=self._where,
                remedy="Write the rest before `commit` (after a resume, `keep` what was verified), or `abort`.",
            )


class UploadSink(BaseSink, Generic[C]):
    """A file that appears when it is committed; nothing survives a crash before, so an upload starts over."""

    def __init__(self, transport: RemoteTransport[C], path: str, *, used_nbytes: int, file_nbytes: int) -> None:
        below = transport.below(path)
        super().__init__(transport.where(below), used_nbytes=used_nbytes, file_nbytes=file_nbytes)
        self._client, self._key = transport.client, transport.key(below)
        #: Called when the file is there.
        self._committed = lambda: transport.pins.forget(below)

    def sync(self) -> int:
        """Always 0: nothing survives a crash before `commit`."""
        return 0

    def keep(self, nbytes: int) -> None:
        """Refuse: an upload starts over.

        Raises:
            ArgumentError: `nbytes` is not 0.
        """
        if nbytes:
            raise ArgumentError(f"{nbytes} bytes cannot be kept: uploads start over", where=self._where)

    def read_back(self, start: int, end: int) -> bytes:  # noqa: ARG002  # as `Sink` has it
        """Always empty: an upload starts over."""
        return b""
