"""Leftovers of killed writers: unfinished stores, hidden and temporary files. Finds and removes them."""

from __future__ import annotations

import math
import os
import re
import time
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, TypeAlias, cast

from saev_store.core.arguments import check_flag, check_number
from saev_store.errors import NotFoundError, StoreExistsError, WriterConflictError
from saev_store.names import METADATA_NAME, WORK_FOLDER
from saev_store.transport import Entry, Transport, open_transport
from saev_store.transport.durable import TEMP_PREFIX
from saev_store.writer.work import Work, delete_work, names, read, refused

if TYPE_CHECKING:
    from saev_store.documents import Metadata

#: What is younger may belong to a writer that is alive, or be wanted for a resume.
OLDER_THAN_S = 86_400.0
#: Files of a store: shards, token arrays, documents.
_OURS = re.compile(r"[a-z][a-z0-9_]{0,63}\.bin|(metadata|shards|digests|provenance|stats)\.json|\.saev_store.*")
_STORE = re.compile(r"[0-9a-f]{8}|[0-9a-f]{64}")
#: In the folder of an unfinished store of an older version.
_CLAIM = f"{WORK_FOLDER}/claim.json"


def discard_unfinished(root_transport: Transport, metadata: Metadata) -> None:
    """Delete what was written of a store that is not published. Fine if there is nothing.

    Raises:
        StoreExistsError: it is published.
        IncompleteStoreError: the folder holds files that this package has not begun.
        WriterConflictError: a process is writing it.
    """
    work = Work(root_transport, metadata)
    if work.is_published():
        raise StoreExistsError(
            "the store is complete; only unfinished ones are discarded",
            where=work.url,
            remedy="Delete the folder yourself if that is what you want.",
        )
    foreign = [name for name in names(work.store) if not name.startswith(TEMP_PREFIX)]
    if names(work.work) or read(work.store, _CLAIM) is not None:
        _discard(root_transport, metadata.hash)
    elif foreign:
        raise refused(work.url, foreign)


def _discard(root: Transport, name: str) -> None:
    """Delete an unfinished store; `WriterConflictError` if a process is writing it, `StoreExistsError` if it was published."""
    folders = f"{WORK_FOLDER}/{name}", f"{name}/{WORK_FOLDER}"
    _check_unlocked(root, *folders)
    # Without its document no shard is begun, and nothing is published: what holds a lock then has held it before.
    root.delete(f"{WORK_FOLDER}/{name}/{METADATA_NAME}")
    _check_unlocked(root, *folders)
    if read(root, f"{name}/{METADATA_NAME}") is not None:
        delete_work(root, name)
        raise StoreExistsError("it was published", where=f"{root.url}/{name}", remedy="Open it.")
    root.delete(name)
    delete_work(root, name)


def _check_unlocked(root: Transport, *folders: str) -> None:
    """Refuse if one of the locks of some work folders is held."""
    for folder in folders:
        for name in names(root, f"{folder}/locks"):
            with root.lock(f"{folder}/locks/{name}"):
                pass


@dataclass(frozen=True)
class Leftover:
    """Something that a writer left.

    Attributes:
        path: Relative to the folder that was cleaned.
        kind: `"unfinished store"`, `"hidden files"` (of a published store) or `"temporary file"`.
        nbytes: Its size.
        kept_because: Why it is not removed; "" if it is.
    """

    path: str
    kind: str
    nbytes: int
    kept_because: str


