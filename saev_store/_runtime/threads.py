"""Threads for the duration of one call, locks that forked workers inherit, and the thread that closes abandoned objects.

One thread copies more slowly than memory allows. Starting a thread takes about 50 us, so each needs a millisecond of work. Threads
of a call end with it: there is no pool to shut down, to inherit through `fork`, or to leak.

Loaders and writers have threads of their own. Where one is garbage-collected without `close()`, the collection runs in any
thread, also in one of those to be ended, or while it holds a lock that `close()` takes. A finalizer therefore only enqueues
the object, and a thread of this module closes it. What is open at the end of the process is closed then. An error that a thread hands to
another one keeps lines, but no variables.
"""

from __future__ import annotations

import asyncio
import atexit
import os
import threading
import traceback
import weakref
from collections import deque
from collections.abc import Callable, Generator, Iterable, Sequence
from contextlib import suppress
from functools import partial
from queue import Empty, SimpleQueue
from typing import Generic, Protocol, TypeVar, cast

from saev_store.errors import TransportError

S = TypeVar("S")
T = TypeVar("T")

#: More threads do not copy faster within one memory.
_MAX_THREADS = 8
_SLICE_S = 0.2


def n_threads(nbytes: int, *, part_bytes: int) -> int:
    """Number of threads for a copy of `nbytes`: one per usable core, each with at least `part_bytes`."""
    return max(1, min(nbytes // part_bytes, n_cores(), _MAX_THREADS))


def n_cores() -> int:
    """Number of cores that this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def ahead(work: Callable[[S], T], items: Iterable[S], n: int) -> Generator[T]:
    """Map `work` over `items` in up to `n` threads and yield results in order; at most `n` are computed in advance.

    An error is raised at the position of its item. After an error, or when the iterator is closed, no further item is started;
    running ones end by themselves. With `n` of 1, or where the system refuses a thread, the caller's thread does the work.

    >>> list(ahead(abs, [-3, 1, -2], 2))
    [3, 1, 2]
    """
    if n < 2 or (isinstance(items, Sequence) and len(items) < 2):
        yield from map(work, items)
        return
    workers = Workers(n, name="saev-store-ahead")
    begun: deque[Task[T]] = deque()
    finished = False
    try:
        for item in items:
            if len(begun) == n:
                yield begun.popleft().result()
            try:
                begun.append(workers.begin(partial(work, item)))
            except TransportError:  # no more threads
                yield work(item)
        while begun:
            yield begun.popleft().result()
        finished = True
    finally:
        workers.close(wait=finished)


async def off_loop(call: Callable[[], T]) -> T:
    """The result of a call in a thread, so that the event loop goes on; where the system refuses one, of a call in the loop's own."""
    try:
        waiting = asyncio.get_running_loop().run_in_executor(None, call)
    except RuntimeError as error:  # no more threads
        raise_hidden_interrupt(error)
        return call()
    return await waiting


def start_thread(thread: threading.Thread, *, where: str) -> None:
    """Start a thread.

    Args:
        thread: One that was not started.
        where: What needs it, for the error.

    Raises:
        TransportError: the system refuses it, or the interpreter is ending.
        KeyboardInterrupt: the user has interrupted the start.
    """
    try:
        thread.start()
    except RuntimeError as error:
        raise_hidden_interrupt(error)
        raise TransportError(
            f"the system gives no more threads ({error})",
            where=where,
            remedy="End other processes, use fewer threads, or raise the limit (`ulimit -u`, or the container's pids limit).",
        ) from None


def hidden_interrupt(error: BaseException) -> KeyboardInterrupt | None:
    """The interrupt during whose handling the error was raised, if there is one.

    One that arrives while a thread starts leaves a lock of the standard library free that is freed once more on the way out. The
    RuntimeError of that must not be taken for the refusal of a thread.
    """
    before = error.__context__
    while before is not None and not isinstance(before, KeyboardInterrupt):
        before = before.__context__
    return before


def raise_hidden_interrupt(error: BaseException) -> None:
    """Raise the interrupt during whose handling the error was raised, if there is one."""
    if (interrupt := hidden_interrupt(error)) is not None:
        raise interrupt from None


def share(work: Callable[[T], None], parts: deque[T], n: int) -> None:
    """Run `work` on all parts in `n` threads including the calling one; each takes the next part when it has finished one.

    A thread without a core therefore delays the others by one part at most. After an error no further part is started, and the
    error is raised here when all threads have ended. If the system refuses a thread, fewer threads are used.
    """
    errors: list[BaseException] = []

    def take() -> None:
        while True:
            try:
                part = parts.popleft()
            except IndexError:
                return
            try:
                work(part)
            except BaseException as error:  # raised by the calling thread
                errors.append(error)
                parts.clear()

    started: list[threading.Thread] = []
    try:
        for _ in range(min(n, len(parts)) - 1):
            helper = threading.Thread(target=take, name="saev-store-copy", daemon=True)
            try:
                start_thread(helper, where="copy")
            except TransportError:  # no more threads, or the interpreter is ending
                break
            started.append(helper)
        take()
        for helper in started:
            helper.join()
    finally:
        parts.clear()  # there are some only after an interrupt
    if errors:
        raise errors[0]


def after_fork_in_child(call: Callable[[], object]) -> None:
    """Call `call()` in every child that is forked from now on; nothing where the system cannot fork."""
    if hasattr(os, "register_at_fork"):
        os.register_at_fork(after_in_child=call)


class ForkSafeLock:
    """A mutex that is free in a forked child: the thread that held it in the parent does not exist there.

    For state that is never left half changed for long, such as one step on a dict. It has no methods of its own for `with`: an
    interrupt at the first or last line of those would leave the mutex locked for ever.

    Attributes:
        mutex: What to hold: `with lock.mutex:`.
    """

    def __init__(self) -> None:
        self.mutex = threading.Lock()
        _ALL.add(self)

    def renew(self) -> None:
        """Forget the holder."""
        self.mutex = threading.Lock()


_ALL: weakref.WeakSet[ForkSafeLock] = weakref.WeakSet()


def _renew_all() -> None:
    for lock in list(_ALL):
        lock.renew()


after_fork_in_child(_renew_all)


class Flag:
    """What one thread sets and others wait for, and no interrupt leaves locked.

    The methods of `threading.Event` are Python code: an interrupt at the first or last line of one that holds its lock leaves it
    locked, and the next caller waits for ever.

    >>> flag = Flag()
    >>> flag.set()
    >>> flag.is_set(), flag.wait(60.0)
    (True, True)
    """

    def __init__(self) -> None:
        self._is_set = False
        self._gate = threading.Lock()
        self._gate.acquire()  # free when the flag is set

    def is_set(self) -> bool:
        """Whether it was set."""
        return self._is_set

    def set(self) -> None:
        """Set it for good; a second call does nothing."""
        self._is_set = True
        self._open()

    def wait(self, timeout_s: float) -> bool:
        """Return when it is set, or later than `timeout_s`; whether it is set."""
        if not self._is_set and self._gate.acquire(timeout=timeout_s):
            self._open()  # for the next one who waits
        return self._is_set

    def _open(self) -> None:
        with suppress(RuntimeError):  # free already
            self._gate.release()


class Task(Generic[T]):
    """A call that another thread makes, and its result."""

    def __init__(self, call: Callable[[], T]) -> None:
        self._call, self._ended = call, Flag()
        self._found: list[T] = []
        self._error: BaseException | None = None

    def run(self) -> None:
        """Make the call, in the other thread, once."""
        try:
            self._found.append(self._call())
        except BaseException as error:  # raised by who waits
            self._error = error
        self._ended.set()
        del self  # the traceback of the error keeps this frame

    def cancel(self) -> None:
        """End it without the call."""
        self._error = TransportError("the call was given up before it began", where="threads")
        self._ended.set()

    def wait(self) -> None:
        """Return when the call has ended. Waits in slices: an interrupt that another thread receives does not end an unbounded wait."""
        while not self._ended.wait(_SLICE_S):
            pass

    def result(self) -> T:
        """What the call gave, or raise its error; waits for it."""
        self.wait()
        try:
            if self._error is not None:
                raise self._error
            return self._found[0]
        finally:
            del self  # likewise


class Workers:
    """Threads that make calls, in order, until `close` or the end of this object.

    In the place of a `ThreadPoolExecutor`: its methods and those of a `Future` are Python code that holds locks, as those of
    `threading.Event`. After an interrupt in one, its threads wait for ever, and so does the end of the process.

    Args:
        n: How many threads at most; each is started when there is a call for it.
        name: What they are called.
    """

    def __init__(self, n: int, *, name: str) -> None:
        self._n, self._name = n, name
        self._is_closed = False
        self._threads: list[threading.Thread] = []
        self._todo: SimpleQueue[Task[object] | None] = SimpleQueue()

    def begin(self, call: Callable[[], T]) -> Task[T]:
        """Let a thread make the call.

        Raises:
            TransportError: the system refuses the first thread. Without a further one, there are fewer.
        """
        task = Task(call)
        if not self._is_closed and len(self._threads) < self._n:
            thread = threading.Thread(target=_run_all, args=(self._todo,), name=self._name, daemon=True)
            try:
                start_thread(thread, where=self._name)
                self._threads.append(thread)
            except TransportError:
                if not self._threads:
                    raise
        self._todo.put(cast("Task[object]", task))
        if self._is_closed:  # meanwhile: who brings a call too late makes it
            for late in self._left():
                late.run()
        return task

    def close(self, *, wait: bool) -> None:
        """End the threads: `wait` for all calls, or begin no further one."""
        self._is_closed = True
        if not wait:
            for task in self._left():
                task.cancel()
        self._todo.put(None)
        if wait:
            for thread in self._threads:
                thread.join()

    def _left(self) -> list[Task[object]]:
        """The calls that no thread has begun, which none will begin."""
        found: list[Task[object]] = []
        with suppress(Empty):
            while True:
                if (task := self._todo.get_nowait()) is not None:
                    found.append(task)
        self._todo.put(None)
        return found

    def __del__(self) -> None:
        self._todo.put(None)


def _run_all(todo: SimpleQueue[Task[object] | None]) -> None:
    """Run tasks up to the end: the work of a thread."""
    while (task := todo.get()) is not None:
        task.run()
        del task  # the caller alone decides how long its result lives
    todo.put(None)  # for the other threads


class Closes(Protocol):
    """An object that has to be closed."""

    def close(self) -> None:
        """Close it; a second call does nothing."""
        ...


class AbandonedObjects:
    """The objects of this process that are not closed yet, and the thread that closes abandoned ones."""

    def __init__(self) -> None:
        self._renew()
        after_fork_in_child(self._renew)

    def _renew(self) -> None:
        """Reset, also in a forked child: the parent closes its own objects."""
        self._live: dict[int, Closes] = {}
        # `SimpleQueue.put` is reentrant, so finalizers may call it in any thread.
        self._found: SimpleQueue[Closes] = SimpleQueue()
        self._thread: threading.Thread | None = None

    def add(self, some: Closes) -> None:
        """Close the object when it is enqueued, or at the end of the process, unless it is closed before.

        Raises:
            TransportError: the system refuses the thread that closes abandoned objects.
        """
        if self._thread is None:
            thread = threading.Thread(target=_close_all, args=(self._found,), name="closes-abandoned", daemon=True)
            start_thread(thread, where="the thread that closes abandoned objects")
            self._thread = thread
            # Registered last, and once, so that it runs before the exit handlers of transports.
            atexit.unregister(self.close_all)
            atexit.register(self.close_all)
        self._live[id(some)] = some

    def enqueue(self, some: Closes) -> None:
        """Enqueue an abandoned object to be closed. The only call that a finalizer may make."""
        if id(some) in self._live:
            self._found.put(some)

    def remove(self, some: Closes) -> None:
        """Remove an object that was closed."""
        self._live.pop(id(some), None)

    def close_all(self) -> None:
        """Close all objects that are not closed yet."""
        for some in list(self._live.values()):
            with suppress(Exception):  # the others must be closed too
                some.close()


def _close_all(found: SimpleQueue[Closes]) -> None:
    """Close what is enqueued, for ever: the work of the thread."""
    while True:
        with suppress(Exception):  # no caller could handle an error
            # Not bound to a name, which would keep the object alive while this waits for the next one.
            found.get().close()


ABANDONED = AbandonedObjects()


def without_variables(error: BaseException) -> BaseException:
    """The error, whose traceback has the lines below the caller, but none of their variables: these may hold gigabytes."""
    caller = error.__traceback__
    error.with_traceback(None if caller is None else caller.tb_next)
    link: BaseException | None = error
    seen = set[int]()
    while link is not None and id(link) not in seen:
        seen.add(id(link))
        traceback.clear_frames(link.__traceback__)
        link = link.__cause__ or link.__context__
    return error
