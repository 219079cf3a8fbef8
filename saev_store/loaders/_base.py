"""What both loaders share: epochs, state, iteration, closing."""

# pyright: reportUnnecessaryIsInstance=false

from __future__ import annotations

import os
import threading
from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Callable, Mapping
from functools import partial
from types import TracebackType
from typing import ClassVar, Self

from saev_store._runtime.threads import n_cores
from saev_store.core.arguments import check_count
from saev_store.core.layout import LayerKey
from saev_store.core.rows import Labels
from saev_store.errors import ArgumentError, kind_of
from saev_store.loaders._batches import BatchSource, batches
from saev_store.loaders._columns import TokenColumns
from saev_store.loaders._explain import Explanation, Plan, epoch_cost
from saev_store.loaders._identity import STATE_VERSION, checked, fingerprint, norm_scale, same_value, whole_number
from saev_store.loaders._iteration import BatchIterator, Iteration
from saev_store.loaders._medium import TAKES_ADVICE, WAITING, Advice, layers_of, medium_of
from saev_store.loaders._metrics import Metrics, Totals
from saev_store.loaders._pickled import pickled
from saev_store.loaders._reads import Reads, Scratch
from saev_store.loaders._ring import Allocate
from saev_store.loaders.options import ReadOptions, rank_and_world
from saev_store.order import Batching
from saev_store.store.selection import Selection

#: Reading threads by what the shards lie on; memory is bound by its bandwidth, everything else by waiting.
_N_THREADS = {"memory": 4, "cached": 4, "flash": 16, "disk": 8, "parallel": 16, "remote": 32}
#: Copying out of memory takes a core: more threads than cores would take it from the thread that makes batches.
_BUSY = ("memory", "cached")
#: What one task reads: small enough to share the work, large enough for the medium, and for Python, which only one thread
#: runs at a time.
_TASK_BYTES = {
    "memory": 4 << 20, "cached": 4 << 20, "flash": 2 << 20, "disk": 8 << 20, "parallel": 8 << 20, "remote": 8 << 20,
}  # fmt: skip


