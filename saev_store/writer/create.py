"""`create_store`: begins a store, or continues one."""

from __future__ import annotations

import warnings
from collections.abc import Mapping
from functools import partial
from typing import TYPE_CHECKING, get_args

from saev_store._runtime.progress import Progress
from saev_store._runtime.threads import ahead, n_cores
from saev_store.core.arguments import check_choice, check_flag
from saev_store.core.layout import shard_name
from saev_store.errors import (
    ArgumentError,
    CorruptShardError,
    DeadlineError,
    IncompleteStoreError,
    NotFoundError,
    SaevStoreError,
    SaevStoreWarning,
    StoreExistsError,
    TransportError,
    brief,
    outside,
)
from saev_store.transport import Transport
from saev_store.writer.digests import FileDigests, block_ranges, digest
from saev_store.writer.inputs import NONFINITE_POLICIES, NonfinitePolicy, OverflowPolicy
from saev_store.writer.publish import publish
from saev_store.writer.shard_writer import ShardWriter
from saev_store.writer.work import Receipt, Work, part_shards, stat

if TYPE_CHECKING:
    from saev_store.documents import Metadata


def create_store(
    root_transport: Transport,
    metadata: Metadata,
    *,
    resume: bool = False,
    exist_ok: bool = False,
    part: tuple[int, int] | None = None,
    on_nonfinite: NonfinitePolicy = "raise",
    on_overflow: OverflowPolicy = "raise",
    progress: bool | None = None,
) -> ShardWriter:
    """Create a writer for the store `<root>/<metadata.hash>`; nothing there is a store before it has been published.

    Args:
        root_transport: The folder of stores.
        metadata: What will be written; `metadata.n_examples` is a promise.
        resume: Continue an unfinished store: shards that are durable are digested again and kept, the others are `missing`.
            Begins one where there is none. False never touches an unfinished one.
        exist_ok: For a complete store, return a writer that has nothing left to do.
        part: (rank, world): write only this share of the shards; `finalize_store` publishes when all are there. Another number
            of parts, or none, may finish what some have begun.
        on_nonfinite: What to do with NaN and infinity: `"raise"`, `"warn"`, or `"allow"`; the bits are kept as they are.
        on_overflow: What to do with finite numbers that become infinite in the store's dtype: `"raise"`, `"warn"` and store
            infinity, or `"saturate"` at its largest finite number.
        progress: Show a bar; None shows one on a terminal.

    Raises:
        StoreExistsError: the store is complete, or another one has its name.
        IncompleteStoreError: `resume` is False and there is an unfinished store; or the folder holds files of another program,
            or of an older version.
        WriterConflictError: another process is writing the first shard that is missing.
        ArgumentError: an option breaks its rule.
    """
    resume, exist_ok = check_flag(resume, name="resume"), check_flag(exist_ok, name="exist_ok")
    progress = check_flag(progress, name="progress", other=None)
    check_choice(on_nonfinite, NONFINITE_POLICIES, name="on_nonfinite")
    check_choice(on_overflow, get_args(OverflowPolicy), name="on_overflow")
    work = Work(root_transport, metadata)
    shards = part_shards(metadata.layout.n_shards, *check_part(part))
    try:
        is_new, begun = work.begin()
        receipts = work.receipts(shards) if "receipts" in begun else {}
        if not (is_new or resume or (part is not None and not receipts)):
            raise IncompleteStoreError(
                f"there is an unfinished store, with {len(receipts)} of {metadata.layout.n_shards} shards",
                where=work.url,
                remedy="Continue it with resume=True, or throw it away with `discard_unfinished`.",
            )
        kept = kept_shards(work, receipts, progress=progress)
        return ShardWriter(
            work,
            [shard_idx for shard_idx in shards if shard_idx not in kept],
            partial(publish, work) if part is None else bool,
            has_tokens=next((bool(receipt.tokens) for receipt in kept.values()), None),
            on_nonfinite=on_nonfinite,
            on_overflow=on_overflow,
            progress=progress,
        )
    except SaevStoreError:
        if not work.is_published():  # else another process has done that before, or in the meantime
            raise
    work.remove()  # what a publisher that was killed has left, or what was made above
    if not exist_ok:
        raise StoreExistsError(
            "the store is complete", where=work.url, remedy="Open it. With exist_ok=True the call has nothing to do."
        )
    writer = ShardWriter(work, [], bool)
    writer.close()
    return writer


def kept_shards(work: Work, there: Mapping[int, Receipt], *, progress: bool | None) -> dict[int, Receipt]:
    """Those of the shards that have receipts which are what was written. Receipts of others are deleted, with a warning."""
    if not there:
        return {}
    damaged = list[int]()
    with Progress(sum(receipt.nbytes for receipt in there.values()), "verifying", shown=progress) as bar:
        n_ahead = n_cores() if work.is_disk else 16
        found = ahead(lambda i: is_whole(work, i, there[i]), list(there), n_ahead)
        for shard_idx, is_same in zip(there, found, strict=True):
            bar.advance(there[shard_idx].nbytes)
            if not is_same:
                damaged.append(shard_idx)
    if damaged and not work.is_published():
        for shard_idx in damaged:
            with work.lock(f"{shard_idx:06d}"):
                work.work.delete(f"receipts/{shard_idx:06d}.json")
        warnings.warn(
            f"{work.url}: {len(damaged)} shards are not what was written; they have to be written again.",
            SaevStoreWarning,
            stacklevel=outside(),
        )
    return {shard_idx: there[shard_idx] for shard_idx in there if shard_idx not in damaged}


def check_part(part: object) -> tuple[int, int]:
    """The rank of a part and the number of parts, (0, 1) for None; `ArgumentError` if it is something else."""
    if part is None:
        return 0, 1
    match part:
        case tuple((int(rank), int(world))) if 0 <= rank < world:
            return rank, world
        case _:
            raise ArgumentError(f"part is {brief(part)}; it must be (rank, world) with 0 <= rank < world", where="part")


def is_whole(work: Work, shard_idx: int, receipt: Receipt) -> bool:
    """Return True if the file of a shard, and what was recorded of its tokens, is what was written."""
    arrays = work.metadata.recordable if receipt.tokens else ()
    if any(work.read_tokens(array, shard_idx, receipt) is None for array in arrays):
        return False
    name = shard_name(shard_idx)
    is_right = is_as_written(work.store, name, receipt, work.block_bytes, receipt.file_nbytes)
    return is_right and stat(work.store, name)[1] == receipt.version  # else the store could not be published


def is_as_written(store: Transport, name: str, written: FileDigests, block_bytes: int, file_nbytes: int) -> bool:
    """Return True if a file has its length and, block by block, its digests; a bucket that does not answer is an error."""
    try:
        if store.size(name) != file_nbytes:
            return False
        for (start, end), expected in zip(block_ranges(written.nbytes, block_bytes), written.digests, strict=True):
            (block,) = store.get_ranges(name, starts=[start], ends=[end])
            if digest(memoryview(block)) != expected:
                return False
    except (CorruptShardError, NotFoundError):
        return False
    except TransportError as error:
        if isinstance(error, DeadlineError) or store.local_path is None:
            raise
        return False
    return True
