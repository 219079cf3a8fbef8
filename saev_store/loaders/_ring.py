"""Memory of batches: buffers that are used again, and the ring that rows are put into as soon as they have been read."""

from __future__ import annotations

import contextlib
import itertools
import mmap
import weakref
from collections import deque
from collections.abc import Callable
from functools import partial
from typing import Protocol

import numpy as np
import numpy.typing as npt

from saev_store.core.dtypes import FLOAT32, convert
from saev_store.core.layout import IntArray
from saev_store.errors import ArgumentError
from saev_store.store.reader import NumberArray
from saev_store.transport import Buffer

#: Makes memory: C order, of the given shape and dtype, with undefined content.
Allocate = Callable[[tuple[int, int], np.dtype[np.generic]], NumberArray]


def allocate(
    shape: tuple[int, int],
    dtype: np.dtype[np.generic] = FLOAT32,
    *,
    where: str = "window_bytes, batch_size, prefetch_batches",
    remedy: str = "Use a smaller window, or smaller or fewer batches.",
) -> NumberArray:
    """Anonymous memory in huge pages where the system has them; given back when the last view goes.

    Args:
        shape: Rows and numbers of each.
        dtype: Of a number.
        where: The options that ask for it, for the error.
        remedy: What to do about it.

    Raises:
        ArgumentError: the machine does not have that much.
    """
    nbytes = max(shape[0] * shape[1] * dtype.itemsize, 1)
    try:
        # Private: a forked child must not see, nor overwrite, what its parent loads.
        private = {"flags": mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS} if hasattr(mmap, "MAP_PRIVATE") else {}
        memory = mmap.mmap(-1, nbytes, **private)
    except (OSError, ValueError, OverflowError) as error:
        raise ArgumentError(
            f"{nbytes:,} bytes of memory are needed, which this machine does not give: {error}",
            where=where,
            remedy=remedy,
        ) from error
    if hasattr(mmap, "MADV_HUGEPAGE"):
        with contextlib.suppress(OSError):  # a kernel without transparent huge pages
            memory.madvise(mmap.MADV_HUGEPAGE)
    return np.frombuffer(memory, dtype=dtype, count=shape[0] * shape[1]).reshape(shape)


def lent(memory: NumberArray, release: Callable[[], object]) -> NumberArray:
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
        return np.empty(memory.shape, memory.dtype)
    base = np.frombuffer(memory.view(np.uint8).data.cast("B"), memory.dtype)  # pyright: ignore[reportArgumentType]  # an array is a buffer
    weakref.finalize(base, release).atexit = False
    return base.reshape(memory.shape)


class BufferPool:
    """Buffers for batches. A batch belongs to its consumer as long as it, or any view of it, is referred to.

    Any thread may use it.

    Args:
        shape: Of one buffer.
        n_kept: How many buffers are used again; a consumer who keeps more batches gets memory that is not.
        make: Makes a buffer.
        dtype: Of one buffer.
    """

    def __init__(
        self,
        shape: tuple[int, int],
        n_kept: int,
        make: Allocate = allocate,
        dtype: np.dtype[np.generic] = FLOAT32,
    ) -> None:
        self.shape, self.dtype, self._make = shape, dtype, make
        self._n_kept, self._numbers = n_kept, itertools.count()
        self._idle: deque[NumberArray] = deque()

    def get(self) -> NumberArray:
        """A buffer that nothing refers to, with undefined content."""
        try:
            # The last one that came back is the most likely to be in the processor's cache.
            memory = self._idle.pop()
        except IndexError:
            number = next(self._numbers)  # one step, whatever other threads do
            memory = self._make(self.shape, self.dtype)
            if number >= self._n_kept:
                return memory
        return lent(memory, lambda: self._idle.append(memory))


#: Bytes that are kept of each row besides the row: where it comes from, and its place in the order.
TABLE_BYTES = 24

RowNumbers = npt.NDArray[np.int32] | IntArray


class RingMemory(Protocol):
    """The rows of a ring, wherever they are kept. Only `put` is called by several threads."""

    @property
    def lendable(self) -> NumberArray | None:
        """The rows themselves, (n_rows, d_model), where batches may be views of them; None where they are copied."""
        ...

    def put(self, to: RowNumbers, place: slice | IntArray, source: Buffer) -> None:
        """Copy the rows in `source`, bytes, to the rows `to[place]`."""
        ...

    def copy_row(self, source: int, to: int) -> None:
        """Copy one row to another."""
        ...

    def copied(self, start: int, n_rows: int) -> NumberArray:
        """Some rows as a batch in memory of its own."""
        ...

    def scale(self, act: NumberArray, factor: float) -> None:
        """`act *= factor`."""
        ...


def multiply(act: NumberArray, factor: float) -> None:
    """`act *= factor`, of 16 bits computed in float32 and rounded once. NumPy itself rounds a factor for float16 to float16.

    >>> act = np.array([1000.0], np.float16)
    >>> multiply(act, 1.0003)  # between two numbers of float16, 1 and 1.001
    >>> act.tolist()
    [1000.5]
    """
    np.multiply(act, np.promote_types(act.dtype, FLOAT32).type(factor), out=act, casting="unsafe")


#: Makes the memory of so many rows of `d_model` numbers, with undefined content.
MakeMemory = Callable[[int, int], RingMemory]


