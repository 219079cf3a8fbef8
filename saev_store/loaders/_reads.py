"""From runs to reads: which bytes of which shard go to which rows of a target, and the tasks that bring them."""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import partial
from itertools import pairwise
from typing import Protocol, TypeAlias, TypeVar

import numpy as np
import numpy.typing as npt

from saev_store.core.layout import IntArray, shard_name
from saev_store.errors import NotFoundError, TransportError
from saev_store.loaders._medium import Advice, Medium, advice_for, unwrapped
from saev_store.loaders._ring import allocate
from saev_store.loaders._rows import Positions, Runs, cut, runs_of_planes
from saev_store.store.reader import FloatArray, Reader
from saev_store.store.selection import Selection
from saev_store.transport import Buffer

T = TypeVar("T")

#: A read that failed for a passing reason is tried again after these waits.
_WAITS_S = (0.05, 0.2, 0.8)
#: So many requests are handed to a transport in one call, so that `close` does not wait for more.
_REQUESTS_AT_ONCE = 128
#: Runs shorter than this are cheaper as one gather than as a request each.
SMALL_RUN_BYTES = 16 << 10

#: What a thread carries out, and the name of the file that it reads.
Task: TypeAlias = tuple[Callable[[], None], str]
#: Memory to read into before rows are put where they belong, for as many threads as read at a time.
Scratch: TypeAlias = deque[npt.NDArray[np.uint8]]


@dataclass
class ReadTotals:
    """What reading has cost so far; threads add to it under its lock."""

    n_requests: int = 0
    n_bytes: int = 0
    n_retries: int = 0
    read_s: float = 0.0
    copy_s: float = 0.0
    lock: threading.Lock = field(default_factory=threading.Lock, repr=False)

    def add(self, requests: int, n_bytes: int, seconds: float) -> None:
        """Count finished requests."""
        with self.lock:
            self.n_requests += requests
            self.n_bytes += n_bytes
            self.read_s += seconds

    def add_copy(self, seconds: float) -> None:
        """Count time in which what was read was copied to batches."""
        with self.lock:
            self.copy_s += seconds


class Target(Protocol):
    """Rows that reading threads fill."""

    def memory(self, place: int, count: int) -> memoryview | None:
        """The memory of successive rows, to read straight into; None where they have to be `put`."""
        ...

    def put(self, place: slice | IntArray, source: Buffer) -> None:
        """Copy rows, as bytes, to some places."""
        ...


class ArrayTarget:
    """An array as a target.

    Args:
        array: float32, C order, (n, d_model); borrowed.
    """

    def __init__(self, array: FloatArray) -> None:
        self._array, self._raw = array, None if array.size == 0 else memoryview(array).cast("B")  # pyright: ignore[reportArgumentType]  # an array is a buffer

    def memory(self, place: int, count: int) -> memoryview | None:
        """See `Target`."""
        nbytes = self._array.strides[0]
        return None if self._raw is None else self._raw[place * nbytes : (place + count) * nbytes]

    def put(self, place: slice | IntArray, source: Buffer) -> None:
        """See `Target`."""
        self._array[place] = np.frombuffer(source, np.float32).reshape(-1, self._array.shape[1])


