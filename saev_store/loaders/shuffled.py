"""Batches of a seeded shuffle."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial
from typing import NamedTuple, Unpack

import numpy as np

from saev_store.core.arguments import check_count
from saev_store.core.layout import IntArray
from saev_store.core.rows import Labels, RowSpace
from saev_store.errors import ArgumentError
from saev_store.loaders._base import Loader
from saev_store.loaders._batches import BatchSource
from saev_store.loaders._explain import Plan
from saev_store.loaders._identity import truth, whole_number
from saev_store.loaders._iteration import Iteration
from saev_store.loaders._medium import Kind
from saev_store.loaders._reads import Reads, Runs
from saev_store.loaders._ring import TABLE_BYTES, Allocate, BatchRing, BufferPool, HostMemory, MakeMemory, allocate
from saev_store.loaders._shuffled_batches import ShuffledBatches, first_ticks, n_batches_ahead, runs_of_blocks
from saev_store.loaders.options import ShuffleArguments, ShuffleOptions, chosen_options
from saev_store.order import Batching, Blocks, Partition, ShuffledOrder, predict_mixing
from saev_store.store.selection import Selection

#: The window where nothing else is said.
WINDOW_BYTES = 2 << 30
#: Cohorts of a partition that are read ahead of the window: the second where it holds few blocks. Neither depends on the
#: medium, because the order must not. Four keep enough requests under way where each waits for a network.
_N_AHEAD, _N_AHEAD_SMALL = 4, 2
#: Partitions where nothing else is said: any number of ranks that divides it can continue a state.
_N_PARTITIONS = 8
#: A lane's window holds at least this many blocks, or there are fewer lanes.
_MIN_WINDOW_BLOCKS = 8
#: What is rounded may take this share of a window besides; it is more only where blocks are short.
_ROUNDED_SHARE = 32
#: What one read should bring where requests are expensive and neighbouring examples are neighbours in the file.
_LARGE_EXTENT_BYTES = 4 << 20


class Geometry(NamedTuple):
    """What the order is made with, besides seed and epoch; a part of the loader's state."""

    examples_per_block: int
    n_partitions: int
    window_blocks: int
    early_start: bool


