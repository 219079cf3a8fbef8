"""Forecast of a loader: batches, reads, memory, mixing."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass

import numpy as np

from saev_store.loaders.reads import TASK_BYTES
from saev_store.order import Epoch, Mixing, predict_mixing
from saev_store.store.selection import Selection


@dataclass(frozen=True, slots=True)
class Explanation:
    """Forecast of a loader; `print` it.

    Attributes:
        n_rows: Rows of an epoch, over all ranks.
        n_batches: Batches of an epoch.
        engine: The transport, or those of two stores.
        n_reads: Ranges of an epoch, this rank's, before neighbours are merged.
        bytes_read: Bytes of an epoch, this rank's.
        first_batch_bytes: Bytes that are read before the first batch of an epoch.
        pool_bytes: Memory of a pool. Two exist while an epoch is read; a third one if batches are kept, or pools have one batch.
        mixing: What a batch of a full pool is made of, or None in storage order.
    """

    n_rows: int
    n_batches: int
    engine: str
    n_reads: int
    bytes_read: int
    first_batch_bytes: int
    pool_bytes: int
    mixing: Mixing | None

    def __str__(self) -> str:
        found: dict[str, object] = asdict(self)
        return "\n".join(f"{name}: {value:,}" if isinstance(value, int) else f"{name}: {value}" for name, value in found.items())  # fmt: skip


def explain(epoch: Epoch, parts: Sequence[Selection], row_nbytes: int) -> Explanation:
    """Return what a loader of an epoch will do.

    Args:
        epoch: Its order.
        parts: What is read.
        row_nbytes: Bytes of a row in memory.
    """
    cut = epoch.cut
    stored = sum(part.space.row_nbytes for part in parts)
    of_rank = -(-cut.n_samples // cut.world)
    ranges = [
        part.space.vectors_per_row * max(1, -(-len(part.space.tokens) * part.space.row_nbytes // TASK_BYTES))
        for part in parts
    ]
    in_pool = np.diff(cut.pool_starts) * cut.batch_size
    return Explanation(
        n_rows=cut.n_samples,
        n_batches=cut.n_batches,
        engine=", ".join(dict.fromkeys(part.reader.transport.name for part in parts)),
        n_reads=-(-epoch.n_blocks * sum(ranges) // cut.world),
        bytes_read=of_rank * stored,
        first_batch_bytes=min(int(in_pool[0]), of_rank) * stored,
        pool_bytes=int(in_pool.max()) * row_nbytes,
        mixing=None if cut.n_partitions is None else predict_mixing(epoch),
    )
