"""Plan a read: which bytes of which shard are read, and where they go in the result.

Pure. A plan is an iterable of `Part`s, made as it is consumed, so that a plan of any length takes bounded memory. The
reader executes plans; estimates count them.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import pairwise
from typing import TYPE_CHECKING, NamedTuple

import numpy as np

from saev_store.core.coalesce import Spans, coalesce
from saev_store.core.indexing import Axis, Block, Points, Progression, length
from saev_store.core.layout import IntArray, Layout

if TYPE_CHECKING:
    from saev_store.transport import ReadCost

#: Rows of which some columns are kept pass through this much memory.
PIECE_BYTES = 8 << 20
#: From this size on a contiguous run is read straight into the result instead of being copied out of a map.
DIRECT_BYTES = 256 << 10


@dataclass(frozen=True, slots=True)
class MappedBox:
    """A strided box that is copied out of a mapped shard.

    Attributes:
        shard_idx: The shard.
        highest: The last example of the shard that is needed, by its position in the shard.
        axes: Examples in the shard, layers, tokens, columns.
        place: Rows on the first axis of the output.
    """

    shard_idx: int
    highest: int
    axes: tuple[Progression, Progression, Progression, Axis]
    place: slice


@dataclass(frozen=True, slots=True)
class MappedRows:
    """Vectors that are copied out of a mapped shard, one by one.

    Attributes:
        shard_idx: The shard.
        highest: As in `MappedBox`.
        vector: Numbers of the vectors in the shard, int64 (n,), in any order.
        place: Their rows in the output; None for the first n, in order.
    """

    shard_idx: int
    highest: int
    vector: IntArray
    place: IntArray | None


@dataclass(frozen=True, slots=True)
class Runs:
    """Runs of neighbouring vectors of one shard that are read as byte ranges.

    Attributes:
        shard_idx: The shard.
        highest: As in `MappedBox`.
        first: The first vector of each run, by its number in the shard, int64 (n,).
        n_vectors: Vectors in a run.
        kept: Positions in a run of the vectors that are kept, of any shape; None for all of them.
        columns: The columns that are kept; None for all of them.
        unit: Shape of the part of the output that one run fills.
        place: Which part each run fills, of an output of shape (-1, *unit).
        spans: The requests, in bytes; `spans.first` counts runs.
        direct: Each request is one piece of the output, in the same order: it may be read straight into it.
    """

    shard_idx: int
    highest: int
    first: IntArray
    n_vectors: int
    kept: IntArray | None
    columns: Axis | None
    unit: tuple[int, ...]
    place: IntArray
    spans: Spans
    direct: bool = False


Step = MappedBox | MappedRows | Runs


class Part(NamedTuple):
    """What is read together.

    Attributes:
        steps: One for each shard that is touched.
        rows: The rows of the output that the steps fill, where it is seen as (rows, columns); None if the steps address
            the output itself.
        columns: Columns that are kept of rows that are read whole; None for all of them.
        is_pointwise: `columns` has one column for each row.
    """

    steps: Sequence[Step]
    rows: slice | None = None
    columns: Axis | None = None
    is_pointwise: bool = False


def requested(part: Part, vector_nbytes: int) -> tuple[int, int]:
    """Requests that scattered rows take, and their bytes; a row that is copied out of a map counts as one."""
    n = nbytes = 0
    for step in part.steps:
        if isinstance(step, Runs):
            n, nbytes = n + len(step.spans.starts), nbytes + int((step.spans.ends - step.spans.starts).sum())
        elif isinstance(step, MappedRows):
            n, nbytes = n + len(step.vector), nbytes + len(step.vector) * vector_nbytes
    return n, nbytes


class Piece(NamedTuple):
    """What a selection reads of one shard: examples by their position in the shard, and where they go."""

    shard_idx: int
    examples: Axis
    place: slice | IntArray


@dataclass(frozen=True)
class Planner:
    """Plans reads of one store.

    Args:
        layout: Its geometry.
        cost: What reading costs there; where gaps are free, shards are mapped.
        reads_into: Whether bytes can be read straight into an array.
    """

    layout: Layout
    cost: ReadCost
    reads_into: bool

    @cached_property
    def is_mapped(self) -> bool:
        """Whether shards are views of mapped memory."""
        return math.isinf(self.cost.max_gap_bytes)

    def block(self, block: Block) -> Iterator[Part]:
        """The plan of an outer product of choices, for an output of its full shape."""
        if 0 in block.full_shape:
            return
        examples, layers, tokens, columns = block.axes
        if isinstance(layers, Progression) and isinstance(tokens, Progression):
            if not self.is_mapped:
                for piece in pieces(self.layout, examples):
                    yield Part([self._runs_of_box(piece, layers, tokens, columns)])
                return
            if isinstance(examples, Progression):
                for piece in pieces(self.layout, examples):
                    yield Part([self._direct(piece, layers, tokens, columns) or _box(piece, layers, tokens, columns)])
                return
        yield from self._outer_rows(block)

    def points(self, points: Points) -> Iterator[Part]:
        """The plan of NumPy's advanced indexing, for an output of `points.shape`."""
        if 0 in points.shape:
            return
        shape = points.shape if points.last is None else points.shape[:-1]
        n_rows = math.prod(shape)
        coords = [np.broadcast_to(coord, shape) for coord in points.coords]
        step = max(1, PIECE_BYTES // self.layout.vector_nbytes)
        for start in range(0, n_rows, step):
            end = min(start + step, n_rows)
            at = np.unravel_index(np.arange(start, end), shape) if shape else ()
            example, layer, token, *column = (np.atleast_1d(coord[at]) for coord in coords)
            columns = column[0] if points.last is None else self._some_columns(points.last)
            yield Part(self.rows(example, layer, token).steps, slice(start, end), columns, points.last is None)

    def rows(self, example: IntArray, layer_idx: IntArray, token: IntArray) -> Part:
        """The plan of n vectors given by position, in any order, repeats allowed, for an output (n, d_model)."""
        rows = slice(0, len(example))
        if len(example) == 0:
            return Part([], rows)
        shard_idx, in_shard = np.divmod(example, np.int64(self.layout.examples_per_shard))
        vector = (in_shard * self.layout.n_layers + layer_idx) * self.layout.tokens_per_example + token
        first = int(shard_idx[0])
        if bool((shard_idx == first).all()):
            return Part([self._rows_of_shard(first, int(in_shard.max()), vector, None)], rows)
        order = _ascending(shard_idx)
        places = np.split(order, np.flatnonzero(np.diff(shard_idx[order])) + 1)
        return Part(
            [
                self._rows_of_shard(int(shard_idx[place[0]]), int(in_shard[place].max()), vector[place], place)
                for place in places
            ],
            rows,
        )

    def _rows_of_shard(self, shard_idx: int, highest: int, vector: IntArray, place: IntArray | None) -> Step:
        if self.is_mapped:
            return MappedRows(shard_idx, highest, vector, place)
        order = _ascending(vector)
        target = order if place is None else place[order]
        return self._runs(shard_idx, highest, vector[order], 1, None, None, (self.layout.d_model,), target)

    def _some_columns(self, columns: Axis) -> Axis | None:
        """None for all columns in order."""
        return None if _is_whole(columns, self.layout.d_model) else columns

    def _outer_rows(self, block: Block) -> Iterator[Part]:
        """A block whose choices are not all progressions, row by row."""
        examples, layers, tokens, columns = block.axes
        layer, token = _positions(layers), _positions(tokens)
        per_example = len(layer) * len(token)
        some = self._some_columns(columns)
        step = max(1, PIECE_BYTES // self.layout.vector_nbytes // per_example)
        for start in range(0, length(examples), step):
            end = min(start + step, length(examples))
            if isinstance(examples, Progression):
                example = examples.start + examples.step * np.arange(start, end)
            else:
                example = examples[start:end]
            e, la, t = (
                np.broadcast_to(axis, (end - start, len(layer), len(token))).ravel()
                for axis in (example[:, None, None], layer[:, None], token)
            )
            yield Part(self.rows(e, la, t).steps, slice(start * per_example, end * per_example), some)

    def _direct(self, piece: Piece, layers: Progression, tokens: Progression, columns: Axis) -> Runs | None:
        """Large contiguous runs, to be read straight into the output; None where a copy out of the map is cheaper."""
        layout, examples = self.layout, piece.examples
        if not self.reads_into or not isinstance(examples, Progression) or tokens.step != 1:
            return None
        if not _is_whole(columns, layout.d_model):
            return None
        whole_layers = tokens.count == layout.tokens_per_example and layers.step == 1
        if layers.count > 1 and not whole_layers:
            return None
        run = layers.count * tokens.count
        is_one_run = whole_layers and layers.count == layout.n_layers and examples.step == 1
        nbytes = run * layout.vector_nbytes
        if nbytes * (examples.count if is_one_run else 1) < DIRECT_BYTES:
            return None
        first = (examples.positions() * layout.n_layers + layers.start) * layout.tokens_per_example + tokens.start
        place = _places(piece.place)
        starts = first * layout.vector_nbytes
        if is_one_run:
            ends = np.array([0, len(first)])
            spans = Spans(starts[:1], starts[-1:] + nbytes, ends)
        else:
            spans = Spans(starts, starts + nbytes, np.arange(len(first) + 1))
        unit = (layers.count, tokens.count, layout.d_model)
        return Runs(piece.shard_idx, examples.highest, first, run, None, None, unit, place, spans, direct=True)

    def _runs_of_box(self, piece: Piece, layers: Progression, tokens: Progression, columns: Axis) -> Runs:
        """Whole examples, or planes of a layer, or vectors: the largest that wastes little."""
        layout, cost = self.layout, self.cost
        v, per_layer = layout.vector_nbytes, layout.tokens_per_example
        token_run = tokens.highest - tokens.lowest + 1
        layer_run = (layers.highest - layers.lowest) * per_layer + token_run
        tokens_dense = (abs(tokens.step) - 1) * v <= cost.max_gap_bytes or tokens.count == 1
        layers_dense = (abs(layers.step) * per_layer - token_run) * v <= cost.max_gap_bytes or layers.count == 1
        example, layer, token = _positions(piece.examples), layers.positions(), tokens.positions()
        place, n_columns = _places(piece.place), length(columns)
        unit: tuple[int, ...]
        if tokens_dense and layers_dense and layer_run * v <= cost.max_request_bytes:
            first = (example * layout.n_layers + layers.lowest) * per_layer + tokens.lowest
            kept = (layer - layers.lowest)[:, None] * per_layer + (token - tokens.lowest)
            run, unit = layer_run, (layers.count, tokens.count, n_columns)
        elif tokens_dense and token_run * v <= cost.max_request_bytes:
            first = ((example[:, None] * layout.n_layers + layer) * per_layer + tokens.lowest).ravel()
            kept = token - tokens.lowest
            run, unit = token_run, (tokens.count, n_columns)
            place = (place[:, None] * layers.count + np.arange(layers.count)).ravel()
        else:
            plane = (example[:, None] * layout.n_layers + layer).ravel()[:, None] * per_layer
            first = (plane + token).ravel()
            kept = np.arange(1)
            run, unit = 1, (n_columns,)
            place = (place[:, None] * layers.count + np.arange(layers.count)).ravel()[:, None]
            place = (place * tokens.count + np.arange(tokens.count)).ravel()
        order = _ascending(first)
        is_dense = np.array_equal(kept.ravel(), np.arange(run))
        some, highest = self._some_columns(columns), int(example.max())
        return self._runs(
            piece.shard_idx, highest, first[order], run, None if is_dense else kept, some, unit, place[order]
        )

    def _runs(
        self, shard_idx: int, highest: int, first: IntArray, run: int, kept: IntArray | None, columns: Axis | None,
        unit: tuple[int, ...], place: IntArray,
    ) -> Runs:  # fmt: skip
        """Ascending runs with their requests."""
        v, cost = self.layout.vector_nbytes, self.cost
        spans = coalesce(
            first * v,
            (first + run) * v,
            max_gap_bytes=cost.max_gap_bytes,
            max_request_bytes=cost.max_request_bytes,
        )
        return Runs(shard_idx, highest, first, run, kept, columns, unit, place, spans)


def pieces(layout: Layout, examples: Axis) -> Iterator[Piece]:
    """Split chosen examples by shard."""
    capacity = layout.examples_per_shard
    if not isinstance(examples, Progression):
        order = _ascending(examples)
        shard_idx = examples[order] // capacity
        bounds = [0, *(np.flatnonzero(np.diff(shard_idx)) + 1).tolist(), len(order)]
        for start, end in pairwise(bounds):
            if end > start:
                shard = int(shard_idx[start])
                yield Piece(shard, examples[order[start:end]] - shard * capacity, order[start:end])
        return
    done = 0
    while done < examples.count:
        shard, first = divmod(examples.start + done * examples.step, capacity)
        step = examples.step
        here = (capacity - 1 - first) // step + 1 if step > 0 else first // -step + 1
        here = min(here, examples.count - done)
        yield Piece(shard, Progression(first, step, here), slice(done, done + here))
        done += here


def _box(piece: Piece, layers: Progression, tokens: Progression, columns: Axis) -> MappedBox:
    if not isinstance(piece.examples, Progression) or not isinstance(piece.place, slice):
        raise TypeError("the examples of a box are a progression")
    return MappedBox(piece.shard_idx, piece.examples.highest, (piece.examples, layers, tokens, columns), piece.place)


def _is_whole(columns: Axis, n: int) -> bool:
    return isinstance(columns, Progression) and columns == Progression(0, 1, n)


def _ascending(numbers: IntArray) -> IntArray:
    """Where the numbers stand, by rising number; equal ones in their order."""
    return np.argsort(numbers, kind="stable")


def _positions(axis: Axis) -> IntArray:
    return axis.positions() if isinstance(axis, Progression) else axis


def _places(place: slice | IntArray) -> IntArray:
    return np.arange(place.start, place.stop, dtype=np.int64) if isinstance(place, slice) else place
