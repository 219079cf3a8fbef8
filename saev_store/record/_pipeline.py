"""The three steps of recording beside each other: one thread reads, the calling thread computes, one thread writes."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Generator, Iterator
from contextlib import contextmanager, suppress
from queue import Empty, SimpleQueue
from typing import Generic, TypeVar

S = TypeVar("S")
T = TypeVar("T")

#: Batches that are read and wait for the model, and batches that are computed and wait to be written.
N_READ, N_COMPUTED = 2, 1
#: Batches with vectors that are alive at the same time: one is computed, `N_COMPUTED` wait, one is written.
N_WITH_VECTORS = N_COMPUTED + 2
#: Batches that are alive at the same time: one is read, `N_READ` wait, the others have vectors.
N_ALIVE = N_READ + 1 + N_WITH_VECTORS

#: Waits come in slices: an interrupt that another thread receives does not end a wait.
_SLICE_S = 0.2
#: How long a thread that is inside the source is waited for, so that Ctrl-C takes less than a second.
_JOIN_S = 0.5


def pipeline_nbytes(inputs_nbytes: int, vectors_nbytes: int) -> int:
    """Bytes that the batches of a recording take at most; the writer's buffers, 48 MiB or 112 MiB for a bucket, not counted.

    Where examples are put together of vectors, one more batch of them is alive. On a GPU the vectors of up to two batches are
    in its memory, too.

    Args:
        inputs_nbytes: Of what the model is given for the largest batch.
        vectors_nbytes: Of the vectors of that batch in the dtype that the model computes in.

    >>> pipeline_nbytes(inputs_nbytes=5_000_000, vectors_nbytes=60_000_000)
    270000000
    """
    return N_ALIVE * inputs_nbytes + (N_WITH_VECTORS + 1) * vectors_nbytes


class LaneClosedError(Exception):
    """Control flow inside a recording: nothing more is wanted. Never leaves it."""


class Lane(Generic[T]):
    """Hands items from one thread to another, in order; a fixed number of them may wait.

    The threads share C queues only, which an interrupt cannot leave locked. A thread that asks for the next item must not hold
    the one before, whose place is free from then on.

    Args:
        n_places: How many items may wait.

    Attributes:
        get_wait_s: Seconds that the taking thread has waited for items.
        put_wait_s: Seconds that the giving thread has waited for a place.
        error: Why items have ended early.
    """

    def __init__(self, n_places: int) -> None:
        self.get_wait_s = self.put_wait_s = 0.0
        # None in these queues wakes a thread that waits; behind all items it is the end.
        self._items = SimpleQueue[T | None]()
        self._places = SimpleQueue[None]()
        for _ in range(n_places):
            self._places.put(None)
        self._is_closed = False
        self.error: BaseException | None = None

    def put(self, item: T) -> None:
        """Hand over an item; `LaneClosedError` if it is not wanted any more."""
        began_s = time.perf_counter()
        self._wait(self._places)
        self.put_wait_s += time.perf_counter() - began_s
        self._items.put(item)

    def finish(self, error: BaseException | None = None) -> None:
        """Say that no item follows, and which error is the reason; called by the giving thread."""
        self.error = error
        self._items.put(None)

    def get(self) -> T | None:
        """The next item; None behind the last one; `LaneClosedError` if the lane was closed."""
        began_s = time.perf_counter()
        item = self._wait(self._items)
        self.get_wait_s += time.perf_counter() - began_s
        if item is not None:
            self._places.put(None)
        return item

    def __iter__(self) -> Iterator[T]:
        """All items; `LaneClosedError` where an error has ended them: what takes them must not believe that this is all."""
        yield from iter(self.get, None)  # holds no item, unlike a loop
        if self.error is not None:
            raise LaneClosedError

    def close(self) -> None:
        """Wake both threads; from now on they get `LaneClosedError`. Any thread may call it, also twice."""
        self._is_closed = True
        self._items.put(None)
        self._places.put(None)

    def check(self) -> None:
        """`LaneClosedError` if the lane was closed: for work that takes long."""
        if self._is_closed:
            raise LaneClosedError

    def _wait(self, queue: SimpleQueue[S]) -> S:
        """The next of a queue."""
        while True:
            self.check()
            try:
                found = queue.get(timeout=_SLICE_S)
            except Empty:
                continue
            self.check()
            return found


class Pipeline(Generic[S, T]):
    """Reads, computes and writes batches, each step beside the others, in the order of the source.

    At most `N_ALIVE` batches are alive, `N_WITH_VECTORS` of them with what was computed. What was read before an error of the
    source or of the model is written; after an error of writing, or an interrupt, nothing more is.

    Args:
        batches: Makes the iterator of batches. It is made, run and closed in one thread.
        compute: Called in the thread that calls `run`.
        write: Takes what was computed, in another thread; it calls `Lane.check` now and then, and holds one item at a time.
    """

    def __init__(
        self, batches: Callable[[], Iterator[S]], compute: Callable[[S], T], write: Callable[[Lane[T]], object]
    ) -> None:
        self._read, self._computed = Lane[S](N_READ), Lane[T](N_COMPUTED)
        self._batches, self._compute, self._write = batches, compute, write
        self._failure: BaseException | None = None
        self._is_stopped = self._writing_begun = self._writing_ended = False
        self._ended = SimpleQueue[None]()
        self._reading = threading.Thread(target=self._read_all, name="saev-store-record-read", daemon=True)
        self._writing = threading.Thread(target=self._write_all, name="saev-store-record-write", daemon=True)

    @property
    def source_wait_s(self) -> float:
        """Seconds that the calling thread has waited for the source."""
        return self._read.get_wait_s

    @property
    def writer_wait_s(self) -> float:
        """Seconds that the calling thread has waited for `write`."""
        return self._computed.put_wait_s

    def run(self, after: Callable[[], object] = lambda: None) -> None:
        """Return when all is written. Once only.

        Args:
            after: Called in this thread after each batch.

        Raises:
            TransportError: the system gives no more threads.
            BaseException: what a step has raised, the earliest one in the order of the batches.
        """
        try:
            try:
                self._run(after)
            finally:
                self._stop()
        finally:
            self._stop()  # again: an interrupt may have come in the first one

    def _run(self, after: Callable[[], object]) -> None:
        for thread in (self._reading, self._writing):
            thread.start()
        error = None
        try:
            error = self._compute_all(after)
            self._computed.finish(error)
        except LaneClosedError:  # writing has ended: by an error, or because it wants no more
            pass
        began_s = time.perf_counter()
        while not self._writing_ended:
            self._await_writing()
        self._computed.put_wait_s += time.perf_counter() - began_s
        earliest = error if self._failure is None else self._failure
        if earliest is not None:
            raise earliest

    def _compute_all(self, after: Callable[[], object]) -> BaseException | None:
        """Compute until the source ends; gives the error of the source or of the model that ended it early."""
        while (batch := self._read.get()) is not None:
            try:
                computed = self._compute(batch)
            except Exception as error:
                return error
            self._computed.put(computed)
            after()
        return self._read.error

    def _read_all(self) -> None:
        """In the reading thread: hand over all batches."""
        error = None
        try:
            with closing_in_thread(self._batches()) as batches:
                for batch in batches:
                    self._read.put(batch)
        except LaneClosedError:
            return
        except BaseException as raised:
            error = raised
        self._read.finish(error)

    def _write_all(self) -> None:
        """In the writing thread: write all that is handed over."""
        self._writing_begun = True
        try:
            self._write(self._computed)
        except LaneClosedError:
            pass
        except BaseException as error:
            self._failure = error
        finally:
            # The calling thread may wait for either.
            self._read.close()
            self._computed.close()
            self._writing_ended = True
            self._ended.put(None)

    def _await_writing(self) -> None:
        """Wait a while for the end of writing. Not by `Thread.join`: a thread counts as ended when an interrupt ends that."""
        with suppress(Empty):
            self._ended.get(timeout=_SLICE_S)

    def _stop(self) -> None:
        """End both threads. The one that reads is left behind if the source keeps it; it ends when the source answers."""
        self._read.close()
        self._computed.close()
        if not self._is_stopped:
            self._is_stopped = True  # a second interrupt ends the wait for a disk that hangs
            while self._writing_begun and not self._writing_ended:  # the writer is closed next
                self._await_writing()
            if self._reading.is_alive():
                self._reading.join(_JOIN_S)


@contextmanager
def closing_in_thread(iterator: Iterator[S]) -> Generator[Iterator[S]]:
    """Close an iterator, if it can be closed, in the thread that runs it, also when an error keeps its frame alive."""
    try:
        yield iterator
    finally:
        close: object = getattr(iterator, "close", None)
        if callable(close):
            close()
