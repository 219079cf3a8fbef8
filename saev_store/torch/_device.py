"""Batches on their way to a device: copied while the one before is used, from memory that is not reused too early."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, nullcontext
from typing import Protocol

import numpy as np
import torch

from saev_store.errors import ArgumentError
from saev_store.loaders import Allocate
from saev_store.store.reader import FloatArray
from saev_store.torch.batch import ExampleBatch


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


class CudaCopies:
    """Copies on a side stream.

    Args:
        device: A CUDA device.
    """

    def __init__(self, device: torch.device) -> None:
        self.device = torch.device("cuda", torch.cuda.current_device() if device.index is None else device.index)  # pyright: ignore[reportUnnecessaryComparison]  # torch says int, but "cuda" has no index
        self._stream = torch.cuda.Stream(self.device)
        self._events: dict[int, torch.cuda.Event] = {}

    def queue(self) -> AbstractContextManager[object]:
        """The side stream."""
        return torch.cuda.stream(self._stream)

    def _event(self) -> torch.cuda.Event:
        event = torch.cuda.Event()
        event.record(self._stream)
        return event

    def start(self, batch: ExampleBatch) -> tuple[ExampleBatch, Callable[[], bool]]:
        """Begin to copy on the side stream."""
        with self.queue():
            moved = _moved(batch, self.device)
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
        return _moved(batch, self.device), lambda: True

    def ready(self, batch: ExampleBatch) -> None:
        """It is."""


def _moved(batch: ExampleBatch, device: torch.device) -> ExampleBatch:
    """What is there already, because rows are kept there, stays where it is."""
    return ExampleBatch(
        {
            name: value.to(device, non_blocking=True)
            if isinstance(value, torch.Tensor) and value.device != device
            else value
            for name, value in batch.items()
        }
    )


def copies_to(device: str) -> Copies | None:
    """How to get to a device; None for the CPU, where batches are already.

    Raises:
        ArgumentError: there is no such device here.
    """
    try:
        wanted = torch.device(device)
    except RuntimeError as error:
        raise ArgumentError(f"{device!r} is not a device: {error}", where="device") from error
    if wanted.type == "cpu":
        return None
    if wanted.type == "cuda":
        if not torch.cuda.is_available():
            raise ArgumentError(f"{device!r} was asked for, but PyTorch sees no GPU", where="device")
        return CudaCopies(wanted)
    return PlainCopies(wanted)


def pinned(device: str) -> Allocate | None:
    """Makes batch memory that a GPU copies from without waiting; None where that makes no difference."""
    if torch.device(device).type != "cuda":
        return None

    def make(shape: tuple[int, int]) -> FloatArray:
        found: np.ndarray = torch.empty(shape, dtype=torch.float32, pin_memory=True).numpy()
        return found

    return make


def moved(batches: Iterator[ExampleBatch], copies: Copies) -> Iterator[ExampleBatch]:
    """The batches on the device, each copied while the one before it is used.

    Memory that is being copied from is held until the copy is done, so it is not filled again too early.
    """
    under_way: deque[ExampleBatch] = deque()
    sources: deque[tuple[Callable[[], bool], ExampleBatch]] = deque()
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
