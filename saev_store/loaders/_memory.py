"""Large memory: the window, and output buffers that are used again when nobody holds them any more."""

from __future__ import annotations

import contextlib
import mmap
import sys
from collections.abc import Callable
from itertools import pairwise
from typing import TYPE_CHECKING, Protocol, runtime_checkable

import numpy as np

from saev_store.errors import ArgumentError
from saev_store.layout import IntArray
from saev_store.loaders._workers import Group
from saev_store.reader import FloatArray
from saev_store.transport import Buffer

if TYPE_CHECKING:
    from saev_store.loaders._run import Machinery

#: Rows that one thread gathers at least; below that, handing over costs more than it brings.
_MIN_GATHER_ROWS = 2048

#: Makes the memory of one output buffer: float32, C order, of the given shape.
Allocate = Callable[[tuple[int, int]], FloatArray]


def allocate(shape: tuple[int, int]) -> FloatArray:
    """Anonymous memory in huge pages where the system has them; given back when the last view goes.

    Raises:
        ArgumentError: the machine does not have that much.
    """
    nbytes = max(shape[0] * shape[1] * 4, 1)
    try:
        # Private: a forked child must not see, nor overwrite, what its parent loads.
        memory = mmap.mmap(-1, nbytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
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


class Outputs:
    """Buffers for batches. A batch belongs to its consumer as long as he holds it, or any view of it.

    `get` hands out a buffer that nobody refers to any more, or makes one; NumPy views (and tensors made of them) hold a
    reference to the array that owns the memory, which is what is counted.

    Args:
        shape: Of one buffer.
        n_kept: How many buffers are kept for further use at most; a consumer who keeps more gets memory of his own.
        make: Makes a buffer.
    """

    def __init__(self, shape: tuple[int, int], n_kept: int, make: Allocate = allocate) -> None:
        self.shape, self.n_kept, self.make = shape, n_kept, make
        self._kept: list[FloatArray] = []
        self._owners: list[np.ndarray] = []
        self._idle: list[int] = []

    def get(self) -> FloatArray:
        """A buffer with undefined content; only one thread may call this."""
        for number, n_idle in enumerate(self._idle):
            if sys.getrefcount(self._owners[number]) <= n_idle:
                return self._kept[number][:]
        made = self.make(self.shape)
        if len(self._kept) == self.n_kept:
            return made
        self._kept.append(made)
        # A view of a view refers to the array at the bottom, so that is where references are counted.
        owner: np.ndarray = made
        while isinstance(owner.base, np.ndarray):
            owner = owner.base
        self._owners.append(owner)
        del made, owner
        self._idle.append(sys.getrefcount(self._owners[-1]))
        return self._kept[-1][:]


class Rows:
    """An array as the place that vectors are read into.

    Args:
        array: float32, C order, (n, d_model); borrowed.
    """

    def __init__(self, array: FloatArray) -> None:
        self.array = array

    def fill(self, place: IntArray, count: IntArray, read: Callable[[IntArray, FloatArray], None]) -> None:
        """See `Target`: here the buffer is the place itself."""
        del count
        read(place, self.array)


class Target(Protocol):
    """Rows that reading threads fill."""

    def fill(self, place: IntArray, count: IntArray, read: Callable[[IntArray, FloatArray], None]) -> None:
        """Fill the rows `place[i]` to `place[i] + count[i]` with what `read(place, buffer)` puts at such places of a buffer."""
        ...


@runtime_checkable
class Takes(Protocol):
    """Rows that are copied from wherever they arrived."""

    def take(self, place: int, count: int, source: Buffer) -> None:
        """Fill the rows `place` to `place + count` from their bytes."""
        ...


class WindowMemory(Target, Protocol):
    """The rows of a window, wherever they are kept: filled by reading threads, gathered from by one thread."""

    def reserve(self, n_rows: int, d_model: int) -> None:
        """Have so many rows, with undefined content."""
        ...

    def batch(self, n_rows: int) -> FloatArray:
        """Memory for the vectors of a batch; it belongs to whoever holds it."""
        ...

    def gather(self, row: IntArray, out: FloatArray, machinery: Machinery) -> None:
        """`out[i] = window[row[i]]`; afterwards these rows may be filled anew."""
        ...

    def scale(self, act: FloatArray, factor: float) -> None:
        """`act *= factor`."""
        ...


class HostWindow:
    """A window in this machine's memory: made once, because the first touch of a page costs as much as filling it.

    Args:
        outputs: Memory of batches.
    """

    def __init__(self, outputs: Outputs) -> None:
        self._outputs = outputs
        self._memory: FloatArray | None = None

    def reserve(self, n_rows: int, d_model: int) -> None:
        """See `WindowMemory`."""
        memory = self._memory
        if memory is None or memory.shape[1] != d_model or memory.shape[0] < n_rows:
            self._memory = None  # give it back first: both at once might be too much
            memory = allocate((n_rows, d_model))
        self._memory = memory

    @property
    def _rows(self) -> FloatArray:
        if self._memory is None:  # pragma: no cover - reserved before anything else
            raise ArgumentError("no memory was reserved", where="window")
        return self._memory

    def fill(self, place: IntArray, count: IntArray, read: Callable[[IntArray, FloatArray], None]) -> None:
        """See `Target`: rows are read straight to where they stay."""
        del count
        read(place, self._rows)

    def batch(self, n_rows: int) -> FloatArray:
        """See `WindowMemory`."""
        return self._outputs.get()[:n_rows]

    def gather(self, row: IntArray, out: FloatArray, machinery: Machinery) -> None:
        """By several threads where that pays."""
        rows, workers = self._rows, machinery.gatherers
        n_parts = min(workers.n_threads + 1 if workers else 1, len(row) // _MIN_GATHER_ROWS)
        if workers is None or n_parts < 2:
            # mode="clip" because take() would otherwise buffer its output; rows come out of our own tables.
            np.take(rows, row, axis=0, out=out, mode="clip")
            return
        bounds = [len(row) * part // n_parts for part in range(n_parts + 1)]
        group = Group(n_parts - 1)

        def part_of(lo: int, hi: int) -> None:
            np.take(rows, row[lo:hi], axis=0, out=out[lo:hi], mode="clip")

        for lo, hi in pairwise(bounds[1:]):
            workers.submit(lambda lo=lo, hi=hi: part_of(lo, hi), group, "the window")
        part_of(0, bounds[1])
        group.wait(machinery.stop)

    def scale(self, act: FloatArray, factor: float) -> None:
        """See `WindowMemory`."""
        act *= np.float32(factor)
