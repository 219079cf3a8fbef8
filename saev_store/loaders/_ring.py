"""Memory of batches: buffers that are used again, and the ring that rows are put into as soon as they have been read."""

from __future__ import annotations

import contextlib
import mmap
import weakref
from collections import deque
from collections.abc import Callable
from functools import partial
from typing import NamedTuple, Protocol

import numpy as np
import numpy.typing as npt

from saev_store.core.layout import IntArray
from saev_store.errors import ArgumentError
from saev_store.loaders._rows import Positions
from saev_store.store.reader import FloatArray
from saev_store.transport import Buffer

#: Makes memory: float32, C order, of the given shape, with undefined content.
Allocate = Callable[[tuple[int, int]], FloatArray]


def allocate(shape: tuple[int, int]) -> FloatArray:
    """Anonymous memory in huge pages where the system has them; given back when the last view goes.

    Raises:
        ArgumentError: the machine does not have that much.
    """
    nbytes = max(shape[0] * shape[1] * 4, 1)
    try:
        # Private: a forked child must not see, nor overwrite, what its parent loads.
        private = {"flags": mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS} if hasattr(mmap, "MAP_PRIVATE") else {}
        memory = mmap.mmap(-1, nbytes, **private)
    except (OSError, ValueError, OverflowError) as error:
        raise ArgumentError(
            f"{nbytes:,} bytes of memory are needed, which this machine does not give: {error}",
            where="window_bytes",
            remedy="Use a smaller window or batch.",
        ) from error
    if hasattr(mmap, "MADV_HUGEPAGE"):
        with contextlib.suppress(OSError):  # a kernel without transparent huge pages
            memory.madvise(mmap.MADV_HUGEPAGE)
    return np.frombuffer(memory, dtype=np.float32, count=shape[0] * shape[1]).reshape(shape)


def lent(memory: FloatArray, release: Callable[[], object]) -> FloatArray:
    """The same memory as a new array; `release` is called when the last reference to it, or to any view of it, is gone.

    NumPy's views and tensors made of them refer, through any number of views, to one array, because its own base is no array.
    That one is watched.

    Args:
        memory: C order.
        release: Called once, in any thread, possibly by the garbage collector while locks are held. So it must not take one:
            appending to a deque is what it may do.
    """
    if memory.size == 0:
        release()
        return np.empty(memory.shape, np.float32)
    base = np.frombuffer(memoryview(memory).cast("B"), np.float32)  # pyright: ignore[reportArgumentType]  # an array is a buffer
    weakref.finalize(base, release).atexit = False
    return base.reshape(memory.shape)


class BufferPool:
    """Buffers for batches. A batch belongs to its consumer as long as it, or any view of it, is referred to.

    Any thread may use it.

    Args:
        shape: Of one buffer.
        n_kept: How many buffers are used again; a consumer who keeps more batches gets memory that is not.
        make: Makes a buffer.
    """

    def __init__(self, shape: tuple[int, int], n_kept: int, make: Allocate = allocate) -> None:
        self.shape, self._make = shape, make
        # Those that are not made yet are None.
        self._idle: deque[FloatArray | None] = deque([None] * n_kept)

    def get(self) -> FloatArray:
        """A buffer that nothing refers to, with undefined content."""
        try:
            # The last one that came back is the most likely to be in the processor's cache.
            buffer = self._idle.pop()
        except IndexError:
            return self._make(self.shape)
        memory = buffer if buffer is not None else self._make(self.shape)
        return lent(memory, lambda: self._idle.append(memory))


#: Bytes that are kept of each row besides the row: where it comes from, and its place in the order.
TABLE_BYTES = 24

RowNumbers = npt.NDArray[np.int32] | IntArray


class RingMemory(Protocol):
    """The rows of a ring, wherever they are kept. Only `put` is called by several threads."""

    def reserve(self, n_rows: int, d_model: int) -> None:
        """Have so many rows, with undefined content."""
        ...

    def put(self, to: RowNumbers, source: Buffer) -> None:
        """Copy the rows in `source`, bytes, to the rows `to`."""
        ...

    def copy_row(self, source: int, to: int) -> None:
        """Copy one row to another."""
        ...

    def lend(self, start: int, n_rows: int, release: Callable[[], object]) -> FloatArray:
        """Some rows as a batch; `release` is called, in any thread, when they may be filled anew."""
        ...

    def copied(self, start: int, n_rows: int) -> FloatArray:
        """Some rows as a batch in memory of its own."""
        ...

    def scale(self, act: FloatArray, factor: float) -> None:
        """`act *= factor`."""
        ...


