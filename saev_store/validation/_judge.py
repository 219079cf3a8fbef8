"""Derives problems from the summaries of a store's shards. Pure: every kind of damage can be tested without a disk."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence

import numpy as np

from saev_store.core.layout import Layout, shard_name
from saev_store.problems import Problem
from saev_store.validation._deep import ShardSummary
from saev_store.validation._report import Ranges, merge_ranges
from saev_store.validation._scan import whole_units


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
    owners = {tuple(digests): name for name, digests in expected.items()}
    confirmed: set[int] = set()
    problems: list[Problem] = []
    for shard in shards:
        found = [*_unreadable(layout, shard), *_compare(layout, shard, expected, owners, block_bytes)]
        name = shard_name(shard.shard_idx)
        if not found and len(expected.get(name, ())) == len(shard.digests) > 0:
            confirmed.add(shard.shard_idx)
        problems += [*found, *_oddities(shard)]
    problems += _zeros(layout, shards, confirmed)
    problems += _duplicates(layout, [shard for shard in shards if shard.shard_idx not in confirmed])
    return problems


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
    layout: Layout,
    shard: ShardSummary,
    expected: Mapping[str, Sequence[str]],
    owners: Mapping[tuple[str, ...], str],
    block_bytes: int,
) -> Iterator[Problem]:
    name, used = shard_name(shard.shard_idx), layout.used_nbytes(shard.shard_idx)
    promised = expected.get(name)
    if promised is None:
        return
    other = owners.get(tuple(shard.digests), name)
    if shard.digests and tuple(shard.digests) != tuple(promised) and other != name:
        yield Problem(
            "swapped_shards",
            f"{name} holds what {other} should hold; rename the files back, or copy {name} again",
            where=name,
            lost=(layout.example_range(shard.shard_idx),),
        )
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


def _duplicates(layout: Layout, shards: Sequence[ShardSummary]) -> Iterator[Problem]:
    first: dict[tuple[str, ...], int] = {}
    for shard in shards:
        start, end = layout.example_range(shard.shard_idx)
        zero = whole_units(shard.zero_runs, layout.vectors_per_example * layout.d_model).tolist() == [[0, end - start]]
        if shard.bad or zero or shard.n_bytes != layout.used_nbytes(shard.shard_idx) or not shard.n_bytes:
            continue
        original = first.setdefault(tuple(shard.digests), shard.shard_idx)
        if original != shard.shard_idx:
            name, twin = shard_name(shard.shard_idx), shard_name(original)
            yield Problem(
                "duplicate_shards",
                f"{name} is a copy of {twin}, byte for byte; one of them holds the wrong examples, unless the same "
                "examples were recorded twice",
                where=name,
                severity="warning",
            )
