"""Copies of stores, shard by shard: what copies of whole stores and of parts of them share."""

from __future__ import annotations

import json
import threading
import time
from abc import ABC, abstractmethod
from collections.abc import Generator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing
from dataclasses import dataclass, replace
from functools import cached_property, partial
from typing import TYPE_CHECKING, cast

from saev_store._runtime.cluster import map_shards
from saev_store._runtime.progress import Progress
from saev_store._runtime.threads import n_cores
from saev_store.core.layout import shard_name
from saev_store.documents import Metadata
from saev_store.errors import CorruptShardError, IncompleteStoreError, NotFoundError, StoreExistsError, TransportError
from saev_store.names import DIGESTS_NAME, LABELS_NAME, METADATA_NAME, SHARDS_NAME
from saev_store.transport import Transport
from saev_store.writer.create import is_whole
from saev_store.writer.digests import BLOCK_BYTES, Digests, FileDigests, block_ranges, digest, load_digests
from saev_store.writer.publish import More, publish
from saev_store.writer.work import Receipt, Work, create, each, names, read

if TYPE_CHECKING:
    from distributed import Client

    from saev_store.store.store import ShardStore

PROVENANCE_NAME, _ORIGIN = "provenance.json", "origin.json"


class Rate:
    """A limit on what all threads move together.

    Args:
        max_bytes_per_s: Bytes that are read and written.
        max_requests_per_s: Requests.
    """

    def __init__(self, max_bytes_per_s: float, max_requests_per_s: float) -> None:
        self._max_bytes_per_s, self._max_requests_per_s = max_bytes_per_s, max_requests_per_s
        self._lock, self._free_s = threading.Lock(), 0.0

    def wait(self, nbytes: int, n_requests: int) -> None:
        """Wait until so many bytes may move."""
        with self._lock:
            now_s = time.monotonic()
            needed_s = max(nbytes / self._max_bytes_per_s, n_requests / self._max_requests_per_s)
            self._free_s = max(self._free_s, now_s) + needed_s
            wait_s = self._free_s - now_s
        time.sleep(wait_s)


@dataclass(frozen=True)
class Copy(ABC):
    """A copy of a store or of a part of it; picklable without a rate.

    Attributes:
        store: The source.
        root: The folder in which the copy's folder is made.
        metadata: That of the copy.
        rate: Limit on what is moved; None is no limit.
    """

    store: ShardStore
    root: Transport
    metadata: Metadata
    rate: Rate | None

    @cached_property
    def promised(self) -> Digests | None:
        """digests.json of the source, which lists every file; None if it has none."""
        return promised_by(self.store)

    @cached_property
    def stopped(self) -> threading.Event:
        """True as soon as the copy is given up."""
        return threading.Event()

    def check(self) -> None:
        """Raise if the copy is given up; called for each block."""
        if self.stopped.is_set():
            raise TransportError("the copy was given up", where=self.store.url)

    def __getstate__(self) -> dict[str, object]:
        """The fields; each worker reads the digests again."""
        return {name: value for name, value in self.__dict__.items() if name not in {"promised", "stopped"}}

    @property
    @abstractmethod
    def work(self) -> Work:
        """The copy while it is unfinished."""

    @abstractmethod
    def copy_shard(self, shard_idx: int) -> int:
        """Copy a shard; its length."""

    def is_kept(self, shard_idx: int, receipt: Receipt) -> bool:
        """Return True if an earlier attempt has copied a shard, which is read again."""
        return is_whole(self.work, shard_idx, receipt)

    @abstractmethod
    def others(self, work: Work, receipts: Sequence[Receipt]) -> More:
        """Write all else than shards, see `publish`."""

    @abstractmethod
    def fault(self) -> str:
        """Name what is wrong with a finished copy; "" if it is one of this recording, with files of the right lengths.

        Raises:
            StoreExistsError: the store there is not a copy, so it is never replaced.
        """

    def origin(self) -> bytes:
        """Text that differs for another recording, as the source is now."""
        return identity_now(self.store)

    def continues(self, there: bytes) -> bool:
        """Return True if what was copied with that origin is kept by this copy."""
        return there == self.origin()


def identity_now(store: ShardStore) -> bytes:
    """Text that differs if files of a source were replaced: of its digests, or of sizes and versions. Links do not change it."""
    promised = load_digests(store.transport)
    if promised is not None:
        return digest(promised.to_bytes()).encode()
    found = each(store.transport, store.transport.stat, store.recorded_files())
    return f"versions:{digest(json.dumps(found).encode())}".encode()


def promised_by(store: ShardStore) -> Digests | None:
    """digests.json of a source; None if it has none.

    Raises:
        CorruptShardError: it does not list every file: the copy's own digests would call damaged vectors right.
    """
    promised, layout = load_digests(store.transport), store.layout
    if promised is None:
        return None
    lengths = {shard_name(shard_idx): layout.used_nbytes(shard_idx) for shard_idx in range(layout.n_shards)}
    lengths |= {array.file_name: array.nbytes(layout) for array in store.token_arrays.described()}
    if not store.token_arrays.is_declared and LABELS_NAME in lengths.keys() - promised.files.keys():
        # Labels that were written after the digests: what is there now is taken for right.
        blocks = block_ranges(lengths[LABELS_NAME], promised.block_bytes)
        read = partial(store.transport.get_ranges, LABELS_NAME)
        found = [digest(memoryview(read(starts=[start], ends=[end])[0])) for start, end in blocks]
        labels = FileDigests(lengths[LABELS_NAME], tuple(found))
        promised = replace(promised, files={**promised.files, LABELS_NAME: labels})
    for name, nbytes in lengths.items():
        if name not in promised.files or promised.files[name].nbytes != nbytes:
            raise CorruptShardError(
                f"digests.json must list every file; {name} with {nbytes} bytes is not in it",
                where=f"{store.url}/{DIGESTS_NAME}",
                remedy="Delete it, and what is there now is taken for right.",
            )
    return promised


