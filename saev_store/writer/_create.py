"""Beginning a store, or continuing one: `create_store`, and what else can be done with one that is not finished."""

from __future__ import annotations

from contextlib import ExitStack
from typing import TYPE_CHECKING, Literal

from saev_store.errors import (
    ArgumentError,
    IncompleteStoreError,
    ResumeError,
    SaevStoreError,
    StoreExistsError,
    WriterConflictError,
    brief,
)
from saev_store.layout import Layout
from saev_store.transport._base import Transport
from saev_store.writer._blocks import part_shards
from saev_store.writer._claim import (
    Claim,
    Owner,
    ShapingOptions,
    check_claim,
    differences,
    metadata_differences,
    new_attempt,
    read_claim,
)
from saev_store.writer._folder import (
    CLAIM,
    HIDDEN,
    LABELLED,
    METADATA,
    SHARDS,
    TEMPORARY,
    Folder,
    owner_path,
)
from saev_store.writer._inputs import NONFINITE_POLICIES, NonfinitePolicy
from saev_store.writer._publish import publish, published_already, remove_hidden
from saev_store.writer._resume import Kept, kept_of
from saev_store.writer._shard_file import ShardPlan
from saev_store.writer._unfinished import check_no_foreigner, n_durable, unfinished
from saev_store.writer.shard_writer import ShardWriter, Verify

if TYPE_CHECKING:
    from saev_store.documents import Metadata

