"""Reads every byte of a store once, in bounded memory, and summarises each shard.

Threads read pieces that fit a core's cache and scan them there, so each byte crosses memory once. The caller's thread combines
the results in order. `_judge` derives problems from the summaries.
"""

from __future__ import annotations

import math
import threading
from collections import deque
from collections.abc import Generator, Iterable, Iterator
from concurrent.futures import Future, wait
from contextlib import closing, suppress
from dataclasses import dataclass, field
from queue import SimpleQueue
from typing import NamedTuple

import numpy as np

from saev_store.core.layout import ITEMSIZE, IntArray, Layout, shard_name
from saev_store.errors import CorruptShardError, SaevStoreError
from saev_store.names import LABELS_NAME
from saev_store.transport import Transport
from saev_store.validation._scan import is_zero, merge_runs, scan_piece
from saev_store.validation._survey import local_folder

#: Local pieces fit into a core's cache; a remote piece is one request.
_LOCAL_PIECE_BYTES = 1 << 20
_LOCAL_THREADS = 2
_REMOTE_THREADS = 8
_SLICE_S = 0.2


class _Job(NamedTuple):
    """One block of one file; a block of `padding` follows the vectors and must be zero."""

    shard_idx: int
    path: str
    start: int
    end: int
    padding: bool


class _Seen(NamedTuple):
    """Result of reading one block."""

    digest: str
    zero_runs: IntArray
    n_nonfinite: int
    is_zero: bool
    error: str


@dataclass
class ShardSummary:
    """Result of reading one shard.

    Attributes:
        shard_idx: Number of the shard.
        n_bytes: Bytes of vectors that were read.
        digests: One for each block of them; "" for a block that could not be read.
        zero_runs: Ranges of elements that are zero, merged, as `scan_piece` describes.
        n_nonfinite: Count of elements that are infinite or NaN.
        padding_is_zero: False where bytes after the last vector are not zero.
        bad: Half-open byte ranges that could not be read.
        error: Reason for the first of `bad`, else "".
    """

    shard_idx: int
    n_bytes: int = 0
    digests: list[str] = field(default_factory=list[str])
    zero_runs: IntArray = field(default_factory=lambda: np.empty((0, 2), dtype=np.int64))
    n_nonfinite: int = 0
    padding_is_zero: bool = True
    bad: list[tuple[int, int]] = field(default_factory=list[tuple[int, int]])
    error: str = ""


def read_labels_digests(transport: Transport, nbytes: int, block_bytes: int) -> list[str]:
    """The digests of the blocks of labels.bin.

    Raises:
        CorruptShardError: a block cannot be read.
    """
    reader = _Reader(transport, 1, _piece_bytes(transport, block_bytes))
    jobs = _blocks(-1, LABELS_NAME, 0, nbytes, block_bytes, padding=False)
    seen = [reader.block(job, scan=False) for job in jobs]
    for block in seen:
        if block.error:
            raise CorruptShardError(block.error, where=LABELS_NAME)
    return [block.digest for block in seen]


def _is_local(transport: Transport) -> bool:
    return local_folder(transport) is not None or transport.cost.max_gap_bytes == math.inf


def _piece_bytes(transport: Transport, block_bytes: int) -> int:
    return min(block_bytes, _LOCAL_PIECE_BYTES) if _is_local(transport) else block_bytes


def read_shards(
    transport: Transport, layout: Layout, sizes: Iterable[tuple[int, int]], block_bytes: int
) -> Generator[tuple[int, ShardSummary | None]]:
    """Read all bytes of shards. Close the generator to stop its threads.

    Args:
        transport: Rooted at the store's folder.
        layout: The store's geometry.
        sizes: Shard number and size of its file, ascending; bytes past the full capacity are not read.
        block_bytes: How many bytes a digest covers.

    Yields:
        The number of bytes read since the last item, and the summary of a shard after its last block (None otherwise).
    """
    reader = _Reader(transport, layout.d_model, _piece_bytes(transport, block_bytes))
    n_threads = _LOCAL_THREADS if _is_local(transport) else _REMOTE_THREADS
    jobs = (job for shard_idx, size in sizes for job in _shard_jobs(layout, shard_idx, size, block_bytes))
    summary, runs = ShardSummary(-1), list[IntArray]()
    with closing(_in_order(reader, jobs, n_threads)) as results:
        for job, seen in results:
            if job.shard_idx != summary.shard_idx:
                if summary.shard_idx >= 0:
                    yield 0, _finished(summary, runs)
                summary, runs = ShardSummary(job.shard_idx), []
            if job.padding:
                summary.padding_is_zero &= seen.is_zero or bool(seen.error)
            else:
                summary.n_bytes += job.end - job.start
                summary.digests.append(seen.digest)
                if seen.error:
                    summary.bad.append((job.start, job.end))
                    summary.error = summary.error or seen.error
                summary.n_nonfinite += seen.n_nonfinite
                if len(seen.zero_runs):
                    runs.append(seen.zero_runs)
            yield job.end - job.start, None
    if summary.shard_idx >= 0:
        yield 0, _finished(summary, runs)


