"""Connections that outlive whoever opened them."""

from __future__ import annotations

import os
import socket
import time
import weakref
from collections import deque

from saev_store.transport._locks import ForkSafeLock

#: Servers end connections that nobody uses for longer, some sooner.
_SPARE_S = 5.0
#: As many as one fetcher has under way.
_MOST = 128


def is_fresh(since: float) -> bool:
    """Whether a connection that nobody has used since then is good for more."""
    return time.monotonic() - since <= _SPARE_S


class SpareConnections:
    """Connections that a fetcher had to spare when it ended, for the next one to the same server; thread-safe.

    They are closed with this object, or when a process that was forked finds them: they belong to its parent.
    """

    def __init__(self) -> None:
        self._pid, self._lock = os.getpid(), ForkSafeLock()
        self._socks = deque[tuple[float, socket.socket]]()
        weakref.finalize(self, _close_all, self._socks)

    def take(self) -> socket.socket | None:
        """One that nobody used for a short while only, the latest first."""
        with self._lock:
            self._close_old()
            return self._socks.pop()[1] if self._socks else None

    def give(self, socks: list[socket.socket]) -> None:
        """Keep some besides those that are here, and close the oldest of them all where they are too many."""
        with self._lock:
            self._close_old()
            self._socks.extend((time.monotonic(), sock) for sock in socks)
            self._close(len(self._socks) - _MOST)

    def _close_old(self) -> None:
        """Close what was here too long, or is another process's; under the lock."""
        if os.getpid() != self._pid:
            self._pid = os.getpid()
            self._close(len(self._socks))
        self._close(sum(not is_fresh(given) for given, _ in self._socks))

    def _close(self, n: int) -> None:
        """Close the `n` oldest."""
        for _ in range(n):
            self._socks.popleft()[1].close()


def _close_all(socks: deque[tuple[float, socket.socket]]) -> None:
    while socks:
        socks.pop()[1].close()
