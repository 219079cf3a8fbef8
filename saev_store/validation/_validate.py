"""`validate`: the quick checks, and on request a check of all bytes.

The deep check reads every byte of a store once, in bounded memory. Threads read pieces that fit a core's cache and scan them
there, so each byte crosses memory once. The caller's thread combines the results in order.
"""

from __future__ import annotations

import math
import time
from collections.abc import Generator, Iterable, Iterator, Mapping, Sequence
from contextlib import closing
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, NamedTuple

import numpy as np
from xxhash import xxh3_128

from saev_store._runtime.cluster import map_shards
from saev_store._runtime.progress import Progress
from saev_store._runtime.threads import ahead
from saev_store.core.arguments import check_flag
from saev_store.core.layout import IntArray, Layout, shard_name
from saev_store.core.token_arrays import LABELS, TokenArray
from saev_store.documents import Metadata, ShardsIndex, rewriting
from saev_store.errors import ArgumentError, DocumentError, SaevStoreError
from saev_store.names import DIGESTS_NAME
from saev_store.problems import Problem, Severity
from saev_store.transport import Transport
from saev_store.validation._judge import NO_RUNS, ShardSummary, is_zero, judge, merge_runs, scan_piece
from saev_store.validation._quick import Survey, check_survey, survey_store, token_array_kind
from saev_store.validation._report import Report

if TYPE_CHECKING:
    from distributed import Client

#: Local pieces fit into a core's cache; a remote piece is one request.
_LOCAL_PIECE_BYTES = 1 << 20
_LOCAL_THREADS = 2
_REMOTE_THREADS = 8
#: Block length where no digests.json defines one.
_DEFAULT_BLOCK_BYTES = 8 << 20
_MAX_BLOCK_BYTES = 1 << 30


def validate(
    transport: Transport,
    metadata: Metadata,
    index: ShardsIndex,
    *,
    dirname: str | None = None,
    deep: bool = False,
    client: Client | str | None = None,
    progress: bool | None = None,
) -> Report:
    """Find all problems of a store, and the examples that they make unreadable.

    Args:
        transport: Rooted at the store's folder.
        metadata: The parsed `metadata.json`.
        index: The parsed `shards.json`.
        dirname: The folder's name, compared with the content hash; None skips this check.
        deep: Read every byte, in a few buffers of fixed size: compare with digests.json where there is one, find rows
            that were never written, and non-finite numbers.
        client: With `deep`, a `distributed.Client` or the address of a scheduler, whose workers read the shards at the same
            address; default: threads of this process.
        progress: Show a bar on stderr; None: when it is a terminal.

    Returns:
        The report. Damage is part of it and never raised; call `raise_if_bad` to raise it.

    Raises:
        ArgumentError: `deep` or `progress` is no boolean, the client is asynchronous, or there is one without `deep`.
        MissingDependencyError: `client` is an address, and distributed is not installed.
        SaevStoreError: the folder cannot be accessed, no scheduler answers, or workers died, one after the other.
    """
    deep, progress = check_flag(deep, name="deep"), check_flag(progress, name="progress", other=None)
    if client is not None and not deep:
        raise ArgumentError(
            "there is a client, but nothing for its workers to read",
            where="client",
            remedy="Pass deep=True.",
        )
    started = time.perf_counter()
    seen = survey_store(transport, metadata, index)
    problems = check_survey(seen, metadata, index, dirname=dirname)
    checked_bytes = 0
    if deep:
        found, checked_bytes = _read_everything(transport, metadata, index, seen, client=client, progress=progress)
        problems += found
    return Report(
        url=transport.url,
        n_examples=metadata.layout.n_examples,
        n_shards=metadata.layout.n_shards,
        problems=tuple(problems),
        deep=deep,
        checked_bytes=checked_bytes,
        elapsed_s=time.perf_counter() - started,
    )


