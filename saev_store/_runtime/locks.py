"""A lock for state that forked workers inherit."""

from __future__ import annotations

import os
import threading
import weakref
from collections.abc import Callable


def after_fork_in_child(call: Callable[[], object]) -> None:
    """Call `call()` in every child that is forked from now on; nothing where the system cannot fork."""
    if hasattr(os, "register_at_fork"):
        os.register_at_fork(after_in_child=call)


class ForkSafeLock:
    """A mutex that is free in a forked child: the thread that held it in the parent does not exist there.

    For state that is never left half changed for long, such as one step on a dict.
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


after_fork_in_child(_renew_all)
