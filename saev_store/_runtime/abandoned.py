"""Closes abandoned loaders and writers: objects with threads that were garbage-collected without `close()`.

Garbage collection runs in any thread, also in one of the threads to be ended, or while it holds a lock that `close()` takes. A
finalizer therefore only enqueues the object, and a thread of this module closes it. What is open at the end of the process is
closed then.
"""

from __future__ import annotations

import atexit
import os
import threading
from contextlib import suppress
from queue import SimpleQueue
from typing import Protocol


class Closes(Protocol):
    """An object that has to be closed."""

    def close(self) -> None:
        """Close it; a second call does nothing."""
        ...


class AbandonedObjects:
    """The objects of this process that are not closed yet, and the thread that closes abandoned ones."""

    def __init__(self) -> None:
        self._renew()
        if hasattr(os, "register_at_fork"):  # not on Windows, which has no fork
            os.register_at_fork(after_in_child=self._renew)

    def _renew(self) -> None:
        """Reset, also in a forked child: the parent closes its own objects."""
        self._live: dict[int, Closes] = {}
        # `SimpleQueue.put` is reentrant, so finalizers may call it in any thread.
        self._found: SimpleQueue[Closes] = SimpleQueue()
        self._thread: threading.Thread | None = None

    def add(self, some: Closes) -> None:
        """Close the object when it is enqueued, or at the end of the process, unless it is closed before.

        Raises:
            RuntimeError: the system refuses the thread that closes abandoned objects.
        """
        if self._thread is None:
            thread = threading.Thread(target=_close_all, args=(self._found,), name="closes-abandoned", daemon=True)
            thread.start()
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
