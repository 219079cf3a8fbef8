"""`index.sqlite`: byte ranges of samples and parts. Written from scanned tars, and read although it is untrusted.

SQLite columns hold values of any type, so every value is checked when it is read. Places are compared with the tars there.
"""

from __future__ import annotations

import json
import os
import sqlite3
import tempfile
import threading
import time
import uuid
import weakref
from collections.abc import Iterable, Sequence
from functools import cache
from itertools import groupby
from pathlib import Path
from typing import Any, NoReturn
from urllib.parse import quote

import xxhash

from saev_store.errors import DeadlineError, DocumentError, TransportError, UnsafeContentError, brief
from saev_store.sources._files import chunks
from saev_store.sources.energon.keys import INDEX_SQLITE
from saev_store.sources.energon.tars import BLOCK, Part, Place, Shard
from saev_store.transport import Transport
from saev_store.transport.checks import os_errors

#: Time limit of a statement.
TIMEOUT_S = 60.0
_MAX_OBJECTS = 64
_MAX_TEXT_NBYTES = 1 << 16
_MAX_NUMBER = 2**62
#: Limits of rows: parts of each sample, and of all others in one statement.
_MAX_PARTS, _MAX_ROWS = 64, 100_000

_SAMPLE = "s.sample_index, s.sample_key, s.byte_offset, s.byte_size"
_WHERE = " WHERE s.tar_file_id = ? AND s.sample_index >= ? AND s.sample_index < ? ORDER BY s.sample_index"
#: Energon 6 lists samples without their parts.
_SAMPLES_ONLY = f"SELECT {_SAMPLE} FROM samples AS s{_WHERE} LIMIT ?"  # noqa: S608 - constants
_SAMPLES = (
    f"SELECT {_SAMPLE}, p.part_name, p.content_byte_offset, p.content_byte_size FROM samples AS s"  # noqa: S608 - constants
    " JOIN sample_parts AS p ON p.tar_file_id = s.tar_file_id AND p.sample_index = s.sample_index"
    f"{_WHERE}, p.content_byte_offset LIMIT ?"
)
_LAST = "SELECT sample_index, byte_offset, byte_size FROM samples WHERE tar_file_id = ? ORDER BY 1 DESC LIMIT 1"
_FIND = "SELECT tar_file_id, sample_index FROM samples WHERE sample_key = ? ORDER BY 1, 2 LIMIT 100"


