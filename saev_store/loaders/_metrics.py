"""Measures of an iteration: what its threads count, and what is told of it."""

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
class Totals:
    """Running sums behind `Metrics`. Reading threads call `add`; each other number has one writer."""

    row_nbytes: int
    n_batches: int = 0
    n_rows: int = 0
    waited_s: float = 0.0
    window_fill: float = 0.0
    started: float = field(default_factory=time.perf_counter)
    ended: float | None = None
    n_requests: int = 0
    bytes_read: int = 0
    n_retries: int = 0
    read_s: float = 0.0
    copy_s: float = 0.0
    #: The last passing failure, as text.
    failure: str = ""
    _lock: threading.Lock = field(default_factory=threading.Lock, repr=False)

    def add(self, *, n_requests: int = 0, bytes_read: int = 0, read_s: float = 0.0, copy_s: float = 0.0) -> None:
        """Count what a thread has read."""
        with self._lock:
            self.n_requests += n_requests
            self.bytes_read += bytes_read
            self.read_s += read_s
            self.copy_s += copy_s

    def failed(self, error: Exception) -> None:
        """Count a read that is tried again."""
        with self._lock:
            self.n_retries += 1
            self.failure = str(error)

    def metrics(self, batches_ready: int) -> Metrics:
        """The sums as they are now."""
        elapsed = max((self.ended or time.perf_counter()) - self.started, 1e-9)
        return Metrics(
            n_batches=self.n_batches,
            n_rows=self.n_rows,
            elapsed_s=elapsed,
            rows_per_s=self.n_rows / elapsed,
            mb_per_s=self.n_rows * self.row_nbytes / elapsed / 1e6,
            n_requests=self.n_requests,
            bytes_read=self.bytes_read,
            n_retries=self.n_retries,
            read_s=self.read_s,
            copy_s=self.copy_s,
            waited_s=self.waited_s,
            window_fill=self.window_fill,
            batches_ready=batches_ready,
        )
