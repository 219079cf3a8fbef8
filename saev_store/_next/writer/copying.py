"""Copying a whole store: a writer whose shards come from files, linked, copied by the service, or streamed."""

from __future__ import annotations

import threading
import time
from collections.abc import Sequence
from contextlib import closing
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING
from uuid import uuid4

from saev_store._next.writer.create import is_as_written, is_whole
from saev_store._next.writer.publish import More, publish
from saev_store._next.writer.work import TEMPORARY, Receipt, Work, create, is_disk, open_sink, read
from saev_store._runtime.cluster import connected, results
from saev_store._runtime.progress import Progress
from saev_store._runtime.threads import ahead, n_cores
from saev_store.core.layout import shard_name
from saev_store.documents import Metadata, shards_bytes
from saev_store.errors import (
    CorruptShardError,
    IncompleteStoreError,
    NotFoundError,
    StoreExistsError,
    TransportError,
)
from saev_store.names import DIGESTS_NAME, METADATA_NAME, SHARDS_NAME
from saev_store.store.identity import recording_identity
from saev_store.transport import Transport
from saev_store.writer._digests import BLOCK_BYTES, Digests, FileDigests, block_ranges, digest, load_digests
from saev_store.writer.copying._share import share
from saev_store.writer.folder import Folder

if TYPE_CHECKING:
    from distributed import Client

    from saev_store.store.store import ShardStore

PROVENANCE_NAME, _ORIGIN = "provenance.json", "origin.json"


class Rate:
    """A limit on the bytes that all threads move together.

    Args:
        max_bytes_per_s: None is no limit.
    """

    def __init__(self, max_bytes_per_s: float | None) -> None:
        self._max, self._lock, self._free_s = max_bytes_per_s, threading.Lock(), 0.0

    def wait(self, nbytes: int) -> None:
        """Wait until so many bytes may move."""
        if self._max is None:
            return
        with self._lock:
            now_s = time.monotonic()
            self._free_s = max(self._free_s, now_s) + nbytes / self._max
            wait_s = self._free_s - now_s
        time.sleep(wait_s)


@dataclass(frozen=True)
class Copy:
    """The copy of a store.

    Attributes:
        store: The source.
        root: The folder in which the copy's folder is made.
        metadata: That of the source, or the same as a document of another protocol version.
        promised: digests.json of the source; None where it has none.
    """

    store: ShardStore
    root: Transport
    metadata: Metadata
    promised: Digests | None

    @property
    def work(self) -> Work:
        """The copy while it is unfinished."""
        name = self.store.name if self.metadata is self.store.metadata else self.metadata.hash
        block_bytes = BLOCK_BYTES if self.promised is None else self.promised.block_bytes
        return Work(self.root, self.metadata, name=name, block_bytes=block_bytes)

    def of_source(self, name: str, nbytes: int) -> FileDigests:
        """Digests of a file of the source: those of digests.json, or those of what is read."""
        if self.promised is not None:
            return self.promised.files[name]
        digests = [digest(memoryview(self.read(name, *block))) for block in block_ranges(nbytes, BLOCK_BYTES)]
        return FileDigests(nbytes, tuple(digests))

    def read(self, name: str, start: int, end: int) -> bytes | bytearray | memoryview:
        """A range of a file of the source."""
        return self.store.transport.get_ranges(name, starts=[start], ends=[end])[0]


def copy_whole(
    store: ShardStore,
    root: Transport,
    metadata: Metadata,
    *,
    resume: bool = True,
    replace: bool = False,
    max_bytes_per_s: float | None = None,
    client: Client | str | None = None,
    progress: bool | None = None,
) -> None:
    """Copy all shards and token arrays of a store below `root`, byte for byte; its documents too, if `metadata` is the store's.

    Every block is compared with the source's digests.json while it is read, and the copy is read back and compared.

    Args:
        store: The source.
        root: The folder of the copy's folder.
        metadata: That of the source, or the same as a document of another protocol version. On one disk the shards are then
            clones of the source's files or, where the file system has no clones, hard links.
        resume: Continue an unfinished copy, and accept a finished one.
        replace: Delete a finished copy that is of another recording, and copy again.
        max_bytes_per_s: A limit on what is read; None is none.
        client: A dask cluster whose workers copy the shards; None is threads of this process.
        progress: As in `create_store`.

    Raises:
        StoreExistsError: another store, or a copy of another recording, has this name; or any, with `resume=False`.
        IncompleteStoreError: there is an unfinished copy, with `resume=False`, or an unfinished store of something else.
        CorruptShardError: the source differs from its digests.json, or that does not list every file.
        WriterConflictError: another process is copying the same shard.
        TransportError: bytes did not arrive as they were sent, or files of the source were replaced during the copy.
    """
    copy = Copy(store, root, metadata, _promised(store))
    work, was = copy.work, _identity(store)
    if _is_done(copy, resume=resume, replace=replace):
        return
    if not work.begin() and not resume:
        raise IncompleteStoreError(
            "an unfinished copy is there", where=work.url, remedy="Continue it with resume=True."
        )
    try:
        create(work.work, _ORIGIN, was)
    except StoreExistsError:
        raise IncompleteStoreError(
            "an unfinished copy of another recording is there",
            where=work.url,
            remedy="Finish it, or throw it away with `discard_unfinished`, or copy elsewhere.",
        ) from None
    if work.is_disk:  # the folder has to be there for links
        work.store.put(f"{TEMPORARY}begun", b"")
        work.store.delete(f"{TEMPORARY}begun")
    _copy_shards(copy, Rate(max_bytes_per_s), client, progress)
    if _identity(store) != was:
        raise TransportError(
            "files of the source were replaced while they were copied",
            where=store.url,
            remedy="Copy again once no process writes there.",
        )
    publish(work, partial(_others, copy))


