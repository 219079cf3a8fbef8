"""Threads for calls that nobody can interrupt: who waits for one can, and goes on when its time is over."""

from __future__ import annotations

import threading
from collections.abc import Callable
from concurrent.futures import Future
from functools import partial
from queue import Empty, SimpleQueue
from typing import TypeVar

from saev_store.transport._locks import ForkSafeLock

T = TypeVar("T")

#: A thread that nobody needed for so long ends.
_IDLE_S = 5.0


class Gate:
    """Lets threads through until it is closed, and `close` waits for those that are inside."""

    def __init__(self) -> None:
        self._changed = threading.Condition()
        self._n_inside, self._is_closed = 0, False

    def enter(self, work: Callable[[], None]) -> None:
        """Carry out some work, unless the gate is closed."""
        with self._changed:
            if self._is_closed:
                return
            self._n_inside += 1
        try:
            work()
        finally:
            with self._changed:
                self._n_inside -= 1
                self._changed.notify_all()

    def close(self) -> None:
        """From now on nothing is carried out any more."""
        with self._changed:
            self._is_closed = True
            while self._n_inside:
                self._changed.wait()


class Callers:
    """As many threads as calls are under way together, up to `n_most`; daemons, because a call may hang.

    Args:
        n_most: More calls wait for a thread.
    """

    def __init__(self, n_most: int) -> None:
        self._n_most = n_most
        self._lock = ForkSafeLock()
        self._calls: SimpleQueue[Callable[[], None]] = SimpleQueue()
        # Threads there are, and calls that wait or are under way.
        self._n_threads = self._n_calls = 0

    def begin(self, call: Callable[[], T]) -> Future[T]:
        """Carry out a call in one of the threads; it can be cancelled as long as it waits for one."""
        future: Future[T] = Future()
        with self._lock:
            self._n_calls += 1
            self._calls.put(partial(_carry_out, call, future))
            grows = self._n_threads < min(self._n_calls, self._n_most)
            self._n_threads += grows
        if grows:
            thread = threading.Thread(target=self._work, name="saev_store-wait", daemon=True)
            try:
                thread.start()
            except RuntimeError:  # no more threads, or the interpreter is ending
                with self._lock:
                    self._n_threads -= 1
                    alone = self._n_threads == 0
                if alone:
                    raise
        return future

    def _work(self) -> None:
        while True:
            try:
                call = self._calls.get(timeout=_IDLE_S)
            except Empty:
                with self._lock:
                    if self._calls.empty():
                        self._n_threads -= 1
                        return
                continue
            call()
            # Nothing may keep what came alive while waiting for the next.
            del call
            with self._lock:
                self._n_calls -= 1


def _carry_out(call: Callable[[], T], future: Future[T]) -> None:
    """Make a future of what a call gives or raises."""
    if not future.set_running_or_notify_cancel():
        return
    try:
        result = call()
    except BaseException as error:  # raised again where it is waited for
        future.set_exception(error)
    else:
        future.set_result(result)
