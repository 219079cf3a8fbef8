"""Objects that are closed when they are collected, or at the end of the process. Goes with the writers and loaders that use it.

A collection runs in any thread, also in one that the object waits for. So a finalizer only enqueues the object, and a thread closes it.
"""

from __future__ import annotations

import atexit
import threading
from contextlib import suppress
from queue import SimpleQueue
from typing import Protocol

from saev_store._runtime.threads import after_fork_in_child


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
