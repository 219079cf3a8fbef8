"""Large memory: the window's pool, and output buffers that are used again when nobody holds them any more."""

from __future__ import annotations

import contextlib
import mmap
import sys
from collections.abc import Callable

import numpy as np

from saev_store.errors import ArgumentError
from saev_store.reader import FloatArray

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
        self.shape, self._n_kept, self._make = shape, n_kept, make
        self._kept: list[FloatArray] = []
        self._owners: list[np.ndarray] = []
        self._idle: list[int] = []

    def get(self) -> FloatArray:
        """A buffer with undefined content; only one thread may call this."""
        for number, n_idle in enumerate(self._idle):
            if sys.getrefcount(self._owners[number]) <= n_idle:
                return self._kept[number][:]
        made = self._make(self.shape)
        if len(self._kept) == self._n_kept:
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


class Pool:
    """The memory of a window: made once, because the first touch of a page costs as much as filling it."""

    def __init__(self) -> None:
        self._memory: FloatArray | None = None

    def get(self, shape: tuple[int, int]) -> FloatArray:
        """Memory of that shape with undefined content; the previous one must not be in use any more."""
        memory = self._memory
        if memory is None or memory.shape[1] != shape[1] or memory.shape[0] < shape[0]:
            self._memory = memory = None  # give it back first: both at once might be too much
            self._memory = memory = allocate(shape)
        return memory[: shape[0]]
