"""`Provider`: the epochs of a loader one after the other, as a trainer takes them."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from types import TracebackType
from typing import Generic, Protocol, Self, TypeVar, runtime_checkable

import torch

from saev_store.errors import ArgumentError, brief
from saev_store.store.selection import Selection
from saev_store.torch import ExampleBatch, StoreLoader

T = TypeVar("T")


@runtime_checkable
class TensorLoader(Protocol):
    """Loader of `saev_store.torch`, as a provider needs it."""

    def __iter__(self) -> Iterator[ExampleBatch]:
        """An epoch's batches."""
        ...

    def state_dict(self) -> dict[str, object]:
        """The place of the loader."""
        ...

    def load_state_dict(self, state: Mapping[str, object]) -> None:
        """Continue where `state_dict` was taken."""
        ...

    def close(self) -> None:
        """End the current iteration and its threads."""
        ...


def check_loader(loader: object) -> None:
    """Refuse anything but a loader of `saev_store.torch`.

    Raises:
        ArgumentError: it is something else.
    """
    if not isinstance(loader, TensorLoader):
        raise ArgumentError(f"loader is {brief(loader)}; it must be a loader of saev_store.torch", where="loader")


def rows_of_one_store(loader: StoreLoader) -> Selection:
    """Return the rows of a loader.

    Raises:
        ArgumentError: it is something else than a `StoreLoader`, or one of two stores.
    """
    check_loader(loader)
    rows = getattr(loader, "rows", None)  # callers may not check types
    if not isinstance(rows, Selection):
        raise ArgumentError(f"loader is {brief(loader)}; it must be a StoreLoader of one store", where="loader")
    return rows


class Provider(Iterator[T], Generic[T]):
    """Batches of a loader without end: when an epoch is over, the next one begins, in another order.

    The loader makes batches ahead of time in threads of its own, so nothing around it needs to prefetch. A batch belongs to the
    caller, who may change it.

    Args:
        loader: Of `saev_store.torch`. Nothing else iterates it.
        of: Turns a batch into what is handed out.

    Attributes:
        loader: The loader.

    Raises:
        ArgumentError: `loader` is not a loader of `saev_store.torch`.
    """

    def __init__(self, loader: TensorLoader, of: Callable[[ExampleBatch], T]) -> None:
        check_loader(loader)
        self.loader, self._of = loader, of
        self._batches: Iterator[ExampleBatch] | None = None

    def __iter__(self) -> Self:
        return self

    def __next__(self) -> T:
        """The next batch.

        Raises:
            ArgumentError: an epoch has no batch, or batches are not of the shape that is needed.
            CorruptShardError, TransportError: a shard could not be read; the next call tries the same batch again.
            DeadlineError: no batch within the loader's `batch_timeout_s`; the next call waits for the same batch.
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
        raise ArgumentError(
            "an epoch of the loader has no batch",
            where="loader",
            remedy="Choose more rows, a smaller batch_size, or drop_last=False.",
        )

    def _pause(self) -> None:
        """End the iteration; the next one begins behind the batch that was handed out last."""
        self._batches = None
        self.loader.load_state_dict(self.loader.state_dict())

    def state_dict(self) -> dict[str, object]:
        """Which batch comes next, the loader's: JSON, below 2 kB. Counts batches that were handed out, not those made ahead."""
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

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()


def rows_of(batch: ExampleBatch, name: str = "act", *, stacked: bool = False) -> torch.Tensor:
    """The vectors of a batch: (n, d_model), or (n, layers, d_model) where layers are stacked.

    Raises:
        ArgumentError: the loader's batches do not have them in this shape.
    """
    rows = batch.get(name)
    if not isinstance(rows, torch.Tensor):
        raise ArgumentError(
            f"the loader's batches have no {name}, but {list(batch)}",
            where="loader",
            remedy="Use a loader of one store." if name == "act" else "Use a loader of two stores.",
        )
    if rows.ndim != 2 + stacked:
        wanted = "(batch, layers, d_model)" if stacked else "(batch, d_model)"
        raise ArgumentError(
            f"{name} is {tuple(rows.shape)}; it must be {wanted}",
            where="loader",
            remedy=f"Make the loader with stack_layers={stacked}.",
        )
    return rows
