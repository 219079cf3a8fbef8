"""One iteration of a loader: its measures, its threads, and the consumer's end.

Everything a loader does at length (`preadv`, copies, `np.take`) releases the GIL, so threads are enough. They are daemons:
a read that hangs in the kernel must not keep the interpreter from ending.
"""

from __future__ import annotations

import os
import threading
import time
import traceback
import weakref
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from queue import Empty, SimpleQueue
from typing import TypeAlias

import numpy as np

from saev_store._runtime.abandoned import ABANDONED
from saev_store.errors import ArgumentError, DeadlineError, ForkError
from saev_store.loaders._metrics import Totals

#: One batch: `act` (n, d_model) float32, or (n, layers, d_model), `example_idx` and `token_idx` (n,) int64, where they apply
#: `layer` (n,) int64 and `token_labels` (n,) uint8 and token arrays by name, (n,) of their dtype.
Batch = dict[str, np.ndarray]
#: What a thread carries out, and the name of the file that it reads, for messages about time-outs.
Task: TypeAlias = tuple[Callable[[], None], str]

#: Waits come in slices of at most this length, so that Ctrl-C and `close` are noticed.
SLICE_S = 0.2
#: How long `close` waits for threads that are inside a system call, so that Ctrl-C takes less than a second. The memory
#: that such a thread may still write to is not used again.
JOIN_S = 0.5


class StoppedError(Exception):
    """Control flow inside the threads: the iteration was closed during a wait. Never leaves a loader."""


@dataclass
class Group:
    """Tasks that are waited for together: how many are left, and the first error."""

    n_left: int
    error: BaseException | None = None


