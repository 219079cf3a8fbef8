"""One read, several training loops in threads of one process, the same memory."""

from __future__ import annotations

import json
import threading
import time
from collections.abc import Iterator, Mapping
from types import TracebackType
from typing import TYPE_CHECKING, Self

import torch

from saev_store.core.arguments import check_count, check_number
from saev_store.errors import ArgumentError, DeadlineError
from saev_store.torch.batch import ExampleBatch

if TYPE_CHECKING:
    from saev_store.torch.loader import StoreLoader

#: Seconds between two looks at how long others have taken no batch.
_SLICE_S = 0.25


class Consumer:
    """One of the loops that share a loader: iterate it once for each epoch, as a loader, in a thread of its own.

    Batches have the order, the values and the state of the loader. Their tensors are the same memory for all consumers: they must not be
    written to. Use it as a context manager, so that the others do not wait for it when its loop has ended or failed.
    """

    def __init__(self, shared: SharedLoader, number: int) -> None:
        self._shared = shared
        #: The batch that comes next, counted through all epochs.
        self.number = number
        #: Whether it has asked for a batch, and when it took one last.
        self.has_asked, self.moved_s = False, 0.0
        self.error: DeadlineError | None = None

    def __len__(self) -> int:
        """Number of batches of an epoch."""
        return self._shared.n_batches

    @property
    def epoch(self) -> int:
        """The epoch of the batch that comes next."""
        return self.number // max(self._shared.n_batches, 1)

    def __iter__(self) -> Iterator[ExampleBatch]:
        """Yield the batches of the epoch; after `load_state_dict`, those that had not been handed out.

        Raises (from the iterator):
            CorruptShardError, TransportError, DeadlineError: a shard could not be read; every consumer gets the error. The next iteration
                tries the same batch again.
            DeadlineError: the others have continued without this consumer.
            ArgumentError: sharing has ended.
        """
        end = (self.epoch + 1) * self._shared.n_batches
        while self.number < end:
            yield self._shared.take(self)

    def state_dict(self) -> dict[str, object]:
        """Return the state of the loader in front of this consumer's next batch."""
        return self._shared.loader.state_at(*divmod(self.number, max(len(self), 1)))

    def load_state_dict(self, state: Mapping[str, object]) -> None:
        """Continue where `state_dict` was called. Other consumers may be at other batches: reading begins with the earliest.

        Raises:
            ArgumentError: the state is of another loader, or of another order than the state of another consumer; or reading has begun.
        """
        self._shared.move(self, state)

    def close(self) -> None:
        """Take no more batches: the others do not wait for this consumer any more."""
        self._shared.leave(self)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()


