"""`copy_store`: copies a store from any address to any other, checked; or a part of it, or in another dtype, as a new store."""

# pyright: reportUnnecessaryIsInstance=false

from __future__ import annotations

import os
from collections.abc import Generator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing, suppress
from dataclasses import replace as replaced
from typing import TYPE_CHECKING, Literal

from saev_store._runtime.cluster import map_shards
from saev_store._runtime.progress import Progress
from saev_store._runtime.threads import n_cores
from saev_store.core.arguments import check_choice, check_flag
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
from saev_store.writer.copies import Copy, identity
from saev_store.writer.copy_metadata import in_dtype, in_protocol, part_of
from saev_store.writer.create import kept_shards
from saev_store.writer.digests import load_digests
from saev_store.writer.publish import publish
from saev_store.writer.work import create, each, names, read

if TYPE_CHECKING:
    from distributed import Client

Url = str | os.PathLike[str]
#: In the work folder: of which recording a copy is.
_ORIGIN = "origin.json"
#: Shards that are copied at once: each takes up to 200 MiB of memory, or two examples.
_MAX_THREADS = 8


def copy_store(
    src: Url,
    dst: Url,
    *,
    layers: Sequence[LayerKey] | None = None,
    tokens: Tokens = "all",
    protocol: str | None = None,
    dtype: StoredDtype | None = None,
    on_overflow: Literal["raise", "saturate"] = "raise",
    storage_options: Mapping[str, object] | None = None,
    dst_storage_options: Mapping[str, object] | None = None,
    replace: bool = False,
    client: Client | str | None = None,
    progress: bool | None = None,
) -> str:
    """Copy a store below `dst`, and return the address of the complete, checked copy.

    Without further arguments the copy has the same folder name, documents and vectors, byte for byte. While it is read, every block
    is compared with the source's digests.json, if there is one. The copy always has one.

    With `layers`, `tokens` or `dtype` the copy is a new store with a hash of its own, and a `provenance.json` that names its origin.
    Layers keep the order of the source. A store of another dtype is written as protocol 2.0 if that can hold everything, else as 3.0,
    without keys that the version does not know; numbers are rounded to nearest even.

    With `protocol` only the documents change. On one disk the shards are hard links of the source's files, if it has digests;
    they are not read then, and `validate(deep=True)` of the copy compares them.

    Up to eight shards are copied at once, each with up to 200 MiB of memory, or two examples if those are larger. `metadata.json`
    comes last, so a partial copy never opens. After an interruption the same call continues: whole shards are read again and kept.

    Args:
        src: The store to copy, a path or URL.
        dst: The folder in which the copy's folder `<HASH>` is made.
        layers: Labels of the layers to keep, or pairs (label, hook point); None is all of them.
        tokens: `"all"`, `"content"` or `"special"`, which includes the first content token.
        protocol: "1.0.0", "2.0", "2.1", or "3.0" for what those cannot hold; None keeps the source's. Programs that insist on the
            keys of 2.1 read "2.1" only.
        dtype: "bfloat16", "float16" or "float32"; None keeps the source's.
        on_overflow: What to do with finite numbers that become infinite in `dtype`: "raise", or "saturate" at its largest finite number.
        storage_options: For the source's file system.
        dst_storage_options: For the destination's file system.
        replace: Delete a finished store of that name that is not this copy, or is damaged, and copy again; False refuses. One without
            digests.json, which every copy has, is never deleted.
        client: A `distributed.Client` or the address of a scheduler: its workers copy the shards, one for each task. Both addresses
            must mean the same to all workers.
        progress: A bar on standard error; None shows it on a terminal.

    Raises:
        NotFoundError, DocumentError, CorruptShardError: the source is not a whole store, or does not match its digests.
        LayerNotFoundError, SelectionError: it does not hold `layers` or `tokens`.
        StoreExistsError: another store is there, and `replace` is False.
        IncompleteStoreError: an unfinished store of something else is there.
        WriterConflictError: another process is copying to there.
        ArgumentError: an option breaks its rule, or that protocol or dtype cannot hold what the source has.
        TransportError: bytes could not be moved; or files of the source were replaced.
    """
    replace = check_flag(replace, name="replace")
    progress = check_flag(progress, name="progress", other=None)
    check_choice(on_overflow, ("raise", "saturate"), name="on_overflow")
    if not isinstance(dst, (str, os.PathLike)) or not os.fspath(dst):
        raise ArgumentError(f"dst is {brief(dst)}; it must be a path or a URL", where="dst")
    with ShardStore.open(src, storage_options) as store:
        store.validate().raise_if_bad()  # the sizes of a remote store have not been looked at by opening it
        metadata, kept, is_whole = _described(store, layers, tokens, protocol, dtype)
        name = store.name if metadata is store.metadata else metadata.hash
        root = open_transport(dst, dst_storage_options)
        copy = Copy(store, root, metadata, kept, on_overflow, is_whole)
        make_copy(copy, replaces=replace, client=client, progress=progress)
    return f"{os.fspath(dst).rstrip('/')}/{name}" if root.local_path is None else root.at(name).url


