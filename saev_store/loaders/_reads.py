"""From runs to reads: which bytes of which shard go to which rows of a target, and the tasks that bring them."""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from itertools import pairwise
from typing import NamedTuple, TypeAlias, TypeVar

import numpy as np
import numpy.typing as npt

from saev_store.core.dtypes import converted
from saev_store.core.layout import IntArray, Layout, shard_name
from saev_store.core.plan import requested
from saev_store.errors import NotFoundError, TransportError
from saev_store.loaders._iteration import Task
from saev_store.loaders._medium import TAKES_ADVICE, Advice, Medium
from saev_store.loaders._metrics import Totals
from saev_store.loaders._ring import allocate
from saev_store.store.reader import NumberArray, Reader
from saev_store.store.selection import Selection
from saev_store.transport import Buffer

T = TypeVar("T")

#: How long a read that failed for a passing reason is tried again after its first failure; at least once, however long a try takes.
_RETRY_S, _FIRST_WAIT_S, _LONGEST_WAIT_S = 10.0, 0.05, 3.0
_now_s = time.monotonic  # by this name, so that tests can count waits instead of waiting
#: So many requests are handed to a transport in one call, so that `close` does not wait for more.
_REQUESTS_AT_ONCE = 128
#: Runs shorter than this are cheaper as one gather than as a request each.
SMALL_RUN_BYTES = 16 << 10

#: Copies rows, as bytes, to some rows of a target; called by several threads.
Put: TypeAlias = Callable[[slice | IntArray, Buffer], None]
#: Memory to read into before rows are put where they belong, for as many threads as read at a time.
Scratch: TypeAlias = deque[npt.NDArray[np.uint8]]


class Positions(NamedTuple):
    """Positions of vectors on the axes of the store, int64. Layers count from 0; they are no labels.

    Where it says where rows of stacked layers come from, their first layer.
    """

    example: IntArray
    layer: IntArray
    token: IntArray


class Runs(NamedTuple):
    """Vectors that are neighbours both in a shard and in their target, int64 arrays of equal length.

    Attributes:
        shard: Number of the shard.
        vector: First vector, counted from the shard's beginning.
        place: First row of the target.
        n_vectors: How many.
        origin: Runs of different origins have requests of their own, however near they are: what a cache keeps of one must
            not depend on what happened to be read with it.
    """

    shard: IntArray
    vector: IntArray
    place: IntArray
    n_vectors: IntArray
    origin: IntArray

    def take(self, index: IntArray | slice) -> Runs:
        """Some of the runs."""
        return Runs(*(column[index] for column in self))


def runs_of_planes(
    layout: Layout, where: Positions, count: IntArray, place: IntArray, origin: IntArray | None = None
) -> Runs:
    """One run of `count` tokens for each position, in as few runs as possible. All have one origin where none is given."""
    shard, within = np.divmod(where.example, np.int64(layout.examples_per_shard))
    vector = (within * layout.n_layers + where.layer) * layout.tokens_per_example + where.token
    origin = np.zeros_like(shard) if origin is None else origin
    runs = Runs(shard, vector, place, count, origin)
    follows = (
        (shard[1:] == shard[:-1])
        & (vector[1:] == vector[:-1] + count[:-1])
        & (place[1:] == place[:-1] + count[:-1])
        & (origin[1:] == origin[:-1])
    )
    if not follows.any():
        return runs
    first = np.concatenate(([0], np.flatnonzero(~follows) + 1))
    return runs.take(first)._replace(n_vectors=np.add.reduceat(count, first))


