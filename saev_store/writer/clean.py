"""Leftovers of killed writers: unfinished stores, hidden files, uploads. Finds and removes them."""

from __future__ import annotations

import json
import os
import re
import time
from collections.abc import Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, cast

from saev_store.core.arguments import check_flag
from saev_store.errors import AccessError, NotFoundError, SaevStoreError, StoreExistsError, WriterConflictError
from saev_store.names import METADATA_NAME, WORK_FOLDER, folder_name
from saev_store.transport import Entry, Transport, UnfinishedUpload, open_transport
from saev_store.writer.work import TEMPORARY, Work, at, delete_work, names, read, refused

if TYPE_CHECKING:
    from saev_store.documents import Metadata
    from saev_store.transport import Transport

#: What is younger may belong to a writer that is alive, or be wanted for a resume.
OLDER_THAN_S = 86_400.0
#: Files of a store: shards, token arrays, documents.
_OURS = re.compile(r"[a-z][a-z0-9_]{0,63}\.bin|(metadata|shards|digests|provenance|stats)\.json|\.saev_store.*")
_STORE = re.compile(r"[0-9a-f]{8}|[0-9a-f]{64}")
#: Begins the name of the mark of a staged copy, and of a folder that is about to be deleted.
_STAGED, _ASIDE = f"{TEMPORARY}staged-", f"{TEMPORARY}aside-"
_CLAIM, _MAX_CLAIM_BYTES = f"{WORK_FOLDER}/claim.json", 32 << 20


@dataclass(frozen=True)
class Unfinished:
    """A store below some root that was begun by this package and never published.

    Attributes:
        name: Its folder.
        metadata: The text of the metadata.json that it will have.
        is_old: Whether an older version of this package has begun it, which has to finish it.
    """

    name: str
    metadata: str
    is_old: bool = False


def unfinished(root_transport: Transport) -> tuple[Unfinished, ...]:
    """The unfinished stores below a root, by name; empty where the back end cannot list."""
    root, found = at(root_transport, ""), list[Unfinished]()
    with suppress(SaevStoreError):
        for name in names(root, WORK_FOLDER):
            raw = read(root, f"{WORK_FOLDER}/{name}/{METADATA_NAME}")
            if raw is not None and read(root, f"{name}/{METADATA_NAME}") is None:
                found.append(Unfinished(name, raw.decode("utf-8", "surrogateescape")))
        for entry in root.list():
            if entry.is_dir and not entry.name.startswith("."):
                claimed = old_claim(at(root, entry.name))
                if claimed is not None and read(root, f"{entry.name}/{METADATA_NAME}") is None:
                    found.append(Unfinished(entry.name, claimed, is_old=True))
    return tuple(sorted(found, key=lambda some: some.name))


def old_claim(store: Transport) -> str | None:
    """The metadata in the claim of an older version's writer; None where there is none, "" if it cannot be understood."""
    try:
        document = cast("dict[str, object]", json.loads(store.read(_CLAIM, max_bytes=_MAX_CLAIM_BYTES)))
        metadata = document["metadata"]
        return metadata if isinstance(metadata, str) else ""
    except NotFoundError:
        return None
    except (ValueError, KeyError, TypeError, RecursionError):
        return ""


def discard_unfinished(root_transport: Transport, metadata: Metadata) -> None:
    """Delete what was written of a store that is not published. Fine if there is nothing.

    Raises:
        StoreExistsError: it is published.
        IncompleteStoreError: the folder holds files that this package has not begun.
        WriterConflictError: a process is writing it.
    """
    work = Work(root_transport, metadata)
    there = names(work.store)
    if work.is_published():
        raise StoreExistsError(
            "the store is complete; only unfinished ones are discarded",
            where=work.url,
            remedy="Delete the folder yourself if that is what you want.",
        )
    is_ours = names(work.work) or old_claim(work.store) is not None
    foreign = [name for name in there if not name.startswith(TEMPORARY)]
    if foreign and not is_ours:
        raise refused(work.url, foreign)
    if is_ours:
        _discard(at(root_transport, ""), metadata.hash)


