"""Recording by several processes: which shards one of them records, and publication when all are there.

What is done is counted in whole shards, so any number of ranks can continue what any other number has begun.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, TypeAlias

from saev_store.documents import METADATA_MAX_NBYTES, parse_metadata
from saev_store.errors import NotFoundError
from saev_store.names import METADATA_NAME, WORK_FOLDER
from saev_store.sources.address import split_address
from saev_store.store.opening import exists
from saev_store.store.store import ShardStore
from saev_store.transport import open_transport
from saev_store.validation import merge_ranges
from saev_store.writer.publish import publish
from saev_store.writer.work import Work, part_shards, read

if TYPE_CHECKING:
    import os
    from collections.abc import Mapping

#: (rank, number of ranks), ranks from 0.
Part: TypeAlias = tuple[int, int]


@dataclass(frozen=True)
class RecordedPart:
    """A part that is recorded, of a store that is not published yet because others are not.

    Attributes:
        url: Where the store will be.
        part: (rank, number of ranks) of this part.
        missing: The half-open ranges of examples that other ranks had not recorded when this one was done.
    """

    url: str
    part: tuple[int, int]
    missing: tuple[tuple[int, int], ...]


def part_examples(work: Work, part: Part | None) -> range:
    """The examples of a part; None: all of them."""
    ranges = [work.layout.example_range(shard) for shard in part_shards(work.layout.n_shards, *(part or (0, 1)))]
    return range(ranges[0][0], ranges[-1][1]) if ranges else range(0)


def missing_examples(work: Work, part: Part | None = None) -> list[tuple[int, int]]:
    """The half-open ranges of examples of a part whose shards are not durable, neighbours merged; of a published store none."""
    shards = part_shards(work.layout.n_shards, *(part or (0, 1)))
    receipts = work.receipts(shards)
    found = [work.layout.example_range(shard) for shard in shards if shard not in receipts]
    return [] if found and work.is_published() else list(merge_ranges(found))


def finalize(url: str | os.PathLike[str], *, storage_options: Mapping[str, object] | None = None) -> ShardStore:
    """Publish a store whose parts are all recorded, and open it; a published one is only opened.

    The last rank of `record(…, part=…)` publishes the store by itself. This is for when it could not.

    Args:
        url: The folder of the store: `RecordedPart.url`.
        storage_options: Options of its file system.

    Raises:
        IncompleteStoreError: examples are missing; the message names them.
        NotFoundError: nothing was begun there.
        CorruptShardError: the file of a shard is not what was recorded.
    """
    transport = open_transport(url, storage_options)
    if not exists(transport, METADATA_NAME):
        folder, name = split_address(transport.url)
        root = open_transport(folder, storage_options)
        raw = read(root, f"{WORK_FOLDER}/{name}/{METADATA_NAME}", max_bytes=METADATA_MAX_NBYTES)
        if raw is None:
            raise NotFoundError("no recording was begun there", where=transport.url)
        publish(Work(root, parse_metadata(raw, where=transport.url), name=name))
    return ShardStore.open(transport)
