"""The memory of pools: lent out, and back when nothing refers to it."""

from __future__ import annotations

import weakref
from collections import deque
from collections.abc import Callable

import numpy as np
import numpy.typing as npt

from saev_store.errors import ArgumentError

Bytes = npt.NDArray[np.uint8]
#: Makes the memory of a pool, such as pinned memory, from its number of bytes.
Allocate = Callable[[int], Bytes]
#: At most so many pools exist at a time: the current one, the next one, and one that kept batches hold back.
MOST_POOLS = 3


def allocate(nbytes: int) -> Bytes:
    """Return plain memory. NumPy asks the system for huge pages; pages that are not touched cost nothing."""
    return np.empty(nbytes, np.uint8)


class PoolMemory:
    """Memory for up to three pools of one size.

    Args:
        nbytes: Bytes of a pool.
        make: Makes it.
    """

    def __init__(self, nbytes: int, make: Allocate = allocate) -> None:
        self.nbytes, self._make = nbytes, make
        self._n_made = 0
        self._idle: deque[Bytes] = deque()

    @property
    def n_lent(self) -> int:
        """Number of pools that something refers to."""
        return self._n_made - len(self._idle)

    def lend(self, most: int = MOST_POOLS) -> Bytes | None:
        """Return the memory of a pool; None if `most` pools exist and something refers to each.

        The memory is used again as soon as no array, tensor or memoryview of it is left.

        Raises:
            ArgumentError: the machine does not have that much memory.
        """
        if self._idle:
            memory = self._idle.popleft()
        elif self._n_made < most:
            try:
                memory = self._make(self.nbytes)
            except (MemoryError, RuntimeError) as error:  # torch raises RuntimeError for pinned memory
                raise ArgumentError(
                    f"a pool of {self.nbytes:,} bytes needs more memory than this machine gives",
                    where="window_bytes",
                    remedy="Use a smaller window_bytes.",
                ) from error
            self._n_made += 1
        else:
            return None
        lent = np.frombuffer(memory.data, np.uint8)
        # NumPy makes the memoryview below the array the base of each array that is derived from it, so all refer to this one.
        weakref.finalize(lent.base, self._idle.append, memory).atexit = False
        return lent
