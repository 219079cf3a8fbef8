"""Reads that are asked for before a thread has time to wait for them."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from itertools import pairwise
from typing import TYPE_CHECKING

from saev_store.errors import SaevStoreError
from saev_store.layout import shard_name
from saev_store.transport._base import Buffer, Fetcher

if TYPE_CHECKING:
    from saev_store.loaders._memory import Takes
    from saev_store.loaders._reads import Reads, Runs


class _Together:
    """Waits for several parts, each of which ends well or not, in any thread."""

    def __init__(self, n_parts: int, done: Callable[[bool], None]) -> None:
        self._left, self._done, self._whole = n_parts, done, True
        self._lock = threading.Lock()

    def ended(self, whole: bool) -> None:
        """One part has ended."""
        with self._lock:
            self._left -= 1
            self._whole = self._whole and whole
            is_last = self._left == 0
        if is_last:
            self._done(self._whole)


@dataclass(frozen=True)
class Lent:
    """A task: runs of one shard, shown where they arrive and copied from there."""

    reads: Reads
    runs: Runs
    target: Takes

    def __call__(self) -> None:
        """Read them, and wait for them."""
        self.reads._take(self.runs, self.target)

    def begin(self, fetcher: Fetcher, done: Callable[[bool], None]) -> bool:
        """Ask for them ahead of time. False, and nothing is done, where the task has to be called instead.

        `done` is called once, in any thread, with whether all of them are there; if not, the task has to be called.
        """
        reads, runs, take = self.reads, self.runs, self.target.take
        shard, v = int(runs.shard[0]), reads.layout.vector_nbytes
        if reads.reader.is_unchecked(shard):
            return False
        try:
            begins, stops, first = reads._requests(runs)
        except SaevStoreError:  # raised again, where it is waited for
            return False
        places, counts, vectors = runs.place.tolist(), runs.count.tolist(), runs.vector.tolist()
        requests, started = list(pairwise(first)), time.perf_counter()

        def ended(whole: bool) -> None:
            if whole:
                nbytes = sum(stops[hi - 1] - begins[lo] for lo, hi in requests)
                reads._tally.add(len(requests), nbytes, time.perf_counter() - started)
            done(whole)

        together = _Together(len(requests), ended)
        for number, (lo, hi) in enumerate(requests):

            def rows(at: int, found: Buffer, lo: int = lo, hi: int = hi) -> None:
                """Whole rows from the byte `at` of a request on, to the runs that they are of."""
                low, high, view = vectors[lo] + at // v, vectors[lo] + (at + len(found)) // v, memoryview(found)
                for run in range(lo, hi):
                    start, stop = max(low, vectors[run]), min(high, vectors[run] + counts[run])
                    if start < stop:
                        to = places[run] + start - vectors[run]
                        take(to, stop - start, view[(start - low) * v : (stop - low) * v])

            is_begun = fetcher.fetch(
                shard_name(shard), start=begins[lo], end=stops[hi - 1], item_nbytes=v, take=rows, done=together.ended
            )
            if not is_begun and number == 0:
                return False
            if not is_begun:
                together.ended(False)
        return True
