"""What of a store's files is lost, and how a rebuilt file takes the place of a damaged one.

A journal says which file is about to be replaced, in the form of a digests.json: after a crash the next repair carries it
out.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from saev_store._runtime.progress import Progress
from saev_store.core.layout import Layout, shard_name
from saev_store.core.token_arrays import TokenArray
from saev_store.errors import (
    AccessError,
    ArgumentError,
    CorruptShardError,
    DeadlineError,
    DocumentError,
    NotFoundError,
    TransportError,
)
from saev_store.names import DIGESTS_NAME
from saev_store.transport import Sink
from saev_store.writer._digests import (
    BLOCK_BYTES,
    Digests,
    FileDigests,
    block_ranges,
    digest,
    load_digests,
    n_blocks,
    parse_digests,
)
from saev_store.writer.folder import JOURNAL, REPAIR, Folder

if TYPE_CHECKING:
    from saev_store.documents import Metadata

BEGUN = f"{REPAIR}/begun"
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


@dataclass(frozen=True)
class Damage:
    """What of a store is lost.

    Attributes:
        digests: What digests.json says, None where there is none.
        shards: Those that have to be built anew, ascending.
        arrays: For each token array `"whole"`, `"absent"` (it was never recorded, as far as is known) or `"lost"`.
    """

    digests: Digests | None
    shards: Sequence[DamagedShard]
    arrays: dict[str, str]

    @property
    def is_none(self) -> bool:
        """Whether there is nothing that a repair could write."""
        can_be_added = self.digests is None and "absent" in self.arrays.values()
        return not self.shards and "lost" not in self.arrays.values() and not can_be_added


def size_of(folder: Folder, name: str) -> int | None:
    """The size of a file; None where there is none, or where it is a link into a folder of somebody else."""
    try:
        return folder.size(name)
    except AccessError:
        return None


def find_damage(
    folder: Folder, metadata: Metadata, *, lost: Sequence[tuple[int, int]], deep: bool, progress: bool | None
) -> Damage:
    """Find the damage: by sizes everywhere, by digests in shards that are suspect (with `deep`, in all)."""
    layout = metadata.layout
    digests = load_digests(folder.transport)
    told = _told(lost, layout)
    suspects: dict[int, Ranges] = {}
    for shard_idx in range(layout.n_shards):
        used = layout.used_nbytes(shard_idx)
        size = size_of(folder, shard_name(shard_idx)) or 0
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
    states = {array.name: _array_state(folder, metadata, array, digests) for array in metadata.recordable}
    return Damage(digests, found, states)


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


def _array_state(folder: Folder, metadata: Metadata, array: TokenArray, digests: Digests | None) -> str:
    """Whether a token array is lost; see `Damage`."""
    name, expected = array.file_name, array.nbytes(metadata.layout)
    promised = digests.files.get(name) if digests is not None else None
    size = size_of(folder, name)
    if size is None:
        return "lost" if promised is not None or metadata.declares_token_arrays else "absent"
    if size != expected:
        return "lost"
    if digests is None or promised is None or promised.nbytes != expected:
        pieces = block_ranges(expected, BLOCK_BYTES) if array.dtype == "bool" else ()
        return "whole" if all(array.is_valid(folder.get_range(name, *piece)) for piece in pieces) else "lost"
    return "whole" if folder.is_as_written(name, promised, digests.block_bytes) else "lost"


# -- putting a rebuilt file in its place -------------------------------------------------------------------------------


def building_sink(folder: Folder, name: str, *, used_nbytes: int, file_nbytes: int) -> Sink:
    """A sink for the new version of a file, beside the old one where it can be moved there; until `carry_out` that stays."""
    if folder.is_far:
        folder.put(BEGUN, b"")  # where there are no locks, this marks a repair at work
    path = name if folder.is_far else f"{REPAIR}/{name}"
    return folder.open_sink(path, used_nbytes=used_nbytes, file_nbytes=file_nbytes)


def carry_out(folder: Folder, name: str, written: FileDigests, block_bytes: int, sink: Sink) -> None:
    """Commit a rebuilt file, put it in its place, and record its digests in digests.json, if the store has one."""
    journal = Digests(block_bytes, {name: written})
    # A journal promises a file that is on the disk: after a failed flush the page cache shows bytes that are not. A bucket
    # replaces the old file on commit, so there the journal comes first.
    if folder.is_far:
        folder.put(JOURNAL, journal.to_bytes())
        sink.commit()
    else:
        sink.commit()
        folder.put(JOURNAL, journal.to_bytes())
        folder.move(f"{REPAIR}/{name}", name)  # no other process moves it
    _settle(folder, journal)


def _settle(folder: Folder, journal: Digests) -> None:
    """Record in digests.json what is in its place now, and delete the journal."""
    transport = folder.transport
    transport.close()  # maps of the file that was replaced
    digests = load_digests(transport)
    if digests is not None and digests.block_bytes == journal.block_bytes:
        files = {**digests.files, **journal.files}
        if files != digests.files:
            folder.put(DIGESTS_NAME, Digests(digests.block_bytes, files).to_bytes())
    folder.delete(JOURNAL)


def finish_journal(folder: Folder, metadata: Metadata) -> None:
    """Carry out what a crashed repair had announced, if the file it announced is whole; else delete the journal."""
    raw = folder.read(JOURNAL)
    if raw is None:
        return
    layout = metadata.layout
    lengths = {shard_name(shard_idx): layout.used_nbytes(shard_idx) for shard_idx in range(layout.n_shards)}
    lengths |= {array.file_name: array.nbytes(layout) for array in metadata.recordable}
    try:
        journal = parse_digests(raw, where=folder.where(JOURNAL))
    except DocumentError:
        folder.delete(JOURNAL)
        return
    for name, written in journal.files.items():  # there is one
        if lengths.get(name) != written.nbytes:
            continue
        building = f"{REPAIR}/{name}"
        is_built = not folder.is_far and folder.exists(building)
        if is_built and folder.is_as_written(building, written, journal.block_bytes):
            folder.move(building, name)
        elif not folder.is_as_written(name, written, journal.block_bytes):
            continue
        elif is_built:
            folder.delete(building)
        _settle(folder, journal)
        return
    folder.delete(JOURNAL)
