"""Reads of a pool: ranges of shards, and the slot of each row that they hold."""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate, pairwise
from operator import add

import numpy as np
import numpy.typing as npt

from saev_store.core.dtypes import converted
from saev_store.core.layout import IntArray, shard_name
from saev_store.errors import NotFoundError
from saev_store.loaders.memory import Bytes
from saev_store.order import Pool
from saev_store.store.selection import Selection
from saev_store.transport.checks import Buffer

#: What one task reads, about: small enough to share the work, large enough for a request.
TASK_BYTES = 4 << 20
#: Tokens that are left out are read along if there are fewer bytes of them than this in a row.
_GAP_BYTES = 64 << 10
#: Vectors of another dtype are converted in pieces that stay in the processor's cache.
_CONVERT_BYTES = 512 << 10

#: Memory that tasks read to, used again by the next ones.
Scratch = deque[Bytes]


@dataclass(frozen=True, eq=False)
class Side:
    """The vectors of one selection in the memory of a pool.

    Attributes:
        name: Their key in a batch.
        rows: The selection.
        first_byte: Where they begin in the memory of a pool.
        row_nbytes: Bytes of a row there.
    """

    name: str
    rows: Selection
    first_byte: int
    row_nbytes: int

    def vectors(self, memory: Bytes, n_rows: int) -> npt.NDArray[np.generic]:
        """Return the rows in the memory of a pool: a view (n, d_model), or (n, layers, d_model) if layers are stacked."""
        end = self.first_byte + n_rows * self.row_nbytes
        return memory[self.first_byte : end].view(self.rows.dtype).reshape(n_rows, *self.rows.shape[1:])


