"""`index.sqlite`: byte ranges of samples and parts. Written from scanned tars, and read although it is untrusted.

The database is opened read-only and immutable. Its schema is checked before its rows are read: views, triggers, virtual tables
and generated columns are refused. Every statement has a time limit. SQLite columns hold values of any type, so every value is
checked when it is read.
"""

from __future__ import annotations

import json
import os
import sqlite3
import threading
import time
import uuid
import weakref
from collections.abc import Iterable, Sequence
from itertools import groupby
from typing import Any, NoReturn
from urllib.parse import quote

import xxhash

from saev_store.errors import DeadlineError, DocumentError, TransportError, UnsafeContentError, brief
from saev_store.problems import Problem
from saev_store.sources.energon.tars import BLOCK, Part, Sample, Shard

MAGIC = b"SQLite format 3\0"
#: Time limit of a statement.
TIMEOUT_S = 60.0
#: Parts of the files of a folder that are read at once.
PAGE = 10_000
_COLUMNS = {
    "samples": ("tar_file_id", "sample_key", "sample_index", "byte_offset", "byte_size"),
    "sample_parts": ("tar_file_id", "sample_index", "part_name", "content_byte_offset", "content_byte_size"),
}
_MAX_OBJECTS = 64
_MAX_TEXT_NBYTES = 1 << 20
_MAX_NUMBER = 2**62
#: Limit of the rows of one statement about `n` samples: this, and 64 for each.
_MAX_ROWS = 100_000

_JOIN = "samples AS s JOIN sample_parts AS p ON p.tar_file_id = s.tar_file_id AND p.sample_index = s.sample_index"
_SAMPLES = (
    "SELECT s.tar_file_id, s.sample_index, s.sample_key, s.byte_offset, s.byte_size,"  # noqa: S608 - constants
    " p.part_name, p.content_byte_offset, p.content_byte_size FROM " + _JOIN
)
_FILES = (
    "SELECT s.sample_key, p.content_byte_offset, p.part_name, p.content_byte_size FROM "  # noqa: S608 - constants
    + _JOIN
    + " WHERE s.sample_key >= ?"
    " AND s.sample_key < ? AND instr(substr(s.sample_key, ?), '/') = 0 AND (s.sample_key, p.content_byte_offset) > (?, ?)"
    " ORDER BY s.sample_key, p.content_byte_offset LIMIT ?"
)
_FOLDERS = (
    "SELECT DISTINCT substr(sample_key, 1, instr(substr(sample_key, ?), '/') + ?) FROM samples"
    " WHERE sample_key > ? AND sample_key < ? AND instr(substr(sample_key, ?), '/') > 0 ORDER BY 1"
)


