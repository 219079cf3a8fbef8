"""`validate`: the quick checks, and on request a check of all bytes, which are read once, in pieces that fit a core's cache."""

from __future__ import annotations

import math
import time
from collections.abc import Iterable, Iterator, Sequence
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
from saev_store.documents import Metadata, ShardsIndex
from saev_store.errors import ArgumentError, DocumentError, SaevStoreError
from saev_store.names import DIGESTS_NAME
from saev_store.problems import Problem
from saev_store.transport import Transport
from saev_store.validation.quick import Survey, check_survey, survey_store, token_array_kind, token_array_remedy
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
    """Find all problems of a store, and the examples that they make unreadable; see `ShardStore.validate`.

    Damage is part of the report and never raised.

    Raises:
        ArgumentError: `deep` or `progress` is not a boolean, the client is asynchronous, or there is one without `deep`.
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
        with Progress(sum(file.nbytes for file in files), "validating", shown=progress) as bar:

            def counted(block: _Block) -> _Block:
                bar.advance(block.end - block.start)
                return block

            if client is None:
                blocks: Iterable[_Block] = _read(transport, layout, digests.block_bytes, files)
            else:
                read_file = partial(_read_file, transport, layout, digests.block_bytes)
                blocks = chain.from_iterable(map_shards(read_file, files, client))
            problems += [*found, *_judge(layout, map(counted, blocks), digests)]
    return Report(
        url=transport.url,
        n_examples=layout.n_examples,
        n_shards=layout.n_shards,
        problems=tuple(problems),
        deep=deep,
        checked_bytes=sum(file.nbytes for file in files),
        elapsed_s=time.perf_counter() - started,
    )


def _digests_of(transport: Transport, metadata: Metadata, seen: Survey) -> tuple[Digests, list[Problem]]:
    """The digests of files, and problems of their document: what was not compared is not called right."""
    from saev_store.writer import Digests, load_digests

    layout, problems, none = metadata.layout, list[Problem](), Digests(_DEFAULT_BLOCK_BYTES, {})
    try:
        digests = load_digests(transport)
    except SaevStoreError as error:
        kind = "digests_document" if isinstance(error, DocumentError) else "unreadable_digests"
        return none, [Problem(kind, f"contents were not compared with digests.json: {error.message}", DIGESTS_NAME)]
    if digests is None:
        message = (
            "there is no digests.json, so changed bits cannot be detected; `saev-store copy` makes a copy with one"
        )
        return none, [Problem("digests_absent", message, DIGESTS_NAME, severity="info")]
    if digests.block_bytes % layout.itemsize:
        message = f"block_bytes is {digests.block_bytes}; it must be a multiple of {layout.itemsize}"
        return none, [Problem("digests_document", message, DIGESTS_NAME)]
    lengths = {shard_name(shard_idx): layout.used_nbytes(shard_idx) for shard_idx in range(layout.n_shards)}
    lengths |= {array.file_name: array.nbytes(layout) for array in metadata.recordable}
    usable = {name: entry for name, entry in digests.files.items() if entry.nbytes == lengths.get(name)}
    labels = None if metadata.declares_token_arrays else LABELS.file_name  # others may have written them afterwards
    for name in [name for name in lengths if name not in usable]:
        message = f"{name} has no entry of its size in digests.json, so it was not compared"
        if name != labels or name in digests.files:
            problems.append(Problem("digests_document", message, DIGESTS_NAME))
        elif name in seen.files:
            problems.append(Problem("digests_absent", message, DIGESTS_NAME, severity="info"))
    if labels in usable and labels not in {*seen.files, *seen.others}:
        message = f"{labels} is not there, but digests.json has its digests. {token_array_remedy(LABELS)}"
        problems.append(Problem("missing_labels", message, labels))
    return Digests(digests.block_bytes, usable), problems


class _File(NamedTuple):
    """The part of a file that is read: whole examples of a shard, or a token array."""

    name: str
    nbytes: int
    shard_idx: int = -1
    array: TokenArray | None = None


class _Block(NamedTuple):
    """One block of a file, and the result of reading it.

    Attributes:
        file, start, end: The bytes of the block.
        digest: Its digest; "" if it could not be read.
        zero_runs: Ranges of elements of the shard that are zero, as `scan_piece` describes.
        n_odd: Count of elements of a shard that are infinite or NaN, or of pieces of a token array that are not its values.
        error: The reason if it could not be read, else "".
    """

    file: _File
    start: int
    end: int
    digest: str = ""
    zero_runs: IntArray = NO_RUNS
    n_odd: int = 0
    error: str = ""


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


def _read_file(transport: Transport, layout: Layout, block_bytes: int, file: _File) -> list[_Block]:
    """All blocks of a file, read by a worker of a cluster."""
    return list(_read(transport, layout, block_bytes, [file]))


def _read(transport: Transport, layout: Layout, block_bytes: int, files: Iterable[_File]) -> Iterator[_Block]:
    """All blocks of some files, in order, read ahead by threads."""
    is_near = transport.is_local or transport.cost.max_gap_bytes == math.inf
    piece_bytes, n_threads = (_LOCAL_PIECE_BYTES, _LOCAL_THREADS) if is_near else (block_bytes, _REMOTE_THREADS)
    blocks = (
        _Block(file, start, min(start + block_bytes, file.nbytes))
        for file in files
        for start in range(0, file.nbytes, block_bytes)
    )
    return ahead(partial(_read_block, transport, layout, piece_bytes), blocks, n_threads)


def _read_block(transport: Transport, layout: Layout, piece_bytes: int, block: _Block) -> _Block:
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
            found, n = scan_piece(piece, start=start // layout.itemsize, d_model=layout.d_model, dtype=layout.dtype)
            n_odd += n
            runs.append(found)
    except SaevStoreError as error:
        return block._replace(error=error.message)
    return block._replace(digest=digest.hexdigest(), zero_runs=np.concatenate(runs), n_odd=n_odd)


def _judge_array(array: TokenArray, blocks: Sequence[_Block], promised: Sequence[str]) -> Iterator[Problem]:
    name, what, remedy = array.file_name, token_array_kind(array), token_array_remedy(array)
    if error := next((block.error for block in blocks if block.error), ""):
        yield Problem(f"unreadable_{what}", f"{name} cannot be read: {error}. {remedy}", name)
    elif any(block.digest != digest for block, digest in zip(blocks, promised, strict=False)):
        yield Problem(f"{what}_digest_mismatch", f"{name} is not what was written. {remedy}", name)
    elif any(block.n_odd for block in blocks):
        yield Problem(f"{what}_values", f"{name} holds bytes other than 0 and 1, so not bools. {remedy}", name)


def _judge_shard(layout: Layout, blocks: Sequence[_Block], promised: Sequence[str]) -> Iterator[Problem]:
    """Problems that the bytes of a shard show."""
    file = blocks[0].file
    name, first, used = file.name, file.shard_idx * layout.examples_per_shard, layout.used_nbytes(file.shard_idx)

    def touched(blocks: Iterable[_Block]) -> Ranges:
        size = layout.example_nbytes
        return merge_ranges((first + block.start // size, first - (-block.end // size)) for block in blocks)

    if unread := [block for block in blocks if block.error]:
        yield Problem("unreadable_shard", f"{name} cannot be read: {unread[0].error}", name, lost=touched(unread))
    # The rest of a block that a short file cuts cannot be checked, so it is among them.
    wrong = [
        block for block, digest in zip(blocks, promised, strict=False) if not block.error and block.digest != digest
    ]
    if wrong:
        message = f"{len(wrong)} of the {len(promised)} blocks of {name} are not what was written"
        yield Problem("digest_mismatch", f"{message}, the first at byte {wrong[0].start:,}", name, lost=touched(wrong))
    if n_odd := sum(block.n_odd for block in blocks):
        message = f"{n_odd:,} numbers in {name} are infinite or not a number; the recorded model may have overflowed"
        yield Problem("non_finite", message, name, severity="warning")
    runs = merge_runs(np.concatenate([block.zero_runs for block in blocks]))
    zero = merge_ranges(whole_units(runs, layout.vectors_per_example * layout.d_model).tolist())
    if zero:
        n_zero = sum(end - start for start, end in zero)
        message = f"{n_zero:,} of the {layout.examples_in(file.shard_idx):,} examples of {name} are nothing but zeros"
        if promised and file.nbytes == used and not (unread or wrong):
            message = f"{message}, and were recorded like this, as digests.json shows"
            yield Problem("zero_rows", message, name, severity="warning")
        else:
            lost = tuple((first + start, first + end) for start, end in zero)
            yield Problem("zero_rows", f"{message}, as rows that were never written are", name, lost=lost)


def _judge(layout: Layout, blocks: Iterable[_Block], digests: Digests) -> Iterator[Problem]:
    """Problems that only the bytes show."""
    for file, found in groupby(blocks, key=lambda block: block.file):
        promised = digests.files[file.name].digests if file.name in digests.files else ()
        if file.array is not None:
            yield from _judge_array(file.array, list(found), promised)
        else:
            yield from _judge_shard(layout, list(found), promised)
