"""Batches in storage order."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Mapping
from functools import partial
from typing import Unpack

import numpy as np

from saev_store.core.layout import IntArray
from saev_store.core.rows import Labels, RowSpace
from saev_store.loaders._base import Loader
from saev_store.loaders._batches import BatchSource
from saev_store.loaders._explain import Plan
from saev_store.loaders._iteration import Group, Iteration
from saev_store.loaders._reads import Positions, Reads, Runs, runs_of_planes
from saev_store.loaders._ring import Allocate, BufferPool, allocate, multiply
from saev_store.loaders.options import ReadArguments, ReadOptions, chosen_options
from saev_store.order import Batching
from saev_store.store.reader import NumberArray
from saev_store.store.selection import Selection


def runs_of_rows(space: RowSpace, start: int, stop: int) -> tuple[Positions, Runs, IntArray | None]:
    """Where the rows `start` to `stop` in storage order come from, and the reads that bring them.

    Past the end the last row is repeated.

    Returns:
        Where each row comes from, the reads, and the vector of the batch that each place in the reads stands for: None where
        these are the same.
    """
    if space.vectors_per_row > 1:
        return _runs_of_stacked_rows(space, start, stop)
    if space.ends is not None or stop > space.n_rows or space.tokens.count == 1:
        # Row by row: where labels leave holes, and where the last row is repeated.
        row = np.minimum(np.arange(start, stop, dtype=np.int64), space.n_rows - 1)
        where = Positions(*space.vectors(row))
        place = np.arange(stop - start, dtype=np.int64)
        return where, runs_of_planes(space.layout, where, np.ones_like(place), place), None
    n_tokens = space.tokens.count
    plane = np.arange(start // n_tokens, -(-stop // n_tokens), dtype=np.int64)
    first = np.maximum(start - plane * n_tokens, 0)
    count = np.minimum(stop - plane * n_tokens, n_tokens) - first
    example, layer, _ = space.vectors(plane * n_tokens)
    begin = Positions(example, layer, space.tokens.start + first)
    runs = runs_of_planes(space.layout, begin, count, np.cumsum(count) - count)
    within = np.arange(start, stop, dtype=np.int64) - np.repeat(plane * n_tokens, count)
    return Positions(np.repeat(example, count), np.repeat(layer, count), within + space.tokens.start), runs, None


def _runs_of_stacked_rows(space: RowSpace, start: int, stop: int) -> tuple[Positions, Runs, IntArray]:
    """The same where a row has several vectors: an example's are read layer by layer, as they lie in the file."""
    row = np.minimum(np.arange(start, stop, dtype=np.int64), space.n_rows - 1)
    example, layer, token = space.locate(row)
    n_vectors = space.vectors_per_row
    nth_example = np.cumsum(np.diff(example, prepend=example[:1]) != 0)
    to = np.argsort((nth_example[:, None] * n_vectors + np.arange(n_vectors)).ravel(), kind="stable")
    vectors = Positions(*(column[to] for column in space.vectors(row)))
    place = np.arange(len(to), dtype=np.int64)
    runs = runs_of_planes(space.layout, vectors, np.ones_like(place), place)
    return Positions(example, layer[:, 0], token), runs, to


class OrderedBatches:
    """Batches in storage order, of which several are read at a time.

    Args:
        space: The row space.
        batching: How its rows are cut into batches.
        rank: Which slice of each is taken.
        first: The first batch.
        n_ahead: Batches that are read ahead of the one that is waited for, at most. It begins with none and doubles with each batch: on
            a slow link these bytes would arrive instead of the first batch's.
        pool: Memory of batches.
        iteration: Threads.
        reads: Brings vectors into memory.
        scale: Factor for all vectors, or None.
    """

    def __init__(
        self,
        space: RowSpace,
        batching: Batching,
        rank: int,
        first: int,
        *,
        n_ahead: int,
        pool: BufferPool,
        iteration: Iteration,
        reads: Reads,
        scale: float | None,
    ) -> None:
        self._space, self._batching, self._rank, self._n_ahead = space, batching, rank, n_ahead
        self._first = self._next = first
        self._pool, self._iteration, self._reads, self._scale = pool, iteration, reads, scale
        self._reading: deque[tuple[NumberArray, Positions, Group]] = deque()

    def batch(self, number: int) -> tuple[NumberArray, Positions]:
        """A batch, and where its rows come from; reads of the following ones are started before. Every batch once, in order."""
        n_ahead = min((1 << min(number - self._first, 62)) - 1, self._n_ahead)
        while self._next <= min(number + n_ahead, self._batching.n_batches - 1):
            start, stop = self._batching.rows_of_rank(self._next, self._rank)
            act = self._pool.get()[: (stop - start) * self._space.vectors_per_row]
            where, runs, to = runs_of_rows(self._space, start, stop)
            self._reading.append((act, where, self._iteration.read(self._reads.tasks(runs, act, to))))
            self._next += 1
        act, where, group = self._reading.popleft()
        self._iteration.wait(group)
        if self._scale is not None:
            multiply(act, self._scale)
        return act, where


