"""Batches of the same rows of two stores: two loaders that go through the same order, side by side."""

# pyright: reportUnnecessaryIsInstance=false

from __future__ import annotations

import threading
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from types import TracebackType
from typing import Self, Unpack, cast

from saev_store.core.rows import Labels
from saev_store.errors import ArgumentError, kind_of
from saev_store.loaders._base import Loader
from saev_store.loaders._explain import Explanation
from saev_store.loaders._identity import same_value
from saev_store.loaders._iteration import Batch, BatchIterator
from saev_store.loaders._metrics import Metrics
from saev_store.loaders._pickled import pickled
from saev_store.loaders.options import ReadArguments, ReadOptions, ShuffleArguments, ShuffleOptions, chosen_options
from saev_store.loaders.ordered import OrderedLoader
from saev_store.loaders.shuffled import Geometry, ShuffledLoader
from saev_store.store.pair import PairSelection

#: The kind of a state of two loaders.
_KIND = "pair"


class PairBatches(Iterator[Batch]):
    """An epoch's batches of both stores; its threads end with the last batch, an error, `close`, or its own collection.

    Threads may share it: each batch goes to one of them.
    """

    def __init__(self, a: BatchIterator, b: BatchIterator) -> None:
        self._a, self._b = a, b
        #: Who takes a batch: of both stores the same one.
        self._turn = threading.Lock()

    def __next__(self) -> Batch:
        with self._turn:
            try:
                batch, other = next(self._a), next(self._b)
            except BaseException:
                self.close()
                raise
        act_a, act_b = batch.pop("act"), other.pop("act")
        return {"act_a": act_a, "act_b": act_b, **other, **batch}

    def close(self) -> None:
        """End the iteration's threads."""
        self._a.close()
        self._b.close()


