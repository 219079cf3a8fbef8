"""Waits for another thread that Ctrl-C can interrupt."""

from __future__ import annotations

import contextlib
import time
from concurrent.futures import Future
from typing import TypeVar

T = TypeVar("T")

#: A Ctrl-C that the system tells another thread of is noticed after so long.
_SLICE_S = 0.2


def awaited(future: Future[T], timeout_s: float) -> T:
    """The result of a future, which is cancelled when the wait ends without one.

    Waiting is done in slices: a thread that waits for long is not woken by a Ctrl-C that another one is told of.

    Raises:
        TimeoutError: it took longer than `timeout_s`.
        Exception: what it ended with.
    """
    deadline = time.monotonic() + timeout_s
    try:
        while not future.done():
            left = deadline - time.monotonic()
            if left <= _SLICE_S:
                return future.result(max(left, 0.0))
            with contextlib.suppress(TimeoutError):  # if it is the future's own, it is raised below
                return future.result(_SLICE_S)
        return future.result()
    finally:
        if not future.done():
            future.cancel()
