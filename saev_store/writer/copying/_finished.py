"""Whether a finished copy still has its bytes, whether these are those of its source, and whether that has stayed the same."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Sequence
from uuid import uuid4

from saev_store._runtime.progress import Progress
from saev_store.core.layout import shard_name
from saev_store.errors import CorruptShardError, NotFoundError, TransportError
from saev_store.store.identity import RecordingIdentity, recording_identity
from saev_store.store.store import ShardStore
from saev_store.transport import Transport
from saev_store.transport.checks import os_errors
from saev_store.writer import FileDigests, load_digests
from saev_store.writer._digests import BLOCK_BYTES, block_ranges
from saev_store.writer.copying._copier import CopiedFile
from saev_store.writer.folder import TEMPORARY, Folder


def check_bytes(folder: Folder, *, progress: bool | None, needed: Sequence[str] = ()) -> None:
    """Compare all bytes of a finished copy with its digests.

    Args:
        folder: The copy.
        progress: Show a bar on standard error; None: when it is a terminal.
        needed: Files of which there have to be digests. Every copy has those of its shards when it is made.

    Raises:
        CorruptShardError: a file was damaged since it was copied.
    """
    digests = load_digests(_copy_in(folder))
    lacking = next((name for name in needed if digests is None or name not in digests.files), None)
    if lacking is not None:
        what = (
            "the digests.json with which it is compared is gone"
            if digests is None
            else f"its digests.json lacks {lacking}"
        )
        raise CorruptShardError(
            f"the copy is finished, but {what}: it was damaged since",
            where=folder.url,
            remedy="Delete the copy; it is then made again.",
        )
    if digests is None:
        return
    n_bytes = sum(file.nbytes for file in digests.files.values())
    with Progress(n_bytes, "checking", shown=progress) as bar:
        for name, file in digests.files.items():
            wrong = folder.first_difference(name, file, digests.block_bytes, bar)
            if wrong is not None:
                raise CorruptShardError(
                    f"the copy is finished, but its bytes {wrong[0]:,} to {wrong[1]:,} are not what was copied: it was damaged since",
                    where=folder.where(name),
                    remedy="Copy again with replace=True, or repair the copy.",
                )


def has_files_of(folder: Folder, store: ShardStore, files: Sequence[CopiedFile]) -> bool:
    """Whether files of a finished copy are those of its source: by digests of both, else by what is read of one that has none.

    Args:
        folder: The copy.
        store: The source.
        files: What to compare.
    """
    source, ours, theirs = Folder(store.transport, ""), load_digests(store.transport), load_digests(_copy_in(folder))
    for file in files:
        promised = None if ours is None else ours.files.get(file.name)
        copied = None if theirs is None else theirs.files.get(file.name)
        if ours and theirs and promised and copied and ours.block_bytes == theirs.block_bytes:
            is_same = promised == copied
        elif theirs and copied:
            is_same = copied.nbytes == file.used_nbytes and not source.first_difference(
                file.name, copied, theirs.block_bytes
            )
        else:
            block_bytes = ours.block_bytes if ours and promised else BLOCK_BYTES
            blocks = list(block_ranges(file.used_nbytes, block_bytes))
            found = promised or FileDigests(file.used_nbytes, tuple(source.digests(file.name, blocks)))
            is_same = not folder.first_difference(file.name, found, block_bytes)
        if not is_same:
            return False
    return True


def is_itself(folder: Folder, store: ShardStore) -> bool:
    """Whether a copy would be the source: nothing of that may be deleted."""
    there, here = folder.transport.at(folder.name), store.transport
    if there.local_path is not None and here.local_path is not None:
        with contextlib.suppress(OSError):
            return os.path.samefile(there.local_path, here.local_path)
    if there.url == here.url:
        return True
    # One place may have many addresses: chained ones, those of gateways, mounted folders. What is written tells.
    probe = f"{TEMPORARY}probe-{uuid4().hex}"
    folder.put(probe, b"1")
    try:
        return Folder(here, "").size(probe) is not None
    finally:
        folder.delete(probe)


def identity_now(store: ShardStore) -> tuple[RecordingIdentity, ...]:
    """What tells whether files of a source were replaced: of its shards, and of its token arrays, which may have no digests."""
    shards = [shard_name(idx) for idx in range(store.layout.n_shards)]
    arrays = [name for name in store.recorded_files() if name not in set(shards)]
    return tuple(recording_identity(store.transport, store.layout, files=files) for files in (shards, arrays) if files)


def entries_now(store: ShardStore) -> tuple[tuple[int, ...] | None, ...]:
    """What tells whether the shards of a store on a disk were replaced or written: all of their entries but what a link changes."""
    found = list[tuple[int, ...] | None]()
    for shard_idx in range(store.layout.n_shards if store.transport.local_path is not None else 0):
        where = os.path.join(store.transport.local_path or "", shard_name(shard_idx))
        try:
            with os_errors(where, "look at it"):
                status = os.stat(where)
        except NotFoundError:
            found.append(None)
        else:
            found.append((status.st_dev, status.st_ino, status.st_size, status.st_mtime_ns))
    return tuple(found)


def check_unchanged(
    store: ShardStore,
    was: tuple[RecordingIdentity, ...],
    *,
    linked: tuple[tuple[int, ...] | None, ...] | None = None,
) -> None:
    """Compare a source with what it was when its copy began: a part of each of two recordings is neither.

    Args:
        store: The source.
        was: `identity_now` when the copy began.
        linked: `entries_now` then, where its shards were linked: a link changes the time of an entry, which is in the versions.

    Raises:
        TransportError: it was recorded anew meanwhile.
    """
    now = identity_now(store)
    if linked is not None and now[0].kind == was[0].kind == "versions":
        now, was = now[1:], was[1:]
    if now != was or (linked is not None and linked != entries_now(store)):
        raise TransportError(
            "files of the source were replaced while they were copied",
            where=store.url,
            remedy="Copy again once nobody writes there.",
        )


def _copy_in(folder: Folder) -> Transport:
    return folder.transport.at(folder.name)
