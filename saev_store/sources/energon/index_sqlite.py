"""Reads `index.sqlite`, which is untrusted: the byte ranges of samples and parts.

The database is opened read-only and immutable. Its schema is checked before its rows are read; views, triggers, virtual
tables and generated columns are refused. Every statement has a time limit. SQLite columns hold values of any type, so every
value is checked when it is read.
"""

from __future__ import annotations

import os
import sqlite3
import threading
import time
import weakref
from collections.abc import Sequence
from typing import Any, NoReturn, cast
from urllib.parse import quote

import numpy as np

from saev_store.core.layout import IntArray
from saev_store.errors import DeadlineError, DocumentError, UnsafeContentError, brief
from saev_store.problems import Problem

MAGIC = b"SQLite format 3\0"
#: Time limit of a statement.
TIMEOUT_S = 60.0
_SAMPLES = ("tar_file_id", "sample_key", "sample_index", "byte_offset", "byte_size")
_PARTS = ("tar_file_id", "sample_index", "part_name", "content_byte_offset", "content_byte_size")
_TEXT = {"sample_key", "part_name"}
_MAX_OBJECTS = 64
_MAX_TEXT_NBYTES = 1 << 20
_MAX_NUMBER = 2**62
#: Limit of the parts of one sample.
MAX_PARTS = 100_000
#: Samples whose parts are checked at once.
_CHECKED_AT_ONCE = 65_536

_PART_OF_KEY = (
    "SELECT s.tar_file_id, s.sample_index, p.content_byte_offset, p.content_byte_size FROM samples AS s"
    " JOIN sample_parts AS p ON p.tar_file_id = s.tar_file_id AND p.sample_index = s.sample_index"
    " WHERE s.sample_key = ? AND p.part_name = ? LIMIT 2"
)
_FILES = (
    "SELECT s.sample_key, p.part_name, p.content_byte_size FROM"
    " (SELECT sample_key, tar_file_id, sample_index FROM samples WHERE sample_key > ? AND sample_key < ?"
    " AND instr(substr(sample_key, ?), '/') = 0 ORDER BY sample_key LIMIT ?) AS s"
    " JOIN sample_parts AS p ON p.tar_file_id = s.tar_file_id AND p.sample_index = s.sample_index"
    " ORDER BY s.sample_key, p.content_byte_offset LIMIT ?"
)
_FOLDERS = (
    "SELECT DISTINCT substr(sample_key, 1, instr(substr(sample_key, ?), '/') + ?) FROM samples"
    " WHERE sample_key > ? AND sample_key < ? AND instr(substr(sample_key, ?), '/') > 0 ORDER BY 1"
)

SampleRow = tuple[int, str, int, int]
"""sample_index, key, offset, nbytes"""
PartRow = tuple[int, str, int, int]
"""sample_index, part, offset of its content, nbytes"""


class _Deadline:
    """When the running statement is stopped. SQLite holds it in the place of the index, which nothing else would release."""

    at_s = 0.0

    def is_over(self) -> bool:
        """Whether that time has come."""
        return time.monotonic() > self.at_s


