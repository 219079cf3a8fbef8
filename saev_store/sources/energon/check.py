"""Validates an Energon data set: documents against index, index against tars."""

from __future__ import annotations

import time
from collections.abc import Iterator
from typing import TYPE_CHECKING

from saev_store._runtime.progress import Progress
from saev_store.errors import CorruptShardError, DocumentError, NotFoundError, SaevStoreError, brief
from saev_store.problems import Problem
from saev_store.sources.energon.keys import idx_path
from saev_store.sources.energon.tars import BLOCK, Sample, scan_shard
from saev_store.validation import Report

if TYPE_CHECKING:
    from saev_store.sources.energon.index_sqlite import SqliteIndex
    from saev_store.sources.energon.reader import EnergonDataset

#: Limit of the local tars that are looked at on opening.
_EAGER_SHARDS = 1024
#: Samples that are read from the index at once.
_PAGE = 65_536


def check_on_open(dataset: EnergonDataset, *, damaged_ok: bool) -> tuple[Problem, ...]:
    """Compare the sizes of local tars with the index.

    Raises:
        DocumentError, CorruptShardError: the first error, unless `damaged_ok`.
    """
    n_shards = len(dataset.documents.shards)
    problems: list[Problem] = []
    for shard in range(n_shards) if dataset.transport.is_local and n_shards <= _EAGER_SHARDS else ():
        problems += check_shard(dataset, shard)
        if problems and not damaged_ok:
            kind = DocumentError if problems[0].kind == "index_sqlite" else CorruptShardError
            remedy = "Prepare the data set again, or restore its tars."
            raise kind(problems[0].message, where=problems[0].where, remedy=remedy, problems=problems)
    return tuple(problems)


def check_shard(dataset: EnergonDataset, shard: int, *, rows: bool = False, deep: bool = False) -> list[Problem]:
    """Check that a shard exists, is long enough, and ends where its index does.

    Args:
        dataset: The data set.
        shard: The number of the shard.
        rows: Check every row of the index, and the `.tar.idx`.
        deep: Compare every header in the tar with the index.
    """
    transport, name, where = dataset.transport, dataset.documents.shards[shard], dataset.places.where(shard)
    span = dataset.view.span(shard)
    lost = (span,) if span[0] < span[1] else ()
    try:
        nbytes, end = transport.size(name), _end(dataset, shard, rows=rows)
        if end > nbytes:
            raise DocumentError(f"its samples end at {end:,}, outside the tar of {nbytes:,} bytes", where=where)
        if 0 < end < nbytes:
            (block,) = transport.get_ranges(name, starts=[end], ends=[min(end + BLOCK, nbytes)])
            if any(bytes(block)):
                message = f"the index ends at {end:,}, and the tar has more: files were added after it was indexed"
                return [Problem("stale_index", message, where, lost=lost)]
        oddities = _compare_headers(dataset, shard) if deep else []
    except NotFoundError as error:
        return [Problem("missing_shard", f"a file is missing: {error.message}", error.where or where, lost=lost)]
    except SaevStoreError as error:
        kind = "index_sqlite" if isinstance(error, DocumentError) else error.kind
        return [Problem(kind, error.message, error.where or where, lost=lost)]
    return [Problem("odd_tar", oddity, where, severity="warning") for oddity in oddities]


def _end(dataset: EnergonDataset, shard: int, *, rows: bool) -> int:
    """The end of a shard's last sample, by the index.

    Raises:
        DocumentError: rows of the index contradict each other, or `.info.json`.
        CorruptShardError: `.tar.idx` has other offsets.
    """
    places, n_samples = dataset.places, int(dataset.documents.counts[shard])
    index = places.lists_parts()
    if index is None:
        return int(places.offsets(shard)[-1])
    n_found, end = index.last(shard)
    if n_found != n_samples:
        message = f"it has {n_found:,} samples of shard {shard}, the document has {n_samples:,}"
        raise DocumentError(message, where=index.where)
    if rows:
        offsets, end = list[int](), 0
        for sample in _rows(index, shard, n_samples):
            if offsets and sample.offset != end:
                message = (
                    f"sample {brief(sample.key)} of shard {shard} does not begin at {end:,}, where the one before ends"
                )
                raise DocumentError(message, where=index.where)
            offsets.append(sample.offset)
            end = sample.offset + sample.nbytes
        if places.offsets(shard).tolist() != [*offsets, end]:
            path = dataset.transport.where(idx_path(dataset.documents.shards[shard]))
            raise CorruptShardError("it has other offsets than index.sqlite: one of them is stale", where=path)
    return end


def _rows(index: SqliteIndex, shard: int, n_samples: int) -> Iterator[Sample]:
    """All samples of a shard, a page at a time."""
    for first in range(0, n_samples, _PAGE):
        yield from index.samples(shard, first, min(first + _PAGE, n_samples))


def _compare_headers(dataset: EnergonDataset, shard: int) -> list[str]:
    """Compare every sample and part of a tar with the index, and return what is odd about the tar.

    Raises:
        CorruptShardError: they differ, or the tar is damaged.
    """
    places, index = dataset.places, dataset.places.lists_parts()
    found = scan_shard(dataset.transport, dataset.documents.shards[shard])
    if index is None:
        same = [sample.offset for sample in found.samples] == places.offsets(shard)[:-1].tolist()
    else:
        same = found.samples == list(_rows(index, shard, int(dataset.documents.counts[shard])))
    if not same:
        raise places.stale(shard, "its headers differ from the index")
    return found.oddities


def validate(dataset: EnergonDataset, *, deep: bool, progress: bool | None) -> Report:
    """Implement `EnergonDataset.validate`."""
    started_s = time.perf_counter()
    problems = list(dataset.documents.problems)
    shards = sorted({int(shard) for shard in dataset.view.shard_ids})
    checked_nbytes = 0
    with Progress(len(shards), "checking", shown=progress, unit="tars") as bar:
        for shard in shards:
            found = check_shard(dataset, shard, rows=True, deep=deep)
            problems += found
            if deep and not any(problem.kind == "missing_shard" for problem in found):
                checked_nbytes += dataset.transport.size(dataset.documents.shards[shard])
            bar.advance(1)
    elapsed_s = time.perf_counter() - started_s
    return Report(dataset.url, len(dataset), len(shards), tuple(problems), deep, checked_nbytes, elapsed_s)
