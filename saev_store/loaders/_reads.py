"""From rows to reads: which bytes of which shard go to which rows of a buffer, and the tasks that bring them."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import partial
from itertools import pairwise
from typing import NamedTuple, TypeVar

import numpy as np

from saev_store.cost import PlanCount
from saev_store.errors import NotFoundError, TransportError
from saev_store.indexing import Axis, Progression
from saev_store.layout import IntArray, Layout, shard_name
from saev_store.loaders._advice import Advice
from saev_store.loaders._medium import unwrapped
from saev_store.loaders._memory import Rows, Takes, Target
from saev_store.reader import FloatArray, Reader
from saev_store.transport import Buffer

T = TypeVar("T")

#: A read that failed for a passing reason is tried again after these waits.
_WAITS_S = (0.05, 0.2, 0.8)
#: So many reads far apart are handed to a transport in one call, so that whoever stops does not wait for more.
_RUNS_AT_ONCE = 128
#: Runs shorter than this are cheaper as one gather than as a request each.
SMALL_RUN_BYTES = 16 << 10


class Runs(NamedTuple):
    """Vectors that are neighbours both in a shard and in a buffer, int64 arrays of equal length.

    Attributes:
        shard: Number of the shard.
        vector: First vector, counted from the shard's beginning.
        place: First row of the buffer.
        count: How many vectors.
        origin: Runs of different origins have requests of their own, however near they are: what a cache keeps of one must
            not depend on what happened to be read with it.
    """

    shard: IntArray
    vector: IntArray
    place: IntArray
    count: IntArray
    origin: IntArray

    def take(self, index: IntArray | slice) -> Runs:
        """Some of the runs."""
        return Runs(*(column[index] for column in self))


def runs_of_planes(
    layout: Layout, example: IntArray, layer: IntArray, token: IntArray, count: IntArray, place: IntArray,
    origin: IntArray | None = None,
) -> Runs:  # fmt: skip
    """One run per (example, layer), beginning at a token; all of them positions, not labels. One origin where none is said."""
    shard, within = np.divmod(example, np.int64(layout.examples_per_shard))
    vector = (within * layout.n_layers + layer) * layout.tokens_per_example + token
    return Runs(shard, vector, place, count, np.zeros_like(shard) if origin is None else origin)


def merged(runs: Runs) -> Runs:
    """The same vectors in as few runs as possible."""
    if len(runs.shard) < 2:
        return runs
    follows = (
        (runs.shard[1:] == runs.shard[:-1])
        & (runs.vector[1:] == runs.vector[:-1] + runs.count[:-1])
        & (runs.place[1:] == runs.place[:-1] + runs.count[:-1])
        & (runs.origin[1:] == runs.origin[:-1])
    )
    if not follows.any():
        return runs
    first = np.concatenate(([0], np.flatnonzero(~follows) + 1))
    return runs.take(first)._replace(count=np.add.reduceat(runs.count, first))


def cut(runs: Runs, longest: int) -> Runs:
    """The same vectors in runs of at most `longest`."""
    if not len(runs.count) or int(runs.count.max()) <= longest:
        return runs
    n_parts = -(-runs.count // longest)
    which = np.repeat(np.arange(len(n_parts)), n_parts)
    part = np.arange(len(which)) - np.repeat(np.cumsum(n_parts) - n_parts, n_parts)
    whole = runs.take(which)
    count = np.minimum(longest, whole.count - part * longest)
    return whole._replace(vector=whole.vector + part * longest, place=whole.place + part * longest, count=count)


@dataclass
class ReadTally:
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


class Reads:
    """Brings runs of vectors into buffers, by whichever way the transport is best at.

    Args:
        reader: The store's.
        tally: Where costs are counted.
        stop: Set when nobody wants the data any more.
        task_bytes: About how much one task reads.
        advice: For the system, about local files that are read in extents far apart.
        waits: Whether the shards lie where a fault on a map waits: scattered vectors are then read one by one.
    """

    def __init__(
        self,
        reader: Reader,
        tally: ReadTally,
        stop: threading.Event,
        *,
        task_bytes: int,
        advice: Advice | None = None,
        waits: bool = False,
    ) -> None:
        self.reader, self.layout = reader, reader.layout
        self._tally, self._stop, self._advice = tally, stop, advice
        transport = reader.transport
        self._into = transport.reads_into
        self._one_by_one = waits and self._into
        self._resident = np.isinf(transport.cost.max_gap_bytes)
        # Gaps are read into memory that is thrown away; where the source is memory, only a token's worth pays.
        self._max_gap_bytes = int(min(transport.cost.max_gap_bytes, SMALL_RUN_BYTES if self._resident else 1 << 20))
        self._task_bytes = int(min(task_bytes, transport.cost.max_request_bytes))
        self._junk = np.empty(max(self._max_gap_bytes, 1), dtype=np.uint8)

    def tasks(self, runs: Runs, target: Target) -> Iterator[tuple[Callable[[], None], str]]:
        """Tasks that together fill the rows of `target` which `runs` name, each with the name of its file."""
        v = self.layout.vector_nbytes
        if not len(runs.count):
            return
        runs = cut(runs, max(1, self._task_bytes // v))
        runs = runs.take(np.lexsort((runs.vector, runs.shard)))
        gap = runs.vector[1:] - runs.vector[:-1] - runs.count[:-1]
        n_far = 1 + np.count_nonzero((gap * v > self._max_gap_bytes) | (runs.shard[1:] != runs.shard[:-1]))
        if int(runs.count.sum()) * v < SMALL_RUN_BYTES * n_far and not self._one_by_one:
            yield from self._small(runs, target)
            return
        size = np.cumsum(runs.count * v)
        # A task ends with its shard, and where it has enough to do.
        part = runs.shard * (int(size[-1]) // self._task_bytes + 2) + (size - runs.count * v) // self._task_bytes
        bounds = np.concatenate(([0], np.flatnonzero(np.diff(part)) + 1, [len(part)])).tolist()
        takes = target if not self._into and isinstance(target, Takes) else None
        for lo, hi in pairwise(bounds):
            some = runs.take(slice(lo, hi))
            if takes is not None:
                task = partial(self._take, some, takes)
            else:
                task = partial(target.fill, some.place, some.count, partial(self._read, some))
            yield task, shard_name(int(some.shard[0]))

    def _small(self, runs: Runs, target: Target) -> Iterator[tuple[Callable[[], None], str]]:
        """Scattered single vectors: the reader gathers them from maps, or merges them into requests."""
        where = np.repeat(np.arange(len(runs.count)), runs.count)
        within = np.arange(len(where)) - np.repeat(np.cumsum(runs.count) - runs.count, runs.count)
        shard, vector, place = runs.shard[where], runs.vector[where] + within, runs.place[where] + within
        rest, token = np.divmod(vector, np.int64(self.layout.tokens_per_example))
        in_shard, layer = np.divmod(rest, np.int64(self.layout.n_layers))
        example = shard * self.layout.examples_per_shard + in_shard
        step = max(1, self._task_bytes // self.layout.vector_nbytes)
        for start in range(0, len(example), step):
            some = slice(start, start + step)
            name = shard_name(int(shard[start]))
            gather = partial(self._gather, example[some], layer[some], token[some])
            where_to = place[some]
            yield (lambda gather=gather, to=where_to: target.fill(to, np.ones_like(to), gather)), name

    def _gather(self, example: IntArray, layer: IntArray, token: IntArray, place: IntArray, buffer: FloatArray) -> None:
        started = time.perf_counter()
        dense = len(place) > 0 and int(place[-1] - place[0]) == len(place) - 1 and bool((np.diff(place) == 1).all())
        out = buffer[place[0] : place[0] + len(place)] if dense else np.empty((len(place), buffer.shape[1]), np.float32)
        self._retried(lambda: self.reader.read_rows(example, layer, token, out))
        if not dense:
            buffer[place] = out
        self._tally.add(len(place), out.nbytes, time.perf_counter() - started)

    def _read(self, runs: Runs, place: IntArray, buffer: FloatArray) -> None:
        """Runs of one shard, in the order of the shard, to the rows from `place[i]` on of a buffer."""
        started = time.perf_counter()
        v, shard = self.layout.vector_nbytes, int(runs.shard[0])
        begins, stops, first = self._requests(runs)
        places = (place * v).tolist()
        raw = memoryview(buffer).cast("B")  # type: ignore[arg-type]  # whatever the transport handed out
        if self._advice is not None:
            self._advice.before(shard)
        alone: list[int] = []
        for lo, hi in pairwise(first):
            if hi - lo == 1 and self._into:
                alone.append(lo)
                continue
            views: list[memoryview] = []
            at = begins[lo]
            for run in range(lo, hi):
                if begins[run] > at:
                    views.append(memoryview(self._junk)[: begins[run] - at])
                views.append(raw[places[run] : places[run] + stops[run] - begins[run]])
                at = stops[run]
            self._retried(lambda lo=lo, views=views: self._fill(shard, begins[lo], views))
        for at in range(0, len(alone), _RUNS_AT_ONCE):
            some = alone[at : at + _RUNS_AT_ONCE]
            small = len(some) > 1 and stops[some[0]] - begins[some[0]] < SMALL_RUN_BYTES
            if small and self._advice is not None and self._one_by_one:
                self._advice.soon(shard, [begins[run] for run in some], [stops[run] for run in some])
            buffers = [raw[places[run] : places[run] + stops[run] - begins[run]] for run in some]
            self._retried(partial(self._fill_runs, shard, [begins[run] for run in some], buffers))
        nbytes = sum(stops[hi - 1] - begins[lo] for lo, hi in pairwise(first))
        if self._advice is not None:
            for lo, hi in pairwise(first):
                self._advice.after(shard, begins[lo], stops[hi - 1])
        self._tally.add(len(first) - 1, nbytes, time.perf_counter() - started)

    def _requests(self, runs: Runs) -> tuple[list[int], list[int], list[int]]:
        """First and last byte of each run, and the number of the first run of each request, with how many runs there are."""
        v, example_nbytes = self.layout.vector_nbytes, self.layout.example_nbytes
        # Lists: a task has few runs, often one.
        begins, origins = (runs.vector * v).tolist(), runs.origin.tolist()
        stops = ((runs.vector + runs.count) * v).tolist()
        self._touch(int(runs.shard[0]), begins[0] // example_nbytes, (max(stops) - 1) // example_nbytes)
        # Vectors that are wanted twice are read twice.
        first = [
            run
            for run in range(1, len(begins))
            if not 0 <= begins[run] - stops[run - 1] <= self._max_gap_bytes or origins[run] != origins[run - 1]
        ]
        return begins, stops, [0, *first, len(begins)]

    def _take(self, runs: Runs, target: Takes) -> None:
        """Runs of one shard, in the order of the shard, from where they arrived to the places of a target."""
        started, shard = time.perf_counter(), int(runs.shard[0])
        begins, stops, first = self._requests(runs)
        places, counts = runs.place.tolist(), runs.count.tolist()
        for at in range(0, len(first) - 1, _RUNS_AT_ONCE):
            requests = list(pairwise(first[at : at + _RUNS_AT_ONCE + 1]))
            lows, highs = [begins[lo] for lo, _ in requests], [stops[hi - 1] for _, hi in requests]
            for (lo, hi), found in zip(requests, self._retried(partial(self._ranges, shard, lows, highs)), strict=True):
                for run in range(lo, hi):
                    start, stop = begins[run] - begins[lo], stops[run] - begins[lo]
                    target.take(places[run], counts[run], memoryview(found)[start:stop])
        nbytes = sum(stops[hi - 1] - begins[lo] for lo, hi in pairwise(first))
        self._tally.add(len(first) - 1, nbytes, time.perf_counter() - started)

    def _ranges(self, shard: int, starts: list[int], ends: list[int]) -> Sequence[Buffer]:
        try:
            return self.reader.transport.get_ranges(shard_name(shard), starts=starts, ends=ends)
        except NotFoundError:
            self._look_again(shard)
            raise

    def _fill_runs(self, shard: int, starts: list[int], buffers: list[memoryview]) -> None:
        try:
            self.reader.transport.readinto(shard_name(shard), starts=starts, buffers=buffers)
        except NotFoundError:
            self._look_again(shard)
            raise

    def _look_again(self, shard: int) -> None:
        """A file is gone: say so in words about the store."""
        self.reader.check_size(shard)

    def _fill(self, shard: int, start: int, views: list[memoryview]) -> None:
        starts = [start]
        for view in views[:-1]:
            starts.append(starts[-1] + view.nbytes)
        self._fill_runs(shard, starts, views)

    def _touch(self, shard: int, lowest: int, highest: int) -> None:
        """Before bytes of some examples of a shard are read."""
        del lowest
        self.reader.check(shard, highest)

    def _retried(self, read: Callable[[], T]) -> T:
        """Carry out a read, again where the reason of a failure may have passed."""
        for wait_s in (*_WAITS_S, None):
            try:
                return read()
            except TransportError as error:
                if wait_s is None or not error.transient or self._stop.wait(wait_s):
                    raise
                with self._tally.lock:
                    self._tally.n_retries += 1
                if unwrapped(self.reader.transport).is_local:
                    # A stale handle of a network file system only goes away with a new descriptor.
                    self.reader.transport.close()
        raise AssertionError  # the last wait is None


class PlannedReads(Reads):
    """Reads that are counted instead of carried out.

    Args:
        reader: The store's.
        task_bytes: As of the reads that this stands for.
        waits: Likewise.
    """

    def __init__(self, reader: Reader, *, task_bytes: int, waits: bool = False) -> None:
        self._count = PlanCount(reader)
        super().__init__(reader, ReadTally(), threading.Event(), task_bytes=task_bytes, waits=waits)

    def count(self, runs: Runs) -> int:
        """Count what reading these runs costs; returns how many vectors they have."""
        place = np.cumsum(runs.count) - runs.count
        n_rows = int(runs.count.sum())
        if n_rows:
            for task, _ in self.tasks(
                runs._replace(place=place), Rows(np.empty((n_rows, self.layout.d_model), np.float32))
            ):
                task()
        return n_rows

    def total(self, share: float, examples: Axis) -> tuple[int, int]:
        """(requests, bytes) of everything, of which `share` was counted, in the shards of these examples."""
        capacity, count = self.layout.examples_per_shard, self._count
        shards: range | list[int]
        if isinstance(examples, Progression) and abs(examples.step) <= capacity:
            shards = (
                range(examples.lowest // capacity, examples.highest // capacity + 1) if examples.count else range(0)
            )
        else:
            chosen = examples.positions() if isinstance(examples, Progression) else examples
            shards = np.unique(chosen // capacity).tolist()
        sizes = sum(map(self.reader.is_unchecked, shards))
        # A shard is mapped once, and where some are, all are in the end; everything else grows with what is read.
        n_maps, map_bytes = len(count.mapped), sum(count.mapped.values())
        requests, n_bytes = (count.requests - n_maps) / share, (count.bytes_read - map_bytes) / share
        if n_maps and share < 1:
            for shard in shards:
                count.add_map(shard)
            n_maps, map_bytes = len(count.mapped), sum(count.mapped.values())
        return round(requests) + n_maps + sizes, round(n_bytes) + map_bytes

    def _fill_runs(self, shard: int, starts: list[int], buffers: list[memoryview]) -> None:
        for start, buffer in zip(starts, buffers, strict=True):
            self._fill(shard, start, [buffer])

    def _fill(self, shard: int, start: int, views: list[memoryview]) -> None:
        del shard, start
        self._count.add_range(sum(view.nbytes for view in views))

    def _gather(self, example: IntArray, layer: IntArray, token: IntArray, place: IntArray, buffer: FloatArray) -> None:
        del place, buffer
        self._count.add([self.reader.plan_rows(example, layer, token)], sizes=False)

    def _touch(self, shard: int, lowest: int, highest: int) -> None:
        pass
