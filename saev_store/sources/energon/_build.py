"""Builds `index.sqlite` from scanned tars: the tables and indices of Energon 7.4."""

from __future__ import annotations

import json
import sqlite3
import uuid
from collections.abc import Iterable, Iterator

import xxhash

from saev_store.errors import DocumentError, TransportError, brief
from saev_store.problems import Problem
from saev_store.sources.energon.tar_scan import ScannedShard

_TABLES = (
    (
        "CREATE TABLE samples (tar_file_id INTEGER NOT NULL, sample_key TEXT NOT NULL UNIQUE, sample_index INTEGER NOT NULL,"
        " byte_offset INTEGER, byte_size INTEGER)"
    ),
    (
        "CREATE TABLE sample_parts (tar_file_id INTEGER, sample_index INTEGER, part_name TEXT, content_byte_offset INTEGER,"
        " content_byte_size INTEGER)"
    ),
)
_INDICES = (
    "CREATE INDEX idx_samples_by_tar_and_idx ON samples(tar_file_id, sample_index)",
    "CREATE INDEX idx_sample_parts_seq ON sample_parts(tar_file_id, sample_index, content_byte_offset)",
    (
        "CREATE INDEX idx_sample_parts_full ON sample_parts"
        "(tar_file_id, sample_index, part_name, content_byte_offset, content_byte_size)"
    ),
)
_NAMESPACE = uuid.UUID("d0a3a1d8-8e6a-5b0f-9e6e-3f2f4a4c9b10")


def build_index(path: str, shards: Iterable[ScannedShard], *, where: str) -> str:
    """Write a database to an empty file of this machine, and return the UUID of its content.

    Raises:
        DocumentError: two samples share a key.
        TransportError: the database cannot be written.
    """
    hasher = xxhash.xxh3_128()
    db: sqlite3.Connection | None = None
    try:
        db = sqlite3.connect(path, isolation_level=None)
        # No journal and no syncs: after a failure the file is deleted.
        db.execute("PRAGMA journal_mode = OFF").close()
        db.execute("PRAGMA synchronous = OFF").close()
        for statement in _TABLES:
            db.execute(statement)
        db.execute("BEGIN")
        for shard_id, scanned in enumerate(shards):
            hasher.update(f"{scanned.shard}\0{scanned.nbytes}\0".encode())
            hasher.update(json.dumps(scanned.samples).encode())
            try:
                db.executemany("INSERT INTO samples VALUES (?, ?, ?, ?, ?)", _sample_rows(shard_id, scanned))
            except sqlite3.IntegrityError:
                raise _duplicate(db, shard_id, scanned, where) from None
            db.executemany("INSERT INTO sample_parts VALUES (?, ?, ?, ?, ?)", _part_rows(shard_id, scanned))
        for statement in _INDICES:
            db.execute(statement)
        db.execute("COMMIT")
        db.execute("PRAGMA journal_mode = DELETE").close()
    except sqlite3.Error as error:
        raise TransportError(f"the database could not be written: {error}", where=path) from error
    finally:
        if db is not None:
            db.close()
    return str(uuid.uuid5(_NAMESPACE, hasher.hexdigest()))


def _sample_rows(shard_id: int, scanned: ScannedShard) -> Iterator[tuple[int, str, int, int, int]]:
    for index, (key, offset, nbytes, _) in enumerate(scanned.samples):
        yield shard_id, key, index, offset, nbytes


def _part_rows(shard_id: int, scanned: ScannedShard) -> Iterator[tuple[int, int, str, int, int]]:
    for index, (_, _, _, parts) in enumerate(scanned.samples):
        for name, offset, nbytes in parts:
            yield shard_id, index, name, offset, nbytes


def _duplicate(db: sqlite3.Connection, shard_id: int, scanned: ScannedShard, where: str) -> DocumentError:
    """The error for a key that two samples share, in this tar or in an earlier one."""
    db.execute("DELETE FROM samples WHERE tar_file_id = ?", (shard_id,))
    seen: dict[str, int] = {}
    message = f"{brief(scanned.shard)} has a key twice"
    for index, (key, *_) in enumerate(scanned.samples):
        row = db.execute("SELECT tar_file_id, sample_index FROM samples WHERE sample_key = ?", (key,)).fetchone()
        first = f"sample {row[1]} of shard {row[0]}" if row else f"sample {seen[key]}" if key in seen else None
        if first is not None:
            message = f"sample {index} of {brief(scanned.shard)} has the key {brief(key)}, and so has {first}"
            break
        seen[key] = index
    return DocumentError(
        message,
        where=where,
        remedy="Give each sample a name of its own; files of one sample must follow each other in the tar.",
        problems=[Problem("repeated_key", message, scanned.shard)],
    )
