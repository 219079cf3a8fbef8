"""One thread that hashes and writes while the caller computes, with a bounded number of buffers between them."""

from __future__ import annotations

import os
import threading
from collections.abc import Callable
from queue import Empty, SimpleQueue
from typing import Any, TypeVar

import numpy as np
import numpy.typing as npt

from saev_store.errors import ForkError, SaevStoreError, TransportError

T = TypeVar("T")

#: A page: what is written from such an address needs no second copy in the kernel.
_ALIGNMENT = 4096
#: How often a wait looks whether the thread still lives: at the end of the process the interpreter ends it.
_LOOK_S = 1.0


def aligned_buffer(nbytes: int) -> npt.NDArray[np.uint8]:
    """Uninitialised memory that starts at a page."""
    memory = np.empty(nbytes + _ALIGNMENT, dtype=np.uint8)
    start = -memory.ctypes.data % _ALIGNMENT
    return memory[start : start + nbytes]


class Background:
    """Runs jobs one after the other in a thread of its own, and lends a fixed number of buffers.

    After the first error no job runs any more, and every later call raises: the first one the error itself, the others
    one that names it. An `OSError` of a job becomes a `TransportError`. The caller and the thread share only queues: an interrupt cannot leave one of them locked.

    Args:
        buffer_nbytes: Length of a buffer.
        n_buffers: How many there are; `borrow` waits for a free one.
        where: What is written, for messages.
    """

    def __init__(self, *, buffer_nbytes: int, n_buffers: int, where: str) -> None:
        self._buffer_nbytes, self._n_unmade, self._where = buffer_nbytes, n_buffers, where
        # None in these queues wakes the thread that waits: jobs have ended, or one has failed.
        self._jobs: SimpleQueue[tuple[Callable[[], None], SimpleQueue[None] | None] | None] = SimpleQueue()
        self._free: SimpleQueue[npt.NDArray[np.uint8] | None] = SimpleQueue()
        self._waited: SimpleQueue[Any] | None = None
        self._stopping = False
        self._error: BaseException | None = None
        self._error_told = False
        self._pid = os.getpid()
        self._thread: threading.Thread | None = None

    @property
    def failed(self) -> bool:
        """Whether a job has failed."""
        return self._error is not None

    def borrow(self) -> npt.NDArray[np.uint8]:
        """A buffer; waits until one is free."""
        self._check()
        if self._n_unmade:
            self._n_unmade -= 1
            return aligned_buffer(self._buffer_nbytes)
        while (buffer := self.wait_for(self._free)) is None:
            pass
        return buffer

    def give_back(self, buffer: npt.NDArray[np.uint8]) -> None:
        """Return a buffer; called in any thread."""
        self._free.put(buffer)

    def submit(self, job: Callable[[], None]) -> None:
        """Run a job after all earlier ones.

        Raises:
            TransportError: the system gives no more threads.
        """
        self._check()
        if self._thread is None:
            self._thread = threading.Thread(target=self._run, name="saev-store-writer", daemon=True)
            try:
                self._thread.start()
            except RuntimeError as error:
                self._thread = None
                raise no_threads(error, where=self._where) from None
        self._jobs.put((job, None))

    def drain(self) -> None:
        """Wait until all jobs have run."""
        self._check()
        if self._thread is not None:
            done = SimpleQueue[None]()
            self._jobs.put((lambda: None, done))
            self.wait_for(done)

    def stop(self) -> None:
        """Drop the jobs that have not begun, wait for the one that has, end the thread. Never raises."""
        if os.getpid() != self._pid:
            return
        self._stopping = True
        self._jobs.put(None)
        if self._thread is not None and self._thread is not threading.current_thread():
            self._thread.join()

    def _check(self) -> None:
        # First, and without a lock: in a forked child the thread that held it does not exist.
        if os.getpid() != self._pid:
            raise ForkError(
                "a writer was used in a forked child; its thread lives in the parent only",
                remedy="Create the writer in the process that writes.",
            )
        if self._error is not None:
            if not self._error_told:
                self._error_told = True
                raise self._error
            raise TransportError(
                f"this writer stopped after an earlier error ({type(self._error).__name__}: {self._error})",
                remedy="Close it, remove the cause, and resume.",
            ) from self._error
        if self._stopping:
            raise TransportError("this writer is closed", remedy="Create a new one with resume=True.")

    def wait_for(self, queue: SimpleQueue[T | None]) -> T | None:
        """Wait for what a job puts into a queue."""
        self._waited = queue  # before looking for an error: one that comes later is told through it
        while True:
            self._check()
            try:
                found = queue.get(timeout=_LOOK_S)
            except Empty:
                if self._thread is None or not self._thread.is_alive():
                    self._check()
                    raise TransportError("the writer's thread has ended", where=self._where) from None
            else:
                self._check()
                return found

    def _run(self) -> None:
        while (taken := self._jobs.get()) is not None:
            job, done = taken
            if self._error is None and not self._stopping:
                try:
                    job()
                except BaseException as error:  # raised again in the thread that waits
                    self._error = self._explained(error)
                    if (waited := self._waited) is not None:
                        waited.put(None)
            del job, taken
            if done is not None:
                done.put(None)

    def _explained(self, error: BaseException) -> BaseException:
        if isinstance(error, SaevStoreError) or not isinstance(error, OSError):
            return error
        explained = TransportError(
            f"writing failed: {error}", where=self._where, remedy="Remove the cause, then resume."
        )
        explained.__cause__ = error
        return explained


def no_threads(error: RuntimeError, *, where: str) -> TransportError:
    """The error for a thread that cannot be started."""
    return TransportError(
        f"the writer needs a thread, and the system gives none: {error}",
        where=where,
        remedy="End other processes, or raise the limit (`ulimit -u`, or the container's pids limit).",
    )