class Reads:
    """Brings runs of vectors to targets, by whichever way the transport is best at.

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
        totals: ReadTotals,
        stop: threading.Event,
        *,
        task_bytes: int,
        advice: Advice | None = None,
        waits: bool = False,
        scratch: Scratch | None = None,
    ) -> None:
        self._reader, self._layout, self._transport = reader, reader.layout, reader.transport
        self._totals, self._stop, self._advice = totals, stop, advice
        self._reads_into = self._transport.reads_into
        self._one_by_one = waits and self._reads_into
        max_gap_bytes, max_request_bytes = self._transport.cost.max_gap_bytes, self._transport.cost.max_request_bytes
        # Where the source is memory, only a token's worth of a gap pays.
        self._max_gap_bytes = int(min(max_gap_bytes, SMALL_RUN_BYTES if np.isinf(max_gap_bytes) else 1 << 20))
        self._task_bytes = int(min(task_bytes, max_request_bytes))
        self._scratch: Scratch = deque() if scratch is None else scratch

    def tasks(self, runs: Runs, target: Target) -> Iterator[Task]:
        """Tasks that together fill the rows of `target` which `runs` name."""
        v = self._layout.vector_nbytes
        if not len(runs.count):
            return
        runs = cut(runs, max(1, self._task_bytes // v))
        runs = runs.take(np.lexsort((runs.vector, runs.shard)))
        gap = runs.vector[1:] - runs.vector[:-1] - runs.count[:-1]
        is_far = (gap * v > self._max_gap_bytes) | (runs.shard[1:] != runs.shard[:-1])
        n_far = 1 + np.count_nonzero(is_far)
        if int(runs.count.sum()) * v < SMALL_RUN_BYTES * n_far and not self._one_by_one:
            yield from self._small(runs, target)
            return
        end = np.cumsum(runs.count * v)
        begin = end - runs.count * v
        # Runs that one request brings stay together, unless they are more than a task.
        first = np.flatnonzero(np.concatenate(([True], is_far | (gap < 0) | (runs.origin[1:] != runs.origin[:-1]))))
        length = np.diff(np.append(begin[first], end[-1]))
        n_runs = np.diff(np.append(first, len(begin)))
        begin = np.where(np.repeat(length <= self._task_bytes, n_runs), np.repeat(begin[first], n_runs), begin)
        # A task ends with its shard, and where it has enough to do.
        part = runs.shard * (int(end[-1]) // self._task_bytes + 2) + begin // self._task_bytes
        for lo, hi in pairwise([0, *(np.flatnonzero(np.diff(part)) + 1).tolist(), len(part)]):
            yield partial(self._read, runs.take(slice(lo, hi)), target), shard_name(int(runs.shard[lo]))

    def _small(self, runs: Runs, target: Target) -> Iterator[Task]:
        """Scattered single vectors: the reader gathers them from maps, or merges them into requests."""
        where = np.repeat(np.arange(len(runs.count)), runs.count)
        within = np.arange(len(where)) - np.repeat(np.cumsum(runs.count) - runs.count, runs.count)
        shard, vector, place = runs.shard[where], runs.vector[where] + within, runs.place[where] + within
        rest, token = np.divmod(vector, np.int64(self._layout.tokens_per_example))
        in_shard, layer = np.divmod(rest, np.int64(self._layout.n_layers))
        example = shard * self._layout.examples_per_shard + in_shard
        step = max(1, self._task_bytes // self._layout.vector_nbytes)
        for start in range(0, len(example), step):
            some = slice(start, start + step)
            task = partial(self._gather, example[some], layer[some], token[some], place[some], target)
            yield task, shard_name(int(shard[start]))

    def _gather(self, example: IntArray, layer: IntArray, token: IntArray, place: IntArray, target: Target) -> None:
        started, n, nbytes = time.perf_counter(), len(place), len(place) * self._layout.vector_nbytes
        memory = target.memory(int(place[0]), n) if bool((np.diff(place) == 1).all()) else None
        scratch = self._borrow(nbytes if memory is None else 0)
        out = (scratch[:nbytes] if memory is None else np.frombuffer(memory, np.uint8)).view(np.float32).reshape(n, -1)
        self._retried(lambda: self._reader.read_rows(example, layer, token, out))
        if memory is None:
            target.put(place, scratch[:nbytes].data)
        self._scratch.append(scratch)
        self._totals.add(n, nbytes, time.perf_counter() - started)

    def _read(self, runs: Runs, target: Target) -> None:
        """Runs of one shard, in the order of the shard."""
        started, shard = time.perf_counter(), int(runs.shard[0])
        places, counts = runs.place.tolist(), runs.count.tolist()
        direct = self._reads_into and target.memory(places[0], counts[0]) is not None
        begins, stops, first = self._requests(runs, direct=direct)
        if self._advice is not None:
            self._advice.before(shard)
        nbytes, requests = 0, list(pairwise(first))
        for at in range(0, len(requests), _REQUESTS_AT_ONCE):
            some = requests[at : at + _REQUESTS_AT_ONCE]
            starts, ends = [begins[lo] for lo, _ in some], [stops[hi - 1] for _, hi in some]
            if (
                self._one_by_one
                and self._advice is not None
                and len(some) > 1
                and ends[0] - starts[0] < SMALL_RUN_BYTES
            ):
                self._advice.soon(shard, starts, ends)
            if direct:
                buffers = [memory for lo, _ in some if (memory := target.memory(places[lo], counts[lo])) is not None]
                self._retried(partial(self._fill, shard, starts, buffers))
            else:
                scratch = self._borrow(sum(ends) - sum(starts)) if self._reads_into else None
                for (lo, hi), found in zip(some, self._bytes(shard, starts, ends, scratch), strict=True):
                    view = memoryview(found)
                    for run in range(lo, hi):
                        rows = slice(places[run], places[run] + counts[run])
                        target.put(rows, view[begins[run] - begins[lo] : stops[run] - begins[lo]])
                if scratch is not None:
                    self._scratch.append(scratch)
            nbytes += sum(ends) - sum(starts)
            if self._advice is not None:
                for start, end in zip(starts, ends, strict=True):
                    self._advice.after(shard, start, end)
        self._totals.add(len(requests), nbytes, time.perf_counter() - started)

    def _requests(self, runs: Runs, *, direct: bool) -> tuple[list[int], list[int], list[int]]:
        """First and last byte of each run, and the number of the first run of each request, with how many runs there are.

        Runs that are read straight to where they belong have a request each. Vectors that are wanted twice are read twice.
        """
        v, example_nbytes = self._layout.vector_nbytes, self._layout.example_nbytes
        # Lists: a task has few runs, often one.
        begins, origins = (runs.vector * v).tolist(), runs.origin.tolist()
        stops = ((runs.vector + runs.count) * v).tolist()
        self._check(int(runs.shard[0]), (max(stops) - 1) // example_nbytes)
        if direct:
            return begins, stops, list(range(len(begins) + 1))
        first = [
            run
            for run in range(1, len(begins))
            if not 0 <= begins[run] - stops[run - 1] <= self._max_gap_bytes or origins[run] != origins[run - 1]
        ]
        return begins, stops, [0, *first, len(begins)]

    def _bytes(
        self, shard: int, starts: list[int], ends: list[int], scratch: npt.NDArray[np.uint8] | None
    ) -> Sequence[Buffer]:
        """Ranges of a shard, in memory that lives until the scratch memory is used again."""
        if scratch is None:
            if len(starts) > 1:
                try:
                    return self._get(shard, starts, ends)
                except TransportError as error:
                    self._count_retry(error)
            # One by one: of many, another one might fail each time.
            return [self._retried(partial(self._get, shard, [a], [b]))[0] for a, b in zip(starts, ends, strict=True)]
        at, views = 0, list[memoryview]()
        for start, end in zip(starts, ends, strict=True):
            views.append(memoryview(scratch)[at : at + end - start])
            at += end - start
        self._retried(partial(self._fill, shard, starts, views))
        return views

    def _borrow(self, nbytes: int) -> npt.NDArray[np.uint8]:
        """Scratch memory of at least so many bytes; to be appended to `_scratch` after use."""
        try:
            scratch = self._scratch.pop()
        except IndexError:
            scratch = np.empty(0, np.uint8)
        if len(scratch) >= nbytes:
            return scratch
        # Touched for the first time in small pages, this memory took more CPU than all copies of an epoch.
        return allocate((1, -(-max(nbytes, self._task_bytes) // 4))).reshape(-1).view(np.uint8)

    def _get(self, shard: int, starts: list[int], ends: list[int]) -> Sequence[Buffer]:
        try:
            return self._transport.get_ranges(shard_name(shard), starts=starts, ends=ends)
        except NotFoundError:
            self._look_again(shard)
            raise

    def _fill(self, shard: int, starts: list[int], buffers: list[memoryview]) -> None:
        try:
            self._transport.readinto(shard_name(shard), starts=starts, buffers=buffers)
        except NotFoundError:
            self._look_again(shard)
            raise

    def _look_again(self, shard: int) -> None:
        """A file is gone: say so in words about the store."""
        self._reader.check_size(shard)

    def _check(self, shard: int, highest: int) -> None:
        """Refuse examples that are known to be lost, before they are read."""
        self._reader.check(shard, highest)

    def _retried(self, read: Callable[[], T]) -> T:
        """Carry out a read, again where the reason of a failure may have passed."""
        for wait_s in _WAITS_S:
            try:
                return read()
            except TransportError as error:
                self._count_retry(error)
                if self._stop.wait(wait_s):
                    raise
                if unwrapped(self._transport).is_local:
                    # A stale handle of a network file system only goes away with a new descriptor.
                    self._transport.close()
        return read()

    def _count_retry(self, error: TransportError) -> None:
        """Count a failure that is tried again; one that will not pass is raised."""
        if not error.transient:
            raise error
        with self._totals.lock:
            self._totals.n_retries += 1


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
        self._advice = advice_for(medium.path, rows.space.layout, keep_pages=True)
        self._reads = Reads(
            rows.reader,
            ReadTotals(),
            threading.Event(),
            task_bytes=_TASK_BYTES.get(medium.kind, 1 << 20),
            advice=self._advice,
            waits=True,
        )

    def tasks(self, picked: IntArray, out: FloatArray) -> list[Callable[[], None]]:
        """Tasks that together fill `out` (n, d_model) with the rows `picked` (n,)."""
        where = Positions(*self._space.locate(picked))
        place = np.arange(len(picked), dtype=np.int64)
        runs = runs_of_planes(self._space.layout, where, np.ones_like(place), place)
        return [task for task, _ in self._reads.tasks(runs, ArrayTarget(out))]

    def close(self) -> None:
        """Take back what the system was told."""
        if self._advice is not None:
            self._advice.close()
