"""From an opened store and a wish for chunks to its Zarr view."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Literal, cast

from zarr.abc.store import Store

from saev_store.chunks import ChunkGrid, Shape, default_chunk
from saev_store.documents import labels_nbytes
from saev_store.errors import ArgumentError, DocumentError, NotFoundError
from saev_store.names import LABELS_NAME
from saev_store.zarr._documents import attributes_of
from saev_store.zarr._keys import TensorKeys
from saev_store.zarr._view import ZarrView

if TYPE_CHECKING:
    from saev_store.store import ShardStore

Chunks = Literal["auto"] | Sequence[int]
Sharded = Literal["auto"] | bool

#: From zarr 3.3 on parts of a shard are fetched together; before, inner chunks came one after the other.
_CAN_READ_SHARDS = hasattr(Store, "get_ranges")


def open_view(store: ShardStore, *, chunks: Chunks = "auto", sharded: Sharded = "auto") -> ZarrView:
    """See `ShardStore.as_zarr`."""
    layout, transport = store.layout, store.transport
    max_gap_bytes = transport.cost.max_gap_bytes
    is_mapped = max_gap_bytes == float("inf")
    if sharded not in {"auto", True, False}:
        raise ArgumentError(f'{sharded!r} is not one of True, False and "auto"', where="sharded")
    if sharded is True and not _CAN_READ_SHARDS:
        raise ArgumentError(
            "the installed zarr fetches the inner chunks of a shard one after the other",
            where="sharded",
            remedy="Install zarr >= 3.3 (which needs Python 3.12), or leave `sharded` alone.",
        )
    if isinstance(chunks, str):
        if chunks != "auto":
            raise ArgumentError(f'{chunks!r} is no chunk shape: pass four integers or "auto"', where="chunks")
        shape = default_chunk(layout, max_gap_bytes=max_gap_bytes)
    else:
        shape = cast("Shape", _as_shape(chunks))
    is_sharded = (_CAN_READ_SHARDS and not is_mapped) if sharded == "auto" else bool(sharded)
    keys = TensorKeys(
        ChunkGrid(layout, shape, sharded=is_sharded),
        attributes_of(store.metadata, url=store.url),
        labelled=_has_labels(store),
    )
    readable = {shard: n * layout.example_nbytes for shard, n in store._opened.readable.items()}
    return ZarrView(transport, keys, readable=readable)


def _as_shape(chunks: Sequence[int]) -> object:
    """Plain integers, where that is what was meant; `ChunkGrid` judges the rest."""
    try:
        return tuple(int(n) if hasattr(n, "__index__") and not isinstance(n, bool) else n for n in chunks)
    except TypeError:
        raise ArgumentError(
            f"a {type(chunks).__name__} is no chunk shape: pass four integers", where="chunks"
        ) from None


def _has_labels(store: ShardStore) -> bool:
    """Whether there is a `labels.bin`; far away that is one question for its size, nothing is read."""
    if store._has_labels is not None:
        return store._has_labels
    try:
        size = store.transport.size(LABELS_NAME)
    except NotFoundError:
        return False
    if size != labels_nbytes(store.layout):
        raise DocumentError(
            f"has {size} bytes; one byte for each content token is {labels_nbytes(store.layout)}",
            where=f"{store.url}/{LABELS_NAME}",
            remedy="Restore the file, or remove it to read the store without labels.",
        )
    return True
