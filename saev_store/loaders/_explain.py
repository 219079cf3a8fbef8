"""What a loader is about to do, before it does it."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import pairwise

import numpy as np

from saev_store.core.indexing import Progression
from saev_store.core.rows import RowSpace
from saev_store.loaders._metrics import Totals
from saev_store.loaders._reads import Reads, Runs
from saev_store.order import Mixing
from saev_store.store.estimate import Estimate, PlanCount, estimate, price_of
from saev_store.store.reader import Reader

#: Parts of an epoch that are planned to tell its cost.
_N_PLANNED = 64
_PAGES = {None: "", True: ", kept in the page cache", False: ", dropped from the page cache at once"}


@dataclass(frozen=True)
class Plan:
    """What the two kinds of loaders say differently: fields of `Explanation`, and what they are worked out from.

    Attributes:
        n_parts: Parts of an epoch that are read one after the other.
        runs: The reads of a part.
        n_vectors: Vectors that all parts bring.
        n_buffers: Batches that are in memory at a time.
        first_batch_bytes: What the first batch of the next iteration waits for.
        into_batches: Whether vectors are read straight into batches, where the transport can.
        window_bytes: Memory of the window; 0 without one.
        ahead_bytes: Memory of what is read ahead besides the window.
        n_partitions: Streams of the order.
        examples_per_block: Examples that are read, and shuffled, as one.
        mixing: What a batch will be made of, or None in storage order.
    """

    extent_bytes: int
    n_parts: int
    runs: Callable[[int], Runs]
    n_vectors: int
    n_buffers: int
    first_batch_bytes: int
    into_batches: bool = False
    window_bytes: int = 0
    ahead_bytes: int = 0
    n_partitions: int = 1
    examples_per_block: int = 1
    mixing: Mixing | None = None


def epoch_cost(plan: Plan, reader: Reader, space: RowSpace, *, task_bytes: int, world: int, waits: bool) -> Estimate:
    """What an epoch of one rank costs.

    Args:
        plan: Its reads.
        reader: The store's.
        space: What is read, over all ranks.
        task_bytes: What a task reads.
        world: How many ranks share the work.
        waits: Whether the shards lie where a fault on a map waits.
    """
    count = PlanCount(reader)
    reads = Reads(reader, Totals(space.row_nbytes), threading.Event(), task_bytes=task_bytes, waits=waits)
    n_parts, n_found = plan.n_parts, 0
    some = np.unique(np.linspace(0, n_parts - 1, min(n_parts, _N_PLANNED)).round().astype(int)).tolist()
    for number in some:
        runs = plan.runs(number)
        n_found += int(runs.n_vectors.sum())
        is_scattered, parts = reads.split(runs)
        for part in parts:
            if is_scattered:
                count.add([reader.plan_rows(*reads.positions(part))], sizes=False)
                continue
            begins, stops, first = reads.requests(part, into_target=plan.into_batches)
            for lo, hi in pairwise(first):
                count.add_range(stops[hi - 1] - begins[lo])
    share = 1.0 if len(some) == n_parts or not plan.n_vectors else n_found / plan.n_vectors or 1.0
    shards = _shards_of(space)
    # A shard is mapped once, and where some are, all are in the end; everything else grows with what is read.
    n_maps, map_bytes = len(count.mapped), sum(count.mapped.values())
    requests, n_bytes = (count.requests - n_maps) / share, (count.bytes_read - map_bytes) / share
    if n_maps and share < 1:
        for shard in shards:
            count.add_map(shard)
        n_maps, map_bytes = len(count.mapped), sum(count.mapped.values())
    return estimate(
        price_of(reader.transport),
        requests=round(requests) + n_maps + sum(map(reader.is_unchecked, shards)),
        bytes_read=round(n_bytes) + map_bytes,
        bytes_wanted=space.n_rows * space.row_nbytes // world,
    )


def _shards_of(space: RowSpace) -> Sequence[int]:
    """The shards that hold the chosen examples."""
    capacity, examples = space.layout.examples_per_shard, space.examples
    if not isinstance(examples, Progression):
        return np.unique(examples // capacity).tolist()
    if abs(examples.step) > capacity:
        return np.unique(examples.positions() // capacity).tolist()
    return range(examples.lowest // capacity, examples.highest // capacity + 1) if examples.count else ()


@dataclass(frozen=True)
class Explanation:
    """How a loader reads, and what an epoch costs; `str()` is a table for people.

    Attributes:
        n_rows: Rows of an epoch, over all ranks.
        n_batches: Batches of an epoch.
        medium: What the shards lie on: `memory`, `cached`, `flash`, `disk`, `parallel` or `remote`.
        reason: Why it is taken for that.
        engine: The transport.
        n_threads: Reads in flight.
        extent_bytes: What one read brings, typically.
        cost: Requests, bytes and dollars of an epoch, this rank's: what `store.transport.counters` will have more. Of a
            long epoch some parts are planned and the rest is taken to be like them.
        first_batch_bytes: What has to arrive before the first batch of the next iteration: of a shuffle about half the window, or
            a few batches with `early_start`; the whole window after a state of mid-epoch was loaded. Without what is read
            between ranges that one request brings.
        keeps_pages: Whether what was read stays in the page cache; None where there is none.
        window_bytes: Memory of the window; 0 without one.
        buffer_bytes: Memory of the batches made ahead.
        in_flight_bytes: Memory of what is being read, where it does not go straight to a batch, at most; with what is read
            ahead of a remote store besides the window.
        n_partitions: Streams of the order; any number of ranks that divides it gives the same global batches.
        examples_per_block: Examples that are read, and shuffled, as one.
        mixing: What a batch will be made of, or None in storage order.
    """

    n_rows: int
    n_batches: int
    medium: str
    reason: str
    engine: str
    n_threads: int
    extent_bytes: int
    cost: Estimate
    first_batch_bytes: int
    keeps_pages: bool | None
    window_bytes: int
    buffer_bytes: int
    in_flight_bytes: int
    n_partitions: int
    examples_per_block: int
    mixing: Mixing | None

    @property
    def n_requests(self) -> int:
        """Requests of an epoch, this rank's."""
        return self.cost.requests

    @property
    def bytes_read(self) -> int:
        """Bytes of an epoch, this rank's."""
        return self.cost.bytes_read

    def __str__(self) -> str:
        memory = f"{_size(self.window_bytes)} window, {_size(self.buffer_bytes)} batches"
        if self.in_flight_bytes:
            memory += f", {_size(self.in_flight_bytes)} on the way"
        lines = [
            ("rows", f"{self.n_rows:,} in {self.n_batches:,} batches"),
            ("medium", f"{self.medium}: {self.reason} (engine {self.engine})"),
            (
                "reads",
                f"{self.n_requests:,} of about {_size(self.bytes_read / max(self.n_requests, 1))}, {self.n_threads} at a time",
            ),
            ("bytes", f"{_size(self.bytes_read)} per epoch{_PAGES[self.keeps_pages]}"),
            ("start", f"{_size(self.first_batch_bytes)} before the first batch"),
            ("memory", memory),
        ]
        if self.medium == "remote":
            price = f"${self.cost.request_dollars:.2f} per epoch for requests"
            lines.append(("price", f"{price}, and ${self.cost.transfer_dollars:.2f} if the bytes leave the region"))
        if self.mixing is not None:
            mixed, kind = self.mixing, f"{self.examples_per_block} example(s) per block"
            lines.append(("window", f"{kind}, {self.n_partitions} partitions"))
            found = f"{mixed.distinct_examples:,.0f} examples per batch, {mixed.window_examples:,.0f} in the window at a time"
            lines.append(("mixing", f"{found}; a full shuffle gives {mixed.full_shuffle:,.0f} per batch"))
        width = max(len(name) for name, _ in lines)
        return "\n".join(f"{name:<{width}}  {text}" for name, text in lines)


def _size(n_bytes: float) -> str:
    """A number of bytes as text."""
    for unit in ("B", "KiB", "MiB", "GiB"):
        if n_bytes < 1024:
            return f"{n_bytes:.0f} {unit}" if unit == "B" else f"{n_bytes:.1f} {unit}"
        n_bytes /= 1024
    return f"{n_bytes:.1f} TiB"
