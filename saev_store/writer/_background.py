"""One thread that hashes and writes while the caller computes, with a bounded number of buffers between them."""

from __future__ import annotations

import os
import threading
from collections import deque
from collections.abc import Callable

import numpy as np
import numpy.typing as npt

from saev_store.errors import ForkError, TransportError

#: A page: what is written from such an address needs no second copy in the kernel.
_ALIGNMENT = 4096


def aligned_buffer(nbytes: int) -> npt.NDArray[np.uint8]:
    """Uninitialised memory that starts at a page."""
    memory = np.empty(nbytes + _ALIGNMENT, dtype=np.uint8)
    start = -memory.ctypes.data % _ALIGNMENT
    return memory[start : start + nbytes]


class Background:
    """Runs jobs one after the other in a thread of its own, and lends out a fixed number of buffers.

    After the first error no job runs any more, and every later call raises: the first one the error itself, the
    others one that tells of it. Every wait ends when the thread does, and can be interrupted.

    Args:
        buffer_nbytes: Length of a buffer.
        n_buffers: How many there are; whoever wants one more waits.
    """

    def __init__(self, *, buffer_nbytes: int, n_buffers: int) -> None:
        self._buffer_nbytes = buffer_nbytes
        self._n_unborn = n_buffers
        self._free: list[npt.NDArray[np.uint8]] = []
        self._jobs: deque[Callable[[], None]] = deque()
        self._changed = threading.Condition()
        self._busy = False
        self._stopping = False
        self._error: BaseException | None = None
        self._error_told = False
        self._pid = os.getpid()
        self._thread: threading.Thread | None = None

    @property
    def failed(self) -> bool:
        return self._error is not None

    def borrow(self) -> npt.NDArray[np.uint8]:
        """A buffer; waits until one is free."""
        with self._changed:
            self._wait_until(lambda: bool(self._free) or self._n_unborn > 0)
            if self._free:
                return self._free.pop()
            self._n_unborn -= 1
        return aligned_buffer(self._buffer_nbytes)

    def give_back(self, buffer: npt.NDArray[np.uint8]) -> None:
        with self._changed:
            self._free.append(buffer)
            self._changed.notify_all()

    def submit(self, job: Callable[[], None]) -> None:
        """Run a job after all earlier ones."""
        with self._changed:
            self._check()
            if self._thread is None:
                self._thread = threading.Thread(target=self._run, name="saev-store-writer", daemon=True)
                self._thread.start()
            self._jobs.append(job)
            self._changed.notify_all()

    def drain(self) -> None:
        """Wait until all jobs have run."""
        with self._changed:
            self._wait_until(lambda: not self._jobs and not self._busy)

    def stop(self) -> None:
        """Drop the jobs that have not begun, wait for the one that has, end the thread. Never raises."""
        if os.getpid() != self._pid:
            return
        with self._changed:
            self._stopping = True
            self._jobs.clear()
            self._changed.notify_all()
        if self._thread is not None and self._thread is not threading.current_thread():
            self._thread.join()

    def _check(self) -> None:
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

    def _wait_until(self, ready: Callable[[], bool]) -> None:
        self._check()
        while not ready():
            # The time-out is for the one case no notification covers: the thread was ended by the interpreter.
            self._changed.wait(1.0)
            self._check()

    def _run(self) -> None:
        while True:
            with self._changed:
                while not self._jobs and not self._stopping:
                    self._changed.wait()
                if self._stopping:
                    return
                job = self._jobs.popleft()
                self._busy = True
            error: BaseException | None = None
            try:
                job()
            except BaseException as caught:
                error = caught
            del job
            with self._changed:
                self._busy = False
                if error is not None:
                    self._error = error
                    self._jobs.clear()
                self._changed.notify_all()
