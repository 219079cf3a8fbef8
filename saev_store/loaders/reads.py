"""Pools that are read in threads: ranges of shards, the slot of each row that they hold, memory, and the columns beside the vectors."""

from __future__ import annotations

import threading
import time
import weakref
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import CancelledError, Future, ThreadPoolExecutor, wait
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from saev_store.core.dtypes import converted
from saev_store.core.layout import IntArray, shard_name
from saev_store.core.rows import RowSpace
from saev_store.core.token_arrays import NONE, shown_names
from saev_store.errors import ArgumentError, DeadlineError, NotFoundError, brief
from saev_store.order import Pool
from saev_store.store.selection import Selection
from saev_store.transport.checks import Buffer

Bytes = npt.NDArray[np.uint8]
#: Makes the memory of a pool, such as pinned memory, from its number of bytes.
Allocate = Callable[[int], Bytes]
#: At most so many pools exist at a time: the current one, the next one, and one that kept batches hold back.
MOST_POOLS = 3
#: Seconds between two looks for memory that abandoned reads hold, and whether the iteration was closed.
_LOOK_S, _SLICE_S = 0.02, 0.25
#: What one task reads, about: small enough to share the work, large enough for a request.
TASK_BYTES = 4 << 20
#: Tokens that are left out are read along if there are fewer bytes of them than this in a row.
_GAP_BYTES = 64 << 10
#: Memory that each thread reads local files to, before rows are copied to their slots.
_of_thread = threading.local()
_LABELS = "token_labels"
#: Other keys of a batch or of an example, present and older ones.
_TAKEN = frozenset({
    "act", "act_a", "act_b", "example_idx", "image_i", "layer", "layer_key_idx", "patch_i", "token_idx", "token_label", _LABELS,
})  # fmt: skip
Column = npt.NDArray[np.generic]


@dataclass(frozen=True, eq=False)
class Side:
    """The vectors of one selection in the memory of a pool.

    Attributes:
        name: Their key in a batch.
        rows: The selection.
        first_byte: Where they begin in the memory of a pool.
        row_nbytes: Bytes of a row there.
    """

    name: str
    rows: Selection
    first_byte: int
    row_nbytes: int

    def vectors(self, memory: Bytes, n_rows: int) -> npt.NDArray[np.generic]:
        """Return the rows in the memory of a pool: a view (n, d_model), or (n, layers, d_model) if layers are stacked."""
        end = self.first_byte + n_rows * self.row_nbytes
        return memory[self.first_byte : end].view(self.rows.dtype).reshape(n_rows, *self.rows.shape[1:])


