"""Chunks of the tensor that are ranges of shards, and lengths of tasks. Pure arithmetic.

A chunk is one range of one shard if it is some whole examples, or some layers of one example. The number of examples divides
those of a shard, so that no chunk spans two files, and the number of layers divides all layers.
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

#: A chunk of mapped memory; 32 of them or more, because the last one may be padded in memory.
_MAPPED_CHUNK_LEAST_BYTES, _MAPPED_CHUNK_BYTES, _MAPPED_CHUNKS_AT_LEAST = 1 << 20, 64 << 20, 32
#: One dask task: some tens of milliseconds of work; many tasks fit into memory at once.
TASK_BYTES = 128 << 20
#: A document can promise any number of examples; a scheduler bears a thousandth of these tasks.
_MOST_TASKS = 10_000_000
#: Divisors are looked for by trial up to here, so that a wild number in a document costs milliseconds.
_TRIAL_DIVISORS = 1 << 16


def chunk_shape(layout: Layout, chunks: object, *, max_gap_bytes: float) -> Shape:
    """The shape of a chunk, or `ArgumentError`; of `"auto"` the one that suits a transport with `max_gap_bytes`."""
    if isinstance(chunks, str) and chunks == "auto":
        return _default_chunk(layout, max_gap_bytes)
    try:
        shape = tuple(map(operator.index, cast("Iterable[SupportsIndex]", chunks)))
    except TypeError:
        shape = ()
    n_examples, n_layers, *plane = layout.shape
    if len(shape) == 4 and list(shape[2:]) == plane:
        examples, layers = shape[:2]
        is_whole = layout.n_shards == 1 or (examples > 0 and layout.examples_per_shard % examples == 0)
        if layers == n_layers and 0 < examples <= n_examples and is_whole:
            return shape
        if examples == 1 and 0 < layers <= n_layers and n_layers % layers == 0:
            return shape
    rest, whole = ", ".join(map(str, plane)), f"k divides the {layout.examples_per_shard} examples of a shard"
    raise ArgumentError(
        f"{brief(chunks)} is not a shape of chunks of a tensor of shape {layout.shape}",
        where="chunks",
        remedy=f'Pass "auto", (k, {n_layers}, {rest}) where {whole}, or (1, k, {rest}) where k divides {n_layers}.',
    )


def _default_chunk(layout: Layout, max_gap_bytes: float) -> Shape:
    """Whole examples of mapped memory; of far files what a request is worth, in planes of a layer or whole examples."""
    n_layers, plane = layout.n_layers, layout.shape[2:]
    if math.isinf(max_gap_bytes):
        target = max(_MAPPED_CHUNK_LEAST_BYTES, min(_MAPPED_CHUNK_BYTES, layout.nbytes // _MAPPED_CHUNKS_AT_LEAST))
    elif layout.example_nbytes > max_gap_bytes:
        most = int(max_gap_bytes) // (layout.tokens_per_example * layout.vector_nbytes)
        return (1, _largest_divisor(n_layers, most), *plane)
    else:
        target = int(max_gap_bytes)
    most = max(1, target // layout.example_nbytes)
    if layout.n_shards == 1:
        return (min(most, layout.n_examples), n_layers, *plane)
    return (_largest_divisor(layout.examples_per_shard, most), n_layers, *plane)


def task_lengths(layout: Layout, *, task_bytes: int = TASK_BYTES) -> tuple[int, ...]:
    """Lengths along the example axis of tasks of about `task_bytes`: whole shards, or equal parts of one.

    Raises:
        ArgumentError: there would be more than ten million tasks.
    """
    # A budget may be far beyond the examples: lengths of a shard that is never full are not listed.
    n, capacity = layout.n_examples, min(layout.examples_per_shard, layout.n_examples)
    most = max(1, task_bytes // layout.example_nbytes)
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
    """The divisors of a number, ascending; of numbers beyond 2^32 those with a factor below 65,537."""
    trial = np.arange(1, min(math.isqrt(number), _TRIAL_DIVISORS) + 1)
    small = trial[number % trial == 0].tolist()
    return sorted({*small, *(number // n for n in small)})


def _largest_divisor(number: int, most: int) -> int:
    return max((n for n in divisors(number) if n <= most), default=1)
