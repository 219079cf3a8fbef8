"""Chunks of the tensor that are exact byte ranges of shards: their shapes, places and defaults.

Pure arithmetic, nothing is opened. A chunk is one contiguous range if its shape follows the *pivot rule*: the axes left
of one pivot axis have length 1, the axes right of it are whole, and the length on the pivot divides its axis, where the
example axis is divided within a shard, so that no chunk spans two files.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import islice
from typing import NamedTuple, cast

import numpy as np

from saev_store.core.layout import DIMS, Layout, shard_name
from saev_store.errors import ArgumentError

Shape = tuple[int, int, int, int]

#: Chunks of mapped memory: large enough that the cost per chunk is negligible, small enough for many tasks.
_MAPPED_CHUNK_BYTES = 64 << 20
_MAPPED_CHUNK_LEAST_BYTES = 1 << 20
#: A chunk beyond the end of a cut file is padded in memory, which costs at most this part of the tensor.
_MAPPED_CHUNKS_AT_LEAST = 32
#: One dask task: some tens of milliseconds of work; many tasks fit into memory at once.
TASK_BYTES = 128 << 20
#: More tasks than this, which are a thousand times more than a scheduler bears, are not listed.
_MOST_TASKS = 10_000_000
#: Divisors are looked for by trial up to here, so that a wild number in a document costs milliseconds.
_TRIAL_DIVISORS = 1 << 16
_PROPOSALS = 3


class Extent(NamedTuple):
    """A value in a file: bytes `start` to `end` of `path`, then zeros up to `nbytes`.

    Attributes:
        path: The file, relative to the store.
        start: First byte.
        end: One past the last byte that has to be in the file.
        nbytes: Length; more than `end - start` where the last chunk goes beyond the examples.
        shard_idx: The shard, or None if the file is none.
    """

    path: str
    start: int
    end: int
    nbytes: int
    shard_idx: int | None = None


@dataclass(frozen=True)
class ChunkGrid:
    """The tensor cut into chunks of one legal shape.

    Args:
        layout: The geometry.
        chunk: Shape of a chunk, over `DIMS`.

    Attributes:
        chunk_nbytes: Bytes of a chunk.
        counts: Number of chunks along each axis.

    Raises:
        ArgumentError: the shape breaks the pivot rule, or is too small for what it costs; proposes the nearest legal ones.

    >>> layout = Layout(7, (2, 5, 11), 4, True, 8, 3)
    >>> grid = ChunkGrid(layout, (1, 1, 5, 8))
    >>> grid.counts, grid.extent((4, 1, 0, 0))
    ((7, 3, 1, 1), Extent(path='acts000001.bin', start=640, end=800, nbytes=160, shard_idx=1))
    """

    layout: Layout
    chunk: Shape

    chunk_nbytes: int = field(init=False, repr=False, compare=False)
    counts: Shape = field(init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        layout, chunk = self.layout, self.chunk
        _check_shape(layout, chunk)
        self.__dict__.update(  # frozen: fields cannot be assigned
            chunk_nbytes=math.prod(chunk) * layout.itemsize,
            counts=tuple(-(-full // part) for full, part in zip(layout.shape, chunk, strict=True)),
        )

    def extent(self, position: Sequence[int]) -> Extent:
        """Place of a chunk by its position in the grid, which the caller has checked."""
        # A chunk has whole planes at least, so its position on the other two axes is 0.
        layout, example, layer = self.layout, position[0] * self.chunk[0], position[1] * self.chunk[1]
        shard_idx, in_shard = divmod(example, layout.examples_per_shard)
        start = (in_shard * layout.n_layers + layer) * layout.tokens_per_example * layout.vector_nbytes
        # A chunk never goes beyond the capacity of a shard, so only what is left of the tensor can cut it.
        end = min(start + self.chunk_nbytes, layout.nbytes - shard_idx * layout.shard_nbytes)
        return Extent(shard_name(shard_idx), start, end, self.chunk_nbytes, shard_idx)


def default_chunk(layout: Layout, *, max_gap_bytes: float) -> Shape:
    """The chunk shape that suits a transport.

    Mapped memory (no price for a gap) gets many whole examples, for a part of a chunk costs only that part there. Elsewhere
    a chunk is fetched as a whole: it is a plane of one layer, or more where that is less than a request is worth.

    >>> layout = Layout(12_000, tuple(range(6)), 196, True, 768, 2_000)
    >>> default_chunk(layout, max_gap_bytes=math.inf), default_chunk(layout, max_gap_bytes=1 << 20)
    ((16, 6, 197, 768), (1, 1, 197, 768))
    """
    n_layers, plane = layout.n_layers, layout.shape[2:]
    plane_nbytes = layout.tokens_per_example * layout.vector_nbytes
    is_mapped = math.isinf(max_gap_bytes)
    if is_mapped:
        target = max(_MAPPED_CHUNK_LEAST_BYTES, min(_MAPPED_CHUNK_BYTES, layout.nbytes // _MAPPED_CHUNKS_AT_LEAST))
    else:
        target = int(max_gap_bytes)
        if layout.example_nbytes > target:
            layers = max((n for n in divisors(n_layers) if n * plane_nbytes <= target), default=1)
            return (1, layers, *plane)
    most = target // layout.example_nbytes
    if layout.n_shards == 1:
        return (max(1, min(most, layout.n_examples)), n_layers, *plane)
    lengths = divisors(layout.examples_per_shard)
    examples = max((n for n in lengths if n <= most), default=1)
    if is_mapped and examples * layout.example_nbytes < _MAPPED_CHUNK_LEAST_BYTES // 8:
        # A capacity with few divisors, such as a prime: larger chunks cost nothing where memory is mapped.
        larger = (n for n in lengths if examples < n and n * layout.example_nbytes <= 16 * _MAPPED_CHUNK_BYTES)
        examples = min(larger, default=examples)
    return (examples, n_layers, *plane)


def task_lengths(layout: Layout, *, task_bytes: int | None = None) -> tuple[int, ...]:
    """Lengths along the example axis for few tasks of about `task_bytes`; no task has parts of two shards.

    A task is whole shards, where several fit into `task_bytes`, or an equal part of one.

    Args:
        layout: The geometry.
        task_bytes: About the size of a task; default: `TASK_BYTES`.

    Raises:
        ArgumentError: there would be more than ten million tasks.

    >>> task_lengths(Layout(25, (0,), 1, False, 2, 10), task_bytes=48)
    (5, 5, 5, 5, 5)
    """
    # A budget may be far beyond the examples: lengths of a shard that is never full are not listed.
    n, capacity = layout.n_examples, min(layout.examples_per_shard, layout.n_examples)
    most = max(1, (task_bytes or TASK_BYTES) // layout.example_nbytes)
    if n // most > _MOST_TASKS:  # a document can promise any number
        raise ArgumentError(
            f"{n:,} examples are {n // most:,} tasks of {most:,} examples; at most {_MOST_TASKS:,} are listed",
            where="chunks",
            remedy="Pass chunks with more examples, or select first.",
        )
    if most >= capacity:
        step = most // capacity * capacity
        return (*(step for _ in range(n // step)), *((n % step,) if n % step else ()))
    part = math.ceil(capacity / math.ceil(capacity / most))
    # Zarr takes tasks of one length only, which a divisor of the shard gives.
    part = max((n for n in divisors(capacity) if part / 2 <= n <= most), default=part)
    whole = (*(part for _ in range(capacity // part)), *((capacity % part,) if capacity % part else ()))
    lengths = whole * (n // capacity)
    rest = n % capacity
    return (*lengths, *(part for _ in range(rest // part)), *((rest % part,) if rest % part else ()))


def divisors(number: int) -> list[int]:
    """The divisors of a number, ascending; of numbers beyond 2^32 those with a factor below 65,537.

    >>> divisors(12)
    [1, 2, 3, 4, 6, 12]
    """
    trial = np.arange(1, min(math.isqrt(number), _TRIAL_DIVISORS) + 1)
    small = trial[number % trial == 0].tolist()
    return sorted({*small, *(number // n for n in small)})


def nearest_shapes(layout: Layout, wanted: Sequence[int]) -> list[Shape]:
    """The legal shapes that are nearest to one that is not, by the ratios of their lengths, the nearest first."""
    found: list[tuple[float, Shape]] = []
    full = layout.shape
    for axis in range(2):
        length = layout.examples_per_shard if axis == 0 else full[axis]
        candidates = [n for n in divisors(length) if n <= full[axis]]
        if axis == 0 and layout.n_shards == 1:
            candidates.append(max(1, min(int(wanted[0]), layout.n_examples)))
        for n in candidates:
            shape = cast("Shape", (*(1,) * axis, n, *full[axis + 1 :]))
            if _problem(layout, shape) is None:
                distance = sum(abs(math.log(max(a, 1) / b)) for a, b in zip(wanted, shape, strict=True))
                found.append((distance, shape))
    return list(islice(dict.fromkeys(shape for _, shape in sorted(found)), _PROPOSALS))


def _check_shape(layout: Layout, chunk: Sequence[int]) -> None:
    lengths = cast("Sequence[object]", chunk)
    if len(lengths) != 4 or not all(isinstance(n, int) and not isinstance(n, bool) for n in lengths):
        raise ArgumentError(
            f"{chunk!r} is no chunk shape: four integers are, one for each of {', '.join(DIMS)}", where="chunks"
        )
    problem = _problem(layout, chunk)
    if problem is not None:
        shapes = " or ".join(str(shape) for shape in nearest_shapes(layout, chunk))
        raise ArgumentError(
            f"chunks of shape {tuple(chunk)} cannot be laid over a tensor of shape {layout.shape} in shards of "
            f"{layout.examples_per_shard} examples: {problem}",
            where="chunks",
            remedy=f"The nearest shapes that can: {shapes}.",
        )


def _problem(layout: Layout, chunk: Sequence[int]) -> str | None:
    """The rule that a shape breaks, if any."""
    full = layout.shape
    if any(not 1 <= part <= whole for part, whole in zip(chunk, full, strict=True)):
        return "a chunk is at least 1 and at most the whole axis long"
    pivot = next((axis for axis in range(4) if chunk[axis] != 1), 3)
    for axis in range(pivot + 1, 4):
        if chunk[axis] != full[axis]:
            return f"{DIMS[pivot]} is taken {chunk[pivot]} at a time, so {DIMS[axis]} has to be whole ({full[axis]})"
    if pivot == 0:
        if layout.n_shards > 1 and layout.examples_per_shard % chunk[0]:
            return f"{chunk[0]} examples at a time do not divide a shard of {layout.examples_per_shard}"
    elif full[pivot] % chunk[pivot]:
        return f"{chunk[pivot]} does not divide the {full[pivot]} of {DIMS[pivot]}"
    if math.prod(chunk) < full[2] * full[3]:
        return "chunks smaller than one layer of one example would be a request each"
    return None
