"""Batches in storage order."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Iterator
from dataclasses import replace
from functools import partial
from typing import Unpack

import numpy as np

from saev_store.core.rows import Labels
from saev_store.loaders._base import Loader
from saev_store.loaders._explain import Plan
from saev_store.loaders._iteration import BatchContext
from saev_store.loaders._reads import ArrayTarget
from saev_store.loaders._ring import Allocate, BufferPool, allocate
from saev_store.loaders._rows import Batch, Positions, Runs, runs_of_rows
from saev_store.loaders._workers import Group
from saev_store.loaders.options import ReadArguments, ReadOptions
from saev_store.order import Batching
from saev_store.store.reader import FloatArray
from saev_store.store.selection import Selection


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


class OrderedLoader(Loader):
    """Batches in storage order: example by example, in it layer by layer, in that token by token. Always the same.

    A batch is a dict: `act` float32 (n, d_model), `example_idx` and `token_idx` int64 (n,), with several layers `layer`
    int64 (n,), and `token_labels` uint8 (n,) where labels were given (255 for special tokens, which have none).
    `token_idx` counts content tokens from 0; -1 is the special token. Memory of a batch belongs to the consumer as long as
    the batch, or any view of it, is referred to; then it is used again.

    Args:
        rows: What to load: `store.sel(…)`.
        options: How; default: `ReadOptions()`.
        labels: `store.labels`, to have them in the batches.
        make_buffer: Makes the memory of a batch, such as pinned memory; default: plain memory.
        changed: Fields of `ReadOptions`, instead of what `options` says.

    Raises:
        ArgumentError: an option is out of range.

    >>> from saev_store import ShardStore
    >>> store = ShardStore.open(SAMPLE)
    >>> with OrderedLoader(store.sel(layer=5, tokens="content"), batch_size=8) as loader:
    ...     [batch["act"].shape for batch in loader]
    [(8, 8), (8, 8), (8, 8), (4, 8)]
    """

    kind = "ordered"

    def __init__(
        self,
        rows: Selection,
        options: ReadOptions | None = None,
        *,
        labels: Labels | None = None,
        make_buffer: Allocate | None = None,
        **changed: Unpack[ReadArguments],
    ) -> None:
        super().__init__(rows, replace(options or ReadOptions(), **changed), labels, make_buffer)
        self._pool: BufferPool | None = None

    @property
    def _n_ahead(self) -> int:
        """Enough batches under way that all threads have something to read."""
        batch_bytes = self.batch_size * self._space.layout.vector_nbytes
        return min(1 + self._n_threads * self._read_bytes // max(batch_bytes, 1), 64)

    def _batches(self, epoch: int, first: int, stop: int, context: BatchContext) -> Callable[[], Iterable[Batch]]:
        del epoch
        shape = (min(self.batch_size, max(len(self._space), 1)), self.d_model)
        if self._pool is None or self._pool.shape != shape:
            self._pool = BufferPool(shape, self._prefetch + 6, self._make_buffer or allocate)
        return partial(
            OrderedBatches,
            self._batching,
            self._rank,
            first,
            stop,
            n_ahead=self._n_ahead,
            pool=self._pool,
            context=context,
        )

    def _forget_memory(self) -> None:
        self._pool = None

    def _plan(self) -> Plan:
        layout, space = self._space.layout, self._space

        def runs(number: int) -> Runs:
            return runs_of_rows(space, *self._batching.rows_of_rank(number, self._rank))[1]

        plane_bytes = space.tokens.count * layout.vector_nbytes
        contiguous = len(space.layer_idx) == layout.n_layers and space.tokens.count == layout.tokens_per_example
        return Plan(
            extent_bytes=self._read_bytes if contiguous else min(plane_bytes, self._read_bytes),
            n_parts=len(self),
            runs=runs,
            n_vectors=-(-len(space) // self._world),
            n_buffers=self._prefetch + self._n_ahead + 2,
        )
