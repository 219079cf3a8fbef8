"""A lock for state that forked workers inherit."""

from __future__ import annotations

import os
import threading
import weakref


class ForkSafeLock:
    """A mutex that is free in a forked child, whoever held it in the parent: that thread does not exist there.

    Right where what it guards is never left half changed for long, such as one step on a dict.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        _ALL.add(self)

    def __enter__(self) -> None:
        self._lock.acquire()

    def __exit__(self, *_: object) -> None:
        self._lock.release()

    def renew(self) -> None:
        """Forget the holder."""
        self._lock = threading.Lock()


_ALL: weakref.WeakSet[ForkSafeLock] = weakref.WeakSet()


def _renew_all() -> None:
    for lock in list(_ALL):
        lock.renew()


os.register_at_fork(after_in_child=_renew_all)
