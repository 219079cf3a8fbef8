"""Batches of a seeded shuffle."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, replace
from functools import partial
from typing import Unpack

import numpy as np

from saev_store.core.rows import Labels, RowSpace
from saev_store.errors import ArgumentError
from saev_store.loaders._base import Loader
from saev_store.loaders._explain import Plan
from saev_store.loaders._identity import whole_number
from saev_store.loaders._iteration import BatchContext
from saev_store.loaders._medium import Medium
from saev_store.loaders._ring import TABLE_BYTES, Allocate, BatchRing, BufferPool, HostMemory, RingMemory
from saev_store.loaders._rows import Batch, Runs, runs_of_blocks
from saev_store.loaders._shuffled_batches import ShuffledBatches, n_batches_ahead
from saev_store.loaders.options import ShuffleArguments, ShuffleOptions
from saev_store.order import Blocks, Partition, ShuffledOrder
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


@dataclass(frozen=True)
class _Geometry:
    """What the order is made with, besides seed and epoch."""

    examples_per_block: int
    n_partitions: int
    window_blocks: int


class ShuffledLoader(Loader):
    """Batches of a seeded shuffle, at the speed of the hardware; the same for the same arguments, on every machine.

    A window of blocks (a block is one layer of one example, or of a few) slides over the permuted blocks; docs/loaders.md
    says how, and what it means for mixing. `loader.explain()` says it for this loader. Batches are as `OrderedLoader`
    describes. With several ranks and without `drop_last`, partitions that are one row short repeat their last row, so that
    all ranks have equally many.

    Args:
        rows: What to load: `store.sel(…)`.
        options: How; default: `ShuffleOptions()`.
        labels: `store.labels`, to have them in the batches.
        make_buffer: Makes memory that batches are copied to, such as pinned memory; default: they are lent from the memory
            that they are read to.
        memory: Makes what batches to come are kept in; default: in this machine's memory.
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

    def __init__(
        self,
        rows: Selection,
        options: ShuffleOptions | None = None,
        *,
        labels: Labels | None = None,
        make_buffer: Allocate | None = None,
        memory: Callable[[], RingMemory] | None = None,
        **changed: Unpack[ShuffleArguments],
    ) -> None:
        self._shuffle = replace(options or ShuffleOptions(), **changed)
        self._window_bytes = int(self._shuffle.window_bytes or WINDOW_BYTES)
        self._ring: BatchRing | None = None
        super().__init__(rows, self._shuffle, labels, make_buffer)
        self._memory = memory

    # -- choosing the geometry -----------------------------------------------------------------------------------------

    def _share_out(self, rank: int, world: int) -> None:
        super()._share_out(rank, world)
        group = self._shuffle.examples_per_block or _examples_per_block(self._space, self._medium)
        blocks = Blocks(self._space, group)
        n_lanes = self._n_partitions(blocks)
        lane_rows = self._window_bytes // self._space.layout.vector_nbytes * self._world // n_lanes
        has_room = lane_rows >= 4 * _N_AHEAD * blocks.cells_per_block
        self._n_ahead = _N_AHEAD if has_room else _N_AHEAD_SMALL
        window = self._shuffle.window_blocks or self._fitting_window(blocks, n_lanes)
        self._geometry = _Geometry(group, n_lanes, window)

    def _n_partitions(self, blocks: Blocks) -> int:
        batch, wanted = self._batching.batch_size, self._shuffle.n_partitions
        if wanted is not None and (batch % wanted or wanted % self._world):
            raise ArgumentError(
                f"n_partitions is {wanted}; it must divide the global batch of {batch} rows and be a multiple of the "
                f"{self._world} rank(s)",
                where="n_partitions",
            )
        if wanted is not None:
            self._check_shares(wanted, "n_partitions")
            return int(wanted)
        block_bytes = blocks.cells_per_block * self._space.layout.vector_nbytes
        per_lane = self._window_bytes // (_MIN_WINDOW_BLOCKS * block_bytes)
        most = max(1, min(_N_PARTITIONS, per_lane * self._world, len(blocks) // 2))
        fitting = [n for n in range(self._world, most + 1, self._world) if batch % n == 0]
        found = max(fitting, default=self._world)
        self._check_shares(found, "world")
        return found

    def _check_shares(self, n_partitions: int, where: str) -> None:
        """A partition without any row has none to repeat."""
        if self._fills_up and 0 < len(self._space) < n_partitions:
            raise ArgumentError(
                f"{len(self._space)} rows cannot be shared by {n_partitions} partitions on {self._world} ranks without "
                "drop_last",
                where=where,
            )

    @property
    def _fills_up(self) -> bool:
        """Whether partitions that are one row short repeat their last row."""
        return self._world > 1 and not self.drop_last

    def _order(self, epoch: int) -> ShuffledOrder:
        geometry = self._geometry
        share = self._batching.batch_size // geometry.n_partitions
        blocks = Blocks(self._space, geometry.examples_per_block)
        return ShuffledOrder(
            blocks, int(self._shuffle.seed), epoch, geometry.n_partitions, geometry.window_blocks, share
        )

    def _partitions(self, order: ShuffledOrder) -> list[Partition]:
        """This rank's."""
        each = order.n_partitions // self._world
        return [order.partition(number) for number in range(self._rank * each, (self._rank + 1) * each)]

    def _fitting_window(self, blocks: Blocks, n_partitions: int) -> int:
        """The largest window of a partition that fits into this rank's memory."""
        if not len(blocks):
            return 1
        n_rows = self._window_bytes // self._space.layout.vector_nbytes // (n_partitions // self._world)
        fits = n_rows // blocks.cells_per_block
        if -(-len(blocks) // n_partitions) + 2 <= fits:
            return fits
        seed, share = int(self._shuffle.seed), self._batching.batch_size // n_partitions

        def needed(window: int) -> int:
            return _window_rows(ShuffledOrder(blocks, seed, 0, n_partitions, window, share).partition(0), self._n_ahead)

        low, high = 1, 4 * fits + 2  # needed(low) is taken as it is: a loader works with any memory
        while high - low > 1:
            middle = (low + high) // 2
            low, high = (middle, high) if needed(middle) <= n_rows else (low, middle)
        return low

    def _needed_bytes(self) -> int:
        """The memory of this rank's window."""
        rows = sum(_window_rows(part, self._n_ahead) for part in self._partitions(self._order(0)))
        return rows * self._space.layout.vector_nbytes

    @property
    def _n_cohorts_ahead(self) -> int:
        """Cohorts read ahead: of a remote store up to twice as many, for more requests to be under way."""
        if self._medium.kind != "remote":
            return self._n_ahead
        more = self._n_threads * self._read_bytes // (self.batch_size * self._space.layout.vector_nbytes)
        return self._n_ahead + min(self._n_ahead, more)

    @property
    def _is_strided(self) -> bool:
        """Neighbouring blocks are read at different times."""
        return True

    # -- the contract of Loader ----------------------------------------------------------------------------------------

    def _batches(self, epoch: int, first: int, stop: int, context: BatchContext) -> Callable[[], Iterable[Batch]]:
        if first >= stop:
            return tuple
        ring = self._ring = self._ring or BatchRing(self._memory() if self._memory else HostMemory(self._pool()))
        return partial(
            ShuffledBatches,
            self._partitions(self._order(epoch)),
            first,
            stop,
            fill_up=self._fills_up,
            n_ahead=self._n_cohorts_ahead,
            # Copies out of memory wait for nothing, and memory that is not touched costs nothing.
            most_ahead=self._n_cohorts_ahead * (1 if self._medium.kind in ("memory", "cached") else 2),
            # Those that are ready, the consumer's, and one that waits to be put with these.
            n_lent=self._prefetch + 2,
            ring=ring,
            context=context,
        )

    def _pool(self) -> BufferPool | None:
        """Memory that batches are copied to, where it is not the ring's."""
        if self._make_buffer is None:
            return None
        return BufferPool((self.batch_size, self.d_model), self._prefetch + 4, self._make_buffer)

    def _forget_memory(self) -> None:
        self._ring = None

    def _plan(self) -> Plan:
        order, layout, space = self._order(self._epoch), self._space.layout, self._space
        plane_bytes = space.tokens.count * layout.vector_nbytes
        joined = order.blocks.examples_per_block if layout.n_layers == 1 else 1
        parts = self._partitions(order)

        def runs(number: int) -> Runs:
            # Cohorts of the same number are read together, as long as no lane gets ahead of the others.
            found = [part.block_numbers(number) for part in parts if number < part.n_cohorts]
            return runs_of_blocks(order.blocks, np.concatenate(found), np.array([len(some) for some in found]))

        batch_bytes = self.batch_size * (layout.vector_nbytes + TABLE_BYTES)
        window_bytes = n_batches_ahead(parts, self._n_ahead) * batch_bytes
        return Plan(
            extent_bytes=min(plane_bytes * joined, max(self._read_bytes, plane_bytes)),
            n_parts=max(part.n_cohorts for part in parts),
            runs=runs,
            n_vectors=sum(part.n_blocks for part in parts) * order.blocks.cells_per_block,
            # Besides those that are lent, one is begun and one ends.
            n_buffers=self._prefetch + 4,
            window_bytes=window_bytes,
            ahead_bytes=n_batches_ahead(parts, self._n_cohorts_ahead) * batch_bytes - window_bytes,
            n_partitions=order.n_partitions,
            examples_per_block=order.blocks.examples_per_block,
            mixing=order.mixing(self.batch_size, len(parts)),
        )

    @property
    def n_examples(self) -> int:
        """Examples that the rows come from."""
        return self._space.n_examples

    def examples_of(self, batch: int) -> np.ndarray:
        """The examples, counted among the chosen ones, of this rank's rows in a batch of the current epoch, int64.

        By arithmetic alone: nothing is read.
        """
        order = self._order(self._epoch)
        share, n_tokens = order.rows_per_tick, self._space.tokens.count
        found = []
        for part in self._partitions(order):
            emitted = part.rows(batch * share, (batch + 1) * share)
            found.append(order.blocks.places(emitted.block).first + emitted.cell // n_tokens)
        return np.concatenate(found)

    def _identity(self) -> dict[str, object]:
        return {**super()._identity(), "seed": int(self._shuffle.seed), "order_version": ShuffledOrder.VERSION}

    def _order_state(self) -> dict[str, object]:
        geometry = self._geometry
        return {
            "examples_per_block": geometry.examples_per_block,
            "n_partitions": geometry.n_partitions,
            "window_blocks": geometry.window_blocks,
        }

    def _adopt(self, state: Mapping[str, object]) -> None:
        batch = self._batching.batch_size
        geometry = _Geometry(
            whole_number(state, "examples_per_block", 1, Blocks.MAX_ROWS),
            whole_number(state, "n_partitions", 1, batch),
            whole_number(state, "window_blocks", 1),
        )
        if batch % geometry.n_partitions or geometry.n_partitions % self._world:
            raise ArgumentError(
                f"the state has n_partitions = {geometry.n_partitions}, which {self._world} rank(s) and batches of {batch} "
                "rows cannot share equally",
                where="load_state_dict",
                remedy="Use a number of ranks that divides it.",
            )
        self._check_shares(geometry.n_partitions, "load_state_dict")
        mine, self._geometry = self._geometry, geometry
        needed = self._needed_bytes()
        if needed > self._window_bytes:  # rather read less ahead than refuse
            self._n_ahead = _N_AHEAD_SMALL
            needed = self._needed_bytes()
        if mine != geometry and self._shuffle.window_blocks is None and needed > self._window_bytes:
            self._geometry = mine
            raise ArgumentError(
                f"the state's window takes {needed:,} bytes on each of {self._world} rank(s), but window_bytes is "
                f"{self._window_bytes:,}",
                where="load_state_dict",
                remedy=f"Make the loader with window_bytes={needed}.",
            )


def _window_rows(part: Partition, n_ahead: int) -> int:
    """Rows that the window of a partition counts for."""
    rows = part.window_rows(n_ahead)
    return max(rows, part.placed_rows(n_ahead) - rows // _ROUNDED_SHARE)


def _examples_per_block(space: RowSpace, medium: Medium) -> int:
    """One, or as many as make a good extent where requests are expensive and nothing else lies in between."""
    layout = space.layout
    plane_bytes = space.tokens.count * layout.vector_nbytes
    contiguous = layout.n_layers == 1 and 2 * space.tokens.count > layout.tokens_per_example
    if medium.kind not in ("disk", "parallel", "remote") or not contiguous:
        return 1
    return max(1, min(_LARGE_EXTENT_BYTES // plane_bytes, space.n_examples // 64))
