"""What killed writers have left: unfinished stores, hidden files, uploads. Finds and removes them."""

from __future__ import annotations

import os
import re
import time
import warnings
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, suppress
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from saev_store.core.arguments import check_flag
from saev_store.core.layout import shard_name
from saev_store.documents import parse_metadata
from saev_store.errors import (
    AccessError,
    NotFoundError,
    SaevStoreError,
    SaevStoreWarning,
    StoreExistsError,
    TransportError,
    WriterConflictError,
    outside,
)
from saev_store.names import CLAIM_PATH, DIGESTS_NAME, LABELS_NAME, METADATA_NAME, SHARDS_NAME, WORK_FOLDER, folder_name
from saev_store.transport import Entry, Transport, UnfinishedUpload, open_transport
from saev_store.transport.durable import ASIDE_PREFIX, lock_holder
from saev_store.writer._locks import lock_names, take_locks
from saev_store.writer._publish import remove_hidden
from saev_store.writer.folder import JOURNAL, TEMPORARY, Folder, check_no_foreigner, read_claim

if TYPE_CHECKING:
    from saev_store.documents import Metadata

#: What is younger may belong to a writer that is still alive, or be wanted for a resume.
OLDER_THAN_S = 86_400.0
_SHARD = re.compile(r"acts\d{6,}\.bin")
#: A shard or a token array.
_FILE = re.compile(r"[a-z][a-z0-9_]{0,63}\.bin")
#: A folder that was named by the hash of its metadata. The 8 digits of protocol 2.1 are also those of dates and commits.
_STORE = re.compile(r"[0-9a-f]{64}")
_OURS = {METADATA_NAME, LABELS_NAME, SHARDS_NAME, DIGESTS_NAME, "provenance.json", WORK_FOLDER}
_MOST_LEVELS = 4
_UNREPAIRED = "a repair has to be finished: open the store with `repair()`"
#: What begins the name of the mark of a staged copy.
_STAGED = f"{TEMPORARY}staged-"


@dataclass(frozen=True)
class Unfinished:
    """A store below some root that was begun by this package and never published.

    Attributes:
        name: Its folder.
        metadata: The text of the metadata.json that it will have.
    """

    name: str
    metadata: str


def unfinished(root_transport: Transport) -> tuple[Unfinished, ...]:
    """The unfinished stores below a root, by name; empty where the back end cannot list."""
    found: list[Unfinished] = []
    try:
        entries = root_transport.list()
    except SaevStoreError:  # no such folder yet
        return ()
    for entry in entries:
        name = entry.path.strip("/")
        if not entry.is_dir or name.startswith("."):
            continue
        folder = Folder(root_transport, name)
        try:
            claim = read_claim(folder)
            if claim is not None and not folder.read(METADATA_NAME):
                found.append(Unfinished(name, claim.metadata))
        except SaevStoreError as error:
            warnings.warn(f"{folder.url}: {error.message}", SaevStoreWarning, stacklevel=outside())
    return tuple(found)


def discard_unfinished(root_transport: Transport, metadata: Metadata) -> None:
    """Delete what was written of a store that is not published. Fine if there is nothing.

    Raises:
        StoreExistsError: it is published.
        IncompleteStoreError: the folder holds files that this package has not begun.
        WriterConflictError: a process is still writing it.
    """
    folder = Folder(root_transport, metadata.hash)
    if folder.read(METADATA_NAME):
        raise _complete(folder)
    names = folder.names()
    if read_claim(folder) is None:
        check_no_foreigner(folder, names)
        if names is not None and WORK_FOLDER not in names:
            return
    with ExitStack() as held:
        take_locks(folder, held)
        if folder.read(METADATA_NAME):  # published meanwhile
            held.close()
            remove_hidden(folder)  # with the locks
            raise _complete(folder)
        names = folder.names()
        if read_claim(folder) is None:
            check_no_foreigner(folder, names)
            names = ()
        elif names is None:
            arrays = [array.file_name for array in metadata.recordable]
            names = [*(shard_name(i) for i in range(metadata.layout.n_shards)), *arrays, SHARDS_NAME, DIGESTS_NAME]
        _discard(folder, names)
    _delete_empty(folder)


def _complete(folder: Folder) -> StoreExistsError:
    return StoreExistsError(
        "the store is complete; only unfinished ones are discarded",
        where=folder.url,
        remedy="Delete the folder yourself if that is what you want.",
    )


def _delete_empty(folder: Folder) -> None:
    """Delete the folder of a store if nothing is in it: the locks are gone, and a writer may have begun there anew."""
    if folder.transport.local_path is not None:
        with suppress(OSError):
            os.rmdir(os.path.join(folder.transport.local_path, folder.name))
    elif not folder.names():
        folder.writes.delete(folder.name)


