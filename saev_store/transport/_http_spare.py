"""Connections that outlive whoever opened them."""

from __future__ import annotations

import os
import socket
import time
import weakref

from saev_store.transport._locks import ForkSafeLock

#: Servers end connections that nobody uses for longer, some sooner.
_SPARE_S = 5.0


class SpareConnections:
    """Connections that a fetcher had to spare when it ended, for the next one to the same server; thread-safe.

    They are closed with this object, or when a process that was forked finds them: they belong to its parent.
    """

    def __init__(self) -> None:
        self._pid, self._lock = os.getpid(), ForkSafeLock()
        self._socks: list[tuple[float, socket.socket]] = []
        weakref.finalize(self, _close_all, self._socks)

    def take(self) -> socket.socket | None:
        """One that nobody used for a short while only, the latest first."""
        with self._lock:
            if os.getpid() != self._pid or (self._socks and time.monotonic() - self._socks[-1][0] > _SPARE_S):
                self._pid = os.getpid()
                _close_all(self._socks)
            return self._socks.pop()[1] if self._socks else None

    def give(self, socks: list[socket.socket]) -> None:
        """Keep some instead of older ones."""
        with self._lock:
            _close_all(self._socks)
            self._pid = os.getpid()
            self._socks.extend((time.monotonic(), sock) for sock in socks)


def _close_all(socks: list[tuple[float, socket.socket]]) -> None:
    while socks:
        socks.pop()[1].close()
