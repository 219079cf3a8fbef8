"""What `SharedLoader` is made of: batches that several threads use, what it needs of a loader, and how long it waits.

Batches are the same memory for all threads. Writes are counted for each of them, and the GPU streams of all see what they get.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Protocol

import torch

from saev_store.torch.batch import ExampleBatch

#: Waits are cut into slices of so many seconds.
_SLICE_S = 0.25


class Shareable(Protocol):
    """What is needed of a loader of `saev_store.torch`."""

    def __len__(self) -> int:
        """Batches of an epoch."""
        ...

    def __iter__(self) -> Iterator[ExampleBatch]:
        """An epoch's batches, from the place where the loader stands."""
        ...

    @property
    def place(self) -> tuple[int, int]:
        """Epoch and number of the batch that comes next."""
        ...

    def state_dict(self) -> dict[str, object]:
        """Where the loader stands."""
        ...

    def state_at(self, epoch: int, batch: int) -> dict[str, object]:
        """Its state in front of another batch."""
        ...

    def load_state_dict(self, state: Mapping[str, object]) -> None:
        """Continue where `state_dict` was taken."""
        ...

    def close(self) -> None:
        """End the current iteration and its threads."""
        ...


class Patience:
    """How long to wait for the same thing. Slices are counted: time in which the process was stopped does not."""

    def __init__(self, timeout_s: float) -> None:
        self._timeout_s = self._left_s = timeout_s
        self._seen: object = None

    def is_over(self, waited_for: Sequence[object]) -> bool:
        """Whether this was waited for too long; what is new, or nothing, starts anew."""
        if not waited_for or waited_for != self._seen:
            self._left_s, self._seen = self._timeout_s, waited_for
        return self._left_s <= 0

    def wait(self, changed: threading.Condition) -> None:
        """Wait a little."""
        started, slice_s = time.monotonic(), min(_SLICE_S, self._left_s)
        changed.wait(slice_s)
        self._left_s -= min(time.monotonic() - started, slice_s)


class SharedBatch:
    """A batch as several consumers get it: tensors of their own, the same memory. PyTorch has no tensors that are read-only.

    Made where the batch was made ready, in that thread.

    Args:
        batch: What is shared.
        names: Who gets it.
    """

    def __init__(self, batch: ExampleBatch, names: Iterable[str]) -> None:
        self._of = {name: _alias(batch) for name in names}
        self._there = _event(batch)

    def of(self, name: str) -> ExampleBatch:
        """The batch of one consumer, ready in its current stream; until it is forgotten."""
        batch = self._of[name]
        _see(batch, self._there)
        return batch

    def forget(self, name: str) -> None:
        """Keep nothing for a consumer."""
        self._of.pop(name, None)


def written(batch: ExampleBatch) -> str | None:
    """The name of a tensor that a consumer has written to since it got the batch.

    PyTorch counts writes by its own in-place functions, also through views, but not those of NumPy.
    """
    for name, value in batch.items():
        if isinstance(value, torch.Tensor) and value._version:  # noqa: SLF001  # torch has no public name for it
            return name
    return None


def _alias(batch: ExampleBatch) -> ExampleBatch:
    """The same memory in tensors whose writes are counted apart."""
    return ExampleBatch(
        {name: value.data if isinstance(value, torch.Tensor) else value for name, value in batch.items()}
    )


def _event(batch: ExampleBatch) -> torch.cuda.Event | None:
    """On a GPU: what comes after the batch in the current stream of this thread."""
    act = next(iter(batch.values()))
    if not isinstance(act, torch.Tensor) or not act.is_cuda:
        return None
    event = torch.cuda.Event()
    event.record(torch.cuda.current_stream(act.device))
    return event


def _see(batch: ExampleBatch, there: torch.cuda.Event | None) -> None:
    """On a GPU: let the current stream of this thread wait for the batch, and keep the memory until that stream is done with it."""
    if there is None:
        return
    for value in batch.values():
        if isinstance(value, torch.Tensor):
            stream = torch.cuda.current_stream(value.device)
            stream.wait_event(there)
            value.record_stream(stream)
