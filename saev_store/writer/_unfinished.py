"""Unfinished stores: finds them, tells how far they are, discards them."""

from __future__ import annotations

import warnings
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from typing import TYPE_CHECKING

from saev_store.core.layout import Layout, shard_name
from saev_store.errors import IncompleteStoreError, SaevStoreError, SaevStoreWarning, StoreExistsError
from saev_store.transport import Lists, Transport
from saev_store.writer._blocks import part_shards
from saev_store.writer._claim import ShapingOptions, read_claim
from saev_store.writer._receipts import leading_receipts
from saev_store.writer.folder import DIGESTS, HIDDEN, LABELS, METADATA, SHARDS, TEMPORARY, Folder

if TYPE_CHECKING:
    from saev_store.documents import Metadata


def n_durable(folder: Folder, layout: Layout, options: ShapingOptions) -> int:
    """How many examples a resume of all parts would keep, if nothing is damaged."""
    n_examples = 0
    for rank in range(options.world):
        shards = part_shards(layout.n_shards, rank, options.world)
        for receipt in leading_receipts(folder, layout, shards, options.block_bytes):
            n_examples += receipt.used_nbytes // layout.example_nbytes
    return n_examples


def check_no_foreigner(folder: Folder, names: Sequence[str] | None) -> None:
    """Refuse a folder that another tool has begun; `names` are those in it, None where they cannot be listed."""
    if names is None:  # look for what a store of any tool begins with
        names = [name for name in (shard_name(0), SHARDS, LABELS) if folder.exists(name)]
    found = sorted(name for name in names if name != HIDDEN and not name.startswith(TEMPORARY))
    if found:
        shown = ", ".join(found[:3]) + (", …" if len(found) > 3 else "")
        raise IncompleteStoreError(
            f"the folder holds {shown}, but neither metadata.json nor a claim of this package: "
            "most likely another tool's dump that was cut short",
            where=folder.url,
            remedy="It cannot be resumed, and is never overwritten: move it away, or write elsewhere.",
        )


@dataclass(frozen=True)
class Unfinished:
    """A store below some root that was begun by this package and never published.

    Attributes:
        name: Its folder.
        metadata: The text of the metadata.json that it will have.
    """

    name: str
    metadata: str


def unfinished(root_transport: Transport) -> tuple[Unfinished, ...]:
    """The unfinished stores below a root, by name; empty where the back end cannot list."""
    if not isinstance(root_transport, Lists):
        return ()
    found: list[Unfinished] = []
    try:
        entries = root_transport.list()
    except SaevStoreError:  # no such folder yet
        return ()
    for entry in entries:
        name = entry.path.strip("/")
        if not entry.is_dir or name.startswith("."):
            continue
        folder = Folder(root_transport, name)
        try:
            claim = read_claim(folder)
            if claim is not None and folder.document(METADATA) is None:
                found.append(Unfinished(name, claim.metadata))
        except SaevStoreError as error:
            warnings.warn(f"{folder.url}: {error.message}", SaevStoreWarning, stacklevel=2)
    return tuple(found)


def discard_unfinished(root_transport: Transport, metadata: Metadata) -> None:
    """Delete what was written of a store that is not published. Fine if there is nothing.

    Raises:
        StoreExistsError: it is published.
        IncompleteStoreError: what lies there was not begun by this package.
        WriterConflictError: a process is still writing it.
    """
    folder = Folder(root_transport, metadata.hash)
    if folder.document(METADATA) is not None:
        raise StoreExistsError(
            "the store is complete; only unfinished ones are discarded",
            where=folder.url,
            remedy="Delete the folder yourself if that is what you want.",
        )
    claim = read_claim(folder)
    if claim is None:
        check_no_foreigner(folder, folder.names())
        folder.delete(HIDDEN)
        return
    with ExitStack() as held:
        for rank in range(claim.options.world):
            held.enter_context(folder.lock(f"part{rank:05d}"))
        held.enter_context(folder.lock("publish"))
        # The hidden files go last: a crash in between leaves something that can still be discarded.
        names = folder.names()
        if names is None:
            names = [*(shard_name(i) for i in range(metadata.layout.n_shards)), LABELS, SHARDS, DIGESTS]
        for name in names:
            if name != HIDDEN:
                folder.delete(name)
        folder.delete(HIDDEN)
    folder.writes.delete(folder.name)