class OrderedLoader(Loader):
    """Batches in storage order: example by example, in it layer by layer, in that token by token. Always the same.

    A batch is a dict: `act` float32 (n, d_model), `example_idx` and `token_idx` int64 (n,), with several layers `layer`
    int64 (n,), `token_labels` uint8 (n,) where labels were given (255 for special tokens, which have none), and by name
    those of `options.token_arrays`, (n,) of their dtype (for special tokens 255, -1, NaN or false).
    `token_idx` counts content tokens from 0; -1 is the special token. Memory of a batch belongs to the consumer as long as
    the batch, or any view of it, is referred to; then it is used again. With stacked layers `act` is (n, layers, d_model), its
    layers are `rows.layers`, and there is no `layer`.

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
        super().__init__(rows, chosen_options(options, ReadOptions, changed), labels, make_buffer)
        self._pool: BufferPool | None = None

    def _divide(self) -> None:
        """Nothing depends on the ranks besides the batches."""

    @property
    def _n_ahead(self) -> int:
        """Enough batches under way that all threads have something to read."""
        batch_bytes = self.batch_size * self._space.row_nbytes
        return min(1 + self.n_threads * self._read_bytes // max(batch_bytes, 1), 64)

    def _source(self, epoch: int, first: int, iteration: Iteration, reads: Reads) -> Callable[[], BatchSource]:
        """See `Loader`."""
        del epoch
        shape = (min(self.batch_size, max(self.n_samples, 1)) * self._space.vectors_per_row, self.d_model)
        if self._pool is None or self._pool.shape != shape:
            self._pool = BufferPool(shape, self._prefetch + 6, self._make_buffer or allocate, self._rows.dtype)
        return partial(
            OrderedBatches,
            self._space,
            self._batching,
            self._rank,
            first,
            n_ahead=self._n_ahead,
            pool=self._pool,
            iteration=iteration,
            reads=reads,
            scale=self.scale,
        )

    def _forget_memory(self) -> None:
        """See `Loader`."""
        self._pool = None

    def _order_state(self) -> dict[str, object]:
        """See `Loader`."""
        return {}

    def _adopt(self, state: Mapping[str, object]) -> None:
        """A state says nothing about storage order."""

    def _plan(self) -> Plan:
        """See `Loader`."""
        layout, space = self._space.layout, self._space

        def runs(number: int) -> Runs:
            """The reads of a batch."""
            return runs_of_rows(space, *self._batching.rows_of_rank(number, self._rank))[1]

        plane_bytes = space.tokens.count * layout.vector_nbytes
        first = runs(self._resume_at).n_vectors.sum() if self._resume_at < self._batching.n_batches else 0
        contiguous = len(space.layer_idx) == layout.n_layers and space.tokens.count == layout.tokens_per_example
        return Plan(
            extent_bytes=self._read_bytes if contiguous else min(plane_bytes, self._read_bytes),
            n_parts=self._batching.n_batches,
            runs=runs,
            n_vectors=-(-space.n_rows // self._world) * space.vectors_per_row,
            into_batches=space.vectors_per_row == 1 and self._rows.dtype == self._reader.dtype,
            n_buffers=self._prefetch + self._n_ahead + 2,
            first_batch_bytes=int(first) * layout.vector_nbytes,
        )