def make_copy(copy: Copy, *, replaces: bool, client: Client | str | None, progress: bool | None) -> None:
    """Copy all that is missing, and publish the copy; arguments and errors as of `copy_store`."""
    work, was = copy.work, identity(copy.store)
    if work.is_published() and _is_done(copy, replaces=replaces):
        return
    copy.check_token_arrays()
    _begin(copy)
    layout = work.layout
    there = kept_shards(work, work.receipts(range(layout.n_shards)), progress=progress)
    missing = [shard_idx for shard_idx in range(layout.n_shards) if shard_idx not in there]
    total = sum(map(layout.used_nbytes, missing))
    with Progress(total, "copying", shown=progress) as bar, closing(_copied(copy, missing, client)) as done:
        for nbytes in done:
            bar.advance(nbytes)
    if identity(copy.store) != was:
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
            copy.stopped.set()  # the others end at their next blocks
            pool.shutdown(cancel_futures=True)
            raise


def _begin(copy: Copy) -> None:
    """Begin the copy, or continue what was begun of the same recording, with the same policy."""
    work, origin = copy.work, f"{identity(copy.store)} {copy.on_overflow}".encode()
    work.begin()
    there = read(work.work, _ORIGIN)
    if there != origin if there else names(work.work, "receipts"):
        raise IncompleteStoreError(
            "an unfinished store of something else is there: of another recording, or with another on_overflow",
            where=work.url,
            remedy="Finish it, or throw it away with `discard_unfinished`, or copy elsewhere.",
        )
    create(work.work, _ORIGIN, origin)


def _is_done(copy: Copy, *, replaces: bool) -> bool:
    """Return True if the finished store there is this copy; else it is deleted with `replaces`, or an error."""
    work, theirs = copy.work, load_digests(copy.work.store)
    if theirs is not None and copy.is_made(theirs):
        with suppress(SaevStoreError), ShardStore.open(work.store) as there:
            there.validate().raise_if_bad()  # it may be damaged since
            work.remove()
            return True
    if theirs is None or not replaces or _is_source(copy):
        raise StoreExistsError(
            "a store of that name is there which is not a copy of this one, or was damaged since",
            where=work.url,
            remedy="Open it, or copy elsewhere; replace=True deletes it if it has digests.json, and copies again.",
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
    """Return True if what is there is the source, by whatever address: a file that is made in the one is in the other."""
    here, mark = copy.work.store, f"{TEMP_PREFIX}{os.urandom(8).hex()}"  # a name that no cache has seen
    here.create(mark, b"here")
    try:
        return read(copy.store.transport, mark) is not None
    finally:
        here.delete(mark)


def _described(
    store: ShardStore, layers: Sequence[LayerKey] | None, tokens: Tokens, protocol: str | None, dtype: str | None
) -> tuple[Metadata, slice, bool]:
    """The metadata of a copy, the positions of its tokens, and True if it has all vectors, in files as those of the source."""
    if protocol is not None:
        check_choice(protocol, tuple(WRITABLE_VERSIONS), name="protocol")
    if dtype is not None:
        check_choice(dtype, tuple(ITEMSIZES), name="dtype")
    layout = store.layout
    kept = row_space(layout, tokens=tokens).tokens
    n_kept = len(kept) + (tokens == "special")  # the protocol has no store without content
    chosen = tuple(range(layout.n_layers))
    if layers is not None:
        if not isinstance(layers, Sequence) or isinstance(layers, str) or not layers:
            raise ArgumentError(f"layers is {brief(layers)}; it must be a list of layers", where="layers")
        chosen = tuple(sorted({layout.layer_index(layer) for layer in layers}))
    is_whole = len(chosen) == layout.n_layers and n_kept == layout.tokens_per_example
    metadata = store.metadata if is_whole else part_of(store.metadata, chosen, kept.start, n_kept)
    if dtype is not None and dtype != metadata.dtype:
        arrays = {name: store.token_arrays.declared(name).dtype for name in store.token_arrays}
        metadata, is_whole = in_dtype(metadata, dtype, protocol=protocol, token_arrays=arrays), False
    elif protocol is not None:
        metadata = in_protocol(metadata, protocol)
    return metadata, slice(kept.start, kept.start + n_kept), is_whole
