"""Execute plans of reads: bring vectors from shards into arrays, through every transport.

A transport's `ReadCost` decides how: where gaps cost nothing (mapped memory) a shard is one array that is
indexed; elsewhere ranges are fetched. `saev_store.core.plan` decides, this module reads.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from itertools import islice, pairwise

import numpy as np
import numpy.typing as npt

from saev_store._runtime.threads import in_threads, n_threads
from saev_store.core.dtypes import FLOAT32, convert, converted, numpy_dtype
from saev_store.core.indexing import Axis, Block, Key, Progression, length, parse_key
from saev_store.core.layout import IntArray, Layout, shard_name
from saev_store.core.plan import MappedBox, MappedRows, Part, Planner, Runs, Step, pieces
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
#: Bytes that are requested, and not yet handed out, at a time.
_HELD_BYTES = 256 << 20
#: Requests for the sizes of shards that are under way at a time.
_N_SIZES = 16


class Reader:
    """Plans and executes reads of one store; safe to share between threads.

    Args:
        transport: Where the shards are.
        layout: Their geometry.
        readable: For shards known to be damaged: how many leading examples can still be read.
        check_sizes: Request the size of a shard before it is read for the first time (remote stores, whose sizes were
            not compared when they were opened).
        damaged_ok: Of a shard that turns out to be short, read what is there.

    Attributes:
        dtype: What the shards hold. Reads convert where the memory to fill has another dtype.
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
        self.dtype = numpy_dtype(layout.dtype)
        self._is_mapped = math.isinf(transport.cost.max_gap_bytes)
        self._planner = Planner(layout, self._is_mapped)
        self._known_readable, self._readable = readable or {}, dict(readable or {})
        self._checks_sizes = check_sizes
        self._checked: set[int] = set()
        self._damaged_ok = damaged_ok
        self._maps: dict[int, tuple[NumberArray, str]] = {}
        self._check_mapped = transport.check_mapped

    def __getstate__(self) -> dict[str, object]:
        # A map is pickled as all bytes of its file.
        return {**vars(self), "_maps": {}}

    def forget(self) -> None:
        """Drop maps, and what was found out about shards since the store was opened."""
        self._maps, self._checked, self._readable = {}, set(), dict(self._known_readable)

    # -- plans ---------------------------------------------------------------------------------------------------------

    def plan(self, key: Key) -> Iterator[Part]:
        """Cost of reading `key`, for an output of the shape of the key (with dropped axes kept at length one)."""
        request = parse_key(key, self.layout.shape)
        return self._planner.block(request) if isinstance(request, Block) else self._planner.points(request)

    def plan_rows(self, example: IntArray, layer_idx: IntArray, token: IntArray) -> Part:
        """Cost of reading n vectors, given by position, in any order, repeats allowed; for an output (n, d_model)."""
        return self._planner.rows(example, layer_idx, token)

    def execute(self, plan: Iterable[Part], out: NumberArray) -> None:
        """Read what is planned into `out`, which is in C order and of any dtype that `ReadDtype` names.

        Raises:
            CorruptShardError: a shard that is needed is missing, was cut, or was lost.
            TransportError: it cannot be read.
        """
        scratch: NumberArray | None = None
        reads: list[tuple[Runs, FileReads]] = []
        for part in plan:
            if part.rows is None:
                self._run(part.steps, out, reads)
                continue
            n_rows = part.rows.stop - part.rows.start
            if part.columns is None:
                self._run(part.steps, out.reshape(-1, self.layout.d_model)[part.rows], reads)
                continue
            if scratch is None or len(scratch) < n_rows:
                scratch = np.empty((n_rows, self.layout.d_model), dtype=out.dtype)
            rows, into_scratch = scratch[:n_rows], list[tuple[Runs, FileReads]]()
            self._run(part.steps, rows, into_scratch)
            self._read_all(into_scratch)
            width = 1 if part.is_pointwise else length(part.columns)
            target = out.reshape(-1, width)[part.rows]
            if part.is_pointwise:
                target[:, 0] = rows[np.arange(n_rows), _index(part.columns)]
            else:
                target[...] = rows[:, _index(part.columns)]
        self._read_all(reads)

    def read_rows(self, example: IntArray, layer_idx: IntArray, token: IntArray, out: NumberArray) -> None:
        """Fill `out` (n, d_model), C order, with n vectors given by position, in any order, repeats allowed."""
        self.execute((self.plan_rows(example, layer_idx, token),), out)

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
        """A read-only view of mapped memory for a block, of the stored dtype, or None where there is no such thing.

        The size of the file is compared now; a file that is cut while the view is in use ends the process.
        """
        axes = [axis for axis in block.axes if isinstance(axis, Progression)]
        if not self._is_mapped or len(axes) < len(block.axes):
            return None
        found = list(islice(pieces(self.layout, axes[0]), 2))
        if len(found) != 1:
            return None
        axes[0] = found[0].examples
        self.check(found[0].shard_idx, axes[0].highest)
        shard = self._mapped(found[0].shard_idx)
        return None if shard is None else shard[tuple(map(_as_slice, axes))].reshape(block.shape)

    # -- shards --------------------------------------------------------------------------------------------------------

    def is_unchecked(self, shard_idx: int) -> bool:
        """Return True if the size of a shard will be requested before it is read."""
        return self._checks_sizes and shard_idx not in self._checked

    def unmapped_nbytes(self, shard_idx: int) -> int:
        """Bytes that will be mapped when a shard is read through a map; 0 if it is mapped already."""
        n = self._readable.get(shard_idx, self.layout.examples_in(shard_idx))
        return 0 if shard_idx in self._maps else n * self.layout.example_nbytes

    def check(self, shard_idx: int, highest: int) -> None:
        """Refuse examples of a shard that are known to be lost, up to number `highest` in the shard.

        Raises:
            CorruptShardError: they are, or the file is missing or short.
        """
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

    def check_wide(self) -> None:
        """Compare the size of the first shard with the layout, now, if a vector or tables of those of an example would be large.

        Raises:
            CorruptShardError: as `check_size`; with `damaged_ok` if all shards are lost.
        """
        if max(self.layout.vectors_per_example, self.layout.d_model) <= _WIDE:
            return
        for shard_idx in range(self.layout.n_shards):
            if self.is_unchecked(shard_idx):
                self.check_size(shard_idx)
            if self._readable.get(shard_idx) != 0:
                return
        self.check(0, 0)

    def check_large(self, n_planned: int) -> None:
        """Compare the size of the first shard, now, if the tables of a plan of that many vectors would be large."""
        if n_planned > _WIDE and self.is_unchecked(0):
            self.check_size(0)

    def check_size(self, shard_idx: int) -> None:
        """Compare the size of a shard with the layout, now.

        Raises:
            MissingShardError: there is no such file.
            CorruptShardError: it is too short, or of another capacity, and the store was not opened with `damaged_ok`.
        """
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
            remedy="Copy it again from where it is whole."
            + ("" if self._damaged_ok else " Open with damaged_ok=True to read the rest."),
        )

    def _mapped(self, shard_idx: int) -> NumberArray | None:
        """A shard as a read-only array (readable examples, layer, token, d_model), its file compared in size now.

        None if the system has no address space, or no room, for one more map.
        """
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
        mapped.flags.writeable = False
        self._maps[shard_idx] = (mapped, name)
        return mapped

    # -- steps ---------------------------------------------------------------------------------------------------------

    def _run(self, steps: Sequence[Step], out: NumberArray, reads: list[tuple[Runs, FileReads]]) -> None:
        """Execute steps; what is read straight into `out` is added to `reads` instead."""
        gathers = [step for step in steps if isinstance(step, MappedRows)]
        if gathers:
            self._gather_all(gathers, out)
        for step in steps:
            if isinstance(step, MappedRows):
                continue
            if isinstance(step, MappedBox):
                self.check(step.shard_idx, step.highest)
                self._copy_box(step, out)
            elif out.dtype == self.dtype:
                reads.append((step, self._direct_reads(step, out)))
            else:
                self.check(step.shard_idx, step.highest)
                self._fetch(step, out)

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
        first, place = step.first[order], step.place[order]
        # Runs that follow each other in the file and in the output are one.
        new = np.flatnonzero((np.diff(first) != n) | (np.diff(place) != n)) + 1
        bounds = [0, *new.tolist(), len(first)] if len(first) else []
        starts = [int(first[lo]) * v for lo, _ in pairwise(bounds)]
        buffers = [memory[int(place[lo]) * v : (int(place[hi - 1]) + n) * v] for lo, hi in pairwise(bounds)]
        return shard_name(step.shard_idx), starts, buffers

    def _copy_box(self, step: MappedBox, out: NumberArray) -> None:
        """Copy a strided box out of a map."""
        examples, layers, tokens, columns = map(_index, step.axes)
        shard = self._mapped(step.shard_idx)
        if shard is not None:
            convert(shard[examples, layers, tokens][..., columns], out[step.place])
            return
        at = [axis.positions() for axis in step.axes[:3]]
        vector = (at[0][:, None, None] * self.layout.n_layers + at[1][:, None]) * self.layout.tokens_per_example + at[2]
        rows = self._unmapped_rows(step.shard_idx, vector.ravel()).reshape(*vector.shape, -1)
        convert(rows[..., columns], out[step.place])

    def _unmapped_rows(self, shard_idx: int, vector: IntArray) -> NumberArray:
        """Vectors of a shard that cannot be mapped, by their numbers in it."""
        rows = np.empty((len(vector), self.layout.d_model), self.dtype)
        memory, v = rows.reshape(-1).view(np.uint8).data, self.layout.vector_nbytes
        buffers = [memory[at : at + v] for at in range(0, len(vector) * v, v)]
        self.transport.readinto(shard_name(shard_idx), starts=(vector * v).tolist(), buffers=buffers)
        return rows

    def _gather_all(self, steps: Sequence[MappedRows], out: NumberArray) -> None:
        """Copy rows out of maps, with several threads where that is worth it."""
        n = n_threads(out.nbytes, part_bytes=THREAD_BYTES)
        most = len(out) if n == 1 else max(1, THREAD_BYTES // self.layout.vector_nbytes)
        parts = [(step, slice(at, at + most)) for step in steps for at in range(0, len(step.vector), most)]
        in_threads(lambda part: self._gather(*part, out), parts, n)

    def _gather(self, step: MappedRows, some: slice, out: NumberArray) -> None:
        """Copy rows out of a map."""
        self.check(step.shard_idx, step.highest)
        shard, vector = self._mapped(step.shard_idx), step.vector[some]
        if shard is None:
            rows = converted(self._unmapped_rows(step.shard_idx, vector), out.dtype)
            out[some if step.place is None else step.place[some]] = rows
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

    def _fetch(self, step: Runs, out: NumberArray) -> None:
        """Read runs and convert them to their rows of the output; about `_HELD_BYTES` are held at a time."""
        rows, n = out.reshape(-1, self.layout.d_model), step.n_vectors
        nbytes = n * self.layout.vector_nbytes
        at_once = max(1, _HELD_BYTES // nbytes)
        try:
            for done in range(0, len(step.first), at_once):
                place = step.place[done : done + at_once]
                starts = step.first[done : done + at_once] * self.layout.vector_nbytes
                found = self.transport.get_ranges(
                    shard_name(step.shard_idx), starts=starts.tolist(), ends=(starts + nbytes).tolist()
                )
                if n == 1:
                    joined = np.frombuffer(b"".join(found), dtype=self.dtype).reshape(-1, self.layout.d_model)
                    rows[place] = converted(joined, rows.dtype)
                    continue
                for buffer, at in zip(found, place.tolist(), strict=True):
                    convert(np.frombuffer(buffer, dtype=self.dtype).reshape(n, -1), rows[at : at + n])
        except NotFoundError:
            self.check_size(step.shard_idx)
            raise


def _index(axis: Axis) -> slice | IntArray:
    return _as_slice(axis) if isinstance(axis, Progression) else axis


def _as_slice(axis: Progression) -> slice:
    if axis.count == 0:
        return slice(0, 0)
    stop = axis.start + axis.count * axis.step
    return slice(axis.start, stop if stop >= 0 else None, axis.step)
