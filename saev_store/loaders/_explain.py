"""What a loader is about to do, before it does it."""

from __future__ import annotations

from dataclasses import dataclass

from saev_store.order import Mixing

#: A common price list of object stores: dollars per thousand GET requests, and per gigabyte out of the cloud.
_DOLLARS_PER_1000_REQUESTS = 0.0004


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
        n_requests: Requests of an epoch, this rank's.
        bytes_read: Bytes of an epoch, this rank's.
        request_dollars: What the requests cost at a common price; 0 where the medium is not remote.
        window_bytes: Memory of the window; 0 without one.
        buffer_bytes: Memory of the batches made ahead.
        slots: `block`, `row`, or empty without a window.
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
    n_requests: int
    bytes_read: int
    window_bytes: int
    buffer_bytes: int
    slots: str
    n_partitions: int
    examples_per_block: int
    mixing: Mixing | None

    @property
    def request_dollars(self) -> float:
        return self.n_requests / 1000 * _DOLLARS_PER_1000_REQUESTS if self.medium == "remote" else 0.0

    def __str__(self) -> str:
        lines = [
            ("rows", f"{self.n_rows:,} in {self.n_batches:,} batches"),
            ("medium", f"{self.medium}: {self.reason} (engine {self.engine})"),
            ("reads", f"{self.n_requests:,} of about {_size(self.extent_bytes)}, {self.n_threads} at a time"),
            ("bytes", f"{_size(self.bytes_read)} per epoch"),
            ("memory", f"{_size(self.window_bytes)} window, {_size(self.buffer_bytes)} batches"),
        ]
        if self.medium == "remote":
            lines.append(("requests cost", f"about ${self.request_dollars:.2f} per epoch, plus transfer"))
        if self.mixing is not None:
            mixed, kind = self.mixing, f"{self.slots} slots, {self.examples_per_block} example(s) per block"
            lines.append(("window", f"{kind}, {self.n_partitions} partitions"))
            found = f"{mixed.distinct_examples:,.0f} of {mixed.window_examples:,.0f} examples in the window per batch"
            lines.append(("mixing", f"{found}; a full shuffle gives {mixed.full_shuffle:,.0f}"))
        width = max(len(name) for name, _ in lines)
        return "\n".join(f"{name:<{width}}  {text}" for name, text in lines)


def _size(n_bytes: float) -> str:
    for unit in ("B", "KiB", "MiB", "GiB"):
        if n_bytes < 1024:
            return f"{n_bytes:.0f} {unit}" if unit == "B" else f"{n_bytes:.1f} {unit}"
        n_bytes /= 1024
    return f"{n_bytes:.1f} TiB"