class HostMemory:
    """A ring in this machine's memory: made once, because the first touch of a page costs as much as filling it.

    Args:
        pool: Where batches are copied to, such as pinned memory; default: batches are lent from the ring itself.
    """

    def __init__(self, pool: BufferPool | None = None) -> None:
        self._pool = pool
        self._rows: FloatArray = np.zeros((0, 0), dtype=np.float32)
        self._as_void: npt.NDArray[np.void] = np.zeros(0, dtype="V4")

    def reserve(self, n_rows: int, d_model: int) -> None:
        """See `RingMemory`."""
        # Give it back first: both at once might be too much.
        self._rows, self._as_void = np.zeros((0, 0), dtype=np.float32), np.zeros(0, dtype="V4")
        self._rows = allocate((n_rows, d_model))
        # As opaque items rows are copied whole, which takes three quarters of the time that numbers take.
        self._as_void = self._rows.view(f"V{4 * d_model}")[:, 0]

    def put(self, to: RowNumbers, source: Buffer) -> None:
        """See `RingMemory`."""
        self._as_void[to] = np.frombuffer(source, self._as_void.dtype)

    def copy_row(self, source: int, to: int) -> None:
        """See `RingMemory`."""
        self._rows[to] = self._rows[source]

    def lend(self, start: int, n_rows: int, release: Callable[[], object]) -> FloatArray:
        """See `RingMemory`."""
        if self._pool is None:
            return lent(self._rows[start : start + n_rows], release)
        act = self.copied(start, n_rows)
        release()
        return act

    def copied(self, start: int, n_rows: int) -> FloatArray:
        """See `RingMemory`."""
        act = allocate((n_rows, self._rows.shape[1])) if self._pool is None else self._pool.get()[:n_rows]
        np.copyto(act, self._rows[start : start + n_rows])
        return act

    def scale(self, act: FloatArray, factor: float) -> None:
        """See `RingMemory`."""
        act *= np.float32(factor)


class Sources(NamedTuple):
    """Where the rows of all slots come from: positions on the axes."""

    example: npt.NDArray[np.int64]
    layer: npt.NDArray[np.int32]
    token: npt.NDArray[np.int32]


class BatchRing:
    """Slots of one batch each, in one piece of memory that is made once. Batches are lent to their consumer from it.

    A slot is free again when no reference to its batch is left. Besides the slots there is a row for each lane, and one for
    rows that are read but not wanted. Only one thread may call its methods.

    Args:
        memory: Where the rows are kept.
    """

    def __init__(self, memory: RingMemory) -> None:
        self.memory = memory
        self._shape = (0, 0, 0)
        self._batch_rows = self._n_slots = self._n_lent = self._next = 0
        self._lent: set[int] = set()
        self._returned: deque[int] = deque()
        self._free: list[int] = []
        self._slots: list[int] = []
        #: Of every row.
        self.sources = Sources(np.zeros(0, np.int64), np.zeros(0, np.int32), np.zeros(0, np.int32))

    def begin(self, first: int, *, n_slots: int, n_lent: int, n_lanes: int, batch_rows: int, d_model: int) -> None:
        """Begin with the batch number `first`: forget all batches that have not been handed out.

        Args:
            first: The first batch.
            n_slots: Batches that must find room at the same time.
            n_lent: Batches that consumers may have besides, before they get copies.
            n_lanes: Rows besides.
            batch_rows: Rows of a batch.
            d_model: Numbers of a row.
        """
        n_rows = (n_slots + n_lent) * batch_rows + n_lanes + 1
        if self._shape != (n_rows, batch_rows, d_model):
            self._shape = (0, 0, 0)
            self.memory.reserve(n_rows, d_model)
            self.sources = Sources(np.zeros(n_rows, np.int64), np.zeros(n_rows, np.int32), np.zeros(n_rows, np.int32))
            # What is lent of the memory before comes back to where it is not looked for.
            self._shape, self._lent, self._returned = (n_rows, batch_rows, d_model), set(), deque()
        self._batch_rows, self._n_slots, self._n_lent, self._next = batch_rows, n_slots + n_lent, n_lent, first
        self._reclaim()
        # The first ones are used first, so that memory which is never needed is never touched.
        self._free = [slot for slot in reversed(range(self._n_slots)) if slot not in self._lent]
        self._slots = [0] * self._n_slots

    @property
    def unwanted(self) -> int:
        """The row for rows that are not wanted."""
        return self._shape[0] - 1

    def spare(self, lane: int) -> int:
        """The row of a lane."""
        return self._n_slots * self._batch_rows + lane

    def open(self, stop: int) -> bool:
        """Have slots for all batches before `stop`; False, and nothing done, where not enough are free."""
        if stop - self._next > len(self._free):
            self._reclaim()
        if stop - self._next > len(self._free):
            return False
        while self._next < stop:
            self._slots[self._next % self._n_slots] = self._free.pop()
            self._next += 1
        return True

    def row(self, batch: int, row: int) -> int:
        """Where a row of a batch lies that has a slot."""
        return self._slots[batch % self._n_slots] * self._batch_rows + row

    def copy_row(self, source: int, row: int) -> None:
        """Make a row, and where it comes from, that of another one."""
        self.memory.copy_row(source, row)
        for column in self.sources:
            column[row] = column[source]

    def hand_out(self, batch: int, n_rows: int) -> tuple[FloatArray, Positions]:
        """A full batch and where it comes from; its memory belongs to its consumer. Every batch once, in order."""
        slot = self._slots[batch % self._n_slots]
        start = slot * self._batch_rows
        where = Positions(*(column[start : start + n_rows].astype(np.int64) for column in self.sources))
        if len(self._lent) >= self._n_lent:
            self._reclaim()
        if len(self._lent) >= self._n_lent:
            self._free.append(slot)
            return self.memory.copied(start, n_rows), where
        self._lent.add(slot)
        return self.memory.lend(start, n_rows, partial(self._returned.append, slot)), where

    def _reclaim(self) -> None:
        """Take back what is not referred to any more."""
        while self._returned:
            slot = self._returned.popleft()
            self._lent.discard(slot)
            self._free.append(slot)
