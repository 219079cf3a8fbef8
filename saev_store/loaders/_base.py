"""What both loaders share: epochs, state, iteration, closing."""

from __future__ import annotations

import os
import threading
import time
from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Callable, Iterable, Mapping
from types import TracebackType
from typing import Self

import numpy as np
import numpy.typing as npt

from saev_store.core.layout import IntArray
from saev_store.core.rows import Labels
from saev_store.errors import ArgumentError
from saev_store.loaders._explain import Explanation, Plan, epoch_cost
from saev_store.loaders._identity import STATE_VERSION, checked, fingerprint, norm_scale
from saev_store.loaders._iteration import BatchContext, BatchIterator, Iteration, LoaderRuntime, Metrics, Totals
from saev_store.loaders._medium import Advice, advice_for, medium_of, unwrapped
from saev_store.loaders._reads import Reads, Scratch
from saev_store.loaders._ring import Allocate
from saev_store.loaders._rows import Batch, BatchMaker
from saev_store.loaders._workers import JOIN_S, n_cpus
from saev_store.loaders.cache import CachedTransport
from saev_store.loaders.options import ReadOptions, rank_and_world
from saev_store.order import Batching, Blocks
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
    """

    kind = ""

    def __init__(
        self, rows: Selection, options: ReadOptions, labels: Labels | None, make_buffer: Allocate | None
    ) -> None:
        space = rows.space
        if labels is not None and space.tokens.start + space.tokens.count <= space.layout.n_special_tokens:
            labels = None  # special tokens only: they have no labels
        self._rows, self._space, self._labels, self._options = rows, space, labels, options
        self._reader = rows.reader
        self._medium = medium_of(self._reader.transport, space.layout, options.medium)
        most = max(1, n_cpus() - self._n_busy) if self._medium.kind in _BUSY and self._n_busy else 64
        self._n_threads = int(options.n_threads or min(_N_THREADS[self._medium.kind], most))
        self._read_bytes = int(options.read_bytes or _TASK_BYTES[self._medium.kind])
        self._prefetch = int(options.prefetch_batches or 2)
        self._scale = None if isinstance(options.scale_norm, bool) else float(options.scale_norm)
        self._make_buffer = make_buffer
        self._runtime: LoaderRuntime | None = None
        self._lock = threading.Lock()
        self._iteration: Iteration | None = None
        self._scratch: Scratch = deque()
        self._epoch, self._batch, self._resume_at = 0, 0, 0
        self._totals = Totals(space.layout.vector_nbytes)
        #: The state that was loaded last.
        self._loaded: Mapping[str, object] | None = None
        self._share_out(*rank_and_world(options.rank, options.world))

    # -- ranks ---------------------------------------------------------------------------------------------------------

    def _share_out(self, rank: int, world: int) -> None:
        """Cut the rows for this rank of a world."""
        self._rank, self._world = rank, world
        batch_size = int(self._options.batch_size) * world
        self._batching = Batching(len(self._space), batch_size, bool(self._options.drop_last), world)

    def _look_at_ranks(self) -> None:
        """Cut the rows anew where rank or world are other ones by now, such as after torch.distributed was initialised."""
        ranks = rank_and_world(self._options.rank, self._options.world)
        if ranks != (self._rank, self._world):
            self._share_out(*ranks)
            if self._loaded is not None:
                self._check(self._loaded)
                self._adopt(self._loaded)

    # -- sizes ---------------------------------------------------------------------------------------------------------

    def __len__(self) -> int:
        """Batches of an epoch, the same on every rank."""
        self._look_at_ranks()
        return len(self._batching)

    @property
    def n_batches(self) -> int:
        """Batches of an epoch, the same on every rank."""
        return len(self)

    @property
    def n_samples(self) -> int:
        """Rows of the selection, over all ranks."""
        return len(self._space)

    @property
    def batch_size(self) -> int:
        """Rows of a full batch of this rank."""
        return int(self._options.batch_size)

    @property
    def rank(self) -> int:
        """This process among `world`, as it is now."""
        self._look_at_ranks()
        return self._rank

    @property
    def world(self) -> int:
        """How many ranks share the work, as it is now."""
        self._look_at_ranks()
        return self._world

    @property
    def n_threads(self) -> int:
        """Reads in flight at most."""
        return self._n_threads

    @property
    def drop_last(self) -> bool:
        """Whether a last batch that is not full is left out."""
        return self._batching.drop_last

    @property
    def d_model(self) -> int:
        """Numbers of a vector."""
        return self._space.layout.d_model

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
        if not isinstance(epoch, (int, np.integer)) or isinstance(epoch, bool) or epoch < 0:
            raise ArgumentError(f"epoch is {epoch!r}; it must be an integer of at least 0", where="epoch")
        self._end_iteration()
        self._epoch, self._batch, self._resume_at = int(epoch), 0, 0

    def __iter__(self) -> BatchIterator:
        """The epoch's batches; after `load_state_dict`, those that had not been handed out.

        Raises (from the iterator):
            CorruptShardError, TransportError: a shard could not be read; the message names it.
            DeadlineError: no batch within `batch_timeout_s`.
        """
        with self._lock:
            self._end_iteration()
            self._look_at_ranks()
            if self._runtime is not None and self._runtime.has_strays:
                # A read that hangs in the system may still be writing there.
                self._forget_memory()
                self._scratch = deque()
            epoch, first, self._resume_at = self._epoch, self._resume_at, 0
            self._batch = first
            totals = self._totals = Totals(self._space.layout.vector_nbytes)
            # A transport around another one may wait for whatever it likes.
            transport = self._reader.transport
            copies = self._medium.kind in _BUSY and unwrapped(transport) is transport
            runtime = self._runtime = LoaderRuntime(self._n_threads, totals, helps=copies)
            try:
                return self._begin(epoch, first, runtime)
            except BaseException:
                runtime.close(time.monotonic() + JOIN_S)
                self._resume_at = first
                raise

    def _begin(self, epoch: int, first: int, runtime: LoaderRuntime) -> BatchIterator:
        layout = self._space.layout
        advice = advice_for(self._medium.path, layout, self._options.keep_pages) if self._is_strided else None
        if advice is not None:
            runtime.on_close = advice.close
        self._tell_caches()
        reads = Reads(
            self._reader,
            runtime.totals.reads,
            runtime.stop,
            task_bytes=self._read_bytes,
            advice=advice,
            waits=self._medium.waits,
            scratch=self._scratch,
        )
        context = BatchContext(reads, runtime, BatchMaker(self._space, self._labels, self.scale))
        n_batches = len(self._batching)
        make = self._batches(epoch, first, n_batches, context)
        iteration = self._iteration = Iteration(runtime, make, self._prefetch)
        return BatchIterator(
            iteration,
            n_batches - first,
            timeout_s=float(self._options.batch_timeout_s),
            # The transport counts each request that has come in, before the read that it is a part of is finished.
            progress=lambda: (runtime.totals.reads.n_bytes, self._reader.transport.counters.bytes_read),
            on_batch=self._count,
            on_end=lambda: self._end(epoch),
        )

    def _tell_caches(self) -> None:
        """What will be read, for those who decide what to keep."""
        layout, blocks = self._space.layout, Blocks(self._space)

        def wanted(shard: IntArray, vector: IntArray) -> npt.NDArray[np.bool_]:
            in_shard, within = np.divmod(vector, np.int64(layout.vectors_per_example))
            example = shard * layout.examples_per_shard + in_shard
            return blocks.numbers_of(example, within // layout.tokens_per_example) >= 0

        transport: object = self._reader.transport
        while transport is not None:
            if isinstance(transport, CachedTransport):
                transport.expect(wanted, layout)
            transport = getattr(transport, "inner", None)

    #: Threads, besides those that read, that have a core's worth to do.
    _n_busy = 0

    @property
    def _is_strided(self) -> bool:
        """Whether reads leave out what lies between them."""
        layout = self._space.layout
        return len(self._space.layer_idx) < layout.n_layers or self._space.tokens.count < layout.tokens_per_example

    @abstractmethod
    def _batches(self, epoch: int, first: int, stop: int, context: BatchContext) -> Callable[[], Iterable[Batch]]:
        """Makes batches number `first` to `stop` of an epoch."""

    @abstractmethod
    def _forget_memory(self) -> None:
        """Give back the memory of batches."""

    def _count(self) -> None:
        self._batch += 1

    def _end(self, epoch: int) -> None:
        self._epoch, self._batch = epoch + 1, 0

    def close(self) -> None:
        """End the current iteration and its threads, and give back all memory. The loader can be used again."""
        self._end_iteration()
        self._forget_memory()
        self._scratch = deque()

    @property
    def is_iterating(self) -> bool:
        """Whether threads of this process make batches."""
        iteration = self._iteration
        return iteration is not None and iteration.pid == os.getpid() and not iteration.is_closed

    def _end_iteration(self) -> None:
        # Also where its iterator was forgotten: the threads must have ended before memory is used again.
        if self._iteration is not None:
            self._iteration.close()
        self._iteration = None

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
        iteration = self._iteration
        return self._totals.metrics(len(iteration.handoff) if iteration is not None else 0)

    def explain(self) -> Explanation:
        """What will be read, how, and what it costs; nothing is read for it. `print` it."""
        self._look_at_ranks()
        plan, layout = self._plan(), self._space.layout
        forgets = self._is_strided and Advice.forgets(layout, self._options.keep_pages)
        # A client keeps an answer until it is copied, and rows that are not read in their order are read to memory between.
        is_copied = self._medium.kind == "remote" or plan.mixing is not None
        return Explanation(
            n_rows=len(self._space),
            n_batches=len(self),
            medium=self._medium.kind,
            reason=self._medium.reason,
            engine=self.transport_name,
            n_threads=self._n_threads,
            extent_bytes=plan.extent_bytes,
            cost=epoch_cost(
                plan,
                self._reader,
                self._space,
                task_bytes=self._read_bytes,
                world=self._world,
                waits=self._medium.waits,
            ),
            keeps_pages=None if self._medium.path is None else not forgets,
            window_bytes=plan.window_bytes,
            in_flight_bytes=plan.ahead_bytes + (self._n_threads * self._read_bytes if is_copied else 0),
            buffer_bytes=plan.n_buffers * self.batch_size * layout.vector_nbytes,
            n_partitions=plan.n_partitions,
            examples_per_block=plan.examples_per_block,
            mixing=plan.mixing,
        )

    @abstractmethod
    def _plan(self) -> Plan:
        """What only one kind of loader knows about its reads."""

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
        size is the same.

        Raises:
            ArgumentError: the state is of other rows, another batch size, seed or version; the message says which.
        """
        self._look_at_ranks()
        epoch, batch, scale = self._check(state)
        self._adopt(state)
        self._end_iteration()
        self._loaded, self._scale = dict(state), scale
        # An epoch is over with its last batch.
        self._epoch, self._batch = (epoch + 1, 0) if batch == len(self) > 0 else (epoch, batch)
        self._resume_at = self._batch

    def _check(self, state: Mapping[str, object]) -> tuple[int, int, float | None]:
        """(epoch, batch, scale) of a state of this loader."""
        scales = bool(self._options.scale_norm)
        return checked(state, self._identity(), n_batches=len(self._batching), scales=scales)

    def _identity(self) -> dict[str, object]:
        """What has to be equal for a state to make sense."""
        return {
            "version": STATE_VERSION,
            "kind": self.kind,
            "rows": fingerprint(self._space),
            "n_rows": len(self._space),
            "global_batch_size": self._batching.batch_size,
            "drop_last": self.drop_last,
        }

    def _order_state(self) -> dict[str, object]:
        return {}

    def _adopt(self, state: Mapping[str, object]) -> None:  # noqa: B027 - not abstract: the ordered loader has no order in its state
        """Take over what a state says about the order."""

    @property
    def transport_name(self) -> str:
        """The engine that reads."""
        return unwrapped(self._reader.transport).name
