"""Memory of the batches to come: rows are put where they will be handed out, as soon as they have been read."""

from __future__ import annotations

import sys
import threading
from collections import deque
from collections.abc import Callable

import numpy as np
import numpy.typing as npt

from saev_store.layout import IntArray
from saev_store.loaders._dressing import Coordinates
from saev_store.loaders._memory import Outputs, allocate
from saev_store.order._words import ranges
from saev_store.reader import FloatArray
from saev_store.transport import Buffer


class BatchRing:
    """Slots of one batch each, in one piece of memory that is made once. Batches are lent to their consumer from it.

    A slot is free again when nobody refers to its batch any more (see `Outputs`). Besides the slots there is a row for each
    lane, and one for rows that nobody wants.

    Args:
        outputs: Memory for consumers who keep more batches than are lent.
    """

    def __init__(self, outputs: Outputs) -> None:
        self._outputs = outputs
        self._shape = (0, 0)
        self._n_slots = 0
        self._rows: FloatArray = np.zeros((0, 0), dtype=np.float32)
        # Batches that a consumer has, or had: (slot, array that owns the view he has).
        self._lent: list[tuple[int, np.ndarray]] = []
        self._n_idle = 0
        self._free: list[int] = []
        self._slots: IntArray = np.zeros(0, dtype=np.int64)
        self._first = 0

    def reserve(self, n_slots: int, n_lent: int, n_lanes: int, batch_rows: int, d_model: int, first: int) -> None:
        """Begin with the batch number `first`: forget all batches that have not been handed out.

        Args:
            n_slots: Batches that are filled at the same time at most.
            n_lent: Batches that consumers have besides, before they get copies.
            n_lanes: Rows besides.
            batch_rows: Rows of a batch.
            d_model: Numbers of a row.
            first: The first batch.
        """
        shape = ((n_slots + n_lent) * batch_rows + n_lanes + 1, d_model)
        if self._shape != shape or self._batch_rows != batch_rows:
            self._lent.clear()
            self._rows, self._shape = np.zeros((0, 0), dtype=np.float32), shape  # give it back first
            self._rows = self._outputs.make(shape)
            self._as_void: npt.NDArray[np.void] = self._rows.view(f"V{4 * d_model}")[:, 0]
        self._batch_rows, self._n_lent = batch_rows, n_lent
        self._n_slots = n_slots + n_lent
        self._reclaim()
        taken = {slot for slot, _ in self._lent}
        # The first ones are used first, so that memory which is never needed is never touched.
        self._free = [slot for slot in reversed(range(self._n_slots)) if slot not in taken]
        self._slots = np.zeros(self._n_slots, dtype=np.int64)
        self._first = self._next = first
        self.where = Coordinates(*np.zeros((3, shape[0]), dtype=np.int64))

    @property
    def unwanted(self) -> int:
        """The row for rows that nobody wants."""
        return self._shape[0] - 1

    def spare(self, lane: int) -> int:
        """The row of a lane."""
        return self._n_slots * self._batch_rows + lane

    def open(self, stop: int) -> bool:
        """Have slots for all batches before `stop`; False, and nothing done, where not enough are free."""
        if stop <= self._next:
            return True
        if stop - self._next > len(self._free):
            self._reclaim()
        if stop - self._next > len(self._free):
            return False
        while self._next < stop:
            self._slots[self._next % self._n_slots] = self._free.pop()
            self._next += 1
        return True

    def row(self, batch: int, row: int) -> int:
        """Where one row lies."""
        return int(self._slots[batch % self._n_slots]) * self._batch_rows + row

    def copy_row(self, source: int, row: int) -> None:
        """Make a row, and where it comes from, that of another one."""
        self._rows[row] = self._rows[source]
        for column in self.where:
            column[row] = column[source]

    def hand_out(self, batch: int, n_rows: int) -> tuple[FloatArray, Coordinates]:
        """A batch that is full, and where it comes from; its memory belongs to whoever holds it. Batches are handed out in order."""
        slot = int(self._slots[batch % self._n_slots])
        start = slot * self._batch_rows
        where = Coordinates(*(column[start : start + n_rows].copy() for column in self.where))
        if len(self._lent) >= self._n_lent:
            self._reclaim()
        if len(self._lent) >= self._n_lent:
            act = self._outputs.get()[:n_rows]
            np.copyto(act, self._rows[start : start + n_rows])
            self._free.append(slot)
            return act, where
        d_model = self._shape[1]
        owner = np.frombuffer(memoryview(self._rows[start : start + n_rows]).cast("B"), np.float32)
        self._lent.append((slot, owner))
        del owner
        self._n_idle = sys.getrefcount(self._lent[-1][1])
        return self._lent[-1][1].reshape(n_rows, d_model), where

    def _reclaim(self) -> None:
        """Take back what nobody refers to any more."""
        held: list[tuple[int, np.ndarray]] = []
        for number in range(len(self._lent)):
            if sys.getrefcount(self._lent[number][1]) > self._n_idle:
                held.append(self._lent[number])
            else:
                self._free.append(self._lent[number][0])
        self._lent = held

    def put(self, to: IntArray, source: Buffer) -> None:
        """Rows of `source`, bytes, go to the rows `to`."""
        self._as_void[to] = np.frombuffer(source, self._as_void.dtype)


class Scattered:
    """The rows of a window as places that vectors are read into, each in the batch that it will be handed out with.

    Args:
        ring: Where the batches are.
        n_rows: Places.
        n_scratch: Threads that read.
    """

    def __init__(self, ring: BatchRing, n_rows: int) -> None:
        self._ring = ring
        #: The ring's row for each place.
        self.to: IntArray = np.zeros(n_rows, dtype=np.int64)
        self._scratch: deque[FloatArray] = deque()

    def fill(self, place: IntArray, count: IntArray, read: Callable[[IntArray, FloatArray], None]) -> None:
        """See `Target`: read into memory that the thread has at hand, and copy from there while it is in its cache."""
        n_rows = int(count.sum())
        try:
            scratch = self._scratch.pop()
        except IndexError:
            scratch = np.zeros((0, 0), np.float32)
        if len(scratch) < n_rows:
            scratch = allocate((n_rows, self._ring._shape[1]))
        read(np.cumsum(count) - count, scratch)
        to = self.to[place[0] : place[0] + n_rows] if len(place) == 1 else self.to[ranges(place, count)]
        self._ring.put(to, memoryview(scratch[:n_rows]).cast("B"))
        self._scratch.append(scratch)

    def take(self, place: int, count: int, source: Buffer) -> None:
        """See `Takes`."""
        self._ring.put(self.to[place : place + count], source)
