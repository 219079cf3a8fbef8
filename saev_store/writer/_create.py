"""`create_store`: begins a store, or resumes one."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import asdict, replace
from functools import partial
from typing import TYPE_CHECKING, Literal, cast, get_args

from saev_store.core.arguments import check_flag
from saev_store.core.layout import Layout
from saev_store.errors import (
    ArgumentError,
    IncompleteStoreError,
    ResumeError,
    SaevStoreError,
    StoreExistsError,
    WriterConflictError,
    brief,
)
from saev_store.names import CLAIM_PATH, SHARDS_NAME, WORK_FOLDER
from saev_store.transport import Transport
from saev_store.writer._digests import BLOCK_BYTES
from saev_store.writer._inputs import NONFINITE_POLICIES, NonfinitePolicy, OverflowPolicy
from saev_store.writer._leftovers import unfinished
from saev_store.writer._publish import Verify, published_already, remove_hidden
from saev_store.writer._resume import Kept, check_claim, kept_of, metadata_differences
from saev_store.writer._shard_file import ShardPlan, leading_receipts
from saev_store.writer.folder import (
    LABELLED,
    MAX_WORLD,
    TEMPORARY,
    Claim,
    Folder,
    Owner,
    ShapingOptions,
    check_no_foreigner,
    owner_path,
    parse_claim,
    part_shards,
    read_claim,
)
from saev_store.writer.shard_writer import ShardWriter

if TYPE_CHECKING:
    from saev_store.documents import Metadata

CHECKPOINT_BYTES = 256 << 20
_MAX_BLOCK_BYTES = 1 << 30


def create_store(
    root_transport: Transport,
    metadata: Metadata,
    *,
    resume: bool | Literal["auto"] = False,
    exist_ok: bool = False,
    part: tuple[int, int] | None = None,
    pad: bool | None = None,
    on_nonfinite: NonfinitePolicy = "raise",
    on_overflow: OverflowPolicy = "raise",
    block_bytes: int = BLOCK_BYTES,
    checkpoint_bytes: int = CHECKPOINT_BYTES,
    verify: Verify = "digests",
    progress: bool | None = None,
) -> ShardWriter:
    """A writer for the store `<root>/<metadata.hash>`; nothing there is a store before it has been published.

    Args:
        root_transport: The folder that holds the store's folder; it must be able to write.
        metadata: What will be written; `metadata.n_examples` is a promise.
        resume: True continues an unfinished store after its last durable example, verifying what it keeps, and begins
            one where there is none (but not beside unfinished stores of other metadata: that is most often a mistake).
            `"auto"` does not look at those. False begins one and never touches an unfinished one.
        exist_ok: For a complete store, return a writer that has nothing left to do.
        part: (rank, world): write only this part of the shards; `finalize_store` publishes when all parts are there.
        pad: The last file at full size, its tail zeros; None does so where that costs nothing.
        on_nonfinite: What to do with NaN and infinity: `"raise"`, `"warn"`, or `"allow"`; the bits are kept as they are.
        on_overflow: What to do with finite numbers that become infinite in the store's dtype: `"raise"`, `"warn"` and store
            infinity, or `"saturate"` at its largest finite number.
        block_bytes: One digest for this many bytes; also the size of a write.
        checkpoint_bytes: Make durable, at the latest, after this many bytes.
        verify: What resuming checks: every byte that is kept, or `"sizes"` only (and the digest of the last block).
        progress: Show a bar; None shows one on a terminal.

    Raises:
        StoreExistsError: the store is complete, or another one has its name.
        IncompleteStoreError: `resume` is False and there is an unfinished store, or the folder holds files of another tool.
        ResumeError: the unfinished store has other metadata or options; each difference is named.
        WriterConflictError: another process is writing this part.
        ArgumentError: an option breaks its rule.
        ReadOnlyError: the transport cannot write.
    """
    rank, world = _checked_part(part, on_nonfinite, on_overflow, block_bytes, checkpoint_bytes, verify)
    resume = check_flag(resume, name="resume", other="auto")
    exist_ok, pad = check_flag(exist_ok, name="exist_ok"), check_flag(pad, name="pad", other=None)
    progress = check_flag(progress, name="progress", other=None)
    folder = Folder(root_transport, metadata.hash)
    options = ShapingOptions(bool(folder.writes.pads if pad is None else pad), block_bytes, world)
    shards = part_shards(metadata.layout.n_shards, rank, world)
    here = Claim.of(metadata, options)
    claim = Owner(folder, CLAIM_PATH, asdict(here))
    owner = claim if world == 1 else Owner(folder, owner_path(rank), attempt=claim.attempt)
    plan = ShardPlan(folder, metadata.layout, options.pad, block_bytes, checkpoint_bytes, owner, metadata.recordable)
    open_writer = partial(
        ShardWriter,
        metadata=metadata,
        claim=here,
        shards=shards,
        takeover=resume is not False,
        on_nonfinite=on_nonfinite,
        on_overflow=on_overflow,
        progress=progress,
    )

    found = folder.together(lambda: published_already(folder, metadata), lambda: folder.read(CLAIM_PATH), folder.names)
    is_complete, claimed, names = cast("tuple[bool, bytes | None, Sequence[str] | None]", tuple(found))
    if is_complete:
        _check_complete(folder, resume=resume, exist_ok=exist_ok)
        return open_writer(plan, kept=Kept(shards.start), held=ExitStack(), complete=True)
    held = ExitStack()
    try:
        if not claimed:
            check_no_foreigner(folder, names)
            if resume is True:
                _check_siblings(folder, here)
        else:
            there = parse_claim(claimed, folder)
            if resume is False and (world == 1 or folder.exists(owner.path)):
                raise _unfinished(folder, metadata.layout, there)
            check_claim(folder, there, here)
        held.enter_context(folder.lock(f"part{rank:05d}"))
        # A crash while a store was discarded or published can leave hidden files without a claim.
        is_new = _claim(claim, here, resume=resume) and names is not None and WORK_FOLDER not in names
        if owner is not claim and not owner.take(over=resume is not False):
            raise _unfinished(folder, metadata.layout, here)
        kept = Kept(shards.start)
        if not is_new:
            kept = kept_of(plan, shards, verify=verify, progress=progress)
            if kept.file is not None:
                held.callback(kept.file.abort)
        if is_new and folder.is_far and shards:
            # The look at metadata.json is not worth a request that all others wait for: it is made with the first shard.
            return open_writer(replace(plan, looks_at=shards.start), kept=kept, held=held, complete=False)
        is_published, declared = folder.together(
            lambda: published_already(folder, metadata),
            lambda: folder.read(LABELLED) if world > 1 and not is_new else None,
        )
        if not is_published:
            if kept.has_tokens is None and declared:
                kept = replace(kept, has_tokens=declared == b"true")
            return open_writer(plan, kept=kept, held=held, complete=False)
    except BaseException as error:
        held.close()
        if not isinstance(error, SaevStoreError) or not published_already(folder, metadata):
            raise
    # Another process has published since the first look and deleted its hidden files; those made above have to go as well.
    held.close()
    remove_hidden(folder)
    _check_complete(folder, resume=resume, exist_ok=exist_ok)
    return open_writer(plan, kept=Kept(shards.start), held=ExitStack(), complete=True)


# -- arguments ---------------------------------------------------------------------------------------------------------


def _checked_part(
    part: tuple[object, object] | None,
    on_nonfinite: object,
    on_overflow: object,
    block_bytes: object,
    checkpoint_bytes: object,
    verify: object,
) -> tuple[int, int]:
    """The rank of the part and the number of parts, after a check of all options."""
    for name, value, allowed in (
        ("on_nonfinite", on_nonfinite, NONFINITE_POLICIES),
        ("on_overflow", on_overflow, get_args(OverflowPolicy)),
        ("verify", verify, get_args(Verify)),
    ):
        if not isinstance(value, str) or value not in allowed:
            raise ArgumentError(f"{name} is {brief(value)}; it must be one of {allowed}", where=name)
    for name, value, most in (
        ("block_bytes", block_bytes, _MAX_BLOCK_BYTES),
        ("checkpoint_bytes", checkpoint_bytes, 2**63 - 1),
    ):
        if not isinstance(value, int) or isinstance(value, bool) or not 4 <= value <= most or value % 4:
            raise ArgumentError(f"{name} is {brief(value)}; it must be a multiple of 4, from 4 to {most}", where=name)
    try:
        rank, world = (0, 1) if part is None else part
    except (TypeError, ValueError):
        rank, world = -1, -1
    if not (isinstance(rank, int) and isinstance(world, int) and 0 <= rank < world <= MAX_WORLD):
        raise ArgumentError(
            f"part is {brief(part)}; it must be (rank, world) with 0 <= rank < world <= {MAX_WORLD}", where="part"
        )
    return rank, world


# -- what is there ------------------------------------------------------------------------------------------------------


def _check_complete(folder: Folder, *, resume: bool | str, exist_ok: bool) -> None:
    """Check that a complete store is fine with the caller; what a crash just after publishing left is deleted."""
    if not folder.exists(SHARDS_NAME):
        raise StoreExistsError(
            "metadata.json is there, shards.json is not: another tool's unfinished or damaged store",
            where=folder.url,
            remedy="This package publishes shards.json first, so it is not ours to continue; move the folder away.",
        )
    if resume is not False or exist_ok:
        names = folder.names()
        if names is None or any(name == WORK_FOLDER or name.startswith(TEMPORARY) for name in names):
            remove_hidden(folder)
    if not exist_ok:
        raise StoreExistsError(
            "the store is complete", where=folder.url, remedy="Open it. With exist_ok=True the call has nothing to do."
        )


def _check_siblings(folder: Folder, here: Claim) -> None:
    """Refuse to resume where only stores of other metadata are unfinished; what differs is named."""
    found = [
        f"{other.name}: {'; '.join(metadata_differences(other.metadata, here.metadata))}"
        for other in unfinished(folder.transport)
        if other.name != folder.name
    ]
    if found:
        more = f" (and {len(found) - 3} more)" if len(found) > 3 else ""
        raise ResumeError(
            f"there is nothing to resume at {folder.name}, but there are other unfinished stores: "
            f"{' | '.join(found[:3])}{more}",
            where=folder.transport.url,
            remedy='Use the metadata of the one you mean, or resume="auto" to begin a new store beside them.',
        )


def _claim(claim: Owner, here: Claim, *, resume: bool | str) -> bool:
    """Claim the store; True if this call has created the claim, else it is an equal one of another part or attempt."""
    folder, is_shared = claim.folder, here.options.world > 1
    if claim.take():
        return True
    there = read_claim(folder)
    if there is None:
        raise WriterConflictError(
            "another process has just published or discarded this store",
            where=folder.url,
            remedy="Look, then try again.",
        )
    if resume is False and not is_shared:
        raise IncompleteStoreError(
            "another process has just begun this store", where=folder.url, remedy="Let only one writer live."
        )
    check_claim(folder, there, here)
    if not is_shared:
        claim.take(over=True)
    return False


def _unfinished(folder: Folder, layout: Layout, claim: Claim) -> IncompleteStoreError:
    """The error for a store that has to be resumed or discarded."""
    block_bytes, world = claim.options.block_bytes, claim.options.world
    there = sum(
        receipt.used_nbytes // layout.example_nbytes
        for rank in range(world)
        for receipt in leading_receipts(folder, layout, part_shards(layout.n_shards, rank, world), block_bytes)
    )
    return IncompleteStoreError(
        f"there is an unfinished store, with {there} of {layout.n_examples} examples",
        where=folder.url,
        remedy="Continue it with resume=True, or throw it away with `discard_unfinished`.",
    )
