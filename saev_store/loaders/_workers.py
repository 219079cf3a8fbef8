"""Threads that carry out small tasks, stop within a moment, and never lose an error.

Everything a loader does at length (`preadv`, copies, `np.take`) releases the GIL, so threads are enough. They are daemons:
a read that hangs in the kernel must not keep the interpreter from ending.
"""

from __future__ import annotations

import os
import threading
import time
from collections import deque
from collections.abc import Callable
from queue import Empty, SimpleQueue
from typing import Generic, TypeVar

from saev_store.errors import DeadlineError

T = TypeVar("T")

#: Waits come in slices of at most this length, so that Ctrl-C and `close` are noticed.
SLICE_S = 0.2
#: How long `close` waits for threads that are inside a system call. Ctrl-C takes less than a second; memory
#: that such a thread may still write to is not used again.
JOIN_S = 0.5


class StoppedError(Exception):
    """Control flow inside the threads: the run was closed during a wait. Never leaves a loader."""


class Group:
    """Tasks that are waited for together; remembers the first error."""

    def __init__(self, n_tasks: int) -> None:
        self._left = n_tasks
        self._lock = threading.Lock()
        self._done = threading.Event()
        self._error: BaseException | None = None
        if n_tasks == 0:
            self._done.set()

    def finish(self, error: BaseException | None = None) -> None:
        """Count one task as done."""
        with self._lock:
            self._left -= 1
            self._error = self._error or error
            if self._left == 0 or error is not None:
                self._done.set()

    @property
    def is_done(self) -> bool:
        return self._done.is_set()

    def wait(self, stop: threading.Event) -> None:
        """Return when all tasks are done.

        Raises:
            StoppedError: `stop` was set meanwhile.
            Exception: whatever a task raised, with its traceback.
        """
        while not self._done.wait(SLICE_S):
            if stop.is_set():
                raise StoppedError
        if self._error is not None:
            raise self._error


class Workers:
    """Threads, of which there are more only when all are at work, and a queue of tasks.

    Args:
        n: How many threads at most.
        name: Prefix of the threads' names.
        stop: When set, waiting tasks are dropped (their groups are told) and the threads end.
    """

    def __init__(self, n: int, name: str, stop: threading.Event) -> None:
        self._stop = stop
        self.n_threads = n
        self._tasks: SimpleQueue[tuple[Callable[[], None], Group, str] | None] = SimpleQueue()
        self._busy: dict[int, str] = {}
        self._name = name
        self._lock = threading.Lock()
        self._threads: list[threading.Thread] = []
        # Tasks that wait or are under way.
        self._n_open = 0

    def submit(self, task: Callable[[], None], group: Group, where: str) -> None:
        """Queue a task; `where` names what it reads, for messages about time-outs."""
        with self._lock:
            self._n_open += 1
            if len(self._threads) < min(self._n_open, self.n_threads) and not self._stop.is_set():
                number = len(self._threads)
                thread = threading.Thread(target=self._work, args=(number,), name=f"{self._name}-{number}", daemon=True)
                thread.start()
                self._threads.append(thread)
            self._tasks.put((task, group, where))

    @property
    def is_alive(self) -> bool:
        return any(thread.is_alive() for thread in self._threads)

    def busy_with(self) -> str:
        """What the threads are doing right now, for an error message."""
        return ", ".join(sorted(set(self._busy.copy().values()))) or "nothing"

    def help(self, group: Group) -> None:
        """Carry out queued tasks in this thread, the oldest first, until a group is done or nothing is queued any more.

        For tasks that compute or copy: who waits for them has a core to give. The threads may still be at some when this
        returns, so `group.wait` comes after it.
        """
        while not group.is_done:
            try:
                item = self._tasks.get_nowait()
            except Empty:
                return
            if item is None:  # a thread is to end: that is not for us
                self._tasks.put(None)
                return
            self._carry_out(-1, *item)
            del item

    def _work(self, number: int) -> None:
        while (item := self._tasks.get()) is not None:
            self._carry_out(number, *item)
            # Nothing may keep the memory of the last task alive while waiting for the next.
            del item

    def _carry_out(self, number: int, task: Callable[[], None], group: Group, where: str) -> None:
        error: BaseException | None = None
        if self._stop.is_set():
            error = StoppedError()
        else:
            self._busy[number] = where
            try:
                task()
            except BaseException as raised:
                error = raised
            self._busy.pop(number, None)
        with self._lock:
            self._n_open -= 1
        group.finish(error)

    def close(self) -> None:
        """Tell the threads to end; `join` waits for them."""
        self._stop.set()
        with self._lock:
            for _ in self._threads:
                self._tasks.put(None)

    def join(self, deadline: float) -> None:
        """Wait for the threads until `time.monotonic()` is `deadline`; one that hangs in a system call is left behind."""
        for thread in self._threads:
            if thread is not threading.current_thread():
                thread.join(max(0.0, deadline - time.monotonic()))


class Handoff(Generic[T]):
    """A bounded queue from one thread to another that can be closed from both sides."""

    def __init__(self, depth: int, stop: threading.Event) -> None:
        self._depth = depth
        self._stop = stop
        self._items: deque[T] = deque()
        self._changed = threading.Condition()
        self._error: BaseException | None = None
        self._ended = False

    def put(self, item: T) -> None:
        """Append an item as soon as there is room.

        Raises:
            StoppedError: the run was closed.
        """
        with self._changed:
            while len(self._items) >= self._depth and not self._stop.is_set():
                self._changed.wait(SLICE_S)
            if self._stop.is_set():
                raise StoppedError
            self._items.append(item)
            self._changed.notify_all()

    def end(self, error: BaseException | None = None) -> None:
        """Nothing more will come; with an error, `get` raises it once the items are gone."""
        with self._changed:
            self._ended, self._error = True, error
            self._changed.notify_all()

    def wake(self) -> None:
        """Wake all waiting threads, which look at `stop`."""
        with self._changed:
            self._items.clear()
            self._changed.notify_all()

    def __len__(self) -> int:
        return len(self._items)

    def get(self, timeout_s: float, waiting_for: Callable[[], str], progress: Callable[[], object]) -> T | None:
        """The next item, or None at the end.

        Args:
            timeout_s: Seconds to wait while `progress` gives the same value.
            waiting_for: Tells what threads are doing, for the message.
            progress: Changes whenever something has arrived.

        Raises:
            DeadlineError: neither an item nor progress came within `timeout_s`.
            Exception: what the other side ended with.
        """
        # Slices are counted, not the clock: a process that was stopped (Ctrl-Z, a suspended machine) goes on where it was.
        left, seen = timeout_s, progress()
        with self._changed:
            while not self._items:
                if self._ended or self._stop.is_set():
                    if self._error is not None:
                        raise self._error
                    return None
                if (found := progress()) != seen:
                    left, seen = timeout_s, found
                if left <= 0:
                    raise DeadlineError(
                        f"no batch and nothing read within {timeout_s:g} s; reading threads are busy with: {waiting_for()}",
                        where="batch_timeout_s",
                        remedy="Allow more time, or look at loader.explain() and loader.metrics().",
                    )
                started, slice_s = time.monotonic(), min(SLICE_S, left)
                self._changed.wait(slice_s)
                left -= min(time.monotonic() - started, slice_s)
            item = self._items.popleft()
            self._changed.notify_all()
            return item


def n_cpus() -> int:
    """Cores that this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