class SqliteIndex:
    """The index of a data set on this machine, open for reading; may be shared between threads."""

    def __init__(self, path: str, *, where: str) -> None:
        self.where = where
        self._path, self._pid = path, 0
        self._lock = threading.Lock()
        self._db: sqlite3.Connection | None = None
        #: When the running statement is stopped. SQLite holds this list, and not the index, which would never be released.
        self._deadline_s = [0.0]
        tables = set[str]()
        for kind, name, sql in self._rows("SELECT type, name, sql FROM sqlite_master LIMIT ?", _MAX_OBJECTS + 1):
            if kind not in {"table", "index"} or (kind == "table" and not str(sql).upper().startswith("CREATE TABLE")):
                message = f"it has a {brief(kind)} {brief(name)}; an index has plain tables only"
                raise UnsafeContentError(
                    message, where=where, remedy="Do not trust this data set, or prepare it again."
                )
            tables.add(str(name))
        if "samples" not in tables or len(tables) > _MAX_OBJECTS:
            self._refuse(f"it has {len(tables)} tables and indices, or no table 'samples'")
        #: False for Energon 6, which lists samples only.
        self.has_parts = "sample_parts" in tables

    def samples(self, shard: int, first: int, end: int) -> list[Place]:
        """Samples `first` to `end` of a shard in order, with their parts if the index has these."""
        limit, statement = (end - first) * _MAX_PARTS + _MAX_ROWS, _SAMPLES if self.has_parts else _SAMPLES_ONLY
        rows = self._checked((int, str, int, int, str, int, int), statement, shard, first, end, limit)
        found: list[tuple[int, Place]] = []
        for (index, key, offset, nbytes), group in groupby(rows, key=lambda row: row[:4]):
            parts = [Part(*row[4:]) for row in group if row[4:]]
            ends = [offset, *(part.offset + part.nbytes for part in parts)]
            if ends[-1] > offset + nbytes or any(p.offset < end + BLOCK for p, end in zip(parts, ends, strict=False)):
                self._refuse(f"a part of {brief(key)} is outside of the sample, or overlaps another one")
            found.append((index, Place(key, offset, nbytes, parts)))
        # The end may be a number that a file claims, so the lengths are compared first.
        if len(found) != end - first or [index for index, _ in found] != list(range(first, end)) or len(rows) == limit:
            self._refuse(f"samples {first} to {end - 1} of shard {shard} are not there exactly once")
        return [place for _, place in found]

    def last(self, shard: int) -> tuple[int, int]:
        """Number of samples of a shard, and the end of the last one; (0, 0) without samples."""
        rows = self._checked((int, int, int), _LAST, shard)
        return (rows[0][0] + 1, rows[0][1] + rows[0][2]) if rows else (0, 0)

    def find(self, key: str) -> list[tuple[int, int]]:
        """(shard, sample_index) of the samples with a key: none, one, or (Energon 7.0) several."""
        return self._checked((int, int), _FIND, key)

    def _checked(self, kinds: Sequence[type], statement: str, *values: object) -> list[Any]:
        """Rows whose values are texts, or integers that are neither negative nor huge."""
        rows = self._rows(statement, *values)
        for row in rows:
            for value, kind in zip(row, kinds, strict=False):
                if type(value) is not kind or (kind is int and not 0 <= value < _MAX_NUMBER):
                    self._refuse(f"it holds {brief(value)}; that must be a text or an integer that is not negative")
        return rows

    def _refuse(self, message: str) -> NoReturn:
        raise DocumentError(message, where=self.where, remedy="Run `saev-store prepare --overwrite`.")

    def _rows(self, statement: str, *values: object) -> list[Any]:
        with self._lock:
            try:
                db = self._connection()
                self._deadline_s[0] = time.monotonic() + TIMEOUT_S
                db.text_factory = cache(bytes.decode)  # a join repeats the key of a sample for each of its parts
                return db.execute(statement, values).fetchall()
            except UnicodeEncodeError:  # no stored name has lone surrogates
                return []
            except (sqlite3.Error, OverflowError, MemoryError, UnicodeDecodeError) as error:
                if isinstance(error, sqlite3.OperationalError) and "interrupted" in str(error):
                    raise DeadlineError(f"a query took longer than {TIMEOUT_S:.0f} s", where=self.where) from None
                self._refuse(f"the database cannot be read: {error or type(error).__name__}")

    def _connection(self) -> sqlite3.Connection:
        if self._db is None or self._pid != os.getpid():  # a forked child needs a connection of its own
            # Immutable: no journal is replayed, and nothing is locked.
            uri = f"file:{quote(self._path)}?mode=ro&immutable=1"
            self._db = db = sqlite3.connect(uri, uri=True, check_same_thread=False, isolation_level=None)
            self._finalizer, self._pid, deadline_s = weakref.finalize(self, db.close), os.getpid(), self._deadline_s
            db.setlimit(sqlite3.SQLITE_LIMIT_LENGTH, _MAX_TEXT_NBYTES)
            db.setlimit(sqlite3.SQLITE_LIMIT_ATTACHED, 0)
            for pragma in ("trusted_schema = OFF", "query_only = ON", "cell_size_check = ON", "mmap_size = 0"):
                db.execute(f"PRAGMA {pragma}").close()
            db.set_progress_handler(lambda: time.monotonic() > deadline_s[0], 100_000)
        return self._db

    def close(self) -> None:
        """Release the database; using the index again opens it again."""
        with self._lock:
            if self._db is not None:
                self._finalizer()
            self._db = None


