"""Copying a store from any address to any other, checked byte by byte; or a part of it, or in another dtype, as a new store."""

# pyright: reportUnnecessaryIsInstance=false

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, NamedTuple, Self, get_args

from saev_store.core.arguments import check_flag, check_number
from saev_store.core.dtypes import StoredDtype
from saev_store.core.indexing import Progression
from saev_store.core.layout import LayerKey
from saev_store.core.rows import Tokens
from saev_store.documents import Metadata
from saev_store.errors import ArgumentError, brief
from saev_store.store.store import ShardStore
from saev_store.transport import Transport, open_transport
from saev_store.writer._inputs import OverflowPolicy
from saev_store.writer.copying._finished import check_bytes
from saev_store.writer.copying._layers import copy_layers, copy_layers_on_cluster, kept_tokens
from saev_store.writer.copying._limit import Rate, limited
from saev_store.writer.copying._metadata import in_dtype, in_protocol, part_of
from saev_store.writer.copying._rounding import RoundingReport, unchanged
from saev_store.writer.copying._whole import copy_whole

if TYPE_CHECKING:
    from distributed import Client

__all__ = ["Copied", "RoundingReport", "check_bytes", "copy_store"]

Url = str | os.PathLike[str]


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
    """The address of a complete, checked copy of a store, made below `dst`.

    Without `layers`, `tokens` and `dtype` the copy has the same folder name, the same documents and the same vectors, byte for byte. Every
    block is digested while it is read (and compared with the source's digests.json where there is one), and read back
    from the copy and compared. The copy always has a digests.json. Zeros that pad the last shard are made anew: as a
    hole on this machine, not at all on object stores. `metadata.json` comes last, so a partial copy never opens.

    With `layers` or `tokens` a new store is written that holds only these layers, in the order of the source, and only
    these tokens, with a hash of its own and a `provenance.json` that names its origin. Where the source has a digests.json, the
    examples are read, once (of examples above 64 MiB what is kept), and compared, and an entry that is missing is an error: the copy's own digests would call damaged vectors right. The protocol has no store
    without content, so `tokens="special"` includes the first content token.

    With `protocol` the documents are written as those of that protocol version, so the folder has another name; keys that the
    version does not know are left out. The vectors stay as they are. On one disk the shards are clones of the source's files
    or, where the file system has no clones, hard links to them, and are not read: the copy keeps the source's digests, and what
    changes a shard in place changes both stores. (Nothing in this package does.)

    With `dtype` a new store of that dtype is written, with a hash of its own: as protocol 2.0 where that can say everything, else as
    3.0. Numbers are rounded to nearest even. `rounding` of the result, which is also `conversion` in the copy's
    `provenance.json`, says what that changed (`RoundingReport`); it is the same however often the copy was interrupted.
    A store that was recorded from a bfloat16 model shrinks to half without a changed bit, and the report says so. Keys that no
    version defines are kept, and `data` that is no object becomes `{"opaque": …}`.

    Between two places of one service that are opened with the same options the service copies whole shards by itself, and
    this machine only reads the copy to compare it with the source's digests (and the source, where it has none).

    Either way the same call continues after an interruption, at the next shard.

    Args:
        src: The store to copy, a path or URL.
        dst: The folder in which the copy's folder `<HASH>` is made; naming that folder itself is fine, too.
        layers: Labels of the layers to keep, or pairs (label, hook point); None is all of them.
        tokens: `"content"` leaves special tokens out; `"special"` keeps them and the first content token.
        protocol: "1.0.0", "2.0" or "2.1"; None keeps the source's. Programs that insist on the keys of 2.1 read "2.1" only.
        dtype: "bfloat16", "float16" or "float32"; None keeps the source's.
        on_overflow: What to do with finite numbers that become infinite in `dtype`: "raise", "warn" and store infinity, or
            "saturate" at its largest finite number. A copy that is continued has to be asked for with the same policy; only
            after "raise" another one is possible.
        storage_options: For the source's file system.
        dst_storage_options: For the destination's file system.
        resume: Continue an unfinished copy, and accept a finished one; False refuses both.
        replace: Delete a copy that is damaged, or of an earlier recording with the same metadata, and copy again; False refuses that.
            A finished copy is compared with its own digests, and these with those of the source. A source that has none is
            read again for it.
        max_mb_per_s: No more than so many megabytes (10**6 bytes) move in a second, read and written together.
        max_requests_per_s: No more requests than so many in a second, to both places together.
        client: A `distributed.Client` or the address of a scheduler: its workers copy the files, a file for each task, or write
            the shards of a part or of another dtype. Without limits; both addresses must mean the same to all workers.
        progress: A bar on standard error; None shows it on a terminal.

    Raises:
        NotFoundError, DocumentError, CorruptShardError: the source is no whole store, or does not match its digests, or a finished copy
            does not match its own.
        LayerNotFoundError, SelectionError: it does not hold one of `layers`, or has no such tokens.
        StoreExistsError: another store, a copy of another recording (unless `replace`), or with `resume=False` this one already
            exists there.
        IncompleteStoreError: `resume` is False and there is an unfinished copy, or the folder holds files of another program.
        WriterConflictError: another process is copying to there.
        ArgumentError: a limit is not positive, there is a client and a limit, the source's metadata cannot be written in that protocol, there is no such dtype, or
            it cannot hold a number and `on_overflow` is "raise".
        MissingDependencyError: `client` is an address, and distributed is not installed.
        TransportError: bytes could not be moved, or did not arrive as they were sent; no scheduler answers, or the workers that had a
            file died, one after the other.
    """
    resume, replace = check_flag(resume, name="resume"), check_flag(replace, name="replace")
    progress = check_flag(progress, name="progress", other=None)
    if on_overflow not in get_args(OverflowPolicy):
        raise ArgumentError(
            f"on_overflow is {brief(on_overflow)}; it must be one of {get_args(OverflowPolicy)}", where="on_overflow"
        )
    if max_mb_per_s is not None:
        max_mb_per_s = check_number(max_mb_per_s, name="max_mb_per_s")
    if max_requests_per_s is not None:
        max_requests_per_s = check_number(max_requests_per_s, name="max_requests_per_s")
    if client is not None and (max_mb_per_s is not None or max_requests_per_s is not None):
        raise ArgumentError(
            "there are a client and a limit, which each worker would count by itself",
            where="client",
            remedy="Copy without a limit, with fewer workers; or without a client.",
        )
    rate = Rate(None if max_mb_per_s is None else max_mb_per_s * 1e6, max_requests_per_s)

    def opened(url: Url, options: Mapping[str, object] | None) -> Transport:
        transport = open_transport(url, options)
        return transport if max_mb_per_s is None and max_requests_per_s is None else limited(transport, rate)

    with ShardStore.open(opened(src, storage_options)) as store:
        store.validate().raise_if_bad()  # a remote store's sizes have not been looked at by opening it
        target = target_of(store, dst, layers, tokens, protocol, dtype)
        to = opened(target.root, dst_storage_options)
        if target.is_whole:
            copy_whole(store, to, target.metadata, resume=resume, progress=progress, replace=replace, client=client)
            rounding = None
        elif client is not None:
            rounding = copy_layers_on_cluster(
                client, store, target.metadata, to, tokens=target.tokens, on_overflow=on_overflow, resume=resume,
                progress=progress, replace=replace,
            )  # fmt: skip
        else:
            rounding = copy_layers(
                store, target.metadata, to, tokens=target.tokens, on_overflow=on_overflow, resume=resume, progress=progress,
                replace=replace,
            )  # fmt: skip
        if dtype is not None and rounding is None:
            layout = target.metadata.layout
            rounding = unchanged(dtype, layout.n_examples * layout.vectors_per_example)
    return Copied(target.url if to.local_path is None else to.at(target.name).url, rounding)