class SqliteIndex:
    """The index of a data set, open for reading; may be shared between threads.

    Args:
        path: The database on this machine.
        where: Its name in messages.

    Attributes:
        has_parts: True if it lists single parts; those of Energon 6 list samples only.
        unique_keys: True if its schema ensures that no two samples share a key.

    Raises:
        UnsafeContentError: it has views, triggers, virtual tables or computed columns.
        DocumentError: it is not a database, or has other tables.
    """

    def __init__(self, path: str, *, where: str) -> None:
        self.where = where
        self._path, self._pid = path, 0
        self._lock = threading.Lock()
        self._db: sqlite3.Connection | None = None
        #: When the running statement is stopped. SQLite holds this list, and not the index, which would never be released.
        self._deadline_s = [0.0]
        objects = self._rows("SELECT type, name, sql FROM sqlite_master LIMIT ?", _MAX_OBJECTS + 1)
        if len(objects) > _MAX_OBJECTS:
            self._refuse(f"it has more than {_MAX_OBJECTS} tables and indices")
        for kind, name, sql in objects:
            if kind not in {"table", "index"} or (kind == "table" and not str(sql).upper().startswith("CREATE TABLE")):
                self._refuse_unsafe(f"it has a {brief(kind)} {brief(name)}; an index has plain tables only")
        self.has_parts = any(name == "sample_parts" for _, name, _ in objects)
        for table in ("samples", "sample_parts") if self.has_parts else ("samples",):
            found = {str(row[1]): row for row in self._rows(f"PRAGMA table_xinfo({table})")}
            missing = [name for name in _COLUMNS[table] if name not in found]
            if missing:
                self._refuse(f"table {table!r} has no column {', '.join(missing)}; it has {', '.join(found) or 'none'}")
            if any(row[6] for row in found.values()):
                self._refuse_unsafe(f"table {table!r} has computed columns")
        unique = [str(row[1]).replace('"', '""') for row in self._rows("PRAGMA index_list(samples)") if row[2]]
        keys = [[row[2] for row in self._rows(f'PRAGMA index_info("{name}")')] for name in unique]
        self.unique_keys = ["sample_key"] in keys

    # -- rows ----------------------------------------------------------------------------------------------------------

    def samples(self, shard: int, first: int, end: int) -> list[Sample]:
        """Samples `first` to `end` of a shard with their parts, in order; every number is checked against the others.

        Raises:
            DocumentError: one is not there exactly once, has no part, or is not inside its place.
        """
        limit = (end - first) * 64 + _MAX_ROWS
        condition = "WHERE s.tar_file_id = ? AND s.sample_index >= ? AND s.sample_index < ?"
        order = "ORDER BY s.sample_index, p.content_byte_offset LIMIT ?"
        found = self._grouped(f"{_SAMPLES} {condition} {order}", shard, first, end, limit)
        # The end may be a number that a file claims, so the lengths are compared first.
        if len(found) != end - first or [index for _, index, _ in found] != list(range(first, end)):
            self._refuse(f"samples {first} to {end - 1} of shard {shard} are not there exactly once, with parts")
        return [sample for _, _, sample in found]

    def sample(self, key: str) -> tuple[int, int, Sample] | None:
        """Shard, number and place of the only sample with a key; None if there is none, or keys may be repeated."""
        if not (self.has_parts and self.unique_keys):
            return None
        order = "ORDER BY s.tar_file_id, s.sample_index, p.content_byte_offset LIMIT ?"
        found = self._grouped(f"{_SAMPLES} WHERE s.sample_key = ? {order}", key, _MAX_ROWS)
        return found[0] if len(found) == 1 else None

    def _grouped(self, statement: str, *values: object) -> list[tuple[int, int, Sample]]:
        """(shard, sample_index, sample) from rows of one part each."""
        rows = self._rows(statement, *values)
        if len(rows) == values[-1]:
            self._refuse(f"it has more than {len(rows):,} parts there")
        self._check(rows, (int, int, str, int, int, str, int, int))
        samples: list[tuple[int, int, Sample]] = []
        for (shard, index, key, offset, nbytes), parts in groupby(rows, key=lambda row: row[:5]):
            sample = Sample(key, offset, nbytes, [Part(*row[5:]) for row in parts])
            self._check_places(sample, f"sample {index} of shard {shard}")
            samples.append((shard, index, sample))
        return samples

    def _check_places(self, sample: Sample, what: str) -> None:
        """Check that a sample has whole blocks, and each part once, with a header in front of it, behind the part before."""
        before, end = sample.offset, sample.offset + sample.nbytes
        names: set[str] = set()
        for part in sample.parts:
            if part.offset - BLOCK < before or part.offset % BLOCK or part.name in names:
                break
            names.add(part.name)
            before = part.offset + part.nbytes
        if len(names) < len(sample.parts) or before > end or sample.offset % BLOCK or sample.nbytes % BLOCK:
            self._refuse(
                f"{what} is at {sample.offset:,} and has {sample.nbytes:,} bytes and {len(sample.parts)} parts: a part is outside,"
                " there twice, or overlaps another one, or there is no whole number of blocks"
            )

    def last(self, shard: int) -> tuple[int, int]:
        """Number of samples of a shard, and the end of the last one; (0, 0) without samples."""
        rows = self._rows(
            "SELECT sample_index, byte_offset, byte_size FROM samples WHERE tar_file_id = ? ORDER BY 1 DESC LIMIT 1",
            shard,
        )
        self._check(rows, (int, int, int))
        return (rows[0][0] + 1, rows[0][1] + rows[0][2]) if rows else (0, 0)

    def counts(self) -> dict[int, tuple[int, int]]:
        """Number of samples, and of parts, of each `tar_file_id`; reads every row."""
        found: dict[int, list[int]] = {}
        for i, table in enumerate(("samples", "sample_parts")):
            rows = self._rows(f"SELECT tar_file_id, COUNT(*) FROM {table} GROUP BY 1")  # noqa: S608 - a constant
            self._check(rows, (int, int))
            for shard, count in rows:
                found.setdefault(shard, [0, 0])[i] = count
        return {shard: (samples, parts) for shard, (samples, parts) in sorted(found.items())}

    def find(self, key: str) -> list[tuple[int, int]]:
        """(shard, sample_index) of the samples with a key: none, one, or (Energon 7.0) several."""
        rows = self._rows(
            "SELECT tar_file_id, sample_index FROM samples WHERE sample_key = ? ORDER BY 1, 2 LIMIT 100", key
        )
        return self._check(rows, (int, int))

    def repeated_keys(self) -> list[str]:
        """Keys that several samples share, at most 100."""
        if self.unique_keys:
            return []
        rows = self._rows("SELECT sample_key FROM samples GROUP BY sample_key HAVING COUNT(*) > 1 LIMIT 100")
        return [key for (key,) in self._check(rows, (str,))]

    def folders(self, folder: str) -> list[str]:
        """The folders directly in a folder of sample keys, in the order of their UTF-8 bytes; `""` is the root."""
        prefix, end, start = _bounds(folder)
        return [name for (name,) in self._check(self._rows(_FOLDERS, start, start - 2, prefix, end, start), (str,))]

    def files(self, folder: str, after: tuple[str, int]) -> list[tuple[str, int, str, int]]:
        """Key, offset, name and size of the first parts directly in a folder behind `after`, a key and an offset: a page."""
        if not self.has_parts:
            self._refuse("it does not list parts, which Energon 6 did not index")
        prefix, end, start = _bounds(folder)
        rows = self._rows(_FILES, max(prefix, after[0]), end, start, *after, PAGE)
        return self._check(rows, (str, int, str, int))

    def has_folder(self, folder: str) -> bool:
        """Return True if the key of a sample begins with this folder."""
        prefix, end, _ = _bounds(folder)
        return bool(self._rows("SELECT 1 FROM samples WHERE sample_key > ? AND sample_key < ? LIMIT 1", prefix, end))

    def _check(self, rows: list[Any], kinds: Sequence[type]) -> list[Any]:
        """The rows, once every value is text, or an integer that is neither negative nor huge."""
        for row in rows:
            for value, kind in zip(row, kinds, strict=True):
                if type(value) is not kind or (kind is int and not 0 <= value < _MAX_NUMBER):
                    self._refuse(f"it holds {brief(value)}; that must be a text or an integer that is not negative")
        return rows

    def _refuse(self, message: str) -> NoReturn:
        raise DocumentError(
            message,
            where=self.where,
            remedy="Prepare the data set again: `saev-store prepare --overwrite`.",
            problems=[Problem("index_sqlite", message, self.where)],
        )

    def _refuse_unsafe(self, message: str) -> NoReturn:
        raise UnsafeContentError(message, where=self.where, remedy="Do not trust this data set, or prepare it again.")

    # -- the connection ------------------------------------------------------------------------------------------------

    def _rows(self, statement: str, *values: object) -> list[Any]:
        with self._lock:
            try:
                db = self._connection()
                self._deadline_s[0] = time.monotonic() + TIMEOUT_S
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
            self._db = sqlite3.connect(uri, uri=True, check_same_thread=False, isolation_level=None)
            self._finalizer, self._pid, deadline_s = (
                weakref.finalize(self, self._db.close),
                os.getpid(),
                self._deadline_s,
            )
            self._db.setlimit(sqlite3.SQLITE_LIMIT_LENGTH, _MAX_TEXT_NBYTES)
            self._db.setlimit(sqlite3.SQLITE_LIMIT_ATTACHED, 0)
            for pragma in ("trusted_schema = OFF", "query_only = ON", "cell_size_check = ON", "mmap_size = 0"):
                self._db.execute(f"PRAGMA {pragma}").close()
            self._db.set_progress_handler(lambda: time.monotonic() > deadline_s[0], 100_000)
        return self._db

    def close(self) -> None:
        """Release the database; using the index again opens it again."""
        with self._lock:
            if self._db is not None:
                self._finalizer()
            self._db = None


