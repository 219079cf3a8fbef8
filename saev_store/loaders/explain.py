"""Forecast of a loader: batches, reads, memory, mixing."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

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
        pool_bytes: Memory of a pool. Two exist while an epoch is read; a third one if batches are kept.
        n_partitions: Streams of a shuffled order; any number of ranks that divides it gives the same global batches. 1 in storage order.
        mixing: What a batch of a full pool is made of, or None in storage order.
    """

    n_rows: int
    n_batches: int
    engine: str
    n_reads: int
    bytes_read: int
    first_batch_bytes: int
    pool_bytes: int
    n_partitions: int
    mixing: Mixing | None

    def __str__(self) -> str:
        lines = [
            ("rows", f"{self.n_rows:,} in {self.n_batches:,} batches"),
            (
                "reads",
                f"{self.n_reads:,} of about {_size(self.bytes_read / max(self.n_reads, 1))} (engine {self.engine})",
            ),
            ("bytes", f"{_size(self.bytes_read)} per epoch, {_size(self.first_batch_bytes)} before the first batch"),
            ("memory", f"two pools of {_size(self.pool_bytes)}, three if batches are kept"),
        ]
        if self.mixing is not None:
            mixed = self.mixing
            found = f"{mixed.distinct_examples:,.0f} examples per batch, {mixed.pool_examples:,.0f} in a pool"
            lines.append(("mixing", f"{found}; a full shuffle gives {mixed.full_shuffle:,.0f} per batch"))
        width = max(len(name) for name, _ in lines)
        return "\n".join(f"{name:<{width}}  {text}" for name, text in lines)


def explain(epoch: Epoch, parts: Mapping[str, Selection], row_nbytes: int) -> Explanation:
    """Return what a loader of an epoch will do.

    Args:
        epoch: Its order.
        parts: What is read.
        row_nbytes: Bytes of a row in memory.
    """
    cut, blocks = epoch.cut, epoch.blocks
    stored = sum(part.space.row_nbytes for part in parts.values())
    of_rank = -(-cut.n_samples // cut.world)
    ranges = [
        part.space.vectors_per_row * max(1, -(-part.space.tokens.count * part.space.row_nbytes // TASK_BYTES))
        for part in parts.values()
    ]
    in_pool = np.diff(cut.pool_starts) * cut.batch_size
    return Explanation(
        n_rows=cut.n_samples,
        n_batches=cut.n_batches,
        engine=", ".join(dict.fromkeys(part.reader.transport.name for part in parts.values())),
        n_reads=-(-blocks.n_blocks * sum(ranges) // cut.world),
        bytes_read=of_rank * stored,
        first_batch_bytes=min(int(in_pool[0]), of_rank) * stored if len(in_pool) else 0,
        pool_bytes=int(in_pool.max(initial=0)) * row_nbytes,
        n_partitions=cut.n_partitions or 1,
        mixing=None if cut.n_partitions is None else predict_mixing(epoch),
    )


def _size(n_bytes: float) -> str:
    """Return a number of bytes as text."""
    for unit in ("B", "KiB", "MiB", "GiB"):
        if n_bytes < 1024:
            return f"{n_bytes:.0f} {unit}" if unit == "B" else f"{n_bytes:.1f} {unit}"
        n_bytes /= 1024
    return f"{n_bytes:.1f} TiB"