@dataclass(frozen=True, eq=False)
class ReadTask:
    """Ranges of one shard, and the rows of a pool that they hold.

    Attributes:
        side: What is read.
        pool: The pool that is filled.
        shard_idx: The shard.
        highest: The last example that is read, counted in the shard.
        starts: First byte of each range: int64 (ranges, layers of a row).
        n_cells: Vectors of each range: int64 (ranges,).
        first: First row of each range, in the order of the pool's pieces: int64 (ranges,).
        n_rows: Rows of each range: int64 (ranges,).
    """

    side: Side
    pool: Pool
    shard_idx: int
    highest: int
    starts: IntArray
    n_cells: IntArray
    first: IntArray
    n_rows: IntArray

    def run(self, memory: Bytes, stop: threading.Event) -> None:
        """Read to the memory of a pool, unless `stop` is set.

        Raises:
            CorruptShardError: the shard is missing, short, or lost.
            TransportError: it cannot be read.
        """
        if stop.is_set():
            return
        side, reader, path = self.side, self.side.rows.reader, shard_name(self.shard_idx)
        reader.check(self.shard_idx, self.highest)
        starts: list[int] = self.starts.reshape(-1).tolist()
        is_plain = side.rows.dtype == reader.dtype and self.starts.shape[1] == 1 and (self.n_rows == self.n_cells).all()
        try:
            if self.pool.in_order and is_plain:  # rows of a range are neighbours in the pool too
                first = side.first_byte + self.pool.slot[self.first] * side.row_nbytes
                places = zip(first.tolist(), (first + self.n_rows * side.row_nbytes).tolist(), strict=True)
                reader.transport.readinto(path, starts=starts, buffers=[memory.data[at:end] for at, end in places])
                return
            ends: list[int] = (self.starts + self.n_cells[:, None] * reader.layout.vector_nbytes).reshape(-1).tolist()
            nbytes = int(self.n_cells.max()) * reader.layout.vector_nbytes
            scratch: Bytes | None = getattr(_of_thread, "scratch", None)
            if scratch is None or len(scratch) < nbytes:
                scratch = _of_thread.scratch = np.empty(nbytes, np.uint8)
            self._scatter(reader.transport.load_ranges(path, starts=starts, ends=ends, memory=scratch.data), memory)
        except NotFoundError:
            reader.check_size(self.shard_idx)
            raise

    def _scatter(self, found: Iterable[Buffer], memory: Bytes) -> None:
        """Copy the rows of all ranges, each with its layers, to their slots."""
        stored, pool, parts = self.side.rows.reader.dtype, self.pool, iter(found)
        out = self.side.vectors(memory, len(pool.slot))
        d_model = out.shape[-1]
        layers = out.reshape(len(out), -1, d_model).swapaxes(0, 1)
        bounds = zip(self.first.tolist(), (self.first + self.n_rows).tolist(), self.n_cells.tolist(), strict=True)
        with np.errstate(over="ignore", invalid="ignore"):  # of numbers that a narrower dtype does not hold
            for first, end, n_cells in bounds:
                slots = pool.slot[first:end]
                to = slice(slots[0], slots[-1] + 1) if pool.in_order else slots
                for targets in layers:
                    vectors = np.frombuffer(next(parts), stored).reshape(n_cells, d_model)
                    if end - first < n_cells:
                        vectors = vectors[pool.cell[first:end] - pool.cell[first]]
                    # NumPy converts on the way, without holding other threads up; float16 it widens slowly.
                    targets[to] = converted(vectors, out.dtype) if stored == np.float16 else vectors


