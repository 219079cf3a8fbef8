"""What has threads and that nobody uses any more: ended by a thread of their own, and at the end of the process.

Garbage that is part of a cycle is collected in whichever thread happens to be next, wherever that is: also in one of the
threads that have to end, or while it holds a lock that ending them takes. So whoever finds something forgotten only says so,
and this thread closes it.
"""

from __future__ import annotations

import atexit
import os
import threading
from contextlib import suppress
from queue import SimpleQueue
from typing import Protocol


class Closes(Protocol):
    """Something that has to be ended."""

    def close(self) -> None:
        """End it; calling it again does nothing."""
        ...


class Forgotten:
    """What has begun and is not closed yet, and a thread that closes what is forgotten; one of it for each process."""

    def __init__(self) -> None:
        self._renew()
        os.register_at_fork(after_in_child=self._renew)

    def _renew(self) -> None:
        """Begin anew, also in a forked child: what the parent has begun is not the child's to close."""
        self._live: dict[int, Closes] = {}
        # Its `put` takes no lock that the same thread could hold already: it may be called from anywhere.
        self._found: SimpleQueue[Closes] = SimpleQueue()
        self._thread: threading.Thread | None = None

    def begin(self) -> None:
        """Have the thread, which children do not inherit; before anything is watched.

        Raises:
            RuntimeError: no thread can be started.
        """
        if self._thread is None:
            thread = threading.Thread(target=_close_all, args=(self._found,), name="closes-forgotten", daemon=True)
            thread.start()
            self._thread = thread
            # Only now, and once, to come before what transports have registered for their own threads.
            atexit.unregister(self.close_all)
            atexit.register(self.close_all)

    def watch(self, some: Closes) -> None:
        """Close it at the end of the process, unless it is closed before."""
        self._live[id(some)] = some

    def tell(self, some: Closes) -> None:
        """Nobody refers to it any more; it is closed soon. The only thing that a finalizer may do."""
        if id(some) in self._live:
            self._found.put(some)

    def closed(self, some: Closes) -> None:
        """It has been closed."""
        self._live.pop(id(some), None)

    def close_all(self) -> None:
        """Close what is left."""
        for some in list(self._live.values()):
            with suppress(Exception):  # the next one has to be closed all the same
                some.close()


def _close_all(found: SimpleQueue[Closes]) -> None:
    while True:
        with suppress(Exception):  # there is nobody to tell
            # Without a name: nothing may keep the last one alive while this waits for the next.
            found.get().close()


FORGOTTEN = Forgotten()
