"""`copy_store`: copies a store from any address to any other, checked; or a part of it, or in another dtype, as a new store."""

# pyright: reportUnnecessaryIsInstance=false

from __future__ import annotations

import os
from collections.abc import Generator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing
from dataclasses import replace as replaced
from typing import TYPE_CHECKING, Self, get_args
from uuid import uuid4

from saev_store._runtime.cluster import map_shards
from saev_store._runtime.progress import Progress
from saev_store._runtime.threads import n_cores
from saev_store.core.arguments import check_choice, check_flag, check_number
from saev_store.core.dtypes import ITEMSIZES, StoredDtype
from saev_store.core.layout import LayerKey
from saev_store.core.rows import Tokens, row_space
from saev_store.documents import WRITABLE_VERSIONS, Metadata
from saev_store.errors import (
    ArgumentError,
    IncompleteStoreError,
    SaevStoreError,
    StoreExistsError,
    TransportError,
    brief,
)
from saev_store.names import DIGESTS_NAME, METADATA_NAME
from saev_store.store.store import ShardStore
from saev_store.transport import open_transport
from saev_store.transport.durable import TEMP_PREFIX
from saev_store.writer.copies import Copy, Rate, identity_now
from saev_store.writer.copy_metadata import in_dtype, in_protocol, part_of
from saev_store.writer.create import differing
from saev_store.writer.digests import load_digests
from saev_store.writer.inputs import OverflowPolicy
from saev_store.writer.publish import publish
from saev_store.writer.rounding import RoundingReport
from saev_store.writer.work import create, each, names, read

if TYPE_CHECKING:
    from distributed import Client

Url = str | os.PathLike[str]
#: In the work folder: of which recording a copy is.
_ORIGIN = "origin.json"
#: Shards that are copied at once: each takes up to 200 MiB of memory, or two examples.
_MAX_THREADS = 8


class Copied(str):
    """The address of a copy.

    Attributes:
        rounding: What the copy's dtype has changed; None where no dtype was asked for.

    >>> Copied("/scratch/shards/1a2b3c4d").rounding is None
    True
    """

    __slots__ = ("rounding",)

    rounding: RoundingReport | None

    def __new__(cls, url: str, rounding: RoundingReport | None = None) -> Self:
        copied = super().__new__(cls, url)
        copied.rounding = rounding
        return copied


