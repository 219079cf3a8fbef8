"""Threads: how many, and work that is mapped over them."""

from __future__ import annotations

import os
from collections import deque
from collections.abc import Callable, Generator, Iterable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from typing import TypeVar

S = TypeVar("S")
T = TypeVar("T")

#: More threads do not copy faster within one memory.
_MAX_THREADS = 8


def n_cores() -> int:
    """Number of cores that this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def n_threads(nbytes: int, *, part_bytes: int) -> int:
    """Number of threads for a copy of `nbytes`: one per usable core, each with at least `part_bytes`."""
    return max(1, min(nbytes // part_bytes, n_cores(), _MAX_THREADS))


def ahead(work: Callable[[S], T], items: Iterable[S], n: int) -> Generator[T]:
    """Map `work` over `items` in up to `n` threads and yield results in order; at most `n` are computed in advance.

    An error is raised at the position of its item. After an error, or when the iterator is closed, no further item is started;
    running ones end by themselves. With `n` of 1 the caller's thread does the work.
    """
    if n < 2 or (isinstance(items, Sequence) and len(items) < 2):
        yield from map(work, items)
        return
    pool = ThreadPoolExecutor(n, thread_name_prefix="saev_store")
    begun: deque[Future[T]] = deque()
    try:
        for item in items:
            if len(begun) == n:
                yield begun.popleft().result()
            begun.append(pool.submit(work, item))
        while begun:
            yield begun.popleft().result()
    finally:
        pool.shutdown(wait=False, cancel_futures=True)


def in_threads(work: Callable[[S], object], items: Sequence[S], n: int) -> None:
    """Call `work` on all items in up to `n` threads; when this returns or raises the first error, no thread works any more."""
    if n < 2 or len(items) < 2:
        for item in items:
            work(item)
        return
    with ThreadPoolExecutor(min(n, len(items)), thread_name_prefix="saev_store") as pool:
        for _ in pool.map(work, items):  # which cancels what is not begun if it is left
            pass
