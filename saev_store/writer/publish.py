"""Publication: from the receipts of all shards to a store; any number of processes may try at once."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractContextManager, ExitStack, suppress
from functools import partial
from typing import TYPE_CHECKING

from saev_store._runtime.threads import ahead
from saev_store.core.layout import shard_name
from saev_store.core.token_arrays import TokenArray
from saev_store.documents import shards_bytes
from saev_store.errors import (
    CorruptShardError,
    IncompleteStoreError,
    SaevStoreError,
    StoreExistsError,
    WriterConflictError,
)
from saev_store.names import DIGESTS_NAME, METADATA_NAME, SHARDS_NAME
from saev_store.writer.digests import BlockDigester, Digests, FileDigests
from saev_store.writer.work import N_AHEAD, Receipt, Work, create, each, read, stat, tokens_path

if TYPE_CHECKING:
    from saev_store.documents import Metadata
    from saev_store.transport import Transport

#: Seconds between two looks whether another publisher is done.
_LOOK_S = 0.05


def finalize_store(root_transport: Transport, metadata: Metadata) -> bool:
    """Publish a store whose parts are all written; True if this call did it, False if another one had.

    Any process may call it, several at once too: one of them publishes.

    Raises:
        IncompleteStoreError: shards are missing; the message names the first examples. Or some have labels and others not.
        CorruptShardError: a file differs from its receipt.
        StoreExistsError: another store has this name.
    """
    return publish(Work(root_transport, metadata))


def publish(work: Work, documents: Callable[[], Mapping[str, bytes]] = dict) -> bool:
    """Publish a store of which all shards have receipts; see `finalize_store`.

    `documents` gives further small files, by name; they may replace shards.json.
    """
    try:
        if work.is_disk:  # where nothing was begun no lock is made
            _check_begun(work, read(work.work, METADATA_NAME), is_published=work.is_published())
        with _alone(work):
            is_ours = _publish(work, documents)
    except SaevStoreError:
        # Another publisher was faster, and has deleted the work folder: whatever failed here, the store is there.
        if not work.is_published():
            raise
        is_ours = False
    work.remove()
    return is_ours


def _check_begun(work: Work, document: bytes | None, *, is_published: bool) -> None:
    if is_published:
        raise StoreExistsError("another publisher was faster", where=work.url)
    if document is None:
        raise IncompleteStoreError(
            "nothing has been written there by this package", where=work.url, remedy="Create the store first."
        )


def _alone(work: Work) -> AbstractContextManager[object]:
    """Hold the lock of publishers, which is waited for; in a bucket there is none, and all write the same bytes."""
    held = ExitStack()
    while True:
        with suppress(WriterConflictError):
            held.enter_context(work.lock("publish"))
            return held
        time.sleep(_LOOK_S)


def _publish(work: Work, documents: Callable[[], Mapping[str, bytes]]) -> bool:
    """Write all that is still missing of the store, its document last; False if another publisher was faster."""
    layout, metadata = work.layout, work.metadata
    work.store.close()  # what is remembered of earlier files
    receipts = _receipts(work)
    files = dict[str, FileDigests]((shard_name(shard_idx), receipt) for shard_idx, receipt in enumerate(receipts))
    for array in metadata.recordable if receipts[0].tokens else ():
        files[array.file_name] = _join(work, array, receipts)
    small = {SHARDS_NAME: shards_bytes(layout, metadata.count_key), **documents()}
    small[DIGESTS_NAME] = Digests(work.block_bytes, files).to_bytes()
    each(work.store, lambda item: work.store.put(*item), list(small.items()))
    return create(work.store, METADATA_NAME, metadata.raw)


def _receipts(work: Work) -> list[Receipt]:
    """The receipts of all shards, whose files have their sizes and, in a bucket, versions; all is looked at at once."""
    shards, layout = range(work.layout.n_shards), work.layout
    with ThreadPoolExecutor(N_AHEAD, "saev-store-publish") as pool:
        published, document = pool.submit(work.is_published), pool.submit(read, work.work, METADATA_NAME)
        found, stats = pool.map(work.receipt, shards), pool.map(partial(stat, work.store), map(shard_name, shards))
        _check_begun(work, document.result(), is_published=published.result())
        by_shard = list(found)
        receipts = [receipt for receipt in by_shard if receipt is not None]
        if len(receipts) < len(by_shard):
            start, end = layout.example_range(by_shard.index(None))
            raise IncompleteStoreError(
                f"{len(by_shard) - len(receipts)} of {len(by_shard)} shards are missing, the first with examples {start}:{end}",
                where=work.url,
                remedy="Write them with resume=True, then publish.",
            )
        if len({bool(receipt.tokens) for receipt in receipts}) > 1:
            raise IncompleteStoreError(
                "some shards have labels, others have none",
                where=work.url,
                remedy="Throw it away with `discard_unfinished` and write all parts alike.",
            )
        for shard_idx, receipt, is_there in zip(shards, receipts, stats, strict=True):
            if is_there != (receipt.file_nbytes, receipt.version):
                name = shard_name(shard_idx)
                raise _not_as_written(f"{name} has size and version {is_there}, other ones than its receipt", work)
    return receipts


def _not_as_written(message: str, work: Work) -> CorruptShardError:
    return CorruptShardError(message, where=work.url, remedy="Create the writer again with resume=True, then publish.")


def _join(work: Work, array: TokenArray, receipts: Sequence[Receipt]) -> FileDigests:
    """Write the file of a token array from what was recorded with each shard."""
    nbytes, digester = array.nbytes(work.layout), BlockDigester(work.block_bytes)
    sink = work.store.open_sink(array.file_name, used_nbytes=nbytes, file_nbytes=nbytes, replace=True)
    try:
        shards = list(enumerate(receipts))
        found = ahead(lambda item: work.read_tokens(array, *item), shards, 1 if work.is_disk else 8)
        for (shard_idx, _), rows in zip(shards, found, strict=True):
            if rows is None:
                path = tokens_path(array.name, shard_idx)
                raise _not_as_written(f"{path} in the work folder is gone, or is not what was written", work)
            sink.write([memoryview(rows)])
            digester.update(rows)
        if work.is_published():
            raise StoreExistsError("another publisher was faster", where=work.url)
        sink.commit()
    finally:
        sink.abort()
    return FileDigests(digester.nbytes, tuple(digester.digests()))
