"""From runs to reads: which bytes of which shard go to which rows of a target, and the tasks that bring them."""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from itertools import pairwise
from typing import Protocol, TypeAlias, TypeVar

import numpy as np
import numpy.typing as npt

from saev_store.core.indexing import Axis, Progression
from saev_store.core.layout import IntArray, shard_name
from saev_store.errors import NotFoundError, TransportError
from saev_store.loaders._advice import Advice
from saev_store.loaders._medium import unwrapped
from saev_store.loaders._metrics import ReadTotals
from saev_store.loaders._runs import Runs, cut
from saev_store.store.estimate import PlanCount
from saev_store.store.reader import FloatArray, Reader
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
        return scratch if len(scratch) >= nbytes else np.empty(max(nbytes, self._task_bytes), np.uint8)

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


class PlannedReads(Reads):
    """Reads that are counted instead of carried out.

    Args:
        reader: The store's.
        task_bytes: As of the reads that this stands for.
        waits: Likewise.
        direct: Whether their target is read into.
    """

    def __init__(self, reader: Reader, *, task_bytes: int, waits: bool, direct: bool) -> None:
        self._count = PlanCount(reader)
        super().__init__(reader, ReadTotals(), threading.Event(), task_bytes=task_bytes, waits=waits)
        self._direct = direct and self._reads_into

    def count(self, runs: Runs) -> int:
        """Count what reading these runs costs; returns how many vectors they have."""
        n_rows = int(runs.count.sum())
        target = ArrayTarget(np.empty((0, self._layout.d_model), np.float32))
        for task, _ in self.tasks(runs, target):
            task()
        return n_rows

    def _gather(self, example: IntArray, layer: IntArray, token: IntArray, place: IntArray, target: Target) -> None:
        del place, target
        self._count.add([self._reader.plan_rows(example, layer, token)], sizes=False)

    def _read(self, runs: Runs, target: Target) -> None:
        del target
        begins, stops, first = self._requests(runs, direct=self._direct)
        for lo, hi in pairwise(first):
            self._count.add_range(stops[hi - 1] - begins[lo])

    def _check(self, shard: int, highest: int) -> None:
        pass

    def total(self, share: float, examples: Axis) -> tuple[int, int]:
        """(requests, bytes) of everything, of which `share` was counted, in the shards of these examples."""
        capacity, count = self._layout.examples_per_shard, self._count
        shards: range | list[int]
        if isinstance(examples, Progression) and abs(examples.step) <= capacity:
            shards = (
                range(examples.lowest // capacity, examples.highest // capacity + 1) if examples.count else range(0)
            )
        else:
            chosen = examples.positions() if isinstance(examples, Progression) else examples
            shards = np.unique(chosen // capacity).tolist()
        sizes = sum(map(self._reader.is_unchecked, shards))
        # A shard is mapped once, and where some are, all are in the end; everything else grows with what is read.
        n_maps, map_bytes = len(count.mapped), sum(count.mapped.values())
        requests, n_bytes = (count.requests - n_maps) / share, (count.bytes_read - map_bytes) / share
        if n_maps and share < 1:
            for shard in shards:
                count.add_map(shard)
            n_maps, map_bytes = len(count.mapped), sum(count.mapped.values())
        return round(requests) + n_maps + sizes, round(n_bytes) + map_bytes
