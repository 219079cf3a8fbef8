"""Recording by several processes: which shards one of them records, and which process publishes the store.

What is done is a matter of whole shards, so any number of ranks can continue what any other number has begun.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from saev_store.documents import METADATA_MAX_NBYTES, parse_metadata
from saev_store.errors import CorruptShardError, IncompleteStoreError, NotFoundError, WriterConflictError
from saev_store.names import METADATA_NAME, WORK_FOLDER
from saev_store.record._part import starts_several
from saev_store.sources.address import split_address
from saev_store.store.opening import exists
from saev_store.store.store import ShardStore
from saev_store.transport import open_transport
from saev_store.validation import merge_ranges
from saev_store.writer import unfinished
from saev_store.writer.publish import publish
from saev_store.writer.work import Work, part_shards, read

if TYPE_CHECKING:
    from saev_store.core.layout import Layout
    from saev_store.documents import Metadata
    from saev_store.transport import Transport
    from saev_store.writer import ShardWriter

_MOST_SHOWN = 5


@dataclass(frozen=True)
class RecordedPart:
    """A part that is recorded, of a store that is not published yet because others are not.

    Attributes:
        url: Where the store will be.
        part: (rank, number of ranks) of this part.
        missing: The half-open ranges of examples that other ranks had not recorded when this one was done; empty while another
            rank publishes the store.
        ranks_left: The ranks that these examples belong to, if there are as many ranks as now.
    """

    url: str
    part: tuple[int, int]
    missing: tuple[tuple[int, int], ...]
    ranks_left: tuple[int, ...]


def write_part(
    root: Transport,
    metadata: Metadata,
    part: tuple[int, int] | None,
    open_writer: Callable[[], ShardWriter],
    write: Callable[[ShardWriter], object],
) -> ShardStore | RecordedPart:
    """Write a part of a store, or all of it, and publish the store if nothing else is missing.

    Args:
        root: The folder of stores.
        metadata: Of the store.
        part: (rank, number of ranks), or None: all of it.
        open_writer: Opens the writer of the part.
        write: Appends to it what is missing.

    Raises:
        WriterConflictError: another process is writing the same part.
    """
    try:
        with open_writer() as writer:
            write(writer)
    except WriterConflictError as error:
        if part is not None:
            error.remedy = "Stop the other process that records these examples; when it has ended, the same call records what is left."
        elif starts_several():
            error.remedy = "Each process has to record a part of its own: pass part='auto'."
        raise
    work, store = Work(root, metadata), root.at(metadata.hash)
    missing = _missing(work)
    if not missing:
        publish(work)
    if part is None or exists(store, METADATA_NAME):
        return ShardStore.open(store)
    of_ranks = [part_examples(metadata.layout, (rank, part[1])) for rank in range(part[1])]
    left = [
        rank
        for rank, some in enumerate(of_ranks)
        if any(max(start, some.start) < min(end, some.stop) for start, end in missing)
    ]
    return RecordedPart(store.url, part, tuple(missing), tuple(left))


def part_examples(layout: Layout, part: tuple[int, int] | None) -> range:
    """The examples of a part, (rank, number of ranks); None: all of them."""
    shards = part_shards(layout.n_shards, *(part or (0, 1)))
    if not shards:
        return range(0)
    return range(layout.example_range(shards[0])[0], layout.example_range(shards[-1])[1])


def n_left(root: Transport, metadata: Metadata, part: tuple[int, int] | None) -> int:
    """How many examples of a part are not there; of a store that is published, none.

    Args:
        root: The folder of stores.
        metadata: Of the store.
        part: (rank, number of ranks), or None: all of it.
    """
    shards = part_shards(metadata.layout.n_shards, *(part or (0, 1)))
    return sum(end - start for start, end in _missing(Work(root, metadata), shards))


def _missing(work: Work, shards: Sequence[int] | None = None) -> list[tuple[int, int]]:
    """The half-open ranges of examples whose shards are not durable, neighbours merged; of a published store none."""
    shards = range(work.layout.n_shards) if shards is None else shards
    receipts = work.receipts(shards)
    found = [
        work.layout.example_range(shard) for shard, receipt in zip(shards, receipts, strict=True) if receipt is None
    ]
    return [] if found and work.is_published() else list(merge_ranges(found))


def finalize(
    url: str | os.PathLike[str],
    *,
    storage_options: Mapping[str, object] | None = None,
) -> ShardStore:
    """Publish a store whose parts are all recorded, and open it; a published one is only opened.

    The last rank of `record(…, part=…)` publishes the store by itself. This is for when it could not.

    Args:
        url: The folder of the store: `RecordedPart.url`.
        storage_options: Options of its file system.

    Raises:
        IncompleteStoreError: examples are missing; the message names them, and what records them.
        NotFoundError: nothing was begun there.
        CorruptShardError: the file of a shard is not what was recorded.
    """
    transport = open_transport(url, storage_options)
    if exists(transport, METADATA_NAME):
        return ShardStore.open(transport)
    folder, name = split_address(transport.url)
    root = open_transport(folder, storage_options)
    raw = read(root, f"{WORK_FOLDER}/{name}/{METADATA_NAME}", max_bytes=METADATA_MAX_NBYTES)
    if raw is None:
        raise _nothing_begun(transport)
    work = Work(root, parse_metadata(raw, where=transport.url), name=name)
    again = (
        "Make the call again that recorded it, as one process or as n of them, --part 1/n to n/n: they record what is missing, and "
        "publish. From Python part=(0, n) to (n - 1, n)."
    )
    if missing := _missing(work):
        n_examples = sum(end - first for first, end in missing)
        raise IncompleteStoreError(
            f"{n_examples} of {work.layout.n_examples} examples are not recorded, as whole shards: {_shown(missing)}",
            where=transport.url,
            remedy=again,
        )
    try:
        publish(work)
    except CorruptShardError as error:
        error.remedy = again
        raise
    return ShardStore.open(transport)


def _shown(ranges: Sequence[tuple[int, int]]) -> str:
    """Some ranges of examples, first and last included, as text.

    >>> _shown([(0, 8), (16, 17)])
    '0 to 7, 16'
    """
    said = [f"{first} to {end - 1}" if end - first > 1 else str(first) for first, end in ranges[:_MOST_SHOWN]]
    more = f", and {len(ranges) - _MOST_SHOWN} more ranges" if len(ranges) > _MOST_SHOWN else ""
    return ", ".join(said) + more


def _nothing_begun(transport: Transport) -> NotFoundError:
    names = [found.name for found in unfinished(transport)]
    return NotFoundError(
        "no recording was begun there" + (f"; below it are the unfinished stores {', '.join(names)}" if names else ""),
        where=transport.url,
        remedy="Name the folder of the store itself.",
    )