def copy_store(
    src: Url,
    dst: Url,
    *,
    layers: Sequence[LayerKey] | None = None,
    tokens: Tokens = "all",
    protocol: str | None = None,
    dtype: StoredDtype | None = None,
    on_overflow: OverflowPolicy = "raise",
    storage_options: Mapping[str, object] | None = None,
    dst_storage_options: Mapping[str, object] | None = None,
    resume: bool = True,
    replace: bool = False,
    max_mb_per_s: float | None = None,
    max_requests_per_s: float | None = None,
    client: Client | str | None = None,
    progress: bool | None = None,
) -> Copied:
    """Copy a store below `dst`, and return the address of the complete, checked copy.

    Without `layers`, `tokens` and `dtype` the copy has the same folder name, documents and vectors, byte for byte. Every block is
    compared with the source's digests.json, if there is one, while it is read; what a service has copied by itself is read, and
    compared too. The copy always has a digests.json. Zeros that pad the last shard are a hole on this machine, and absent in buckets.

    With `layers` or `tokens` the copy is a new store that holds only these layers, in the order of the source, and only these
    tokens, with a hash of its own and a `provenance.json` that names its origin. If the source has a digests.json, the blocks that
    they are in are compared. The protocol has no store without content, so `tokens="special"` includes the first content token.

    With `protocol` the documents are written as those of that protocol version, so the folder has another name. Keys that the
    version does not know are left out. On one disk the shards are hard links of the source's files, and are not read if it has
    digests.

    With `dtype` a new store of that dtype is written: as protocol 2.0 if that can hold everything, else as 3.0. Numbers are rounded
    to nearest even. `rounding` of the result, which is also `conversion` in the copy's `provenance.json`, has what that changed;
    it is the same however often the copy was interrupted.

    Up to eight shards are copied at once, each with up to 200 MiB of memory, or two examples if those are larger.

    `metadata.json` comes last, so a partial copy never opens. After an interruption the same call continues: whole shards are
    read again and kept, the others copied.

    Args:
        src: The store to copy, a path or URL.
        dst: The folder in which the copy's folder `<HASH>` is made; naming that folder itself is fine, too.
        layers: Labels of the layers to keep, or pairs (label, hook point); None is all of them.
        tokens: `"content"` leaves special tokens out; `"special"` keeps them and the first content token.
        protocol: "1.0.0", "2.0" or "2.1"; None keeps the source's. Programs that insist on the keys of 2.1 read "2.1" only.
        dtype: "bfloat16", "float16" or "float32"; None keeps the source's.
        on_overflow: What to do with finite numbers that become infinite in `dtype`: "raise", "warn" and store infinity, or
            "saturate" at its largest finite number. A copy is continued with the same policy; after "raise" with any.
        storage_options: For the source's file system.
        dst_storage_options: For the destination's file system.
        resume: Continue an unfinished copy, and accept a finished one; False refuses both.
        replace: Delete a store of that name that is not this copy, or is damaged, and copy again; False refuses. One without
            digests.json, which every copy has, is never deleted.
        max_mb_per_s: Limit of megabytes (10**6 bytes) per second that are read and written together.
        max_requests_per_s: Limit of its requests per second, to both places together.
        client: A `distributed.Client` or the address of a scheduler: its workers copy the shards, one for each task. Without
            limits; both addresses must mean the same to all workers.
        progress: A bar on standard error; None shows it on a terminal.

    Raises:
        NotFoundError, DocumentError, CorruptShardError: the source is not a whole store, or does not match its digests.
        LayerNotFoundError, SelectionError: it does not hold one of `layers`, or has no such tokens.
        StoreExistsError: another store (unless `replace`), or with `resume=False` this one is there.
        IncompleteStoreError: `resume` is False and there is an unfinished copy; or an unfinished store of something else.
        WriterConflictError: another process is copying to there.
        ArgumentError: a limit is not positive, or there is a client and a limit; the source's metadata cannot be written in that
            protocol; there is no such dtype, or it cannot hold a number and `on_overflow` is "raise".
        MissingDependencyError: `client` is an address, and distributed is not installed.
        TransportError: bytes could not be moved, or did not arrive as they were sent; or files of the source were replaced.
    """
    resume, replace = check_flag(resume, name="resume"), check_flag(replace, name="replace")
    progress = check_flag(progress, name="progress", other=None)
    check_choice(on_overflow, get_args(OverflowPolicy), name="on_overflow")
    if not isinstance(dst, (str, os.PathLike)) or not os.fspath(dst):
        raise ArgumentError(f"dst is {brief(dst)}; it must be a path or a URL", where="dst")
    rate = _rate(max_mb_per_s, max_requests_per_s, client)
    with ShardStore.open(src, storage_options) as store:
        store.validate().raise_if_bad()  # the sizes of a remote store have not been looked at by opening it
        metadata, kept, is_whole = _described(store, layers, tokens, protocol, dtype)
        name = store.name if metadata is store.metadata else metadata.hash
        url = os.fspath(dst).rstrip("/") or "/"
        head, slash, tail = url.rpartition("/")
        if tail == name:  # the copy itself is named, not the folder above it
            url = head or slash or "."
        root, rounding = open_transport(url, dst_storage_options), None
        copy = Copy(store, root, metadata, rate, kept, on_overflow, is_whole)
        make_copy(copy, resume=resume, replaces=replace, client=client, progress=progress)
        if copy.rounds:
            rounding = copy.report()
        if dtype is not None and rounding is None:
            rounding = RoundingReport(dtype, dtype, metadata.layout.n_examples * metadata.layout.vectors_per_example)
    return Copied(f"{url.rstrip('/')}/{name}" if root.local_path is None else root.at(name).url, rounding)


