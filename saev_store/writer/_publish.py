"""Publish: check every receipt, write the small documents, and create `metadata.json` last.

Until `metadata.json` exists there is no store. It is created, never replaced, so of several publishers one wins; a
document that only one attempt can create decides before which one may write.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal, cast, get_args

import numpy as np

from saev_store._runtime.progress import Progress
from saev_store.core.arguments import check_flag
from saev_store.core.layout import Layout, shard_name
from saev_store.documents import shards_bytes
from saev_store.errors import (
    ArgumentError,
    CorruptShardError,
    IncompleteStoreError,
    SaevStoreError,
    StoreExistsError,
    WriterConflictError,
    brief,
)
from saev_store.names import CLAIM_PATH, DIGESTS_NAME, METADATA_NAME, SHARDS_NAME, WORK_FOLDER
from saev_store.transport import Sink, Transport
from saev_store.writer._digests import BlockDigester, Digests, FileDigests
from saev_store.writer._resume import check_claim
from saev_store.writer._shard_file import Receipt, read_receipts, read_token_rows
from saev_store.writer.folder import (
    BUILDING,
    JOURNAL,
    PUBLISHER,
    REPAIR,
    TEMPORARY,
    Claim,
    Folder,
    Owner,
    part_examples,
    part_shards,
    read_claim,
    token_rows_path,
)

if TYPE_CHECKING:
    from saev_store.documents import Metadata

Verify = Literal["digests", "sizes"]
#: How often the hidden folder is deleted if others make it again each time.
_MOST_REMOVALS = 8


@dataclass(frozen=True)
class Written:
    """What a writer has written itself, and does not read again to publish it.

    Attributes:
        receipts: Waits until all shards are committed, and checks that the store still belongs to this writer.
        settle: Waits until their receipts are recorded.
    """

    receipts: Callable[[], list[Receipt]]
    settle: Callable[[], None]


def finalize_store(
    root_transport: Transport,
    metadata: Metadata,
    *,
    verify: Verify = "sizes",
    takeover: bool = False,
    progress: bool | None = None,
) -> bool:
    """Publish a store whose parts are all written; True if this call did it, False if it was published before.

    Any process may call it, several at once too: one of them publishes.

    Args:
        root_transport: The folder that holds the store's folder.
        metadata: The metadata that the parts were written with.
        verify: `"digests"` reads every shard once more before publishing; `"sizes"` trusts what the parts have synced.
        takeover: Publish even though another publisher has begun: only for back ends without locks, where a slow publisher
            looks like one that has crashed.
        progress: Show a bar; None shows one on a terminal.

    Raises:
        IncompleteStoreError: parts are missing; the message says which examples.
        WriterConflictError: another publisher is at work, or was faster.
        CorruptShardError: a shard is not what its receipt says.
        ResumeError: the parts there were written for other metadata.
        ArgumentError: an option breaks its rule.
    """
    if not isinstance(verify, str) or verify not in get_args(Verify):  # pyright: ignore[reportUnnecessaryIsInstance]  # callers may not check types
        raise ArgumentError(f"verify is {brief(verify)}; it must be one of {get_args(Verify)}", where="verify")
    takeover, progress = check_flag(takeover, name="takeover"), check_flag(progress, name="progress", other=None)
    folder = Folder(root_transport, metadata.hash)
    if published_already(folder, metadata):
        return False
    claim = read_claim(folder)
    if claim is None:
        if published_already(folder, metadata):  # since the line above
            return False
        raise IncompleteStoreError(
            "nothing has been written there by this package", where=folder.url, remedy="Create the store first."
        )
    check_claim(folder, claim, Claim.of(metadata, claim.options))
    return publish(folder, metadata, claim, verify=verify, takeover=takeover, progress=progress)


def published_already(folder: Folder, metadata: Metadata) -> bool:
    """Whether metadata.json is there with these very bytes; `StoreExistsError` if it has other ones."""
    there = folder.read(METADATA_NAME)
    if there and there != metadata.raw:
        raise StoreExistsError(
            "another store of that name, with other metadata, is there",
            where=folder.where(METADATA_NAME),
            remedy="Open it to see what it is; write elsewhere, or change the metadata.",
        )
    return bool(there)


def publish(
    folder: Folder,
    metadata: Metadata,
    claim: Claim,
    *,
    verify: Verify,
    takeover: bool,
    progress: bool | None,
    written: Written | None = None,
) -> bool:
    """Publish what all receipts together say is whole. See `finalize_store`.

    Without `written` the receipts of all parts are read. Where the back end has locks, one keeps other publishers out.
    """
    layout, publisher = metadata.layout, Owner(folder, PUBLISHER)
    with folder.lock("publish"):
        locked = folder.lock_is_real("publish")
        # Whether a publisher that was overtaken may still be at work.
        alone, entered = locked, False
        try:
            receipts = _receipts(folder, layout, claim) if written is None else []
            if publisher.take():
                alone = True
            elif takeover or locked:
                publisher.take(over=True)
            else:
                raise WriterConflictError(
                    "another process has begun to publish this store",
                    where=folder.where(PUBLISHER),
                    remedy="Wait for it. If it has crashed, finalize with takeover=True.",
                )
            entered = True
            if written is not None:
                receipts = written.receipts()
            # Another publisher that was done before this one began has deleted its hidden files: these must go as well.
            elif published_already(folder, metadata):
                remove_hidden(folder)
                return False
            if verify == "digests":  # takes long: before the documents, not beside them
                _check_digests(folder, layout, claim, receipts, progress=progress)
            if written is not None and (receipts[0].tokens is not None or not folder.is_far):
                written.settle()  # token arrays are made of what is recorded with the receipts
            folder.together(
                lambda: _check_sizes(folder, layout, claim, receipts),
                lambda: folder.put(SHARDS_NAME, shards_bytes(layout, metadata.count_key)),
                lambda: _write_digests(folder, metadata, claim, receipts),
                publisher.check,
                *([written.settle] if written is not None else []),
            )
        except SaevStoreError:
            if published_already(folder, metadata):
                remove_hidden(folder)
                raise _lost(folder) from None
            with contextlib.suppress(SaevStoreError):
                # Not the document of a publisher that has taken over.
                if entered and publisher.is_holder():
                    folder.delete(PUBLISHER)
            raise
        found = folder.create(METADATA_NAME, metadata.raw)
        # Equal bytes may be those of a publisher that was overtaken and went on.
        is_ours = found == "ours" or (found == "same" and alone and publisher.is_holder())
        if not is_ours:
            raise _lost(folder)
        answers = folder.together(publisher.holder, lambda: folder.is_far and not _is_repaired(folder))
        holder, is_removable = cast("tuple[Mapping[str, object], bool]", tuple(answers))
        # Where creation is not atomic, the service may have let two publishers in, and the other one goes on.
        is_other = holder.get("attempt", publisher.attempt) != publisher.attempt
        if found == "ours" and is_other and not holder.get("has_overtaken"):
            raise WriterConflictError(
                "another publisher has taken over", where=folder.url, remedy="Open the store when that one is done."
            )
        if is_removable:
            with contextlib.suppress(SaevStoreError):  # hidden files in a published store do no harm
                folder.delete(WORK_FOLDER)
        elif not folder.is_far:
            remove_hidden(folder)
    return True


def _lost(folder: Folder) -> WriterConflictError:
    """The error of a publisher that comes too late."""
    return WriterConflictError(
        "another publisher was faster", where=folder.url, remedy="Open the store: it is published."
    )


# -- what is published -------------------------------------------------------------------------------------------------


def _receipts(folder: Folder, layout: Layout, claim: Claim) -> list[Receipt]:
    """The receipts of all shards, in order; `IncompleteStoreError` if some are missing, or only some have labels."""
    missing: list[str] = []
    with contextlib.closing(read_receipts(folder, layout, range(layout.n_shards), claim.options.block_bytes)) as asked:
        found = [receipt if receipt is not None and receipt.complete else None for receipt in asked]
    for rank in range(claim.options.world):
        shards = part_shards(layout.n_shards, rank, claim.options.world)
        n_lacking = found[shards.start : shards.stop].count(None)
        if n_lacking:
            start, end = part_examples(layout, shards)
            missing.append(f"part {rank} (examples {start}:{end}) lacks {n_lacking} of {len(shards)} shards")
    if missing:
        more = f", and {len(missing) - 5} more parts" if len(missing) > 5 else ""
        raise IncompleteStoreError(
            f"not all parts are written: {'; '.join(missing[:5])}{more}",
            where=folder.url,
            remedy="Write those parts with resume=True, then finalize.",
        )
    receipts = [receipt for receipt in found if receipt is not None]
    labelled: dict[bool, int] = {}
    for shard_idx, receipt in enumerate(receipts):
        labelled.setdefault(receipt.tokens is not None, shard_idx)
    if len(labelled) == 2:
        raise IncompleteStoreError(
            f"{shard_name(labelled[True])} has labels, {shard_name(labelled[False])} has none; all must have them, or none",
            where=folder.url,
            remedy="Throw it away with `discard_unfinished` and write all parts alike.",
        )
    return receipts


def _check_sizes(folder: Folder, layout: Layout, claim: Claim, receipts: list[Receipt]) -> None:
    folder.transport.close()  # a map of an earlier, shorter file must not answer for the finished one
    names = [shard_name(shard_idx) for shard_idx in range(len(receipts))]
    with contextlib.closing(folder.each(folder.size, names)) as sizes:
        for name, receipt, size in zip(names, receipts, sizes, strict=True):
            expected = layout.shard_nbytes if claim.options.pad else receipt.used_nbytes
            if size != expected:
                there = "it is gone" if size is None else f"it has {size} bytes"
                raise _not_as_written(folder, name, f"{there}; its receipt says {expected} bytes")


def _check_digests(
    folder: Folder, layout: Layout, claim: Claim, receipts: list[Receipt], *, progress: bool | None
) -> None:
    """Read every shard once more."""
    _check_sizes(folder, layout, claim, receipts)
    with Progress(layout.nbytes, "checking", shown=progress) as bar:
        for shard_idx, receipt in enumerate(receipts):
            wrong = folder.first_difference(shard_name(shard_idx), receipt.file, claim.options.block_bytes, bar)
            if wrong is not None:
                message = f"bytes {wrong[0]}:{wrong[1]} are not what was written"
                raise _not_as_written(folder, shard_name(shard_idx), message)


def _not_as_written(folder: Folder, name: str, message: str) -> CorruptShardError:
    """The error for a file that is not what its writer has recorded."""
    return CorruptShardError(message, where=folder.where(name), remedy="Resume the part that wrote it, then finalize.")


def _write_digests(folder: Folder, metadata: Metadata, claim: Claim, receipts: list[Receipt]) -> None:
    """Write digests.json, and before it the token arrays; the same bytes whichever publisher writes them."""
    files = {shard_name(shard_idx): receipt.file for shard_idx, receipt in enumerate(receipts)}
    if receipts[0].tokens is not None:
        files |= _write_token_arrays(folder, metadata, claim, receipts)
    folder.put(DIGESTS_NAME, Digests(claim.options.block_bytes, files).to_bytes())


def _write_token_arrays(
    folder: Folder, metadata: Metadata, claim: Claim, receipts: list[Receipt]
) -> dict[str, FileDigests]:
    """Write the file of each token array from the token rows of all shards."""
    layout, arrays = metadata.layout, metadata.recordable
    widths = [array.example_nbytes(layout) for array in arrays]
    row_nbytes = sum(widths)

    def read(shard_idx: int) -> bytes | None:
        return read_token_rows(folder, layout, shard_idx, receipts[shard_idx], row_nbytes)

    # Replaced in one step: a publisher that took over may have published with it, and a link is replaced, not followed.
    building = {
        array.file_name: array.file_name if folder.is_far else f"{BUILDING}/{array.file_name}" for array in arrays
    }
    with contextlib.ExitStack() as on_error:
        sinks, digesters = list[Sink](), list[BlockDigester]()
        for array in arrays:
            nbytes = array.nbytes(layout)
            sinks.append(folder.open_sink(building[array.file_name], used_nbytes=nbytes, file_nbytes=nbytes))
            on_error.callback(sinks[-1].abort)
            digesters.append(BlockDigester(claim.options.block_bytes))
        longest = layout.examples_per_shard * row_nbytes
        with contextlib.closing(folder.each(read, range(len(receipts)), most_nbytes=longest)) as parts:
            for shard_idx, rows in enumerate(parts):
                if rows is None:
                    message = "what was recorded of the tokens of a shard is gone, or is not what was written"
                    raise _not_as_written(folder, token_rows_path(shard_idx), message)
                table, first = np.frombuffer(rows, np.uint8).reshape(-1, row_nbytes), 0
                for width, sink, digester in zip(widths, sinks, digesters, strict=True):
                    part = np.ascontiguousarray(table[:, first : first + width]).reshape(-1).data
                    sink.write(digester.nbytes, [part])
                    digester.update(part)
                    first += width
        for sink in sinks:
            sink.commit()
        on_error.pop_all()
    found: dict[str, FileDigests] = {}
    for array, digester in zip(arrays, digesters, strict=True):
        folder.move(building[array.file_name], array.file_name)
        found[array.file_name] = FileDigests(digester.nbytes, tuple(digester.digests()))
    return found


# -- hidden files ------------------------------------------------------------------------------------------------------


def remove_hidden(folder: Folder) -> None:
    """Delete the hidden files of a published store. Those of a repair stay: `open_repair` finishes or deletes them."""
    if folder.is_far:
        with contextlib.suppress(SaevStoreError):  # they do no harm in a published store
            if not _is_repaired(folder):
                folder.delete(WORK_FOLDER)
        return
    names = folder.names()
    # Another process may make the folder again while it is deleted; the one that holds the lock then looks once more.
    for _ in range(_MOST_REMOVALS):
        # Taking the lock makes the folder: not where there is nothing to delete, and perhaps no permission to write.
        there = names is None or WORK_FOLDER in names
        try:
            with folder.lock("repair") if there else contextlib.nullcontext():
                if there and _is_repaired(folder):
                    return
                for name in (*(name for name in names or () if name.startswith(TEMPORARY)), WORK_FOLDER):
                    with contextlib.suppress(SaevStoreError):
                        folder.delete(name)
        except SaevStoreError:  # another process is deleting them
            return
        names = folder.names()
        if not (folder.exists(CLAIM_PATH) if names is None else WORK_FOLDER in names):
            return


def _is_repaired(folder: Folder) -> bool:
    """Whether a repair may be at work; also where that cannot be found out."""
    try:
        names = folder.names(WORK_FOLDER)
        return folder.exists(JOURNAL) if names is None else REPAIR.rsplit("/", 1)[-1] in names
    except SaevStoreError:
        return True
