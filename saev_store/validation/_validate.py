"""`validate`: the quick checks, and optionally a check of all bytes."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import closing

from saev_store._runtime.progress import Progress
from saev_store.core.layout import Layout, shard_name
from saev_store.documents import Metadata, ShardsIndex, labels_nbytes
from saev_store.errors import CorruptShardError
from saev_store.names import LABELS_NAME
from saev_store.problems import Problem
from saev_store.transport import Transport
from saev_store.validation._deep import Promised, ShardSummary, promised_digests, read_labels_digests, read_shards
from saev_store.validation._judge import judge
from saev_store.validation._quick import Survey, check_survey, survey_store
from saev_store.validation._report import Report


def validate(
    transport: Transport,
    metadata: Metadata,
    index: ShardsIndex,
    *,
    dirname: str | None = None,
    deep: bool = False,
    progress: bool | None = None,
) -> Report:
    """Find all problems of a store, and the examples that they make unreadable.

    Args:
        transport: Rooted at the store's folder.
        metadata: The parsed `metadata.json`.
        index: The parsed `shards.json`.
        dirname: The folder's name, compared with the content hash; None skips this check.
        deep: Read every byte, in a few buffers of fixed size: compare with digests.json where there is one, find rows
            that were never written, swapped and duplicate shards, and non-finite numbers.
        progress: Show a bar on stderr; None: when it is a terminal.

    Returns:
        The report. Damage is part of it and never raised; call `raise_if_bad` to raise it.

    Raises:
        SaevStoreError: the folder cannot be accessed.
    """
    started = time.perf_counter()
    seen = survey_store(transport, index)
    problems = check_survey(seen, metadata, index, dirname=dirname)
    checked_bytes = 0
    if deep:
        found, checked_bytes = _read_everything(transport, metadata.layout, index, seen, progress=progress)
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
    transport: Transport, layout: Layout, index: ShardsIndex, seen: Survey, *, progress: bool | None
) -> tuple[list[Problem], int]:
    digests = promised_digests(transport, layout)
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
        closing(read_shards(transport, layout, sizes, digests.block_bytes)) as results,
    ):
        for n_bytes, summary in results:
            bar.advance(n_bytes)
            checked_bytes += n_bytes
            if summary is not None:
                summaries.append(summary)
    problems = [*digests.problems, *judge(layout, summaries, digests.files, digests.block_bytes)]
    labels = seen.found.get(LABELS_NAME)
    if labels is not None and labels.size == labels_nbytes(layout):
        checked_bytes += labels_nbytes(layout)
        problems += _check_labels(transport, layout, digests)
    elif labels is None and LABELS_NAME in digests.files:
        message = "labels.bin is not there, but digests.json has its digests; vectors are readable, labels are lost"
        problems.append(Problem("missing_labels", message, where=LABELS_NAME))
    return problems, checked_bytes


def _check_labels(transport: Transport, layout: Layout, digests: Promised) -> Iterator[Problem]:
    promised = digests.files.get(LABELS_NAME)
    try:
        found = read_labels_digests(transport, labels_nbytes(layout), digests.block_bytes)
    except CorruptShardError as error:
        yield Problem("unreadable_labels", f"{LABELS_NAME} cannot be read: {error.message}", where=LABELS_NAME)
        return
    if promised is not None and tuple(found) != promised:
        n_wrong = sum(a != b for a, b in zip(found, promised, strict=True))
        message = (
            f"{n_wrong} of the {len(found)} blocks of {LABELS_NAME} are not what was written; labels cannot be trusted"
        )
        yield Problem("labels_digest_mismatch", message, where=LABELS_NAME)
