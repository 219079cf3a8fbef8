"""What the bytes of a store show: zeros and non-finite numbers in pieces of shards, and the problems that follow. Pure."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt

from saev_store.core.dtypes import INFINITY_BITS, ITEMSIZES, are_finite
from saev_store.core.layout import IntArray, Layout, shard_name
from saev_store.problems import Problem
from saev_store.validation._report import Ranges, merge_ranges

NO_RUNS: IntArray = np.empty((0, 2), dtype=np.int64)


_Bits = npt.NDArray[np.uint32] | npt.NDArray[np.uint16]


@dataclass(frozen=True, slots=True)
class Scan:
    """Result of scanning a piece of a shard.

    Attributes:
        zero_runs: Shape (k, 2): half-open ranges of *elements* of the shard that are zero, each either whole vectors or
            the part of a vector at the piece's edge.
        n_nonfinite: Count of elements that are infinite or NaN.
    """

    zero_runs: IntArray
    n_nonfinite: int


def scan_piece(piece: memoryview, *, start: int, d_model: int, dtype: str = "float32") -> Scan:
    """Find zero vectors and non-finite numbers in consecutive bytes of a shard.

    A vector is zero if all its bits are, as in a row of a sparse file that was never written.

    Args:
        piece: Whole elements.
        start: Position of the first one in the shard, in elements.
        d_model: Length of a vector.
        dtype: Of an element, as a layout names it.

    >>> data = np.array([0, 0, 0, 0, 1, 0, 0, 0, 0, 2], dtype="<f4")
    >>> scan_piece(memoryview(data).cast("B"), start=1, d_model=3).zero_runs.tolist()
    [[1, 3], [6, 9]]
    """
    bits = np.frombuffer(piece, dtype=f"<u{ITEMSIZES[dtype]}")
    if not bits.size:
        return Scan(NO_RUNS, 0)
    if not bits[:1024].any() and not bits.any():
        return Scan(np.array([[start, start + bits.size]], dtype=np.int64), 0)
    return Scan(_zero_runs(bits, start, d_model), _count_nonfinite(bits, dtype))


def _count_nonfinite(bits: _Bits, dtype: str) -> int:
    if dtype != "float32":
        if are_finite(bits.view(np.uint16), dtype):
            return 0
        exponent = np.uint16(INFINITY_BITS[dtype])  # all of its bits, in NaN too
        return int(np.count_nonzero((bits & exponent) == exponent))
    # One dot product reads the piece once. It is finite unless an element is not, or elements exceed about 1e16.
    values = bits.view(np.float32)
    with np.errstate(all="ignore"):
        if np.isfinite(np.dot(values, values)):
            return 0
    return values.size - int(np.count_nonzero(np.isfinite(values)))


def _zero_runs(bits: _Bits, start: int, d_model: int) -> IntArray:
    edge = min((-start) % d_model, bits.size)
    n_vectors = (bits.size - edge) // d_model
    runs: list[IntArray] = []
    if edge and not bits[:edge].any():
        runs.append(np.array([[start, start + edge]], dtype=np.int64))
    if n_vectors:
        vectors = bits[edge : edge + n_vectors * d_model].reshape(n_vectors, d_model)
        zero = _zero_vectors(vectors)
        if zero.size:
            first = start + edge + zero.astype(np.int64) * d_model
            runs.append(merge_runs(np.stack([first, first + d_model], axis=1)))
    tail = edge + n_vectors * d_model
    if tail < bits.size and not bits[tail:].any():
        runs.append(np.array([[start + tail, start + bits.size]], dtype=np.int64))
    return np.concatenate(runs) if runs else NO_RUNS


def _zero_vectors(vectors: _Bits) -> npt.NDArray[np.intp]:
    # Comparing a few columns touches one cache line per vector and excludes nearly all vectors, also sparse ones.
    d_model = vectors.shape[1]
    suspects = np.flatnonzero(vectors[:, 0] == 0)
    for column in dict.fromkeys((d_model - 1, d_model // 2, d_model // 3, d_model // 5)):
        if not suspects.size:
            return suspects
        suspects = suspects[vectors[suspects, column] == 0]
    return suspects[~vectors[suspects].any(axis=1)] if suspects.size else suspects


def merge_runs(runs: IntArray) -> IntArray:
    """Merge ascending ranges that touch.

    >>> merge_runs(np.array([[0, 3], [3, 6], [9, 12]])).tolist()
    [[0, 6], [9, 12]]
    """
    if len(runs) < 2:
        return runs
    gap = runs[1:, 0] != runs[:-1, 1]
    starts = runs[np.concatenate([[True], gap]), 0]
    ends = runs[np.concatenate([gap, [True]]), 1]
    return np.stack([starts, ends], axis=1)


def whole_units(runs: IntArray, unit: int) -> IntArray:
    """The units of `unit` elements that lie entirely within merged runs, as non-empty ranges of units.

    >>> whole_units(np.array([[1, 9], [10, 12]]), 3).tolist()
    [[1, 3]]
    """
    units = np.stack([-(-runs[:, 0] // unit), runs[:, 1] // unit], axis=1)
    return units[units[:, 0] < units[:, 1]]


def is_zero(piece: memoryview) -> bool:
    """Whether every byte is zero.

    >>> is_zero(memoryview(bytes(9))), is_zero(memoryview(bytes([0, 0, 0, 0, 1])))
    (True, False)
    """
    whole = len(piece) // 4 * 4
    return not np.frombuffer(piece[:whole], dtype="<u4").any() and not any(piece[whole:])


# -- problems ----------------------------------------------------------------------------------------------------------


@dataclass
class ShardSummary:
    """Result of reading one shard.

    Attributes:
        shard_idx: Number of the shard.
        n_bytes: Bytes of vectors that were read.
        digests: One for each block of them; "" for a block that could not be read.
        zero_runs: Ranges of elements that are zero, merged, as `scan_piece` describes.
        n_nonfinite: Count of elements that are infinite or NaN.
        padding_is_zero: False where bytes after the last vector are not zero.
        bad: Half-open byte ranges that could not be read.
        error: Reason for the first of `bad`, else "".
    """

    shard_idx: int
    n_bytes: int = 0
    digests: list[str] = field(default_factory=list[str])
    zero_runs: IntArray = field(default_factory=lambda: NO_RUNS)
    n_nonfinite: int = 0
    padding_is_zero: bool = True
    bad: list[tuple[int, int]] = field(default_factory=list[tuple[int, int]])
    error: str = ""


def judge(
    layout: Layout, shards: Sequence[ShardSummary], expected: Mapping[str, Sequence[str]], block_bytes: int
) -> list[Problem]:
    """All problems that only the bytes can show.

    Args:
        layout: The store's geometry.
        shards: One summary per shard, ascending.
        expected: Digests by file name; may be empty or incomplete.
        block_bytes: How many bytes a digest covers.
    """
    confirmed: set[int] = set()
    problems: list[Problem] = []
    for shard in shards:
        found = [*_unreadable(layout, shard), *_compare(layout, shard, expected, block_bytes)]
        name = shard_name(shard.shard_idx)
        if not found and len(expected.get(name, ())) == len(shard.digests) > 0:
            confirmed.add(shard.shard_idx)
        problems += [*found, *_oddities(shard)]
    return [*problems, *_zeros(layout, shards, confirmed)]


def _examples_touched(layout: Layout, shard_idx: int, byte_ranges: Sequence[tuple[int, int]]) -> Ranges:
    first, size = layout.example_range(shard_idx)[0], layout.example_nbytes
    return merge_ranges((first + start // size, first - (-end // size)) for start, end in byte_ranges)


def _unreadable(layout: Layout, shard: ShardSummary) -> Iterator[Problem]:
    if shard.bad:
        name = shard_name(shard.shard_idx)
        lost = _examples_touched(layout, shard.shard_idx, shard.bad)
        n_bytes = sum(end - start for start, end in shard.bad)
        yield Problem(
            "unreadable_shard", f"{n_bytes:,} bytes of {name} cannot be read: {shard.error}", where=name, lost=lost
        )


def _compare(
    layout: Layout, shard: ShardSummary, expected: Mapping[str, Sequence[str]], block_bytes: int
) -> Iterator[Problem]:
    name, used = shard_name(shard.shard_idx), layout.used_nbytes(shard.shard_idx)
    promised = expected.get(name)
    if promised is None:
        return
    wrong: list[tuple[int, int]] = []
    for block_idx, (found, promise) in enumerate(zip(shard.digests, promised, strict=False)):
        start = block_idx * block_bytes
        end = min(start + block_bytes, used)
        if (
            found and found != promise and end <= shard.n_bytes
        ):  # a block that a short file cuts is part of `short_shard`
            wrong.append((start, end))
    if wrong:
        yield Problem(
            "digest_mismatch",
            f"{len(wrong)} of the {len(promised)} blocks of {name} are not what was written, the first at byte "
            f"{wrong[0][0]:,}; all examples in these blocks are suspect",
            where=name,
            lost=_examples_touched(layout, shard.shard_idx, wrong),
        )


def _oddities(shard: ShardSummary) -> Iterator[Problem]:
    name = shard_name(shard.shard_idx)
    if shard.n_nonfinite:
        yield Problem(
            "non_finite",
            f"{shard.n_nonfinite:,} numbers in {name} are infinite or not a number; the recorded model may have "
            "overflowed",
            where=name,
            severity="warning",
        )
    if not shard.padding_is_zero:
        yield Problem(
            "nonzero_padding",
            f"{name} has bytes that are not zero after its last example; metadata.json may count too few examples",
            where=name,
            severity="warning",
        )


def _zeros(layout: Layout, shards: Sequence[ShardSummary], confirmed: set[int]) -> Iterator[Problem]:
    example_size = layout.vectors_per_example * layout.d_model
    zero_vectors = 0
    unconfirmed: list[tuple[ShardSummary, Ranges]] = []
    for shard in shards:
        runs = whole_units(shard.zero_runs, example_size)
        first = layout.example_range(shard.shard_idx)[0]
        ranges = merge_ranges((first + start, first + end) for start, end in runs.tolist())
        n_examples = sum(end - start for start, end in ranges)
        vectors = whole_units(shard.zero_runs, layout.d_model)
        zero_vectors += int(np.sum(vectors[:, 1] - vectors[:, 0])) - n_examples * layout.vectors_per_example
        if ranges and shard.shard_idx in confirmed:
            yield _written_zeros(layout, shard, n_examples)
        elif ranges:
            unconfirmed.append((shard, ranges))
    tail = _tail(layout, [span for _, ranges in unconfirmed for span in ranges])
    if tail is not None:
        names = [shard_name(i) for i in range(tail // layout.examples_per_shard, layout.n_shards)]
        where = names[0] if len(names) == 1 else f"{names[0]} to {names[-1]}"
        yield Problem(
            "unwritten_tail",
            f"the last {layout.n_examples - tail:,} examples are nothing but zeros ({where}): the recording most likely "
            f"stopped after example {tail - 1:,}"
            if tail
            else "the whole store is zeros: nothing was ever recorded",
            where=names[0],
            lost=((tail, layout.n_examples),),
        )
    for shard, ranges in unconfirmed:
        start, end = layout.example_range(shard.shard_idx)
        limit = end if tail is None else min(end, max(start, tail))
        rest = merge_ranges((low, min(high, limit)) for low, high in ranges)
        if not rest:
            continue
        whole = rest == ((start, end),)
        name = shard_name(shard.shard_idx)
        n_lost = sum(high - low for low, high in rest)
        yield Problem(
            "zero_shard" if whole else "zero_rows",
            f"{name} is nothing but zeros: it was reserved but never written"
            if whole
            else f"{n_lost:,} of the {end - start:,} examples of {name} are nothing but zeros, as rows that were never "
            "written are",
            where=name,
            lost=rest,
        )
    if zero_vectors:
        yield Problem(
            "zero_vectors",
            f"{zero_vectors:,} vectors are zero in examples that are not; models that mask or gate tokens produce these",
            severity="info",
        )


def _written_zeros(layout: Layout, shard: ShardSummary, n_examples: int) -> Problem:
    name = shard_name(shard.shard_idx)
    return Problem(
        "zero_rows",
        f"{n_examples:,} of the {layout.examples_in(shard.shard_idx):,} examples of {name} are nothing but zeros; "
        "digests.json says that they were recorded like this",
        where=name,
        severity="warning",
    )


def _tail(layout: Layout, zero: Sequence[tuple[int, int]]) -> int | None:
    """The first example of a run of zero examples at the end of the store."""
    merged = merge_ranges(zero)
    return merged[-1][0] if merged and merged[-1][1] == layout.n_examples else None