def damaged(store: ShardStore, name: str, start: int, end: int) -> CorruptShardError:
    """The error for a block of the source that differs from its digest."""
    return CorruptShardError(
        f"bytes {start}:{end} of the source differ from its digests.json",
        where=f"{store.url}/{name}",
        remedy="Run `saev-store validate --deep` on the source; repair it first.",
    )


def make_copy(copy: Copy, *, resume: bool, replaces: bool, client: Client | str | None, progress: bool | None) -> None:
    """Copy all that is missing, and publish the copy.

    Args:
        copy: The copy.
        resume: Continue an unfinished copy, and accept a finished one.
        replaces: Delete a copy that is damaged or of another recording, finished or not, and copy again.
        client: A dask cluster whose workers copy the shards; None is threads of this process.
        progress: As in `create_store`.

    Raises:
        SaevStoreError: see `copy_store`.
    """
    work, was = copy.work, identity_now(copy.store)
    if _is_done(copy, resume=resume, replaces=replaces):
        return
    _begin(copy, resume=resume, replaces=replaces)
    layout = work.layout
    receipts = enumerate(work.receipts(range(layout.n_shards)))
    missing = [
        shard_idx for shard_idx, receipt in receipts if receipt is None or not _is_kept(copy, shard_idx, receipt)
    ]
    total = sum(map(layout.used_nbytes, missing))
    with Progress(total, "copying", shown=progress) as bar, closing(_copied(copy, missing, client)) as done:
        for nbytes in done:
            bar.advance(nbytes)
    if identity_now(copy.store) != was:
        raise TransportError(
            "files of the source were replaced while they were copied",
            where=copy.store.url,
            remedy="Copy again once no process writes there.",
        )
    publish(work, copy.others)
    copy.root.close()  # a map of a shorter file must not answer for the finished one


def _copied(copy: Copy, shards: Sequence[int], client: Client | str | None) -> Generator[int]:
    """Copy shards, in threads or by a cluster; their lengths, in order. No thread works any more when it has ended."""
    if client is not None:
        yield from map_shards(replace(copy, store=copy.store.unmapped()).copy_shard, shards, client)
        return
    with ThreadPoolExecutor(2 * n_cores(), "saev-store-copy") as pool:
        try:
            for future in [pool.submit(copy.copy_shard, shard_idx) for shard_idx in shards]:
                yield future.result()
        except BaseException:
            copy.stopped.set()  # the others end at their next block
            pool.shutdown(cancel_futures=True)
            raise


def _is_kept(copy: Copy, shard_idx: int, receipt: Receipt) -> bool:
    if not copy.is_kept(shard_idx, receipt):
        copy.work.forget(shard_idx)
        return False
    return True


def _begin(copy: Copy, *, resume: bool, replaces: bool) -> None:
    """Begin the copy, or continue what was begun."""
    work, origin = copy.work, copy.origin()
    is_new = work.begin()
    if not is_new and not resume:
        raise IncompleteStoreError(
            "an unfinished copy is there", where=work.url, remedy="Continue it with resume=True."
        )
    there = read(work.work, _ORIGIN)
    has_receipts = not is_new and bool(names(work.work, "receipts"))
    is_other = has_receipts if there is None else not copy.continues(there)
    if is_other and (there is None or not replaces):
        raise IncompleteStoreError(
            "an unfinished store of something else is there: of another recording, or with another on_overflow",
            where=work.url,
            remedy="Finish it, or throw it away with `discard_unfinished`, or copy elsewhere.",
        )
    for shard_idx in range(work.layout.n_shards) if is_other else ():
        work.forget(shard_idx)
    if there is None:
        create(work.work, _ORIGIN, origin)
    else:
        work.work.put(_ORIGIN, origin)


# -- finished copies ---------------------------------------------------------------------------------------------------


def _is_done(copy: Copy, *, resume: bool, replaces: bool) -> bool:
    """Return True if a finished copy is there; one that is another's, or damaged, is an error, or deleted with `replaces`."""
    work = copy.work
    if read(work.store, METADATA_NAME) is None:
        return False
    found = copy.fault()
    if not found and resume and work.is_published():
        work.remove()
        return True
    if not (found and replaces):
        raise StoreExistsError(
            found or "the copy is there already",
            where=work.url,
            remedy="Open it, or copy elsewhere; replace=True replaces a copy that is damaged or of an earlier recording.",
        )
    work.store.delete(METADATA_NAME)  # first: a part of it never opens
    work.store.delete(SHARDS_NAME)
    for entry in work.store.list():
        work.store.delete(entry.name)
    work.remove()
    return False


def short_file(place: Transport, digests: Digests) -> str:
    """Name a file of a finished copy that is shorter than its digests say; "" if there is none."""
    for name, file in digests.files.items():
        try:
            size = place.size(name)
        except NotFoundError:
            size = 0
        if size < file.nbytes:
            return f"the copy is finished, but {name} has {size} of {file.nbytes} bytes: it was damaged since"
    return ""


def provenance_of(place: Transport) -> dict[str, object]:
    """Content of provenance.json; empty if there is none, or something else."""
    try:
        found = cast("object", json.loads(read(place, PROVENANCE_NAME) or b""))
    except (ValueError, RecursionError):
        return {}
    return cast("dict[str, object]", found) if isinstance(found, dict) else {}


def block_bytes_of(promised: Digests | None) -> int:
    """Length of the blocks that have digests."""
    return BLOCK_BYTES if promised is None else promised.block_bytes
