"""Chunks of the tensor that are ranges of shards: their shapes and defaults; and lengths of tasks. Pure arithmetic.

A chunk is one range of one shard if it is some whole examples, or some layers of one example. The number of examples divides
those of a shard, so that no chunk spans two files, and the number of layers divides all layers. Then chunks follow each other
in the shards as they do in the tensor.
"""

from __future__ import annotations

import math
import operator
from collections.abc import Iterable, Sequence
from typing import Literal, SupportsIndex, TypeAlias, cast

import numpy as np

from saev_store.core.layout import Layout
from saev_store.errors import ArgumentError, brief

Shape = tuple[int, int, int, int]
#: A chunk shape over (example, layer, token, d_model), or the one that suits the readers.
ChunkShape: TypeAlias = Literal["auto"] | Sequence[int]

#: Chunks of mapped memory: large enough that the cost per chunk is negligible, small enough for many tasks.
_MAPPED_CHUNK_BYTES = 64 << 20
_MAPPED_CHUNK_LEAST_BYTES = 1 << 20
#: The last chunk may be padded in memory, which costs at most this part of the tensor.
_MAPPED_CHUNKS_AT_LEAST = 32
#: One dask task: some tens of milliseconds of work; many tasks fit into memory at once.
TASK_BYTES = 128 << 20
#: A document can promise any number of examples; a scheduler bears a thousandth of these tasks.
_MOST_TASKS = 10_000_000
#: Divisors are looked for by trial up to here, so that a wild number in a document costs milliseconds.
_TRIAL_DIVISORS = 1 << 16


def chunk_shape(layout: Layout, chunks: object, *, max_gap_bytes: float) -> Shape:
    """The shape of a chunk, checked; for `"auto"` the one that suits a transport with `max_gap_bytes`.

    Raises:
        ArgumentError: `chunks` is neither `"auto"` nor the shape of ranges of shards.

    >>> layout = Layout(12_000, tuple(range(6)), 196, True, 768, 2_000)
    >>> chunk_shape(layout, "auto", max_gap_bytes=math.inf), chunk_shape(layout, "auto", max_gap_bytes=1 << 20)
    ((16, 6, 197, 768), (1, 1, 197, 768))
    >>> chunk_shape(layout, (1, 3, 197, 768), max_gap_bytes=0)
    (1, 3, 197, 768)
    """
    if isinstance(chunks, str) and chunks == "auto":
        return _default_chunk(layout, max_gap_bytes)
    try:
        shape = tuple(map(operator.index, cast("Iterable[SupportsIndex]", chunks)))
    except TypeError:
        shape = ()
    n_examples, n_layers, *plane = layout.shape
    capacity = n_examples if layout.n_shards == 1 else layout.examples_per_shard
    if len(shape) == 4 and list(shape[2:]) == plane:
        examples, layers = shape[:2]
        is_whole = layout.n_shards == 1 or (examples > 0 and capacity % examples == 0)
        if layers == n_layers and 0 < examples <= n_examples and is_whole:
            return shape
        if examples == 1 and 0 < layers <= n_layers and n_layers % layers == 0:
            return shape
    rule = f"k is at most {n_examples}" if layout.n_shards == 1 else f"k divides the {capacity} examples of a shard"
    rest = ", ".join(map(str, plane))
    raise ArgumentError(
        f"{brief(chunks)} is not a shape of chunks of a tensor of shape {layout.shape}",
        where="chunks",
        remedy=f'Pass "auto", (k, {n_layers}, {rest}) where {rule}, or (1, k, {rest}) where k divides {n_layers}.',
    )


def _default_chunk(layout: Layout, max_gap_bytes: float) -> Shape:
    """The shape for readers that read so many bytes in the time of a request.

    Mapped memory (infinitely many) gets many whole examples, for a part of a chunk costs only that part there. Elsewhere a
    chunk is fetched as a whole: it is a plane of one layer, or more where that is less than a request is worth.
    """
    n_layers, plane = layout.n_layers, layout.shape[2:]
    is_mapped = math.isinf(max_gap_bytes)
    if is_mapped:
        target = max(_MAPPED_CHUNK_LEAST_BYTES, min(_MAPPED_CHUNK_BYTES, layout.nbytes // _MAPPED_CHUNKS_AT_LEAST))
    else:
        target = int(max_gap_bytes)
        if layout.example_nbytes > target:
            most = target // (layout.tokens_per_example * layout.vector_nbytes)
            return (1, _largest(divisors(n_layers), most), *plane)
    most = target // layout.example_nbytes
    if layout.n_shards == 1:
        return (max(1, min(most, layout.n_examples)), n_layers, *plane)
    lengths = divisors(layout.examples_per_shard)
    examples = _largest(lengths, most)
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
    if n // most > _MOST_TASKS:
        raise ArgumentError(
            f"{n:,} examples are {n // most:,} tasks of {most:,} examples; at most {_MOST_TASKS:,} are listed",
            where="chunks",
            remedy="Pass chunks with more examples, or select first.",
        )
    if most >= capacity:
        return _cut(n, most // capacity * capacity)
    part = math.ceil(capacity / math.ceil(capacity / most))
    # Zarr takes tasks of one length only, which a divisor of the shard gives.
    part = max((n for n in divisors(capacity) if part / 2 <= n <= most), default=part)
    return _cut(capacity, part) * (n // capacity) + _cut(n % capacity, part)


def _cut(n: int, part: int) -> tuple[int, ...]:
    """Lengths of the parts of n, of which the last may be shorter."""
    return (part,) * (n // part) + ((n % part,) if n % part else ())


def divisors(number: int) -> list[int]:
    """The divisors of a number, ascending; of numbers beyond 2^32 those with a factor below 65,537.

    >>> divisors(12)
    [1, 2, 3, 4, 6, 12]
    """
    trial = np.arange(1, min(math.isqrt(number), _TRIAL_DIVISORS) + 1)
    small = trial[number % trial == 0].tolist()
    return sorted({*small, *(number // n for n in small)})


def _largest(numbers: list[int], most: int) -> int:
    """The largest of some numbers that is at most `most`; 1 if there is none."""
    return max((n for n in numbers if n <= most), default=1)
