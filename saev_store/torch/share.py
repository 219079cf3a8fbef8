"""One read, several training loops in threads of one process, the same memory."""

from __future__ import annotations

import json
import logging
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from types import TracebackType
from typing import TYPE_CHECKING, Self, cast

import torch

from saev_store.core.arguments import check_count, check_number
from saev_store.errors import ArgumentError, DeadlineError, SaevStoreError
from saev_store.torch.batch import ExampleBatch

if TYPE_CHECKING:
    from saev_store.torch.loader import StoreLoader

_logger = logging.getLogger("saev_store.torch")
#: Waits are cut into slices, so that time in which the process was stopped does not count.
_SLICE_S = 0.25


class Consumer:
    """One of the loops that share a loader: iterate it once for each epoch, as a loader, in a thread of its own.

    Batches have the order, the values and the state of the loader. Their tensors are the same memory for all consumers: they must not be
    written to. Use it as a context manager, so that the others know when its loop has failed.

    Attributes:
        name: What errors call it.
    """

    def __init__(self, shared: SharedLoader, name: str, number: int) -> None:
        self.name = name
        self._shared = shared
        #: The batch that comes next, counted through all epochs; the thread that asked last.
        self.number, self.thread = number, cast("threading.Thread | None", None)
        self.is_between_epochs, self.is_placed = True, False

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
            ArgumentError: sharing has ended.
            SaevStoreError: this consumer was dropped before; the message has the reason.
        """
        end = (self.epoch + 1) * self._shared.n_batches
        while self.number < end:
            yield self._shared.take(self)
        self.is_between_epochs = True

    def state_dict(self) -> dict[str, object]:
        """Return the state of the loader in front of this consumer's next batch."""
        return self._shared.loader.state_at(*divmod(self.number, max(len(self), 1)))

    def load_state_dict(self, state: Mapping[str, object]) -> None:
        """Continue where `state_dict` was called. Other consumers may be at other batches: reading begins with the earliest.

        Raises:
            ArgumentError: the state is of another loader, or of another order than the state of another consumer; or reading has begun.
        """
        if _is_same(state, self.state_dict()):
            self.is_placed = True
        else:
            self._shared.move(self, state)

    def close(self) -> None:
        """Take no more batches: the others do not wait for this consumer any more."""
        self._shared.leave(self)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._shared.leave(self, error)