def _discard(folder: Folder, names: Sequence[str]) -> None:
    """Delete files, the hidden ones last: a crash in between leaves something that is still recognised."""
    for name in names:
        if name != WORK_FOLDER:
            folder.delete(name)
    folder.delete(WORK_FOLDER)


@dataclass(frozen=True)
class Leftover:
    """Something that a writer left.

    Attributes:
        path: Relative to the folder that was cleaned.
        kind: `"unfinished store"`, `"hidden files"` (of a published store), `"temporary file"` or `"upload"`.
        nbytes: Its size; None where that is not told.
        age_s: Seconds since it was last written; None where that is not told.
        kept_because: Why it is not removed; "" if it is.
    """

    path: str
    kind: str
    nbytes: int | None
    age_s: float | None
    kept_because: str = ""


@dataclass(frozen=True)
class Cleaned:
    """What `clean_leftovers` found.

    Attributes:
        leftovers: In the order of their paths, uploads last.
        uploads_listed: False where this client cannot list unfinished uploads, which may be there all the same.
    """

    leftovers: tuple[Leftover, ...]
    uploads_listed: bool


def clean_leftovers(
    root: str | os.PathLike[str] | Transport, *, dry_run: bool = False, older_than_s: float = OLDER_THAN_S
) -> Cleaned:
    """Remove what killed writers, copies and publishers left in a folder of stores, or in one store's folder.

    Removed are unfinished stores of this package, the hidden files of published stores, temporary files, and unfinished
    multipart uploads of shards. Never removed: files of a published store, files that this package did not write, and what a
    live process holds a lock on. A repair that has to be finished stays.

    Args:
        root: The folder: a path, any fsspec URL, or a transport.
        dry_run: Remove nothing.
        older_than_s: Keep what was written later than this many seconds ago. In a bucket only this protects live writers:
            they write nothing until a shard is complete.

    Raises:
        ReadOnlyError: the transport cannot list, or cannot write.
        NotFoundError: there is no such folder.
    """
    dry_run = check_flag(dry_run, name="dry_run")
    root_transport = root if isinstance(root, Transport) else open_transport(root)
    now_s = time.time()
    top = Folder(root_transport, "")
    uploads = _uploads(root_transport)
    try:
        entries = list(root_transport.list())
    except NotFoundError:  # of a bucket: a folder is what it has objects of
        if not uploads:
            raise
        entries = []
    found: list[Leftover] = []
    folders = [top, *(Folder(root_transport, entry.path.strip("/")) for entry in entries if entry.is_dir)]
    for folder in folders:
        if folder.name == WORK_FOLDER:
            continue
        for leftover in _leftovers(folder, now_s):
            kept_because = leftover.kept_because or _too_young(leftover, older_than_s)
            if not kept_because:
                kept_because = _in_use(folder, leftover) if dry_run else _remove(folder, leftover)
            found.append(replace(leftover, kept_because=kept_because))
    for upload in uploads or ():
        leftover = Leftover(upload.path, "upload", None, None if upload.begun_s is None else now_s - upload.begun_s)
        kept_because = _too_young(leftover, older_than_s)
        if not kept_because and not dry_run:
            root_transport.abort_upload(upload)
        found.append(replace(leftover, kept_because=kept_because))
    return Cleaned(tuple(found), uploads_listed=uploads is not None)


def _leftovers(folder: Folder, now_s: float) -> Iterator[Leftover]:
    """What was left in one folder."""
    entries = folder.entries() or ()
    names = {entry.name for entry in entries}
    for entry in entries:
        if not entry.name.startswith(TEMPORARY):
            continue
        if not entry.is_dir:
            # Of `stage`: without it a copy of an earlier recording is somebody's store, and never replaced.
            is_mark = entry.name.startswith(_STAGED) and entry.name.removeprefix(_STAGED) in names
            because = "it says of which recording the copy beside it is" if is_mark else ""
            yield Leftover(entry.path, "temporary file", entry.size, _age_s([entry], now_s), because)
        elif METADATA_NAME in names or entry.name.startswith(ASIDE_PREFIX):
            # Moved aside to be deleted, or not yet moved to its place; other folders may be a conversion's.
            inside = list(_tree(folder, entry.name, _MOST_LEVELS))
            nbytes = sum(file.size or 0 for file in inside)
            yield Leftover(entry.path, "temporary file", nbytes, _age_s(inside or [entry], now_s))
    if WORK_FOLDER not in names:
        return
    hidden = list(_tree(folder, WORK_FOLDER, _MOST_LEVELS))
    files = [entry for entry in entries if not entry.is_dir]
    is_published = METADATA_NAME in names
    ours = _OURS if is_published else _OURS | _arrays(folder)
    foreign = sorted(name for name in names - ours if not (_SHARD.fullmatch(name) or name.startswith(TEMPORARY)))
    because = ""
    if is_published and folder.exists(JOURNAL):
        because = _UNREPAIRED
    elif not is_published and names - {WORK_FOLDER} and not folder.exists(CLAIM_PATH):
        because = "no claim of this package: another program may be writing here"
    elif not is_published and foreign:
        because = f"the folder also holds {foreign[0]}, which is not ours"
    removed = hidden if is_published else [*hidden, *files]
    kind = "hidden files" if is_published else "unfinished store"
    nbytes = sum(entry.size or 0 for entry in removed)
    path = folder.path(WORK_FOLDER) if is_published else folder.name
    yield Leftover(path, kind, nbytes, _age_s(removed, now_s), because)


