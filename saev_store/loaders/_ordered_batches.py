"""Batches in storage order, read straight into their memory, several at a time."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator

import numpy as np

from saev_store.loaders._batch_coordinates import Positions
from saev_store.loaders._iteration import Batch, BatchContext
from saev_store.loaders._memory import BufferPool
from saev_store.loaders._reads import ArrayTarget
from saev_store.loaders._runs import runs_of_rows
from saev_store.loaders._workers import Group
from saev_store.order import Batching
from saev_store.store.reader import FloatArray


class OrderedBatches:
    """Batches `first` to `stop` in storage order, read several at a time.

    Args:
        batching: How rows are cut into batches.
        rank: Which slice of each is taken.
        first: The first batch.
        stop: The batch after the last.
        n_ahead: Batches whose reads are under way at the same time.
        pool: Memory of batches.
        context: What to make them with.
    """

    def __init__(
        self, batching: Batching, rank: int, first: int, stop: int, *, n_ahead: int, pool: BufferPool,
        context: BatchContext,
    ) -> None:  # fmt: skip
        self._batching, self._rank, self._numbers = batching, rank, range(first, stop)
        self._n_ahead, self._pool, self._context = n_ahead, pool, context

    def __iter__(self) -> Iterator[Batch]:
        reading: deque[tuple[FloatArray, Positions, Group]] = deque()
        for number in self._numbers:
            reading.append(self._start(number))
            if len(reading) > self._n_ahead:
                yield self._finish(*reading.popleft())
        while reading:
            yield self._finish(*reading.popleft())

    def _start(self, number: int) -> tuple[FloatArray, Positions, Group]:
        start, stop = self._batching.rows_of_rank(number, self._rank)
        act = self._pool.get()[: stop - start]
        where, runs = runs_of_rows(self._context.maker.space, start, stop)
        return act, where, self._context.runtime.read(self._context.reads.tasks(runs, ArrayTarget(act)))

    def _finish(self, act: FloatArray, where: Positions, group: Group) -> Batch:
        group.wait(self._context.runtime.stop)
        if self._context.maker.scale is not None:
            act *= np.float32(self._context.maker.scale)
        return self._context.maker.batch(act, where)
