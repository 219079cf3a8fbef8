"""`validate`: the quick checks, and on request a check of all bytes.

The deep check reads the bytes of all examples and token arrays once, in bounded memory. Threads read pieces that fit a core's
cache and scan them there, so each byte crosses memory once. The caller's thread combines the results in order.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import partial
from itertools import chain, groupby
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
from saev_store.validation.quick import Survey, check_survey, survey_store, token_array_kind
from saev_store.validation.report import Ranges, Report, merge_ranges
from saev_store.validation.scan import NO_RUNS, merge_runs, scan_piece, whole_units

if TYPE_CHECKING:
    from distributed import Client

    from saev_store.writer import Digests

#: Local pieces fit into a core's cache; a remote piece is one request.
_LOCAL_PIECE_BYTES = 1 << 20
_LOCAL_THREADS, _REMOTE_THREADS = 4, 16
#: Block length where no digests.json defines one.
_DEFAULT_BLOCK_BYTES = 8 << 20


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
        deep: Read the bytes of all examples and token arrays, in a few buffers of fixed size: compare with digests.json where
            there is one, find rows that were never written, and non-finite numbers.
        client: With `deep`, a `distributed.Client` or the address of a scheduler, whose workers read the files at the same
            address; default: threads of this process.
        progress: Show a bar on stderr; None: when it is a terminal.

    Returns:
        The report. Damage is part of it and never raised; call `raise_if_bad` to raise it.

    Raises:
        ArgumentError: `deep` or `progress` is not a boolean, the client is asynchronous, or there is one without `deep`.
        MissingDependencyError: `client` is an address, and distributed is not installed.
        SaevStoreError: the folder cannot be accessed, no scheduler answers, or workers died, one after the other.
    """
    deep, progress = check_flag(deep, name="deep"), check_flag(progress, name="progress", other=None)
    if client is not None and not deep:
        raise ArgumentError(
            "there is a client, but nothing for its workers to read", where="client", remedy="Pass deep=True."
        )
    started = time.perf_counter()
    layout, seen = metadata.layout, survey_store(transport, metadata, index)
    problems = check_survey(seen, metadata, index, dirname=dirname)
    files = _files_of(metadata, index, seen) if deep else []
    if deep:
        digests, found = _digests_of(transport, metadata, seen)
        problems += found
        with Progress(sum(file.nbytes for file in files), "validating", shown=progress) as bar:
            problems += _judge(
                layout, _read_all(transport, layout, digests.block_bytes, files, client, bar.advance), digests
            )
    return Report(
        url=transport.url,
        n_examples=layout.n_examples,
        n_shards=layout.n_shards,
        problems=tuple(problems),
        deep=deep,
        checked_bytes=sum(file.nbytes for file in files),
        elapsed_s=time.perf_counter() - started,
    )


# -- digests -----------------------------------------------------------------------------------------------------------


def _digests_of(transport: Transport, metadata: Metadata, seen: Survey) -> tuple[Digests, list[Problem]]:
    """The digests of files, and problems of their document: what was not compared is not called right."""
    from saev_store.writer import Digests, load_digests

    problems: list[Problem] = []

    def found(kind: str, message: str, *, severity: Severity = "error", where: str = DIGESTS_NAME) -> None:
        problems.append(Problem(kind, message, where=where, severity=severity))

    layout, digests = metadata.layout, None
    try:
        digests = load_digests(transport)
        if digests is None:
            message = (
                "there is no digests.json, so changed bits cannot be detected; `saev-store copy` makes a copy with one"
            )
            found("digests_absent", message, severity="info")
        elif digests.block_bytes % layout.itemsize:
            message = f"block_bytes is {digests.block_bytes}; it must be a multiple of {layout.itemsize}"
            raise DocumentError(message, where=DIGESTS_NAME)
    except SaevStoreError as error:
        kind, digests = "digests_document" if isinstance(error, DocumentError) else "unreadable_digests", None
        found(kind, f"digests.json cannot be used, so contents were not compared with it: {error.message}")
    if digests is None:
        return Digests(_DEFAULT_BLOCK_BYTES, {}), problems
    lengths = {shard_name(shard_idx): layout.used_nbytes(shard_idx) for shard_idx in range(layout.n_shards)}
    lengths |= {array.file_name: array.nbytes(layout) for array in metadata.recordable}
    usable = {name: entry for name, entry in digests.files.items() if entry.nbytes == lengths.get(name)}
    labels, is_optional = (
        LABELS.file_name,
        not metadata.declares_token_arrays,
    )  # others may have written them afterwards
    for name in lengths:
        if name in usable:
            continue
        if name != labels or not is_optional or name in digests.files:
            found("digests_document", f"{name} has no entry of its size in digests.json, so it was not compared")
        elif name in seen.files:
            found("digests_absent", f"{name} has no entry in digests.json, so it was not compared", severity="info")
    if is_optional and labels in usable and labels not in {*seen.files, *seen.others}:
        message = f"{labels} is not there, but digests.json has its digests. Copy it again, or {rewriting(LABELS.name)}"
        found("missing_labels", message, where=labels)
    return Digests(digests.block_bytes, usable), problems


