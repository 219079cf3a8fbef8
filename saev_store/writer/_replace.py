"""Putting a rebuilt file in the place of a damaged one, with a journal that survives a crash."""

from __future__ import annotations

import json
from dataclasses import dataclass
from typing import cast

from saev_store.core.layout import Layout, shard_name
from saev_store.errors import SaevStoreError
from saev_store.transport import Moves, Sink
from saev_store.writer._digests import Digests, FileDigests, block_ranges, digest, load_digests, n_blocks
from saev_store.writer.folder import DIGESTS, JOURNAL, LABELS, REPAIR, Folder

BEGUN = f"{REPAIR}/begun"
VERSION = 1


@dataclass(frozen=True)
class Journal:
    """What is about to happen: the file `name` will have these digests."""

    name: str
    block_bytes: int
    digests: FileDigests

    def to_bytes(self) -> bytes:
        document = {
            "version": VERSION,
            "name": self.name,
            "block_bytes": self.block_bytes,
            "nbytes": self.digests.nbytes,
            "digests": self.digests.digests,
        }
        return json.dumps(document).encode()


def _building_path(folder: Folder, name: str) -> str:
    """Where a file is rebuilt: beside the old one if it can be moved there; else its upload replaces the old one."""
    return f"{REPAIR}/{name}" if isinstance(folder.transport, Moves) else name


def building_sink(folder: Folder, name: str, *, used_nbytes: int, file_nbytes: int) -> Sink:
    """A sink for the new version of a file; the old one stays until `carry_out`."""
    path = _building_path(folder, name)
    if path == name:
        folder.put(BEGUN, b"")  # where there are no locks, this tells others that a repair is at work
    return folder.open_sink(path, used_nbytes=used_nbytes, file_nbytes=file_nbytes)


def carry_out(folder: Folder, journal: Journal, sink: Sink) -> None:
    """Commit a rebuilt file, put it in its place, and record its digests in digests.json, if the store has one."""
    # A journal promises a file that is on the disk: after a failed flush the page cache shows bytes that are not. A bucket
    # replaces the old file on commit, so there the journal comes first.
    if _building_path(folder, journal.name) != journal.name:
        sink.commit()
        folder.put(JOURNAL, journal.to_bytes())
    else:
        folder.put(JOURNAL, journal.to_bytes())
        sink.commit()
    _move(folder, journal)
    _settle(folder, journal)


def _move(folder: Folder, journal: Journal) -> None:
    """Put the rebuilt file in its place. If it is gone, that is an error: no other process moves it."""
    transport = folder.transport
    if isinstance(transport, Moves):
        transport.move(folder.path(_building_path(folder, journal.name)), folder.path(journal.name))


def _settle(folder: Folder, journal: Journal) -> None:
    """Say in digests.json what lies in its place now; the journal is done with."""
    transport = folder.transport
    transport.close()  # maps of the file that was replaced
    digests = load_digests(transport)
    if digests is not None and digests.block_bytes == journal.block_bytes:
        files = {**digests.files, journal.name: journal.digests}
        folder.put(DIGESTS, Digests(digests.block_bytes, files).to_bytes())
    folder.delete(JOURNAL)


def finish_journal(folder: Folder, layout: Layout) -> None:
    """Carry out what a crashed repair had announced, if the file it announced is whole; else delete the journal."""
    raw = folder.read(JOURNAL)
    if raw is None:
        return
    journal = _parse(bytes(raw), layout)
    if journal is not None:
        building = _building_path(folder, journal.name)
        size = folder.size(building)
        if size is not None and building != journal.name and _is(folder, building, journal):
            _move(folder, journal)
            _settle(folder, journal)
            return
        if _is(folder, journal.name, journal):
            if building != journal.name:
                folder.delete(building)
            _settle(folder, journal)
            return
    folder.delete(JOURNAL)


def _parse(raw: bytes, layout: Layout) -> Journal | None:
    try:
        document = cast("dict[str, object]", json.loads(raw))
        name, block_bytes, nbytes = document["name"], document["block_bytes"], document["nbytes"]
        digests = cast("list[str]", document["digests"])
        expected = {LABELS: layout.n_examples * layout.content_tokens_per_example}
        if isinstance(name, str) and name != LABELS:
            shard_idx = int(name[4:10])
            if name != shard_name(shard_idx) or not 0 <= shard_idx < layout.n_shards:
                return None
            expected[name] = layout.used_nbytes(shard_idx)
        if (
            document["version"] == VERSION
            and isinstance(name, str)
            and isinstance(block_bytes, int)
            and block_bytes > 0
            and isinstance(nbytes, int)
            and nbytes == expected[name]
            and len(digests) == n_blocks(nbytes, block_bytes)
        ):
            return Journal(name, block_bytes, FileDigests(nbytes, tuple(digests)))
    except (ValueError, KeyError, TypeError, RecursionError):
        pass
    return None


def _is(folder: Folder, path: str, journal: Journal) -> bool:
    """Whether a file holds exactly what a journal announces."""
    try:
        return all(
            digest(memoryview(folder.get_range(path, start, end))) == expected
            for (start, end), expected in zip(
                block_ranges(journal.digests.nbytes, journal.block_bytes), journal.digests.digests, strict=True
            )
        )
    except SaevStoreError:
        return False
