"""Validates an Energon data set: documents against index, index against tars."""

from __future__ import annotations

import os
import time
from typing import TYPE_CHECKING

import numpy as np

from saev_store._runtime.progress import Progress
from saev_store.errors import CorruptShardError, DeadlineError, DocumentError, NotFoundError, SaevStoreError, brief
from saev_store.problems import Problem
from saev_store.sources.address import full_url
from saev_store.sources.energon.index_sqlite import SqliteIndex
from saev_store.sources.energon.keys import DATASET_YAML, INDEX_SQLITE, INFO_JSON, SPLIT_YAML, idx_path
from saev_store.sources.energon.tar_scan import BLOCK, Scan, scan_shard
from saev_store.validation import Report

if TYPE_CHECKING:
    from saev_store.sources.energon.reader import EnergonDataset

#: On opening, an index with fewer rows is checked whole; a larger one is checked where it is used.
EAGER_ROWS = 200_000
#: Limit of the local shards that are checked on opening.
_EAGER_SHARDS = 1024
_MAX_TAR_NBYTES = 2**62


def check_on_open(dataset: EnergonDataset, *, damaged_ok: bool) -> tuple[Problem, ...]:
    """Check counts, small indices whole, and the sizes of local tars.

    Raises:
        DocumentError, CorruptShardError: the first error, unless `damaged_ok`.
    """
    problems: list[Problem] = []
    index, info = dataset.places.index, dataset.documents.info
    local = dataset.transport.is_local
    eager = local and len(info.shards) <= _EAGER_SHARDS
    small = index is not None and index.size_hint() <= EAGER_ROWS and int(info.counts.sum()) <= EAGER_ROWS
    if index is not None and index.has_parts:
        problems += _counts(dataset, index, whole=small)
    for shard in range(len(info.shards)) if eager or small else ():
        problems += _shard(dataset, shard, sizes=eager, rows=small and not problems)
        if problems and not damaged_ok:
            break
    if eager:
        problems += _links_outside(dataset)
    first = next((problem for problem in problems if problem.severity == "error"), None)
    if first is not None and not damaged_ok:
        kind = DocumentError if first.kind == "index_sqlite" else CorruptShardError
        raise kind(
            first.message,
            where=first.where,
            remedy="Prepare the data set again, or restore its tars.",
            problems=problems,
        )
    return tuple(problems)


def _links_outside(dataset: EnergonDataset) -> list[Problem]:
    """Report files of the data set that are links to other folders; they are read all the same."""
    transport = dataset.transport
    if transport.local_path is None:
        return []
    problems: list[Problem] = []
    root = os.path.join(os.path.realpath(transport.local_path), "")
    for name in (INFO_JSON, INDEX_SQLITE, SPLIT_YAML, DATASET_YAML, *dataset.documents.info.shards):
        target = os.path.realpath(f"{transport.local_path}/{name}")
        if not target.startswith(root):
            message = f"{name} is, or is behind, a symbolic link to {target}"
            problems.append(Problem("symlink_outside", message, full_url(transport, name), severity="info"))
    return problems


def _counts(dataset: EnergonDataset, index: SqliteIndex, *, whole: bool) -> list[Problem]:
    """Compare the number of samples of each shard in the index with `.info.json`."""
    info = dataset.documents.info
    problems: list[Problem] = []
    shards = range(len(info.shards))
    try:
        found = index.shard_counts() if whole else {shard: index.last_sample(shard) + 1 for shard in shards}
        messages = [
            f"it has samples of shard {shard}, but there are {len(shards)} shards"
            for shard in sorted(found.keys() - set(shards))[:8]
        ]
        messages += [
            f"it has {found.get(shard, 0):,} samples of {brief(info.shards[shard])}, .info.json says {count:,}"
            for shard, count in enumerate(info.counts.tolist())
            if found.get(shard, 0) != count
        ]
        for key in index.repeated_keys() if whole else ():
            message = f"several samples have the key {brief(key)}: they are found by position only"
            problems.append(Problem("repeated_key", message, index.where, severity="warning"))
    except (DocumentError, DeadlineError) as error:
        messages = [error.message]
    return [*(Problem("index_sqlite", message, index.where) for message in messages), *problems]