class Iteration:
    """The threads of one iteration: one makes batches ahead of the consumer, up to `n_threads` others read for it.

    Args:
        n_threads: Reading threads at most; there are more only when all are at work.
        depth: Batches that may wait for the consumer.
        totals: Where measures are kept.
        helps: Whether the thread that makes batches reads as well instead of waiting for reads, because they are copies.
        on_close: Called once the threads have ended.

    Attributes:
        stop: Set when the iteration ends: nothing more is wanted.
        pid: The process whose threads these are.
    """

    def __init__(
        self, n_threads: int, depth: int, totals: Totals, *, helps: bool, on_close: Callable[[], object] | None = None
    ) -> None:
        self.stop, self.totals, self.pid = threading.Event(), totals, os.getpid()
        self._n_threads, self._depth, self._helps, self._on_close = n_threads, depth, helps, on_close
        self._tasks: SimpleQueue[tuple[Callable[[], None], str, Group] | None] = SimpleQueue()
        # Guards all that follows. Held itself: `with` of a condition has methods in Python, see `Flag`.
        self._mutex = threading.RLock()
        #: Notified when a group or a batch is done, a batch is taken, or the iteration is closed.
        self._changed = threading.Condition(self._mutex)
        self._ready: deque[Batch] = deque()
        self._is_complete = False
        self._error: BaseException | None = None
        self._n_open = 0  # tasks that wait or are under way
        self._n_readers = 0
        self._threads: list[threading.Thread] = []
        self._busy: dict[int, str] = {}
        # For `close`, which two threads may call at once; no finalizer waits for it.
        self._closing, self._is_closed = threading.RLock(), False

    def start(self, batches: Callable[[], Iterable[Batch]]) -> None:
        """Begin to make batches, unless the iteration is closed; `batches` is called in the thread that makes them.

        Raises:
            TransportError: the system gives no more threads.
        """
        with self._closing:  # `close` sees the thread, or this sees that it was closed
            if not self.stop.is_set():
                self._start(threading.Thread(target=self._make, args=(batches,), name="saev-batches", daemon=True))

    def _start(self, thread: threading.Thread) -> None:
        """Start a thread that `close` ends."""
        thread.start()
        self._threads.append(thread)

    # -- in the thread that makes batches ------------------------------------------------------------------------------

    def _make(self, batches: Callable[[], Iterable[Batch]]) -> None:
        """Put batches into the queue until there are no more, an error, or the end of the iteration."""
        error: BaseException | None = None
        try:
            for batch in batches():
                with self._mutex:
                    while len(self._ready) >= self._depth and not self.stop.is_set():
                        self._changed.wait(SLICE_S)
                    if self.stop.is_set():
                        break
                    self._ready.append(batch)
                    self._changed.notify_all()
                # The consumer alone decides how long a batch lives.
                del batch
        except StoppedError:
            pass
        except BaseException as raised:
            error = _without_variables(raised)
        del batches  # the error's traceback may keep this frame
        with self._mutex:
            self._is_complete, self._error = True, error
            self._changed.notify_all()
        del error

    def read(self, tasks: Iterable[Task]) -> Group:
        """Queue tasks for the reading threads; gives what to wait for.

        Raises:
            StoppedError: the iteration was closed.
        """
        queued = list(tasks)
        group = Group(len(queued))
        with self._mutex:
            # Behind what tells the threads to end, tasks would stay in the queue, with the memory that they fill.
            if self.stop.is_set():
                raise StoppedError
            self._n_open += len(queued)
            while self._n_readers < min(self._n_open, self._n_threads):
                number = self._n_readers
                self._start(
                    threading.Thread(target=self._work, args=(number,), name=f"saev-read-{number}", daemon=True)
                )
                self._n_readers += 1
            for task, where in queued:
                self._tasks.put((task, where, group))
        return group

    def wait(self, group: Group) -> None:
        """Return when all tasks of a group are done; carry out queued ones meanwhile, the oldest first, where these are copies.

        Raises:
            StoppedError: the iteration was closed meanwhile.
            Exception: whatever a task raised, with its traceback.
        """
        while self._helps and group.n_left and group.error is None:
            try:
                item = self._tasks.get_nowait()
            except Empty:
                break
            if item is None:  # it tells a thread to end
                self._tasks.put(None)
                break
            self._carry_out(-1, *item)
            del item
        with self._mutex:
            while group.n_left and group.error is None:
                if self.stop.is_set():
                    raise StoppedError
                self._changed.wait(SLICE_S)
        if self.stop.is_set():
            raise StoppedError  # not that of a task: its traceback would keep this thread's memory, which refers to the group
        if group.error is not None:
            raise group.error

    # -- in the reading threads ----------------------------------------------------------------------------------------

    def _work(self, number: int) -> None:
        """Carry out tasks until told to end."""
        while (item := self._tasks.get()) is not None:
            self._carry_out(number, *item)
            # Nothing may keep the memory of the last task alive while waiting for the next.
            del item

    def _carry_out(self, number: int, task: Callable[[], None], where: str, group: Group) -> None:
        """Carry out a task, unless the iteration has ended, and count it as done."""
        error: BaseException | None = None
        if self.stop.is_set():
            error = StoppedError()
        else:
            self._busy[number] = where
            try:
                task()
            except BaseException as raised:
                error = _without_variables(raised)
            self._busy.pop(number, None)
        del task  # an error's traceback may keep this frame
        with self._mutex:
            self._n_open -= 1
            group.n_left -= 1
            group.error = group.error or error
            if group.n_left == 0 or error is not None:
                self._changed.notify_all()

    # -- in the consumer's thread --------------------------------------------------------------------------------------

    def get(self, timeout_s: float, progress: Callable[[], object]) -> Batch | None:
        """The next batch, or None at the end.

        Args:
            timeout_s: Seconds to wait while `progress` gives the same value.
            progress: Gives another value whenever something has arrived.

        Raises:
            ArgumentError: the iteration was closed meanwhile.
            DeadlineError: neither a batch nor progress came within `timeout_s`.
            Exception: what a thread raised.
        """
        # Slices are counted, not the clock: a process that was stopped (Ctrl-Z, a suspended machine) goes on where it was.
        left, seen = timeout_s, progress()
        with self._mutex:
            while not self._ready:
                if self._error is not None:
                    error, self._error = self._error, None
                    try:
                        raise error
                    finally:
                        del error  # its traceback has this frame
                if self.stop.is_set():
                    raise _closed()
                if self._is_complete:
                    return None
                if (found := progress()) != seen:
                    left, seen = timeout_s, found
                if left <= 0:
                    reading = ", ".join(sorted(set(self._busy.copy().values()))) or "nothing"
                    failure = f"; what failed last: {self.totals.failure}" if self.totals.failure else ""
                    raise DeadlineError(
                        f"no batch and nothing read within {timeout_s:g} s; reading threads are busy with: {reading}{failure}",
                        where="batch_timeout_s",
                        remedy="Allow more time, or look at loader.explain() and loader.metrics().",
                    )
                started, slice_s = time.monotonic(), min(SLICE_S, left)
                self._changed.wait(slice_s)
                left -= min(time.monotonic() - started, slice_s)
            batch = self._ready.popleft()
            self._changed.notify_all()
            return batch

    @property
    def n_ready(self) -> int:
        """Batches that wait for the consumer."""
        return len(self._ready)

    @property
    def has_strays(self) -> bool:
        """Whether a thread has not ended yet, and may still use the memory it was given."""
        return any(thread.is_alive() for thread in self._threads)

    def close(self) -> None:
        """End all threads and drop all batches that wait; calling it again does nothing.

        A thread that hangs in a system call is left behind after `JOIN_S`. A second caller waits for the first. Not for
        finalizers, which may be called by a thread that holds a lock.
        """
        # A forked child inherits the object, but not its threads.
        if os.getpid() != self.pid:
            return
        with self._closing:
            if not self._is_closed:
                deadline = time.monotonic() + JOIN_S
                self.stop.set()
                with self._mutex:
                    self._ready.clear()
                    for _ in range(self._n_readers):
                        self._tasks.put(None)
                    self._changed.notify_all()
                for thread in self._threads:
                    if thread is not threading.current_thread():
                        thread.join(max(0.0, deadline - time.monotonic()))
                if self._on_close is not None:
                    self._on_close()
                self.totals.ended = time.perf_counter()
            self._is_closed = True
        ABANDONED.remove(self)