# -- reading -----------------------------------------------------------------------------------------------------------


class _File(NamedTuple):
    """The part of a file that is read: whole examples of a shard, or a token array."""

    name: str
    nbytes: int
    shard_idx: int = -1
    array: TokenArray | None = None


class _Block(NamedTuple):
    """One block of a file."""

    file: _File
    start: int
    end: int


class _Seen(NamedTuple):
    """Result of reading a block.

    Attributes:
        block: The block.
        digest: Its digest; "" if it could not be read.
        zero_runs: Ranges of elements of the shard that are zero, as `scan_piece` describes.
        n_odd: Count of elements of a shard that are infinite or NaN, or of pieces of a token array that are not its values.
        error: The reason if it could not be read, else "".
    """

    block: _Block
    digest: str
    zero_runs: IntArray
    n_odd: int
    error: str


def _files_of(metadata: Metadata, index: ShardsIndex, seen: Survey) -> list[_File]:
    """The shards, and the token arrays of the right size."""
    layout, files = metadata.layout, list[_File]()
    for shard_idx in range(index.n_listed):
        size, _ = seen.files.get(name := shard_name(shard_idx), (0, 0))
        used = min(layout.used_nbytes(shard_idx), size // layout.example_nbytes * layout.example_nbytes)
        files.append(_File(name, used, shard_idx))
    for array in metadata.recordable:
        size, _ = seen.files.get(array.file_name, (0, 0))
        if size == array.nbytes(layout):
            files.append(_File(array.file_name, size, array=array))
    return [file for file in files if file.nbytes]


def _read_all(
    transport: Transport,
    layout: Layout,
    block_bytes: int,
    files: Sequence[_File],
    client: Client | str | None,
    advance: Callable[[int], None],
) -> Iterator[_Seen]:
    """All blocks of all files, in order, read by this process or by the workers of a cluster; `advance` gets their lengths."""
    if client is None:
        parts: Iterable[Iterable[_Seen]] = [_read(transport, layout, block_bytes, files)]
    else:
        parts = map_shards(partial(_read_file, transport, layout, block_bytes), files, client)
    for seen in chain.from_iterable(parts):
        advance(seen.block.end - seen.block.start)
        yield seen


def _read_file(transport: Transport, layout: Layout, block_bytes: int, file: _File) -> list[_Seen]:
    """All blocks of a file, read by a worker of a cluster."""
    return list(_read(transport, layout, block_bytes, [file]))


def _read(transport: Transport, layout: Layout, block_bytes: int, files: Iterable[_File]) -> Iterator[_Seen]:
    """All blocks of some files, in order, read ahead by threads."""
    is_near = transport.is_local or transport.cost.max_gap_bytes == math.inf
    piece_bytes, n_threads = (_LOCAL_PIECE_BYTES, _LOCAL_THREADS) if is_near else (block_bytes, _REMOTE_THREADS)
    blocks = (
        _Block(file, start, min(start + block_bytes, file.nbytes))
        for file in files
        for start in range(0, file.nbytes, block_bytes)
    )
    return ahead(partial(_read_block, transport, layout, piece_bytes), blocks, n_threads)


def _read_block(transport: Transport, layout: Layout, piece_bytes: int, block: _Block) -> _Seen:
    digest, runs, n_odd, array = xxh3_128(), [NO_RUNS], 0, block.file.array
    buffer = memoryview(bytearray(min(piece_bytes, block.end - block.start)))
    try:
        for start in range(block.start, block.end, piece_bytes):
            piece = buffer[: block.end - start]
            transport.readinto(block.file.name, starts=[start], buffers=[piece])
            digest.update(piece)
            if array is not None:
                n_odd += not array.is_valid(piece)
                continue
            found = scan_piece(piece, start=start // layout.itemsize, d_model=layout.d_model, dtype=layout.dtype)
            n_odd += found.n_nonfinite
            runs.append(found.zero_runs)
    except SaevStoreError as error:
        return _Seen(block, "", NO_RUNS, 0, error.message)
    return _Seen(block, digest.hexdigest(), np.concatenate(runs), n_odd, "")


# -- judging -----------------------------------------------------------------------------------------------------------


def _judge_array(array: TokenArray, blocks: Sequence[_Seen], digests: Digests) -> Iterator[Problem]:
    name, what = array.file_name, token_array_kind(array)
    remedy = f"Vectors are readable, {array.name} are not. Copy the file again, or {rewriting(array.name)}"
    promised = digests.files[name].digests if name in digests.files else ()
    n_wrong = sum(block.digest != digest for block, digest in zip(blocks, promised, strict=False))
    if error := next((block.error for block in blocks if block.error), ""):
        yield Problem(f"unreadable_{what}", f"{name} cannot be read: {error}. {remedy}", where=name)
    elif n_wrong:
        message = f"{n_wrong} of the {len(blocks)} blocks of {name} are not what was written. {remedy}"
        yield Problem(f"{what}_digest_mismatch", message, where=name)
    elif any(block.n_odd for block in blocks):
        yield Problem(f"{what}_values", f"{name} holds bytes other than 0 and 1, so not bools. {remedy}", where=name)


def _judge_shard(layout: Layout, blocks: Sequence[_Seen], digests: Digests) -> tuple[list[Problem], int]:
    """Problems that the bytes of a shard show, and the number of zero vectors in examples that are not zero."""
    file, problems = blocks[0].block.file, list[Problem]()
    name, n_examples = file.name, layout.examples_in(file.shard_idx)
    first, used = file.shard_idx * layout.examples_per_shard, layout.used_nbytes(file.shard_idx)

    def found(kind: str, message: str, lost: Ranges = (), severity: Severity = "error") -> None:
        problems.append(Problem(kind, message, where=name, severity=severity, lost=lost))

    def touched(blocks: Iterable[_Block]) -> Ranges:
        size = layout.example_nbytes
        return merge_ranges((first + block.start // size, first - (-block.end // size)) for block in blocks)

    if unread := [seen.block for seen in blocks if seen.error]:
        error = next(seen.error for seen in blocks if seen.error)
        message = f"{len(unread)} of the {len(blocks)} blocks of {name} cannot be read: {error}"
        found("unreadable_shard", message, touched(unread))
    promised = digests.files[name].digests if name in digests.files else ()
    wrong = [
        seen.block
        for seen, digest in zip(blocks, promised, strict=False)
        # A block that a short file cuts is part of `short_shard`.
        if not seen.error and seen.digest != digest and seen.block.end in {seen.block.start + digests.block_bytes, used}
    ]
    if wrong:
        message = (
            f"{len(wrong)} of the {len(promised)} blocks of {name} are not what was written, the first at byte "
            f"{wrong[0].start:,}; all examples in these blocks are suspect"
        )
        found("digest_mismatch", message, touched(wrong))
    if n_odd := sum(seen.n_odd for seen in blocks):
        message = f"{n_odd:,} numbers in {name} are infinite or not a number; the recorded model may have overflowed"
        found("non_finite", message, severity="warning")
    runs = merge_runs(np.concatenate([seen.zero_runs for seen in blocks]))
    zero = whole_units(runs, layout.vectors_per_example * layout.d_model)
    n_zero, n_zero_vectors = (
        int((units[:, 1] - units[:, 0]).sum()) for units in (zero, whole_units(runs, layout.d_model))
    )
    if n_zero:
        message = f"{n_zero:,} of the {n_examples:,} examples of {name} are nothing but zeros"
        if promised and file.nbytes == used and not (unread or wrong):
            found("zero_rows", f"{message}, and were recorded like this, as digests.json shows", severity="warning")
        else:
            lost = merge_ranges((first + start, first + end) for start, end in zero.tolist())
            found("zero_rows", f"{message}, as rows that were never written are", lost)
    return problems, n_zero_vectors - n_zero * layout.vectors_per_example


def _judge(layout: Layout, seen: Iterable[_Seen], digests: Digests) -> list[Problem]:
    """Problems that only the bytes show."""
    problems, n_zero_vectors = list[Problem](), 0
    for file, found in groupby(seen, key=lambda seen: seen.block.file):
        blocks = list(found)
        if file.array is not None:
            problems += _judge_array(file.array, blocks, digests)
            continue
        of_shard, n = _judge_shard(layout, blocks, digests)
        problems += of_shard
        n_zero_vectors += n
    if n_zero_vectors:
        message = (
            f"{n_zero_vectors:,} vectors are zero in examples that are not; models that mask or gate tokens make these"
        )
        problems.append(Problem("zero_vectors", message, severity="info"))
    return problems
