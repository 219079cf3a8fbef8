"""Batches of a seeded shuffle."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Literal, Unpack, get_args

import numpy as np

from saev_store.errors import ArgumentError
from saev_store.loaders._ahead import n_batches_ahead
from saev_store.loaders._base import Loader, Options
from saev_store.loaders._batches import Equipment, PlacedBatches, ShuffledBatches, n_window_rows
from saev_store.loaders._explain import Plan
from saev_store.loaders._medium import Medium
from saev_store.loaders._memory import HostWindow, Outputs, WindowMemory
from saev_store.loaders._reads import Runs
from saev_store.loaders._ring import TABLE_BYTES
from saev_store.loaders._run import Batch
from saev_store.loaders._slots import BlockSlots, RowSlots, runs_of_blocks
from saev_store.loaders._state import whole_number
from saev_store.order import MAX_ROWS_PER_BLOCK, ORDER_VERSION, Blocks, ShuffledOrder, predict_mixing
from saev_store.rows import RowSpace
from saev_store.selected import Selection

Slots = Literal["batch", "block", "row"]

#: Cohorts of a partition that are read ahead of the window: the second where it holds few blocks. Neither depends on the
#: medium, because the order must not. Four keep enough requests under way where each waits for a network.
_N_AHEAD, _N_AHEAD_SMALL = 4, 2
#: Partitions where nothing else is said: any number of ranks that divides it can continue a state.
_N_PARTITIONS = 8
#: A lane's window holds at least this many blocks, or there are fewer lanes.
_MIN_WINDOW_BLOCKS = 8
#: Rows of a block from which on batch slots are the default where they save a copy.
_MIN_BLOCK_ROWS = 32
#: What one read should bring where requests are dear and neighbouring examples are neighbours in the file.
_DEAR_EXTENT_BYTES = 4 << 20


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
    describes.

    Args:
        rows: What to load: `store.sel(…)`.
        seed: Any integer.
        window_bytes: Memory for the window, of this rank. More mixes better; a window of the size of the data gives exact
            permutations.
        slots: What memory is managed in: whole `"block"`s; `"row"`s: twice as many blocks in the same memory, for longer
            I/O vectors; or `"batch"`es to come, to which rows are copied from where they arrived: the default where that saves
            a copy. With equal `window_blocks` the order is the same.
        examples_per_block: Examples that are read and shuffled as one; default: 1, and more where requests are dear and
            neighbouring examples are neighbours in the file.
        n_partitions: Streams of the order, a multiple of `world` that divides the global batch; default: 8 where possible.
        window_blocks: Blocks in the window of one partition, instead of `window_bytes`.
        make_window: Makes the memory of the window, given that of batches; default: plain memory.
        options: As for `OrderedLoader`. With several ranks and without `drop_last`, partitions that are one row short
            repeat their last row, so that all ranks have equally many.

    Raises:
        ArgumentError: a number is out of range, or does not divide what it should.

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
        *,
        seed: int = 17,
        window_bytes: int = 2 << 30,
        slots: Slots | None = None,
        examples_per_block: int | None = None,
        n_partitions: int | None = None,
        window_blocks: int | None = None,
        make_window: Callable[[Outputs], WindowMemory] = HostWindow,
        **options: Unpack[Options],
    ) -> None:
        super().__init__(rows, **options)
        if not isinstance(seed, (int, np.integer)) or isinstance(seed, bool):
            raise ArgumentError(f"seed is {seed!r}; it must be an integer", where="seed")
        if slots is not None and slots not in get_args(Slots):
            raise ArgumentError(f"slots is {slots!r}; it must be 'batch', 'block' or 'row'", where="slots")
        if slots == "batch" and make_window is not HostWindow:
            raise ArgumentError(
                "slots is 'batch', which keeps no window that could lie elsewhere",
                where="slots",
                remedy="Use 'block' or 'row'.",
            )
        for name, value in (("window_bytes", window_bytes), ("window_blocks", window_blocks or 1), ("n_partitions", n_partitions or 1)):  # fmt: skip
            if not isinstance(value, (int, np.integer)) or isinstance(value, bool) or value < 1:
                raise ArgumentError(f"{name} is {value!r}; it must be an integer of at least 1", where=name)
        self._slots: Slots = slots or "block"
        self._seed, self._rows_apart, self._window_bytes = int(seed), slots == "row", int(window_bytes)
        self._fixed_window, self._make_window = window_blocks is not None, make_window
        group = examples_per_block or _examples_per_block(self._space, self._medium)
        blocks = Blocks(self._space, group)
        n_lanes = self._n_partitions(n_partitions, blocks)
        self._geometry = _Geometry(group, n_lanes, 1)
        lane_rows = self._window_bytes // self._space.layout.vector_nbytes * self._world // n_lanes
        has_room = lane_rows >= 4 * _N_AHEAD * blocks.cells_per_block
        self._n_ahead = _N_AHEAD if has_room else _N_AHEAD_SMALL
        window = window_blocks or self._fitting_window(blocks, n_lanes)
        self._geometry = _Geometry(group, n_lanes, window)
        self._blocks = blocks
        # Short blocks need more memory in batches than they would as blocks.
        lends = not rows.reader.transport.reads_into and blocks.cells_per_block >= _MIN_BLOCK_ROWS
        if slots is None and lends and make_window is HostWindow and self._make_buffer is None:
            self._slots = "batch"

    # -- choosing the geometry -----------------------------------------------------------------------------------------

    def _n_partitions(self, wanted: int | None, blocks: Blocks) -> int:
        batch = self._batching.batch_size
        if wanted is not None:
            if batch % wanted or wanted % self._world:
                raise ArgumentError(
                    f"n_partitions is {wanted}; it must divide the global batch of {batch} rows and be a multiple of the "
                    f"{self._world} rank(s)",
                    where="n_partitions",
                )
            return int(wanted)
        block_bytes = blocks.cells_per_block * self._space.layout.vector_nbytes
        per_lane = self._window_bytes // (_MIN_WINDOW_BLOCKS * block_bytes)
        most = max(1, min(_N_PARTITIONS, per_lane * self._world, len(blocks) // 2))
        fitting = [n for n in range(self._world, most + 1, self._world) if batch % n == 0]
        found = max(fitting, default=self._world)
        if found > max(len(self._space), 1) and not self.drop_last:
            raise ArgumentError(
                f"{len(self._space)} rows cannot be shared by {self._world} ranks without drop_last", where="world"
            )
        return found

    def _order(self, epoch: int) -> ShuffledOrder:
        geometry = self._geometry
        share = self._batching.batch_size // geometry.n_partitions
        blocks = Blocks(self._space, geometry.examples_per_block)
        return ShuffledOrder(blocks, self._seed, epoch, geometry.n_partitions, geometry.window_blocks, share)

    def _partitions(self) -> range:
        each = self._geometry.n_partitions // self._world
        return range(self._rank * each, (self._rank + 1) * each)

    def _fitting_window(self, blocks: Blocks, n_partitions: int) -> int:
        """The largest window of a partition that fits into this rank's memory."""
        if not len(blocks):
            return 1
        n_rows = self._window_bytes // self._space.layout.vector_nbytes // (n_partitions // self._world)
        fits = n_rows // blocks.cells_per_block
        if -(-len(blocks) // n_partitions) + 2 <= fits:
            return fits
        kind = RowSlots if self._rows_apart else BlockSlots

        def needed(window: int) -> int:
            order = ShuffledOrder(
                blocks, self._seed, 0, n_partitions, window, self._batching.batch_size // n_partitions
            )
            return kind.n_rows(order.partition(0), self._n_ahead)

        low, high = 1, 4 * fits + 2  # needed(low) is taken as it is: a loader works with any memory
        while high - low > 1:
            middle = (low + high) // 2
            low, high = (middle, high) if needed(middle) <= n_rows else (low, middle)
        return low

    def _needed_bytes(self) -> int:
        """The memory of this rank's window."""
        rows = n_window_rows(self._order(0), self._partitions(), self._n_ahead, rows_apart=self._rows_apart)
        return rows * self._space.layout.vector_nbytes

    @property
    def _n_placed_ahead(self) -> int:
        """Cohorts read ahead where rows need no window: of a far store twice as many, for more requests to be under way."""
        if self._medium.kind != "remote":
            return self._n_ahead
        more = self._n_threads * self._read_bytes // (self.batch_size * self._space.layout.vector_nbytes)
        return self._n_ahead + min(self._n_ahead, more)

    @property
    def _is_strided(self) -> bool:
        """Neighbouring blocks are read at different times."""
        return True

    # -- the contract of Loader ----------------------------------------------------------------------------------------

    def _batches(self, epoch: int, equipment: Equipment) -> Callable[[int, int], Iterator[Batch]]:
        fill_up = self._world > 1 and not self.drop_last
        if self._slots == "batch":
            return PlacedBatches(
                self._order(epoch),
                self._partitions(),
                fill_up=fill_up,
                n_ahead=self._n_placed_ahead,
                equipment=equipment,
            ).batches
        return ShuffledBatches(
            self._order(epoch),
            self._partitions(),
            fill_up=fill_up,
            n_ahead=self._n_ahead,
            rows_apart=self._rows_apart,
            equipment=equipment,
        ).batches

    def _new_window(self, outputs: Outputs) -> WindowMemory:
        return self._make_window(outputs)

    def _plan(self) -> Plan:
        order, layout, space = self._order(self._epoch), self._space.layout, self._space
        plane_bytes = space.tokens.count * layout.vector_nbytes
        joined = order.blocks.examples_per_block if layout.n_layers == 1 else 1
        parts = [order.partition(number) for number in self._partitions()]

        def runs(number: int) -> Runs:
            # Cohorts of the same number are read together, as long as no lane gets ahead of the others.
            found = [part.block_numbers(number) for part in parts if number < part.n_cohorts]
            numbers = np.concatenate(found)
            return runs_of_blocks(
                order.blocks, numbers, np.zeros_like(numbers), np.array([len(some) for some in found])
            )

        window_bytes, ahead_bytes = self._needed_bytes(), 0
        if self._slots == "batch":
            batch_bytes = self.batch_size * (layout.vector_nbytes + TABLE_BYTES)
            window_bytes = n_batches_ahead(parts, self._n_ahead) * batch_bytes
            ahead_bytes = n_batches_ahead(parts, self._n_placed_ahead) * batch_bytes - window_bytes
        return Plan(
            extent_bytes=min(plane_bytes * joined, max(self._read_bytes, plane_bytes)),
            n_parts=max(part.n_cohorts for part in parts),
            runs=runs,
            n_vectors=sum(part.n_blocks for part in parts) * order.blocks.cells_per_block,
            n_buffers=self._prefetch + 3,
            window_bytes=window_bytes,
            ahead_bytes=ahead_bytes,
            slots=self._slots,
            n_partitions=order.n_partitions,
            examples_per_block=order.blocks.examples_per_block,
            mixing=predict_mixing(order, self.batch_size, len(self._partitions())),
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
        for part in map(order.partition, self._partitions()):
            emitted = part.rows(batch * share, (batch + 1) * share)
            found.append(order.blocks.places(emitted.block).first + emitted.cell // n_tokens)
        return np.concatenate(found)

    def _identity(self) -> dict[str, object]:
        return {**super()._identity(), "seed": self._seed, "order_version": ORDER_VERSION}

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
            whole_number(state, "examples_per_block", 1, MAX_ROWS_PER_BLOCK),
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
        mine, self._geometry = self._geometry, geometry
        needed = self._needed_bytes()
        if needed > self._window_bytes:  # rather read less ahead than refuse
            self._n_ahead = _N_AHEAD_SMALL
            needed = self._needed_bytes()
        if mine != geometry and not self._fixed_window and needed > self._window_bytes:
            self._geometry = mine
            raise ArgumentError(
                f"the state's window takes {needed:,} bytes on each of {self._world} rank(s), but window_bytes is "
                f"{self._window_bytes:,}",
                where="load_state_dict",
                remedy=f"Make the loader with window_bytes={needed}.",
            )


def _examples_per_block(space: RowSpace, medium: Medium) -> int:
    """One, or as many as make a good extent where requests are dear and nothing else lies in between."""
    layout = space.layout
    plane_bytes = space.tokens.count * layout.vector_nbytes
    contiguous = layout.n_layers == 1 and 2 * space.tokens.count > layout.tokens_per_example
    if medium.kind not in ("disk", "parallel", "remote") or not contiguous:
        return 1
    return max(1, min(_DEAR_EXTENT_BYTES // plane_bytes, space.n_examples // 64))
