"""Batches on their way to a device: each is copied while the one before is used."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Generator, Iterator
from contextlib import nullcontext
from typing import cast

import torch

from saev_store.errors import ArgumentError
from saev_store.loaders.reads import Bytes, allocate
from saev_store.torch.batch import ExampleBatch


class Copies:
    """Copies of batches to a device; on CUDA devices on a stream of its own.

    Args:
        device: Any device.
    """

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self._stream = torch.cuda.Stream(device) if device.type == "cuda" else None
        self._events: dict[int, torch.cuda.Event] = {}

    def start(self, batch: ExampleBatch) -> tuple[ExampleBatch, Callable[[], bool]]:
        """Begin to copy. Returns the batch on the device, and a function that returns True when the copy is done."""
        with nullcontext() if self._stream is None else torch.cuda.stream(self._stream):
            moved = ExampleBatch(
                {
                    name: value.to(self.device, non_blocking=value.is_pinned()) if isinstance(value, torch.Tensor) else value
                    for name, value in batch.items()
                }
            )  # fmt: skip
            if self._stream is None:
                return moved, lambda: True
            event = self._events[id(moved)] = torch.cuda.Event()
            event.record(self._stream)
        return moved, event.query

    def ready(self, batch: ExampleBatch) -> None:
        """Let the current stream wait for the copy, and keep the memory until that stream is done with it."""
        if self._stream is None:
            return
        current = torch.cuda.current_stream(self.device)
        current.wait_event(self._events.pop(id(batch)))
        for value in batch.values():
            if isinstance(value, torch.Tensor):
                value.record_stream(current)

    def wait(self) -> None:
        """Wait until all copies are done."""
        if self._stream is not None:
            self._stream.synchronize()


def copies_to(device: str) -> Copies | None:
    """Return how to copy to a device; None for the CPU.

    Raises:
        ArgumentError: there is no such device here.
    """
    try:
        there = torch.empty(1, device=torch.device(device)).device
    except (RuntimeError, TypeError, ValueError, AssertionError, ImportError) as error:  # NotImplementedError is one
        reason = str(error).partition("\n")[0]
        raise ArgumentError(f"{device!r} was asked for, but cannot be used here: {reason}", where="device") from error
    return None if there.type == "cpu" else Copies(there)


def memory_for(device: str) -> Callable[[int], Bytes]:
    """Return what makes the memory of pools: pinned for CUDA, so that batches cross the bus without a copy by the CPU."""
    return _pinned if torch.device(device).type == "cuda" else allocate


def _pinned(nbytes: int) -> Bytes:
    return cast("Bytes", torch.empty(nbytes, dtype=torch.uint8, pin_memory=True).numpy())


def moved(batches: Iterator[ExampleBatch], copies: Copies) -> Generator[ExampleBatch]:
    """Yield the batches on the device, each copied while the one before it is used.

    A batch is held until its copy is done, so that its pool is not filled again too early.
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