def _bounds(folder: str) -> tuple[str, str | bytes, int]:
    """Lower and upper bound of the keys in a folder, and the position of the character behind its name, from 1."""
    # "0" follows "/"; every text sorts before a blob.
    return (f"{folder}/", f"{folder}0", len(folder) + 2) if folder else ("", b"", 1)


# -- writing -----------------------------------------------------------------------------------------------------------

_NAMESPACE = uuid.UUID("d0a3a1d8-8e6a-5b0f-9e6e-3f2f4a4c9b10")
#: No journal and no syncs: after a failure the file is deleted.
_BEFORE = (
    "PRAGMA journal_mode = OFF",
    "PRAGMA synchronous = OFF",
    (
        "CREATE TABLE samples (tar_file_id INTEGER NOT NULL, sample_key TEXT NOT NULL UNIQUE, sample_index INTEGER NOT NULL,"
        " byte_offset INTEGER, byte_size INTEGER)"
    ),
    (
        "CREATE TABLE sample_parts (tar_file_id INTEGER, sample_index INTEGER, part_name TEXT, content_byte_offset INTEGER,"
        " content_byte_size INTEGER)"
    ),
    "BEGIN",
)
_AFTER = (
    "CREATE INDEX idx_samples_by_tar_and_idx ON samples(tar_file_id, sample_index)",
    "CREATE INDEX idx_sample_parts_seq ON sample_parts(tar_file_id, sample_index, content_byte_offset)",
    (
        "CREATE INDEX idx_sample_parts_full ON sample_parts"
        "(tar_file_id, sample_index, part_name, content_byte_offset, content_byte_size)"
    ),
    "COMMIT",
    "PRAGMA journal_mode = DELETE",
)


