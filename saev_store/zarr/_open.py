"""Make the Zarr view of an opened store."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Literal, cast

from zarr.abc.store import Store

from saev_store.core.chunk_grid import ChunkGrid, Shape, default_chunk
from saev_store.errors import ArgumentError
from saev_store.zarr._keys import TensorKeys
from saev_store.zarr._view import ZarrView
from saev_store.zarr.documents import attributes_of

if TYPE_CHECKING:
    from saev_store.store.store import ShardStore

Chunks = Literal["auto"] | Sequence[int]
Sharded = Literal["auto"] | bool

#: From zarr 3.3 on parts of a shard are fetched together; before, inner chunks came one after the other.
_CAN_READ_SHARDS = hasattr(Store, "get_ranges")


def open_view(store: ShardStore, *, chunks: Chunks = "auto", sharded: Sharded = "auto") -> ZarrView:
    """A read-only Zarr store over a store's shards: what `ShardStore.as_zarr` gives.

    Args:
        store: The opened store.
        chunks: Shape of a chunk over (example, layer, token, d_model). `"auto"` takes what suits the transport: many
            whole examples of a local store, single layers of single examples elsewhere. Axes left of one pivot axis have
            length 1, axes right of it are whole, and the length on the pivot divides its axis.
        sharded: Make each shard one key with `chunks` as its inner chunks, which are then read many at a time. `"auto"`
            does so for remote stores, if zarr is 3.3 or newer; older versions cannot.

    Raises:
        ArgumentError: `chunks` is no such shape (the message has the nearest ones), or zarr is too old for `sharded`.
        DocumentError: `labels.bin` has another size than the documents imply.
    """
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
        labelled=store.has_labels,
    )
    readable = {shard: n * layout.example_nbytes for shard, n in store.readable_examples.items()}
    return ZarrView(transport, keys, readable=readable)


def _as_shape(chunks: Sequence[int]) -> object:
    """Plain integers, where the values are integers; `ChunkGrid` checks the rest."""
    try:
        return tuple(int(n) if hasattr(n, "__index__") and not isinstance(n, bool) else n for n in chunks)
    except TypeError:
        raise ArgumentError(
            f"a {type(chunks).__name__} is no chunk shape: pass four integers", where="chunks"
        ) from None