def make_copy(copy: Copy, *, resume: bool, replaces: bool, client: Client | str | None, progress: bool | None) -> None:
    """Copy all that is missing, and publish the copy.

    Args:
        copy: The copy.
        resume: Continue an unfinished copy, and accept a finished one.
        replaces: Delete what is there instead, finished or not, and copy again.
        client: A dask cluster whose workers copy the shards; None is threads of this process.
        progress: As in `create_store`.

    Raises:
        SaevStoreError: see `copy_store`.
    """
    work, was = copy.work, identity_now(copy.store)
    if work.is_published():
        if _is_done(copy, resume=resume, replaces=replaces):
            return
        resume = True
    copy.check_token_arrays()
    _begin(copy, resume=resume, replaces=replaces)
    layout, receipts = work.layout, work.receipts(range(work.layout.n_shards))
    there = {shard_idx: receipt for shard_idx, receipt in enumerate(receipts) if receipt is not None}
    wrong = differing(
        {shard_idx: receipt.nbytes for shard_idx, receipt in there.items()},
        lambda shard_idx: copy.is_kept(shard_idx, there[shard_idx]),
        is_disk=work.is_disk,
        progress=progress,
    )
    for shard_idx in wrong:
        work.forget(shard_idx)
    missing = [shard_idx for shard_idx in range(layout.n_shards) if shard_idx not in there or shard_idx in wrong]
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
    publish(work, copy.documents)
    copy.root.close()  # a map of a shorter file must not answer for the finished one


def _copied(copy: Copy, shards: Sequence[int], client: Client | str | None) -> Generator[int]:
    """Copy shards, in threads or by a cluster; their lengths, in order. No thread works any more when it has ended."""
    if client is not None:
        yield from map_shards(replaced(copy, store=copy.store.unmapped()).copy_shard, shards, client)
        return
    with ThreadPoolExecutor(min(2 * n_cores(), _MAX_THREADS), "saev-store-copy") as pool:
        try:
            for future in [pool.submit(copy.copy_shard, shard_idx) for shard_idx in shards]:
                yield future.result()
        except BaseException:
            copy.stopped.set()  # the others end at their next block
            pool.shutdown(cancel_futures=True)
            raise


def _begin(copy: Copy, *, resume: bool, replaces: bool) -> None:
    """Begin the copy, or continue what was begun."""
    work, origins = copy.work, copy.origins()
    is_new = work.begin()
    if not is_new and not resume:
        raise IncompleteStoreError(
            "an unfinished copy is there", where=work.url, remedy="Continue it with resume=True."
        )
    raw = read(work.work, _ORIGIN)
    there = None if raw is None else raw.decode(errors="replace")
    is_other = bool(names(work.work, "receipts")) if there is None else there not in origins
    if is_other and (there is None or not replaces):
        raise IncompleteStoreError(
            "an unfinished store of something else is there: of another recording, or with another on_overflow",
            where=work.url,
            remedy="Finish it, or throw it away with `discard_unfinished`, or copy elsewhere.",
        )
    for shard_idx in range(work.layout.n_shards) if is_other else ():
        work.forget(shard_idx)
    if is_other:
        copy.root.delete(work.name)  # labels and documents, too
    if there is None:
        create(work.work, _ORIGIN, origins[0].encode())
    else:
        work.work.put(_ORIGIN, origins[0].encode())


