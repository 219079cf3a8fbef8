"""Pools that are read in threads, and the wait for them."""

from __future__ import annotations

import threading
import time
import traceback
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor, wait
from dataclasses import dataclass
from typing import ParamSpec, TypeVar

from saev_store.core.layout import IntArray
from saev_store.errors import ArgumentError, DeadlineError
from saev_store.loaders.memory import MOST_POOLS, Bytes, PoolMemory
from saev_store.loaders.reads import ReadTask, Scratch, Side, plan_reads
from saev_store.order import Pool

P = ParamSpec("P")
T = TypeVar("T")

#: Seconds between two looks for memory that abandoned reads hold.
_LOOK_S = 0.02
#: Waits are cut into slices, so that time in which the process was stopped does not count.
_SLICE_S = 0.5


@dataclass(frozen=True, eq=False)
class Plan:
    """A pool before it is read.

    Attributes:
        pool: The pool.
        columns: What comes with its rows, by slot.
        tasks: Its reads.
    """

    pool: Pool
    columns: dict[str, IntArray]
    tasks: list[ReadTask]


@dataclass(frozen=True, eq=False)
class Reading:
    """A pool that is being read to its memory."""

    plan: Plan
    memory: Bytes
    reads: list[Future[None]]


class PoolReader:
    """The threads of one iteration.

    Args:
        make: Makes a pool and its columns, by the number of the pool.
        n_pools: Pools of the epoch.
        sides: What is read.
        memory: The memory of pools.
        n_threads: How many threads.
        scratch: Memory for what is read, kept for the next iteration.
        timeout_s: Longest wait without any finished read.
    """

    def __init__(
        self,
        make: Callable[[int], tuple[Pool, dict[str, IntArray]]],
        n_pools: int,
        sides: Sequence[Side],
        memory: PoolMemory,
        *,
        n_threads: int,
        scratch: Scratch,
        timeout_s: float,
    ) -> None:
        self._make, self._n_pools, self._sides, self._memory = make, n_pools, sides, memory
        self._scratch, self._timeout_s = scratch, timeout_s
        self._stop = threading.Event()
        self._threads = ThreadPoolExecutor(n_threads, thread_name_prefix="saev-store-loader")
        #: The pool that is handed out, and the one that is read in the meantime. A stale iterator holds no memory: `close` forgets them.
        self.current: Reading | None = None
        self.following: Reading | None = None
        #: Plans of the pools that are begun next.
        self._plans: dict[int, Future[Plan]] = {}

    @property
    def is_closed(self) -> bool:
        """True after `close`."""
        return self._stop.is_set()

    @property
    def n_lent(self) -> int:
        """Number of pools whose memory is referred to."""
        return self._memory.n_lent

    def _plan(self, number: int) -> Plan:
        pool, columns = self._make(number)
        return Plan(pool, columns, [task for side in self._sides for task in plan_reads(pool, side)])

    def planned(self, number: int) -> Future[Plan]:
        """Return the plan of a pool, which a thread makes. It makes that of the next one too, so that no reads wait for plans."""
        for one in range(number, min(number + 2, self._n_pools)):
            if one not in self._plans:
                self._plans[one] = self._submit(self._plan, one)
        return self._plans[number]

    def begin(self, number: int, most: int) -> Reading | None:
        """Begin to read a pool if it is planned, and if there is memory in `most` pools. What was begun before is read first."""
        if number == self._n_pools:
            return None
        if self.is_closed:
            raise ended()
        planned = self.planned(number)
        if not planned.done() or (memory := self._memory.lend(most)) is None:
            return None
        plan = self._plans.pop(number).result()
        # The next plans go first: they are ready before this pool is read.
        if number + 1 < self._n_pools:
            self.planned(number + 1)
        reads = [self._submit(task.run, memory, self._stop, self._scratch) for task in plan.tasks]
        return Reading(plan, memory, reads)

    def waited(self, number: int) -> Reading:
        """Begin to read a pool, after a wait for its plan and for reads that were abandoned.

        Raises:
            DeadlineError: these have not ended in time.
            SaevStoreError: of the plan.
        """
        left_s = self._timeout_s
        self._wait([self.planned(number)])
        while (reading := self.begin(number, MOST_POOLS)) is None:
            if left_s <= 0:
                raise DeadlineError("reads of an earlier iteration hold the memory of the pools", where="loader")
            time.sleep(_LOOK_S)
            left_s -= _LOOK_S
        return reading

    def finish(self, reading: Reading) -> None:
        """Wait until a pool is read.

        Raises:
            DeadlineError: no read has finished for the longest wait.
            ArgumentError: this was closed in the meantime.
            SaevStoreError: of a read.
        """
        reads = reading.reads
        self._wait(reads)
        try:
            for read in reads:
                read.result()
        except BaseException as error:
            forget_variables(error)
            raise
        finally:
            # An error refers to this frame, and a read to its error.
            del reading, reads
            read = None

    def close(self) -> None:
        """End the threads. A read that hangs in the system is abandoned, and its memory is not used again before it returns."""
        self._stop.set()
        self.current = self.following = None
        self._threads.shutdown(wait=False, cancel_futures=True)

    def _submit(self, call: Callable[P, T], *args: P.args, **kwargs: P.kwargs) -> Future[T]:
        try:
            return self._threads.submit(call, *args, **kwargs)
        except RuntimeError:
            if self.is_closed:
                raise ended() from None
            raise

    def _wait(self, futures: Sequence[Future[T]]) -> None:
        """Wait until all calls have ended, or one has failed."""
        left, left_s = set(futures), self._timeout_s
        while left:
            slice_s, began_s = min(_SLICE_S, left_s), time.monotonic()
            done, pending = wait(left, slice_s, return_when="FIRST_EXCEPTION")
            if self.is_closed:
                raise ended()
            if any(one.exception() for one in done):
                return
            left_s = self._timeout_s if done else left_s - min(time.monotonic() - began_s, slice_s)
            left = pending
            if left and left_s <= 0:
                raise DeadlineError(
                    f"no batch, and no finished read, for {self._timeout_s:g} s",
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


def forget_variables(error: BaseException) -> None:
    """Clear the variables of the frames that an error has left: they hold the memory of pools for as long as it is kept."""
    link: BaseException | None = error
    while link is not None:
        traceback.clear_frames(link.__traceback__)
        link = link.__cause__ or link.__context__