def _is_done(copy: Copy, *, resume: bool, replace: bool) -> bool:
    """Return True if a finished copy is there; one that is another's, or damaged, is an error, or deleted with `replace`."""
    work = copy.work
    if read(work.store, METADATA_NAME) is None:
        return False
    found = _found(copy)
    if not found and resume and work.is_published():
        work.remove()
        return True
    if not (found and replace):
        raise StoreExistsError(
            found or "the copy is there already",
            where=work.url,
            remedy="Open it, or copy elsewhere; replace=True replaces a copy that is damaged or of an earlier recording.",
        )
    _delete(work)
    return False


def _promised(store: ShardStore) -> Digests | None:
    """digests.json of the source, which must list every file."""
    promised, layout = load_digests(store.transport), store.layout
    if promised is None:
        return None
    lengths = {shard_name(shard_idx): layout.used_nbytes(shard_idx) for shard_idx in range(layout.n_shards)}
    lengths |= {array.file_name: array.nbytes(layout) for array in store.token_arrays.described()}
    for name, nbytes in lengths.items():
        if name not in promised.files or promised.files[name].nbytes != nbytes:
            raise CorruptShardError(
                f"digests.json must list every file; {name} with {nbytes} bytes is not in it",
                where=f"{store.url}/{DIGESTS_NAME}",
                remedy="Delete it, and what is there now is taken for right.",
            )
    return promised


def _identity(store: ShardStore) -> bytes:
    """Text that differs for another recording: its digests.json, or where there is none its files as they are."""
    promised = load_digests(store.transport)
    if promised is not None:
        return digest(promised.to_bytes()).encode()
    return str(recording_identity(store.transport, store.layout, files=store.recorded_files())).encode()


def _found(copy: Copy) -> str:
    """Name what is wrong with a finished copy; "" if it is one of this recording, with files of the right lengths."""
    place, source = copy.work.store, copy.store
    if _is_itself(copy):
        return ""
    theirs = load_digests(place)
    if theirs is None or set(theirs.files) != set(source.recorded_files()):
        return "a store that is not a copy of this one is there"
    ours = copy.promised
    if ours is None:  # the source is read for it
        files = {name: copy.of_source(name, file.nbytes) for name, file in theirs.files.items()}
        ours = Digests(BLOCK_BYTES, files)
    if ours != theirs:
        return "a copy of another recording with the same metadata is there"
    for name, file in theirs.files.items():
        try:
            size = place.size(name)
        except NotFoundError:
            size = 0
        if size < file.nbytes:
            return f"the copy is finished, but {name} has {size} of {file.nbytes} bytes: it was damaged since"
    return ""


def _is_itself(copy: Copy) -> bool:
    """Return True if the copy would be the source, whose place may have several addresses: nothing of that may be deleted."""
    probe, place = f"{TEMPORARY}probe-{uuid4().hex}", copy.work.store
    place.put(probe, b"1")
    try:
        return read(copy.store.transport, probe) is not None
    finally:
        place.delete(probe)


def _delete(work: Work) -> None:
    """Delete a finished copy, its document first: a part of it never opens."""
    work.store.delete(METADATA_NAME)
    work.store.delete(SHARDS_NAME)
    for entry in work.store.list():
        work.store.delete(entry.name)
    work.remove()


def _copy_shards(copy: Copy, rate: Rate, client: Client | str | None, progress: bool | None) -> None:
    """Copy the shards that are missing, in threads or by the workers of a cluster."""
    work, layout = copy.work, copy.store.layout
    receipts = work.receipts(range(layout.n_shards))
    missing = [shard_idx for shard_idx, receipt in enumerate(receipts) if not _is_kept(copy, work, shard_idx, receipt)]
    with Progress(sum(map(layout.used_nbytes, missing)), "copying", shown=progress) as bar:
        if client is None:
            done = ahead(partial(_copy_shard, copy, rate), missing, 2 * n_cores())
            for nbytes in done:
                bar.advance(nbytes)
            return
        on_worker = Copy(copy.store.unmapped(), copy.root, copy.metadata, copy.promised)
        with (
            connected(client) as cluster,
            closing(results(cluster, partial(_copy_on_worker, on_worker), missing)) as done,
        ):
            for shard_idx, nbytes in zip(missing, done, strict=True):
                if work.receipt(shard_idx) is None:
                    raise TransportError(
                        "a worker has copied a shard, but it is not there",
                        where=work.url,
                        remedy="Copy to an address that means the same to this process and to all workers.",
                    )
                bar.advance(nbytes)