def clean(
    root: str | os.PathLike[str] | Transport, *, dry_run: bool = False, older_than_s: float = OLDER_THAN_S
) -> list[Leftover]:
    """Remove what killed writers, copies and publishers left in a folder of stores, or in one store's folder.

    Removed are unfinished stores of this package, the hidden files of published stores, and temporary files. Never removed: files
    of a published store, files that this package did not write, and what a live process holds a lock on. Unfinished multipart
    uploads are removed by a life-cycle rule of the bucket. All that was found is returned, in the order of the paths.

    Args:
        root: The folder: a path, any fsspec URL, or a transport.
        dry_run: Remove nothing.
        older_than_s: Keep what was written later than this many seconds ago. In a bucket only this protects live writers.

    Raises:
        NotFoundError: there is no such folder.
        ArgumentError: an argument is not what it has to be.

    >>> import tempfile
    >>> clean(tempfile.mkdtemp(), dry_run=True)
    []
    """
    dry_run = check_flag(dry_run, name="dry_run")
    older_than_s = check_number(older_than_s, name="older_than_s", zero_ok=True)  # NaN would keep nothing
    place = cast("Transport", root) if hasattr(root, "at") else open_transport(cast("str", root))
    entries = place.list()
    found = [*_left_in(place, "", entries)]
    for entry in entries:
        if entry.is_dir and entry.name != WORK_FOLDER:
            found += _left_in(place, entry.name, place.list(entry.name))
    if not any(entry.name == METADATA_NAME for entry in entries):  # else it is a store, with hidden files of its own
        found += [_work_left(place, name) for name in names(place, WORK_FOLDER) if _STORE.fullmatch(name)]
    return [_cleaned(place, *left, older_than_s, dry_run=dry_run) for left in sorted(found, key=lambda left: left[0])]


#: Path and kind of a leftover, its files, and the reason to keep it.
_Found: TypeAlias = tuple[str, str, list[Entry], str]


def _left_in(root: Transport, folder: str, entries: Sequence[Entry]) -> Iterator[_Found]:
    """Leftovers in one folder: temporary files, the hidden files of a published store, an older version's unfinished store."""
    there = {entry.name for entry in entries}
    for entry in entries:
        if entry.name.startswith(TEMP_PREFIX) and not entry.is_dir:
            yield entry.path, "temporary file", [entry], ""
    if WORK_FOLDER in there and METADATA_NAME in there:
        path = f"{folder}/{WORK_FOLDER}".lstrip("/")
        yield path, "hidden files", [*_tree(root, path)], ""
    elif WORK_FOLDER in there and folder:
        is_ours = read(root, f"{folder}/{_CLAIM}") is not None
        because = _foreign(there) if is_ours else "another program may be writing here"
        yield folder, "unfinished store", [*_tree(root, folder)], because


def _work_left(root: Transport, name: str) -> _Found:
    """Kind of a store's work folder: that of an unfinished store, or what a killed publisher has left."""
    files, there = [*_tree(root, f"{WORK_FOLDER}/{name}")], names(root, name)
    if METADATA_NAME in there:
        return f"{WORK_FOLDER}/{name}", "hidden files", files, ""
    return name, "unfinished store", [*files, *_tree(root, name)], _foreign(there)


def _foreign(there: Iterable[str]) -> str:
    foreign = sorted(name for name in there if not _OURS.fullmatch(name))
    return f"the folder also holds {foreign[0]}, which is not ours" if foreign else ""


def _cleaned(
    root: Transport, path: str, kind: str, files: list[Entry], because: str, older_than_s: float, *, dry_run: bool
) -> Leftover:
    """Remove a leftover, unless there is a reason to keep it."""
    # To look at a lock is to change its file.
    times = [entry.modified_s for entry in files if "/locks/" not in entry.path]
    newest_s = max((math.inf if at is None else at for at in times), default=0.0)
    if older_than_s > 0 and time.time() - newest_s < older_than_s:
        because = because or f"it was written in the last {older_than_s:,.0f} s, or at an unknown time"
    try:
        if not because:
            _check_unlocked(root, path, f"{path}/{WORK_FOLDER}", f"{WORK_FOLDER}/{path}")
            if not dry_run:
                _remove(root, path, kind)
    except (WriterConflictError, StoreExistsError) as error:
        because = error.message
    return Leftover(path, kind, sum(entry.size or 0 for entry in files), because)


def _remove(root: Transport, path: str, kind: str) -> None:
    if kind == "unfinished store":
        _discard(root, path)
    elif path.startswith(f"{WORK_FOLDER}/"):
        delete_work(root, path.removeprefix(f"{WORK_FOLDER}/"))
    else:
        root.delete(path)


def _tree(root: Transport, path: str) -> Iterator[Entry]:
    """All files below a folder."""
    try:
        entries = root.list(path)
    except NotFoundError:
        return
    for entry in entries:
        if entry.is_dir:
            yield from _tree(root, entry.path)
        else:
            yield entry
