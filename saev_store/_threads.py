"""A few threads for one call: copying in one thread is slower than memory can deliver.

Starting a thread costs some 50 us, so each should have a millisecond of work. They end with the call: there is nothing to
shut down, to inherit through `fork`, or to leak.
"""

from __future__ import annotations

import os
import threading
from collections import deque
from collections.abc import Callable, Generator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from typing import TypeVar

S = TypeVar("S")
T = TypeVar("T")

#: More threads than this do not copy faster within one memory.
_MAX_THREADS = 8


def n_threads(nbytes: int, *, part_bytes: int) -> int:
    """How many threads a copy of `nbytes` is worth: one for each core that we may use, with at least `part_bytes` each."""
    return max(1, min(nbytes // part_bytes, n_cores(), _MAX_THREADS))


def n_cores() -> int:
    """Cores that this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def ahead(work: Callable[[S], T], items: Sequence[S], n: int) -> Generator[T]:
    """What `work` gives for each item, in order, with up to `n` of them under way: for work that waits for a network.

    An error comes out in the place of its item, whichever thread was quicker. What has not begun by then never is, nor when
    the iterator is closed; what is under way ends by itself. With `n` of 1 there are no threads.

    >>> list(ahead(abs, [-3, 1, -2], 2))
    [3, 1, 2]
    """
    if min(n, len(items)) < 2:
        yield from map(work, items)
        return
    pool = ThreadPoolExecutor(min(n, len(items)), thread_name_prefix="saev-store-ahead")
    begun: deque[Future[T]] = deque()
    finished = False
    try:
        for item in items:
            if len(begun) == n:
                yield begun.popleft().result()
            begun.append(pool.submit(work, item))
        while begun:
            yield begun.popleft().result()
        finished = True
    finally:
        pool.shutdown(wait=finished, cancel_futures=True)


def share(work: Callable[[T], None], parts: deque[T], n: int) -> None:
    """Do all parts in `n` threads, of which this is one; each takes the next part when it is done with one.

    So a thread that gets no core holds up the others by one part at most. After an error no part is begun any more, and the
    error is raised here when all threads have ended. Where the system gives no more threads, fewer do it.
    """
    errors: list[BaseException] = []

    def take() -> None:
        while True:
            try:
                part = parts.popleft()
            except IndexError:
                return
            try:
                work(part)
            except BaseException as error:  # raised again by the thread that asked
                errors.append(error)
                parts.clear()

    started: list[threading.Thread] = []
    for _ in range(min(n, len(parts)) - 1):
        helper = threading.Thread(target=take, name="saev-store-copy", daemon=True)
        try:
            helper.start()
        except RuntimeError:  # no more threads, or the interpreter is ending
            break
        started.append(helper)
    take()
    for helper in started:
        helper.join()
    if errors:
        raise errors[0]
