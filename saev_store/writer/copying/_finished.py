"""Whether a finished copy still has its bytes, whether these are those of its source, and whether that has stayed the same."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Sequence

from saev_store._runtime.progress import Progress
from saev_store.core.layout import shard_name
from saev_store.errors import CorruptShardError, TransportError
from saev_store.store.identity import RecordingIdentity, recording_identity
from saev_store.store.store import ShardStore
from saev_store.transport import Transport
from saev_store.writer import FileDigests, load_digests
from saev_store.writer._digests import BLOCK_BYTES, block_ranges
from saev_store.writer.copying._copier import CopiedFile
from saev_store.writer.folder import Folder


def check_bytes(folder: Folder, *, progress: bool | None) -> None:
    """Compare all bytes of a finished copy with its digests.

    Raises:
        CorruptShardError: a file was damaged since it was copied.
    """
    digests = load_digests(_copy_in(folder))
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
    return there.url == here.url


def identity_now(store: ShardStore) -> tuple[RecordingIdentity, ...]:
    """What tells whether files of a source were replaced: of its shards, and of its token arrays, which may have no digests."""
    shards = [shard_name(idx) for idx in range(store.layout.n_shards)]
    arrays = [name for name in store.recorded_files() if name not in set(shards)]
    return tuple(recording_identity(store.transport, store.layout, files=files) for files in (shards, arrays) if files)


def check_unchanged(store: ShardStore, was: tuple[RecordingIdentity, ...]) -> None:
    """Compare a source with what it was when its copy began: a part of each of two recordings is neither.

    Raises:
        TransportError: it was recorded anew meanwhile.
    """
    if identity_now(store) != was:
        raise TransportError(
            "files of the source were replaced while they were copied",
            where=store.url,
            remedy="Copy again once nobody writes there.",
        )


def _copy_in(folder: Folder) -> Transport:
    return folder.transport.at(folder.name)
