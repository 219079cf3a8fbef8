"""Memory of the batches to come: rows are put where they will be handed out, as soon as they have been read."""

from __future__ import annotations

import sys
import time
from collections import deque
from collections.abc import Callable
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from saev_store.layout import IntArray
from saev_store.loaders._dressing import Coordinates
from saev_store.loaders._memory import Outputs, allocate
from saev_store.loaders._reads import ReadTally
from saev_store.order._words import ranges
from saev_store.reader import FloatArray
from saev_store.transport import Buffer

#: Bytes that are kept of each row besides the row: where it comes from, and where it goes to.
TABLE_BYTES = 28


class Sources(NamedTuple):
    """Where the rows of all slots come from: positions on the axes."""

    example: npt.NDArray[np.int64]
    layer: npt.NDArray[np.int32]
    token: npt.NDArray[np.int32]


class BatchRing:
    """Slots of one batch each, in one piece of memory that is made once. Batches are lent to their consumer from it.

    A slot is free again when nobody refers to its batch any more (see `Outputs`). Besides the slots there is a row for each
    lane, and one for rows that nobody wants. Only one thread may call its methods, but for `put`.

    Args:
        outputs: Makes the memory, and that of batches for consumers who keep more than they are lent.
    """

    def __init__(self, outputs: Outputs) -> None:
        self._outputs = outputs
        self._batch_rows = self._n_slots = self._n_lent = self._next = 0
        self._rows: FloatArray = np.zeros((0, 0), dtype=np.float32)
        self._as_void: npt.NDArray[np.void] = np.zeros(0, dtype="V4")
        self._lent: list[tuple[int, np.ndarray]] = []
        self._n_idle = 0
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
        shape = ((n_slots + n_lent) * batch_rows + n_lanes + 1, d_model)
        if self._rows.shape != shape or self._batch_rows != batch_rows:
            self._lent.clear()
            # Give it back first: both at once might be too much.
            self._rows, self._as_void = np.zeros((0, 0), dtype=np.float32), np.zeros(0, dtype="V4")
            self._rows = self._outputs.make(shape)
            self._as_void = self._rows.view(f"V{4 * d_model}")[:, 0]
            n = shape[0]
            self.sources = Sources(np.zeros(n, np.int64), np.zeros(n, np.int32), np.zeros(n, np.int32))
        self._batch_rows, self._n_slots, self._n_lent, self._next = batch_rows, n_slots + n_lent, n_lent, first
        self._reclaim()
        taken = {slot for slot, _ in self._lent}
        # The first ones are used first, so that memory which is never needed is never touched.
        self._free = [slot for slot in reversed(range(self._n_slots)) if slot not in taken]
        self._slots = [0] * self._n_slots

    @property
    def unwanted(self) -> int:
        """The row for rows that nobody wants."""
        return len(self._rows) - 1

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
        self._rows[row] = self._rows[source]
        for column in self.sources:
            column[row] = column[source]

    def hand_out(self, batch: int, n_rows: int) -> tuple[FloatArray, Coordinates]:
        """A full batch and where it comes from; its memory belongs to whoever holds it. Every batch once, in order."""
        slot = self._slots[batch % self._n_slots]
        start = slot * self._batch_rows
        rows = self._rows[start : start + n_rows]
        where = Coordinates(*(column[start : start + n_rows].astype(np.int64) for column in self.sources))
        if len(self._lent) >= self._n_lent:
            self._reclaim()
        if len(self._lent) >= self._n_lent:
            act = self._outputs.get()[:n_rows]
            np.copyto(act, rows)
            self._free.append(slot)
            return act, where
        # An array of its own, so that references to this batch can be told from those to others.
        self._lent.append((slot, np.frombuffer(memoryview(rows).cast("B"), np.float32)))  # type: ignore[arg-type]  # an array is a buffer
        self._n_idle = sys.getrefcount(self._lent[-1][1])
        return self._lent[-1][1].reshape(rows.shape), where

    def _reclaim(self) -> None:
        """Take back what nobody refers to any more."""
        held: list[tuple[int, np.ndarray]] = []
        for number in range(len(self._lent)):
            if sys.getrefcount(self._lent[number][1]) > self._n_idle:
                held.append(self._lent[number])
            else:
                self._free.append(self._lent[number][0])
        self._lent = held

    def put(self, to: IntArray | npt.NDArray[np.int32], source: Buffer) -> None:
        """The rows in `source`, bytes, go to the rows `to`."""
        # As opaque items rows are copied whole, which takes three quarters of the time that numbers take.
        self._as_void[to] = np.frombuffer(source, self._as_void.dtype)


class Scattered:
    """Places of a window, of which each is a row of a batch to come; see `saev_store.loaders._memory.Target`.

    Args:
        ring: Where the batches are.
        n_rows: Places.
        d_model: Numbers of a row.
        tally: Where the time it takes is counted.
    """

    def __init__(self, ring: BatchRing, n_rows: int, d_model: int, tally: ReadTally) -> None:
        self._ring, self._d_model, self._tally = ring, d_model, tally
        #: The ring's row for each place.
        self.to: npt.NDArray[np.int32] = np.zeros(n_rows, dtype=np.int32)
        self._scratch: deque[FloatArray] = deque()

    def fill(self, place: IntArray, count: IntArray, read: Callable[[IntArray, FloatArray], None]) -> None:
        """Read into memory that is kept for that, as much as threads read at a time, and copy it from there."""
        n_rows = int(count.sum())
        try:
            scratch = self._scratch.pop()
        except IndexError:
            scratch = np.zeros((0, 0), np.float32)
        if len(scratch) < n_rows:
            scratch = allocate((n_rows, self._d_model))
        read(np.cumsum(count) - count, scratch)
        self._put(self.to[ranges(place, count)], memoryview(scratch[:n_rows]).cast("B"))  # type: ignore[arg-type]  # an array is a buffer
        self._scratch.append(scratch)

    def take(self, place: int, count: int, source: Buffer) -> None:
        """See `Takes`."""
        self._put(self.to[place : place + count], source)

    def _put(self, to: npt.NDArray[np.int32], source: Buffer) -> None:
        started = time.perf_counter()
        self._ring.put(to, source)
        self._tally.add_copy(time.perf_counter() - started)
