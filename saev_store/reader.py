"""Brings vectors from shards into arrays: the one reader for every transport.

The plan of a read is pure arithmetic (`layout`, `indexing`, `coalesce`); this module executes it. What a transport's
`ReadCost` says decides how: where gaps cost nothing (memory that is mapped) a shard is one array that is indexed; where
they do, whole examples, planes of a layer or runs of vectors are fetched, whichever wastes little, merged up to the
size that the transport likes.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from itertools import pairwise
from typing import NamedTuple, TypeAlias

import numpy as np
import numpy.typing as npt

from saev_store._threads import n_threads, share
from saev_store.coalesce import Spans, coalesce
from saev_store.errors import CorruptShardError, MissingShardError, NotFoundError
from saev_store.indexing import Axis, Block, Points, Progression, length
from saev_store.layout import DTYPE, IntArray, Layout, shard_name
from saev_store.transport import Transport

FloatArray = npt.NDArray[np.float32]

#: Rows that are placed one by one pass through a piece of memory that stays in the CPU's cache.
_SCRATCH_BYTES = 512 << 10
#: From this size on a contiguous run is read straight into the result instead of being copied out of a map.
_DIRECT_BYTES = 256 << 10
#: Rows worth a thread, and what it takes of them at a time.
_THREAD_BYTES = 4 << 20
_PART_BYTES = 4 << 20
#: Fetched but not yet placed bytes are held to about this much.
_IN_FLIGHT_BYTES = 256 << 20


@dataclass(frozen=True, slots=True)
class _Piece:
    """What a selection wants of one shard: examples by their position in the shard, and where they go."""

    shard_idx: int
    examples: Axis
    place: slice | IntArray


Box: TypeAlias = tuple[Progression, Progression, Progression, Axis]
#: What `Reader._fetch` yields: first range, one past the last, first byte, the numbers.
Fetched: TypeAlias = tuple[int, int, int, npt.NDArray[np.float32]]


class _Direct(NamedTuple):
    """Runs that lie evenly in a shard, in units of vectors."""

    count: int
    first: int
    stride: int


class Reader:
    """Reads vectors of one store; safe to share between threads.

    Args:
        transport: Where the shards are.
        layout: Their geometry.
        readable: For shards known to be damaged: how many leading examples can still be read.
        check_sizes: Ask for the size of a shard when it is first touched (remote stores, whose sizes were not checked
            when they were opened).
        damaged_ok: Of a shard that turns out to be short, read what is there.
    """

    def __init__(
        self,
        transport: Transport,
        layout: Layout,
        *,
        readable: Mapping[int, int] | None = None,
        check_sizes: bool = False,
        damaged_ok: bool = False,
    ) -> None:
        self.transport = transport
        self.layout = layout
        self._readable = dict(readable or {})
        self._resident = math.isinf(transport.cost.max_gap_bytes)
        self._direct = transport if self._resident and transport.reads_into else None
        self._unchecked = set(range(layout.n_shards)) if check_sizes else set[int]()
        self._damaged_ok = damaged_ok
        self._maps: dict[int, FloatArray] = {}

    # -- whole requests ------------------------------------------------------------------------------------------------

    def read_block(self, block: Block, out: FloatArray) -> None:
        """Fill `out` (the block's full shape, C order) with an outer product of choices."""
        if out.size == 0:
            return
        examples, layers, tokens, columns = block.axes
        if not (isinstance(layers, Progression) and isinstance(tokens, Progression)):
            self._read_outer_rows(block, out)
            return
        for piece in self._pieces(examples):
            self._touch(piece)
            if self._resident and isinstance(piece.examples, Progression):
                self._copy_mapped(piece.shard_idx, (piece.examples, layers, tokens, columns), out[piece.place])
            elif self._resident:
                self._read_outer_rows(block, out)
                return
            else:
                self._read_units(piece, layers, tokens, columns, out=out)

    def read_points(self, points: Points, out: FloatArray) -> None:
        """Fill `out` (shape `points.shape`) as NumPy's advanced indexing would."""
        if out.size == 0:
            return
        n_rows = out.size // points.shape[-1] if points.last is not None else out.size
        shape = points.shape[:-1] if points.last is not None else points.shape
        flat = out.reshape(n_rows, -1)
        step = max(1, _SCRATCH_BYTES * 16 // self.layout.vector_nbytes)
        scratch = np.empty((min(step, n_rows), self.layout.d_model), dtype=np.float32)
        coords = [np.broadcast_to(coord, shape) for coord in points.coords]
        for start in range(0, n_rows, step):
            rows = np.unravel_index(np.arange(start, min(start + step, n_rows)), shape) if shape else ()
            example, layer, token, *column = (np.atleast_1d(coord[rows]) for coord in coords)
            part = scratch[: len(example)]
            self.read_rows(example, layer, token, part)
            if points.last is not None:
                flat[start : start + len(part)] = part[:, _as_slice(points.last)]
            else:
                flat[start : start + len(part), 0] = part[np.arange(len(part)), column[0]]

    def read_rows(self, example: IntArray, layer_idx: IntArray, token: IntArray, out: FloatArray) -> None:
        """Fill `out` (n, d_model), C order, with n vectors given by position, in any order, repeats allowed."""
        if len(out) == 0:
            return
        shard_idx, in_shard = np.divmod(example, np.int64(self.layout.examples_per_shard))
        vector = (in_shard * self.layout.n_layers + layer_idx) * self.layout.tokens_per_example + token
        lowest, highest = int(shard_idx.min()), int(shard_idx.max())
        if lowest == highest:
            self._touch(_Piece(lowest, in_shard, slice(None)))
            self._share(len(vector), lambda rows: self._gather(lowest, vector[rows], None, out[rows]))
            return
        order = np.argsort(shard_idx, kind="stable")

        def some(rows: slice) -> None:
            for place in np.split(order[rows], np.flatnonzero(np.diff(shard_idx[order[rows]])) + 1):
                shard = int(shard_idx[place[0]])
                self._touch(_Piece(shard, in_shard[place], place))
                self._gather(shard, vector[place], place, out)

        self._share(len(vector), some)

    def _share(self, n_rows: int, work: Callable[[slice], None]) -> None:
        """Copies in memory are shared out among threads; fetching has its own ways to do many things at once."""
        n = n_threads(n_rows * self.layout.vector_nbytes, part_bytes=_THREAD_BYTES) if self._resident else 1
        step = n_rows if n == 1 else max(1, _PART_BYTES // self.layout.vector_nbytes)
        share(work, deque(slice(start, min(start + step, n_rows)) for start in range(0, n_rows, step)), n)

    def vector(self, example: int, layer_idx: int, token: int) -> FloatArray:
        """One vector, a fresh array; the three positions are inside the tensor. The shortest way there is."""
        shard_idx, in_shard = divmod(example, self.layout.examples_per_shard)
        mapped = self._maps.get(shard_idx)
        if mapped is not None and in_shard < len(mapped):
            return mapped[in_shard, layer_idx, token].copy()
        out = np.empty((1, self.layout.d_model), dtype=np.float32)
        self.read_rows(np.array([example]), np.array([layer_idx]), np.array([token]), out)
        return out[0]

    def view(self, block: Block) -> FloatArray | None:
        """A read-only view of mapped memory for a block, or None where there is no such thing."""
        pieces = list(self._pieces(block.axes[0]))
        if not self._resident or len(pieces) != 1 or not all(isinstance(axis, Progression) for axis in block.axes):
            return None
        self._touch(pieces[0])
        index = tuple(
            _as_slice(axis) for axis in (pieces[0].examples, *block.axes[1:]) if isinstance(axis, Progression)
        )
        return self._mapped(pieces[0].shard_idx)[index].reshape(block.shape)

    # -- shards --------------------------------------------------------------------------------------------------------

    def _pieces(self, examples: Axis) -> Iterator[_Piece]:
        """Split chosen examples by the shard they lie in."""
        capacity = self.layout.examples_per_shard
        if not isinstance(examples, Progression):
            order = np.argsort(examples, kind="stable")
            shard_idx = examples[order] // capacity
            bounds = [0, *(np.flatnonzero(np.diff(shard_idx)) + 1).tolist(), len(order)]
            for start, end in pairwise(bounds):
                if end > start:
                    shard = int(shard_idx[start])
                    yield _Piece(shard, examples[order[start:end]] - shard * capacity, order[start:end])
            return
        done = 0
        while done < examples.count:
            shard, first = divmod(examples.start + done * examples.step, capacity)
            step = examples.step
            here = (capacity - 1 - first) // step + 1 if step > 0 else first // -step + 1
            here = min(here, examples.count - done)
            yield _Piece(shard, Progression(first, step, here), slice(done, done + here))
            done += here

    def _touch(self, piece: _Piece) -> None:
        """Before bytes of a shard are used: is it as long as it has to be, and are these examples among the readable?"""
        if piece.shard_idx in self._unchecked:
            self._check_size(piece.shard_idx)
        readable = self._readable.get(piece.shard_idx)
        if readable is None:
            return
        wanted = piece.examples
        highest = wanted.highest if isinstance(wanted, Progression) else int(wanted.max())
        if highest >= readable:
            start, end = self.layout.example_range(piece.shard_idx)
            raise CorruptShardError(
                f"example {start + highest} was lost with its shard; of the examples {start} to {end - 1} only the first "
                f"{readable} can be read",
                where=f"{self.transport.url}/{shard_name(piece.shard_idx)}",
                remedy="store.validate() lists everything that is lost, store.repair() takes it again.",
            )

    def _check_size(self, shard_idx: int) -> None:
        name, needed = shard_name(shard_idx), self.layout.used_nbytes(shard_idx)
        try:
            size = self.transport.size(name)
        except NotFoundError:
            size = None
        if size is not None and size < needed and self._damaged_ok:
            self._readable[shard_idx] = size // self.layout.example_nbytes
        if size is not None and (size >= needed or self._damaged_ok):
            self._unchecked.discard(shard_idx)
            return
        start, end = self.layout.example_range(shard_idx)
        found = "is missing" if size is None else f"has {size} bytes and needs {needed}"
        raise (MissingShardError if size is None else CorruptShardError)(
            f"the shard of examples {start} to {end - 1} {found}",
            where=f"{self.transport.url}/{name}",
            remedy="Copy it again from where it is whole"
            + ("." if self._damaged_ok else ", or open with damaged_ok=True to read the rest."),
        )

    def _mapped(self, shard_idx: int) -> FloatArray:
        """A shard as a read-only array (readable examples, layer, token, d_model); its pages are read when looked at."""
        mapped = self._maps.get(shard_idx)
        if mapped is None:
            layout = self.layout
            n = self._readable.get(shard_idx, layout.examples_in(shard_idx))
            name = shard_name(shard_idx)
            try:
                (buffer,) = self.transport.get_ranges(name, starts=[0], ends=[n * layout.example_nbytes])
            except NotFoundError as error:
                self._check_size(shard_idx)
                raise MissingShardError("the shard is missing", where=f"{self.transport.url}/{name}") from error
            mapped = np.frombuffer(buffer, dtype=DTYPE).reshape(n, *layout.shape[1:])
            mapped.flags.writeable = False
            self._maps[shard_idx] = mapped
        return mapped

    # -- memory that is mapped -----------------------------------------------------------------------------------------

    def _copy_mapped(self, shard_idx: int, box: Box, target: FloatArray) -> None:
        if self._read_direct(shard_idx, box, target):
            return
        examples, layers, tokens, columns = box
        source = self._mapped(shard_idx)[_as_slice(examples), _as_slice(layers), _as_slice(tokens)]
        np.copyto(target, source[..., _as_slice(columns) if isinstance(columns, Progression) else columns])

    def _read_direct(self, shard_idx: int, box: Box, target: FloatArray) -> bool:
        """Explicit reads into the result, where the bytes are contiguous in the file and in memory, and many."""
        runs = self._direct_runs(box, target) if target.flags.c_contiguous else None
        if runs is None or self._direct is None:
            return False
        raw, run_nbytes = target.reshape(-1).view(np.uint8).data, target.nbytes // runs.count
        numbers = range(runs.count)
        self._direct.readinto(
            shard_name(shard_idx),
            starts=[(runs.first + run * runs.stride) * self.layout.vector_nbytes for run in numbers],
            buffers=[raw[run * run_nbytes : (run + 1) * run_nbytes] for run in numbers],
        )
        return True

    def _direct_runs(self, box: Box, target: FloatArray) -> _Direct | None:
        """What to read straight into a target of contiguous memory; None where a copy out of the map is cheaper."""
        layout = self.layout
        examples, layers, tokens, columns = box
        if self._direct is None or not (
            isinstance(columns, Progression) and columns == Progression(0, 1, layout.d_model)
        ):
            return None
        if tokens.step != 1:
            return None
        whole_layers = tokens.count == layout.tokens_per_example
        whole_examples = whole_layers and layers.step == 1 and layers.count == layout.n_layers
        first = (examples.start * layout.n_layers + layers.start) * layout.tokens_per_example + tokens.start
        if whole_examples and examples.step == 1:
            runs, stride = 1, 0
        elif layers.count == 1 or (whole_layers and layers.step == 1):
            runs, stride = examples.count, examples.step * layout.vectors_per_example
        else:
            return None
        if target.nbytes // runs < _DIRECT_BYTES:
            return None  # small reads are cheaper as copies out of the map
        return _Direct(runs, first, stride)

    def _read_outer_rows(self, block: Block, out: FloatArray) -> None:
        """A block whose choices are not all progressions, row by row, in pieces of bounded memory."""
        examples, layers, tokens, columns = block.axes
        layer, token = _positions(layers), _positions(tokens)
        per_example = len(layer) * len(token)
        if per_example == 0:
            return
        step = max(1, (_SCRATCH_BYTES * 64 // self.layout.vector_nbytes) // per_example)
        whole = isinstance(columns, Progression) and columns == Progression(0, 1, self.layout.d_model)
        for start in range(0, length(examples), step):
            end = min(start + step, length(examples))
            if isinstance(examples, Progression):
                example = examples.start + examples.step * np.arange(start, end, dtype=np.int64)
            else:
                example = examples[start:end]
            shape = (end - start, len(layer), len(token))
            e = np.broadcast_to(example[:, None, None], shape).reshape(-1)
            la = np.broadcast_to(layer[:, None], shape).reshape(-1)
            t = np.broadcast_to(token, shape).reshape(-1)
            target = out[start:end]
            if whole:
                self.read_rows(e, la, t, target.reshape(-1, self.layout.d_model))
            else:
                rows = np.empty((len(e), self.layout.d_model), dtype=np.float32)
                self.read_rows(e, la, t, rows)
                picked = rows[:, _as_slice(columns) if isinstance(columns, Progression) else columns]
                target[...] = picked.reshape(target.shape)

    def _gather(self, shard_idx: int, vector: IntArray, place: IntArray | None, out: FloatArray) -> None:
        """Rows of one shard, by vector number, to `out[place]` (to `out` in order without a place)."""
        if not self._resident:
            self._fetch_rows(shard_idx, vector, place, out)
            return
        source = self._mapped(shard_idx).reshape(-1, self.layout.d_model)
        # mode="clip" because take() would otherwise buffer its output; the positions have been checked.
        if place is None:
            np.take(source, vector, axis=0, out=out, mode="clip")
            return
        step = max(1, _SCRATCH_BYTES // self.layout.vector_nbytes)
        scratch = np.empty((min(step, len(vector)), self.layout.d_model), dtype=np.float32)
        for start in range(0, len(vector), step):
            some = vector[start : start + step]
            part = scratch[: len(some)]
            np.take(source, some, axis=0, out=part, mode="clip")
            out[place[start : start + step]] = part

    # -- memory that has to be fetched ---------------------------------------------------------------------------------

    def _spans(self, starts: IntArray, ends: IntArray) -> Spans:
        """Sorted ranges, merged as the transport's price list says."""
        cost = self.transport.cost
        return coalesce(starts, ends, max_gap_bytes=cost.max_gap_bytes, max_request_bytes=cost.max_request_bytes)

    def _fetch(self, shard_idx: int, starts: IntArray, ends: IntArray) -> Iterator[Fetched]:
        """Fetch sorted ranges; yields (first range, one past the last, first byte, the numbers) per merged request."""
        spans = self._spans(starts, ends)
        name = shard_name(shard_idx)
        batch_of = np.cumsum(spans.ends - spans.starts) // _IN_FLIGHT_BYTES
        bounds = [0, *(np.flatnonzero(np.diff(batch_of)) + 1).tolist(), len(spans)]
        for lo, hi in pairwise(bounds):
            begin, stop = spans.starts[lo:hi].tolist(), spans.ends[lo:hi].tolist()
            try:
                buffers = self.transport.get_ranges(name, starts=begin, ends=stop)
            except NotFoundError:
                self._unchecked.add(shard_idx)
                self._check_size(shard_idx)
                raise
            for number, buffer in enumerate(buffers, start=lo):
                yield (
                    int(spans.first[number]),
                    int(spans.first[number + 1]),
                    int(spans.starts[number]),
                    np.frombuffer(buffer, dtype=DTYPE),
                )

    def _fetch_rows(self, shard_idx: int, vector: IntArray, place: IntArray | None, out: FloatArray) -> None:
        order = np.argsort(vector, kind="stable")
        ordered = vector[order]
        target = order if place is None else place[order]
        starts = ordered * self.layout.vector_nbytes
        for lo, hi, begin, numbers in self._fetch(shard_idx, starts, starts + self.layout.vector_nbytes):
            rows = numbers.reshape(-1, self.layout.d_model)
            first = begin // self.layout.vector_nbytes
            out[target[lo:hi]] = rows[ordered[lo:hi] - first]

    def _read_units(
        self, piece: _Piece, layers: Progression, tokens: Progression, columns: Axis, *, out: FloatArray
    ) -> None:
        """Fetch whole examples, or whole planes of a layer, or runs of vectors: the largest that wastes little."""
        layout, cost = self.layout, self.transport.cost
        v, per_layer = layout.vector_nbytes, layout.tokens_per_example
        token_run = tokens.highest - tokens.lowest + 1
        layer_run = (layers.highest - layers.lowest) * per_layer + token_run
        tokens_dense = (abs(tokens.step) - 1) * v <= cost.max_gap_bytes or tokens.count == 1
        layers_dense = (abs(layers.step) * per_layer - token_run) * v <= cost.max_gap_bytes or layers.count == 1
        example = _positions(piece.examples)
        if tokens_dense and layers_dense and layer_run * v <= cost.max_request_bytes:
            units = (example * layout.n_layers + layers.lowest) * per_layer + tokens.lowest
            offset = (layers.positions() - layers.lowest)[:, None] * per_layer + (tokens.positions() - tokens.lowest)
            run, targets = layer_run, out
            place = _positions_of(piece.place)
        elif tokens_dense and token_run * v <= cost.max_request_bytes:
            units = ((example[:, None] * layout.n_layers + layers.positions()) * per_layer + tokens.lowest).reshape(-1)
            offset = tokens.positions() - tokens.lowest
            run, targets = token_run, out.reshape(-1, *out.shape[2:])
            place = (_positions_of(piece.place)[:, None] * layers.count + np.arange(layers.count)).reshape(-1)
        else:
            units = (example[:, None] * layout.n_layers + layers.positions()).reshape(-1)[:, None] * per_layer
            units = (units + tokens.positions()).reshape(-1)
            offset = np.zeros((), dtype=np.int64)
            run, targets = 1, out.reshape(-1, out.shape[3])
            first = (_positions_of(piece.place)[:, None] * layers.count + np.arange(layers.count)).reshape(-1)[:, None]
            place = (first * tokens.count + np.arange(tokens.count)).reshape(-1)
        order = np.argsort(units, kind="stable")
        units, place = units[order], place[order]
        column = _as_slice(columns) if isinstance(columns, Progression) else columns
        dense = offset.size == run and bool(np.all(offset.reshape(-1) == np.arange(run)))
        for lo, hi, begin, numbers in self._fetch(piece.shard_idx, units * v, (units + run) * v):
            rows = numbers.reshape(-1, layout.d_model)
            for unit in range(lo, hi):
                at = int(units[unit]) - begin // v
                target = targets[place[unit]]
                if dense:
                    target[...] = rows[at : at + run, column].reshape(target.shape)
                else:
                    target[...] = rows[at + offset][..., column]


def _as_slice(axis: Progression) -> slice:
    if axis.count == 0:
        return slice(0, 0)
    stop = axis.start + axis.count * axis.step
    return slice(axis.start, stop if stop >= 0 else None, axis.step)


def _positions(axis: Axis) -> IntArray:
    return axis.positions() if isinstance(axis, Progression) else axis


def _positions_of(place: slice | IntArray) -> IntArray:
    return np.arange(place.start, place.stop, dtype=np.int64) if isinstance(place, slice) else place
