"""Pools that are read in threads, and the wait for them."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor, wait
from dataclasses import dataclass
from typing import TypeVar

from saev_store._next.loaders.memory import Bytes
from saev_store._next.loaders.reads import Scratch, Side, plan_reads
from saev_store._next.order import Pool
from saev_store.core.layout import IntArray
from saev_store.errors import ArgumentError, DeadlineError

T = TypeVar("T")

#: A pool, and what comes with its rows, by slot.
Planned = tuple[Pool, dict[str, IntArray]]
#: Waits are cut into slices, so that time in which the process was stopped does not count.
_SLICE_S = 0.5


@dataclass
class Reading:
    """A pool that is being read.

    Attributes:
        memory: Its memory.
        planned: The pool and the reads of its parts, as soon as they are planned.
    """

    memory: Bytes
    planned: Future[tuple[Planned, list[Future[None]]]]


class PoolReader:
    """The threads of one iteration.

    Args:
        sides: What is read.
        n_threads: How many threads.
        scratch: Memory for what is read, kept for the next iteration.
    """

    def __init__(self, sides: Sequence[Side], n_threads: int, scratch: Scratch) -> None:
        self._sides, self._scratch = sides, scratch
        self._stop = threading.Event()
        self._threads = ThreadPoolExecutor(n_threads, thread_name_prefix="saev-store-loader")

    @property
    def is_closed(self) -> bool:
        """True after `close`."""
        return self._stop.is_set()

    def begin(self, make: Callable[[], Planned], memory: Bytes) -> Reading:
        """Begin to read a pool; what was begun before is read first.

        Args:
            make: Makes the pool and its columns, in a thread.
            memory: Its memory. Reads that are abandoned keep it.
        """
        return Reading(memory, self._threads.submit(self._plan, make, memory))

    def _plan(self, make: Callable[[], Planned], memory: Bytes) -> tuple[Planned, list[Future[None]]]:
        planned = make()
        found: list[Future[None]] = []
        for side in self._sides:
            for task in plan_reads(planned[0], side, memory):
                if self._stop.is_set():
                    return planned, found
                found.append(self._threads.submit(task.run, self._stop, self._scratch))
        return planned, found

    def finish(self, reading: Reading, timeout_s: float) -> Planned:
        """Return the pool and its columns when all of it is read.

        Raises:
            DeadlineError: no read has finished for `timeout_s`.
            ArgumentError: this was closed in the meantime.
            SaevStoreError: of a read.
        """
        self._wait([reading.planned], timeout_s)
        planned, reads = reading.planned.result()
        self._wait(reads, timeout_s)
        for read in reads:
            read.result()
        return planned

    def close(self) -> None:
        """End the threads. A read that hangs in the system is abandoned, and its memory is not used again before it returns."""
        self._stop.set()
        self._threads.shutdown(wait=False, cancel_futures=True)

    def _wait(self, futures: Sequence[Future[T]], timeout_s: float) -> None:
        """Wait until all calls have ended, or one has failed."""
        left, left_s = set(futures), timeout_s
        while left:
            slice_s, began_s = min(_SLICE_S, left_s), time.monotonic()
            done, pending = wait(left, slice_s, return_when="FIRST_EXCEPTION")
            if self.is_closed:
                raise ended()
            if any(one.exception() for one in done):
                return
            left_s = timeout_s if done else left_s - min(time.monotonic() - began_s, slice_s)
            left = pending
            if left and left_s <= 0:
                raise DeadlineError(
                    f"no batch, and no finished read, for {timeout_s:g} s",
                    where="loader",
                    remedy="Check the storage, or allow more batch_timeout_s.",
                )


def ended() -> ArgumentError:
    """Return the refusal of an iteration that was ended."""
    return ArgumentError(
        "this iteration has ended: another one began, or the loader was closed",
        where="iter(loader)",
        remedy="Use the latest iterator.",
    )