@dataclass(frozen=True, eq=False)
class ReadTask:
    """Ranges of one shard, and the slots of their rows.

    Attributes:
        side: What is read.
        n_slots: Rows of the pool.
        shard_idx: The shard.
        highest: The last example that is read, counted in the shard.
        starts: First byte of each range: int64 (ranges, layers of a row).
        n_cells: Vectors of each range: int64 (ranges,).
        slots: Slot of each row: int64 (rows,).
        cells: Which vector of the ranges each row is: int64 (rows,); None if each is a row.
        is_direct: True if the ranges can be read straight into the pool.
    """

    side: Side
    n_slots: int
    shard_idx: int
    highest: int
    starts: IntArray
    n_cells: IntArray
    slots: IntArray
    cells: IntArray | None
    is_direct: bool

    def run(self, pool: Bytes, stop: threading.Event, scratch: Scratch) -> None:
        """Read to the memory of a pool, unless `stop` is set.

        Raises:
            CorruptShardError: the shard is missing, short, or lost.
            TransportError: it cannot be read.
        """
        if stop.is_set():
            return
        reader, n_layers = self.side.rows.reader, self.starts.shape[1]
        reader.check(self.shard_idx, self.highest)
        transport, path = reader.transport, shard_name(self.shard_idx)
        v, d_model = reader.layout.vector_nbytes, reader.layout.d_model
        out = self.side.vectors(pool, self.n_slots).reshape(self.n_slots, n_layers, d_model)
        bounds = np.append(0, np.cumsum(self.n_cells))
        # Layer after layer, so that the ranges of each follow each other in memory.
        starts = self.starts.T.ravel().tolist()
        sizes: list[int] = (self.n_cells * v).tolist() * n_layers
        get = transport.cached_ranges if transport.is_local else transport.get_ranges
        memory = None
        try:
            found = get(path, starts=starts, ends=list(map(add, starts, sizes)))
            if found is None and self.is_direct:
                target = out.reshape(-1).view(np.uint8).data[int(self.slots[0]) * v :]
                transport.readinto(path, starts=starts, buffers=_cut(target, sizes))
                return
            if found is None:
                memory = scratch.pop() if scratch else np.empty(2 * TASK_BYTES, np.uint8)
                needed = sum(sizes)
                used = memory if memory.nbytes >= needed else np.empty(needed, np.uint8)
                transport.readinto(path, starts=starts, buffers=_cut(used.data, sizes))
                found = _cut(used.data, [needed // n_layers] * n_layers)
                bounds = bounds[[0, -1]]
            self._scatter(found, bounds.tolist(), out)
        except NotFoundError:
            reader.check_size(self.shard_idx)
            raise
        finally:
            if memory is not None:
                scratch.append(memory)

    def _scatter(self, found: Sequence[Buffer], bounds: Sequence[int], out: npt.NDArray[np.generic]) -> None:
        """Copy the rows to their slots (slots, layers, d_model).

        Args:
            found: The vectors of each layer, in parts.
            bounds: First vector of each part, counted through the ranges of a layer, and the number of all.
            out: The rows of the pool.
        """
        stored, dtype, first = self.side.rows.reader.dtype, out.dtype, int(self.slots[0])
        edges = bounds if self.cells is None else np.searchsorted(self.cells, bounds).tolist()
        void = np.dtype(f"V{out.shape[-1] * dtype.itemsize}")
        step = len(self.slots) if stored == dtype else max(1, _CONVERT_BYTES // void.itemsize)
        for number, part in enumerate(found):
            layer, i = divmod(number, len(bounds) - 1)
            vectors, targets = np.frombuffer(part, stored).reshape(-1, out.shape[-1]), out[:, layer].view(void)[:, 0]
            for lo in range(edges[i], edges[i + 1], step):
                hi = min(lo + step, edges[i + 1])
                if self.cells is None:
                    picked = vectors[lo - bounds[i] : hi - bounds[i]]
                else:
                    picked = vectors[self.cells[lo:hi] - bounds[i]]
                slots = slice(first + lo, first + hi) if self.is_direct else self.slots[lo:hi]
                targets[slots] = converted(picked, dtype).view(void)[:, 0]


def _cut(memory: memoryview, sizes: Sequence[int]) -> list[memoryview]:
    """Return parts of memory of so many bytes, one after the other."""
    return [memory[start:end] for start, end in pairwise(accumulate(sizes, initial=0))]


def plan_reads(pool: Pool, side: Side) -> list[ReadTask]:
    """Return what has to be read to fill a pool with the rows of a side."""
    space, reader = side.rows.space, side.rows.reader
    layout, n_layers = space.layout, space.vectors_per_row
    v, cell = layout.vector_nbytes, pool.cell
    if not len(cell):
        return []
    # A range ends where its block does, at a large gap, and where it would be longer than a task.
    piece, longest = np.repeat(np.arange(len(pool.counts)), pool.counts), max(1, TASK_BYTES // (n_layers * v))
    is_end = (piece[1:] != piece[:-1]) | (cell[1:] - cell[:-1] > 1 + _GAP_BYTES // v)
    is_end |= cell[1:] // longest != cell[:-1] // longest
    first = np.concatenate(([0], np.flatnonzero(is_end) + 1))
    n_rows = np.diff(np.append(first, len(cell)))
    n_cells = cell[first + n_rows - 1] - cell[first] + 1
    ordinal, layer = np.divmod(pool.number[piece[first]], np.int64(space.rows_per_token))
    example = space.example(ordinal)
    token = space.tokens.start + cell[first]
    shards, starts = layout.locate_many(example[:, None], space.row_layers[layer], token[:, None])
    shard = shards[:, 0]
    by_place = np.lexsort((starts[:, 0], shard))
    first, n_rows, n_cells, starts, shard = (one[by_place] for one in (first, n_rows, n_cells, starts, shard))
    in_shard = example[by_place] % layout.examples_per_shard
    # Rows in the order of the ranges, and the vector of the task's ranges that each is.
    before_row, before_cell = np.cumsum(n_rows) - n_rows, np.cumsum(n_cells) - n_cells
    row = np.arange(len(cell)) + np.repeat(first - before_row, n_rows)
    slot = pool.slot[row]
    is_dense = np.array_equal(n_rows, n_cells)
    number = before_cell * (n_layers * v) // TASK_BYTES
    edges = np.flatnonzero((shard[1:] != shard[:-1]) | (number[1:] != number[:-1])) + 1
    lows, highs = np.concatenate(([0], edges)).tolist(), np.append(edges, len(shard)).tolist()
    is_direct = pool.in_order and is_dense and n_layers == 1 and reader.dtype == side.rows.dtype
    tasks: list[ReadTask] = []
    for lo, hi in zip(lows, highs, strict=True):
        rows = slice(int(before_row[lo]), int(before_row[hi - 1] + n_rows[hi - 1]))
        cells = None
        if not is_dense:
            within = before_cell[lo:hi] - before_cell[lo] - cell[first[lo:hi]]
            cells = cell[row[rows]] + np.repeat(within, n_rows[lo:hi])
        slots = slot[rows]
        tasks.append(
            ReadTask(
                side, pool.n_slots, int(shard[lo]), int(in_shard[lo:hi].max()), starts[lo:hi], n_cells[lo:hi], slots, cells,
                # The ranges are sorted by place, so that their slots follow each other unless examples were chosen in another order.
                is_direct and int(slots[-1]) - int(slots[0]) == len(slots) - 1 and bool((np.diff(slots) == 1).all()),
            )
        )  # fmt: skip
    return tasks
