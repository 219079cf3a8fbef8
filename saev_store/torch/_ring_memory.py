"""The memory of batches to come on a device: rows go there as they are read, each to its place."""

from __future__ import annotations

from typing import cast

import numpy as np
import torch

from saev_store.core.layout import IntArray
from saev_store.errors import ArgumentError
from saev_store.loaders import RowNumbers
from saev_store.store.reader import FloatArray
from saev_store.torch._device import Copies
from saev_store.torch.batch import tensor_of
from saev_store.transport import Buffer


class DeviceMemory:
    """The rows of a ring as a tensor on a device; see `saev_store.loaders.MakeMemory`.

    What is begun on the device is done in the order of beginning, so a row is handed out after it has arrived, and filled anew
    after it was handed out, without waiting for the device. Batches are copies, which a device makes at the speed of its
    memory.

    Args:
        n_rows: How many rows.
        d_model: Numbers of a row.
        copies: How to get to the device.

    Raises:
        ArgumentError: the device does not have that much memory.
    """

    lendable = None

    def __init__(self, n_rows: int, d_model: int, copies: Copies) -> None:
        self._copies = copies
        try:
            with copies.queue():
                self._rows = torch.empty((n_rows, d_model), dtype=torch.float32, device=copies.device)
        except RuntimeError as error:  # out of memory
            raise ArgumentError(
                f"{copies.device} does not give {4 * n_rows * d_model:,} bytes: {error}",
                where="window_bytes",
                remedy="Use a smaller window.",
            ) from None

    def put(self, to: RowNumbers, place: slice | IntArray, source: Buffer) -> None:
        """Copy the rows in `source`, bytes, to the rows `to[place]`. Of memory that is not pinned, all that is needed has been taken when this returns."""
        rows = np.frombuffer(source, np.float32).reshape(-1, self._rows.shape[1])
        rows = rows if rows.flags.writeable else rows.copy()  # a tensor cannot be made of memory that is read-only
        with self._copies.queue():
            index = tensor_of(to[place].astype(np.int64)).to(self._rows.device, non_blocking=True)
            self._rows.index_copy_(0, index, tensor_of(rows).to(self._rows.device, non_blocking=True))

    def copy_row(self, source: int, to: int) -> None:
        """Copy one row to another."""
        with self._copies.queue():
            self._rows[to].copy_(self._rows[source])

    def copied(self, start: int, n_rows: int) -> FloatArray:
        """Some rows as a batch: a tensor, of which what makes batches only asks for the length."""
        with self._copies.queue():
            return cast("FloatArray", self._rows[start : start + n_rows].clone())

    def scale(self, act: FloatArray, factor: float) -> None:
        """`act *= factor`."""
        with self._copies.queue():
            cast("torch.Tensor", cast("object", act)).mul_(factor)