class SqliteIndex:
    """The index of a data set, open for reading; may be shared between threads.

    Args:
        path: The database on this machine.
        where: Its name in messages.

    Attributes:
        has_parts: Whether it lists single parts; those of Energon 6 list samples only.
        unique_keys: Whether its schema ensures that no two samples share a key.

    Raises:
        UnsafeContentError: it has views, triggers or virtual tables.
        DocumentError: it is no database, or has other tables.
    """

    def __init__(self, path: str, *, where: str) -> None:
        self.where = where
        self._path, self._pid = path, 0
        self._lock = threading.Lock()
        self._deadline = _Deadline()
        self._db: sqlite3.Connection | None = None
        objects = self._rows("SELECT type, name, sql FROM sqlite_master LIMIT ?", (_MAX_OBJECTS + 1,))
        if len(objects) > _MAX_OBJECTS:
            self._refuse(f"it has more than {_MAX_OBJECTS} tables and indices")
        for kind, name, sql in objects:
            if kind not in {"table", "index"} or (kind == "table" and not str(sql).upper().startswith("CREATE TABLE")):
                raise UnsafeContentError(
                    f"it has a {brief(kind)} {brief(name)}; an index has plain tables only",
                    where=where,
                    remedy="Do not trust this data set, or prepare it again.",
                )
        self._columns("samples", _SAMPLES)
        self.has_parts = any(name == "sample_parts" for _, name, _ in objects)
        if self.has_parts:
            self._columns("sample_parts", _PARTS)
        self.unique_keys = any(
            unique and [row[2] for row in self._rows(f"PRAGMA index_info({_quoted(name)})")] == ["sample_key"]
            for _, name, unique, *_ in self._rows("PRAGMA index_list(samples)")
        )

    def _columns(self, table: str, names: Sequence[str]) -> None:
        found = {str(row[1]): row for row in self._rows(f"PRAGMA table_xinfo({table})")}
        if not found:
            self._refuse(f"it has no table {table!r}")
        missing = [name for name in names if name not in found]
        if missing:
            self._refuse(f"table {table!r} has no column {', '.join(map(repr, missing))}; it has {', '.join(found)}")
        if any(row[6] for row in found.values()):
            raise UnsafeContentError(f"table {table!r} has computed columns", where=self.where)

    # -- rows ----------------------------------------------------------------------------------------------------------

    def last_sample(self, tar_file_id: int) -> int:
        """The largest `sample_index` of a shard, -1 if it has no samples."""
        ((last,),) = self._rows("SELECT MAX(sample_index) FROM samples WHERE tar_file_id = ?", (tar_file_id,))
        return -1 if last is None else self._checked([(last,)], "sample_index")[0][0]

    def size_hint(self) -> int:
        """About how many rows there are; reads no rows."""
        ((samples,),) = self._rows("SELECT MAX(rowid) FROM samples")
        ((parts,),) = self._rows("SELECT MAX(rowid) FROM sample_parts") if self.has_parts else ((0,),)
        return max(0, cast("int", samples or 0)) + max(0, cast("int", parts or 0))

    def shard_counts(self) -> dict[int, int]:
        """Number of samples of each `tar_file_id`."""
        rows = self._rows("SELECT tar_file_id, COUNT(*) FROM samples GROUP BY tar_file_id")
        return dict(self._checked(rows, "tar_file_id", "byte_size"))

    def samples(self, tar_file_id: int, first: int, end: int) -> list[SampleRow]:
        """Samples `first` to `end` of a shard, exactly one row each, in order."""
        rows = self._rows(
            "SELECT sample_index, sample_key, byte_offset, byte_size FROM samples"
            " WHERE tar_file_id = ? AND sample_index >= ? AND sample_index < ? ORDER BY sample_index LIMIT ?",
            (tar_file_id, first, end, end - first + 1),
        )
        found = self._checked(rows, "sample_index", "sample_key", "byte_offset", "byte_size")
        # The end may be a number that a file says.
        if len(found) != end - first or [row[0] for row in found] != list(range(first, end)):
            self._refuse(f"samples {first} to {end - 1} of shard {tar_file_id} are not there exactly once")
        return found

    def parts(self, tar_file_id: int, first: int, end: int) -> list[PartRow]:
        """Parts of samples `first` to `end` of a shard, by sample and then by offset; no part twice."""
        limit = (end - first) * 64 + MAX_PARTS
        rows = self._rows(
            "SELECT sample_index, part_name, content_byte_offset, content_byte_size FROM sample_parts"
            " WHERE tar_file_id = ? AND sample_index >= ? AND sample_index < ?"
            " ORDER BY sample_index, content_byte_offset LIMIT ?",
            (tar_file_id, first, end, limit + 1),
        )
        if len(rows) > limit:
            self._refuse(f"samples {first} to {end - 1} of shard {tar_file_id} have more than {limit:,} parts")
        found = self._checked(rows, *_PARTS[1:])
        if len({row[:2] for row in found}) < len(found):
            seen: set[tuple[int, str]] = set()
            for index, part, *_ in found:
                if (index, part) in seen:
                    self._refuse(f"sample {index} of shard {tar_file_id} has the part {brief(part)} twice")
                seen.add((index, part))
        return found

    def find(self, key: str) -> list[tuple[int, int]]:
        """(tar_file_id, sample_index) of the samples with a key: none, one, or (Energon 7.0) several."""
        rows = self._rows(
            "SELECT tar_file_id, sample_index FROM samples WHERE sample_key = ? ORDER BY 1, 2 LIMIT 100", (key,)
        )
        return self._checked(rows, "tar_file_id", "sample_index")

    def find_part(self, key: str, part: str) -> list[tuple[int, int, int, int]]:
        """(tar_file_id, sample_index, offset, nbytes) of a part, in one query; empty where keys may be repeated.

        Two rows if the index has the part twice.
        """
        if not (self.has_parts and self.unique_keys):
            return []
        rows = self._rows(_PART_OF_KEY, (key, part))
        return self._checked(rows, "tar_file_id", "sample_index", "content_byte_offset", "content_byte_size")

    def folders(self, folder: str) -> list[str]:
        """The folders directly in a folder of sample keys, in the order of their UTF-8 bytes; `""` is the root."""
        prefix, end, start = _bounds(folder)
        rows = self._rows(_FOLDERS, (start, start - 2, prefix, end, start))
        return [name for (name,) in self._checked(rows, "sample_key")]

    def files(self, folder: str, *, after: str, limit: int = 10_000) -> list[tuple[str, str, int]]:
        """Key, part and size of the parts directly in a folder: those of the first keys after `after`, at most `limit`, all of each.

        Raises:
            DocumentError: the database does not list parts (Energon 6), or too many of one key.
        """
        if not self.has_parts:
            self._refuse("it does not list parts, which Energon 6 did not index")
        prefix, end, start = _bounds(folder)
        most = limit * 64 + MAX_PARTS
        rows = self._rows(_FILES, (after or prefix, end, start, limit, most + 1))
        found = self._checked(rows, "sample_key", "part_name", "content_byte_size")
        if len(found) > most:  # the last key may have more: the next call gives all of its parts
            last = found[-1][0]
            found = [row for row in found if row[0] != last]
            if not found:
                self._refuse(f"sample {brief(last)} has more than {most:,} parts")
        return found

    def has_folder(self, folder: str) -> bool:
        """Whether the key of a sample begins with this folder."""
        prefix, end, _ = _bounds(folder)
        return bool(self._rows("SELECT 1 FROM samples WHERE sample_key > ? AND sample_key < ? LIMIT 1", (prefix, end)))

    def repeated_keys(self) -> list[str]:
        """Keys that several samples share, at most 100."""
        if self.unique_keys:
            return []
        rows = self._rows("SELECT sample_key FROM samples GROUP BY sample_key HAVING COUNT(*) > 1 LIMIT 100")
        return [key for (key,) in self._checked(rows, "sample_key")]

    def check_shard(self, tar_file_id: int, *, n_samples: int, tar_nbytes: int) -> IntArray:
        """Check every row of a shard: samples follow each other in whole blocks, parts are inside their samples.

        Returns:
            Where samples begin, and where the last one ends: int64, `n_samples + 1`.
        """
        rows = self.samples(tar_file_id, 0, n_samples)
        starts = np.array([row[2] for row in rows], np.int64)
        ends = starts + np.array([row[3] for row in rows], np.int64)
        wrong = (starts % 512 != 0) | (ends % 512 != 0) | (ends - starts < 512) | (ends > tar_nbytes)
        wrong[1:] |= starts[1:] != ends[:-1]
        if np.any(wrong):
            row = rows[int(np.flatnonzero(wrong)[0])]
            self._refuse(
                f"sample {brief(row[1])} of shard {tar_file_id} is at {row[2]:,} and has {row[3]:,} bytes: that overlaps"
                f" another sample, is no whole number of blocks, or ends outside the tar of {tar_nbytes:,} bytes"
            )
        if self.has_parts:
            self._check_parts(tar_file_id, starts, ends)
        return np.append(starts, ends[-1:] if n_samples else [0])

    def _check_parts(self, tar_file_id: int, starts: IntArray, ends: IntArray) -> None:
        n_samples = len(starts)
        for first in range(0, n_samples, _CHECKED_AT_ONCE):
            end_of_these = min(first + _CHECKED_AT_ONCE, n_samples)
            rows = self.parts(tar_file_id, first, end_of_these)
            index = np.array([row[0] for row in rows], np.int64)
            begin = np.array([row[2] for row in rows], np.int64)
            end = begin + np.array([row[3] for row in rows], np.int64)
            wrong = (begin % 512 != 0) | (begin - 512 < starts[index]) | (end > ends[index])
            wrong[1:] |= (index[1:] == index[:-1]) & (begin[1:] - 512 < end[:-1])
            if np.any(wrong):
                row = rows[int(np.flatnonzero(wrong)[0])]
                self._refuse(
                    f"part {brief(row[1])} of sample {row[0]} of shard {tar_file_id} is at {row[2]:,} and has {row[3]:,}"
                    " bytes: that is outside its sample, or overlaps another part"
                )
            without = np.setdiff1d(np.arange(first, end_of_these), index)
            if len(without):
                self._refuse(f"sample {int(without[0])} of shard {tar_file_id} has no parts")
        ((strays,),) = self._rows(
            "SELECT COUNT(*) FROM sample_parts WHERE tar_file_id = ? AND (sample_index < 0 OR sample_index >= ?)",
            (tar_file_id, n_samples),
        )
        if strays:
            self._refuse(f"{strays} parts of shard {tar_file_id} belong to no sample")

    # -- values --------------------------------------------------------------------------------------------------------

    def _checked(self, rows: list[tuple[object, ...]], *columns: str) -> list[tuple[Any, ...]]:
        """The rows, once every value is an integer that is not negative, or text where the column is a name."""
        for row in rows:
            for value, column in zip(row, columns, strict=True):
                if column in _TEXT:
                    if type(value) is not str:
                        self._refuse(f"{column} holds {brief(value)}; it must be text")
                elif type(value) is not int or not 0 <= value < _MAX_NUMBER:
                    self._refuse(f"{column} holds {brief(value)}; it must be an integer that is not negative")
        return rows

    def _refuse(self, message: str) -> NoReturn:
        raise DocumentError(
            message,
            where=self.where,
            remedy="Prepare the data set again: `saev-store prepare --overwrite`.",
            problems=[Problem("index_sqlite", message, self.where)],
        )

    # -- the connection ------------------------------------------------------------------------------------------------

    def _rows(self, statement: str, values: tuple[object, ...] = ()) -> list[tuple[object, ...]]:
        with self._lock:
            try:
                db = self._connection()
                self._deadline.at_s = time.monotonic() + TIMEOUT_S
                return db.execute(statement, values).fetchall()
            except sqlite3.OperationalError as error:
                if "interrupted" in str(error):
                    raise DeadlineError(
                        f"a query of the database took longer than {TIMEOUT_S:.0f} s", where=self.where
                    ) from None
                self._refuse(f"the database cannot be read: {error}")
            except UnicodeEncodeError:  # no stored name has lone surrogates
                return []
            except (sqlite3.Error, OverflowError, MemoryError, UnicodeDecodeError) as error:
                self._refuse(f"the database cannot be read: {error or type(error).__name__}")

    def _connection(self) -> sqlite3.Connection:
        if self._db is None or self._pid != os.getpid():
            # A connection must not be used in a child of the process that opened it.
            self._db, self._pid = _connect(self._path), os.getpid()
            self._finalizer = weakref.finalize(self, self._db.close)
            self._db.set_progress_handler(self._deadline.is_over, 100_000)
        return self._db

    def close(self) -> None:
        """Release the database; using the index again opens it again."""
        with self._lock:
            if self._db is not None:
                self._finalizer()
            self._db = None


def _connect(path: str) -> sqlite3.Connection:
    # Immutable: no journal is replayed, and nothing is locked.
    db = sqlite3.connect(
        f"file:{quote(path)}?mode=ro&immutable=1", uri=True, check_same_thread=False, isolation_level=None
    )
    db.setlimit(sqlite3.SQLITE_LIMIT_LENGTH, _MAX_TEXT_NBYTES)
    db.setlimit(sqlite3.SQLITE_LIMIT_ATTACHED, 0)
    for pragma in ("trusted_schema = OFF", "query_only = ON", "cell_size_check = ON", "mmap_size = 0"):
        db.execute(f"PRAGMA {pragma}").close()
    return db


def _bounds(folder: str) -> tuple[str, str | bytes, int]:
    """Lower and upper bound of the keys in a folder, and the position of the character behind its name, from 1."""
    prefix = f"{folder}/" if folder else ""
    # "0" follows "/"; every text sorts before a blob.
    return prefix, f"{folder}0" if folder else b"", len(prefix) + 1


def _quoted(name: object) -> str:
    return '"' + str(name).replace('"', '""') + '"'
