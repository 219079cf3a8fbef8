"""What a loader has done so far, in numbers."""

from __future__ import annotations

import threading
import time
from dataclasses import dataclass, field


@dataclass(frozen=True, slots=True)
class Metrics:
    """Measures of the latest iteration of a loader, since it began.

    Attributes:
        n_batches: Batches handed out.
        n_rows: Rows handed out.
        elapsed_s: Seconds since the iteration began.
        rows_per_s: Rows per second of that.
        mb_per_s: Megabytes (10^6 bytes) of rows per second of that.
        n_requests: Requests made to the transport.
        bytes_read: Bytes that were read for that.
        n_retries: Reads that were repeated after a passing failure.
        read_s: Time spent in reads, summed over threads.
        copy_s: Time spent in copying rows to batches, summed over threads; part of `read_s`.
        waited_s: Time the consumer waited for batches.
        window_fill: Rows of the window that are read and not yet handed out, as a share of what it can hold.
        batches_ready: Batches that are finished and wait for the consumer.
    """

    n_batches: int
    n_rows: int
    elapsed_s: float
    rows_per_s: float
    mb_per_s: float
    n_requests: int
    bytes_read: int
    n_retries: int
    read_s: float
    copy_s: float
    waited_s: float
    window_fill: float
    batches_ready: int


@dataclass
class ReadTotals:
    """What reading has cost so far; threads add to it under its lock."""

    n_requests: int = 0
    n_bytes: int = 0
    n_retries: int = 0
    read_s: float = 0.0
    copy_s: float = 0.0
    lock: threading.Lock = field(default_factory=threading.Lock, repr=False)

    def add(self, requests: int, n_bytes: int, seconds: float) -> None:
        """Count finished requests."""
        with self.lock:
            self.n_requests += requests
            self.n_bytes += n_bytes
            self.read_s += seconds

    def add_copy(self, seconds: float) -> None:
        """Count time in which what was read was copied to batches."""
        with self.lock:
            self.copy_s += seconds


@dataclass
class Totals:
    """Running sums behind `Metrics`; each number has one writer."""

    vector_nbytes: int
    reads: ReadTotals = field(default_factory=ReadTotals)
    n_batches: int = 0
    n_rows: int = 0
    waited_s: float = 0.0
    window_fill: float = 0.0
    started: float = field(default_factory=time.perf_counter)
    ended: float | None = None

    def metrics(self, batches_ready: int) -> Metrics:
        """The sums as they are now."""
        elapsed = max((self.ended or time.perf_counter()) - self.started, 1e-9)
        reads = self.reads
        return Metrics(
            n_batches=self.n_batches,
            n_rows=self.n_rows,
            elapsed_s=elapsed,
            rows_per_s=self.n_rows / elapsed,
            mb_per_s=self.n_rows * self.vector_nbytes / elapsed / 1e6,
            n_requests=reads.n_requests,
            bytes_read=reads.n_bytes,
            n_retries=reads.n_retries,
            read_s=reads.read_s,
            copy_s=reads.copy_s,
            waited_s=self.waited_s,
            window_fill=self.window_fill,
            batches_ready=batches_ready,
        )
