"""The memory of batches to come on a device: rows go there as they are read, each to its place."""

from __future__ import annotations

from collections.abc import Callable
from typing import cast

import numpy as np
import torch

from saev_store.errors import ArgumentError
from saev_store.loaders import RowNumbers
from saev_store.store.reader import FloatArray
from saev_store.torch._device import Copies
from saev_store.transport import Buffer


class DeviceMemory:
    """The rows of a ring as a tensor on a device; see `saev_store.loaders.RingMemory`.

    What is begun on the device is done in the order of beginning, so a row is handed out after it has arrived, and filled anew
    after it was handed out, without waiting for the device. Batches are copies, which a device makes at the speed of its
    memory.

    Args:
        copies: How to get to the device.
    """

    def __init__(self, copies: Copies) -> None:
        self._copies = copies
        self._rows = torch.empty((0, 0))

    def reserve(self, n_rows: int, d_model: int) -> None:
        """See `RingMemory`."""
        self._rows = torch.empty((0, 0))  # give it back first: both at once might be too much
        try:
            with self._copies.queue():
                self._rows = torch.empty((n_rows, d_model), dtype=torch.float32, device=self._copies.device)
        except RuntimeError as error:
            problem = str(error)  # out of memory
        else:
            return
        raise ArgumentError(
            f"{self._copies.device} does not give {4 * n_rows * d_model:,} bytes: {problem}",
            where="window_bytes",
            remedy="Use a smaller window.",
        )

    def put(self, to: RowNumbers, source: Buffer) -> None:
        """See `RingMemory`. Of memory that is not pinned, all that is needed has been taken when this returns."""
        rows = np.frombuffer(source, np.float32).reshape(-1, self._rows.shape[1])
        rows = rows if rows.flags.writeable else rows.copy()  # a tensor cannot be made of memory that is read-only
        with self._copies.queue():
            index = torch.from_numpy(to.astype(np.int64)).to(self._rows.device, non_blocking=True)
            self._rows.index_copy_(0, index, torch.from_numpy(rows).to(self._rows.device, non_blocking=True))

    def copy_row(self, source: int, to: int) -> None:
        """See `RingMemory`."""
        with self._copies.queue():
            self._rows[to].copy_(self._rows[source])

    def lend(self, start: int, n_rows: int, release: Callable[[], object]) -> FloatArray:
        """See `RingMemory`: a copy, so that the rows may be filled anew at once."""
        act = self.copied(start, n_rows)
        release()
        return act

    def copied(self, start: int, n_rows: int) -> FloatArray:
        """See `RingMemory`."""
        with self._copies.queue():
            # What makes batches only asks for its length.
            return cast("FloatArray", self._rows[start : start + n_rows].clone())

    def scale(self, act: FloatArray, factor: float) -> None:
        """See `RingMemory`."""
        with self._copies.queue():
            cast("torch.Tensor", cast("object", act)).mul_(factor)