class Loader(ABC):
    """Batches of a selection's rows, made ahead of time by threads. Use `OrderedLoader` or `ShuffledLoader`.

    A loader is iterated once per epoch: `for batch in loader`. Iterating again ends the iteration before. It is a context
    manager; `close` ends all threads. Loaders may be inherited by forked processes, iterators may not.

    Attributes:
        n_threads: Reads in flight at most.
        batch_size: Rows of a full batch of this rank.
        drop_last: Whether a last batch that is not full is left out.
        d_model: Numbers of a vector.
        n_samples: Rows of the selection, over all ranks.
    """

    kind: ClassVar[str] = ""
    #: Threads, besides those that read, that have a core's worth to do.
    _n_busy: ClassVar[int] = 0
    #: Whether neighbours in a shard are read at different times.
    _reads_far_apart: ClassVar[bool] = False

    def __init__(
        self, rows: Selection, options: ReadOptions, labels: Labels | None, make_buffer: Allocate | None
    ) -> None:
        if not isinstance(rows, Selection):
            raise ArgumentError(f"rows is {kind_of(rows)}", where="rows", remedy="Pass store.sel(…).")
        space, layout = rows.space, rows.space.layout
        self._rows, self._space, self._options = rows, space, options
        self._columns: TokenColumns | None = None
        if options.token_arrays or labels is not None:
            self._columns = TokenColumns(rows, options.token_arrays, labels)
        self.batch_size, self.drop_last = options.batch_size, options.drop_last
        self.d_model, self.n_samples = layout.d_model, space.n_rows
        self._reader, self._transports = rows.reader, layers_of(rows.reader.transport)
        self._reader.check_wide()
        # Tables of the order grow with the rows that the documents promise; up to some 64 million they are small.
        self._reader.check_large(space.n_rows // 64)
        self._medium = medium_of(self._reader.transport, layout, options.medium)
        is_busy = self._medium.kind in _BUSY
        most = max(1, n_cores() - self._n_busy) if is_busy and self._n_busy else 64
        self.n_threads = options.n_threads or min(_N_THREADS[self._medium.kind], most)
        # A transport around another one may wait, such as a rate limit.
        self._reads_are_copies = is_busy and len(self._transports) == 1
        self._read_bytes = options.read_bytes or _TASK_BYTES[self._medium.kind]
        self._prefetch = options.prefetch_batches or 2
        is_strided = len(space.layer_idx) < layout.n_layers or space.tokens.count < layout.tokens_per_example
        self._advice: Advice | None = None
        if self._medium.path is not None and TAKES_ADVICE and (is_strided or self._reads_far_apart):
            self._advice = Advice(self._medium.path, layout, options.keep_pages)
        self._scale = None if isinstance(options.scale_norm, bool) else options.scale_norm
        self._make_buffer, self._labels = make_buffer, labels
        self._lock = threading.Lock()
        self._iteration: Iteration | None = None
        self._totals = Totals(space.row_nbytes)
        self._scratch: Scratch = deque()
        self._epoch, self._batch, self._resume_at = 0, 0, 0
        #: The state that was loaded last.
        self._loaded: Mapping[str, object] | None = None
        self._rank: int = 0
        self._world: int = 0  # until the ranks were looked at
        self._look_at_ranks()

    def _look_at_ranks(self, *, begins: bool = False) -> None:
        """Cut the rows anew where rank or world are other ones by now, such as after torch.distributed was initialised.

        Args:
            begins: Whether an iteration begins here. Within an epoch the ranks are those that its batches are of.
        """
        if self._world and not begins and (self._batch != self._resume_at or self.is_iterating):
            return
        ranks = rank_and_world(self._options.rank, self._options.world)
        if ranks == (self._rank, self._world):
            return
        self._rank, self._world = ranks
        try:
            self._batching = Batching(self.n_samples, self.batch_size * self._world, self.drop_last, self._world)
            self._divide()
            if self._loaded is not None:
                self._check(self._loaded)
                self._adopt(self._loaded)
        except ArgumentError:
            self._rank, self._world = 0, 0  # the next look refuses too
            raise

    # -- sizes ---------------------------------------------------------------------------------------------------------

    def __len__(self) -> int:
        """Batches of an epoch, the same on every rank."""
        self._look_at_ranks()
        return self._batching.n_batches

    @property
    def n_batches(self) -> int:
        """Batches of an epoch, the same on every rank."""
        return len(self)

    @property
    def rank(self) -> int:
        """This process among `world`, as it is now; within an epoch, as it was when that began."""
        self._look_at_ranks()
        return self._rank

    @property
    def world(self) -> int:
        """How many ranks share the work, as it is now; within an epoch, as it was when that began."""
        self._look_at_ranks()
        return self._world

    @property
    def layer_keys(self) -> tuple[LayerKey, ...]:
        """The chosen layers: labels, or with hook points pairs, in which `layer_key_idx` of a batch counts."""
        return self._rows.layer_keys

    @property
    def scale(self) -> float | None:
        """What activations are multiplied by with `scale_norm`, else None."""
        if self._options.scale_norm and self._scale is None:
            self._scale = norm_scale(self._rows)
        return self._scale

    # -- iterating -----------------------------------------------------------------------------------------------------

    @property
    def epoch(self) -> int:
        """The epoch that `iter(loader)` gives; it advances when the last batch of an epoch is handed out."""
        return self._epoch

    @property
    def next_batch(self) -> int:
        """The number, in its epoch, of the batch that is handed out next."""
        return self._batch

    def set_epoch(self, epoch: int) -> None:
        """Choose the epoch of the next iteration, from its beginning."""
        epoch = check_count(epoch, name="epoch", least=0)
        self._end_iteration()
        self._epoch, self._batch, self._resume_at = epoch, 0, 0

    def __iter__(self) -> BatchIterator:
        """The epoch's batches; after `load_state_dict`, those that had not been handed out.

        Raises (from the iterator):
            CorruptShardError, TransportError: a shard could not be read; the message names it.
            DeadlineError: no batch within `batch_timeout_s`.
        """
        with self._lock:
            self._end_iteration()
            self._look_at_ranks(begins=True)
            if self._iteration is not None and self._iteration.has_strays:
                # A read that hangs in the system may still be writing there.
                self._forget_memory()
                self._scratch = deque()
            epoch, first, self._resume_at = self._epoch, self._resume_at, 0
            self._batch = first
            totals = self._totals = Totals(self._space.row_nbytes)
            iteration = self._iteration = Iteration(
                self.n_threads,
                self._prefetch,
                totals,
                helps=self._reads_are_copies,
                on_close=None if self._advice is None else self._advice.close,
            )
            try:
                reads = Reads(
                    self._reader,
                    totals,
                    iteration.stop,
                    task_bytes=self._read_bytes,
                    advice=self._advice,
                    waits=self._medium.kind in WAITING,
                    scratch=self._scratch,
                )
                source = self._source(epoch, first, iteration, reads)
                numbers = range(first, self._batching.n_batches)
                iteration.start(partial(batches, source, numbers, self._space, self._columns))
                return BatchIterator(
                    iteration,
                    len(numbers),
                    timeout_s=self._options.batch_timeout_s,
                    # The transport counts each request that has come in, before the read that it is a part of is finished.
                    progress=lambda: (totals.bytes_read, self._reader.transport.counters.bytes_read),
                    advance=partial(self._advance, epoch),
                )
            except BaseException:
                iteration.close()
                self._resume_at = first
                raise

    @abstractmethod
    def _divide(self) -> None:
        """Choose what depends on rank and world."""

    @abstractmethod
    def _source(self, epoch: int, first: int, iteration: Iteration, reads: Reads) -> Callable[[], BatchSource]:
        """Makes what brings the batches of an epoch from number `first` on; called in the thread that makes batches."""

    @abstractmethod
    def _forget_memory(self) -> None:
        """Give back the memory of batches."""

    def _advance(self, epoch: int, is_over: bool) -> None:
        """Note that a batch was handed out, or that the epoch is over."""
        self._epoch, self._batch = (epoch + 1, 0) if is_over else (epoch, self._batch + 1)

    def close(self) -> None:
        """End the current iteration and its threads, and give back all memory. The loader can be used again."""
        self._end_iteration()
        self._forget_memory()
        self._scratch.clear()  # an error's traceback may refer to it
        self._scratch = deque()  # a thread that hangs may append to the other one

    @property
    def is_iterating(self) -> bool:
        """Whether threads of this process make batches."""
        iteration = self._iteration
        return iteration is not None and iteration.pid == os.getpid() and not iteration.stop.is_set()

    def _end_iteration(self) -> None:
        """End the threads, also where the iterator was dropped: they must have ended before memory is used again."""
        if self._iteration is not None:
            self._iteration.close()

    def shutdown(self) -> None:
        """The same as `close`: the name that older training scripts call."""
        self.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    # -- looking into it -----------------------------------------------------------------------------------------------

    def metrics(self) -> Metrics:
        """Measures of the latest iteration, since it began."""
        return self._totals.metrics(0 if self._iteration is None else self._iteration.n_ready)

    def explain(self) -> Explanation:
        """What will be read, how, and what it costs; nothing is read for it. `print` it."""
        self._look_at_ranks()
        plan, n_vectors = self._plan(), self.batch_size * self._space.vectors_per_row
        # A client keeps an answer until it is copied, and rows that are not read in their order are read to memory between.
        is_copied = self._medium.kind == "remote" or not plan.into_batches
        drops_pages = self._advice is not None and self._advice.drops_pages
        return Explanation(
            n_rows=self.n_samples,
            n_batches=self._batching.n_batches,
            medium=self._medium.kind,
            reason=self._medium.reason,
            engine=self._transports[-1].name,
            n_threads=self.n_threads,
            extent_bytes=plan.extent_bytes,
            cost=epoch_cost(
                plan,
                self._reader,
                self._space,
                task_bytes=self._read_bytes,
                world=self._world,
                waits=self._medium.kind in WAITING,
            ),
            first_batch_bytes=plan.first_batch_bytes,
            keeps_pages=None if self._medium.path is None else not drops_pages,
            window_bytes=plan.window_bytes,
            in_flight_bytes=plan.ahead_bytes + (self.n_threads * self._read_bytes if is_copied else 0),
            buffer_bytes=plan.n_buffers * n_vectors * self.d_model * self._rows.dtype.itemsize,
            n_partitions=plan.n_partitions,
            examples_per_block=plan.examples_per_block,
            mixing=plan.mixing,
        )

    @abstractmethod
    def _plan(self) -> Plan:
        """The reads of an epoch of this kind of loader."""

    # -- state ---------------------------------------------------------------------------------------------------------

    def state_dict(self) -> dict[str, object]:
        """Where the loader stands: JSON, below 1 kB. Counts batches that were handed out, not those made ahead.

        With several ranks every rank's state is the same.
        """
        self._look_at_ranks()
        state = {**self._identity(), "epoch": self._epoch, "batch": self._batch, **self._order_state()}
        return state if self.scale is None else {**state, "scale": self.scale}

    def load_state_dict(self, state: Mapping[str, object]) -> None:
        """Continue where `state_dict` was taken: the next iteration begins with the batch that came after it.

        An iteration under way is ended. The state may come from another number of ranks, as long as ranks times batch
        size is the same, and the ranks divide `n_partitions` of a shuffled loader.

        Raises:
            ArgumentError: the state is of other rows, another batch size, seed or version; the message says which.
        """
        self._look_at_ranks(begins=True)
        epoch, batch, scale = self._check(state)
        self._adopt(state)
        self._end_iteration()
        self._loaded, self._scale = dict(state), scale
        # An epoch is over with its last batch.
        self._epoch, self._batch = (epoch + 1, 0) if batch == self._batching.n_batches > 0 else (epoch, batch)
        self._resume_at = self._batch

    @property
    def is_bound(self) -> bool:
        """Whether only as many ranks can go on from here: within an epoch, or where a state was loaded."""
        return self._batch > 0 or self._loaded is not None

    def stand_as(self, state: Mapping[str, object], *, is_bound: bool) -> None:
        """Stand where the loader stood that a pickle was made of.

        Args:
            state: Its state.
            is_bound: Its `is_bound`; else other ranks begin its epoch.
        """
        self._look_at_ranks()
        if is_bound or same_value(state.get("global_batch_size"), self._batching.batch_size):
            self.load_state_dict(state)
        else:
            self.set_epoch(whole_number(state, "epoch", 0))
        if not is_bound:
            self._loaded = None

    def _given(self) -> dict[str, object]:
        """What the loader was made with beside rows and options."""
        return {"labels": self._labels, "make_buffer": self._make_buffer}

    def __reduce__(self) -> tuple[object, ...]:
        """A pickle is a loader of the same rows and options that stands where this one does; threads and batches stay here."""
        return pickled(self, self._rows, self._options, self._given())

    def _check(self, state: Mapping[str, object]) -> tuple[int, int, float | None]:
        """(epoch, batch, scale) of a state of this loader."""
        scales = bool(self._options.scale_norm)
        return checked(state, self._identity(), n_batches=self._batching.n_batches, scales=scales)

    def _identity(self) -> dict[str, object]:
        """What has to be equal for a state to make sense."""
        return {
            "version": STATE_VERSION,
            "kind": self.kind,
            "rows": fingerprint(self._rows),
            "n_rows": self.n_samples,
            "global_batch_size": self._batching.batch_size,
            "drop_last": self.drop_last,
        }

    @abstractmethod
    def _order_state(self) -> dict[str, object]:
        """What a state says about the order."""

    @abstractmethod
    def _adopt(self, state: Mapping[str, object]) -> None:
        """Take over what a state says about the order."""
