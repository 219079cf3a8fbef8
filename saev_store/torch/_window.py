"""The window on a device: what is read goes there through a few staging buffers, and batches are gathered there."""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable
from typing import cast

import numpy as np
import torch

from saev_store.errors import ArgumentError
from saev_store.layout import IntArray
from saev_store.loaders._memory import Allocate, allocate
from saev_store.loaders._run import Machinery
from saev_store.reader import FloatArray
from saev_store.torch._device import Copies, Done


class Staging:
    """Buffers that are filled by one thread each and then copied to the device; used again once that copy is done.

    Args:
        n_buffers: More than there are threads, so that nobody waits for another thread, only for the device.
        make: Makes a buffer, such as pinned memory.
    """

    def __init__(self, n_buffers: int, make: Allocate) -> None:
        self._make = make
        self._lock = threading.Lock()
        self._idle: deque[tuple[FloatArray | None, Done | None]] = deque([(None, None)] * n_buffers)

    def get(self, n_rows: int, d_model: int) -> FloatArray:
        """A buffer of at least so many rows that nothing is copied from any more."""
        with self._lock:
            # One whose copy is done, else the one that has waited longest.
            for number, (_, done) in enumerate(self._idle):
                if done is None or done.query():
                    self._idle.rotate(-number)
                    break
            found, done = self._idle.popleft()
        if done is not None:
            done.wait()
        return found if found is not None and len(found) >= n_rows else self._make((n_rows, d_model))

    def put(self, buffer: FloatArray | None, done: Done | None) -> None:
        """Give a buffer back, with what tells when its copy is done."""
        with self._lock:
            self._idle.append((buffer, done))


class DeviceWindow:
    """A window whose rows are a tensor on a device; see `saev_store.loaders._memory.WindowMemory`.

    Copies to the device and gathers are begun in one queue, so a row is gathered after it has arrived, and filled anew
    after it was gathered, without anybody waiting for the device.

    Args:
        copies: How to get to the device.
        n_threads: Threads that fill.
        make_staging: Makes staging buffers; default: plain memory.
    """

    def __init__(self, copies: Copies, n_threads: int, make_staging: Allocate | None = None) -> None:
        self._copies = copies
        self._staging = Staging(n_threads + 4, make_staging or allocate)
        self._rows: torch.Tensor | None = None

    def reserve(self, n_rows: int, d_model: int) -> None:
        """See `WindowMemory`."""
        rows = self._rows
        if rows is None or rows.shape[1] != d_model or rows.shape[0] < n_rows:
            self._rows = rows = None  # give it back first: both at once might be too much
            try:
                with self._copies.queue():
                    self._rows = torch.empty((n_rows, d_model), dtype=torch.float32, device=self._copies.device)
            except RuntimeError as error:  # out of memory
                raise ArgumentError(
                    f"{self._copies.device} does not give {4 * n_rows * d_model:,} bytes: {error}",
                    where="window_bytes",
                    remedy="Use a smaller window.",
                ) from error

    @property
    def _window(self) -> torch.Tensor:
        if self._rows is None:  # pragma: no cover - reserved before anything else
            raise ArgumentError("no memory was reserved", where="window_device")
        return self._rows

    def fill(self, place: IntArray, count: IntArray, read: Callable[[IntArray, FloatArray], None]) -> None:
        """Read into a staging buffer, row after row, and begin to copy them to where they belong."""
        window = self._window
        n_rows = int(count.sum())
        first = np.cumsum(count) - count
        buffer = self._staging.get(n_rows, window.shape[1])
        try:
            read(first, buffer)
        except BaseException:
            self._staging.put(buffer, None)
            raise
        try:
            with self._copies.queue():
                source = torch.from_numpy(buffer[:n_rows])
                if len(place) == 1:
                    window[int(place[0]) : int(place[0]) + n_rows].copy_(source, non_blocking=True)
                else:
                    rows = np.repeat(place - first, count) + np.arange(n_rows)
                    there = source.to(window.device, non_blocking=True)
                    window.index_copy_(0, self._index(rows), there)
        finally:
            self._staging.put(buffer, self._copies.done())

    def _index(self, rows: IntArray) -> torch.Tensor:
        # From pageable memory: CUDA has taken what it needs of it when this returns.
        return torch.from_numpy(rows).to(self._window.device, non_blocking=True)

    def batch(self, n_rows: int) -> FloatArray:
        """A fresh tensor on the device."""
        with self._copies.queue():
            shape = (n_rows, self._window.shape[1])
            # The thread that makes batches does with it what it does with arrays: slices it, multiplies it, asks its length.
            return cast("FloatArray", torch.empty(shape, dtype=torch.float32, device=self._copies.device))

    def gather(self, row: IntArray, out: FloatArray, machinery: Machinery) -> None:
        """Begin to gather on the device."""
        del machinery
        with self._copies.queue():
            torch.index_select(self._window, 0, self._index(row), out=cast("torch.Tensor", out))

    def scale(self, act: FloatArray, factor: float) -> None:
        """Begin to multiply in place."""
        with self._copies.queue():
            cast("torch.Tensor", act).mul_(factor)
