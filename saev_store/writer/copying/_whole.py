"""A byte-exact copy of a whole store: fill, check, publish."""

from __future__ import annotations

import contextlib
import json
import os
import shutil
from collections.abc import Generator, Sequence
from contextlib import ExitStack
from typing import TYPE_CHECKING, cast

import numpy as np

from saev_store._runtime.progress import Progress
from saev_store.core.layout import Layout, shard_name
from saev_store.documents import shards_bytes
from saev_store.errors import (
    CorruptShardError,
    IncompleteStoreError,
    MissingShardError,
    SaevStoreError,
    StoreExistsError,
    TransportError,
)
from saev_store.names import CLAIM_PATH, DIGESTS_NAME, LABELS_NAME, METADATA_NAME, SHARDS_NAME, WORK_FOLDER
from saev_store.store.card import human_bytes
from saev_store.transport import Transport
from saev_store.transport.checks import os_errors
from saev_store.writer import Digests, FileDigests, load_digests
from saev_store.writer._digests import BLOCK_BYTES
from saev_store.writer._locks import take_locks
from saev_store.writer._publish import remove_hidden
from saev_store.writer.copying._copier import CopiedFile, Copier, copied_on_cluster
from saev_store.writer.copying._finished import (
    check_bytes,
    check_unchanged,
    entries_now,
    has_files_of,
    identity_now,
    is_itself,
)
from saev_store.writer.copying._share import share
from saev_store.writer.copying._source import usable_digests
from saev_store.writer.folder import Folder

if TYPE_CHECKING:
    from distributed import Client

    from saev_store.documents import Metadata
    from saev_store.store.store import ShardStore

PROVENANCE_NAME = "provenance.json"
_MAX_PROVENANCE_BYTES = 16 << 20


def copy_whole(
    store: ShardStore,
    root: Transport,
    metadata: Metadata,
    *,
    resume: bool,
    progress: bool | None,
    replace: bool = False,
    client: Client | str | None = None,
) -> None:
    """Copy below `root`, under the same name if `metadata` is the store's; else with the documents of `metadata`'s version.

    See `copy_store`.
    """
    is_same, was = metadata is store.metadata, identity_now(store)
    folder = Folder(root, store.name if is_same else metadata.hash)
    if not replace:
        if _is_finished(folder, store, metadata, resume=resume, progress=progress):
            return
        _check_claim(folder, store, resume=resume)
    with folder.lock("copy"), _leaving_nothing(folder):
        if replace and folder.exists(METADATA_NAME) and not is_itself(folder, store):
            if _is_intact(folder, store, progress=progress):
                if _is_published(folder, store, metadata, resume=resume):
                    return
            else:
                with ExitStack() as held:
                    take_locks(folder, held, but=("copy",))
                    delete_copy(folder)
        # Between that look and this moment another process may have published it: nothing of it may be touched then.
        if _is_finished(folder, store, metadata, resume=resume, progress=progress):
            return
        files = _files(store, pads=folder.writes.pads)
        if is_same:
            _check_room(folder, files)
        usable_digests(store)
        _claim(folder, store)
        promised = load_digests(store.transport)
        copier = Copier(store, folder, promised)
        entries = entries_now(store)
        shared = {file.name for file in files if not is_same and _is_shared(store, folder, file)}
        rest = [file for file in files if file.name not in shared]
        if not is_same:
            _check_room(folder, rest)
        done: dict[str, FileDigests] = {}
        with Progress(sum(file.used_nbytes for file in rest), "copying", shown=progress) as bar:
            if client is not None:
                done = copied_on_cluster(client, store, folder, promised, rest, bar)
                if _is_finished(folder, store, metadata, resume=True, progress=progress):
                    return
            for file in rest if client is None else ():
                # Where there are no locks another process may have gone on with it, and be done; or with another recording.
                if _is_finished(folder, store, metadata, resume=True, progress=progress):
                    return
                done[file.name] = copier.copy(file, bar)
        if shared:  # shared files are not read: what is known of them is what the source knows
            done = dict(promised.files) if promised else {}
        check_unchanged(store, was, linked=entries if shared else None)
        known = {name: entry for name, entry in done.items() if entry.digests}
        _publish(folder, store, metadata, Digests(copier.block_bytes, known))


@contextlib.contextmanager
def _leaving_nothing(folder: Folder) -> Generator[None]:
    """A block that holds the lock of copies; where it is refused before anything was begun, the lock's folders go."""
    try:
        yield
    except SaevStoreError:
        if folder.transport.local_path is not None:
            where = os.path.join(folder.transport.local_path, folder.path(WORK_FOLDER))
            # Folders go only while they are empty: another process may begin there at any time.
            with contextlib.suppress(OSError):
                if os.listdir(where) == ["locks"] and os.listdir(f"{where}/locks") == ["copy.lock"]:
                    os.unlink(f"{where}/locks/copy.lock")
                    for empty in (f"{where}/locks", where, os.path.dirname(where)):
                        os.rmdir(empty)
        raise