def _finished(summary: ShardSummary, runs: list[IntArray]) -> ShardSummary:
    if runs:
        summary.zero_runs = merge_runs(np.concatenate(runs))
    return summary


def _shard_jobs(layout: Layout, shard_idx: int, size: int, block_bytes: int) -> Iterator[_Job]:
    # Of a short shard only whole examples are read; the block that its end cuts has no digest to compare with.
    used = min(layout.used_nbytes(shard_idx), size // layout.example_nbytes * layout.example_nbytes)
    name = shard_name(shard_idx)
    yield from _blocks(shard_idx, name, 0, used, block_bytes, padding=False)
    if size > layout.used_nbytes(shard_idx):
        yield from _blocks(shard_idx, name, used, min(size, layout.shard_nbytes), block_bytes, padding=True)


def _blocks(shard_idx: int, path: str, first: int, last: int, block_bytes: int, *, padding: bool) -> Iterator[_Job]:
    for start in range(first, last, block_bytes):
        yield _Job(shard_idx, path, start, min(start + block_bytes, last), padding)


class _Reader:
    """Reads blocks piece by piece into one buffer per thread, until it is stopped."""

    def __init__(self, transport: Transport, d_model: int, piece_bytes: int) -> None:
        self._transport = transport
        self._d_model = d_model
        self._piece_bytes = piece_bytes
        self._local = threading.local()
        self._stopped = False

    def stop(self) -> None:
        """End reading after the current piece of each thread; results of these blocks are worthless."""
        self._stopped = True

    def block(self, job: _Job, *, scan: bool = True) -> _Seen:
        from xxhash import xxh3_128

        digest, runs, n_nonfinite, zero = xxh3_128(), list[IntArray](), 0, True
        try:
            for start in range(job.start, job.end, self._piece_bytes):
                if self._stopped:
                    break
                piece = self._piece(job.path, start, min(start + self._piece_bytes, job.end))
                if job.padding:
                    zero = zero and is_zero(piece)
                    continue
                digest.update(piece)
                if scan:
                    found = scan_piece(piece, start=start // ITEMSIZE, d_model=self._d_model)
                    n_nonfinite += found.n_nonfinite
                    if len(found.zero_runs):
                        runs.append(found.zero_runs)
        except SaevStoreError as error:
            return _Seen("", np.empty((0, 2), np.int64), 0, is_zero=False, error=error.message)
        merged = np.concatenate(runs) if runs else np.empty((0, 2), np.int64)
        return _Seen(digest.hexdigest(), merged, n_nonfinite, zero, "")

    def _piece(self, path: str, start: int, end: int) -> memoryview:
        if not self._transport.reads_into:
            return memoryview(self._transport.get_ranges(path, starts=[start], ends=[end])[0])
        buffer: memoryview | None = getattr(self._local, "buffer", None)
        if buffer is None:
            buffer = self._local.buffer = memoryview(bytearray(self._piece_bytes))
        piece = buffer[: end - start]
        self._transport.readinto(path, starts=[start], buffers=[piece])
        return piece


def _awaited(future: Future[_Seen]) -> _Seen:
    """The result of a future. Waits in slices: an interrupt that another thread receives does not end an unbounded wait."""
    while not future.done():
        wait([future], timeout=_SLICE_S)
    return future.result()


def _in_order(reader: _Reader, jobs: Iterable[_Job], n_threads: int) -> Generator[tuple[_Job, _Seen]]:
    """Run jobs in threads and yield their results in order; at most `2 * n_threads` are pending.

    Closing the generator ends the threads after the piece that each is reading, without waiting for it: they are daemons.
    Without threads (the system refuses to start one) the jobs run here.
    """
    todo: SimpleQueue[tuple[_Job, Future[_Seen]] | None] = SimpleQueue()

    def work() -> None:
        while (item := todo.get()) is not None:
            job, future = item
            if future.set_running_or_notify_cancel():
                try:
                    future.set_result(reader.block(job))
                except BaseException as error:  # raised by `_awaited`
                    future.set_exception(error)

    n_started = 0
    with suppress(RuntimeError):  # no more threads
        for _ in range(n_threads):
            threading.Thread(target=work, name="saev-store-validate", daemon=True).start()
            n_started += 1
    if n_started == 0:
        yield from ((job, reader.block(job)) for job in jobs)
        return
    pending: deque[tuple[_Job, Future[_Seen]]] = deque()
    try:
        for job in jobs:
            future: Future[_Seen] = Future()
            pending.append((job, future))
            todo.put((job, future))
            if len(pending) >= 2 * n_started:
                done, result = pending.popleft()
                yield done, _awaited(result)
        while pending:
            done, result = pending.popleft()
            yield done, _awaited(result)
    finally:
        reader.stop()
        for _, future in pending:
            future.cancel()
        for _ in range(n_started):
            todo.put(None)
