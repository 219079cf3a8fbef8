"""A consumer of a `SharedLoader`: one of several training loops, each in a thread of its own."""

from __future__ import annotations

import threading
from collections.abc import Iterator, Mapping
from types import TracebackType
from typing import TYPE_CHECKING, Self

from saev_store.torch.batch import ExampleBatch

if TYPE_CHECKING:
    from saev_store.torch.share import SharedLoader


class Consumer:
    """One of the loops that share a loader: iterate it once per epoch, as a loader, in a thread of its own.

    Batches have the order, the values and the state of the loader. Their tensors are the same memory for all consumers: they must not be
    written to. A consumer is a context manager, and so says at once when its loop has failed.

    Attributes:
        name: What errors call it.
    """

    def __init__(self, shared: SharedLoader, name: str, number: int) -> None:
        self.name = name
        self._shared = shared
        #: The batch that comes next, counted through all epochs.
        self.number = number
        #: Whether it has asked for a batch, and whether it has got one.
        self.has_begun = self.has_taken = False
        self.is_between_epochs = True
        #: The thread that asked last.
        self.thread: threading.Thread | None = None
        #: Its latest batch.
        self.held: ExampleBatch | None = None

    def __len__(self) -> int:
        """Batches of an epoch."""
        return self._shared.n_batches

    @property
    def epoch(self) -> int:
        """The epoch of the batch that comes next."""
        return self.number // max(self._shared.n_batches, 1)

    def __iter__(self) -> Iterator[ExampleBatch]:
        """The epoch's batches; after `load_state_dict`, those that had not been handed out.

        Raises (from the iterator):
            CorruptShardError, TransportError, DeadlineError: a shard could not be read; every consumer is told. The next iteration
                tries the same batch again.
            ArgumentError: a consumer has written into a batch, or the loader is shared no more; the message names the consumer.
            SaevStoreError: this consumer was dropped before; the message says why.
        """
        return _ConsumerBatches(self._shared, self)

    def state_dict(self) -> dict[str, object]:
        """Which batch comes next: a state of the loader, with which this consumer, or a loader of its own, goes on."""
        return self._shared.state_of(self)

    def load_state_dict(self, state: Mapping[str, object]) -> None:
        """Continue where `state_dict` was taken. Other consumers may be at other batches: reading begins with the earliest.

        Raises:
            ArgumentError: the state is of other rows, another batch size, seed or version, or of another order than the state of
                another consumer; or reading has begun, and it is not in front of the consumer's next batch.
        """
        self._shared.move(self, state)

    def close(self) -> None:
        """Take no more batches: nobody waits for this consumer any more."""
        self._shared.leave(self)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._shared.leave(self, error)

    def __repr__(self) -> str:
        return f"<Consumer {self.name!r}>"


class _ConsumerBatches(Iterator[ExampleBatch]):
    """An epoch of a consumer."""

    def __init__(self, shared: SharedLoader, consumer: Consumer) -> None:
        self._shared, self._consumer = shared, consumer
        #: The number of the first batch of the next epoch.
        self._end: int | None = None

    def __iter__(self) -> _ConsumerBatches:
        return self

    def __next__(self) -> ExampleBatch:
        shared, consumer = self._shared, self._consumer
        if self._end is None:
            self._end = (consumer.epoch + 1) * shared.n_batches
        if consumer.number >= self._end:
            shared.end_epoch(consumer)
            raise StopIteration
        return shared.take(consumer)
