"""Validates an Energon data set: documents against index, index against tars."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING

from saev_store._runtime.progress import Progress
from saev_store.errors import CorruptShardError, DeadlineError, DocumentError, NotFoundError, SaevStoreError, brief
from saev_store.problems import Problem
from saev_store.sources.address import full_url
from saev_store.sources.energon.index_sqlite import SqliteIndex
from saev_store.sources.energon.keys import idx_path
from saev_store.sources.energon.tars import BLOCK, Scan, scan_shard
from saev_store.validation import Report

if TYPE_CHECKING:
    from saev_store.sources.energon.reader import EnergonDataset

#: On opening, a smaller index is checked whole; a larger one is checked where it is used.
_EAGER_NBYTES = 16 << 20
#: Limit of the local tars that are looked at on opening.
_EAGER_SHARDS = 1024
_PAGE = 65_536

#: Number of samples and of parts of each shard, counted in the index.
Counts = dict[int, tuple[int, int]]


def check_on_open(dataset: EnergonDataset, *, damaged_ok: bool) -> tuple[Problem, ...]:
    """Check counts, a small index whole, and the sizes of local tars.

    Raises:
        DocumentError, CorruptShardError: the first error, unless `damaged_ok`.
    """
    index, n_shards = dataset.places.lists_parts(), len(dataset.documents.shards)
    counts: Counts | None = None
    problems: list[Problem] = []
    if index is not None:
        counts, problems = _counted(dataset, index, whole=dataset.places.index_nbytes <= _EAGER_NBYTES)
    is_near = dataset.transport.is_local and n_shards <= _EAGER_SHARDS
    for shard in range(n_shards) if is_near or counts else ():
        problems += _shard(dataset, shard, counts, looks_at_tar=is_near)
        if any(problem.severity == "error" for problem in problems) and not damaged_ok:
            break
    first = next((problem for problem in problems if problem.severity == "error"), None)
    if first is not None and not damaged_ok:
        kind = DocumentError if first.kind == "index_sqlite" else CorruptShardError
        remedy = "Prepare the data set again, or restore its tars."
        raise kind(first.message, where=first.where, remedy=remedy, problems=problems)
    return tuple(problems)


def _counted(dataset: EnergonDataset, index: SqliteIndex, *, whole: bool) -> tuple[Counts | None, list[Problem]]:
    """The counts of an index (None without `whole`, or if they are wrong), and how they differ from `.info.json`."""
    names, expected = dataset.documents.shards, dataset.documents.counts.tolist()
    warnings: list[Problem] = []
    try:
        counts = index.counts() if whole else {shard: (index.last(shard)[0], 0) for shard in range(len(names))}
        messages = [
            f"it has samples or parts of shard {shard}, but there are {len(names)} shards"
            for shard in counts if shard >= len(names)
        ]  # fmt: skip
        for shard, name in enumerate(names):
            n_samples = counts.get(shard, (0, 0))[0]
            if n_samples != expected[shard]:
                messages.append(f"it has {n_samples:,} samples of {brief(name)}, .info.json says {expected[shard]:,}")
        for key in index.repeated_keys() if whole else ():
            message = f"several samples have the key {brief(key)}: they are found by position only"
            warnings.append(Problem("repeated_key", message, index.where, severity="warning"))
    except (DocumentError, DeadlineError) as error:
        counts, messages = {}, [error.message]
    errors = [Problem("index_sqlite", message, index.where) for message in messages[:8]]
    return (counts if whole and not errors else None), [*errors, *warnings]


def _shard(
    dataset: EnergonDataset,
    shard: int,
    counts: Counts | None,
    *,
    looks_at_tar: bool = True,
    reads_tar_idx: bool = False,
) -> list[Problem]:
    """Check that a shard exists, is long enough, and ends where its index does; with `counts` every row of the index."""
    places, name = dataset.places, dataset.documents.shards[shard]
    transport, where, lost = dataset.transport, places.where(shard), _lost(dataset, shard)
    try:
        nbytes = transport.size(name) if looks_at_tar else None
        offsets = _offsets(dataset, shard, counts, nbytes)
        if reads_tar_idx and counts is not None and places.offsets(shard).tolist() != offsets:
            path = full_url(transport, idx_path(name))
            raise CorruptShardError("it has other offsets than index.sqlite: one of them is stale", where=path)
        end = offsets[-1]
        # Members that belong to no sample are in no index.
        if nbytes is not None and nbytes > end and (end or scan_shard(transport, name).samples):
            (block,) = transport.get_ranges(name, starts=[end], ends=[min(end + BLOCK, nbytes)])
            if any(bytes(block)):
                message = f"the index ends at {end:,}, and the tar has more: files were added after it was indexed"
                return [Problem("stale_index", message, where, lost=lost)]
    except NotFoundError as error:
        is_idx = idx_path(name) in str(error.where)
        message = f"{idx_path(name)} is missing" if is_idx else "the shard is missing"
        return [Problem("missing_shard", message, where, lost=lost)]
    except SaevStoreError as error:
        kind = "index_sqlite" if isinstance(error, DocumentError) else error.kind
        return [Problem(kind, error.message, error.where or where, lost=lost)]
    return []


def _offsets(dataset: EnergonDataset, shard: int, counts: Counts | None, nbytes: int | None) -> list[int]:
    """The offsets of a shard's samples, and the end of the last one; without `counts` the end alone.

    Raises:
        DocumentError: rows of the index contradict each other, or the size of the tar.
    """
    places, n_samples = dataset.places, int(dataset.documents.counts[shard])
    index = places.lists_parts()
    if index is None:
        return places.offsets(shard).tolist()
    message, offsets, n_parts, end = "", list[int](), 0, 0
    if counts is None:
        end = index.last(shard)[1]
    else:
        for first in range(0, n_samples, _PAGE):
            for sample in index.samples(shard, first, min(first + _PAGE, n_samples)):
                if offsets and sample.offset != end:
                    message = f"sample {brief(sample.key)} of shard {shard} does not begin at {end:,}, where the one before ends"
                offsets.append(sample.offset)
                end, n_parts = sample.offset + sample.nbytes, n_parts + len(sample.parts)
        if n_parts != counts.get(shard, (0, 0))[1]:
            message = f"parts of shard {shard} belong to no sample"
    if nbytes is not None and end > nbytes:
        message = f"the samples of shard {shard} end at {end:,}, outside the tar of {nbytes:,} bytes"
    if message:
        raise DocumentError(message, where=index.where)
    return [*offsets, end]


def _lost(dataset: EnergonDataset, shard: int) -> tuple[tuple[int, int], ...]:
    span = dataset.view.span(shard)
    return (span,) if span[0] < span[1] else ()


def validate(dataset: EnergonDataset, *, deep: bool, progress: bool | None) -> Report:
    """Implement `EnergonDataset.validate`."""
    started_s = time.perf_counter()
    documents, index = dataset.documents, dataset.places.lists_parts()
    problems, counts = list(documents.problems), None
    if index is not None:
        counts, found = _counted(dataset, index, whole=True)
        problems += found
    shards = sorted({int(shard) for shard in dataset.view.shard_ids})
    checked_nbytes = 0
    with Progress(len(shards), "checking", shown=progress, unit="tars") as bar:
        for shard in shards:
            found = _shard(dataset, shard, counts, reads_tar_idx=True)
            problems += found
            if deep and not any(problem.kind == "missing_shard" for problem in found):
                problems += _headers(dataset, shard)
                checked_nbytes += dataset.transport.size(documents.shards[shard])
            bar.advance(1)
    elapsed_s = time.perf_counter() - started_s
    return Report(dataset.url, len(dataset), len(shards), tuple(problems), deep, checked_nbytes, elapsed_s)


def _headers(dataset: EnergonDataset, shard: int) -> list[Problem]:
    """Compare every sample and part of a tar with the index."""
    places, n_samples, n_found = dataset.places, int(dataset.documents.counts[shard]), 0
    where = places.where(shard)
    try:
        scan = Scan.of(dataset.transport, dataset.documents.shards[shard])
        for sample in scan.samples():
            if n_found == n_samples or places.samples(shard, n_found, n_found + 1) != [sample]:
                raise CorruptShardError(
                    f"sample {n_found} ({brief(sample.key)}) is not what the index says", where=where
                )
            n_found += 1
        if n_found != n_samples:
            raise CorruptShardError(f"the tar has {n_found:,} samples, the index {n_samples:,}", where=where)
    except SaevStoreError as error:
        return [Problem(error.kind, error.message, where, lost=_lost(dataset, shard))]
    return [Problem("odd_tar", oddity, where, severity="warning") for oddity in scan.oddities]
