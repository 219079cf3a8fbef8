"""`Provider`: the epochs of a loader one after the other, as a trainer takes them."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from typing import Generic, Self, TypeVar

import torch

from saev_store.errors import ArgumentError, brief
from saev_store.store.selection import Selection
from saev_store.torch import Consumer, ExampleBatch, StoreLoader

T = TypeVar("T")


def rows_of_one_store(loader: StoreLoader) -> Selection:
    """Return the rows of a loader; one of two stores is refused."""
    rows = getattr(loader, "rows", None)  # callers may not check types
    if not isinstance(rows, Selection):
        raise ArgumentError(f"loader is {brief(loader)}; it must be a StoreLoader of one store", where="loader")
    return rows


class Provider(Iterator[T], Generic[T]):
    """Batches of a loader without end: when an epoch is over, the next one begins, in another order.

    The loader makes batches ahead of time in its own threads, so nothing around it needs to prefetch. A batch belongs to the
    caller, who may change it. Leaving its `with` block ends the loader's threads.

    Args:
        loader: A `StoreLoader`, or a consumer of its `share`. Nothing else iterates it.
        of: Turns a batch into what is handed out.

    Raises:
        ArgumentError: `loader` is something else.
    """

    def __init__(self, loader: StoreLoader | Consumer, of: Callable[[ExampleBatch], T]) -> None:
        if not isinstance(loader, StoreLoader | Consumer):  # pyright: ignore[reportUnnecessaryIsInstance]
            raise ArgumentError(f"loader is {brief(loader)}; it must be a loader of saev_store.torch", where="loader")
        self.loader, self._of = loader, of
        self._batches: Iterator[ExampleBatch] | None = None

    def __next__(self) -> T:
        """The next batch.

        Raises:
            ArgumentError: an epoch has no batch, or batches are not of the shape that is needed.
            CorruptShardError, TransportError, DeadlineError: a batch could not be read; the next call tries it again.
        """
        for _ in range(2):  # an epoch may be over
            if self._batches is None:
                self._batches = iter(self.loader)
            try:
                return self._of(next(self._batches))
            except StopIteration:
                self._batches = None
            except BaseException:
                self._pause()
                raise
        remedy = "Choose more rows, a smaller batch_size, or drop_last=False."
        raise ArgumentError("an epoch of the loader has no batch", where="loader", remedy=remedy)

    def _pause(self) -> None:
        """End the iteration; the next one begins behind the batch that was handed out last."""
        self._batches = None
        self.loader.load_state_dict(self.loader.state_dict())

    def state_dict(self) -> dict[str, object]:
        """Which batch comes next, as JSON below 2 kB. Counts batches that were handed out, not those made ahead."""
        return self.loader.state_dict()

    def load_state_dict(self, state: Mapping[str, object]) -> None:
        """Continue where `state_dict` was taken.

        Raises:
            ArgumentError: the state is of other rows, another batch size, seed or version; the message names it.
        """
        self.loader.load_state_dict(state)
        self._batches = None

    def close(self) -> None:
        """End the loader's threads and give back its memory. The next batch is the one that would have come."""
        if self._batches is not None:
            self._pause()
        self.loader.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def rows_of(batch: ExampleBatch, name: str = "act", *, stacked: bool = False) -> torch.Tensor:
    """The vectors of a batch: (n, d_model), or (n, layers, d_model) where layers are stacked; other batches are refused."""
    rows = batch.get(name)
    if not isinstance(rows, torch.Tensor):
        raise ArgumentError(f"the loader's batches have no {name}, but {list(batch)}", where="loader")
    if rows.ndim != 2 + stacked:
        wanted = "(batch, layers, d_model)" if stacked else "(batch, d_model)"
        raise ArgumentError(
            f"{name} is {tuple(rows.shape)}; it must be {wanted}",
            where="loader",
            remedy=f"Make the loader with stack_layers={stacked}.",
        )
    return rows