class PairLoader:
    """Batches of the same rows of two stores. Use `OrderedPairLoader` or `ShuffledPairLoader`.

    A batch is a dict: `act_a` and `act_b` float32 (n, d_model), or (n, layers, d_model) where several layers were chosen;
    `example_idx`, `token_idx` and `token_labels` are those of both and as `OrderedLoader` says. A token array that both stores have is
    that of `a`. Each store has its own threads and reads blocks of its own, so an epoch costs what an epoch of each costs.

    It is used like a `Loader`: epochs, state, ranks, `close`.

    Attributes:
        a, b: The loaders of the two stores. They are not to be iterated.
    """

    def __init__(self, a: Loader, b: Loader, rows: PairSelection, options: ReadOptions, labels: Labels | None) -> None:
        self.a, self.b = a, b
        self._rows, self._options, self._labels = rows, options, labels

    def __reduce__(self) -> tuple[object, ...]:
        """A pickle is a loader of the same rows and options that stands where this one does; threads and batches stay here."""
        return pickled(self, self._rows, self._options, {"labels": self._labels})

    # -- sizes ---------------------------------------------------------------------------------------------------------

    def __len__(self) -> int:
        """Batches of an epoch, the same on every rank."""
        return len(self.a)

    @property
    def n_batches(self) -> int:
        """Batches of an epoch, the same on every rank."""
        return len(self.a)

    @property
    def n_samples(self) -> int:
        """Rows of an epoch, over all ranks."""
        return self.a.n_samples

    @property
    def batch_size(self) -> int:
        """Rows of a full batch of this rank."""
        return self.a.batch_size

    @property
    def rank(self) -> int:
        """This process among `world`, as it is now; within an epoch, as it was when that began."""
        return self.a.rank

    @property
    def world(self) -> int:
        """How many ranks share the work, as it is now; within an epoch, as it was when that began."""
        return self.a.world

    @property
    def scale(self) -> tuple[float | None, float | None]:
        """What the activations of each store are multiplied by with `scale_norm`, else None."""
        return self.a.scale, self.b.scale

    # -- iterating -----------------------------------------------------------------------------------------------------

    @property
    def epoch(self) -> int:
        """The epoch that `iter(loader)` gives; it advances when the last batch of an epoch is handed out."""
        return self.b.epoch

    @property
    def next_batch(self) -> int:
        """The number, in its epoch, of the batch that is handed out next."""
        return self.b.next_batch

    def set_epoch(self, epoch: int) -> None:
        """Choose the epoch of the next iteration, from its beginning."""
        self.a.set_epoch(epoch)
        self.b.set_epoch(epoch)

    def __iter__(self) -> PairBatches:
        """The epoch's batches; after `load_state_dict`, those that had not been handed out.

        Raises (from the iterator):
            CorruptShardError, TransportError: a shard of one of the stores could not be read; the message names it.
            DeadlineError: no batch within `batch_timeout_s`.
        """
        if self.a.epoch != self.b.epoch:  # the last batch of `b` was never there
            self.a.set_epoch(self.b.epoch)
        a = iter(self.a)
        try:
            return PairBatches(a, iter(self.b))
        except BaseException:
            a.close()
            self.a.load_state_dict({**self.a.state_dict(), "epoch": self.b.epoch, "batch": self.b.next_batch})
            raise

    def close(self) -> None:
        """End the current iteration and its threads, and give back all memory. The loader can be used again."""
        self.a.close()
        self.b.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    # -- looking into it -----------------------------------------------------------------------------------------------

    def metrics(self) -> tuple[Metrics, Metrics]:
        """Measures of the latest iteration, of each store."""
        return self.a.metrics(), self.b.metrics()

    def explain(self) -> tuple[Explanation, Explanation]:
        """What will be read of each store, how, and what it costs; nothing is read for it."""
        return self.a.explain(), self.b.explain()

    # -- state ---------------------------------------------------------------------------------------------------------

    def state_dict(self) -> dict[str, object]:
        """Where the loader stands: JSON, below 2 kB. Counts batches that were handed out, not those made ahead."""
        b = self.b.state_dict()
        return {"kind": _KIND, "a": {**self.a.state_dict(), "epoch": b["epoch"], "batch": b["batch"]}, "b": b}

    def load_state_dict(self, state: Mapping[str, object]) -> None:
        """Continue where `state_dict` was taken; see `Loader.load_state_dict`.

        Raises:
            ArgumentError: the state is of other rows, another batch size, seed or version; the message says which.
        """
        parts = [state.get("a"), state.get("b")] if isinstance(state, Mapping) else []
        if (
            not parts
            or not all(isinstance(part, Mapping) for part in parts)
            or not same_value(state.get("kind"), _KIND)
        ):
            raise ArgumentError(
                "the state is not one of a pair of stores",
                where="load_state_dict",
                remedy="Use the state of a loader of the same kind.",
            )
        a, b = cast("list[Mapping[str, object]]", parts)
        differing = [name for name in ("epoch", "batch") if not same_value(a.get(name), b.get(name))]
        if differing:
            raise ArgumentError(
                f"the state has different values of {differing} for the two stores, which this loader never writes",
                where="load_state_dict",
            )
        before = self.a.state_dict()
        self.a.load_state_dict(a)
        try:
            self.b.load_state_dict(b)
        except BaseException:
            self.a.load_state_dict(before)
            raise

    @property
    def is_bound(self) -> bool:
        """See `Loader`."""
        return self.a.is_bound or self.b.is_bound

    def stand_as(self, state: Mapping[str, object], *, is_bound: bool) -> None:
        """See `Loader`."""
        for loader, name in ((self.a, "a"), (self.b, "b")):
            loader.stand_as(cast("Mapping[str, object]", state[name]), is_bound=is_bound)