def choose_geometry(
    space: RowSpace, options: ShuffleOptions, batching: Batching, kind: Kind, rows_in_memory: int
) -> tuple[Geometry, int]:
    """What the order is made with where the options do not say it, and how many cohorts are read ahead of the window.

    Args:
        space: The rows.
        options: What is said.
        batching: How many ranks share which batches.
        kind: What the shards lie on.
        rows_in_memory: What the memory of the window holds, of one rank.

    Raises:
        ArgumentError: `n_partitions` does not divide what it should, or there are fewer rows than partitions.
    """
    layout, batch, world = space.layout, batching.batch_size, batching.world
    block_bytes = space.tokens.count * space.row_nbytes
    group = options.examples_per_block
    if group is None:
        # As many as make a good extent where requests are expensive and nothing else lies in between.
        is_contiguous = space.vectors_per_row == layout.n_layers and 2 * space.tokens.count > layout.tokens_per_example
        is_expensive = kind in ("disk", "parallel", "remote")
        most = _LARGE_EXTENT_BYTES // block_bytes if is_contiguous and is_expensive else 1
        group = max(1, min(most, space.n_examples // 64))
    blocks = Blocks(space, group)
    n_partitions = options.n_partitions
    if n_partitions is None:
        per_partition = rows_in_memory // (_MIN_WINDOW_BLOCKS * blocks.cells_per_block)
        most = max(1, min(_N_PARTITIONS, per_partition * world, blocks.n_blocks // 2))
        n_partitions = max((n for n in range(world, most + 1, world) if batch % n == 0), default=world)
    elif batch % n_partitions or n_partitions % world:
        raise ArgumentError(
            f"n_partitions is {n_partitions}; it must divide the global batch of {batch} rows and be a multiple of the "
            f"{world} rank(s)",
            where="n_partitions",
        )
    check_shares(batching, n_partitions, where="world" if options.n_partitions is None else "n_partitions")
    n_rows = rows_in_memory * world // n_partitions
    n_ahead = _N_AHEAD if n_rows >= 4 * _N_AHEAD * blocks.cells_per_block else _N_AHEAD_SMALL
    if options.window_blocks is not None:
        return Geometry(group, n_partitions, options.window_blocks, options.early_start), n_ahead
    # The largest window of a partition that fits into this rank's memory.
    n_rows = rows_in_memory // (n_partitions // world)
    window = n_rows // blocks.cells_per_block if blocks.n_blocks else 1
    if blocks.n_blocks and -(-blocks.n_blocks // n_partitions) + 2 > window:
        share, early = batch // n_partitions, options.early_start
        order = ShuffledOrder(blocks, options.seed, 0, n_partitions, 1, share, early_start=early)
        low, high = 1, 4 * window + 2  # a window of 1 is taken as it is: a loader works with any memory
        while high - low > 1:
            middle = (low + high) // 2
            fits = window_rows(Partition(order, 0, middle), n_ahead) <= n_rows
            low, high = (middle, high) if fits else (low, middle)
        window = low
    return Geometry(group, n_partitions, window, options.early_start), n_ahead


def window_rows(part: Partition, n_ahead: int) -> int:
    """Rows that the window of a partition counts for."""
    rows = part.window_rows(n_ahead)
    return max(rows, part.placed_rows(n_ahead) - rows // _ROUNDED_SHARE)


def check_shares(batching: Batching, n_partitions: int, *, where: str) -> None:
    """Refuse partitions without any row, where these have to repeat their last one so that all ranks have equally many.

    Raises:
        ArgumentError: there are more partitions than rows.
    """
    if batching.world > 1 and not batching.drop_last and 0 < batching.n_rows < n_partitions:
        raise ArgumentError(
            f"{batching.n_rows} rows cannot be shared by {n_partitions} partitions on {batching.world} ranks without "
            "drop_last",
            where=where,
        )


class ShuffledLoader(Loader):
    """Batches of a seeded shuffle, at the speed of the hardware; the same for the same arguments, on every machine.

    A window of blocks (a block is one layer, or all stacked layers, of one example or of a few) slides over the permuted blocks; docs/loaders.md
    says how, and what it means for mixing. `loader.explain()` says it for this loader. Batches are as `OrderedLoader`
    describes. With several ranks and without `drop_last`, partitions that are one row short repeat their last row, so that
    all ranks have equally many.

    Args:
        rows: What to load: `store.sel(…)`.
        options: How; default: `ShuffleOptions()`.
        labels: `store.labels`, to have them in the batches.
        make_buffer: Makes memory that batches are copied to, such as pinned memory; default: they are lent from the memory
            that they are read to.
        memory: Makes what batches to come are kept in, for a number of rows and of numbers in a row; default: this machine's
            memory.
        changed: Fields of `ShuffleOptions`, instead of what `options` says.

    Raises:
        ArgumentError: an option is out of range, or does not divide what it should.

    >>> from saev_store import ShardStore
    >>> store = ShardStore.open(SAMPLE)
    >>> with ShuffledLoader(store.sel(layer=5, tokens="content"), batch_size=8, seed=1) as loader:
    ...     [len(batch["act"]) for batch in loader]
    [8, 8, 8, 4]
    """

    kind = "shuffled"
    _n_busy = 1
    _reads_far_apart = True

    def __init__(
        self,
        rows: Selection,
        options: ShuffleOptions | None = None,
        *,
        labels: Labels | None = None,
        make_buffer: Allocate | None = None,
        memory: MakeMemory | None = None,
        **changed: Unpack[ShuffleArguments],
    ) -> None:
        self._shuffle = chosen_options(options, ShuffleOptions, changed)
        self._window_bytes = self._shuffle.window_bytes or WINDOW_BYTES
        self._memory, self._ring = memory, None
        super().__init__(rows, self._shuffle, labels, make_buffer)

    def _given(self) -> dict[str, object]:
        """See `Loader`."""
        return {**super()._given(), "memory": self._memory}

    @property
    def _row_nbytes(self) -> int:
        """What a row of the window costs."""
        return self._space.row_nbytes

    def _divide(self) -> None:
        """See `Loader`."""
        rows_in_memory = self._window_bytes // self._row_nbytes
        self._geometry, self._n_ahead = choose_geometry(
            self._space, self._shuffle, self._batching, self._medium.kind, rows_in_memory
        )

    def _partitions(self, epoch: int) -> list[Partition]:
        """This rank's partitions of the order of an epoch."""
        group, n_partitions, window_blocks, early_start = self._geometry
        share, blocks = self._batching.batch_size // n_partitions, Blocks(self._space, group)
        seed = self._shuffle.seed
        order = ShuffledOrder(blocks, seed, epoch, n_partitions, window_blocks, share, early_start=early_start)
        each = n_partitions // self._world
        return [Partition(order, number) for number in range(self._rank * each, (self._rank + 1) * each)]

    def _source(self, epoch: int, first: int, iteration: Iteration, reads: Reads) -> Callable[[], BatchSource]:
        """See `Loader`."""
        parts, n_ahead = self._partitions(epoch), self._n_cohorts_ahead()
        n_slots = n_batches_ahead(parts, n_ahead) + 2
        # Epochs differ a little in how many slots they need; a ring with more than enough stays.
        if self._ring is None or self._ring.n_lanes != len(parts) or self._ring.n_slots < n_slots:
            self._ring = None  # give it back first: both at once might be too much
            make = self._memory
            if make is None:
                pool, stored, dtype = None, self._reader.dtype, self._rows.dtype
                if self._make_buffer is not None or stored != dtype:
                    shape = (self.batch_size * self._space.vectors_per_row, self.d_model)
                    make_buffer = self._make_buffer or allocate
                    pool = BufferPool(shape, self._prefetch + 4, make_buffer, dtype)
                make = partial(HostMemory, pool=pool, stored=stored, dtype=dtype)
            self._ring = BatchRing(
                make,
                n_slots=n_slots,
                # Those that are ready, the consumer's, and one that waits to be put with these.
                n_lent=self._prefetch + 2,
                n_lanes=len(parts),
                batch_rows=self.batch_size,
                d_model=self.d_model,
                vectors_per_row=self._space.vectors_per_row,
            )
        return partial(
            ShuffledBatches,
            parts,
            first,
            self._batching.n_batches,
            fill_up=self._fills_up,
            # Copies out of memory wait for nothing, and memory that is not touched costs nothing.
            most_ahead=n_ahead * (1 if self._medium.kind in ("memory", "cached") else 2),
            ring=self._ring,
            iteration=iteration,
            reads=reads,
            scale=self.scale,
        )

    @property
    def _fills_up(self) -> bool:
        """Whether partitions that are one row short repeat their last one."""
        return self._world > 1 and not self.drop_last

    def _n_cohorts_ahead(self) -> int:
        """Cohorts read ahead: of a remote store up to twice as many, for more requests to be under way."""
        if self._medium.kind != "remote":
            return self._n_ahead
        more = self.n_threads * self._read_bytes // (self.batch_size * self._space.row_nbytes)
        return self._n_ahead + min(self._n_ahead, more)

    def _forget_memory(self) -> None:
        """See `Loader`."""
        self._ring = None

    # -- looking into it -----------------------------------------------------------------------------------------------

    def _plan(self) -> Plan:
        """See `Loader`."""
        parts, layout, space = self._partitions(self._epoch), self._space.layout, self._space
        order, blocks = parts[0].order, parts[0].order.blocks
        is_whole = space.vectors_per_row == layout.n_layers
        plane_bytes = space.tokens.count * (space.row_nbytes if is_whole else layout.vector_nbytes)
        joined = blocks.examples_per_block if is_whole else 1

        def runs(number: int) -> Runs:
            """The reads of a cohort of all lanes."""
            # Cohorts of the same number are read together, as long as no lane gets ahead of the others.
            found = [part.block_numbers(number) for part in parts if number < part.n_cohorts]
            return runs_of_blocks(blocks, np.concatenate(found), np.array([len(some) for some in found]))

        n_first = 0
        if self._resume_at < self._batching.n_batches:
            _, begins, lasts = first_ticks(parts, self._resume_at, fill_up=self._fills_up)
            for part, begin, last in zip(parts, begins, lasts, strict=True):
                numbers = part.numbers_between(begin, part.entered(last))
                n_first += int(blocks.places(numbers).n_examples.sum()) * space.tokens.count
        batch_bytes = self.batch_size * (space.row_nbytes + TABLE_BYTES)
        window_bytes = n_batches_ahead(parts, self._n_ahead) * batch_bytes
        return Plan(
            extent_bytes=min(plane_bytes * joined, max(self._read_bytes, plane_bytes)),
            n_parts=max(part.n_cohorts for part in parts),
            runs=runs,
            n_vectors=sum(part.n_blocks for part in parts) * blocks.cells_per_block * space.vectors_per_row,
            # Besides those that are lent, one is begun and one ends.
            n_buffers=self._prefetch + 4,
            first_batch_bytes=n_first * space.row_nbytes,
            window_bytes=window_bytes,
            ahead_bytes=n_batches_ahead(parts, self._n_cohorts_ahead()) * batch_bytes - window_bytes,
            n_partitions=order.n_partitions,
            examples_per_block=blocks.examples_per_block,
            mixing=predict_mixing(order, self.batch_size, len(parts)),
        )

    @property
    def n_examples(self) -> int:
        """Examples that the rows come from."""
        return self._space.n_examples

    def examples_of(self, batch: int) -> IntArray:
        """The examples, counted among the chosen ones, of this rank's rows in a batch of the current epoch, int64.

        By arithmetic alone: nothing is read.

        Raises:
            ArgumentError: the epoch has no such batch.
        """
        if check_count(batch, name="batch", least=0) >= len(self):
            raise ArgumentError(f"batch is {batch}; the epoch has {len(self)} batches", where="batch")
        n_tokens, found = self._space.tokens.count, list[IntArray]()
        for part in self._partitions(self._epoch):
            share = part.order.rows_per_tick
            emitted = part.rows(batch * share, (batch + 1) * share)
            found.append(part.order.blocks.places(emitted.block).first + emitted.cell // n_tokens)
        return np.concatenate(found)

    # -- state ---------------------------------------------------------------------------------------------------------

    def _identity(self) -> dict[str, object]:
        """See `Loader`."""
        return {**super()._identity(), "seed": self._shuffle.seed, "order_version": ShuffledOrder.VERSION}

    def _order_state(self) -> dict[str, object]:
        """See `Loader`."""
        return self._geometry._asdict()

    def _geometry_of(self, state: Mapping[str, object]) -> Geometry:
        """What the order of a state was made with.

        Raises:
            ArgumentError: a part is missing, or none that a loader writes.
        """
        return Geometry(
            whole_number(state, "examples_per_block", 1, Blocks.MAX_ROWS),
            whole_number(state, "n_partitions", 1, self._batching.batch_size),
            whole_number(state, "window_blocks", 1),
            # States that are older than the option do not have it.
            truth(state, "early_start", default=False),
        )

    def _adopt(self, state: Mapping[str, object]) -> None:
        """See `Loader`."""
        geometry, batch = self._geometry_of(state), self._batching.batch_size
        if batch % geometry.n_partitions or geometry.n_partitions % self._world:
            raise ArgumentError(
                f"the state has n_partitions = {geometry.n_partitions}, which {self._world} rank(s) and batches of {batch} "
                "rows cannot share equally",
                where="load_state_dict",
                remedy="Use a number of ranks that divides it.",
            )
        check_shares(self._batching, geometry.n_partitions, where="load_state_dict")
        mine, n_ahead = self._geometry, self._n_ahead
        self._geometry = geometry
        needed = self._needed_bytes()
        if needed > self._window_bytes:  # rather read less ahead than refuse
            self._n_ahead = _N_AHEAD_SMALL
            needed = self._needed_bytes()
        if mine != geometry and self._shuffle.window_blocks is None and needed > self._window_bytes:
            self._geometry, self._n_ahead = mine, n_ahead
            raise ArgumentError(
                f"the state's window takes {needed:,} bytes on each of {self._world} rank(s), but window_bytes is "
                f"{self._window_bytes:,}",
                where="load_state_dict",
                remedy=f"Make the loader with window_bytes={needed}.",
            )

    def _needed_bytes(self) -> int:
        """The memory of this rank's window."""
        rows = sum(min(window_rows(part, self._n_ahead), part.n_rows) for part in self._partitions(0))
        return rows * self._row_nbytes
