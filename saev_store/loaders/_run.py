"""One iteration of a loader: a thread that makes batches ahead of the consumer, and the consumer's end of it."""

from __future__ import annotations

import os
import threading
import time
import weakref
from collections.abc import Callable, Iterable, Iterator

import numpy as np

from saev_store._forgotten import FORGOTTEN
from saev_store.errors import ArgumentError, ForkError
from saev_store.loaders._metrics import Tally
from saev_store.loaders._workers import JOIN_S, Group, Handoff, StoppedError, Workers

#: One batch: `act` (n, d_model) float32, `example_idx` and `token_idx` (n,) int64, where they apply `layer` (n,) int64 and
#: `token_labels` (n,) uint8.
Batch = dict[str, np.ndarray]


class Machinery:
    """Threads and counters of one iteration.

    Args:
        n_threads: Reading threads.
        n_gather: Threads that gather, besides the one that makes batches.
        tally: Where measures are kept.
        helps: Whether the thread that makes batches reads as well instead of waiting for reads, because they are copies.
    """

    def __init__(self, n_threads: int, n_gather: int, tally: Tally, *, helps: bool = False) -> None:
        self.helps = helps
        self.stop = threading.Event()
        self.tally = tally
        #: Called once the threads have ended.
        self.on_close: Callable[[], None] = lambda: None
        #: The thread that makes batches.
        self.maker: threading.Thread | None = None
        self.readers = Workers(n_threads, "saev-read", self.stop)
        self.gatherers = Workers(n_gather, "saev-gather", self.stop) if n_gather else None

    def read(self, tasks: Iterable[tuple[Callable[[], None], str]]) -> Group:
        """Queue tasks for the reading threads, each with the name of its file; gives what to wait for."""
        found = list(tasks)
        group = Group(len(found))
        for task, where in found:
            self.readers.submit(task, group, where)
        return group

    def busy_with(self) -> str:
        """What reading threads are doing, for an error message."""
        return self.readers.busy_with()

    @property
    def has_strays(self) -> bool:
        """Whether a thread has not ended yet, and may still use the memory it was given."""
        others = self.gatherers is not None and self.gatherers.is_alive
        return self.readers.is_alive or others or (self.maker is not None and self.maker.is_alive())

    def close(self, deadline: float) -> None:
        """End all threads; those that hang in a system call are left behind at `deadline` (`time.monotonic()`)."""
        workers = [self.readers, *([self.gatherers] if self.gatherers is not None else [])]
        for some in workers:
            some.close()
        for some in workers:
            some.join(deadline)
        self.on_close()


class Run:
    """Makes batches in a thread of its own, at most `depth` ahead.

    Args:
        machinery: Threads to read with; closed together with the run.
        batches: Makes the iterator of batches; called in the thread.
        depth: Batches that may wait for the consumer.
    """

    def __init__(self, machinery: Machinery, batches: Callable[[], Iterator[Batch]], depth: int) -> None:
        self.machinery = machinery
        self.pid, self._is_closed = os.getpid(), False
        # For those who close on purpose, who may be two threads at once; nothing that collects garbage waits for it.
        self._closing = threading.RLock()
        self.handoff: Handoff[Batch] = Handoff(depth, machinery.stop)
        self._thread = threading.Thread(target=_produce, args=(batches, self.handoff), name="saev-batches", daemon=True)
        machinery.maker = self._thread
        self._thread.start()

    @property
    def is_closed(self) -> bool:
        return self.machinery.stop.is_set()

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
        FORGOTTEN.closed(self)

    def _close(self) -> None:
        deadline = time.monotonic() + JOIN_S
        self.machinery.stop.set()
        self.handoff.wake()
        self.machinery.close(deadline)
        if self._thread is not threading.current_thread():
            self._thread.join(max(deadline - time.monotonic(), 0.0))
        self.machinery.tally.ended = time.perf_counter()


def _produce(batches: Callable[[], Iterator[Batch]], handoff: Handoff[Batch]) -> None:
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
    """The consumer's end of a run; ends its threads when it is exhausted, fails, is closed or is forgotten."""

    def __init__(self, run: Run, *, timeout_s: float, on_batch: Callable[[], None], on_end: Callable[[], None]) -> None:
        self._run, self._timeout_s, self._on_batch, self._on_end = run, timeout_s, on_batch, on_end
        self._ended = False
        FORGOTTEN.begin()
        FORGOTTEN.watch(run)
        self._finalizer = weakref.finalize(self, FORGOTTEN.tell, run)
        self._finalizer.atexit = False  # everything is closed then

    def __iter__(self) -> BatchIterator:
        return self

    def __next__(self) -> Batch:
        if self._ended:
            raise StopIteration
        if os.getpid() != self._run.pid:
            raise ForkError(
                "this iterator's threads live in the parent process",
                where="iter(loader)",
                remedy="Call iter(loader) in the child; loaders themselves may be inherited.",
            )
        if self._run.is_closed:
            raise ArgumentError(
                "this iterator was closed: its loader was closed, iterated anew or given another state",
                where="iter(loader)",
                remedy="Call iter(loader) again.",
            )
        tally, started = self._run.machinery.tally, time.perf_counter()
        try:
            batch = self._run.handoff.get(self._timeout_s, self._run.machinery.busy_with)
        except BaseException:
            self.close()
            raise
        tally.waited_s += time.perf_counter() - started
        if batch is None:
            self._ended = True
            self.close()
            self._on_end()
            raise StopIteration
        tally.n_batches += 1
        tally.n_rows += len(batch["act"])
        self._on_batch()
        return batch

    def close(self) -> None:
        """End the iteration's threads."""
        self._finalizer.detach()
        self._run.close()
