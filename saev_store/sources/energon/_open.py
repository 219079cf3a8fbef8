"""Reads the documents of a data set, and opens its database, which must be a file on this machine."""

from __future__ import annotations

import contextlib
import os
import tempfile
import weakref
from dataclasses import dataclass

from saev_store.errors import DocumentError, NotFoundError
from saev_store.problems import Problem
from saev_store.sources._files import chunks
from saev_store.sources.address import full_url
from saev_store.sources.energon._yaml import MAX_NBYTES
from saev_store.sources.energon.index_sqlite import MAGIC, SqliteIndex
from saev_store.sources.energon.keys import DATASET_YAML, INDEX_SQLITE, INFO_JSON, INFO_YAML, SPLIT_JSON, SPLIT_YAML
from saev_store.sources.energon.nvmeta import (
    MAX_DOCUMENT_NBYTES,
    Definition,
    Info,
    Splits,
    parse_definition,
    parse_info,
    parse_splits,
)
from saev_store.transport import Transport
from saev_store.transport.checks import os_errors, temporary_folder

#: Size limit of a remote database.
MAX_INDEX_NBYTES = 16 << 30


@dataclass(frozen=True)
class Documents:
    """The documents in `.nv-meta`; `problems` are warnings about them."""

    info: Info
    splits: Splits
    definition: Definition
    problems: tuple[Problem, ...]


def read_documents(transport: Transport) -> Documents:
    """Read the documents in `.nv-meta`.

    Raises:
        NotFoundError: the folder was not prepared.
        DocumentError: a document breaks a rule.
    """
    found = _first(transport, INFO_JSON, INFO_YAML)
    if found is None:
        raise NotFoundError(
            f"there is no {INFO_JSON}: this is no Energon data set, or it was not prepared",
            where=transport.url,
            remedy="Run `saev-store prepare` on a folder of tars.",
        )
    info = parse_info(found[1], where=full_url(transport, found[0]))
    found = _first(transport, SPLIT_YAML, SPLIT_JSON)
    if found is not None:
        splits = parse_splits(found[1], info, where=full_url(transport, found[0]))
    else:
        message = f"there is no {SPLIT_YAML}: the data set has no splits"
        splits = Splits({}, problems=(Problem("no_splits", message, SPLIT_YAML, severity="info"),))
    found = _first(transport, DATASET_YAML, max_bytes=MAX_NBYTES)
    if found is not None:
        definition = parse_definition(found[1], where=full_url(transport, DATASET_YAML))
    else:
        message = f"there is no {DATASET_YAML}: parts are returned as they are"
        definition = Definition(problems=(Problem("no_definition", message, DATASET_YAML, severity="info"),))
    return Documents(info, splits, definition, (*splits.problems, *definition.problems))


def _first(transport: Transport, *paths: str, max_bytes: int = MAX_DOCUMENT_NBYTES) -> tuple[str, bytes] | None:
    for path in paths:
        with contextlib.suppress(NotFoundError):
            return path, transport.read(path, max_bytes=max_bytes)
    return None


def open_index(transport: Transport, *, max_nbytes: int = MAX_INDEX_NBYTES) -> SqliteIndex | None:
    """Open the database of a data set, None without one; a remote one is fetched whole, to a temporary file."""
    where = full_url(transport, INDEX_SQLITE)
    try:
        nbytes = transport.size(INDEX_SQLITE)
    except NotFoundError:
        return None
    (head,) = transport.get_ranges(INDEX_SQLITE, starts=[0], ends=[min(nbytes, len(MAGIC))])
    if bytes(head) != MAGIC:
        raise DocumentError(f"it begins with {bytes(head)!r}: it is no SQLite database", where=where)
    if transport.local_path is not None:
        return SqliteIndex(f"{transport.local_path}/{INDEX_SQLITE}", where=where)
    if nbytes > max_nbytes:
        raise DocumentError(f"it has {nbytes:,} bytes; at most {max_nbytes:,} are fetched", where=where)
    with os_errors(temporary_folder(), "write"):
        descriptor, path = tempfile.mkstemp(prefix="saev-store-index-", suffix=".sqlite")
    try:
        with os_errors(path, "write"), os.fdopen(descriptor, "wb") as file:  # closing writes the rest
            for chunk in chunks(transport, INDEX_SQLITE, nbytes):
                file.write(chunk)
        index = SqliteIndex(path, where=where)
    except BaseException:
        with contextlib.suppress(OSError):
            os.unlink(path)
        raise
    weakref.finalize(index, _remove, path, os.getpid())
    return index


def _remove(path: str, pid: int) -> None:
    # A forked child must not delete its parent's file.
    if os.getpid() == pid:
        with contextlib.suppress(OSError):
            os.unlink(path)