BLOCK_BYTES = 8 << 20
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
            one where nothing lies (but not beside unfinished stores of other metadata: that is most often a slip).
            `"auto"` does not look at those. False begins one and never touches an unfinished one.
        exist_ok: For a complete store, return a writer that has nothing left to do.
        part: (rank, world): write only this part of the shards; `finalize_store` publishes when all parts are there.
        pad: The last file at full size, its tail zeros; None does so where that costs nothing.
        on_nonfinite: What to do with NaN and infinity: `"raise"`, `"warn"`, or `"allow"`; the bits are kept as they are.
        block_bytes: One digest for this many bytes; also the size of a write.
        checkpoint_bytes: Make durable, at the latest, after this many bytes.
        verify: What resuming checks: every byte that is kept, or `"sizes"` only (and the digest of the last block).
        progress: Show a bar; None shows one on a terminal.

    Raises:
        StoreExistsError: the store is complete, or another one lies under its name.
        IncompleteStoreError: an unfinished store lies there and `resume` is False, or something that is not ours.
        ResumeError: what lies there was begun with other metadata or options; each difference is named.
        WriterConflictError: another process is writing this part.
        ArgumentError: an option breaks its rule.
        ReadOnlyError: the transport cannot write.
    """
    rank, world = _checked_part(part)
    _check_options(resume, on_nonfinite, block_bytes, checkpoint_bytes, verify)
    folder = Folder(root_transport, metadata.hash)
    writes = folder.writes
    options = ShapingOptions(bool(writes.pads if pad is None else pad), block_bytes, world)
    shards = part_shards(metadata.layout.n_shards, rank, world)
    owner = Owner(folder, rank, new_attempt())
    plan = ShardPlan(folder, metadata.layout, options.pad, block_bytes, checkpoint_bytes, owner)

    def writer(
        kept: Kept, held: ExitStack, *, claim: Claim | None, labelled: bool | None, complete: bool = False
    ) -> ShardWriter:
        def publish_now(verify: Verify) -> bool:
            if claim is None:
                return False
            owner.check()
            with folder.lock("publish"):
                locked, takeover = folder.lock_is_real("publish"), resume is not False
                return publish(
                    folder, metadata, claim, verify=verify, takeover=takeover, locked=locked, progress=progress
                )

        return ShardWriter(
            plan,
            metadata,
            shards=shards,
            shard_idx=kept.shard_idx,
            shard_file=kept.file,
            labelled=labelled,
            declare_labelled=lambda value: _declare_labelled(folder, value),
            publish=publish_now if world == 1 else None,
            on_nonfinite=on_nonfinite,
            progress=progress,
            held=held,
            already_complete=complete,
        )

    def nothing_to_do() -> ShardWriter:
        return writer(Kept(shards.start, None, None), ExitStack(), claim=None, labelled=None, complete=True)

    if _complete_already(folder, metadata, resume=resume, exist_ok=exist_ok):
        return nothing_to_do()
    here = Claim.of(metadata, options)
    held = ExitStack()
    try:
        _check_before(folder, metadata, here, rank, resume=resume)
        held.enter_context(folder.lock(f"part{rank:05d}"))
        claim = _claim(folder, here, resume=resume)
        if resume is not False:
            owner.take_over()
        elif not owner.create():
            raise _unfinished(folder, metadata.layout, claim)
        kept = kept_of(plan, shards, verify=verify, progress=progress)
        if kept.file is not None:
            held.callback(kept.file.abort)
        if not folder.exists(METADATA):
            labelled = kept.labelled if kept.labelled is not None else _declared_labelled(folder)
            return writer(kept, held, claim=claim, labelled=labelled)
    except BaseException as error:
        held.close()
        if not isinstance(error, SaevStoreError) or not published_already(folder, metadata):
            raise
    # Somebody has published since our first look. Its hidden files are gone; those that we made have to go as well.
    held.close()
    remove_hidden(folder)
    _complete_already(folder, metadata, resume=resume, exist_ok=exist_ok)
    return nothing_to_do()


# -- arguments ---------------------------------------------------------------------------------------------------------


def _checked_part(part: tuple[int, int] | None) -> tuple[int, int]:
    if part is None:
        return 0, 1
    try:
        rank, world = part
    except (TypeError, ValueError):
        rank, world = -1, -1
    if not (isinstance(rank, int) and isinstance(world, int) and 0 <= rank < world <= 99_999):
        raise ArgumentError(
            f"part is {brief(part)}; it must be (rank, world) with 0 <= rank < world <= 99999", where="part"
        )
    return rank, world


def _check_options(
    resume: object, policy: object, block_bytes: object, checkpoint_bytes: object, verify: object
) -> None:
    if resume not in (True, False, "auto"):
        raise ArgumentError(f'resume is {brief(resume)}; it must be True, False or "auto"', where="resume")
    if policy not in NONFINITE_POLICIES:
        raise ArgumentError(
            f"on_nonfinite is {brief(policy)}; it must be one of {NONFINITE_POLICIES}", where="on_nonfinite"
        )
    if verify not in ("digests", "sizes"):
        raise ArgumentError(f'verify is {brief(verify)}; it must be "digests" or "sizes"', where="verify")
    for name, value, most in (
        ("block_bytes", block_bytes, _MAX_BLOCK_BYTES),
        ("checkpoint_bytes", checkpoint_bytes, 2**63 - 1),
    ):
        if not isinstance(value, int) or isinstance(value, bool) or not 4 <= value <= most or value % 4:
            raise ArgumentError(f"{name} is {brief(value)}; it must be a multiple of 4, from 4 to {most}", where=name)


# -- what lies there ---------------------------------------------------------------------------------------------------


def _complete_already(folder: Folder, metadata: Metadata, *, resume: bool | str, exist_ok: bool) -> bool:
    """Whether the store is complete and that is fine with the caller; a crash just after publishing is tidied up."""
    if not published_already(folder, metadata):
        return False
    if not folder.exists(SHARDS):
        raise StoreExistsError(
            "metadata.json is there, shards.json is not: another tool's unfinished or damaged store",
            where=folder.url,
            remedy="This package publishes shards.json first, so it is not ours to continue; move the folder away.",
        )
    if resume is not False or exist_ok:
        names = folder.names()
        if names is None or any(name == HIDDEN or name.startswith(TEMPORARY) for name in names):
            remove_hidden(folder)
    if not exist_ok:
        raise StoreExistsError(
            "the store is complete", where=folder.url, remedy="Open it, or pass exist_ok=True to have nothing to do."
        )
    return True


def _check_before(folder: Folder, metadata: Metadata, here: Claim, rank: int, *, resume: bool | str) -> None:
    """Refuse before anything is created."""
    there = read_claim(folder)
    if there is None:
        check_no_foreigner(folder)
        if resume is True:
            _check_siblings(folder.transport, metadata)
        return
    begun = folder.exists(owner_path(rank))
    if resume is False and (begun or (here.options.world == 1 and differences(there, here))):
        raise _unfinished(folder, metadata.layout, there)
    check_claim(folder, there, here)


def _check_siblings(root: Transport, metadata: Metadata) -> None:
    here = Claim.of(metadata, ShapingOptions(pad=False, block_bytes=1, world=1))
    found = [
        f"{other.name}: {'; '.join(metadata_differences(other.metadata, here.metadata))}"
        for other in unfinished(root)
        if other.name != metadata.hash
    ]
    if found:
        more = f" (and {len(found) - 3} more)" if len(found) > 3 else ""
        raise ResumeError(
            f"there is nothing to resume at {metadata.hash}, but other unfinished stores lie beside it: "
            f"{' | '.join(found[:3])}{more}",
            where=root.url,
            remedy='Use the metadata of the one you mean, or resume="auto" to begin a new store beside them.',
        )


def _claim(folder: Folder, here: Claim, *, resume: bool | str) -> Claim:
    """Our claim, or the equal one of another part or an earlier attempt."""
    if folder.create(CLAIM, here.to_bytes()):
        return here
    there = read_claim(folder)
    if there is None:
        raise WriterConflictError(
            "another process has just published or discarded this store",
            where=folder.url,
            remedy="Look, then try again.",
        )
    if resume is False and here.options.world == 1 and differences(there, here):
        raise IncompleteStoreError(
            "another process has just begun this store", where=folder.url, remedy="Let only one writer live."
        )
    check_claim(folder, there, here)
    return there


def _unfinished(folder: Folder, layout: Layout, claim: Claim) -> IncompleteStoreError:
    there = n_durable(folder, layout, claim.options)
    return IncompleteStoreError(
        f"an unfinished store lies there, with {there} of {layout.n_examples} examples",
        where=folder.url,
        remedy="Continue it with resume=True, or throw it away with `discard_unfinished`.",
    )


# -- labels: all or none, over all parts ---------------------------------------------------------------------------------


def _declare_labelled(folder: Folder, labelled: bool) -> None:
    if not folder.create(LABELLED, b"true" if labelled else b"false"):
        raise ArgumentError(
            f"this part has {'labels' if labelled else 'no labels'}, another one has {'none' if labelled else 'some'}",
            where="labels",
            remedy="Give labels for every example of a store, or for none.",
        )


def _declared_labelled(folder: Folder) -> bool | None:
    raw = folder.read_or_none(LABELLED, max_bytes=16)
    return None if raw is None else bytes(raw) == b"true"
