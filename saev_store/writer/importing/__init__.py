"""Importing: arrays, and whatever else gives examples in order, become stores."""

# pyright: reportUnnecessaryIsInstance=false

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, Literal, cast

import numpy as np

from saev_store.core.dtypes import StoredDtype
from saev_store.core.layout import IntArray
from saev_store.documents import new_metadata
from saev_store.errors import ArgumentError, brief
from saev_store.store.store import ShardStore
from saev_store.transport import open_transport
from saev_store.writer._inputs import NonfinitePolicy, OverflowPolicy
from saev_store.writer.importing._arrays import (
    ArrayAxes,
    ArrayExamples,
    checked_token_arrays,
    identity,
    stored_dtype,
)
from saev_store.writer.importing._cluster import import_on_cluster
from saev_store.writer.importing._examples import MAX_BLOCK_BYTES, Block, Examples
from saev_store.writer.importing._write import ImportOptions, import_examples

if TYPE_CHECKING:
    from distributed import Client

__all__ = [
    "MAX_BLOCK_BYTES",
    "Block",
    "Examples",
    "ImportOptions",
    "check_options",
    "from_array",
    "import_examples",
    "stored_dtype",
]


def from_array(
    array: object,
    root: str | os.PathLike[str],
    *,
    family: str,
    ckpt: str,
    layers: Sequence[int] | IntArray | None = None,
    cls_token: bool = False,
    dims: Sequence[str] | None = None,
    dtype: StoredDtype | None = None,
    token_arrays: Mapping[str, object] | None = None,
    hook_points: Sequence[str] | None = None,
    text: Mapping[str, object] | None = None,
    data: Mapping[str, object] | None = None,
    dataset: str | os.PathLike[str] | None = None,
    max_tokens_per_shard: int = 2_400_000,
    max_block_bytes: int = MAX_BLOCK_BYTES,
    resume: bool | Literal["auto"] = "auto",
    verify: bool = True,
    client: Client | str | None = None,
    storage_options: Mapping[str, object] | None = None,
    pad: bool | None = None,
    on_nonfinite: NonfinitePolicy = "raise",
    on_overflow: OverflowPolicy = "raise",
    progress: bool | None = None,
) -> ShardStore:
    """Write an array as a store, block by block; see `ShardStore.from_array`."""
    check_options(max_block_bytes, verify)
    axes = ArrayAxes(array, dims)
    n_examples, n_layers, n_tokens, d_model = axes.shape
    arrays, dtypes = checked_token_arrays(token_arrays, n_examples, n_tokens - bool(cls_token))
    named = _layers_of(array)
    labels = named if layers is None else layers
    if labels is None:
        raise ArgumentError(
            "the labels of the layers are not known",
            where="layers",
            remedy="Pass one for each entry of that axis: layers=[…].",
        )
    if isinstance(labels, str) or not isinstance(labels, (Sequence, np.ndarray)):
        raise ArgumentError(f"layers is {brief(labels)}; it must be a list of labels", where="layers")
    if data is not None and not isinstance(data, Mapping):
        raise ArgumentError(f"data is {brief(data)}; it must be a mapping, to which `imported` is added", where="data")
    if len(labels) != n_layers:
        raise ArgumentError(f"{len(labels)} layers for an array that has {n_layers}", where="layers")
    store_dtype = stored_dtype(axes.dtype, dtype, axes.array)
    # Labels alone need no protocol 3.0: stores of all versions may have them.
    says_more = store_dtype != "float32" or hook_points is not None or text is not None or set(dtypes) - {"labels"}
    metadata = new_metadata(
        family=family, ckpt=ckpt, layers=labels, content_tokens_per_example=n_tokens - bool(cls_token), cls_token=cls_token,
        d_model=d_model, n_examples=n_examples, max_tokens_per_shard=max_tokens_per_shard,
        data={**(data or {"__class__": "Import"}), "imported": identity(axes, arrays)}, dataset=dataset, dtype=store_dtype,
        hook_points=hook_points, token_arrays=dtypes if says_more else None, text=text,
    )  # fmt: skip
    recorded = list(metadata.layout.layers)
    if named is not None and recorded != named and set(recorded) == set(named):
        raise ArgumentError(
            f"the layers are given as {recorded}; by the array's coordinate they are {named}",
            where="layers",
            remedy="Give them in that order, or not at all.",
        )
    examples = ArrayExamples(axes, arrays, metadata)
    options = ImportOptions(resume, verify, max_block_bytes, pad, on_nonfinite, on_overflow, progress)
    transport = open_transport(root, storage_options)
    if client is None:
        import_examples(examples, transport, options)
    else:
        import_on_cluster(examples, transport.url, storage_options, options, client)
    return ShardStore.open(transport.at(metadata.hash))


def check_options(max_block_bytes: object, verify: object) -> None:
    """Refuse options of an import that are none.

    Raises:
        ArgumentError: one breaks its rule.
    """
    if not isinstance(max_block_bytes, int) or isinstance(max_block_bytes, bool) or max_block_bytes < 1:
        raise ArgumentError(
            f"max_block_bytes is {brief(max_block_bytes)}; it must be a positive integer", where="max_block_bytes"
        )
    if not isinstance(verify, bool):
        raise ArgumentError(f"verify is {brief(verify)}; it must be True or False", where="verify")


def _layers_of(array: object) -> list[int] | None:
    """The labels of layers that an array of xarray has as a coordinate."""
    coordinates = getattr(array, "coords", None)
    if isinstance(coordinates, Mapping) and "layer" in coordinates:
        return cast("list[int]", cast("Any", coordinates["layer"]).to_numpy().reshape(-1).tolist())
    return None
