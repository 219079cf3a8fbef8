"""One iteration of a loader: its measures, the thread that makes batches ahead of the consumer, and the consumer's end."""

from __future__ import annotations

import os
import threading
import time
import weakref
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field

from saev_store._runtime.abandoned import ABANDONED
from saev_store.errors import ArgumentError, ForkError
from saev_store.loaders._reads import Reads, ReadTotals, Task
from saev_store.loaders._rows import Batch, BatchMaker
from saev_store.loaders._workers import JOIN_S, Group, Handoff, StoppedError, Workers


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


class LoaderRuntime:
    """Threads and counters of one iteration.

    Args:
        n_threads: Reading threads.
        totals: Where measures are kept.
        helps: Whether the thread that makes batches reads as well instead of waiting for reads, because they are copies.
    """

    def __init__(self, n_threads: int, totals: Totals, *, helps: bool = False) -> None:
        self.stop = threading.Event()
        self.totals = totals
        #: Called once the threads have ended.
        self.on_close: Callable[[], None] = lambda: None
        #: The thread that makes batches.
        self.maker: threading.Thread | None = None
        self.readers = Workers(n_threads, "saev-read", self.stop)
        self._helps = helps

    def read(self, tasks: Iterable[Task]) -> Group:
        """Queue tasks for the reading threads; gives what to wait for."""
        found = list(tasks)
        group = Group(len(found))
        for task, where in found:
            self.readers.submit(task, group, where)
        return group

    def wait(self, group: Group) -> None:
        """Wait for tasks, and help where these are copies.

        Raises:
            StoppedError: the iteration was closed meanwhile.
            Exception: what a task raised.
        """
        if self._helps:
            self.readers.help(group)
        group.wait(self.stop)

    @property
    def has_strays(self) -> bool:
        """Whether a thread has not ended yet, and may still use the memory it was given."""
        return self.readers.is_alive or (self.maker is not None and self.maker.is_alive())

    def close(self, deadline: float) -> None:
        """End all threads; those that hang in a system call are left behind at `deadline` (`time.monotonic()`)."""
        self.readers.close()
        self.readers.join(deadline)
        self.on_close()


@dataclass(frozen=True)
class BatchContext:
    """What batches are made with, in both orders.

    Attributes:
        reads: Brings vectors into memory.
        runtime: Threads and counters.
        maker: Makes a batch of vectors and their positions.
    """

    reads: Reads
    runtime: LoaderRuntime
    maker: BatchMaker


class Iteration:
    """A thread that makes batches of its own, at most `depth` ahead.

    Args:
        runtime: Threads to read with; closed together with the iteration.
        batches: Makes the iterator of batches; called in the thread.
        depth: Batches that may wait for the consumer.
    """

    def __init__(self, runtime: LoaderRuntime, batches: Callable[[], Iterable[Batch]], depth: int) -> None:
        self.runtime = runtime
        self.pid, self._is_closed = os.getpid(), False
        # For those who close on purpose, who may be two threads at once; nothing that collects garbage waits for it.
        self._closing = threading.RLock()
        self.handoff: Handoff[Batch] = Handoff(depth, runtime.stop)
        self._thread = threading.Thread(target=_produce, args=(batches, self.handoff), name="saev-batches", daemon=True)
        runtime.maker = self._thread
        self._thread.start()

    @property
    def is_closed(self) -> bool:
        return self.runtime.stop.is_set()

    def close(self) -> None:
        """End all threads and give back all memory that no batch holds; calling it again does nothing.

        Who comes second waits for who came first. Not for finalizers, which may be called by a thread that holds a lock.
        """
        # A forked child inherits the object, but not its threads.
        if os.getpid() != self.pid:
            return
        with self._closing:
            if not self._is_closed:
                self._close()
            self._is_closed = True
        ABANDONED.remove(self)

    def _close(self) -> None:
        deadline = time.monotonic() + JOIN_S
        self.runtime.stop.set()
        self.handoff.wake()
        self.runtime.close(deadline)
        if self._thread is not threading.current_thread():
            self._thread.join(max(deadline - time.monotonic(), 0.0))
        self.runtime.totals.ended = time.perf_counter()


def _produce(batches: Callable[[], Iterable[Batch]], handoff: Handoff[Batch]) -> None:
    try:
        for batch in batches():
            handoff.put(batch)
            # The consumer alone decides how long a batch lives.
            del batch
        handoff.end()
    except StoppedError:
        handoff.end()
    except BaseException as error:
        handoff.end(error)


class BatchIterator(Iterator[Batch]):
    """The consumer's end of an iteration. Its threads end with the last batch, an error, `close`, or when it is forgotten.

    Args:
        iteration: Makes the batches.
        n_batches: How many.
        timeout_s: Seconds without a batch and without progress before `DeadlineError`.
        progress: Gives another value whenever something has arrived.
        on_batch: Called for each batch that is handed out.
        on_end: Called when the last one has been handed out.
    """

    def __init__(
        self,
        iteration: Iteration,
        n_batches: int,
        *,
        timeout_s: float,
        progress: Callable[[], object],
        on_batch: Callable[[], None],
        on_end: Callable[[], None],
    ) -> None:
        self._iteration, self._n_left, self._timeout_s, self._progress = iteration, n_batches, timeout_s, progress
        self._on_batch, self._on_end, self._ended = on_batch, on_end, False
        ABANDONED.start()
        ABANDONED.add(iteration)
        self._finalizer = weakref.finalize(self, ABANDONED.enqueue, iteration)
        self._finalizer.atexit = False  # everything is closed then

    def __iter__(self) -> BatchIterator:
        return self

    def __next__(self) -> Batch:
        if self._ended:
            raise StopIteration
        if os.getpid() != self._iteration.pid:
            raise ForkError(
                "this iterator's threads live in the parent process",
                where="iter(loader)",
                remedy="Call iter(loader) in the child; loaders themselves may be inherited.",
            )
        if self._iteration.is_closed:
            raise ArgumentError(
                "this iterator was closed: its loader was closed, iterated anew or given another state",
                where="iter(loader)",
                remedy="Call iter(loader) again.",
            )
        runtime, started = self._iteration.runtime, time.perf_counter()
        try:
            batch = self._iteration.handoff.get(self._timeout_s, runtime.readers.busy_with, self._progress)
        except BaseException:
            self.close()
            raise
        totals = runtime.totals
        totals.waited_s += time.perf_counter() - started
        if batch is not None:
            totals.n_batches += 1
            totals.n_rows += len(batch["act"])
            self._n_left -= 1
            self._on_batch()
        # The epoch is over with its last batch: loops that count batches never see the end.
        if batch is None or not self._n_left:
            self._ended = True
            self.close()
            self._on_end()
        if batch is None:
            raise StopIteration
        return batch

    def close(self) -> None:
        """End the iteration's threads."""
        self._finalizer.detach()
        self._iteration.close()
