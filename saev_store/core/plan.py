"""Plan a read: which vectors of which shard are read, and where they go in the result.

Pure. A plan is an iterable of `PlanPart`s, made as it is consumed, so that a plan of any length takes bounded memory. The
reader executes plans; estimates count them; transports merge what is near each other.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import NamedTuple

import numpy as np

from saev_store.core.indexing import Axis, Block, Points, positions
from saev_store.core.layout import IntArray, Layout

#: Rows of which some columns are kept pass through this much memory, far ones through eight times as much.
PIECE_BYTES = 8 << 20
#: More runs than this are planned in several parts.
RUNS_AT_ONCE = 1 << 16
#: More examples than this are planned in several parts: a document can promise any number, but some are lost before many are.
_EXAMPLES_AT_ONCE = 1 << 20
#: From this size on a contiguous run is read straight into the result instead of being copied out of a map.
DIRECT_BYTES = 256 << 10


class MappedBox(NamedTuple):
    """A strided box that is copied out of a mapped shard.

    Attributes:
        highest: The last example of the shard that is needed, by its position in the shard.
        axes: Examples in the shard, layers, tokens, columns.
        place: Rows on the first axis of the output.
    """

    shard_idx: int
    highest: int
    axes: tuple[range, range, range, Axis]
    place: slice


class Runs(NamedTuple):
    """Runs of `n_vectors` neighbouring vectors of one shard. Of a mapped shard those of one vector are copied out of the map.

    Attributes:
        highest: As in `MappedBox`.
        first: The first vector of each run, by its number in the shard, int64 (n,), in any order.
        place: The first row of the output that each run fills, int64 (n,); None if they fill it in their order.
    """

    shard_idx: int
    highest: int
    first: IntArray
    n_vectors: int
    place: IntArray | None

    @property
    def rows(self) -> IntArray:
        """The first row of the output that each run fills."""
        return np.arange(len(self.first)) * self.n_vectors if self.place is None else self.place


class PlanPart(NamedTuple):
    """Reads that are made together, a step for each shard.

    Attributes:
        rows: The rows of the output that the steps fill, if it is seen as (rows, columns); None if the steps address the output itself.
        columns: Columns that are kept of rows that are read whole; None for all of them.
        is_pointwise: `columns` has one column for each row.
    """

    steps: Sequence[MappedBox | Runs]
    rows: slice | None = None
    columns: Axis | None = None
    is_pointwise: bool = False


class Piece(NamedTuple):
    """Examples of a selection in one shard, by their position in it, and where they go."""

    shard_idx: int
    examples: range
    place: slice

    @property
    def highest(self) -> int:
        """The last of the examples in the shard."""
        return max(self.examples[0], self.examples[-1])


class Planner(NamedTuple):
    """Plans reads of one store, whose shards may be views of mapped memory."""

    layout: Layout
    is_mapped: bool

    def block(self, block: Block) -> Iterator[PlanPart]:
        """The plan of an outer product of choices, for an output of its full shape."""
        if 0 in block.full_shape:
            return
        examples, layers, tokens, columns = block.axes
        run, offsets = self._runs_of_example(layers, tokens)
        is_whole = isinstance(columns, range) and columns == range(self.layout.d_model)
        if self.is_mapped:
            if isinstance(examples, range) and isinstance(layers, range) and isinstance(tokens, range):
                for piece in pieces(self.layout, examples):
                    direct = self._direct(piece, run, int(offsets[0])) if is_whole and len(offsets) == 1 else None
                    axes = (piece.examples, layers, tokens, columns)
                    yield PlanPart([direct or MappedBox(piece.shard_idx, piece.highest, axes, piece.place)])
                return
            run, offsets = 1, (offsets[:, None] + np.arange(run)).ravel()
        per_example = run * len(offsets)
        rows_at_once = PIECE_BYTES // self.layout.vector_nbytes * (1 if self.is_mapped else 8)
        at_once = max(1, RUNS_AT_ONCE // len(offsets) if is_whole else rows_at_once // per_example)
        for start in range(0, len(examples), at_once):
            end = min(start + at_once, len(examples))
            example = positions(examples[start:end])
            steps = self._by_shard(np.repeat(example, len(offsets)), np.tile(offsets, end - start), run)
            yield PlanPart(steps, slice(start * per_example, end * per_example), None if is_whole else columns)

    def points(self, points: Points) -> Iterator[PlanPart]:
        """The plan of NumPy's advanced indexing, for an output of `points.shape`."""
        if 0 in points.shape:
            return
        coords = [coord.reshape(-1) for coord in points.coords]
        is_whole = points.last == range(self.layout.d_model)
        step = max(1, PIECE_BYTES // self.layout.vector_nbytes)
        for start in range(0, len(coords[0]), step):
            some = slice(start, min(start + step, len(coords[0])))
            example, layer, token, *column = (coord[some] for coord in coords)
            columns = column[0] if points.last is None else None if is_whole else points.last
            yield PlanPart(self.rows(example, layer, token).steps, some, columns, points.last is None)

    def rows(self, example: IntArray, layer_idx: IntArray, token: IntArray) -> PlanPart:
        """The plan of n vectors given by position, in any order, repeats allowed, for an output (n, d_model)."""
        offset = layer_idx * self.layout.tokens_per_example + token
        return PlanPart(self._by_shard(example, offset, 1), slice(0, len(example)))

    def _runs_of_example(self, layers: Axis, tokens: Axis) -> tuple[int, IntArray]:
        """Vectors of the longest runs of neighbours that are chosen of an example, and the first vector of each."""
        n_tokens = self.layout.tokens_per_example
        if not isinstance(tokens, range) or tokens.step != 1:
            return 1, (positions(layers)[:, None] * n_tokens + positions(tokens)).ravel()
        if isinstance(layers, range) and layers.step == 1 and len(tokens) == n_tokens:
            return len(layers) * n_tokens, np.array([layers.start * n_tokens])
        return len(tokens), positions(layers) * n_tokens + tokens.start

    def _direct(self, piece: Piece, run: int, offset: int) -> Runs | None:
        """A long run of each example, or all examples as one run; None where a copy out of the map is cheaper."""
        examples, at = piece.examples, piece.place.start * run
        first = positions(examples) * self.layout.vectors_per_example + offset
        if run == self.layout.vectors_per_example and examples.step == 1:
            run, first = run * len(examples), first[:1]
        if run * self.layout.vector_nbytes < DIRECT_BYTES:
            return None
        return Runs(piece.shard_idx, piece.highest, first, run, at + np.arange(len(first)) * run)

    def _by_shard(self, example: IntArray, offset: IntArray, run: int) -> list[MappedBox | Runs]:
        """One step for each shard, of runs that begin at a vector of an example and fill the output in their order."""
        if len(example) == 0:
            return []
        shard_idx, in_shard = np.divmod(example, np.int64(self.layout.examples_per_shard))
        vector = in_shard * self.layout.vectors_per_example + offset
        if bool((shard_idx == shard_idx[0]).all()):
            return [Runs(int(shard_idx[0]), int(in_shard.max()), vector, run, None)]
        order = np.argsort(shard_idx, kind="stable")
        places = np.split(order, np.flatnonzero(np.diff(shard_idx[order])) + 1)
        return [Runs(int(shard_idx[at[0]]), int(in_shard[at].max()), vector[at], run, at * run) for at in places]


def pieces(layout: Layout, examples: range) -> Iterator[Piece]:
    """Split chosen examples by shard."""
    capacity, step, done = layout.examples_per_shard, examples.step, 0
    while done < len(examples):
        shard, first = divmod(examples[done], capacity)
        here = (capacity - 1 - first) // step + 1 if step > 0 else first // -step + 1
        here = min(here, len(examples) - done, _EXAMPLES_AT_ONCE)
        yield Piece(shard, range(first, first + here * step, step), slice(done, done + here))
        done += here