def _discard(root: Transport, name: str) -> None:
    """Delete an unfinished store.

    Without its document no shard is begun, and nothing is published: what holds a lock then has held it before.

    Raises:
        WriterConflictError: a process is writing it.
        StoreExistsError: it has been published in the meantime.
    """
    path = f"{WORK_FOLDER}/{name}/{METADATA_NAME}"
    document = read(root, path)
    root.delete(path)
    try:
        for folder in (f"{WORK_FOLDER}/{name}/locks", f"{name}/{WORK_FOLDER}/locks"):
            _check_unlocked(root, folder)
    except WriterConflictError:
        if document is not None:
            root.put(path, document)
        raise
    if read(root, f"{name}/{METADATA_NAME}") is not None:
        delete_work(root, name)
        raise StoreExistsError("it was published", where=f"{root.url}/{name}", remedy="Open it.")
    root.delete(name)
    delete_work(root, name)


def _check_unlocked(root: Transport, folder: str) -> None:
    """Refuse if one of the locks of a folder is held."""
    for name in names(root, folder):
        with root.lock(f"{folder}/{name}"):
            pass


# -- clean -------------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Leftover:
    """Something that a writer left.

    Attributes:
        path: Relative to the folder that was cleaned.
        kind: `"unfinished store"`, `"hidden files"` (of a published store), `"temporary file"` or `"upload"`.
        nbytes: Its size; None where that is not known.
        age_s: Seconds since it was last written; None where that is not known.
        kept_because: Why it is not removed; "" if it is.
    """

    path: str
    kind: str
    nbytes: int | None
    age_s: float | None
    kept_because: str = ""


@dataclass(frozen=True)
class Cleaned:
    """Result of `clean_leftovers`.

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
    live process holds a lock on.

    Args:
        root: The folder: a path, any fsspec URL, or a transport.
        dry_run: Remove nothing.
        older_than_s: Keep what was written later than this many seconds ago. In a bucket only this protects live writers.

    Raises:
        NotFoundError: there is no such folder.
    """
    dry_run, now_s = check_flag(dry_run, name="dry_run"), time.time()
    place = at(open_transport(root) if isinstance(root, (str, os.PathLike)) else root, "")
    uploads = _uploads(place)
    try:
        entries = list(place.list())
    except NotFoundError:  # of a bucket: a folder is what it has objects of
        if not uploads:
            raise
        entries = []
    found = list(_left_in(place, "", entries, now_s))
    for entry in entries:
        if entry.is_dir and entry.name != WORK_FOLDER:
            found += _left_in(place, entry.name, place.list(entry.name), now_s)
    if not any(entry.name == METADATA_NAME for entry in entries):  # else it is a store, with hidden files of its own
        found += [_work_left(place, name, now_s) for name in names(place, WORK_FOLDER) if _STORE.fullmatch(name)]
    found.sort(key=lambda left: left.path)
    done: list[Leftover] = []
    for left in found:
        because = left.kept_because or _too_young(left, older_than_s) or _removed(place, left, dry_run=dry_run)
        done.append(replace(left, kept_because=because))
    for some in uploads or ():
        left = Leftover(some.path, "upload", None, None if some.begun_s is None else now_s - some.begun_s)
        because = _too_young(left, older_than_s)
        if not because and not dry_run:
            place.abort_upload(some)
        done.append(replace(left, kept_because=because))
    return Cleaned(tuple(done), uploads_listed=uploads is not None)