class HostMemory:
    """A ring in this machine's memory: made once, because the first touch of a page costs as much as filling it.

    Args:
        n_rows: How many rows.
        d_model: Numbers of a row.
        stored: The dtype of the rows, which are kept as they are stored.
        dtype: Of the batches.
        pool: Where batches are copied to, such as pinned memory; default: batches of the stored dtype are lent from the ring
            itself.

    Attributes:
        lendable: See `RingMemory`.
    """

    def __init__(
        self,
        n_rows: int,
        d_model: int,
        pool: BufferPool | None = None,
        *,
        stored: np.dtype[np.generic] = FLOAT32,
        dtype: np.dtype[np.generic] = FLOAT32,
    ) -> None:
        self._rows, self._dtype, self._pool = allocate((n_rows, d_model), stored), dtype, pool
        self.lendable = self._rows if pool is None and stored == dtype else None
        # As opaque items rows are copied whole, which takes three quarters of the time that numbers take.
        self._as_void: npt.NDArray[np.void] = self._rows.view(f"V{stored.itemsize * d_model}")[:, 0]

    def put(self, to: RowNumbers, place: slice | IntArray, source: Buffer) -> None:
        """See `RingMemory`."""
        self._as_void[to[place]] = np.frombuffer(source, self._as_void.dtype)

    def copy_row(self, source: int, to: int) -> None:
        """See `RingMemory`."""
        self._rows[to] = self._rows[source]

    def copied(self, start: int, n_rows: int) -> NumberArray:
        """See `RingMemory`."""
        shape = (n_rows, self._rows.shape[1])
        act = allocate(shape, self._dtype) if self._pool is None else self._pool.get()[:n_rows]
        convert(self._rows[start : start + n_rows], act)
        return act

    def scale(self, act: NumberArray, factor: float) -> None:
        """See `RingMemory`."""
        multiply(act, factor)


class BatchRing:
    """Slots of one batch each, in one piece of memory that is made once. Batches are lent to their consumer from it.

    A slot is free again when no reference to its batch is left. Behind the slots there is a row for each lane, and one for
    rows that are read but not wanted. Only one thread may call its methods.

    Args:
        make: Makes the memory.
        n_slots: Batches that must find room at the same time.
        n_lent: Batches that consumers may have besides, before they get copies.
        n_lanes: Rows besides.
        batch_rows: Rows of a batch.
        d_model: Numbers of a vector.
        vectors_per_row: Vectors of a row, which lie together.

    Attributes:
        memory: Where the vectors of the rows are kept.
        first_row: The first row of each batch that has a slot, by number of the batch.
        spare: The first of the lanes' rows.
        unwanted: The row for rows that are not wanted.
        example, layer, token: Of every row, where it comes from: positions on the axes.
    """

    def __init__(
        self,
        make: MakeMemory,
        *,
        n_slots: int,
        n_lent: int,
        n_lanes: int,
        batch_rows: int,
        d_model: int,
        vectors_per_row: int = 1,
    ) -> None:
        self._n_vectors = vectors_per_row
        self.n_slots, self.n_lanes, self._n_lent, self._batch_rows = n_slots, n_lanes, n_lent, batch_rows
        self.spare = (n_slots + n_lent) * batch_rows
        self.unwanted = self.spare + n_lanes
        self.memory = make((self.unwanted + 1) * vectors_per_row, d_model)
        self.example = np.zeros(self.unwanted + 1, np.int64)
        self.layer = np.zeros(self.unwanted + 1, np.int32)
        self.token = np.zeros(self.unwanted + 1, np.int32)
        self.first_row: dict[int, int] = {}
        self._next = 0
        self._lent: set[int] = set()
        self._returned: deque[int] = deque()
        self._free: list[int] = []

    def begin(self, first: int) -> None:
        """Begin with the batch number `first`: drop all batches that have not been handed out."""
        self._next = first
        self.first_row.clear()
        self._reclaim()
        # The first slots are used first, so that memory which is never needed is never touched.
        self._free = [slot for slot in reversed(range(self.n_slots + self._n_lent)) if slot not in self._lent]

    def open(self, stop: int) -> bool:
        """Have slots for all batches before `stop`; False, and nothing done, where not enough are free."""
        if stop - self._next > len(self._free):
            self._reclaim()
        if stop - self._next > len(self._free):
            return False
        while self._next < stop:
            self.first_row[self._next] = self._free.pop() * self._batch_rows
            self._next += 1
        return True

    def copy_row(self, source: int, row: int) -> None:
        """Make a row, and where it comes from, that of another one."""
        for nth in range(self._n_vectors):
            self.memory.copy_row(source * self._n_vectors + nth, row * self._n_vectors + nth)
        for column in (self.example, self.layer, self.token):
            column[row] = column[source]

    def hand_out(self, batch: int, n_rows: int) -> NumberArray:
        """The vectors of a full batch, whose memory belongs to its consumer. Every batch once, in order."""
        start = self.first_row.pop(batch)
        slot = start // self._batch_rows
        if len(self._lent) >= self._n_lent:
            self._reclaim()
        vectors, n = self.memory.lendable, self._n_vectors
        if vectors is None or len(self._lent) >= self._n_lent:
            self._free.append(slot)
            return self.memory.copied(start * n, n_rows * n)
        self._lent.add(slot)
        return lent(vectors[start * n : (start + n_rows) * n], partial(self._returned.append, slot))

    def _reclaim(self) -> None:
        """Take back what is not referred to any more."""
        while self._returned:
            slot = self._returned.popleft()
            self._lent.discard(slot)
            self._free.append(slot)
