"""Execute plans of reads: bring vectors from shards into arrays, through every transport.

A transport's `ReadCost` decides how: where gaps cost nothing (mapped memory) a shard is one array that is
indexed; elsewhere ranges are fetched. `saev_store.core.plan` decides, this module reads.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from itertools import pairwise

import numpy as np
import numpy.typing as npt

from saev_store._runtime.threads import in_threads, n_threads
from saev_store.core.dtypes import FLOAT32, convert, converted, numpy_dtype
from saev_store.core.indexing import Axis, Block, Points, positions
from saev_store.core.layout import IntArray, Layout, shard_name
from saev_store.core.plan import MappedBox, Planner, PlanPart, Runs
from saev_store.errors import CorruptShardError, MissingShardError, NotFoundError
from saev_store.transport import Transport
from saev_store.transport.base import FileReads

FloatArray = npt.NDArray[np.float32]
#: Numbers of any dtype that a store may hold or a reader may ask for.
NumberArray = npt.NDArray[np.generic]

#: More vectors in an example, or in what is planned at once, than this, and a shard is looked at before memory is taken for tables
#: of them.
_WIDE = 1 << 20
#: Rows that are placed one by one pass through a piece of memory that stays in the CPU's cache.
SCRATCH_BYTES = 512 << 10
#: Rows worth a thread, and how much of them a thread takes at a time.
THREAD_BYTES = 4 << 20
#: Maps that are kept; the system allows about 65,000 in a process.
_MAX_MAPS = 8192
#: Bytes that are held at a time if they have to be converted.
_HELD_BYTES = 256 << 20
#: Requests for the sizes of shards that are under way at a time.
_N_SIZES = 16


class Reader:
    """Plans and executes reads of one store; safe to share between threads.

    Args:
        transport: Where the shards are.
        layout: Their geometry.
        readable: For shards known to be damaged: how many leading examples can still be read.
        check_sizes: Request the size of a shard before it is read for the first time.
        damaged_ok: Of a shard that turns out to be short, read what is there.
    """

    def __init__(
        self, transport: Transport, layout: Layout, *, readable: Mapping[int, int] | None = None, check_sizes: bool = False,
        damaged_ok: bool = False,
    ) -> None:  # fmt: skip
        self.transport = transport
        self.layout = layout
        #: What the shards hold. Reads convert where the memory to fill has another dtype.
        self.dtype = numpy_dtype(layout.dtype)
        self._is_mapped = math.isinf(transport.cost.max_gap_bytes)
        self.planner = Planner(layout, self._is_mapped)
        self._known_readable, self._readable = readable or {}, dict(readable or {})
        self._checks_sizes, self._damaged_ok = check_sizes, damaged_ok
        self._checked: set[int] = set()
        self._maps: dict[int, tuple[NumberArray, str]] = {}
        self._check_mapped = transport.check_mapped

    def __getstate__(self) -> dict[str, object]:
        return {**vars(self), "_maps": {}}  # a map is pickled as all bytes of its file

    def forget(self) -> None:
        """Drop maps, and what was found out about shards since the store was opened."""
        self._maps, self._checked, self._readable = {}, set(), dict(self._known_readable)

    # -- plans ---------------------------------------------------------------------------------------------------------

    def plan(self, request: Block | Points) -> Iterator[PlanPart]:
        """The plan of a parsed key, for an output of its shape (with dropped axes kept at length one)."""
        return self.planner.block(request) if isinstance(request, Block) else self.planner.points(request)

    def execute(self, plan: Iterable[PlanPart], out: NumberArray) -> None:
        """Read what is planned into `out`, which is in C order and of any dtype that `ReadDtype` names."""
        reads: list[tuple[Runs, FileReads]] = []
        for part in plan:
            if part.rows is None or part.columns is None:
                rows = out if part.rows is None else out.reshape(-1, self.layout.d_model)[part.rows]
                self._run(part, rows, reads)
                continue
            n_rows, into_whole = part.rows.stop - part.rows.start, list[tuple[Runs, FileReads]]()
            whole = np.empty((n_rows, self.layout.d_model), dtype=out.dtype)
            self._run(part, whole, into_whole)
            self._read_all(into_whole)
            if part.is_pointwise:
                out.reshape(-1)[part.rows] = whole[np.arange(n_rows), _index(part.columns)]
            else:
                out.reshape(-1, len(part.columns))[part.rows] = whole[:, _index(part.columns)]
        self._read_all(reads)

    def vector(self, example: int, layer_idx: int, token: int) -> FloatArray:
        """One vector as float32, a fresh array; the three positions are inside the tensor. The shortest way there is."""
        shard_idx, in_shard = divmod(example, self.layout.examples_per_shard)
        found = self._maps.get(shard_idx)
        if found is not None and in_shard < len(found[0]):
            mapped, name = found
            self._check_mapped(name, mapped.nbytes)
            return mapped[in_shard, layer_idx, token].astype(FLOAT32)
        self.check(shard_idx, in_shard)
        if self._is_mapped and (shard := self._mapped(shard_idx)) is not None:
            return shard[in_shard, layer_idx, token].astype(FLOAT32)
        layout = self.layout
        start = ((in_shard * layout.n_layers + layer_idx) * layout.tokens_per_example + token) * layout.vector_nbytes
        try:
            (buffer,) = self.transport.get_ranges(
                shard_name(shard_idx), starts=[start], ends=[start + layout.vector_nbytes]
            )
        except NotFoundError:
            self.check_size(shard_idx)
            raise
        return np.frombuffer(buffer, dtype=self.dtype).astype(FLOAT32)

    def view(self, block: Block) -> NumberArray | None:
        """A read-only view of mapped memory for a block, of the stored dtype, or None where there is no such thing."""
        axes = [axis for axis in block.axes if isinstance(axis, range)]
        if not self._is_mapped or len(axes) < len(block.axes) or not axes[0]:
            return None
        examples, capacity = axes[0], self.layout.examples_per_shard
        shard_idx, first = divmod(examples.start, capacity)
        if examples[-1] // capacity != shard_idx:
            return None
        axes[0] = range(first, first + len(examples) * examples.step, examples.step)
        self.check(shard_idx, max(axes[0][0], axes[0][-1]))
        shard = self._mapped(shard_idx)
        return None if shard is None else shard[tuple(map(_index, axes))].reshape(block.shape)

    # -- shards --------------------------------------------------------------------------------------------------------

    def is_unchecked(self, shard_idx: int) -> bool:
        """Return True if the size of a shard will be requested before it is read."""
        return self._checks_sizes and shard_idx not in self._checked

    def check(self, shard_idx: int, highest: int) -> None:
        """Raise `CorruptShardError` if examples of a shard, up to number `highest` in it, are known to be lost."""
        if self.is_unchecked(shard_idx):
            self.check_size(shard_idx)
        readable = self._readable.get(shard_idx)
        if readable is not None and highest >= readable:
            start, end = self.layout.example_range(shard_idx)
            raise CorruptShardError(
                f"example {start + highest} was lost with its shard; of the examples {start} to {end - 1} only the first "
                f"{readable} can be read",
                where=f"{self.transport.url}/{shard_name(shard_idx)}",
                remedy="store.validate() lists everything that is lost, store.repair() records it again.",
            )

    def check_large(self, n_planned: int = 0) -> None:
        """Look at a shard, now, if tables of so many vectors, or of those of an example, or a vector would be large."""
        if max(n_planned, self.layout.vectors_per_example, self.layout.d_model) <= _WIDE:
            return
        for shard_idx in range(self.layout.n_shards):
            if self.is_unchecked(shard_idx):
                self.check_size(shard_idx)
            if self._readable.get(shard_idx) != 0:
                return
        self.check(0, 0)

    def check_size(self, shard_idx: int) -> None:
        """Compare the size of a shard with the layout, now; an error if it is missing, or wrong and `damaged_ok` is not set."""
        name, needed, row = shard_name(shard_idx), self.layout.used_nbytes(shard_idx), self.layout.example_nbytes
        try:
            size = self.transport.size(name)
        except NotFoundError:
            size = None
        if size is not None:
            whole = 0 if size >= self.layout.shard_nbytes + row else size // row  # longer ones are of another capacity
            is_right = whole * row >= needed
            if not is_right and self._damaged_ok:
                self._readable[shard_idx] = whole
            if is_right or self._damaged_ok:
                self._checked.add(shard_idx)
                return
        start, end = self.layout.example_range(shard_idx)
        found = "is missing" if size is None else f"has {size} bytes and needs {needed}"
        raise (MissingShardError if size is None else CorruptShardError)(
            f"the shard of examples {start} to {end - 1} {found}",
            where=f"{self.transport.url}/{name}",
            remedy="Copy it again from where it is whole, or open with damaged_ok=True to read the rest.",
        )

    def _mapped(self, shard_idx: int) -> NumberArray | None:
        """A shard as a read-only array (readable examples, layer, token, d_model); None if the system refuses one more map."""
        found = self._maps.get(shard_idx)
        if found is not None:
            mapped, name = found
            self._check_mapped(name, mapped.nbytes)
            return mapped
        layout, name = self.layout, shard_name(shard_idx)
        n = self._readable.get(shard_idx, layout.examples_in(shard_idx))
        try:
            buffer = self.transport.map_prefix(name, n * layout.example_nbytes)
        except NotFoundError as error:
            self.check_size(shard_idx)
            raise MissingShardError("the shard is missing", where=f"{self.transport.url}/{name}") from error
        if buffer is None:
            return None
        if len(self._maps) >= _MAX_MAPS:
            self._maps = {}
        mapped = np.frombuffer(buffer, dtype=self.dtype).reshape(n, *layout.shape[1:])
        self._maps[shard_idx] = (mapped, name)
        return mapped

    # -- steps ---------------------------------------------------------------------------------------------------------

    def _run(self, part: PlanPart, out: NumberArray, reads: list[tuple[Runs, FileReads]]) -> None:
        """Execute the steps of a part; what is read straight into `out` is added to `reads` instead."""
        gathers: list[Runs] = []
        for step in part.steps:
            if isinstance(step, MappedBox):
                self.check(step.shard_idx, step.highest)
                self._copy_box(step, out)
            elif self._is_mapped and step.n_vectors == 1:
                gathers.append(step)
            elif out.dtype == self.dtype:
                reads.append((step, self._direct_reads(step, out)))
            else:
                self.check(step.shard_idx, step.highest)
                self._fetch(step, out.reshape(-1, self.layout.d_model))
        n = n_threads(out.nbytes, part_bytes=THREAD_BYTES) if gathers else 1
        most = len(out) if n == 1 else max(1, THREAD_BYTES // self.layout.vector_nbytes)
        tasks = [(step, slice(at, at + most)) for step in gathers for at in range(0, len(step.first), most)]
        in_threads(lambda task: self._gather(*task, out), tasks, n)

    def _read_all(self, reads: Sequence[tuple[Runs, FileReads]]) -> None:
        """Read straight into arrays, from all shards side by side."""
        shards = sorted({step.shard_idx for step, _ in reads})
        in_threads(self.check_size, [shard_idx for shard_idx in shards if self.is_unchecked(shard_idx)], _N_SIZES)
        for step, _ in reads:
            self.check(step.shard_idx, step.highest)
        try:
            self.transport.readinto_files([read for _, read in reads])
        except NotFoundError:
            in_threads(self.check_size, shards, _N_SIZES)
            raise

    def _direct_reads(self, step: Runs, out: NumberArray) -> FileReads:
        """The runs of a shard, each of which fills one piece of the output."""
        v, n = self.layout.vector_nbytes, step.n_vectors
        memory = out.reshape(-1).view(np.uint8).data
        order = np.argsort(step.first, kind="stable")
        first, place = step.first[order], step.rows[order]
        # Runs that follow each other in the file and in the output are one.
        new = np.flatnonzero((np.diff(first) != n) | (np.diff(place) != n)) + 1
        bounds = [0, *new.tolist(), len(first)] if len(first) else []
        starts = [int(first[lo]) * v for lo, _ in pairwise(bounds)]
        buffers = [memory[int(place[lo]) * v : (int(place[hi - 1]) + n) * v] for lo, hi in pairwise(bounds)]
        return shard_name(step.shard_idx), starts, buffers

    def _rows(self, step: Runs) -> NumberArray:
        """The vectors of runs, one after the other, as they are stored."""
        rows = np.empty((len(step.first) * step.n_vectors, self.layout.d_model), self.dtype)
        self._read_all([(step, self._direct_reads(step, rows))])
        return rows

    def _fetch(self, step: Runs, out: NumberArray) -> None:
        """Read runs and convert them to their rows of the output; about `_HELD_BYTES` are held at a time."""
        at_once = max(1, _HELD_BYTES // (step.n_vectors * self.layout.vector_nbytes))
        for start in range(0, len(step.first), at_once):
            some = slice(start, start + at_once)
            rows = self._rows(step._replace(first=step.first[some], place=None))
            place = np.add.outer(step.rows[some], np.arange(step.n_vectors)).reshape(-1)
            out[place] = converted(rows, out.dtype)

    def _copy_box(self, step: MappedBox, out: NumberArray) -> None:
        """Copy a strided box out of a map, or out of a file that the system does not map."""
        examples, layers, tokens, columns = map(_index, step.axes)
        shard = self._mapped(step.shard_idx)
        if shard is not None:
            convert(shard[examples, layers, tokens][..., columns], out[step.place])
            return
        e, k, t = map(positions, step.axes[:3])
        vector = (e[:, None, None] * self.layout.n_layers + k[:, None]) * self.layout.tokens_per_example + t
        rows = self._rows(Runs(step.shard_idx, step.highest, vector.reshape(-1), 1, None))
        convert(rows.reshape(*vector.shape, -1)[..., columns], out[step.place])

    def _gather(self, step: Runs, some: slice, out: NumberArray) -> None:
        """Copy rows out of a map, or out of a file that the system does not map."""
        self.check(step.shard_idx, step.highest)
        shard, vector = self._mapped(step.shard_idx), step.first[some]
        if shard is None:
            rows = self._rows(Runs(step.shard_idx, step.highest, vector, 1, None))
            out[some if step.place is None else step.place[some]] = converted(rows, out.dtype)
            return
        source = shard.reshape(-1, self.layout.d_model)
        # mode="clip" because take() would otherwise buffer its output; the positions have been checked.
        if step.place is None and out.dtype == self.dtype:
            np.take(source, vector, axis=0, out=out[some], mode="clip")
            return
        n = max(1, SCRATCH_BYTES // self.layout.vector_nbytes)
        scratch = np.empty((min(n, len(vector)), self.layout.d_model), dtype=self.dtype)
        for start in range(0, len(vector), n):
            part = scratch[: len(vector[start : start + n])]
            np.take(source, vector[start : start + n], axis=0, out=part, mode="clip")
            if step.place is None:
                convert(part, out[some][start : start + n])
            else:
                out[step.place[some][start : start + n]] = converted(part, out.dtype)


def _index(axis: Axis) -> slice | IntArray:
    if not isinstance(axis, range):
        return axis
    if not axis:
        return slice(0, 0)
    return slice(axis.start, axis.stop if axis.stop >= 0 else None, axis.step)