def _is_kept(copy: Copy, work: Work, shard_idx: int, receipt: Receipt | None) -> bool:
    """Return True if an earlier attempt has copied a shard, which is read again."""
    if receipt is None:
        return False
    if copy.of_source(shard_name(shard_idx), receipt.nbytes) == receipt.file and is_whole(work, shard_idx, receipt):
        return True
    work.forget(shard_idx)
    return False


def _copy_on_worker(copy: Copy, shard_idx: int) -> int:
    return _copy_shard(copy, Rate(None), shard_idx)


def _copy_shard(copy: Copy, rate: Rate, shard_idx: int) -> int:
    """Copy a shard; its length."""
    work, name, source = copy.work, shard_name(shard_idx), copy.store.transport
    used, full, size = copy.store.layout.used_nbytes(shard_idx), copy.store.layout.shard_nbytes, source.size(name)
    # As long as in the source, if that is a disk too; a bucket holds no zeros at the end.
    file_nbytes = used if not work.is_disk else min(size, full) if is_disk(source) else full
    with work.lock(f"{shard_idx:06d}"):
        work.check(shard_idx)
        is_linked = copy.metadata is not copy.store.metadata and share(
            source, Folder(copy.root, work.name), name, file_nbytes
        )
        if is_linked or (size == file_nbytes and _copied_within(copy, work, name)):
            digests = copy.of_source(name, used)
        else:
            digests = _stream(copy, rate, work, name, used, file_nbytes)
        work.store.close()  # a map of an earlier file must not answer for this one
        if not is_as_written(work.store, name, digests, work.block_bytes, file_nbytes):
            raise TransportError(
                f"{name} of the copy is not what was sent",
                where=work.url,
                remedy="Copy again; if it happens twice, suspect the disk, the network, or the source: validate it deeply.",
            )
        work.record(shard_idx, digests.digests, {})
    return used


def _copied_within(copy: Copy, work: Work, name: str) -> bool:
    """Let the service copy a file; False if it cannot."""
    if not hasattr(work.store, "copy_within"):
        return False
    return work.store.copy_within(copy.store.transport, name, name)


def _stream(copy: Copy, rate: Rate, work: Work, name: str, used_nbytes: int, file_nbytes: int) -> FileDigests:
    """Read a file of the source, compare it with what is promised, and write it; its digests."""
    promise = None if copy.promised is None else copy.promised.files[name]
    blocks, found = list(block_ranges(used_nbytes, work.block_bytes)), list[str]()
    sink = open_sink(work.store, name, used_nbytes=used_nbytes, file_nbytes=file_nbytes)
    try:
        with closing(
            ahead(lambda block: copy.read(name, *block), blocks, 1 if is_disk(copy.store.transport) else 4)
        ) as data:
            for (start, end), block in zip(blocks, data, strict=True):
                rate.wait(end - start)
                found.append(digest(memoryview(block)))
                if promise is not None and found[-1] != promise.digests[len(found) - 1]:
                    raise CorruptShardError(
                        f"bytes {start}:{end} of the source differ from its digests.json",
                        where=f"{copy.store.url}/{name}",
                        remedy="Run `saev-store validate --deep` on the source; repair it first.",
                    )
                sink.write(start, [memoryview(block)])
        sink.commit()
    except BaseException:
        sink.abort()
        raise
    return FileDigests(used_nbytes, tuple(found))


def _others(copy: Copy, work: Work, receipts: Sequence[Receipt]) -> More:  # noqa: ARG001  # as `publish` calls it
    """Copy the token arrays, and what other documents the source has."""
    files, documents = dict[str, FileDigests](), dict[str, bytes]()
    for array in copy.store.token_arrays.described():
        if work.is_published():  # in a bucket another process may be faster
            break
        nbytes = array.nbytes(copy.store.layout)
        files[array.file_name] = _stream(copy, Rate(None), work, array.file_name, nbytes, nbytes)
    provenance = read(copy.store.transport, PROVENANCE_NAME)
    if provenance is not None:
        documents[PROVENANCE_NAME] = provenance
    index = copy.store.index
    documents[SHARDS_NAME] = index.raw
    if copy.metadata is not copy.store.metadata:
        key, trailing = copy.metadata.count_key, index.trailing_empty
        documents[SHARDS_NAME] = shards_bytes(copy.store.layout, key, trailing_empty=trailing)
    return More(files, documents)
