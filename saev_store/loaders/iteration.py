"""Pools that are read in threads: their memory, and the wait for them."""

from __future__ import annotations

import threading
import time
import weakref
from collections import deque
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor, wait
from typing import NamedTuple

import numpy as np

from saev_store.core.layout import IntArray
from saev_store.errors import ArgumentError, DeadlineError
from saev_store.loaders.reads import Bytes, ReadTask
from saev_store.order import Pool

#: Makes the memory of a pool, such as pinned memory, from its number of bytes.
Allocate = Callable[[int], Bytes]
#: At most so many pools exist at a time: the current one, the next one, and one that kept batches hold back.
MOST_POOLS = 3
#: Seconds between two looks for memory that abandoned reads hold, and whether the iteration was closed.
_LOOK_S, _SLICE_S = 0.02, 0.25


def allocate(nbytes: int) -> Bytes:
    """Return plain memory. NumPy asks the system for huge pages; pages that are not touched cost nothing."""
    return np.empty(nbytes, np.uint8)


class PoolMemory:
    """Memory for up to three pools of one size.

    Args:
        nbytes: Bytes of a pool.
        make: Makes it.
    """

    def __init__(self, nbytes: int, make: Allocate) -> None:
        self.nbytes, self._make = nbytes, make
        self._n_made = 0
        self._idle: deque[Bytes] = deque()

    @property
    def n_lent(self) -> int:
        """Number of pools that something refers to."""
        return self._n_made - len(self._idle)

    def lend(self, most: int) -> Bytes | None:
        """Return the memory of a pool; None if `most` pools exist and something refers to each.

        The memory is used again as soon as no array, tensor or memoryview of it is left.

        Raises:
            ArgumentError: the machine does not have that much memory.
        """
        if self._idle:
            memory = self._idle.popleft()
        elif self._n_made < most:
            try:
                memory = self._make(self.nbytes)
            except (MemoryError, RuntimeError) as error:  # torch raises RuntimeError for pinned memory
                raise ArgumentError(
                    f"a pool of {self.nbytes:,} bytes needs more memory than this machine gives",
                    where="window_bytes",
                    remedy="Use a smaller window_bytes.",
                ) from error
            self._n_made += 1
        else:
            return None
        lent = np.frombuffer(memory.data, np.uint8)
        # NumPy makes the memoryview below the array the base of each array that is derived from it, so all refer to this one.
        weakref.finalize(lent.base, self._idle.append, memory).atexit = False
        return lent


class Plan(NamedTuple):
    """A pool before it is read: what comes with its rows, by slot, and its reads."""

    pool: Pool
    columns: dict[str, IntArray]
    tasks: list[ReadTask]


class Reading(NamedTuple):
    """A pool that is being read to its memory."""

    plan: Plan
    memory: Bytes
    reads: list[Future[None]]


class PoolReader:
    """The threads of one iteration.

    Args:
        plans: The pools, made ahead.
        memory: The memory of pools.
        n_threads: How many threads.
        timeout_s: Longest wait without any finished read.
    """

    def __init__(self, plans: Iterator[Plan], memory: PoolMemory, n_threads: int, timeout_s: float) -> None:
        self._plans, self._memory, self._timeout_s = plans, memory, timeout_s
        self._next: Plan | None = None
        self._stop = threading.Event()
        self._threads = ThreadPoolExecutor(n_threads, thread_name_prefix="saev-store-loader")
        #: The pool that is handed out, and the one that is read in the meantime. A stale iterator holds no memory: `close` forgets them.
        self.current: Reading | None = None
        self.following: Reading | None = None

    @property
    def is_closed(self) -> bool:
        """True after `close`."""
        return self._stop.is_set()

    @property
    def n_held(self) -> int:
        """Number of earlier pools whose memory is referred to."""
        return self._memory.n_lent - 1 - (self.following is not None)

    def begin(self, most: int) -> Reading | None:
        """Begin to read the next pool, if there is one, and if there is memory in `most` pools. What was begun before is read first."""
        if self.is_closed:
            raise ended()
        if self._next is None:
            self._next = next(self._plans, None)
        if self._next is None or (memory := self._memory.lend(most)) is None:
            return None
        plan, self._next = self._next, None
        try:
            return Reading(plan, memory, [self._threads.submit(task.run, memory, self._stop) for task in plan.tasks])
        except RuntimeError:  # another thread has closed this
            raise ended() from None

    def finish(self) -> Reading:
        """Return the next pool when it is read.

        Raises:
            DeadlineError: no read has finished for the longest wait, or reads that were abandoned hold the memory.
            ArgumentError: this was closed in the meantime.
            SaevStoreError: of a read.
        """
        deadline_s, self.current = time.monotonic() + self._timeout_s, None
        while (reading := self.following or self.begin(MOST_POOLS)) is None:
            if time.monotonic() > deadline_s:
                raise DeadlineError("reads of an earlier iteration hold the memory of the pools", where="loader")
            time.sleep(_LOOK_S)
        self.current, self.following = reading, None
        # Two pools are enough unless batches are kept, if the caller has let go of the pool before by the second batch.
        self.following = self.begin(MOST_POOLS - (reading.plan.pool.n_batches > 1))
        left = set(reading.reads)
        while left:
            done, left = wait(left, _SLICE_S, return_when="FIRST_EXCEPTION")
            if self.is_closed:
                raise ended()
            for read in done:
                read.result()
            if done:
                deadline_s = time.monotonic() + self._timeout_s
            elif time.monotonic() > deadline_s:
                raise DeadlineError(
                    f"no batch, and no finished read, for {self._timeout_s:g} s",
                    where="loader",
                    remedy="Check the storage, or allow more batch_timeout_s.",
                )
        return reading

    def close(self) -> None:
        """End the threads. A read that hangs in the system is abandoned, and its memory is not used again before it returns."""
        self._stop.set()
        self.current = self.following = None
        self._threads.shutdown(wait=False, cancel_futures=True)
        self._plans = iter(())


def ended() -> ArgumentError:
    """Return the refusal of an iteration that was ended."""
    return ArgumentError(
        "this iteration has ended: another one began, or the loader was closed",
        where="iter(loader)",
        remedy="Use the latest iterator.",
    )
