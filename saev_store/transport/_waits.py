"""Waits for a loop in another thread, and for tasks in a loop."""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import AsyncGenerator
from concurrent.futures import Future
from typing import TypeVar

T = TypeVar("T")

#: Longest time until a Ctrl-C that the system delivers to another thread is noticed.
_SLICE_S = 0.2


def awaited(future: Future[T], timeout_s: float) -> T:
    """The result of a future, which is cancelled when the wait ends without one.

    The wait is divided: a thread in a long wait is not woken by a Ctrl-C that the system delivers to another thread.

    Raises:
        TimeoutError: it took longer than `timeout_s`.
        Exception: the future's own error.
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


@contextlib.asynccontextmanager
async def task_group() -> AsyncGenerator[asyncio.TaskGroup]:
    """A task group that raises the first error of its tasks as it is, and cancels the others."""
    first = None
    try:
        async with asyncio.TaskGroup() as group:
            yield group
    except BaseExceptionGroup as errors:
        first = errors.exceptions[0]
    # Not in the `except` block, where the group, which contains the error, would become its context: whatever follows that
    # circle, as the picklers of dask do, never ends.
    if first is not None:
        raise first
