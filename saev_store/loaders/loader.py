"""`Loader`: batches of one selection, or of the same rows of two stores, shuffled or in storage order."""

from __future__ import annotations

import traceback
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from functools import partial
from multiprocessing.context import get_spawning_popen
from types import TracebackType
from typing import Generic, Self, TypeVar

import numpy as np
import numpy.typing as npt

from saev_store._runtime.threads import n_cores
from saev_store.core.arguments import check_count
from saev_store.errors import ArgumentError, kind_of
from saev_store.loaders.explain import Explanation, explain
from saev_store.loaders.options import LoaderOptions, chosen, rank_and_world
from saev_store.loaders.reads import (
    MOST_POOLS,
    Allocate,
    Plan,
    PoolMemory,
    PoolReader,
    Reading,
    Side,
    TokenColumns,
    allocate,
    ended,
    layer_columns,
    plan_reads,
)
from saev_store.loaders.state import EpochPlace, check_state, state_of
from saev_store.order import Cut, Epoch
from saev_store.store.pair import PairSelection
from saev_store.store.selection import Selection

Batch = dict[str, npt.NDArray[np.generic]]
#: Storage order reads ahead in pools of so many bytes: mixing does not need more.
_STORED_POOL_BYTES = 64 << 20
_ALIGN_BYTES = 64
_MAX_THREADS = 16
#: More threads than cores only wait for each other where the files are in memory.
_LOCAL_THREADS = min(max(n_cores(), 4), _MAX_THREADS)


B = TypeVar("B")