def _check_room(folder: Folder, files: Sequence[CopiedFile]) -> None:
    """Refuse to begin where the files that are not there yet have no room."""
    check_space(folder.url, sum(file.used_nbytes for file in files if folder.size(file.name) is None))


def _is_shared(store: ShardStore, folder: Folder, file: CopiedFile) -> bool:
    """Whether a shard of the copy is one with that of the source. Labels may be written anew by others: they are copied."""
    return file.shard_idx is not None and share(store.transport, folder, file.name, file.file_nbytes)


def _files(store: ShardStore, *, pads: bool) -> list[CopiedFile]:
    """The files to copy; with `pads` as long as in the source, or padded where the source's back end never pads."""
    layout, source, files = store.layout, Folder(store.transport, ""), list[CopiedFile]()
    source_pads = bool(getattr(store.transport, "pads", False))
    for shard_idx in range(store.index.n_listed):
        used = layout.used_nbytes(shard_idx)
        size = layout.shard_nbytes if pads else used
        is_padded = pads and source_pads
        there = source.size(shard_name(shard_idx)) if is_padded or used == 0 else size
        if there is None:
            if used:
                where = f"{store.transport.url}/{shard_name(shard_idx)}"
                raise MissingShardError("the shard is missing", where=where, remedy="Copy again when the file is back.")
            continue  # a trailing shard without examples may be missing in a store that validates
        size = min(size, there) if is_padded else size
        files.append(CopiedFile(shard_name(shard_idx), shard_idx, used, max(used, size)))
    for name in store.token_arrays:
        array = store.token_arrays.declared(name)
        files.append(CopiedFile(array.file_name, None, array.nbytes(layout), array.nbytes(layout)))
    return files


def _is_published(folder: Folder, store: ShardStore, metadata: Metadata, *, resume: bool) -> bool:
    """Whether the copy is published; an error if what is published there is something else."""
    there = folder.read(METADATA_NAME)
    if there is None:
        return False
    if not resume or bytes(there) != metadata.raw:
        what = "the copy" if bytes(there) == metadata.raw else "another store of this name"
        raise StoreExistsError(f"{what} is there already", where=folder.url, remedy="Open it, or copy elsewhere.")
    for file in _files(store, pads=False):
        size = folder.size(file.name)
        if size is None or size < file.used_nbytes:
            raise CorruptShardError(
                f"the copy is published, but {file.name} has {size or 0:,} of {file.used_nbytes:,} bytes: it was damaged "
                "since",
                where=folder.where(file.name),
                remedy="Delete the copy and make it again, or repair it.",
            )
    remove_hidden(folder)
    return True


def _is_finished(folder: Folder, store: ShardStore, metadata: Metadata, *, resume: bool, progress: bool | None) -> bool:
    """Whether the copy is published, by whomever; an error if it is something else, damaged, or of another recording."""
    if not _is_published(folder, store, metadata, resume=resume):
        return False
    _check_finished(folder, store, progress=progress)
    return True


def _check_finished(folder: Folder, store: ShardStore, *, progress: bool | None) -> None:
    """An error if a finished copy is damaged, or one of another recording: equal metadata does not make equal vectors."""
    folder.transport.close()  # a map of an earlier file must not answer for this one
    if not has_files_of(folder, store, _files(store, pads=False)):
        raise other_recording(folder)
    check_bytes(folder, progress=progress)


def _is_intact(folder: Folder, store: ShardStore, *, progress: bool | None) -> bool:
    """Whether a finished copy is whole, and one of this recording."""
    try:
        _check_finished(folder, store, progress=progress)
    except (StoreExistsError, CorruptShardError):
        return False
    finally:
        folder.transport.close()  # files of the same names may follow
    return True


