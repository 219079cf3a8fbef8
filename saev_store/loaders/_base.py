"""What both loaders share: epochs, state, iteration, closing."""

from __future__ import annotations

import math
import os
import threading
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping
from types import TracebackType
from typing import Self, TypedDict, get_args

import numpy as np
import numpy.typing as npt

from saev_store.errors import ArgumentError
from saev_store.layout import IntArray
from saev_store.loaders._advice import Advice, advice_for
from saev_store.loaders._batches import Equipment
from saev_store.loaders._dressing import Dressing
from saev_store.loaders._explain import Explanation, Plan, epoch_cost
from saev_store.loaders._medium import Kind, medium_of, unwrapped
from saev_store.loaders._memory import Allocate, HostWindow, Outputs, WindowMemory, allocate
from saev_store.loaders._metrics import Metrics, Tally
from saev_store.loaders._reads import Reads
from saev_store.loaders._ring import BatchRing
from saev_store.loaders._run import Batch, BatchIterator, Machinery, Run
from saev_store.loaders._scale import norm_scale
from saev_store.loaders._state import STATE_VERSION, checked, fingerprint
from saev_store.loaders._workers import JOIN_S, n_cpus
from saev_store.loaders.cache import CachedTransport
from saev_store.order import Batching, Blocks
from saev_store.rows import Labels
from saev_store.selected import Selection

#: Reading threads by what the shards lie on; memory is bound by its bandwidth, everything else by waiting.
_N_THREADS = {"memory": 4, "cached": 4, "flash": 16, "disk": 8, "parallel": 16, "remote": 32}
#: Copying out of memory takes a core: more threads than cores would take it from a thread that gathers.
_BUSY = ("memory", "cached")
#: What one task reads: small enough to share the work, large enough for the medium, and for Python, which only one thread
#: runs at a time.
_TASK_BYTES = {
    "memory": 4 << 20, "cached": 4 << 20, "flash": 2 << 20, "disk": 8 << 20, "parallel": 8 << 20, "remote": 8 << 20,
}  # fmt: skip


class Options(TypedDict, total=False):
    """What both loaders take; `OrderedLoader` explains each."""

    batch_size: int
    drop_last: bool
    labels: Labels | None
    rank: int
    world: int
    n_threads: int | None
    prefetch_batches: int
    batch_timeout_s: float
    scale_norm: bool | float
    medium: Kind | None
    read_bytes: int | None
    keep_pages: bool | None
    make_buffer: Allocate | None


