"""The deep check: reads every byte of a store once, in bounded memory, and summarises each shard.

Threads read pieces that fit a core's cache and scan them there, so each byte crosses memory once. The caller's thread combines
the results in order. `_judge` derives problems from the summaries.
"""

from __future__ import annotations

import math
from collections.abc import Generator, Iterable, Iterator, Mapping
from contextlib import closing
from dataclasses import dataclass, field
from typing import NamedTuple

import numpy as np

from saev_store._runtime.threads import ahead
from saev_store.core.layout import ITEMSIZE, IntArray, Layout, shard_name
from saev_store.documents import labels_nbytes
from saev_store.errors import CorruptShardError, DocumentError, SaevStoreError
from saev_store.names import DIGESTS_NAME, LABELS_NAME
from saev_store.problems import Problem
from saev_store.transport import Transport
from saev_store.validation._scan import NO_RUNS, is_zero, merge_runs, scan_piece

#: Local pieces fit into a core's cache; a remote piece is one request.
_LOCAL_PIECE_BYTES = 1 << 20
_LOCAL_THREADS = 2
_REMOTE_THREADS = 8


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
    zero_runs: IntArray = field(default_factory=lambda: NO_RUNS)
    n_nonfinite: int = 0
    padding_is_zero: bool = True
    bad: list[tuple[int, int]] = field(default_factory=list[tuple[int, int]])
    error: str = ""


def read_labels_digests(transport: Transport, nbytes: int, block_bytes: int) -> list[str]:
    """The digests of the blocks of labels.bin.

    Raises:
        CorruptShardError: a block cannot be read.
    """
    read = _BlockReader(transport, None, block_bytes)
    digests: list[str] = []
    for job in _blocks(-1, LABELS_NAME, 0, nbytes, block_bytes, padding=False):
        _, block = read(job)
        if block.error:
            raise CorruptShardError(block.error, where=LABELS_NAME)
        digests.append(block.digest)
    return digests


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
    read = _BlockReader(transport, layout.d_model, block_bytes)
    jobs = (job for shard_idx, size in sizes for job in _shard_jobs(layout, shard_idx, size, block_bytes))
    summary, runs = ShardSummary(-1), list[IntArray]()
    with closing(read), closing(ahead(read, jobs, 2 * read.n_threads)) as results:
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


class _BlockReader:
    """Reads a block in pieces until it is closed, and scans it for zero vectors where `d_model` is given."""

    def __init__(self, transport: Transport, d_model: int | None, block_bytes: int) -> None:
        is_near = transport.is_local or transport.cost.max_gap_bytes == math.inf
        self.n_threads = _LOCAL_THREADS if is_near else _REMOTE_THREADS
        self._transport = transport
        self._d_model = d_model
        self._piece_bytes = min(block_bytes, _LOCAL_PIECE_BYTES) if is_near else block_bytes
        self._closed = False

    def close(self) -> None:
        """End reading after the current piece of each thread; results of these blocks are worthless."""
        self._closed = True

    def __call__(self, job: _Job) -> tuple[_Job, _Seen]:
        from xxhash import xxh3_128

        digest, runs, n_nonfinite, zero = xxh3_128(), [NO_RUNS], 0, True
        buffer = memoryview(bytearray(min(self._piece_bytes, job.end - job.start)))
        try:
            for start in range(job.start, job.end, self._piece_bytes):
                if self._closed:
                    break
                piece = buffer[: job.end - start]
                self._transport.readinto(job.path, starts=[start], buffers=[piece])
                if job.padding:
                    zero = zero and is_zero(piece)
                    continue
                digest.update(piece)
                if self._d_model is None:
                    continue
                found = scan_piece(piece, start=start // ITEMSIZE, d_model=self._d_model)
                n_nonfinite += found.n_nonfinite
                runs.append(found.zero_runs)
        except SaevStoreError as error:
            return job, _Seen("", NO_RUNS, 0, is_zero=False, error=error.message)
        return job, _Seen(digest.hexdigest(), np.concatenate(runs), n_nonfinite, zero, "")


# -- digests -----------------------------------------------------------------------------------------------------------


#: Block length where no digests.json defines one.
DEFAULT_BLOCK_BYTES = 8 << 20
_MAX_BLOCK_BYTES = 1 << 30


@dataclass(frozen=True)
class Promised:
    """The digests of a store's files, and the problems of `digests.json`.

    Attributes:
        block_bytes: How many bytes a digest covers; the last one of a file may cover fewer.
        files: File name -> one digest per block of its used bytes; only files whose entry matches the layout.
        problems: Problems of the document, including its absence.
    """

    block_bytes: int
    files: Mapping[str, tuple[str, ...]]
    problems: tuple[Problem, ...]


def promised_digests(transport: Transport, layout: Layout) -> Promised:
    """The digests of a store. A missing document is an info, an invalid one a warning, an unreadable one an error."""
    from saev_store.writer import load_digests

    try:
        digests = load_digests(transport)
    except DocumentError as error:
        return _nothing(f"digests.json cannot be used, so contents are not compared with it: {error.message}")
    except SaevStoreError as error:
        message = f"digests.json cannot be read, so contents were not compared with it: {error.message}"
        return Promised(DEFAULT_BLOCK_BYTES, {}, (Problem("unreadable_digests", message, where=DIGESTS_NAME),))
    if digests is None:
        message = (
            "there is no digests.json, so changed bits and exchanged shards cannot be detected; `saev-store copy` "
            "makes a copy that has one"
        )
        return Promised(
            DEFAULT_BLOCK_BYTES, {}, (Problem("digests_absent", message, where=DIGESTS_NAME, severity="info"),)
        )
    if digests.block_bytes % ITEMSIZE or digests.block_bytes > _MAX_BLOCK_BYTES:
        return _nothing(f"block_bytes is {digests.block_bytes}; it must be a multiple of {ITEMSIZE}, at most 1 GiB")
    expected = {shard_name(shard_idx): layout.used_nbytes(shard_idx) for shard_idx in range(layout.n_shards)}
    expected[LABELS_NAME] = labels_nbytes(layout)
    files: dict[str, tuple[str, ...]] = {}
    problems: list[Problem] = []
    for name, nbytes in expected.items():
        entry = digests.files.get(name)
        if entry is not None and entry.nbytes == nbytes:
            files[name] = entry.digests
        elif entry is not None or name != LABELS_NAME:
            what = "has no entry" if entry is None else f"has {entry.nbytes} bytes, metadata.json implies {nbytes}"
            message = f"{name} {what} in digests.json; its contents are not compared"
            problems.append(
                Problem("digests_document", message, where=DIGESTS_NAME, loc=("files", name), severity="warning")
            )
    return Promised(digests.block_bytes, files, tuple(problems))


def _nothing(message: str) -> Promised:
    return Promised(
        DEFAULT_BLOCK_BYTES, {}, (Problem("digests_document", message, where=DIGESTS_NAME, severity="warning"),)
    )