def has_token_arrays_of(folder: Folder, store: ShardStore, layout: Layout) -> bool:
    """Whether a finished copy has the values of a store's token arrays; they are read in both places.

    Args:
        folder: The copy.
        store: The source.
        layout: Of the copy, which may have fewer content tokens.
    """
    source = Folder(store.transport, "")
    for array in store.token_arrays.described():
        widths = [array.example_nbytes(of) for of in (store.layout, layout)]
        if folder.size(array.file_name) != array.nbytes(layout):
            return False
        step = max(1, BLOCK_BYTES // widths[0])
        for start in range(0, layout.n_examples, step):
            end = min(start + step, layout.n_examples)
            here, there = (
                np.frombuffer(place.get_range(array.file_name, start * width, end * width), np.uint8).reshape(-1, width)
                for place, width in zip((source, folder), widths, strict=True)
            )
            if not np.array_equal(here[:, : widths[1]], there):
                return False
    return True


def other_recording(folder: Folder) -> StoreExistsError:
    """The error for a finished copy of another recording."""
    return StoreExistsError(
        "a copy of another recording with the same metadata is there already",
        where=folder.url,
        remedy="Copy elsewhere. If that copy is of an earlier recording, replace=True replaces it.",
    )


def damaged_since(folder: Folder) -> CorruptShardError:
    """The error for a finished copy whose digests are gone, and that is not what was copied."""
    return CorruptShardError(
        "the copy is finished, but has no digests of all its files, and is not what was copied: it was damaged since",
        where=folder.url,
        remedy="Copy again with replace=True, or elsewhere.",
    )


def delete_copy(folder: Folder, *, but: str = "") -> None:
    """Delete a copy, metadata.json first: a part of it never opens. The caller holds all locks.

    Args:
        folder: The copy.
        but: A hidden file that stays. The locks stay, too.

    Raises:
        StoreExistsError: its files cannot be listed.
    """
    names = folder.names()
    if names is None:
        raise other_recording(folder)
    folder.delete(METADATA_NAME)
    # What an interrupted repair has built of the old files must not meet the new ones.
    hidden = [f"{WORK_FOLDER}/{name}" for name in folder.names(WORK_FOLDER) or () if name != "locks"]
    for name in [*(name for name in names if name != WORK_FOLDER), *hidden]:
        if name != but:
            folder.delete(name)


def _check_claim(folder: Folder, store: ShardStore, *, resume: bool) -> None:
    """Refuse, before anything is created, what cannot be continued."""
    raw = folder.read(CLAIM_PATH)
    if raw is None:
        names = sorted(name for name in folder.names() or () if not name.startswith(WORK_FOLDER))
        if names and not folder.exists(METADATA_NAME):  # it may have been published since we looked
            raise IncompleteStoreError(
                f"the folder holds {', '.join(names[:3])} but no metadata.json, and no copy was begun there",
                where=folder.url,
                remedy="Move it away, or copy elsewhere; nothing there was touched.",
            )
        return
    try:
        there = cast("dict[str, object]", json.loads(raw))
        same = "copy_of" in there and there.get("metadata") == _text(store)
    except (ValueError, RecursionError, TypeError, AttributeError):
        same = False
    if not same:
        raise IncompleteStoreError(
            "an unfinished store that is no copy of this one is there",
            where=folder.url,
            remedy="Finish it, or discard it, or copy elsewhere.",
        )
    if not resume:
        raise IncompleteStoreError(
            "an unfinished copy is there", where=folder.url, remedy="Continue it with resume=True, or delete it."
        )


def _claim(folder: Folder, store: ShardStore) -> None:
    """Mark the folder as an unfinished copy; an error if a writer has begun there meanwhile."""
    document = {"version": 1, "copy_of": store.url, "metadata": _text(store)}
    if folder.exists(CLAIM_PATH) or folder.create(CLAIM_PATH, json.dumps(document, indent=1).encode()) == "taken":
        _check_claim(folder, store, resume=True)


def _text(store: ShardStore) -> str:
    return store.metadata.raw.decode("utf-8", "surrogateescape")


def _publish(folder: Folder, store: ShardStore, metadata: Metadata, digests: Digests) -> None:
    """Write the small documents, metadata.json last."""
    if digests.files:
        folder.put(DIGESTS_NAME, digests.to_bytes())
    provenance = Folder(store.transport, "").read(PROVENANCE_NAME, max_bytes=_MAX_PROVENANCE_BYTES)
    if provenance is not None:
        folder.put(PROVENANCE_NAME, provenance)
    index = store.index.raw
    if metadata is not store.metadata:
        index = shards_bytes(store.layout, metadata.count_key, trailing_empty=store.index.trailing_empty)
    folder.put(SHARDS_NAME, index)
    if not store.has_labels and folder.exists(LABELS_NAME):  # of an earlier attempt, when the source had some
        folder.delete(LABELS_NAME)
    if folder.create(METADATA_NAME, metadata.raw) == "taken":
        raise StoreExistsError("another store of this name was published meanwhile", where=folder.url)
    remove_hidden(folder)


def check_space(url: str, nbytes: int) -> None:
    """Refuse to begin what a local disk cannot hold."""
    folder: str = url.removeprefix("file://")
    if not folder.startswith("/"):
        return
    while not os.path.isdir(folder) and folder != "/":
        folder = os.path.dirname(folder)
    with os_errors(folder, "tell the free room"):
        free = shutil.disk_usage(folder).free
    if free < nbytes:
        raise TransportError(
            f"{human_bytes(nbytes)} are to be written, but only {human_bytes(free)} are free",
            where=url,
            remedy="Make room, copy fewer layers, or copy elsewhere.",
        )