def plan_reads(pool: Pool, side: Side) -> list[ReadTask]:
    """Return what has to be read to fill a pool with the rows of a side."""
    space, cell, ends = side.rows.space, pool.cell, np.cumsum(pool.counts)
    layout, row_nbytes = space.layout, space.row_nbytes
    if not len(cell):
        return []
    # A range begins where its block does, after a large gap, and where the one before would be longer than a task.
    is_first = np.zeros(len(cell), np.bool_)
    is_first[np.append(0, ends[:-1])] = True
    longest = max(1, TASK_BYTES // row_nbytes)
    if space.ends is not None:
        is_first[1:] |= np.diff(cell) > 1 + _GAP_BYTES // layout.vector_nbytes
    if len(space.tokens) > longest:
        is_first[1:] |= np.diff(cell // longest) != 0
    first = np.flatnonzero(is_first)
    n_rows, piece = np.diff(first, append=len(cell)), np.searchsorted(ends, first, side="right")
    n_cells = cell[first + n_rows - 1] - cell[first] + 1
    example, token = space.example(pool.ordinal[piece]), space.tokens.start + cell[first]
    shards, starts = layout.locate_many(example[:, None], space.row_layers[pool.layer[piece]], token[:, None])
    by_place = np.lexsort((starts[:, 0], shards[:, 0]))
    first, n_rows, n_cells, starts, example = (one[by_place] for one in (first, n_rows, n_cells, starts, example))
    shard, in_shard = np.divmod(example, np.int64(layout.examples_per_shard))
    number = (np.cumsum(n_cells) - n_cells) * row_nbytes // TASK_BYTES
    edges = np.flatnonzero((np.diff(shard) != 0) | (np.diff(number) != 0)) + 1
    return [
        ReadTask(
            side, pool, int(shard[lo]), int(in_shard[lo:hi].max()), starts[lo:hi], n_cells[lo:hi], first[lo:hi], n_rows[lo:hi]
        )
        for lo, hi in zip([0, *edges.tolist()], [*edges.tolist(), len(first)], strict=True)
    ]  # fmt: skip


def allocate(nbytes: int) -> Bytes:
    """Return plain memory. NumPy asks the system for huge pages; pages that are not touched cost nothing."""
    return np.empty(nbytes, np.uint8)


class PoolMemory:
    """Memory for up to three pools of one size.

    Args:
        nbytes: Bytes of a pool.
        make: Makes it.
    """

    def __init__(self, nbytes: int, make: Allocate) -> None:
        self.nbytes, self._make = nbytes, make
        self.n_made = 0
        self.idle: deque[Bytes] = deque()

    def lend(self, most: int) -> Bytes | None:
        """Return the memory of a pool; None if `most` pools exist and something refers to each.

        The memory is used again as soon as no array, tensor or memoryview of it is left.

        Raises:
            ArgumentError: the machine does not have that much memory.
        """
        if self.idle:
            memory = self.idle.popleft()
        elif self.n_made < most:
            try:
                memory = self._make(self.nbytes)
            except (MemoryError, RuntimeError) as error:  # torch raises RuntimeError for pinned memory
                raise ArgumentError(
                    f"a pool of {self.nbytes:,} bytes needs more memory than this machine gives",
                    where="window_bytes",
                    remedy="Use a smaller window_bytes.",
                ) from error
            self.n_made += 1
        else:
            return None
        lent = np.frombuffer(memory.data, np.uint8)
        # NumPy makes the memoryview below the array the base of each array that is derived from it, so all refer to this one.
        weakref.finalize(lent.base, self.idle.append, memory).atexit = False
        return lent


class Plan(NamedTuple):
    """A pool before it is read: what comes with its rows, by slot, and its reads."""

    pool: Pool
    columns: dict[str, IntArray]
    tasks: list[ReadTask]


class Reading(NamedTuple):
    """A pool that is being read to its memory."""

    plan: Plan
    memory: Bytes
    reads: list[Future[None]]


class PoolReader:
    """The threads of one iteration.

    Args:
        plan: Plans a pool, by its number.
        numbers: Numbers of the pools.
        memory: The memory of pools.
        n_threads: How many threads.
        timeout_s: Longest wait without any finished read.
    """

    def __init__(
        self, plan: Callable[[int], Plan], numbers: Iterable[int], memory: PoolMemory, n_threads: int, timeout_s: float
    ) -> None:
        self._memory, self._timeout_s = memory, timeout_s
        self._threads = ThreadPoolExecutor(n_threads, thread_name_prefix="saev-store-loader")
        self._plans = (self._threads.submit(plan, number) for number in numbers)
        self._next = next(self._plans, None)
        #: Set when this is closed.
        self.stop = threading.Event()
        #: The pool that is handed out, and the one that is read in the meantime. A stale iterator holds no memory: `close` forgets them.
        self.current: Reading | None = None
        self.following: Reading | None = None

    @property
    def n_held(self) -> int:
        """Number of earlier pools whose memory is referred to."""
        return self._memory.n_made - len(self._memory.idle) - 1 - (self.following is not None)

    def begin(self, most: int) -> Reading | None:
        """Begin to read the next pool, if there is one, and if there is memory in `most` pools. What was begun before is read first."""
        if self.stop.is_set():
            raise ended()
        if self._next is None or (memory := self._memory.lend(most)) is None:
            return None
        try:
            plan = self._next.result()
            # The pool after it is planned before the reads of this one, which take longer.
            self._next = next(self._plans, None)
            return Reading(plan, memory, [self._threads.submit(task.run, memory, self.stop) for task in plan.tasks])
        except (CancelledError, RuntimeError):  # another thread has closed this
            raise ended() from None

    def finish(self) -> Reading:
        """Return the next pool when it is read.

        Raises:
            DeadlineError: no read has finished for the longest wait, or reads that were abandoned hold the memory.
            ArgumentError: this was closed in the meantime.
            SaevStoreError: of a read.
        """
        is_first, self.current = self.current is None, None
        deadline_s = time.monotonic() + self._timeout_s
        while (reading := self.following or self.begin(MOST_POOLS)) is None:
            if time.monotonic() > deadline_s:
                raise DeadlineError("reads of an earlier iteration hold the memory of the pools", where="loader")
            time.sleep(_LOOK_S)
        # Two pools are enough unless batches are kept, if the caller has let go of the pool before by the second batch.
        most = MOST_POOLS - (reading.plan.pool.n_batches > 1)
        self.current = reading
        self.following = None if is_first else self.begin(most)  # the first batch has a slow line for itself
        left = set(reading.reads)
        while left:
            done, left = wait(left, _SLICE_S, return_when="FIRST_EXCEPTION")
            if self.stop.is_set():
                raise ended()
            for read in done:
                read.result()
            if done:
                deadline_s = time.monotonic() + self._timeout_s
            elif time.monotonic() > deadline_s:
                raise DeadlineError(
                    f"no batch, and no finished read, for {self._timeout_s:g} s",
                    where="loader",
                    remedy="Check the storage, or allow more batch_timeout_s.",
                )
        self.following = self.following or self.begin(most)
        return reading

    def close(self) -> None:
        """End the threads. A read that hangs in the system is abandoned, and its memory is not used again before it returns."""
        self.stop.set()
        self.current = self.following = self._next = None
        self._threads.shutdown(wait=False, cancel_futures=True)


def ended() -> ArgumentError:
    """Return the refusal of an iteration that was ended."""
    return ArgumentError(
        "this iteration has ended: another one began, or the loader was closed",
        where="iter(loader)",
        remedy="Use the latest iterator.",
    )


def layer_columns(space: RowSpace, layer: IntArray) -> dict[str, IntArray]:
    """Return which layers rows are of, fresh int64 (n,): `layer`, their labels, and in stores with hook points `layer_key_idx`.

    Args:
        space: The rows, of several layers that are not stacked.
        layer: The layer of each row, counted among the chosen ones.
    """
    found = {"layer": np.asarray(space.layout.layers, dtype=np.int64)[np.asarray(space.layer_idx)[layer]]}
    if space.layout.hook_points is not None:
        # Counted among the chosen layers, so that a copy of these layers alone gives the same batches.
        found["layer_key_idx"] = layer
    return found


class TokenColumns:
    """The token arrays in the batches of some selections. There are none if only special tokens are selected.

    Arrays are read, or mapped, now, and kept. An array that several selections have is that of the first.

    Args:
        sides: One selection, or two of the same tokens.
        names: Token arrays of their stores. The key of an array is its name, with `tokens_` in front if a batch has a key of that name.
        labels: Have `token_labels`, if a store has labels.

    Raises:
        ArgumentError: the stores have no such array.
        NotFoundError, DocumentError: the file of an array is missing, or has another size than the documents imply.
    """

    def __init__(self, sides: Sequence[Selection], names: Sequence[str], *, labels: bool) -> None:
        #: Values, and what stands for "none", by key.
        self._columns: dict[str, tuple[Column, np.generic]] = {}
        if not names and not labels:
            return
        space = sides[0].space
        stores = [side.token_arrays for side in sides if side.token_arrays is not None]
        known = {name: arrays for arrays in reversed(stores) for name in arrays}
        for name in names:
            if name not in known:
                raise ArgumentError(
                    f"the store has no token array {brief(name)}; it has {list(known)}", where="token_arrays"
                )
        if space.tokens.stop <= space.layout.n_special_tokens:
            return
        shown = shown_names(known, _TAKEN)
        wanted = {shown[name]: name for name in names}
        if labels and "labels" in known:
            wanted[_LABELS] = "labels"
        for key, name in wanted.items():
            array = known[name].declared(name)
            self._columns[key] = (known[name][name], array.numpy_dtype.type(NONE[array.dtype]))

    def at(self, example: IntArray, token: IntArray) -> dict[str, Column]:
        """Return the columns of rows, fresh arrays (n,), by key; for special tokens 255, -1, NaN or false.

        Args:
            example: Examples of the rows, by position.
            token: Their content tokens; -1 for special ones.
        """
        return {
            key: np.where(token < 0, none, values[example, np.maximum(token, 0)])
            for key, (values, none) in self._columns.items()
        }