def cut(runs: Runs, longest: int) -> Runs:
    """The same vectors in runs of at most `longest`."""
    if int(runs.n_vectors.max(initial=0)) <= longest:
        return runs
    n_parts = -(-runs.n_vectors // longest)
    which = np.repeat(np.arange(len(n_parts)), n_parts)
    part = np.arange(len(which)) - np.repeat(np.cumsum(n_parts) - n_parts, n_parts)
    whole = runs.take(which)
    count = np.minimum(longest, whole.n_vectors - part * longest)
    return whole._replace(vector=whole.vector + part * longest, place=whole.place + part * longest, n_vectors=count)


class Reads:
    """Brings runs of vectors to targets, by whichever way the transport is best at.

    A target is an array (n, d_model) in C order, whose memory is read into where the transport can and the dtype is the stored
    one, or a function that copies rows, as they are stored, to their places.

    Args:
        reader: The store's.
        totals: Where costs are counted.
        stop: Set when the data is not wanted any more.
        task_bytes: About how much one task reads.
        advice: For the system, about local files that are read in extents far apart.
        waits: Whether the shards lie where a fault on a map waits: scattered vectors are then read one by one.
        scratch: Kept from one epoch to the next, because the first touch of memory costs as much as filling it.
    """

    def __init__(
        self,
        reader: Reader,
        totals: Totals,
        stop: threading.Event,
        *,
        task_bytes: int,
        advice: Advice | None = None,
        waits: bool = False,
        scratch: Scratch | None = None,
    ) -> None:
        self._reader, self._layout, self._transport = reader, reader.layout, reader.transport
        self._totals, self._stop, self._advice = totals, stop, advice
        self._reads_into = self._transport.is_local
        self._one_by_one = waits and self._reads_into
        max_gap_bytes, max_request_bytes = self._transport.cost.max_gap_bytes, self._transport.cost.max_request_bytes
        # Where the source is memory, only a token's worth of a gap pays.
        self._max_gap_bytes = int(min(max_gap_bytes, SMALL_RUN_BYTES if np.isinf(max_gap_bytes) else 1 << 20))
        self._task_bytes = int(min(task_bytes, max_request_bytes))
        self._scratch: Scratch = deque() if scratch is None else scratch

    def tasks(self, runs: Runs, target: NumberArray | Put, to: IntArray | None = None) -> Iterator[Task]:
        """Tasks that together fill the rows of a target which `runs` name.

        Args:
            runs: The reads.
            target: What to fill.
            to: The rows of the target that places in `runs` stand for; default: they are the rows.
        """
        is_scattered, parts = self.split(runs)
        if not callable(target) and (to is not None or target.dtype != self._reader.dtype):
            target = partial(_put_rows, target, self._reader.dtype, to)
        read = self._gather if is_scattered else self._read
        for part in parts:
            yield partial(read, part, target), shard_name(int(part.shard[0]))

    # -- arithmetic ----------------------------------------------------------------------------------------------------

    def split(self, runs: Runs) -> tuple[bool, list[Runs]]:
        """What each task brings, and whether these are scattered vectors, in runs of one, which the reader gathers.

        The runs of other tasks are of one shard, in its order.
        """
        v = self._layout.vector_nbytes
        runs = cut(runs, max(1, self._task_bytes // v))
        runs = runs.take(np.lexsort((runs.vector, runs.shard)))
        gap = runs.vector[1:] - runs.vector[:-1] - runs.n_vectors[:-1]
        is_far = (gap * v > self._max_gap_bytes) | (runs.shard[1:] != runs.shard[:-1])
        n_far = 1 + np.count_nonzero(is_far)
        nbytes = int(runs.n_vectors.sum()) * v
        if nbytes < SMALL_RUN_BYTES * n_far and not self._one_by_one:
            single = cut(runs, 1)
            step = max(1, self._task_bytes // v)
            return True, [single.take(slice(at, at + step)) for at in range(0, len(single.n_vectors), step)]
        if not nbytes:
            return False, []
        end = np.cumsum(runs.n_vectors * v)
        begin = end - runs.n_vectors * v
        # Runs that one request brings stay together, unless they are more than a task.
        first = np.flatnonzero(np.concatenate(([True], is_far | (gap < 0) | (runs.origin[1:] != runs.origin[:-1]))))
        length = np.diff(np.append(begin[first], nbytes))
        n_runs = np.diff(np.append(first, len(begin)))
        begin = np.where(np.repeat(length <= self._task_bytes, n_runs), np.repeat(begin[first], n_runs), begin)
        # A task ends with its shard, and where it has enough to do.
        part = runs.shard * (nbytes // self._task_bytes + 2) + begin // self._task_bytes
        bounds = [0, *(np.flatnonzero(np.diff(part)) + 1).tolist(), len(part)]
        return False, [runs.take(slice(lo, hi)) for lo, hi in pairwise(bounds)]

    def positions(self, runs: Runs) -> Positions:
        """Where the first vectors of runs lie on the axes of the store."""
        rest, token = np.divmod(runs.vector, np.int64(self._layout.tokens_per_example))
        in_shard, layer = np.divmod(rest, np.int64(self._layout.n_layers))
        return Positions(runs.shard * self._layout.examples_per_shard + in_shard, layer, token)

    def requests(self, runs: Runs, *, into_target: bool) -> tuple[list[int], list[int], list[int]]:
        """First and last byte of each run, and the number of the first run of each request, with how many runs there are.

        Runs that are read into their target have a request each. Vectors that are wanted twice are read twice.

        Args:
            runs: Of one shard, in its order.
            into_target: Whether the target is memory to read into, where the transport can.
        """
        v = self._layout.vector_nbytes
        # Lists: a task has few runs, often one.
        begins, stops = (runs.vector * v).tolist(), ((runs.vector + runs.n_vectors) * v).tolist()
        if into_target and self._reads_into:
            return begins, stops, list(range(len(begins) + 1))
        origins = runs.origin.tolist()
        first = [
            run
            for run in range(1, len(begins))
            if not 0 <= begins[run] - stops[run - 1] <= self._max_gap_bytes or origins[run] != origins[run - 1]
        ]
        return begins, stops, [0, *first, len(begins)]

    # -- reading -------------------------------------------------------------------------------------------------------

    def _gather(self, runs: Runs, target: NumberArray | Put) -> None:
        """Scattered vectors: the reader gathers them from maps, or merges them into requests."""
        started, place, nbytes = time.perf_counter(), runs.place, len(runs.place) * self._layout.vector_nbytes
        scratch = self._borrow(nbytes)
        out = scratch[:nbytes].view(self._reader.dtype).reshape(len(place), -1)
        part = self._reader.plan_rows(*self.positions(runs))
        self._retried(int(runs.shard[0]), partial(self._reader.execute, (part,), out))
        copied = time.perf_counter()
        put = target if callable(target) else partial(_put_rows, target, self._reader.dtype, None)
        put(place, scratch[:nbytes].data)
        self._scratch.append(scratch)
        ended = time.perf_counter()
        n_requests, bytes_read = requested(part, self._layout, self._transport.cost)
        self._totals.add(n_requests=n_requests, bytes_read=bytes_read, read_s=ended - started, copy_s=ended - copied)

    def _read(self, runs: Runs, target: NumberArray | Put) -> None:
        """Runs of one shard, in its order."""
        started, shard, v = time.perf_counter(), int(runs.shard[0]), self._layout.vector_nbytes
        places, counts, name = runs.place.tolist(), runs.n_vectors.tolist(), shard_name(shard)
        put = target if callable(target) else partial(_put_rows, target, self._reader.dtype, None)
        array = None if callable(target) or not self._reads_into else target
        begins, stops, first = self.requests(runs, into_target=array is not None)
        # Examples that are known to be lost are refused before they are read.
        self._retried(shard, partial(self._reader.check, shard, (max(stops) - 1) // self._layout.example_nbytes))
        if self._advice is not None:
            self._advice.before(shard)
        nbytes, copy_s, requests = 0, 0.0, list(pairwise(first))
        for at in range(0, len(requests), _REQUESTS_AT_ONCE):
            some = requests[at : at + _REQUESTS_AT_ONCE]
            starts, ends = [begins[lo] for lo, _ in some], [stops[hi - 1] for _, hi in some]
            nbytes += sum(ends) - sum(starts)
            if (
                self._advice is not None
                and self._one_by_one
                and len(some) > 1
                and ends[0] - starts[0] < SMALL_RUN_BYTES
            ):
                self._advice.soon(shard, starts, ends)
            if array is not None:
                memory = array.reshape(-1).view(np.uint8).data  # no buffer has items of bfloat16
                views = [memory[places[lo] * v : (places[lo] + counts[lo]) * v] for lo, _ in some]
                self._retried(shard, partial(self._transport.readinto, name, starts=starts, buffers=views))
            else:
                found, scratch = self._bytes(shard, starts, ends)
                begun = time.perf_counter()
                for (lo, hi), source in zip(some, found, strict=True):
                    view = memoryview(source)
                    for run in range(lo, hi):
                        rows = slice(places[run], places[run] + counts[run])
                        put(rows, view[begins[run] - begins[lo] : stops[run] - begins[lo]])
                copy_s += time.perf_counter() - begun
                if scratch is not None:
                    self._scratch.append(scratch)
            if self._advice is not None and self._advice.drops_pages:
                self._advice.after(shard, starts, ends)
        ended = time.perf_counter()
        self._totals.add(n_requests=len(requests), bytes_read=nbytes, read_s=ended - started, copy_s=copy_s)

    def _bytes(
        self, shard: int, starts: list[int], ends: list[int]
    ) -> tuple[Sequence[Buffer], npt.NDArray[np.uint8] | None]:
        """Ranges of a shard, and the scratch memory that they are in, if any."""
        name = shard_name(shard)
        if self._reads_into:
            scratch = self._borrow(sum(ends) - sum(starts))
            memory, bounds = memoryview(scratch), np.cumsum([0, *np.subtract(ends, starts)]).tolist()
            views = [memory[lo:hi] for lo, hi in pairwise(bounds)]
            self._retried(shard, partial(self._transport.readinto, name, starts=starts, buffers=views))
            return views, scratch
        get = partial(self._transport.get_ranges, name)

        def one_by_one() -> Sequence[Buffer]:
            """Each range by itself."""
            ranges = zip(starts, ends, strict=True)
            return [self._retried(shard, partial(get, starts=[start], ends=[end]))[0] for start, end in ranges]

        whole = partial(get, starts=starts, ends=ends)
        return self._retried(shard, whole, one_by_one if len(starts) > 1 else None), None

    def _borrow(self, nbytes: int) -> npt.NDArray[np.uint8]:
        """Scratch memory of at least so many bytes; to be appended to `_scratch` after use."""
        try:
            scratch = self._scratch.pop()
        except IndexError:
            scratch = np.empty(0, np.uint8)
        if len(scratch) >= nbytes:
            return scratch
        # Touched for the first time in small pages, this memory took more CPU than all copies of an epoch.
        shape = (1, -(-max(nbytes, self._task_bytes) // 4))
        memory = allocate(shape, where="read_bytes", remedy="Read fewer bytes at once.")
        return memory.reshape(-1).view(np.uint8)

    def _retried(self, shard: int, read: Callable[[], T], in_steps: Callable[[], T] | None = None) -> T:
        """Carry out a read, again where the reason of a failure may have passed.

        Args:
            shard: What is read.
            read: Reads it.
            in_steps: Reads the same in steps, after a failure of the whole: of many ranges another one may fail each time.
        """
        ends_s, wait_s = float("inf"), _FIRST_WAIT_S
        try:
            while True:
                try:
                    return read()
                except TransportError as error:
                    if not error.transient or _now_s() + wait_s > ends_s:
                        raise
                    ends_s = min(ends_s, _now_s() + _RETRY_S)
                    self._totals.failed(error)
                    if self._stop.wait(wait_s):
                        raise
                if in_steps is not None:
                    return in_steps()
                wait_s = min(4 * wait_s, _LONGEST_WAIT_S)
        except NotFoundError:
            self._reader.check_size(shard)  # says which examples are gone
            raise


def _put_rows(
    array: NumberArray, stored: np.dtype[np.generic], to: IntArray | None, place: slice | IntArray, source: Buffer
) -> None:
    """Copy rows, as bytes of a store, to the rows `to[place]` of an array, or to `place`."""
    array[place if to is None else to[place]] = converted(
        np.frombuffer(source, stored).reshape(-1, array.shape[1]), array.dtype
    )


#: What a task reads. A disk of this machine is told of 128 vectors at a time; a file system over a network may not listen to
#: that, so there each thread waits for one.
_TASK_BYTES = {"flash": 1 << 20, "disk": 1 << 20, "parallel": 256 << 10}


class ScatteredReads:
    """Reads scattered rows of a selection, each with a read of its own, without read-ahead.

    Args:
        rows: The selection.
        medium: What its shards lie on.
    """

    def __init__(self, rows: Selection, medium: Medium) -> None:
        self._space = rows.space
        self._advice: Advice | None = None
        if medium.path is not None and TAKES_ADVICE:
            self._advice = Advice(medium.path, rows.space.layout, keep_pages=True)
        self._reads = Reads(
            rows.reader,
            Totals(rows.space.row_nbytes),
            threading.Event(),
            task_bytes=_TASK_BYTES.get(medium.kind, 1 << 20),
            advice=self._advice,
            waits=True,
        )

    def tasks(self, picked: IntArray, out: NumberArray) -> list[Callable[[], None]]:
        """Tasks that together fill `out`, the vectors of n rows one after the other, with the rows `picked` (n,)."""
        where = Positions(*self._space.vectors(picked))
        place = np.arange(len(where.example), dtype=np.int64)
        runs = runs_of_planes(self._space.layout, where, np.ones_like(place), place)
        return [task for task, _ in self._reads.tasks(runs, out)]

    def close(self) -> None:
        """Take back what the system was told."""
        if self._advice is not None:
            self._advice.close()