def _is_done(copy: Copy, *, resume: bool, replaces: bool) -> bool:
    """Return True if the finished store there is this copy; else it is deleted with `replaces`, or an error."""
    work, theirs = copy.work, load_digests(copy.work.store)
    fault = "a store without digests.json, which every copy has, is there"
    if theirs is not None:
        fault = "" if copy.is_made(theirs) else "a store of the same metadata that is not a copy of this one is there"
        try:
            with ShardStore.open(work.store) as there:
                there.validate().raise_if_bad()
        except SaevStoreError as error:
            fault = fault or f"the copy is finished, but was damaged since: {error.message}"
    if not fault and resume:
        work.remove()
        return True
    if fault and replaces and _is_source(copy):
        fault, replaces = "the source itself is there", False
    if theirs is None or not (fault and replaces):
        raise StoreExistsError(
            fault or "the copy is there already",
            where=work.url,
            remedy="Open it, or copy elsewhere; replace=True deletes it, and copies again.",
        )
    work.remove()  # what a publisher that was killed has left
    work.claim()
    # What a kill leaves is a damaged store, which the same call replaces, or digests and an unfinished copy.
    others = [name for name in names(work.store) if name not in {METADATA_NAME, DIGESTS_NAME}]
    each(work.store, work.store.delete, others)
    work.store.delete(METADATA_NAME)
    copy.root.delete(work.name)
    return False


def _is_source(copy: Copy) -> bool:
    """Return True if the store there is the source, which may have several addresses: a file of one is in the other."""
    probe, place = f"{TEMP_PREFIX}{uuid4().hex}", copy.work.store
    place.put(probe, b"1")
    try:
        return read(copy.store.transport, probe) is not None
    finally:
        place.delete(probe)


def _rate(max_mb_per_s: object, max_requests_per_s: object, client: object) -> Rate | None:
    """The limit of a copy; None if there is none."""
    if max_mb_per_s is None and max_requests_per_s is None:
        return None
    if client is not None:
        raise ArgumentError(
            "there are a client and a limit, which each worker would count by itself",
            where="client",
            remedy="Copy without a limit, with fewer workers; or without a client.",
        )
    most = float("inf")
    return Rate(
        most if max_mb_per_s is None else 1e6 * check_number(max_mb_per_s, name="max_mb_per_s"),
        most if max_requests_per_s is None else check_number(max_requests_per_s, name="max_requests_per_s"),
    )


def _described(
    store: ShardStore, layers: Sequence[LayerKey] | None, tokens: Tokens, protocol: str | None, dtype: str | None
) -> tuple[Metadata, slice, bool]:
    """The metadata of a copy, the positions of its tokens, and True if it has all vectors, in files as those of the source.

    Raises:
        ArgumentError, LayerNotFoundError, SelectionError: see `copy_store`.
    """
    if protocol is not None:
        check_choice(protocol, tuple(WRITABLE_VERSIONS), name="protocol")
    if dtype is not None:
        check_choice(dtype, tuple(ITEMSIZES), name="dtype")
    layout = store.layout
    kept = row_space(layout, tokens=tokens).tokens
    n_kept = kept.count + (tokens == "special")  # the protocol has no store without content
    chosen = tuple(range(layout.n_layers))
    if layers is not None:
        if not isinstance(layers, Sequence) or isinstance(layers, str) or not layers:
            remedy = f"Choose some of {list(layout.layer_keys)}."
            raise ArgumentError(
                f"layers is {brief(layers)}; it must be a list of layers", where="layers", remedy=remedy
            )
        chosen = tuple(sorted({layout.layer_index(layer) for layer in layers}))
    is_whole = len(chosen) == layout.n_layers and n_kept == layout.tokens_per_example
    metadata = store.metadata if is_whole else part_of(store.metadata, chosen, kept.start, n_kept)
    if dtype is not None and dtype != metadata.dtype:
        arrays = {name: store.token_arrays.declared(name).dtype for name in store.token_arrays}
        metadata, is_whole = in_dtype(metadata, dtype, protocol=protocol, token_arrays=arrays), False
    elif protocol is not None:
        metadata = in_protocol(metadata, protocol)
    return metadata, slice(kept.start, kept.start + n_kept), is_whole