class BatchIterator(Iterator[Batch]):
    """The consumer's end of an iteration. Its threads end with the last batch, an error, `close`, or its own collection.

    Threads may share it: each batch goes to one of them.

    Args:
        iteration: Makes the batches.
        n_batches: How many.
        timeout_s: Seconds without a batch and without progress before `DeadlineError`.
        progress: Gives another value whenever something has arrived.
        advance: Called for each batch that is handed out, and at the end: whether that is reached.
    """

    def __init__(
        self,
        iteration: Iteration,
        n_batches: int,
        *,
        timeout_s: float,
        progress: Callable[[], object],
        advance: Callable[[bool], None],
    ) -> None:
        self._iteration, self._n_left, self._timeout_s, self._progress = iteration, n_batches, timeout_s, progress
        self._advance, self._has_ended = advance, False
        #: Who takes a batch. Others that wait for theirs find the end of the epoch then, not a closed iteration.
        self._turn = threading.Lock()
        ABANDONED.add(iteration)
        self._finalizer = weakref.finalize(self, ABANDONED.enqueue, iteration)
        self._finalizer.atexit = False  # everything is closed then

    def __iter__(self) -> BatchIterator:
        return self

    def __next__(self) -> Batch:
        with self._turn:
            return self._next()

    def _next(self) -> Batch:
        """The next batch, for the thread whose turn it is."""
        if self._has_ended:
            raise StopIteration
        iteration, started = self._iteration, time.perf_counter()
        if os.getpid() != iteration.pid:
            raise ForkError(
                "this iterator's threads live in the parent process",
                where="iter(loader)",
                remedy="Call iter(loader) in the child; loaders themselves may be inherited.",
            )
        if iteration.stop.is_set():
            raise _closed()
        try:
            batch = iteration.get(self._timeout_s, self._progress)
        except BaseException:
            self.close()
            raise
        totals = iteration.totals
        totals.waited_s += time.perf_counter() - started
        if batch is not None:
            totals.n_batches += 1
            totals.n_rows += len(batch["act"])
            self._n_left -= 1
        # The epoch is over with its last batch: loops that count batches never see the end.
        if batch is None or not self._n_left:
            self._has_ended = True
            self.close()
        self._advance(self._has_ended)
        if batch is None:
            raise StopIteration
        return batch

    def close(self) -> None:
        """End the iteration's threads."""
        self._finalizer.detach()
        self._iteration.close()


def _without_variables(error: BaseException) -> BaseException:
    """The error, whose traceback has the lines, but none of their variables: these may hold gigabytes."""
    link: BaseException | None = error
    while link is not None:
        traceback.clear_frames(link.__traceback__)
        link = link.__cause__
    return error


def _closed() -> ArgumentError:
    """What the consumer of a closed iteration is told."""
    return ArgumentError(
        "this iterator was closed: its loader was closed, iterated anew or given another state",
        where="iter(loader)",
        remedy="Call iter(loader) again.",
    )