def _read_everything(
    transport: Transport,
    metadata: Metadata,
    index: ShardsIndex,
    seen: Survey,
    *,
    client: Client | str | None,
    progress: bool | None,
) -> tuple[list[Problem], int]:
    layout = metadata.layout
    digests = promised_digests(transport, layout, metadata.recordable, are_declared=metadata.declares_token_arrays)
    sizes = [
        (shard_idx, found.size)
        for shard_idx in range(index.n_listed)
        if (found := seen.found.get(shard_name(shard_idx))) is not None and found.size is not None
    ]
    summaries: list[ShardSummary] = []
    checked_bytes = 0
    total = sum(min(size, layout.shard_nbytes) for _, size in sizes)
    with (
        Progress(total, "validating", shown=progress) as bar,
        closing(
            _read_shards(transport, layout, sizes, digests.block_bytes)
            if client is None
            else _read_on_cluster(client, transport, layout, sizes, digests.block_bytes)
        ) as parts,
    ):
        for n_bytes, summary in parts:
            bar.advance(n_bytes)
            checked_bytes += n_bytes
            if summary is not None:
                summaries.append(summary)
    problems = [*digests.problems, *judge(layout, summaries, digests.files, digests.block_bytes)]
    for array in metadata.recordable:
        found = seen.found.get(array.file_name)
        if found is not None and found.size == array.nbytes(layout):
            checked_bytes += array.nbytes(layout)
            problems += _check_token_array(transport, layout, array, digests)
            if digests.files and array.file_name not in digests.files and not metadata.declares_token_arrays:
                message = f"{array.file_name} has no entry in digests.json, so changed labels cannot be detected"
                problems.append(Problem("digests_absent", message, where=DIGESTS_NAME, severity="info"))
        elif found is None and not metadata.declares_token_arrays and array.file_name in digests.files:
            message = (
                "labels.bin is not there, but digests.json has its digests; vectors are readable, labels are lost. "
                f"Copy the file again, or {rewriting(array.name)}"
            )
            problems.append(Problem("missing_labels", message, where=array.file_name))
    return problems, checked_bytes


def _check_token_array(transport: Transport, layout: Layout, array: TokenArray, digests: Promised) -> Iterator[Problem]:
    read, name, what = _BlockReader(transport, None, digests.block_bytes), array.file_name, token_array_kind(array)
    blocks = [read(job)[1] for job in _blocks(-1, name, 0, array.nbytes(layout), digests.block_bytes)]
    error = next((block.error for block in blocks if block.error), None)
    if error is not None:
        yield Problem(f"unreadable_{what}", f"{name} cannot be read: {error}", where=name)
        return
    promised = digests.files.get(name)
    n_wrong = sum(a.digest != b for a, b in zip(blocks, promised, strict=True)) if promised is not None else 0
    if n_wrong:
        message = (
            f"{n_wrong} of the {len(blocks)} blocks of {name} are not what was written; {array.name} cannot be trusted. "
            f"Copy the file again, or {rewriting(array.name)}"
        )
        yield Problem(f"{what}_digest_mismatch", message, where=name)
    elif array.dtype == "bool":
        spans = [(job.start, job.end) for job in _blocks(-1, name, 0, array.nbytes(layout), digests.block_bytes)]
        if not all(array.is_valid(transport.get_ranges(name, starts=[start], ends=[end])[0]) for start, end in spans):
            message = (
                f"{name} holds bytes other than 0 and 1, which are no bools. Vectors are readable, {array.name} are not. "
                f"Copy the file again, or {rewriting(array.name)}"
            )
            yield Problem(f"{what}_values", message, where=name)


# -- reading -----------------------------------------------------------------------------------------------------------


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


