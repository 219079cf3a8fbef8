"""Batches on their way to a device: copied while the one before is used, or kept there, each row placed as it is read."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, nullcontext
from typing import Protocol, cast

import numpy as np
import torch

from saev_store.core.layout import IntArray
from saev_store.errors import ArgumentError
from saev_store.loaders import Allocate, RowNumbers
from saev_store.store.reader import NumberArray
from saev_store.torch.batch import ExampleBatch, tensor_of, torch_dtype
from saev_store.transport import Buffer


class Copies(Protocol):
    """How tensors get to a device; the one for CUDA uses a stream of its own, the one for tests does not."""

    @property
    def device(self) -> torch.device:
        """Where to."""
        ...

    def queue(self) -> AbstractContextManager[object]:
        """Inside, what is begun on the device is done in the order of beginning, from any thread."""
        ...

    def start(self, batch: ExampleBatch) -> tuple[ExampleBatch, Callable[[], bool]]:
        """Begin to copy: the batch on the device, and a question whether the copy is done."""
        ...

    def ready(self, batch: ExampleBatch) -> None:
        """What is begun on the device from now on sees the copy complete."""
        ...

    def sent(self, tensor: torch.Tensor) -> torch.Tensor:
        """The tensor on the device; its memory here may be used again when this returns, unless it is pinned."""
        ...

    def wait(self) -> None:
        """Until everything that was begun is done."""
        ...


class CudaCopies:
    """Copies on a side stream.

    Args:
        device: A CUDA device.
    """

    def __init__(self, device: torch.device) -> None:
        index = torch.cuda.current_device() if device.index is None else device.index  # pyright: ignore[reportUnnecessaryComparison]  # "cuda" has none
        self.device = torch.device("cuda", index)
        self._stream = torch.cuda.Stream(self.device)
        self._events: dict[int, torch.cuda.Event] = {}

    def queue(self) -> AbstractContextManager[object]:
        """The side stream."""
        return torch.cuda.stream(self._stream)

    def _event(self) -> torch.cuda.Event:
        """Marks what has been begun on the side stream."""
        event = torch.cuda.Event()
        event.record(self._stream)
        return event

    def start(self, batch: ExampleBatch) -> tuple[ExampleBatch, Callable[[], bool]]:
        """Begin to copy on the side stream."""
        with self.queue():
            moved = _moved(batch, self)
            event = self._event()
        self._events[id(moved)] = event
        return moved, event.query

    def ready(self, batch: ExampleBatch) -> None:
        """Let the current stream wait for the copy, and keep the memory until that stream is done with it."""
        current = torch.cuda.current_stream(self.device)
        current.wait_event(self._events.pop(id(batch)))
        for value in batch.values():
            if isinstance(value, torch.Tensor):
                value.record_stream(current)

    def sent(self, tensor: torch.Tensor) -> torch.Tensor:
        """Through pinned memory: out of other memory a copy begins when all before it are done, and the host waits for that."""
        return tensor.pin_memory().to(self.device, non_blocking=True)

    def wait(self) -> None:
        """For the side stream."""
        self._stream.synchronize()


class PlainCopies:
    """Copies at once: for devices without streams, and for testing everything around the copies without a GPU.

    Args:
        device: Any device.
    """

    def __init__(self, device: torch.device) -> None:
        self.device = device

    def queue(self) -> AbstractContextManager[object]:
        """Nothing is queued."""
        return nullcontext()

    def start(self, batch: ExampleBatch) -> tuple[ExampleBatch, Callable[[], bool]]:
        """Copy."""
        return _moved(batch, self), lambda: True

    def ready(self, batch: ExampleBatch) -> None:
        """It is."""

    def sent(self, tensor: torch.Tensor) -> torch.Tensor:
        """Copied."""
        return tensor.to(self.device)

    def wait(self) -> None:
        """Nothing is under way."""


def _moved(batch: ExampleBatch, copies: Copies) -> ExampleBatch:
    """What is there already, because rows are kept there, stays where it is."""
    return ExampleBatch(
        {
            name: copies.sent(value) if isinstance(value, torch.Tensor) and value.device != copies.device else value
            for name, value in batch.items()
        }
    )


def device_of(device: str, *, where: str) -> torch.device:
    """The device of a name.

    Raises:
        ArgumentError: it is the name of none; the error names the argument `where`.
    """
    try:
        return torch.device(device)
    except RuntimeError as error:
        raise ArgumentError(f"{device!r} is not a device: {error}", where=where) from error


def copies_to(device: str) -> Copies | None:
    """How to get to a device; None for the CPU, where batches are already.

    Raises:
        ArgumentError: there is no such device here.
    """
    wanted = device_of(device, where="device")
    if wanted.type == "cpu":
        return None
    if wanted.type == "cuda":
        if not torch.cuda.is_available():
            raise ArgumentError(f"{device!r} was asked for, but PyTorch sees no GPU", where="device")
        return CudaCopies(wanted)
    try:
        torch.empty(1, device=wanted)
    except (RuntimeError, TypeError, AssertionError, ImportError) as error:  # NotImplementedError is one
        reason = str(error).partition("\n")[0]
        raise ArgumentError(f"{device!r} was asked for, but cannot be used here: {reason}", where="device") from error
    return PlainCopies(wanted)


def pinned(device: str) -> Allocate | None:
    """Makes batch memory that a GPU copies from without waiting; None where that makes no difference."""
    if torch.device(device).type != "cuda":
        return None

    def make(shape: tuple[int, int], dtype: np.dtype[np.generic]) -> NumberArray:
        """Pinned memory."""
        nbytes = shape[0] * shape[1] * dtype.itemsize
        found: np.ndarray = torch.empty(nbytes, dtype=torch.uint8, pin_memory=True).numpy()
        return found.view(dtype).reshape(shape)

    return make


def moved(batches: Iterator[ExampleBatch], copies: Copies) -> Iterator[ExampleBatch]:
    """The batches on the device, each copied while the one before it is used.

    Memory that is being copied from is held until the copy is done, so it is not filled again too early, by the next epoch
    neither.
    """
    under_way: deque[ExampleBatch] = deque()
    sources: deque[tuple[Callable[[], bool], ExampleBatch]] = deque()
    try:
        for batch in batches:
            there, is_done = copies.start(batch)
            under_way.append(there)
            sources.append((is_done, batch))
            del there, batch
            while sources and sources[0][0]():
                sources.popleft()
            if len(under_way) > 1:
                copies.ready(under_way[0])
                yield under_way.popleft()
        while under_way:
            copies.ready(under_way[0])
            yield under_way.popleft()
    finally:
        copies.wait()


class DeviceMemory:
    """The rows of a ring as a tensor on a device; see `saev_store.loaders.MakeMemory`.

    What is begun on the device is done in the order of beginning, so a row is handed out after it has arrived, and filled anew
    after it was handed out, without waiting for the device. Batches are copies, which a device makes at the speed of its
    memory.

    Args:
        n_rows: How many rows.
        d_model: Numbers of a row.
        copies: How to get to the device.
        stored: The dtype of the rows, which go to the device, and are kept there, as they are stored.
        dtype: Of the batches.

    Raises:
        ArgumentError: the device does not have that much memory.
    """

    lendable = None

    def __init__(
        self, n_rows: int, d_model: int, copies: Copies, *, stored: np.dtype[np.generic], dtype: np.dtype[np.generic]
    ) -> None:
        self._copies, self._stored, self._dtype = copies, stored, torch_dtype(dtype)
        try:
            with copies.queue():
                self._rows = torch.empty((n_rows, d_model), dtype=torch_dtype(stored), device=copies.device)
        except RuntimeError as error:  # out of memory
            raise ArgumentError(
                f"{copies.device} does not give {stored.itemsize * n_rows * d_model:,} bytes: {error}",
                where="window_bytes",
                remedy="Use a smaller window.",
            ) from None

    def put(self, to: RowNumbers, place: slice | IntArray, source: Buffer) -> None:
        """Copy the rows in `source`, bytes, to the rows `to[place]`. All that is needed of it has been taken when this returns."""
        rows = np.frombuffer(source, self._stored).reshape(-1, self._rows.shape[1])
        rows = rows if rows.flags.writeable else rows.copy()  # a tensor cannot be made of memory that is read-only
        with self._copies.queue():
            index = self._copies.sent(tensor_of(to[place].astype(np.int64)))
            self._rows.index_copy_(0, index, self._copies.sent(tensor_of(rows)))

    def copy_row(self, source: int, to: int) -> None:
        """Copy one row to another."""
        with self._copies.queue():
            self._rows[to].copy_(self._rows[source])

    def copied(self, start: int, n_rows: int) -> NumberArray:
        """Some rows as a batch: a tensor, of which what makes batches only asks for the length."""
        with self._copies.queue():
            return cast("NumberArray", self._rows[start : start + n_rows].to(self._dtype, copy=True))

    def scale(self, act: NumberArray, factor: float) -> None:
        """`act *= factor`."""
        with self._copies.queue():
            cast("torch.Tensor", cast("object", act)).mul_(factor)