class OrderedPairLoader(PairLoader):
    """Batches of the same rows of two stores in storage order. See `PairLoader`.

    Args:
        rows: What to load: `pair(a, b).sel(…)`.
        options: How; default: `ReadOptions()`. `n_threads` and `prefetch_batches` are for each store, `scale_norm=True` finds a factor for
            each.
        labels: The `labels` of one of the stores, to have them in the batches.
        changed: Fields of `ReadOptions`, instead of what `options` says.

    Raises:
        ArgumentError: an option is out of range.

    >>> from saev_store import ShardStore, pair
    >>> store = ShardStore.open(SAMPLE)
    >>> with OrderedPairLoader(pair(store, store).sel(layer_a=5, layer_b=(2, 11)), batch_size=16) as loader:
    ...     [(batch["act_a"].shape, batch["act_b"].shape) for batch in loader]
    [((16, 8), (16, 2, 8)), ((12, 8), (12, 2, 8))]
    """

    def __init__(
        self,
        rows: PairSelection,
        options: ReadOptions | None = None,
        *,
        labels: Labels | None = None,
        **changed: Unpack[ReadArguments],
    ) -> None:
        _check(rows)
        given = chosen_options(options, ReadOptions, changed)
        of_a, of_b = _token_arrays(rows, given.token_arrays)
        a = OrderedLoader(rows.a, replace(given, token_arrays=of_a), labels=labels)
        super().__init__(a, OrderedLoader(rows.b, replace(given, token_arrays=of_b)), rows, given, labels)


class ShuffledPairLoader(PairLoader):
    """Batches of a seeded shuffle of the same rows of two stores. See `PairLoader`.

    The order is that of a `ShuffledLoader` of one store with a window of as many blocks. `window_bytes` is for both stores together.

    Args:
        rows: What to load: `pair(a, b).sel(…)`.
        options: How; default: `ShuffleOptions()`. `n_threads` and `prefetch_batches` are for each store, `scale_norm=True` finds a
            factor for each.
        labels: The `labels` of one of the stores, to have them in the batches.
        changed: Fields of `ShuffleOptions`, instead of what `options` says.

    Raises:
        ArgumentError: an option is out of range, or does not divide what it should.
    """

    def __init__(
        self,
        rows: PairSelection,
        options: ShuffleOptions | None = None,
        *,
        labels: Labels | None = None,
        **changed: Unpack[ShuffleArguments],
    ) -> None:
        _check(rows)
        given = chosen_options(options, ShuffleOptions, changed)
        of_a, of_b = _token_arrays(rows, given.token_arrays)
        a = _First(rows, replace(given, token_arrays=of_a), labels)
        super().__init__(a, _Second(rows, a, replace(given, token_arrays=of_b)), rows, given, labels)


def _check(rows: PairSelection) -> None:
    """Refuse what is no selection of two stores."""
    if not isinstance(rows, PairSelection):
        raise ArgumentError(
            f"rows is {kind_of(rows)}", where="rows", remedy="Pass pair(a, b).sel(layer_a=…, layer_b=…)."
        )


def _token_arrays(rows: PairSelection, names: Sequence[str]) -> tuple[tuple[str, ...], tuple[str, ...]]:
    """Which token arrays come from each store: from the second one those that only it has."""
    first, second = (list(side.token_arrays or ()) if names else [] for side in (rows.a, rows.b))
    of_b = tuple(name for name in names if name not in first and name in second)
    return tuple(name for name in names if name not in of_b), of_b


class _First(ShuffledLoader):
    """The loader of the first store, which decides the order: a row of its window costs what it costs in both."""

    def __init__(self, rows: PairSelection, options: ShuffleOptions, labels: Labels | None) -> None:
        self._both_nbytes = rows.a.space.row_nbytes + rows.b.space.row_nbytes
        super().__init__(rows.a, options, labels=labels)

    @property
    def _row_nbytes(self) -> int:
        """What a row of the window costs in both stores."""
        return self._both_nbytes

    @property
    def order(self) -> tuple[Geometry, int]:
        """What the order is made with for the ranks as they are now, and how many cohorts are read ahead."""
        self._look_at_ranks()
        return self._geometry, self._n_ahead


class _Second(ShuffledLoader):
    """The loader of the second store, whose order is made with what the first one's is made with."""

    def __init__(self, rows: PairSelection, first: _First, options: ShuffleOptions) -> None:
        self._first = first
        super().__init__(rows.b, options)

    def _divide(self) -> None:
        """See `Loader`."""
        self._geometry, self._n_ahead = self._first.order

    def _adopt(self, state: Mapping[str, object]) -> None:
        """Take over what the first one has taken over."""
        geometry, n_ahead = self._first.order
        if self._geometry_of(state) != geometry:
            raise ArgumentError("the state has different orders for the two stores", where="load_state_dict")
        self._geometry, self._n_ahead = geometry, n_ahead