def open_index(transport: Transport) -> SqliteIndex:
    """Open the database of a data set; a remote one is fetched whole, to a temporary file."""
    where, nbytes = transport.where(INDEX_SQLITE), transport.size(INDEX_SQLITE)
    if transport.local_path is not None:
        return SqliteIndex(f"{transport.local_path}/{INDEX_SQLITE}", where=where)
    with os_errors("$TMPDIR", "write"):
        descriptor, path = tempfile.mkstemp(prefix="saev-store-index-", suffix=".sqlite")
    try:
        with os_errors(path, "write"), os.fdopen(descriptor, "wb") as file:  # closing writes the rest
            for chunk in chunks(transport, INDEX_SQLITE, nbytes):
                file.write(chunk)
        index = SqliteIndex(path, where=where)
    except BaseException:
        os.unlink(path)
        raise
    weakref.finalize(index, Path(path).unlink, missing_ok=True)
    return index


# -- writing -----------------------------------------------------------------------------------------------------------

_NAMESPACE = uuid.UUID("d0a3a1d8-8e6a-5b0f-9e6e-3f2f4a4c9b10")
#: The tables and indices of Energon 7.4. No journal and no syncs: after a failure the file is deleted.
_BEFORE = """
PRAGMA journal_mode = OFF;
PRAGMA synchronous = OFF;
CREATE TABLE samples (tar_file_id INTEGER NOT NULL, sample_key TEXT NOT NULL UNIQUE, sample_index INTEGER NOT NULL,
    byte_offset INTEGER, byte_size INTEGER);
CREATE TABLE sample_parts (tar_file_id INTEGER, sample_index INTEGER, part_name TEXT, content_byte_offset INTEGER,
    content_byte_size INTEGER);
BEGIN;
"""
_AFTER = """
CREATE INDEX idx_samples_by_tar_and_idx ON samples(tar_file_id, sample_index);
CREATE INDEX idx_sample_parts_seq ON sample_parts(tar_file_id, sample_index, content_byte_offset);
CREATE INDEX idx_sample_parts_full ON sample_parts
    (tar_file_id, sample_index, part_name, content_byte_offset, content_byte_size);
PRAGMA journal_mode = DELETE;
"""


def build_index(path: str, shards: Iterable[Shard], *, where: str) -> str:
    """Write the tables and indices of Energon 7.4 to an empty file of this machine, and return the UUID of the content."""
    hasher = xxhash.xxh3_128()
    db = sqlite3.connect(path, isolation_level=None)
    try:
        db.executescript(_BEFORE)
        for shard_id, shard in enumerate(shards):
            hasher.update(json.dumps((shard.name, shard.nbytes, shard.samples)).encode())
            samples = ((shard_id, key, i, offset, nbytes) for i, (key, offset, nbytes, _) in enumerate(shard.samples))
            n_before = db.total_changes
            try:
                db.executemany("INSERT INTO samples VALUES (?, ?, ?, ?, ?)", samples)
            except sqlite3.IntegrityError:
                message = f"{brief(shard.name)} repeats {brief(shard.samples[db.total_changes - n_before].key)}"
                raise DocumentError(message, where=where, remedy="Give each sample a name of its own.") from None
            parts = ((shard_id, i, *part) for i, sample in enumerate(shard.samples) for part in sample.parts)
            db.executemany("INSERT INTO sample_parts VALUES (?, ?, ?, ?, ?)", parts)
        db.executescript(_AFTER)  # which commits first
    except sqlite3.Error as error:
        raise TransportError(f"the database could not be written: {error}", where=path) from error
    finally:
        db.close()
    return str(uuid.uuid5(_NAMESPACE, hasher.hexdigest()))