class Target(NamedTuple):
    """Where a copy goes, and what it will be.

    Attributes:
        root: The folder in which its folder is made.
        name: That folder.
        metadata: What describes it.
        tokens: Which tokens it has, by position.
        is_whole: Whether it has all vectors, in files as those of the source.
    """

    root: str
    name: str
    metadata: Metadata
    tokens: Progression
    is_whole: bool

    @property
    def url(self) -> str:
        """The copy's address."""
        return f"{self.root.rstrip('/')}/{self.name}"


def target_of(
    store: ShardStore,
    dst: Url,
    layers: Sequence[LayerKey] | None,
    tokens: Tokens,
    protocol: str | None = None,
    dtype: str | None = None,
) -> Target:
    """Where `copy_store` copies to when it is called like this, and what.

    Raises:
        ArgumentError, LayerNotFoundError, SelectionError: see `copy_store`.
    """
    if not isinstance(dst, (str, os.PathLike)) or not os.fspath(dst):
        raise ArgumentError(f"dst is {brief(dst)}; it must be a path or a URL", where="dst")
    if protocol is not None and not isinstance(protocol, str):
        raise ArgumentError(f"protocol is {brief(protocol)}; it must be a version such as '2.0'", where="protocol")
    chosen, kept = tuple(range(len(store.layers))), kept_tokens(store, tokens)
    if layers is not None:
        if not isinstance(layers, Sequence) or isinstance(layers, str):
            raise ArgumentError(f"layers is {brief(layers)}; it must be a list of layers", where="layers")
        wanted = {store.layout.layer_index(layer) for layer in layers}
        chosen = tuple(sorted(wanted))
        if not chosen:
            remedy = f"Choose some of {list(store.layout.layer_keys)}."
            raise ArgumentError("no layer is left to copy", where="layers", remedy=remedy)
    is_whole = len(chosen) == len(store.layers) and kept.count == store.layout.tokens_per_example
    metadata = store.metadata if is_whole else part_of(store.metadata, chosen, kept)
    if dtype is not None and dtype != metadata.dtype:
        arrays = {name: store.token_arrays.declared(name).dtype for name in store.token_arrays}
        metadata, is_whole = in_dtype(metadata, dtype, protocol=protocol, token_arrays=arrays), False
    elif protocol is not None:
        metadata = in_protocol(metadata, protocol)
    name = store.name if metadata is store.metadata else metadata.hash
    root = os.fspath(dst).rstrip("/") or "/"
    head, slash, tail = root.rpartition("/")
    if tail == name:  # the copy itself is named, not the folder above it
        root = head or slash or "."
    return Target(root, name, metadata, kept, is_whole)