class BaseLoader(ABC, Generic[B]):
    """Epochs, places and states of a loader; subclasses decide what a batch looks like.

    Args:
        source: The first argument of the subclass, for pickles.
        rows: What is loaded.
        options: How to load.
        make_memory: Makes the memory of pools, such as pinned memory.
    """

    def __init__(
        self, source: object, rows: Selection | PairSelection, options: LoaderOptions, make_memory: Allocate
    ) -> None:
        self.options, self.rows = options, rows
        self._source, self._make_memory = source, make_memory
        parts = _parts(rows)
        #: Bytes of a row in the memory of a pool.
        self._sizes = {
            name: part.space.vectors_per_row * part.space.layout.d_model * part.dtype.itemsize
            for name, part in parts.items()
        }
        self._row_nbytes = sum(self._sizes.values())
        self._columns = TokenColumns(list(parts.values()), self.options.token_arrays, labels=self.options.labels)
        for part in parts.values():
            # Tables of the order grow with the rows that the documents promise; up to some 64 million they are small.
            part.reader.check_large(part.space.n_rows // 64)
        self._parts, self._first = parts, next(iter(parts.values()))
        self._memory: PoolMemory | None = None
        self._reader: PoolReader | None = None
        #: The next batch, and the one that the next iteration begins with.
        self._epoch, self._batch, self._resume_at = 0, 0, 0
        #: What a state named that was loaded.
        self._loaded: EpochPlace | None = None
        #: Rank and number of ranks that the cut is for: none yet.
        self._ranks: tuple[int, int] = 0, 0
        self._cut = self._cut_now()

    # -- sizes ---------------------------------------------------------------------------------------------------------

    def _cut_now(self, *, begins: bool = False) -> Cut:
        """Return the cut for the ranks as they are now; within an epoch, for those that its batches are of."""
        if not begins and (self._batch != self._resume_at or self.is_iterating):
            return self._cut
        options = self.options
        ranks = rank_and_world(options.rank, options.world)
        if ranks == self._ranks:
            return self._cut
        is_stored = options.order == "stored"
        most = min(options.window_bytes // 2, _STORED_POOL_BYTES) if is_stored else options.window_bytes // 2
        cut = Cut(
            self._first.space.n_rows, options.batch_size, ranks[1], options.drop_last,
            n_partitions=options.partitions_for(ranks[1]),
            pool_batches=max(1, most // (options.batch_size * self._row_nbytes)),
            early_start=options.early_start or is_stored,
        )  # fmt: skip
        self._cut = cut if self._loaded is None else self._adopted(cut, self._loaded)
        self._ranks = ranks
        return self._cut

    def _adopted(self, cut: Cut, place: EpochPlace) -> Cut:
        """Return a cut with the pools and partitions of a state."""
        found = replace(cut, **place.order)
        if min(found.pool_batches, cut.n_batches) > cut.pool_batches:
            needed = 2 * found.pool_batches * cut.batch_size * self._row_nbytes
            raise ArgumentError(
                f"the pools of the state need more than window_bytes={self.options.window_bytes:,}",
                where="load_state_dict",
                remedy=f"Make the loader with window_bytes={needed}.",
            )
        return found

    def __len__(self) -> int:
        """Number of batches of an epoch, the same on every rank."""
        return self._cut_now().n_batches

    @property
    def n_samples(self) -> int:
        """Rows of an epoch over all ranks; fewer than those of the selection with `drop_last`."""
        return self._cut_now().n_samples

    @property
    def rank(self) -> int:
        """Number of this process among `world`, as it is now; within an epoch, as it was when that began."""
        self._cut_now()
        return self._ranks[0]

    @property
    def world(self) -> int:
        """Number of processes that share the work, as it is now; within an epoch, as it was when that began."""
        return self._cut_now().world

    @property
    def d_model(self) -> int:
        """Length of a vector (of a pair, of `a`)."""
        return self._first.shape[-1]

    # -- iterating -----------------------------------------------------------------------------------------------------

    @property
    def epoch(self) -> int:
        """The epoch that `iter(loader)` gives; it advances when the last batch of an epoch is handed out."""
        return self._epoch

    @property
    def place(self) -> tuple[int, int]:
        """Epoch and number of the batch that is handed out next."""
        return self._epoch, self._batch

    def set_epoch(self, epoch: int) -> None:
        """Choose the epoch of the next iteration, from its beginning."""
        self.end_iteration()
        self._epoch, self._batch, self._resume_at = check_count(epoch, name="epoch", least=0), 0, 0

    def __iter__(self) -> Iterator[B]:
        """Yield the batches of the epoch; after `load_state_dict`, those that had not been handed out. It begins when the first is asked for.

        Raises (from the iterator):
            CorruptShardError, TransportError: a shard could not be read; the message names it.
            DeadlineError: no batch within `batch_timeout_s`.
        """
        self.end_iteration()
        cut = self._cut_now(begins=True)
        first, self._resume_at = self._resume_at, 0
        self._batch = first
        pool_rows = int(np.diff(cut.pool_starts).max(initial=0)) * cut.batch_size
        sides, end = list[Side](), 0
        for name, part in self._parts.items():
            sides.append(Side(name, part, end, self._sizes[name]))
            end += -(-pool_rows * self._sizes[name] // _ALIGN_BYTES) * _ALIGN_BYTES
        if self._memory is None or self._memory.nbytes != end:
            self._memory = PoolMemory(end, self._make_memory)
        epoch = Epoch(self._first.space, cut, self.options.seed, self._epoch)
        plan = partial(self._plan, epoch, self._ranks[0], sides)
        pools = range(int(np.searchsorted(cut.pool_starts, first, side="right")) - 1, len(cut.pool_starts) - 1)
        is_local = all(part.reader.transport.is_local for part in self._parts.values())
        n_threads = self.options.n_threads or (_LOCAL_THREADS if is_local else _MAX_THREADS)
        reader = self._reader = PoolReader(plan, pools, self._memory, n_threads, self.options.batch_timeout_s)
        numbers = iter(range(first, cut.n_batches))
        # Nothing is kept here of what is yielded.
        yield from map(partial(self._note, reader), self._converted(self._batches(reader, sides, cut, first)), numbers)
        if next(numbers, None) is not None:
            raise ended()

    @abstractmethod
    def _converted(self, batches: Iterator[Batch]) -> Iterator[B]:
        """Return the batches as they are handed out; they may be made some time before that."""

    def _note(self, reader: PoolReader, batch: B, number: int) -> B:
        if self._reader is not reader:
            raise ended()
        is_last = number + 1 == self._cut.n_batches
        self._epoch, self._batch = (self._epoch + 1, 0) if is_last else (self._epoch, number + 1)
        return batch

    def _batches(self, reader: PoolReader, sides: Sequence[Side], cut: Cut, first: int) -> Iterator[Batch]:
        """Yield the batches from number `first` on, each from a pool that is read while the one before is used."""
        try:
            while first < cut.n_batches:
                plan = reader.finish().plan
                end = plan.pool.first_batch + plan.pool.n_batches
                for batch in range(first, end):
                    is_first = batch == first
                    if reader.following is None and not is_first:
                        reader.following = reader.begin(MOST_POOLS)
                    # While kept batches hold earlier pools back, batches are copies. So a pool is free when the next one is needed.
                    # The caller's variable still refers to the batch before, which may be of another pool.
                    yield self._batch_of(sides, reader.current, batch, copies=reader.n_held > is_first)
                first = end
        except BaseException as error:
            # The frames that an error has left hold the memory of pools for as long as it is kept.
            traceback.clear_frames(error.__traceback__)
            raise
        finally:
            reader.close()

    def _plan(self, epoch: Epoch, rank: int, sides: Sequence[Side], number: int) -> Plan:
        """Return a pool, where its rows come from, and its reads."""
        pool, space = epoch.pool(number, rank), self._first.space
        columns = {
            "example_idx": pool.by_slot(space.example(pool.ordinal).repeat(pool.counts)),
            "token_idx": pool.by_slot(pool.cell + (space.tokens.start - space.layout.n_special_tokens)),
        }
        if space.rows_per_token > 1:
            columns |= layer_columns(space, pool.by_slot(pool.layer.repeat(pool.counts)))
        return Plan(pool, columns, [task for side in sides for task in plan_reads(pool, side)])

    def _batch_of(self, sides: Sequence[Side], reading: Reading | None, number: int, *, copies: bool) -> Batch:
        """Return a batch of a pool."""
        if reading is None:
            raise ended()
        (pool, columns, _), memory, _ = reading
        start = (number - pool.first_batch) * self.options.batch_size
        rows = slice(start, start + self.options.batch_size)
        found: Batch = {side.name: side.vectors(memory, len(pool.slot))[rows] for side in sides}
        found.update({name: column[rows] for name, column in columns.items()})
        if copies:
            found = {name: value.copy() for name, value in found.items()}
        found.update(self._columns.at(columns["example_idx"][rows], columns["token_idx"][rows]))
        return found

    @property
    def is_iterating(self) -> bool:
        """True while an iteration of this loader is under way."""
        return self._reader is not None and not self._reader.stop.is_set()

    @property
    def fill(self) -> float:
        """Share of the current pool that was not handed out, from 0 to 1; 0 between iterations."""
        if self._reader is None or self._reader.current is None or not self._batch:
            return 0.0
        pool = self._reader.current.plan.pool
        return (pool.first_batch + pool.n_batches - self._batch) / pool.n_batches

    def end_iteration(self) -> None:
        """End the iteration that is under way, if there is one."""
        if self._reader is not None:
            self._reader.close()
            self._reader = None

    def close(self) -> None:
        """End the current iteration and its threads, and give back all memory. The loader can be used again."""
        self.end_iteration()
        self._memory = None

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def explain(self) -> Explanation:
        """Return what will be read and how much memory that takes; nothing is read for it. `print` it."""
        epoch = Epoch(self._first.space, self._cut_now(), self.options.seed, self._epoch)
        return explain(epoch, list(self._parts.values()), self._row_nbytes)

    # -- state ---------------------------------------------------------------------------------------------------------

    def state_dict(self) -> dict[str, object]:
        """Return which batch comes next: small JSON. It counts batches that were handed out, not those read ahead.

        The states of all ranks are the same.
        """
        return self.state_at(*self.place)

    def state_at(self, epoch: int, batch: int) -> dict[str, object]:
        """Return a state of this loader in front of another batch."""
        return {**state_of(self._parts, self._cut_now(), self.options.seed), "epoch": epoch, "batch": batch}

    def load_state_dict(self, state: Mapping[str, object]) -> None:
        """Continue where `state_dict` was called: the next iteration begins with the batch that came after it.

        An iteration under way is ended. The state may come from another number of ranks, as long as ranks times batch size is the same,
        and the ranks divide `n_partitions` of a shuffled loader.

        Raises:
            ArgumentError: the state is of other rows, another batch size, seed or version; the message names what differs.
        """
        cut = self._cut_now(begins=True)
        place = check_state(state, state_of(self._parts, cut, self.options.seed), cut)
        self._cut = self._adopted(cut, place)
        self.end_iteration()
        self._loaded, self._epoch, self._batch, self._resume_at = place, place.epoch, place.batch, place.batch

    @property
    def is_bound(self) -> bool:
        """True if only ranks that can continue the epoch may take over: within an epoch, or after a state was loaded."""
        return self._batch > 0 or self._loaded is not None

    def __reduce__(self) -> tuple[object, ...]:
        """Pickle what the loader was made with, and its place; threads, batches and made memory stay here."""
        options = self.options
        if get_spawning_popen() is not None and self.world > 1:
            # In a process that is started now, torch.distributed is not initialised.
            options = replace(options, rank=self.rank, world=self.world)
        return _again, (type(self), self._source, options, self.state_dict(), self.is_bound)


def _again(
    make: Callable[[object, object], BaseLoader[B]],
    source: object,
    options: object,
    state: Mapping[str, object],
    is_bound: bool,
) -> BaseLoader[B]:
    """Return the loader that was pickled, at its place."""
    loader = make(source, options)
    if is_bound:
        loader.load_state_dict(state)
    else:
        loader.set_epoch(check_count(state["epoch"], name="epoch", least=0))
    return loader


class Loader(BaseLoader[Batch]):
    """Batches of rows, each row once in an epoch, in the same order for the same arguments on every machine.

    Iterate it once for each epoch. A batch is a dict of arrays: `act` (n, d_model), or (n, layers, d_model) with stacked layers, of the
    dtype of the rows; `example_idx` and `token_idx` int64 (n,), -1 for the special token; with several layers that are not stacked
    `layer` int64 (n,), and in stores with hook points `layer_key_idx`, the position in `rows.layer_keys`; and the token arrays asked for.
    A pair of stores gives `act_a` and `act_b`. A batch keeps its values while it, or a view of it, is referred to.

    An epoch ends when its last batch is handed out; the next iteration is the next epoch. An iteration that is left earlier does not
    count: the next one has the same batches. A new iteration ends the one before.

    Args:
        rows: `store.sel(…)`, or `pair(a, b).sel(…)`.
        options: How to load; default: `LoaderOptions()`.
        make_memory: Makes the memory of pools, such as pinned memory.
        changed: Fields of `LoaderOptions`, instead of what `options` has.

    Raises:
        ArgumentError: an option is out of range, or does not divide what it must.

    >>> from saev_store import ShardStore
    >>> store = ShardStore.open(SAMPLE)
    >>> with Loader(store.sel(layer=5, tokens="content"), batch_size=8, seed=1) as loader:
    ...     [batch["act"].shape for batch in loader]
    [(8, 8), (8, 8), (8, 8), (4, 8)]
    """

    def __init__(
        self,
        rows: Selection | PairSelection,
        options: LoaderOptions | None = None,
        *,
        make_memory: Allocate = allocate,
        **changed: object,
    ) -> None:
        super().__init__(rows, rows, chosen(LoaderOptions, options, changed), make_memory)

    def _converted(self, batches: Iterator[Batch]) -> Iterator[Batch]:
        return batches


def _parts(rows: object) -> dict[str, Selection]:
    """Return the selections that are read, by their keys in a batch.

    Raises:
        ArgumentError: it is something else.
    """
    if isinstance(rows, Selection):
        return {"act": rows}
    if isinstance(rows, PairSelection):
        return {"act_a": rows.a, "act_b": rows.b}
    raise ArgumentError(f"rows is {kind_of(rows)}", where="rows", remedy="Pass store.sel(…), or pair(a, b).sel(…).")