def _left_in(root: Transport, folder: str, entries: Sequence[Entry], now_s: float) -> Iterator[Leftover]:
    """What was left in one folder: temporary files, the hidden files of a published store, an older version's unfinished store."""
    there = {entry.name for entry in entries}
    for entry in entries:
        if entry.name.startswith(TEMPORARY):
            inside = list(_tree(root, entry.path)) if entry.is_dir else [entry]
            # Without the mark of `stage` a copy of an earlier recording would never be replaced.
            is_mark = entry.name.startswith(_STAGED) and entry.name.removeprefix(_STAGED) in there
            because = "it marks a staged copy" if is_mark else ""
            if not entry.is_dir or METADATA_NAME in there or entry.name.startswith(_ASIDE):
                yield _left(entry.path, "temporary file", inside or [entry], now_s, because)
    path = f"{folder}/{WORK_FOLDER}".lstrip("/")
    if WORK_FOLDER not in there:
        return
    if METADATA_NAME in there:
        yield _left(path, "hidden files", list(_tree(root, path)), now_s)
    elif folder and old_claim(at(root, folder)) is not None:
        foreign = sorted(name for name in there if not _OURS.fullmatch(name))
        because = f"the folder also holds {foreign[0]}, which is not ours" if foreign else ""
        yield _left(folder, "unfinished store", list(_tree(root, folder)), now_s, because)
    elif folder:
        yield _left(folder, "unfinished store", list(_tree(root, folder)), now_s, "another program may be writing here")


def _work_left(root: Transport, name: str, now_s: float) -> Leftover:
    """What the work folder of a store is: that of an unfinished store, or what a killed publisher has left."""
    files = list(_tree(root, f"{WORK_FOLDER}/{name}"))
    there = names(root, name)
    if METADATA_NAME in there:
        return _left(f"{WORK_FOLDER}/{name}", "hidden files", files, now_s)
    foreign = sorted(other for other in there if not _OURS.fullmatch(other))
    because = f"the folder also holds {foreign[0]}, which is not ours" if foreign else ""
    return _left(name, "unfinished store", [*files, *_tree(root, name)], now_s, because)


def _left(path: str, kind: str, files: Sequence[Entry], now_s: float, because: str = "") -> Leftover:
    # To look at a lock is to change its file.
    times = [entry.modified_s for entry in files if "/locks/" not in entry.path]
    known = [found for found in times if found is not None]
    age_s = max(0.0, now_s - max(known)) if known and len(known) == len(times) else None if times else now_s
    return Leftover(path, kind, sum(entry.size or 0 for entry in files), age_s, because)


def _removed(root: Transport, left: Leftover, *, dry_run: bool) -> str:
    """Remove a leftover; the reason if that is not possible."""
    try:
        if left.kind == "unfinished store" and not dry_run:
            _discard(root, left.path)
            return ""
        for folder in (left.path, f"{left.path}/{WORK_FOLDER}", f"{WORK_FOLDER}/{left.path}"):
            _check_unlocked(root, f"{folder}/locks")
        if not dry_run and left.path.startswith(f"{WORK_FOLDER}/"):
            delete_work(root, left.path.removeprefix(f"{WORK_FOLDER}/"))
        elif not dry_run:
            root.delete(left.path)
    except (WriterConflictError, StoreExistsError) as error:
        return error.message
    return ""


def _too_young(left: Leftover, older_than_s: float) -> str:
    if older_than_s <= 0:
        return ""
    if left.age_s is None:
        return "its age is not known"
    return "" if left.age_s >= older_than_s else f"written {left.age_s:,.0f} s ago"


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


def _uploads(place: Transport) -> Sequence[UnfinishedUpload] | None:
    """The unfinished uploads of the files of stores; None where they cannot be listed."""
    if place.is_local:
        return ()
    try:
        listed = place.list_uploads()
    except AccessError:
        return None
    return None if listed is None else [some for some in listed if _is_ours(place, some.path)]


def _is_ours(place: Transport, path: str) -> bool:
    """Return True for a shard or a token array in the folder of a store, published or not."""
    folder, _, name = path.rpartition("/")
    if "/" in folder or not _OURS.fullmatch(name):
        return False
    if _STORE.fullmatch(folder or folder_name(place.url)):
        return True
    with suppress(SaevStoreError):
        store = at(place, folder)
        return read(store, METADATA_NAME) is not None or old_claim(store) is not None
    return False
