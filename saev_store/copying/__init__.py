"""Copying a store from any address to any other, checked byte by byte; or only some of its layers, as a new store."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

from saev_store.errors import ArgumentError
from saev_store.transport import open_transport

if TYPE_CHECKING:
    from saev_store.store import ShardStore

__all__ = ["copy_store"]

Url = str | os.PathLike[str]


def copy_store(
    src: Url,
    dst: Url,
    *,
    layers: Sequence[int] | None = None,
    storage_options: Mapping[str, object] | None = None,
    dst_storage_options: Mapping[str, object] | None = None,
    resume: bool = True,
    progress: bool | None = None,
) -> str:
    """The address of a complete, checked copy of a store, made below `dst`.

    Without `layers` the copy has the same folder name, the same documents and the same vectors, byte for byte. Every
    block is digested while it is read (and compared with the source's digests.json where there is one), and read back
    from the copy and compared. The copy always has a digests.json. Zeros that pad the last shard are made anew: as a
    hole on this machine, not at all on object stores. `metadata.json` comes last, so a partial copy never opens.

    With `layers` a new store is written that holds only these layers, in the order of the source, with a hash of its
    own and a `provenance.json` that names its origin. Only the bytes of these layers are read.

    Either way the same call continues after an interruption, at the next shard.

    Args:
        src: The store to copy, a path or URL.
        dst: The folder in which the copy's folder `<HASH>` is made; naming that folder itself is fine, too.
        layers: Labels of the layers to keep; None, or all of them, copies the store as it is.
        storage_options: For the source's file system.
        dst_storage_options: For the destination's file system.
        resume: Continue an unfinished copy, and accept a finished one; False refuses both.
        progress: A bar on standard error; None shows it on a terminal.

    Raises:
        NotFoundError, DocumentError, CorruptShardError: the source is no whole store, or does not match its digests.
        LayerNotFoundError: it does not hold one of `layers`.
        StoreExistsError: another store, or with `resume=False` this one, lies there already.
        IncompleteStoreError: `resume` is False and an unfinished copy lies there, or something of another program.
        WriterConflictError: another process is copying to there.
        TransportError: bytes could not be moved, or did not arrive as they were sent.
    """
    from saev_store.copying._layers import copy_layers
    from saev_store.copying._whole import copy_whole
    from saev_store.store import ShardStore

    with ShardStore.open(src, storage_options) as store:
        store.validate().raise_if_bad()  # a remote store's sizes have not been looked at by opening it
        chosen = _chosen(store, layers)
        root = os.fspath(dst).rstrip("/") or "/"
        if chosen == store.layers:
            name = store.name
            root = _without(root, name)
            copy_whole(store, open_transport(root, dst_storage_options), resume=resume, progress=progress)
        else:
            metadata = store.metadata.replace(layers=list(chosen))
            name = metadata.hash
            root = _without(root, name)
            copy_layers(store, metadata, open_transport(root, dst_storage_options), resume=resume, progress=progress)
    return f"{root.rstrip('/')}/{name}"


def _chosen(store: ShardStore, layers: Sequence[int] | None) -> tuple[int, ...]:
    if layers is None:
        return store.layers
    wanted = {store.layers[store.layout.layer_index(layer)] for layer in layers}
    if not wanted:
        raise ArgumentError("no layer is left to copy", where="layers", remedy=f"Choose some of {list(store.layers)}.")
    return tuple(layer for layer in store.layers if layer in wanted)


def _without(root: str, name: str) -> str:
    """`root`, or the folder above it when it names the copy itself."""
    head, slash, tail = root.rpartition("/")
    return (head or slash or ".") if tail == name else root
