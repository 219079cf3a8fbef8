"""What of a damaged store is lost, example by example, and what of each damaged shard survives."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from saev_store._runtime.progress import Progress
from saev_store.core.layout import Layout, shard_name
from saev_store.errors import (
    ArgumentError,
    CorruptShardError,
    DeadlineError,
    NotFoundError,
    SaevStoreError,
    TransportError,
)
from saev_store.writer._digests import Digests, FileDigests, block_ranges, digest, n_blocks
from saev_store.writer.folder import LABELS, Folder

Ranges = list[tuple[int, int]]


def lost_examples(bad: Sequence[tuple[int, int]], layout: Layout, shard_idx: int) -> list[tuple[int, int]]:
    """The half-open ranges of examples, merged and ascending, that damaged byte ranges of one shard touch.

    >>> layout = Layout(7, (2, 5, 11), 4, True, 8, 3)                    # 480 bytes an example
    >>> lost_examples([(0, 8), (470, 481)], layout, 1)
    [(3, 5)]
    """
    first, _ = layout.example_range(shard_idx)
    ranges: list[tuple[int, int]] = []
    for start, end in sorted(bad):
        low = first + start // layout.example_nbytes
        high = first + n_blocks(end, layout.example_nbytes)
        if ranges and low <= ranges[-1][1]:
            ranges[-1] = (ranges[-1][0], max(high, ranges[-1][1]))
        elif low < high:
            ranges.append((low, high))
    return ranges


@dataclass(frozen=True)
class DamagedShard:
    """A shard that has to be built anew.

    Attributes:
        shard_idx: Which one.
        lost: Half-open ranges of examples of the store, ascending, disjoint, none empty.
        promised: What digests.json says about it, None where it says nothing.
    """

    shard_idx: int
    lost: Ranges
    promised: FileDigests | None


def damaged_shards(
    folder: Folder,
    layout: Layout,
    digests: Digests | None,
    *,
    lost: Sequence[tuple[int, int]],
    deep: bool,
    progress: bool | None,
) -> list[DamagedShard]:
    """Find the damage: by sizes everywhere, by digests in shards that are suspect (with `deep`, in all)."""
    told = _told(lost, layout)
    suspects: dict[int, Ranges] = {}
    for shard_idx in range(layout.n_shards):
        used = layout.used_nbytes(shard_idx)
        size = folder.size(shard_name(shard_idx)) or 0
        bad = [(size, used)] if size < used else []
        bad += told.get(shard_idx, [])
        if bad or deep:
            suspects[shard_idx] = bad
    found: list[DamagedShard] = []
    total = sum(layout.used_nbytes(shard_idx) for shard_idx in suspects) if digests is not None else 0
    with Progress(total, "checking", shown=progress if total else False) as bar:
        for shard_idx, bad in suspects.items():
            promised = digests.files.get(shard_name(shard_idx)) if digests is not None else None
            if promised is not None and promised.nbytes != layout.used_nbytes(shard_idx):
                promised = None
            if digests is not None and promised is not None:
                bad.extend(_mismatches(folder, shard_idx, promised, digests.block_bytes, bad, bar))
            ranges = lost_examples(bad, layout, shard_idx)
            if ranges:
                found.append(DamagedShard(shard_idx, ranges, promised))
    return found


def _told(lost: Iterable[tuple[int, int]], layout: Layout) -> dict[int, Ranges]:
    """Byte ranges per shard from ranges of examples that a report names."""
    told: dict[int, Ranges] = {}
    for start, end in lost:
        if not 0 <= start <= end <= layout.n_examples:
            raise ArgumentError(
                f"the range {start}:{end} does not lie within the {layout.n_examples} examples of the store",
                where="lost",
            )
        at = start
        while at < end:
            shard_idx, in_shard = divmod(at, layout.examples_per_shard)
            n = min(end - at, layout.examples_per_shard - in_shard)
            told.setdefault(shard_idx, []).append(
                (in_shard * layout.example_nbytes, (in_shard + n) * layout.example_nbytes)
            )
            at += n
    return told


def _mismatches(
    folder: Folder, shard_idx: int, promised: FileDigests, block_bytes: int, bad: Ranges, bar: Progress
) -> Ranges:
    """The blocks that are not what was written. What is known to be gone is not read."""
    found: Ranges = []
    name = shard_name(shard_idx)
    gone_from = min((start for start, end in bad if end == promised.nbytes), default=promised.nbytes)
    for (start, end), expected in zip(block_ranges(promised.nbytes, block_bytes), promised.digests, strict=True):
        bar.advance(end - start)
        if start >= gone_from:
            break
        try:
            block = folder.get_range(name, start, min(end, gone_from))
        except (CorruptShardError, NotFoundError, TransportError) as error:
            if isinstance(error, DeadlineError):
                raise  # the network, not the file
            found.append((start, end))
            continue
        # A block that the file's end cuts cannot be checked: its digest is of the whole block.
        if end > gone_from or digest(memoryview(block)) != expected:
            found.append((start, end))
    return found


def labels_state(folder: Folder, layout: Layout, digests: Digests | None) -> str:
    """`"whole"`, `"absent"` (none were ever recorded, as far as is known) or `"lost"`."""
    expected = layout.n_examples * layout.content_tokens_per_example
    promised = digests.files.get(LABELS) if digests is not None else None
    size = folder.size(LABELS)
    if size is None:
        return "lost" if promised is not None else "absent"
    if size != expected:
        return "lost"
    if digests is None or promised is None or promised.nbytes != expected:
        return "whole"
    try:
        for (start, end), wanted in zip(block_ranges(expected, digests.block_bytes), promised.digests, strict=True):
            if digest(memoryview(folder.get_range(LABELS, start, end))) != wanted:
                return "lost"
    except SaevStoreError:
        return "lost"
    return "whole"


def compare_labels(
    folder: Folder, layout: Layout, state: str, rows: npt.NDArray[np.uint8], pieces: Sequence[tuple[int, int]]
) -> None:
    """Check that labels of missing examples are those that the store still has.

    Args:
        folder: The store.
        layout: Its geometry.
        state: What `labels_state` gave.
        rows: (examples, content tokens), those of all pieces.
        pieces: Half-open ranges of examples.

    Raises:
        ArgumentError: they are others, or the store has none.
    """
    if state != "whole":
        raise ArgumentError(
            "the store has no labels to compare these with" if state == "absent" else "labels.bin is lost as a whole",
            where="labels",
            remedy="Leave them out." if state == "absent" else "Give all of them to `restore_labels`.",
        )
    content, at = layout.content_tokens_per_example, 0
    for start, end in pieces:
        there = folder.get_range(LABELS, start * content, end * content)
        same = np.frombuffer(there, np.uint8).reshape(-1, content) == rows[at : at + end - start]
        if not same.all():
            raise ArgumentError(
                f"the labels of example {start + int(np.argmin(same.all(axis=1)))} are others than the store's",
                where="labels",
                remedy="These are most likely other examples than the missing ones.",
            )
        at += end - start