class SharedLoader:
    """A loader whose batches go to several consumers; made by `loader.share`. A context manager, and a sequence of consumers.

    Each batch is read once, by the consumer that first needs it, and is kept until all have taken it. No consumer is more than `max_ahead`
    batches in front of the slowest. Reading begins when every consumer has asked for its first batch. A consumer that takes no batch
    for `timeout_s` while others wait for it is left behind: they continue, and it gets an error if it asks again.

    Args:
        loader: Nothing else iterates it.
        n: How many consumers.
        max_ahead: Batches that are kept for consumers that are behind.
        timeout_s: Seconds for which the others wait for a consumer.

    Raises:
        ArgumentError: a number is out of range.

    Attributes:
        consumers: One for each loop.
        loader: What is shared.
    """

    def __init__(self, loader: StoreLoader, n: int, *, max_ahead: int, timeout_s: float) -> None:
        self.loader = loader
        self._max_ahead = check_count(max_ahead, name="max_ahead")
        self._timeout_s = check_number(timeout_s, name="timeout_s")
        self.n_batches = len(loader)
        epoch, batch = loader.place
        self._end = epoch * self.n_batches + batch
        self.consumers = tuple(Consumer(self, self._end) for _ in range(check_count(n, name="n")))
        #: Guards all that follows; notified when a batch comes, a consumer moves or leaves, or sharing ends.
        self._changed = threading.Condition(threading.RLock())
        self._live = list(self.consumers)
        #: Batches by their numbers, and the event on a GPU after which each is there.
        self._window: dict[int, tuple[ExampleBatch, torch.cuda.Event | None]] = {}
        self._batches: Iterator[ExampleBatch] | None = None
        self._has_begun = self._is_placed = self._is_reading = self._is_closed = False

    def __len__(self) -> int:
        """Number of consumers."""
        return len(self.consumers)

    def __getitem__(self, number: int) -> Consumer:
        return self.consumers[number]

    def __iter__(self) -> Iterator[Consumer]:
        return iter(self.consumers)

    # -- consumers: called in their threads ----------------------------------------------------------------------------

    def take(self, consumer: Consumer) -> ExampleBatch:
        """Return the consumer's next batch; read it if this consumer is the first that needs it."""
        with self._changed:
            if not any(other.has_asked for other in self.consumers):
                for other in self.consumers:
                    other.moved_s = time.monotonic()
            consumer.has_asked = True
            while True:
                if consumer.error is not None:
                    raise consumer.error
                if self._is_closed or consumer not in self._live:
                    raise ArgumentError("sharing has ended", where="share", remedy="Share the loader again.")
                waited_for = [other for other in self._live if not other.has_asked]
                if not waited_for and not self._has_begun:
                    self._start()
                if self._has_begun and consumer.number < self._end:
                    return self._hand_out(consumer)
                if self._has_begun and len(self._window) >= self._max_ahead:
                    waited_for = [other for other in self._live if other.number == min(self._window)]
                if not waited_for and not self._is_reading:
                    self._read()
                    continue
                for other in waited_for:
                    if time.monotonic() - other.moved_s > self._timeout_s:
                        text = f"this consumer kept others waiting for {self._timeout_s:g} s"
                        remedy = "Allow more timeout_s, or close() a consumer that takes no more batches."
                        other.error = DeadlineError(text, where="share", remedy=remedy)
                        self.leave(other)
                self._changed.wait(min(_SLICE_S, self._timeout_s))

    def move(self, consumer: Consumer, state: Mapping[str, object]) -> None:
        """Let a consumer continue from a state."""
        with self._changed:
            # A provider that pauses loads its own state.
            if json.dumps(state, default=repr) == json.dumps(consumer.state_dict()):
                self._is_placed = True
                return
            if self._has_begun:
                raise ArgumentError(
                    "the state is of another batch than the consumer's next one, and reading has begun",
                    where="load_state_dict",
                    remedy="Load the states of all consumers before they take batches.",
                )
            order, before = self.loader.state_at(0, 0), self.loader.state_dict()
            self.loader.load_state_dict(state)
            if self._is_placed and self.loader.state_at(0, 0) != order:
                self.loader.load_state_dict(before)
                raise ArgumentError(
                    "the state has another order than the state of another consumer", where="load_state_dict"
                )
            epoch, batch = self.loader.place
            consumer.number, self._is_placed = epoch * self.n_batches + batch, True

    def leave(self, consumer: Consumer) -> None:
        """Do not wait for a consumer any more."""
        with self._changed:
            if consumer in self._live:
                self._live.remove(consumer)
                self._forget()
                if not self._live:
                    self.close()
                self._changed.notify_all()

    # -- with the condition held ---------------------------------------------------------------------------------------

    def _start(self) -> None:
        """Begin to read with the earliest batch that a consumer needs."""
        self._end = min(other.number for other in self._live)
        self.loader.load_state_dict(self.loader.state_at(*divmod(self._end, self.n_batches)))
        self._has_begun = True

    def _read(self) -> None:
        """Bring one more batch into the window; others take what is there in the meantime.

        Raises:
            SaevStoreError: what the loader raises; it is in front of the same batch then.
        """
        self._is_reading = True
        try:
            self._changed.release()
            try:
                # Tensors that are made in inference mode cannot be trained on, wherever they go.
                with torch.inference_mode(False):
                    self._batches = self._batches or iter(self.loader)
                    batch = next(self._batches)
                    event = _event(batch)
            finally:
                self._changed.acquire()
            self._window[self._end] = batch, event
            self._end += 1
            if self._end % self.n_batches == 0:
                self._batches = None  # the loader's next iteration is the next epoch
        except BaseException:
            self._batches = None
            if not self._is_closed:
                self.loader.load_state_dict(self.loader.state_at(*divmod(self._end, self.n_batches)))
            raise
        finally:
            self._is_reading = False
            self._changed.notify_all()

    def _hand_out(self, consumer: Consumer) -> ExampleBatch:
        """Return a batch of the window."""
        batch, event = self._window[consumer.number]
        for value in batch.values():
            # The current stream of this thread waits for the batch, whose memory is kept until that stream is done with it.
            if event is not None and isinstance(value, torch.Tensor) and value.is_cuda:
                stream = torch.cuda.current_stream(value.device)
                stream.wait_event(event)
                value.record_stream(stream)
        consumer.number += 1
        consumer.moved_s = time.monotonic()
        self._forget()
        return ExampleBatch(batch)

    def _forget(self) -> None:
        """Give back the memory of batches that all have taken."""
        least = min((other.number for other in self._live), default=self._end)
        for number in [number for number in self._window if number < least]:
            del self._window[number]
            self._changed.notify_all()

    # -- ending --------------------------------------------------------------------------------------------------------

    def close(self) -> None:
        """End the loader's threads and give back its memory. Consumers that ask for more get an error."""
        with self._changed:
            self._is_closed = True
            self._window.clear()
            self._changed.notify_all()
        self.loader.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()


def _event(batch: ExampleBatch) -> torch.cuda.Event | None:
    """Return, on a GPU, what comes after the batch in the current stream of this thread."""
    for value in batch.values():
        if isinstance(value, torch.Tensor) and value.is_cuda:
            event = torch.cuda.Event()
            event.record(torch.cuda.current_stream(value.device))
            return event
    return None
