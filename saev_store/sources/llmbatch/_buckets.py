"""Shuffling more records than fit into memory: two passes through a temporary file.

The place of every record is known before any is seen, so the file is divided into buckets of consecutive places. In the
first pass each record goes, with its place, into its bucket's region, a piece at a time; exactly as many arrive as the
region holds. In the second, one bucket after the other is loaded and put in order.
"""

from __future__ import annotations

import os
import tempfile
from collections.abc import Iterator
from types import TracebackType
from typing import Self

import numpy as np
import numpy.typing as npt

from saev_store.core.layout import IntArray
from saev_store.sources.llmbatch.reader import TokenArray
from saev_store.transport.checks import os_errors
from saev_store.transport.local.sink import write_all


class Buckets:
    """Records that come in one order and leave in another, in memory that does not depend on how many there are.

    A quarter of `memory_nbytes` holds records on their way to their buckets; a bucket takes half of it. Where all records
    fit, nothing touches the disk.

    Args:
        n_places: How many records will be put, one at each place.
        seq_len: Tokens of a record.
        memory_nbytes: How much memory may be used.
    """

    def __init__(self, n_places: int, seq_len: int, *, memory_nbytes: int) -> None:
        self.n_places, self.seq_len = n_places, seq_len
        self._item = np.dtype([("place", "<i8"), ("tokens", "<u4", (seq_len,))])
        total = n_places * self._item.itemsize
        self.in_memory = total <= memory_nbytes
        per_bucket = n_places if self.in_memory else max(1, memory_nbytes // 2 // self._item.itemsize)
        self.per_bucket = max(1, per_bucket)
        self.n_buckets = -(-n_places // self.per_bucket)
        self._filled = np.zeros(self.n_buckets, np.int64)
        self._all = np.empty((n_places, seq_len), "<u4") if self.in_memory else None
        self._max_pending = 0 if self.in_memory else max(1, memory_nbytes // 4 // self._item.itemsize)
        self._pending = np.empty(self._max_pending, self._item)
        self._n_pending = 0
        self._fd = -1
        if not self.in_memory:
            with (
                os_errors(tempfile.gettempdir(), f"reserve {total:,} bytes to shuffle"),
                tempfile.TemporaryFile() as spool,
            ):
                self._fd = os.dup(spool.fileno())
                os.posix_fallocate(self._fd, 0, total)

    def put(self, places: IntArray, tokens: TokenArray) -> None:
        """Records at their places; each place once."""
        if self._all is not None:
            self._all[places] = tokens
            return
        at = 0
        while at < len(places):
            n = min(len(places) - at, self._max_pending - self._n_pending)
            free = self._pending[self._n_pending : self._n_pending + n]
            free["place"], free["tokens"] = places[at : at + n], tokens[at : at + n]
            at, self._n_pending = at + n, self._n_pending + n
            if self._n_pending == self._max_pending:
                self._flush()

    def _flush(self) -> None:
        items = self._pending[: self._n_pending]
        bucket = items["place"] // self.per_bucket
        order = np.argsort(bucket, kind="stable")
        counts = np.bincount(bucket, minlength=self.n_buckets)
        ends = np.cumsum(counts)
        for number in np.flatnonzero(counts).tolist():
            members = items[order[ends[number] - counts[number] : ends[number]]]
            offset = (number * self.per_bucket + int(self._filled[number])) * self._item.itemsize
            with os_errors(tempfile.gettempdir(), "write"):
                write_all(self._fd, [memoryview(members.view(np.uint8))], offset)
            self._filled[number] += len(members)
        self._n_pending = 0

    def take(self, max_records: int) -> Iterator[TokenArray]:
        """All records in the order of their places, in pieces of `max_records` (a bucket's last piece may be shorter)."""
        if self._all is not None:
            for start in range(0, self.n_places, max_records):
                yield self._all[start : start + max_records]
            return
        self._flush()
        for number in range(self.n_buckets):
            first = number * self.per_bucket
            n = min(self.per_bucket, self.n_places - first)
            ordered = np.empty((n, self.seq_len), "<u4")
            step = max(1, (8 << 20) // self._item.itemsize)
            for start in range(0, n, step):
                items = np.empty(min(step, n - start), self._item)
                self._load(items, (first + start) * self._item.itemsize)
                ordered[items["place"] - first] = items["tokens"]
            for start in range(0, n, max_records):
                yield ordered[start : start + max_records]

    def _load(self, items: npt.NDArray[np.void], offset: int) -> None:
        view = memoryview(items.view(np.uint8))
        with os_errors(tempfile.gettempdir(), "read"):
            while view:
                n_read = os.preadv(self._fd, [view], offset)
                offset, view = offset + n_read, view[n_read:]

    def close(self) -> None:
        """Give the temporary file's space back."""
        fd, self._fd = self._fd, -1
        if fd >= 0:
            os.close(fd)
        self._all, self._pending = None, np.empty(0, self._item)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, tb: TracebackType | None) -> None:
        self.close()