def _shard(dataset: EnergonDataset, shard: int, *, sizes: bool, rows: bool, tar_idx: bool = False) -> list[Problem]:
    """Check that a shard exists, is long enough, and ends where its index does."""
    info, places = dataset.documents.info, dataset.places
    name, n_samples = info.shards[shard], int(info.counts[shard])
    where = full_url(dataset.transport, name)
    lost = _lost(dataset, shard)
    nbytes, offsets = _MAX_TAR_NBYTES, None
    try:
        if sizes:
            nbytes = dataset.transport.size(name)
        if rows and places.index is not None and places.index.has_parts:
            offsets = places.index.check_shard(shard, n_samples=n_samples, tar_nbytes=nbytes)
        elif sizes and (places.index is None or not places.index.has_parts):
            offsets = places.offsets(shard)
        if tar_idx:
            found = places.offsets(shard)
            if offsets is not None and not np.array_equal(found, offsets):
                path = full_url(dataset.transport, idx_path(name))
                raise CorruptShardError("it has other offsets than index.sqlite: one of them is stale", where=path)
        if sizes and offsets is not None and nbytes > offsets[-1]:
            end = int(offsets[-1])
            # Members that belong to no sample are in no index. Only the headers tell whether there is one.
            if not n_samples and not scan_shard(dataset.transport, name).samples:
                return []
            (block,) = dataset.transport.get_ranges(name, starts=[end], ends=[min(end + BLOCK, nbytes)])
            if any(bytes(block)):
                message = f"the index ends at {end:,}, but the tar goes on: files were added after it was indexed"
                return [Problem("stale_index", message, where, lost=lost)]
    except NotFoundError as error:
        missing = f"{idx_path(name)} is missing" if idx_path(name) in str(error.where) else "the shard is missing"
        return [Problem("missing_shard", missing, where, lost=lost)]
    except SaevStoreError as error:
        kind = "index_sqlite" if isinstance(error, DocumentError) else error.kind
        return [Problem(kind, error.message, error.where or where, lost=lost)]
    return []


def _lost(dataset: EnergonDataset, shard: int) -> tuple[tuple[int, int], ...]:
    span = dataset.view.span(shard)
    return (span,) if span[0] < span[1] else ()


def validate(dataset: EnergonDataset, *, deep: bool, progress: bool | None) -> Report:
    """Implement `EnergonDataset.validate`."""
    started = time.perf_counter()
    info, index = dataset.documents.info, dataset.places.index
    problems = [*dataset.documents.problems, *_links_outside(dataset)]
    if index is not None and index.has_parts:
        problems += _counts(dataset, index, whole=True)
    shards = sorted({int(shard) for shard in dataset.view.shard_ids})
    checked = 0
    with Progress(len(shards), "checking", shown=progress, unit="tars") as bar:
        for shard in shards:
            found = _shard(dataset, shard, sizes=True, rows=True, tar_idx=True)
            problems += found
            if deep and not any(problem.kind == "missing_shard" for problem in found):
                problems += _headers(dataset, shard)
                checked += dataset.transport.size(info.shards[shard])
            bar.advance(1)
    elapsed_s = time.perf_counter() - started
    return Report(dataset.url, len(dataset), len(shards), tuple(problems), deep, checked, elapsed_s)


def _headers(dataset: EnergonDataset, shard: int) -> list[Problem]:
    """Compare every sample and part of a tar with the index."""
    name = dataset.documents.info.shards[shard]
    where = full_url(dataset.transport, name)
    n_samples, n_found = int(dataset.documents.info.counts[shard]), 0
    problems: list[Problem] = []
    try:
        scan = Scan.of(dataset.transport, name, where=where)
        for position, (key, offset, nbytes, parts) in enumerate(scan.samples()):
            if position >= n_samples:
                raise CorruptShardError(f"the tar has more than the {n_samples:,} samples of the index", where=where)
            place = dataset.places.run(shard, position, position + 1)[0]
            listed = None if place.parts is None else [(part.name, part.offset, part.nbytes) for part in place.parts]
            same = (place.offset, place.nbytes) == (offset, nbytes) and place.key in {None, key}
            if not same or listed not in (None, parts):
                raise CorruptShardError(f"sample {position} ({brief(key)}) is not what the index says", where=where)
            n_found += 1
        if n_found != n_samples:
            raise CorruptShardError(f"the tar has {n_found:,} samples, the index {n_samples:,}", where=where)
        problems += [Problem("odd_tar", oddity, where, severity="warning") for oddity in scan.oddities]
    except SaevStoreError as error:
        problems.append(Problem(error.kind, error.message, where, lost=_lost(dataset, shard)))
    return problems