class Loader(ABC):
    """Batches of a selection's rows, made ahead of time by threads. Use `OrderedLoader` or `ShuffledLoader`.

    A loader is iterated once per epoch: `for batch in loader`. Iterating again ends the iteration before. It is a context
    manager; `close` ends all threads. Loaders may be inherited by forked processes, iterators may not.
    """

    kind = ""

    def __init__(
        self,
        rows: Selection,
        *,
        batch_size: int = 16_384,
        drop_last: bool = False,
        labels: Labels | None = None,
        rank: int = 0,
        world: int = 1,
        n_threads: int | None = None,
        prefetch_batches: int = 2,
        batch_timeout_s: float = 30.0,
        scale_norm: bool | float = False,
        medium: Kind | None = None,
        read_bytes: int | None = None,
        keep_pages: bool | None = None,
        make_buffer: Allocate | None = None,
    ) -> None:
        for name, value, low in (
            ("batch_size", batch_size, 1), ("prefetch_batches", prefetch_batches, 1), ("world", world, 1), ("rank", rank, 0),
            ("n_threads", n_threads or 1, 1), ("read_bytes", read_bytes or 1, 1),
        ):  # fmt: skip
            if not isinstance(value, (int, np.integer)) or isinstance(value, bool) or value < low:
                raise ArgumentError(f"{name} is {value!r}; it must be an integer of at least {low}", where=name)
        if rank >= world:
            raise ArgumentError(f"rank is {rank} in a world of {world}; ranks count from 0", where="rank")
        if not batch_timeout_s > 0:
            raise ArgumentError(f"batch_timeout_s is {batch_timeout_s}; it must be positive", where="batch_timeout_s")
        space = rows.space
        if labels is not None and space.tokens.start + space.tokens.count <= space.layout.n_special_tokens:
            labels = None  # special tokens only: they have no labels
        self._rows, self._space, self._labels = rows, space, labels
        self._rank, self._world = int(rank), int(world)
        self._batching = Batching(len(space), int(batch_size) * self._world, bool(drop_last), self._world)
        if medium is not None and medium not in get_args(Kind):
            raise ArgumentError(f"medium is {medium!r}; it must be one of {', '.join(get_args(Kind))}", where="medium")
        self._medium = medium_of(rows.reader.transport, space.layout, medium)
        self._keep_pages = keep_pages
        most = max(1, n_cpus() - self._n_busy) if self._medium.kind in _BUSY and self._n_busy else 64
        self._n_threads = int(n_threads or min(_N_THREADS[self._medium.kind], most))
        self._read_bytes = int(read_bytes or _TASK_BYTES[self._medium.kind])
        # A core is left to the thread that makes batches, and one to the consumer.
        self._n_gather = min(3, max(0, n_cpus() - 2))
        self._prefetch, self._timeout_s = int(prefetch_batches), float(batch_timeout_s)
        self._scale_norm, self._scale = bool(scale_norm), None
        if not isinstance(scale_norm, bool):
            if not (math.isfinite(scale_norm) and scale_norm > 0):
                raise ArgumentError(
                    f"scale_norm is {scale_norm}; it must be True, False or positive", where="scale_norm"
                )
            self._scale = float(scale_norm)
        self._make_buffer = make_buffer
        self._outputs: Outputs | None = None
        self._window: WindowMemory | None = None
        self._ring: BatchRing | None = None
        self._machinery: Machinery | None = None
        self._lock = threading.Lock()
        self._run: Run | None = None
        self._epoch, self._batch, self._resume_at = 0, 0, 0
        self._tally = Tally(rows.space.layout.vector_nbytes)

    # -- sizes ---------------------------------------------------------------------------------------------------------

    def __len__(self) -> int:
        """Batches of an epoch, the same on every rank."""
        return len(self._batching)

    @property
    def n_batches(self) -> int:
        """Batches of an epoch, the same on every rank."""
        return len(self._batching)

    @property
    def n_samples(self) -> int:
        """Rows of the selection, over all ranks."""
        return len(self._space)

    @property
    def batch_size(self) -> int:
        """Rows of a full batch of this rank."""
        return self._batching.batch_size // self._world

    @property
    def rank(self) -> int:
        return self._rank

    @property
    def world(self) -> int:
        """How many ranks share the work."""
        return self._world

    @property
    def n_threads(self) -> int:
        """Reads in flight at most."""
        return self._n_threads

    @property
    def drop_last(self) -> bool:
        return self._batching.drop_last

    @property
    def d_model(self) -> int:
        return self._space.layout.d_model

    @property
    def scale(self) -> float | None:
        """What activations are multiplied by with `scale_norm`, else None."""
        if self._scale_norm and self._scale is None:
            self._scale = norm_scale(self._rows)
        return self._scale

    # -- iterating -----------------------------------------------------------------------------------------------------

    @property
    def epoch(self) -> int:
        """The epoch that `iter(loader)` gives; it advances by itself when an epoch has been handed out."""
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
            if self._machinery is not None and self._machinery.has_strays:
                # A read that hangs in the system may still be writing there.
                self._outputs = self._window = self._ring = None
            epoch, first, self._resume_at = self._epoch, self._resume_at, 0
            self._batch = first
            tally = self._tally = Tally(self._space.layout.vector_nbytes)
            # A transport around another one may wait for whatever it likes.
            transport = self._rows.reader.transport
            copies = self._medium.kind in _BUSY and unwrapped(transport) is transport
            machinery = self._machinery = Machinery(self._n_threads, self._n_gather, tally, helps=copies)
            try:
                return self._begin(epoch, first, machinery)
            except BaseException:
                machinery.close(time.monotonic() + JOIN_S)
                self._resume_at = first
                raise

    def _begin(self, epoch: int, first: int, machinery: Machinery) -> BatchIterator:
        layout = self._space.layout
        advice = advice_for(self._medium.path, layout, self._keep_pages) if self._is_strided else None
        if advice is not None:
            machinery.on_close = advice.close
        self._tell_caches()
        reads = Reads(
            self._rows.reader,
            machinery.tally.reads,
            machinery.stop,
            task_bytes=self._read_bytes,
            advice=advice,
            waits=self._medium.waits,
        )
        if self._outputs is None:
            shape = (min(self.batch_size, max(len(self._space), 1)), self.d_model)
            self._outputs = Outputs(shape, self._prefetch + self._n_extra_buffers + 3, self._make_buffer or allocate)
        self._window = self._window or self._new_window(self._outputs)
        self._ring = self._ring or BatchRing(self._outputs)
        dressing = Dressing(self._space, self._labels, self.scale)
        equipment = Equipment(reads, machinery, self._outputs, self._window, self._ring, dressing)
        n_batches, make = len(self), self._batches(epoch, equipment)
        run = self._run = Run(machinery, lambda: make(first, n_batches), self._prefetch)
        return BatchIterator(run, timeout_s=self._timeout_s, on_batch=self._count, on_end=lambda: self._end(epoch))

    def _new_window(self, outputs: Outputs) -> WindowMemory:
        return HostWindow(outputs)

    def _tell_caches(self) -> None:
        """What will be read, for those who decide what to keep."""
        layout, blocks = self._space.layout, Blocks(self._space)

        def wanted(shard: IntArray, vector: IntArray) -> npt.NDArray[np.bool_]:
            in_shard, within = np.divmod(vector, np.int64(layout.vectors_per_example))
            example = shard * layout.examples_per_shard + in_shard
            return blocks.numbers_of(example, within // layout.tokens_per_example) >= 0

        transport: object = self._rows.reader.transport
        while transport is not None:
            if isinstance(transport, CachedTransport):
                transport.expect(wanted, layout)
            transport = getattr(transport, "inner", None)

    #: Threads, besides those that read, that have a core's worth to do.
    _n_busy = 0
    #: Output buffers in use besides those that are ready and the consumer's.
    _n_extra_buffers = 1

    @property
    def _is_strided(self) -> bool:
        """Whether reads leave out what lies between them."""
        layout = self._space.layout
        return len(self._space.layer_idx) < layout.n_layers or self._space.tokens.count < layout.tokens_per_example

    @abstractmethod
    def _batches(self, epoch: int, equipment: Equipment) -> Callable[[int, int], Iterator[Batch]]:
        """Makes batches number `first` to `stop` of an epoch."""

    def _count(self) -> None:
        self._batch += 1

    def _end(self, epoch: int) -> None:
        self._epoch, self._batch = epoch + 1, 0

    def close(self) -> None:
        """End the current iteration and its threads, and give back all memory. The loader can be used again."""
        self._end_iteration()
        self._outputs = self._window = self._ring = None

    @property
    def _is_iterating(self) -> bool:
        """Whether threads of this process make batches."""
        run = self._run
        return run is not None and run.pid == os.getpid() and not run.is_closed

    def _end_iteration(self) -> None:
        # Also where its iterator was forgotten: the threads must have ended before memory is used again.
        if self._run is not None:
            self._run.close()
        self._run = None

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
        run = self._run
        return self._tally.metrics(len(run.handoff) if run is not None else 0)

    def explain(self) -> Explanation:
        """What will be read, how, and what it costs; nothing is read for it. `print` it."""
        plan, layout = self._plan(), self._space.layout
        forgets = self._is_strided and Advice.forgets(layout, self._keep_pages)
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
                self._rows.reader,
                self._space,
                task_bytes=self._read_bytes,
                world=self._world,
                waits=self._medium.waits,
            ),
            keeps_pages=None if self._medium.path is None else not forgets,
            window_bytes=plan.window_bytes,
            # A client keeps an answer until it is copied; batch slots are filled from memory that was read into.
            in_flight_bytes=plan.ahead_bytes
            + (self._n_threads * self._read_bytes if self._medium.kind == "remote" or plan.slots == "batch" else 0),
            buffer_bytes=plan.n_buffers * self.batch_size * layout.vector_nbytes,
            slots=plan.slots,
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
        state = {**self._identity(), "epoch": self._epoch, "batch": self._batch, **self._order_state()}
        return state if self.scale is None else {**state, "scale": self.scale}

    def load_state_dict(self, state: Mapping[str, object]) -> None:
        """Continue where `state_dict` was taken: the next iteration begins with the batch that came after it.

        An iteration under way is ended. The state may come from another number of ranks, as long as ranks times batch
        size is the same.

        Raises:
            ArgumentError: the state is of other rows, another batch size, seed or version; the message says which.
        """
        epoch, batch, scale = checked(state, self._identity(), n_batches=len(self), scales=self._scale_norm)
        self._adopt(state)
        self._end_iteration()
        self._scale = scale
        self._epoch, self._batch, self._resume_at = epoch, batch, batch

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

    def _adopt(self, state: Mapping[str, object]) -> None:  # noqa: B027 - storage order has nothing to adopt
        """Take over what a state says about the order."""

    @property
    def transport_name(self) -> str:
        """The engine that reads."""
        return unwrapped(self._rows.reader.transport).name
