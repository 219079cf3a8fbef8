"""Memory of batches, used again once no reference to it is left."""

from __future__ import annotations

import contextlib
import mmap
import weakref
from collections import deque
from collections.abc import Callable

import numpy as np

from saev_store.errors import ArgumentError
from saev_store.store.reader import FloatArray

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