def build_index(path: str, shards: Iterable[Shard], *, where: str) -> str:
    """Write the tables and indices of Energon 7.4 to an empty file of this machine, and return the UUID of the content.

    Raises:
        DocumentError: two samples share a key.
        TransportError: the database cannot be written.
    """
    hasher = xxhash.xxh3_128()
    db = sqlite3.connect(path, isolation_level=None)
    try:
        for statement in _BEFORE:
            db.execute(statement).close()
        for shard_id, shard in enumerate(shards):
            hasher.update(json.dumps((shard.name, shard.nbytes, shard.samples)).encode())
            samples = [(shard_id, key, i, offset, nbytes) for i, (key, offset, nbytes, _) in enumerate(shard.samples)]
            n_before = db.total_changes
            db.executemany("INSERT OR IGNORE INTO samples VALUES (?, ?, ?, ?, ?)", samples)
            if db.total_changes - n_before < len(samples):
                raise _repeated_key(db, shard_id, shard, where)
            parts = ((shard_id, i, *part) for i, sample in enumerate(shard.samples) for part in sample.parts)
            db.executemany("INSERT INTO sample_parts VALUES (?, ?, ?, ?, ?)", parts)
        for statement in _AFTER:
            db.execute(statement).close()
    except sqlite3.Error as error:
        raise TransportError(f"the database could not be written: {error}", where=path) from error
    finally:
        db.close()
    return str(uuid.uuid5(_NAMESPACE, hasher.hexdigest()))


def _repeated_key(db: sqlite3.Connection, shard_id: int, shard: Shard, where: str) -> DocumentError:
    """The error for the first key of a shard that was left out, because a sample before it has the key."""
    statement = "SELECT tar_file_id, sample_index FROM samples WHERE sample_key = ?"
    kept = ((i, sample.key, db.execute(statement, (sample.key,)).fetchone()) for i, sample in enumerate(shard.samples))
    index, key, first = next(each for each in kept if each[2] != (shard_id, each[0]))
    there = f"sample {first[1]} of shard {first[0]}"
    message = f"sample {index} of {brief(shard.name)} has the key {brief(key)}, and so has {there}"
    return DocumentError(
        message,
        where=where,
        remedy="Give each sample a name of its own; files of one sample must follow each other in the tar.",
        problems=[Problem("repeated_key", message, shard.name)],
    )