def _arrays(folder: Folder) -> set[str]:
    """The files of token arrays that an unfinished store will have, by its claim."""
    with suppress(SaevStoreError):
        if (claim := read_claim(folder)) is not None:
            raw = claim.metadata.encode("utf-8", "surrogateescape")
            return {array.file_name for array in parse_metadata(raw, where=folder.where(CLAIM_PATH)).recordable}
    return set()


def _remove(folder: Folder, leftover: Leftover) -> str:
    """Remove a leftover of a folder; the reason if that is not possible."""
    is_store = leftover.kind == "unfinished store"
    if leftover.kind == "temporary file":
        folder.writes.delete(leftover.path)
        return ""
    try:
        with ExitStack() as held:
            try:
                take_locks(folder, held)
            except TransportError as error:  # no more descriptors, for a lock of each part
                return error.message
            if is_store and folder.exists(METADATA_NAME):
                return "it was published meanwhile"
            if not is_store and folder.exists(JOURNAL):
                return _UNREPAIRED
            _discard(folder, (folder.names() or ()) if is_store else ())
        if is_store and folder.name:
            _delete_empty(folder)
    except WriterConflictError as error:
        return error.message
    return ""


def _in_use(folder: Folder, leftover: Leftover) -> str:
    """The reason for which `_remove` would leave a leftover where it is. Changes nothing, not even the times of files."""
    if leftover.kind == "temporary file":
        return ""
    root = folder.transport.local_path
    for what in lock_names(folder):
        if root is not None:
            if holder := lock_holder(f"{root}/{folder.path(WORK_FOLDER)}/locks/{what}.lock"):
                return f"{holder} is writing here"
            continue
        try:
            with folder.lock(what):
                pass
        except WriterConflictError as error:
            return error.message
    return ""


def _too_young(leftover: Leftover, older_than_s: float) -> str:
    if older_than_s <= 0:
        return ""
    if leftover.age_s is None:
        return "the service does not tell its age"
    return "" if leftover.age_s >= older_than_s else f"written {leftover.age_s:,.0f} s ago"


def _uploads(transport: Transport) -> Sequence[UnfinishedUpload] | None:
    """The unfinished uploads of our shards; None where they cannot be listed."""
    if transport.is_local:
        return ()
    try:
        listed = transport.list_uploads()
    except AccessError:
        listed = None
    if listed is None:
        return None
    found: list[UnfinishedUpload] = []
    arrays: dict[str, set[str] | None] = {}
    for upload in listed:
        path, _, name = upload.path.rpartition("/")
        if not _FILE.fullmatch(name) or "/" in path:
            continue
        if not (is_ours := _STORE.fullmatch(path or folder_name(transport.url)) is not None):
            if path not in arrays:
                arrays[path] = _store_arrays(Folder(transport, path))
            known = arrays[path]
            is_ours = known is not None and (name in known or _SHARD.fullmatch(name) is not None)
        if is_ours:
            found.append(upload)
    return found


def _store_arrays(folder: Folder) -> set[str] | None:
    """The files of labels and token arrays of a store, published or not; None for a folder of something else."""
    with suppress(SaevStoreError):
        raw = folder.read(METADATA_NAME)
        if raw is None:
            return None if read_claim(folder) is None else {LABELS_NAME} | _arrays(folder)
        metadata = parse_metadata(raw, where=folder.where(METADATA_NAME))
        return {LABELS_NAME} | {array.file_name for array in metadata.recordable}
    return None


def _tree(folder: Folder, path: str, n_levels: int) -> Iterator[Entry]:
    """All files below a folder, a few levels deep."""
    for entry in folder.entries(path) or ():
        if not entry.is_dir:
            yield entry
        elif n_levels:
            yield from _tree(folder, f"{path}/{entry.name}", n_levels - 1)


def _age_s(entries: Sequence[Entry], now_s: float) -> float | None:
    """Seconds since the latest change; None where that is not told of one of them."""
    times = [entry.modified_s for entry in entries]
    known = [found for found in times if found is not None]
    return max(0.0, now_s - max(known)) if known and len(known) == len(times) else None
