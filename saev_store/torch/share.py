"""`SharedLoader`: one read, several training loops in threads of one process, the same memory."""

# pyright: reportUnnecessaryIsInstance=false

from __future__ import annotations

import json
import logging
import threading
from collections.abc import Iterable, Iterator, Mapping, Sequence
from types import TracebackType
from typing import Self, cast

import torch

from saev_store.core.arguments import check_count, check_number
from saev_store.errors import ArgumentError, DeadlineError, SaevStoreError
from saev_store.torch._consumer import Consumer
from saev_store.torch._sharing import Patience, Shareable, SharedBatch, written
from saev_store.torch.batch import ExampleBatch

_logger = logging.getLogger("saev_store.torch")


class SharedLoader:
    """A loader whose batches go to several consumers; made by `loader.share`. A context manager, and a sequence of consumers.

    Each batch is read once, by whichever consumer first needs it, and is kept until all have taken it. The slowest decides: nobody is
    more than `max_ahead` batches in front of it. Reading begins when every consumer has asked for its first batch.

    A consumer is dropped when its thread has ended within an epoch, when its `with` block was left by an error, or when it kept others waiting for
    `timeout_s` seconds. The others go on without it. `dropped` has the error, which is logged, raised if that consumer asks again, and raised
    when the `with` block of this object ends.

    Args:
        loader: Of `saev_store.torch`. Nothing else iterates it.
        names: Names of the consumers, or how many there are.
        max_ahead: Batches that are kept for those that are behind.
        timeout_s: Seconds for which the others wait for a consumer.

    Raises:
        ArgumentError: the names are not different texts, there are none, or a number is out of range.

    Attributes:
        consumers: One for each loop.
        dropped: Name of a dropped consumer to the error.
    """

    def __init__(
        self, loader: Shareable, names: int | Sequence[str], *, max_ahead: int = 4, timeout_s: float = 300.0
    ) -> None:
        self._loader = loader
        self._max_ahead = check_count(max_ahead, name="max_ahead")
        self._timeout_s = check_number(timeout_s, name="timeout_s")
        self.n_batches = len(loader)
        epoch, batch = loader.place
        first = epoch * self.n_batches + batch
        self.consumers = tuple(Consumer(self, name, first) for name in _names(names))
        self.dropped: dict[str, SaevStoreError] = {}
        # Guards all that follows. Held itself: an interrupt within the methods of a condition would leave it locked.
        self._mutex = threading.RLock()
        #: Notified when a batch comes, a consumer moves on or leaves, or all is closed.
        self._changed = threading.Condition(self._mutex)
        self._live = list(self.consumers)
        #: Batches by their numbers, and the number of the one that is read next.
        self._window: dict[int, SharedBatch] = {}
        self._end = first
        self._batches: Iterator[ExampleBatch] | None = None
        self._has_begun = False
        #: Whose turn it is to read.
        self._reading: object = None
        #: Whether a consumer has loaded a state, which says the order of all.
        self._has_order = False
        self._is_closed = False
        #: Who has written into a batch.
        self._spoiled: ArgumentError | None = None

    def __len__(self) -> int:
        """How many consumers there are."""
        return len(self.consumers)

    def __getitem__(self, number: int) -> Consumer:
        return self.consumers[number]

    def __iter__(self) -> Iterator[Consumer]:
        return iter(self.consumers)

    # -- consumers: called in their threads ----------------------------------------------------------------------------

    def take(self, consumer: Consumer) -> ExampleBatch:
        """The consumer's next batch."""
        consumer.thread, consumer.has_begun, consumer.is_between_epochs = threading.current_thread(), True, False
        patience, turn = Patience(self._timeout_s), object()
        with self._mutex:
            self._give_back(consumer)
        while True:
            try:
                with self._mutex:
                    if (batch := self._waited(consumer, patience, turn)) is not None:
                        return batch
                self._read()
            finally:
                if self._reading is turn:
                    self._reading = None
                    with self._mutex:
                        self._changed.notify_all()

    def end_epoch(self, consumer: Consumer) -> None:
        """Note that a consumer has had the last batch of an epoch."""
        with self._mutex:
            consumer.is_between_epochs = True
            self._give_back(consumer)
            if self._spoiled is not None:
                raise self._spoiled

    def move(self, consumer: Consumer, state: Mapping[str, object]) -> None:
        """Let a consumer go on from a state."""
        with self._mutex:
            if _is_same(state, self.state_of(consumer)):
                self._give_back(consumer)
                self._has_order = True
                return
            if self._has_begun:
                raise ArgumentError(
                    f"the state of consumer {consumer.name!r} is of another batch than its next one, and reading has begun",
                    where="load_state_dict",
                    remedy="Load the states of all consumers before they take batches.",
                )
            before, order, place = self._loader.state_dict(), self._loader.state_at(0, 0), self._loader.place
            try:
                self._loader.load_state_dict(state)
                if self._has_order and self._loader.state_at(0, 0) != order:
                    raise ArgumentError(
                        f"the state of consumer {consumer.name!r} has another order or scale than the state of another consumer",
                        where="load_state_dict",
                        remedy="Load states of consumers of one loader.",
                    )
                epoch, batch = self._loader.place
                self._loader.load_state_dict(self._loader.state_at(*place))
            except BaseException:
                self._loader.load_state_dict(before)
                raise
            consumer.number, self._has_order = epoch * self.n_batches + batch, True

    def state_of(self, consumer: Consumer) -> dict[str, object]:
        """The loader's state in front of the consumer's next batch."""
        return self._loader.state_at(*divmod(consumer.number, max(self.n_batches, 1)))

    def leave(self, consumer: Consumer, error: BaseException | None = None) -> None:
        """Wait for a consumer no more; it is dropped if an error is why."""
        with self._mutex:
            if consumer not in self._live:
                return
            self._give_back(consumer)
            if error is None or error is self._spoiled:
                self._remove(consumer)
            else:
                text = f"consumer {consumer.name!r} failed at {self._where(consumer)}: {type(error).__name__}: {error}"
                dropped = SaevStoreError(text, where="share")
                dropped.__cause__ = error
                self._drop(consumer, dropped)

    def _read(self) -> None:
        """Bring one more batch into the window. Others may take what is there meanwhile.

        Raises:
            SaevStoreError: what the loader raises; it stands in front of the same batch then.
        """
        try:
            # Tensors that are made in inference mode cannot be trained on, wherever they go.
            with torch.inference_mode(False):
                if self._batches is None:
                    self._batches = iter(self._loader)
                found = next(self._batches)
                shared = SharedBatch(found, [one.name for one in self.consumers])
                del found
            with self._mutex:
                self._window[self._end] = shared
                self._end += 1
                if self._end % self.n_batches == 0:
                    self._batches = None  # the loader's next iteration is the next epoch
        except BaseException:
            self._batches = None
            # Not where the loader stands: an interrupt may have come behind a batch that nobody has got.
            self._loader.load_state_dict(self._loader.state_at(*divmod(self._end, self.n_batches)))
            raise

    # -- with the condition held ---------------------------------------------------------------------------------------

    def _skip(self) -> None:
        """Read on with the earliest batch that a consumer needs: when reading begins, and when those that needed earlier ones have left."""
        least = min(other.number for other in self._live)
        if self._has_begun and self._end >= least:
            return
        # The end comes last: where an interrupt comes between, all is done again.
        self._batches = None
        self._loader.load_state_dict(self._loader.state_at(*divmod(least, self.n_batches)))
        self._end = least
        self._has_begun = True

    def _waited(self, consumer: Consumer, patience: Patience, turn: object) -> ExampleBatch | None:
        """The consumer's next batch, after a wait; None if it is its turn to read one more."""
        while True:
            self._check(consumer)
            self._forget()
            waited_for = [other for other in self._live if not other.has_begun]
            if not waited_for:
                if self._reading is None:
                    self._skip()
                if consumer.number < self._end:
                    return self._hand_out(consumer)
                if self._reading is None:
                    if len(self._window) < self._max_ahead:
                        self._reading = turn
                        return None
                    waited_for = [other for other in self._live if other.number == min(self._window)]
            self._drop_dead(waited_for)
            if patience.is_over([(other.name, other.number) for other in waited_for]):
                for other in waited_for:
                    text = (
                        f"consumer {other.name!r} kept others waiting for {self._timeout_s:g} s at {self._where(other)}"
                    )
                    remedy = "Allow more timeout_s, or close() a consumer that takes no more batches."
                    self._drop(other, DeadlineError(text, where="share", remedy=remedy))
            else:
                patience.wait(self._changed)

    def _hand_out(self, consumer: Consumer) -> ExampleBatch:
        """Take a batch out of the window for a consumer."""
        self._check_writes()
        self._check(consumer)
        shared = self._window[consumer.number]
        batch = shared.of(consumer.name)
        found = ExampleBatch(batch)
        # In one step for an interrupt: the batch is the next one, or it is handed out.
        consumer.held, consumer.has_taken = batch, True
        consumer.number += 1
        shared.forget(consumer.name)
        self._forget()
        return found

    def _forget(self) -> None:
        """Give back the memory of batches that all have taken."""
        least = min((other.number for other in self._live), default=self._end)
        taken = [number for number in self._window if number < least]
        for number in taken:
            del self._window[number]
        if taken:
            self._changed.notify_all()

    def _check(self, consumer: Consumer) -> None:
        """Raise what keeps a consumer from going on."""
        if self._spoiled is not None:
            raise self._spoiled
        if consumer.name in self.dropped:
            raise self.dropped[consumer.name]
        if self._is_closed:
            raise ArgumentError("the loader is shared no more", where="share", remedy="Share the loader anew.")
        if consumer not in self._live:
            raise ArgumentError(
                f"consumer {consumer.name!r} was closed", where="share", remedy="Share the loader anew."
            )

    def _give_back(self, consumer: Consumer) -> None:
        """Note that a consumer is done with the batch that it had."""
        self._check_writes()
        consumer.held = None

    def _check_writes(self) -> None:
        """Find out who has written into a batch: others may have seen it, so nobody goes on."""
        for other in self.consumers:
            name = None if other.held is None else written(other.held)
            if name is not None and self._spoiled is None:
                self._spoiled = ArgumentError(
                    f"consumer {other.name!r} has written into {name} of {self._where(other)}, which others share",
                    where="share",
                    remedy="Let it clone what it changes, or let the loader do it (normalize=, dtype=).",
                )
                self._changed.notify_all()

    def _drop_dead(self, waited_for: Sequence[Consumer]) -> None:
        """Drop consumers whose threads have ended; those that ended between two epochs have just left."""
        for other in waited_for:
            if other.thread is not None and not other.thread.is_alive():
                if other.is_between_epochs:
                    self._remove(other)
                else:
                    text = f"the thread of consumer {other.name!r} has ended at {self._where(other)}"
                    remedy = "Look for its error; close() a consumer that takes no more batches."
                    self._drop(other, SaevStoreError(text, where="share", remedy=remedy))

    def _drop(self, consumer: Consumer, error: SaevStoreError) -> None:
        """Go on without a consumer."""
        if consumer in self._live:
            self._check_writes()
            self.dropped[consumer.name] = error
            _logger.error("%s", error)
            self._remove(consumer)

    def _remove(self, consumer: Consumer) -> None:
        """Wait for a consumer no more, and keep no batches for it."""
        self._live.remove(consumer)
        if not self._live:
            self._is_closed = True
            self._window.clear()
            self._loader.close()
        for shared in self._window.values():
            shared.forget(consumer.name)
        self._forget()
        self._changed.notify_all()

    def _where(self, consumer: Consumer) -> str:
        """The latest batch that a consumer took, in words."""
        if not consumer.has_taken:
            return "its start"
        epoch, batch = divmod(consumer.number - 1, self.n_batches)
        return f"batch {batch} of epoch {epoch}"

    # -- ending --------------------------------------------------------------------------------------------------------

    def close(self) -> None:
        """End the loader's threads and give back its memory. Consumers that ask for more are told."""
        with self._mutex:
            self._is_closed = True
            self._window.clear()
            self._changed.notify_all()
        self._loader.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()
        if error is None:
            for dropped in self.dropped.values():
                raise dropped

    def __repr__(self) -> str:
        return f"<SharedLoader of {[one.name for one in self.consumers]}>"


def _names(names: int | Sequence[str]) -> list[str]:
    """The names of consumers.

    Raises:
        ArgumentError: they are not different texts, or there are none.
    """
    if isinstance(names, int) and not isinstance(names, bool):
        return [str(number) for number in range(check_count(names, name="n"))]
    # Callers may not check types.
    is_list = isinstance(cast("object", names), Iterable) and not isinstance(cast("object", names), (str, bytes))
    given = list(cast("Sequence[str]", names)) if is_list else []
    if not given or not all(isinstance(name, str) for name in given) or len(set(given)) != len(given):
        raise ArgumentError(
            f"consumers are {names!r}; they must be a number, or a list of different names", where="share"
        )
    return given


def _is_same(state: object, mine: Mapping[str, object]) -> bool:
    """Whether a state is equal to another one; one that is not JSON, such as of arrays, is not."""
    try:
        return json.dumps(state, sort_keys=True) == json.dumps(mine, sort_keys=True)
    except (TypeError, ValueError, RecursionError):
        return False