class SharedLoader:
    """A loader whose batches go to several consumers; made by `loader.share`. A context manager, and a sequence of consumers.

    Each batch is read once, by the consumer that first needs it, and is kept until all have taken it. No consumer is more than `max_ahead`
    batches in front of the slowest. Reading begins when every consumer has asked for its first batch.

    A consumer is dropped when its thread has ended within an epoch, when its `with` block was left by an error, or when it kept others
    waiting for `timeout_s`. The others continue without it. Its error is logged, raised if that consumer asks again, and raised when the
    `with` block of this object ends.

    Args:
        loader: Nothing else iterates it.
        names: Names of the consumers, or how many there are.
        max_ahead: Batches that are kept for consumers that are behind.
        timeout_s: Seconds for which the others wait for a consumer.

    Raises:
        ArgumentError: the names are not different texts, there are none, or a number is out of range.

    Attributes:
        consumers: One for each loop.
        dropped: Name of a dropped consumer to the error.
        loader: What is shared.
    """

    def __init__(
        self, loader: StoreLoader, names: int | Sequence[str], *, max_ahead: int = 4, timeout_s: float = 300.0
    ) -> None:
        self.loader = loader
        self._max_ahead = check_count(max_ahead, name="max_ahead")
        self._timeout_s = check_number(timeout_s, name="timeout_s")
        self.n_batches = len(loader)
        epoch, batch = loader.place
        self._end = epoch * self.n_batches + batch
        self.consumers = tuple(Consumer(self, name, self._end) for name in _names(names))
        self.dropped: dict[str, SaevStoreError] = {}
        #: Guards all that follows; notified when a batch comes, a consumer moves or leaves, or sharing ends.
        self._changed = threading.Condition(threading.RLock())
        self._live = list(self.consumers)
        #: Batches by their numbers, and the event on a GPU after which each is there.
        self._window: dict[int, tuple[ExampleBatch, torch.cuda.Event | None]] = {}
        self._batches: Iterator[ExampleBatch] | None = None
        self._has_begun = self._is_reading = self._is_closed = False

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
        consumer.is_between_epochs = False
        left_s, seen = self._timeout_s, cast("object", None)
        with self._changed:
            consumer.thread = threading.current_thread()
            while True:
                self._check(consumer)
                waited_for = [other for other in self._live if other.thread is None]
                if not waited_for and not self._has_begun:
                    self._start()
                if not waited_for and consumer.number < self._end:
                    return self._hand_out(consumer)
                if not waited_for and not self._is_reading:
                    if len(self._window) < self._max_ahead:
                        self._read()
                        continue
                    waited_for = [other for other in self._live if other.number == min(self._window)]
                self._drop_dead(waited_for)
                now = [(other.name, other.number) for other in waited_for]
                left_s, seen = (left_s, seen) if now and now == seen else (self._timeout_s, now)
                if left_s <= 0:
                    self._drop_slow(waited_for)
                    continue
                began_s = time.monotonic()
                self._changed.wait(min(_SLICE_S, left_s))
                left_s -= min(time.monotonic() - began_s, _SLICE_S)

    def move(self, consumer: Consumer, state: Mapping[str, object]) -> None:
        """Let a consumer continue from a state, which is another one than its own."""
        with self._changed:
            if self._has_begun:
                raise ArgumentError(
                    f"the state of consumer {consumer.name!r} is of another batch than its next one, and reading has begun",
                    where="load_state_dict",
                    remedy="Load the states of all consumers before they take batches.",
                )
            order, before = self.loader.state_at(0, 0), self.loader.state_dict()
            self.loader.load_state_dict(state)
            if any(other.is_placed for other in self.consumers) and self.loader.state_at(0, 0) != order:
                self.loader.load_state_dict(before)
                raise ArgumentError(
                    f"the state of consumer {consumer.name!r} has another order or scale than the state of another consumer",
                    where="load_state_dict",
                    remedy="Load states of consumers of one loader.",
                )
            epoch, batch = self.loader.place
            consumer.number, consumer.is_placed = epoch * self.n_batches + batch, True

    def leave(self, consumer: Consumer, error: BaseException | None = None) -> None:
        """Do not wait for a consumer any more; it is dropped if there is an error."""
        with self._changed:
            if consumer not in self._live:
                return
            if error is None:
                self._remove(consumer)
            else:
                text = f"consumer {consumer.name!r} failed at {self._where(consumer)}: {type(error).__name__}: {error}"
                dropped = SaevStoreError(text, where="share")
                dropped.__cause__ = error
                self._drop(consumer, dropped)

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
            del batch
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
        self._check(consumer)
        batch, event = self._window[consumer.number]
        if event is not None:
            _see(batch, event)
        consumer.number += 1
        self._forget()
        return ExampleBatch(batch)

    def _forget(self) -> None:
        """Give back the memory of batches that all have taken."""
        least = min((other.number for other in self._live), default=self._end)
        for number in [number for number in self._window if number < least]:
            del self._window[number]
            self._changed.notify_all()

    def _check(self, consumer: Consumer) -> None:
        """Raise what keeps a consumer from taking a batch."""
        if consumer.name in self.dropped:
            raise self.dropped[consumer.name]
        if self._is_closed or consumer not in self._live:
            what = "sharing has ended" if self._is_closed else f"consumer {consumer.name!r} was closed"
            raise ArgumentError(what, where="share", remedy="Share the loader again.")

    def _drop_dead(self, waited_for: Sequence[Consumer]) -> None:
        """Drop consumers whose threads have ended; those that ended between two epochs have just left."""
        for other in waited_for:
            if other.thread is None or other.thread.is_alive():
                continue
            if other.is_between_epochs:
                self._remove(other)
            else:
                text = f"the thread of consumer {other.name!r} has ended at {self._where(other)}"
                remedy = "Look for its error; close() a consumer that takes no more batches."
                self._drop(other, SaevStoreError(text, where="share", remedy=remedy))

    def _drop_slow(self, waited_for: Sequence[Consumer]) -> None:
        for other in waited_for:
            text = f"consumer {other.name!r} kept others waiting for {self._timeout_s:g} s at {self._where(other)}"
            remedy = "Allow more timeout_s, or close() a consumer that takes no more batches."
            self._drop(other, DeadlineError(text, where="share", remedy=remedy))

    def _drop(self, consumer: Consumer, error: SaevStoreError) -> None:
        """Continue without a consumer."""
        if consumer in self._live:
            self.dropped[consumer.name] = error
            _logger.error("%s", error)
            self._remove(consumer)

    def _remove(self, consumer: Consumer) -> None:
        """Keep no batches for a consumer."""
        self._live.remove(consumer)
        self._forget()
        if not self._live:
            self.close()
        self._changed.notify_all()

    def _where(self, consumer: Consumer) -> str:
        """Name the latest batch that a consumer took."""
        epoch, batch = divmod(consumer.number - 1, self.n_batches)
        return "its start" if consumer.thread is None else f"batch {batch} of epoch {epoch}"

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
        if error is None:
            for dropped in self.dropped.values():
                raise dropped


def _event(batch: ExampleBatch) -> torch.cuda.Event | None:
    """Return, on a GPU, what comes after the batch in the current stream of this thread."""
    for value in batch.values():
        if isinstance(value, torch.Tensor) and value.is_cuda:
            event = torch.cuda.Event()
            event.record(torch.cuda.current_stream(value.device))
            return event
    return None


def _see(batch: ExampleBatch, event: torch.cuda.Event) -> None:
    """Let the current stream of this thread wait for the batch, and keep the memory until that stream is done with it."""
    for value in batch.values():
        if isinstance(value, torch.Tensor) and value.is_cuda:
            stream = torch.cuda.current_stream(value.device)
            stream.wait_event(event)
            value.record_stream(stream)


def _names(names: int | Sequence[str]) -> list[str]:
    """Return the names of consumers.

    Raises:
        ArgumentError: they are not different texts, or there are none.
    """
    if isinstance(names, int) and not isinstance(names, bool):
        return [str(number) for number in range(check_count(names, name="n"))]
    given: list[str] = []
    with suppress(TypeError):  # callers may not check types
        given = [] if isinstance(names, (str, bytes)) else list(cast("Sequence[str]", names))
    if not given or not all(isinstance(cast("object", name), str) for name in given) or len(set(given)) != len(given):
        raise ArgumentError(
            f"consumers are {names!r}; they must be a number, or a list of different names", where="share"
        )
    return given


def _is_same(state: object, mine: Mapping[str, object]) -> bool:
    """Return True if a state equals another one; one that is not JSON, such as of arrays, does not."""
    try:
        return json.dumps(state, sort_keys=True) == json.dumps(mine, sort_keys=True)
    except (TypeError, ValueError, RecursionError):
        return False