def _read_shards(
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
    read = _BlockReader(transport, layout, block_bytes)
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


def _read_on_cluster(
    client: Client | str, transport: Transport, layout: Layout, sizes: Sequence[tuple[int, int]], block_bytes: int
) -> Generator[tuple[int, ShardSummary | None]]:
    """What `_read_shards` yields, read by the workers of a cluster, each task one shard."""
    read = partial(_read_on_worker, transport, layout, block_bytes)
    with closing(map_shards(read, [[size] for size in sizes], client)) as found:
        for n_bytes, summaries in found:
            yield n_bytes, None
            yield from ((0, summary) for summary in summaries)


def _read_on_worker(
    transport: Transport, layout: Layout, block_bytes: int, sizes: Sequence[tuple[int, int]]
) -> tuple[int, list[ShardSummary]]:
    """What a task does: the bytes of some shards, and their summaries."""
    parts = list(_read_shards(transport, layout, sizes, block_bytes))
    return sum(n_bytes for n_bytes, _ in parts), [summary for _, summary in parts if summary is not None]


def _finished(summary: ShardSummary, runs: list[IntArray]) -> ShardSummary:
    if runs:
        summary.zero_runs = merge_runs(np.concatenate(runs))
    return summary


def _shard_jobs(layout: Layout, shard_idx: int, size: int, block_bytes: int) -> Iterator[_Job]:
    # Of a short shard only whole examples are read; the block that its end cuts has no digest to compare with.
    used = min(layout.used_nbytes(shard_idx), size // layout.example_nbytes * layout.example_nbytes)
    name = shard_name(shard_idx)
    yield from _blocks(shard_idx, name, 0, used, block_bytes)
    if size > layout.used_nbytes(shard_idx):
        yield from _blocks(shard_idx, name, used, min(size, layout.shard_nbytes), block_bytes, padding=True)


def _blocks(
    shard_idx: int, path: str, first: int, last: int, block_bytes: int, *, padding: bool = False
) -> Iterator[_Job]:
    for start in range(first, last, block_bytes):
        yield _Job(shard_idx, path, start, min(start + block_bytes, last), padding)


class _BlockReader:
    """Reads a block in pieces until it is closed, and scans it for zero vectors where a layout is given."""

    def __init__(self, transport: Transport, layout: Layout | None, block_bytes: int) -> None:
        is_near = transport.is_local or transport.cost.max_gap_bytes == math.inf
        self.n_threads = _LOCAL_THREADS if is_near else _REMOTE_THREADS
        self._transport = transport
        self._layout = layout
        self._piece_bytes = min(block_bytes, _LOCAL_PIECE_BYTES) if is_near else block_bytes
        self._closed = False

    def close(self) -> None:
        """End reading after the current piece of each thread; results of these blocks are worthless."""
        self._closed = True

    def __call__(self, job: _Job) -> tuple[_Job, _Seen]:
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
                if (layout := self._layout) is None:
                    continue
                found = scan_piece(piece, start=start // layout.itemsize, d_model=layout.d_model, dtype=layout.dtype)
                n_nonfinite += found.n_nonfinite
                runs.append(found.zero_runs)
        except SaevStoreError as error:
            return job, _Seen("", NO_RUNS, 0, is_zero=False, error=error.message)
        return job, _Seen(digest.hexdigest(), np.concatenate(runs), n_nonfinite, zero, "")


# -- digests -----------------------------------------------------------------------------------------------------------


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


_COPY_DIGESTS = "Copy the file again; a store without one can be validated, but not compared"


def promised_digests(
    transport: Transport,
    layout: Layout,
    arrays: Sequence[TokenArray] = (LABELS,),
    *,
    are_declared: bool = False,
    must_read: bool = False,
) -> Promised:
    """The digests of a store. A missing document is an info; one that cannot be used is an error, because nothing was compared.

    Args:
        transport: Rooted at the store's folder.
        layout: The store's geometry.
        arrays: Token arrays that may have digests.
        are_declared: Whether all of them have to have some; else others may have written labels afterwards.
        must_read: Raise what reading the document fails with, instead of telling it: a store whose digests cannot be read just
            then is not one without digests.

    Raises:
        SaevStoreError: the document cannot be read, with `must_read`.
    """
    from saev_store.writer import load_digests

    try:
        digests = load_digests(transport)
    except DocumentError as error:
        return _none_promised(
            "digests_document",
            f"digests.json cannot be used, so contents were not compared with it: {error.message}. {_COPY_DIGESTS}",
            "error",
        )
    except SaevStoreError as error:
        if must_read:
            raise
        return _none_promised(
            "unreadable_digests",
            f"digests.json cannot be read, so contents were not compared with it: {error.message}",
            "error",
        )
    if digests is None:
        message = (
            "there is no digests.json, so changed bits and swapped shards cannot be detected; `saev-store copy` "
            "makes a copy that has one"
        )
        return _none_promised("digests_absent", message, "info")
    if digests.block_bytes % 4 or digests.block_bytes > _MAX_BLOCK_BYTES:
        message = f"block_bytes is {digests.block_bytes}; it must be a multiple of 4, at most 1 GiB. {_COPY_DIGESTS}"
        return _none_promised("digests_document", message, "error")
    expected = {shard_name(shard_idx): layout.used_nbytes(shard_idx) for shard_idx in range(layout.n_shards)}
    expected |= {array.file_name: array.nbytes(layout) for array in arrays}
    optional = set[str]() if are_declared else {LABELS.file_name}
    files: dict[str, tuple[str, ...]] = {}
    problems: list[Problem] = []
    for name, nbytes in expected.items():
        entry = digests.files.get(name)
        if entry is not None and entry.nbytes == nbytes:
            files[name] = entry.digests
        elif entry is not None or name not in optional:
            what = "has no entry" if entry is None else f"has {entry.nbytes} bytes, metadata.json implies {nbytes}"
            message = f"{name} {what} in digests.json, so its contents were not compared. {_COPY_DIGESTS}"
            problems.append(Problem("digests_document", message, where=DIGESTS_NAME, loc=("files", name)))
    return Promised(digests.block_bytes, files, tuple(problems))


def _none_promised(kind: str, message: str, severity: Severity) -> Promised:
    return Promised(_DEFAULT_BLOCK_BYTES, {}, (Problem(kind, message, where=DIGESTS_NAME, severity=severity),))
