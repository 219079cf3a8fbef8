"""Copying a store from any address to any other, checked byte by byte; or only some layers or tokens, as a new store."""

# pyright: reportUnnecessaryIsInstance=false

from __future__ import annotations

import contextlib
import os
from collections.abc import Mapping, Sequence
from typing import NamedTuple, cast

from saev_store.core.dtypes import StoredDtype
from saev_store.core.indexing import Progression
from saev_store.core.rows import Tokens
from saev_store.documents import WRITABLE_VERSIONS, Metadata, new_metadata, parse_json
from saev_store.errors import ArgumentError, DocumentError, brief
from saev_store.store.store import ShardStore
from saev_store.transport import LimitTransport, Rate, Transport, open_transport
from saev_store.writer.copying._layers import copy_layers, kept_tokens, part_of
from saev_store.writer.copying._whole import copy_whole

__all__ = ["copy_store"]

Url = str | os.PathLike[str]


def copy_store(
    src: Url,
    dst: Url,
    *,
    layers: Sequence[int] | None = None,
    tokens: Tokens = "all",
    protocol: str | None = None,
    storage_options: Mapping[str, object] | None = None,
    dst_storage_options: Mapping[str, object] | None = None,
    resume: bool = True,
    replace: bool = False,
    max_mb_per_s: float | None = None,
    max_requests_per_s: float | None = None,
    progress: bool | None = None,
) -> str:
    """The address of a complete, checked copy of a store, made below `dst`.

    Without `layers` and `tokens` the copy has the same folder name, the same documents and the same vectors, byte for byte. Every
    block is digested while it is read (and compared with the source's digests.json where there is one), and read back
    from the copy and compared. The copy always has a digests.json. Zeros that pad the last shard are made anew: as a
    hole on this machine, not at all on object stores. `metadata.json` comes last, so a partial copy never opens.

    With `layers` or `tokens` a new store is written that holds only these layers, in the order of the source, and only
    these tokens, with a hash of its own and a `provenance.json` that names its origin. Where the source has a digests.json, all
    of it is read and compared first: the copy's own digests would call damaged vectors right. The protocol has no store
    without content, so `tokens="special"` includes the first content token.

    With `protocol` the documents are written as those of that protocol version, so the folder has another name; keys that the
    version does not know are left out. The vectors stay as they are. On one disk the shards are clones of the source's files
    or, where the file system has no clones, hard links to them, and are not read: the copy keeps the source's digests, and what
    changes a shard in place changes both stores. (Nothing in this package does.)

    Between two places of one service that are opened with the same options the service copies whole shards by itself, and
    this machine only reads the copy to compare it with the source's digests (and the source, where it has none).

    Either way the same call continues after an interruption, at the next shard.

    Args:
        src: The store to copy, a path or URL.
        dst: The folder in which the copy's folder `<HASH>` is made; naming that folder itself is fine, too.
        layers: Labels of the layers to keep; None is all of them.
        tokens: `"content"` leaves special tokens out; `"special"` keeps them and the first content token.
        protocol: "1.0.0", "2.0" or "2.1"; None keeps the source's. Programs that insist on the keys of 2.1 read "2.1" only.
        storage_options: For the source's file system.
        dst_storage_options: For the destination's file system.
        resume: Continue an unfinished copy, and accept a finished one; False refuses both.
        replace: Delete a copy of an earlier recording with the same metadata, and copy again; False refuses that. Recordings
            are told apart by the digests of the source.
        max_mb_per_s: No more than so many megabytes (10**6 bytes) move in a second, read and written together.
        max_requests_per_s: No more requests than so many in a second, to both places together.
        progress: A bar on standard error; None shows it on a terminal.

    Raises:
        NotFoundError, DocumentError, CorruptShardError: the source is no whole store, or does not match its digests.
        LayerNotFoundError, SelectionError: it does not hold one of `layers`, or has no such tokens.
        StoreExistsError: another store, a copy of another recording (unless `replace`), or with `resume=False` this one already
            exists there.
        IncompleteStoreError: `resume` is False and there is an unfinished copy, or the folder holds files of another program.
        WriterConflictError: another process is copying to there.
        ArgumentError: a limit is not positive, or the source's metadata cannot be written in that protocol.
        TransportError: bytes could not be moved, or did not arrive as they were sent.
    """
    rate = Rate(None if max_mb_per_s is None else max_mb_per_s * 1e6, max_requests_per_s)

    def opened(url: Url, options: Mapping[str, object] | None) -> Transport:
        transport = open_transport(url, options)
        return transport if max_mb_per_s is None and max_requests_per_s is None else LimitTransport(transport, rate)

    with ShardStore.open(opened(src, storage_options)) as store:
        store.validate().raise_if_bad()  # a remote store's sizes have not been looked at by opening it
        target = target_of(store, dst, layers, tokens, protocol)
        to = opened(target.root, dst_storage_options)
        if target.is_whole:
            copy_whole(store, to, target.metadata, resume=resume, progress=progress, replace=replace)
        else:
            copy_layers(
                store, target.metadata, to, tokens=target.tokens, resume=resume, progress=progress, replace=replace
            )
    return target.url


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
    store: ShardStore, dst: Url, layers: Sequence[int] | None, tokens: Tokens, protocol: str | None = None
) -> Target:
    """Where `copy_store` copies to when it is called like this, and what."""
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
    metadata = store.metadata if protocol is None else in_protocol(store.metadata, protocol)
    if not is_whole:
        metadata = part_of(metadata, chosen, kept)
    name = store.name if metadata is store.metadata else metadata.hash
    root = os.fspath(dst).rstrip("/") or "/"
    head, slash, tail = root.rpartition("/")
    if tail == name:  # the copy itself is named, not the folder above it
        root = head or slash or "."
    return Target(root, name, metadata, kept, is_whole)


def in_protocol(metadata: Metadata, protocol: str) -> Metadata:
    """The same as a document of another protocol version, without keys that it does not know.

    Raises:
        ArgumentError: the version is not written, or wants an object for `data`, which is a string that is not one.
    """
    version = WRITABLE_VERSIONS.get(protocol)
    if version is metadata.version:
        return metadata
    data = metadata.data
    if version is not None and version.data != "string" and isinstance(data, str):  # of 2.1, where ours is JSON
        with contextlib.suppress(DocumentError):
            data = parse_json(data.encode(), where="data", max_nbytes=len(data.encode()))
    knows_dataset = version is None or "dataset" in version.writes
    return new_metadata(
        protocol=protocol,
        family=metadata.family,
        ckpt=metadata.ckpt,
        layers=metadata.layers,
        content_tokens_per_example=metadata.content_tokens_per_example,
        cls_token=metadata.cls_token,
        d_model=metadata.d_model,
        n_examples=metadata.n_examples,
        max_tokens_per_shard=metadata.max_tokens_per_shard,
        data=cast("Mapping[str, object] | str", data),
        dataset=metadata.dataset if knows_dataset else None,
        pixel_agg=metadata.pixel_agg if knows_dataset else None,
        dtype=cast("StoredDtype", metadata.dtype),
        hook_points=metadata.hook_points,
        token_arrays={array.name: array.dtype for array in metadata.token_arrays},
        text=metadata.text,
    )
