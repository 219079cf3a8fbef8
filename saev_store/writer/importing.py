"""Imports: arrays, and whatever else gives examples in order, become stores."""

# pyright: reportUnnecessaryIsInstance=false

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol, cast

import numpy as np
import numpy.typing as npt

from saev_store._runtime.cluster import map_shards
from saev_store.core.dtypes import StoredDtype, narrowed
from saev_store.core.layout import IntArray, Layout
from saev_store.documents import Metadata, new_metadata
from saev_store.errors import ArgumentError, brief
from saev_store.store.store import ShardStore
from saev_store.transport import Transport, open_transport
from saev_store.writer.create import create_store
from saev_store.writer.import_arrays import ArrayBlock, ArrayExamples, stored_dtype
from saev_store.writer.inputs import NonfinitePolicy, OverflowPolicy, check_overflow
from saev_store.writer.publish import finalize_store
from saev_store.writer.work import Work, part_shards

if TYPE_CHECKING:
    from distributed import Client

#: How much of a source is read, and kept in memory, at a time.
MAX_BLOCK_BYTES = 256 << 20
#: A scheduler spends some milliseconds on a part.
MAX_PARTS = 1024


class Examples(Protocol):
    """A source of examples in order, which `data["imported"]` of the new store's metadata identifies."""

    @property
    def metadata(self) -> Metadata: ...

    def blocks(self, first: int, end: int, max_block_bytes: int) -> Iterator[ArrayBlock]:
        """The examples from `first` to `end`, in order, in blocks of at most so many bytes, or of one example."""
        ...


class ImportOptions(NamedTuple):
    """Options of an import; see `ShardStore.from_array`."""

    on_nonfinite: NonfinitePolicy = "raise"
    on_overflow: OverflowPolicy = "raise"
    progress: bool | None = None


def import_array(
    array: object,
    root: str | os.PathLike[str],
    options: ImportOptions,
    *,
    layers: Sequence[int] | IntArray | None,
    dims: Sequence[str] | None,
    dtype: StoredDtype | None,
    token_arrays: Mapping[str, object] | None,
    data: Mapping[str, object] | None,
    cls_token: bool,
    client: Client | str | None,
    storage_options: Mapping[str, object] | None,
    **described: Any,
) -> ShardStore:
    """Write an array as a store, block by block; see `ShardStore.from_array`. `described` is of `new_metadata`."""
    arrays: Mapping[str, object] = {} if token_arrays is None else token_arrays
    if not isinstance(arrays, Mapping) or not all(isinstance(name, str) for name in arrays):
        raise ArgumentError(f"token_arrays is {brief(token_arrays)}; it must map names to arrays", where="token_arrays")
    examples = ArrayExamples(array, dims, arrays)
    (n_examples, n_layers, n_tokens, d_model), dtypes = examples.shape, examples.token_dtypes
    if data is not None and not isinstance(data, Mapping):
        raise ArgumentError(f"data is {brief(data)}; it must be a mapping, to which `imported` is added", where="data")
    store_dtype = stored_dtype(examples.dtype, dtype)
    # Labels alone need no protocol 3.0: stores of all versions may have them.
    is_new = store_dtype != "float32" or described["hook_points"] or described["text"] or set(dtypes) - {"labels"}
    metadata = examples.metadata = new_metadata(
        **described, layers=_labels(array, layers, n_layers), cls_token=cls_token, d_model=d_model,
        content_tokens_per_example=n_tokens - bool(cls_token), n_examples=n_examples, dtype=store_dtype,
        data={**(data or {"__class__": "Import"}), "imported": examples.identity()}, token_arrays=dtypes if is_new else None,
    )  # fmt: skip
    root_transport = open_transport(root, storage_options)
    if client is None:
        import_examples(examples, root_transport, options)
    else:
        _import_on_cluster(examples, root_transport, storage_options, options, client)
    return ShardStore.open(root_transport.at(metadata.hash))


def _labels(array: object, layers: object, n_layers: int) -> Sequence[int] | IntArray:
    """The labels of the layers, given or those of an xarray array."""
    coordinates = getattr(array, "coords", None)
    if layers is None and isinstance(coordinates, Mapping) and "layer" in coordinates:
        layers = cast("Any", coordinates["layer"]).to_numpy().reshape(-1)
    if (
        isinstance(layers, str)
        or not isinstance(layers, (Sequence, np.ndarray))
        or len(cast("Sequence[int]", layers)) != n_layers
    ):
        raise ArgumentError(
            f"layers is {brief(cast('object', layers))}; it must be a list of {n_layers} labels, one for each entry of that axis",
            where="layers",
        )
    return cast("Sequence[int]", layers)


def import_examples(
    examples: Examples, root: Transport, options: ImportOptions, *, part: tuple[int, int] | None = None
) -> None:
    """Write the store of some examples, or one part (rank, world) of its shards, which `finalize_store` publishes.

    What was begun is continued, and a finished store accepted.
    """
    with create_store(root, examples.metadata, resume=True, exist_ok=True, part=part, **options._asdict()) as writer:
        for some in writer.missing:
            for block in examples.blocks(some.start, some.stop, MAX_BLOCK_BYTES):
                writer.append(_as_accepted(block, writer.layout, options.on_overflow), **block.token_arrays)


def _as_accepted(block: ArrayBlock, layout: Layout, on_overflow: OverflowPolicy) -> npt.NDArray[np.generic]:
    """The activations of a block as a writer takes them, which does not take float64."""
    acts = block.acts
    # To 16 bits the writer's own check follows; before it only errors are raised, which show the number as it is.
    if acts.dtype.name == "float64" and (layout.dtype == "float32" or on_overflow == "raise"):
        acts = check_overflow(acts, block.first, layout, on_overflow)
    return narrowed(acts, layout.dtype)


# -- by a cluster ------------------------------------------------------------------------------------------------------


def _import_on_cluster(
    examples: ArrayExamples,
    root: Transport,
    storage_options: Mapping[str, object] | None,
    options: ImportOptions,
    client: Client | str,
) -> None:
    """Write the store of a dask array in parts, a task of a cluster for each, and publish it."""
    metadata, layout = examples.metadata, examples.metadata.layout
    if Work(root, metadata).is_published():
        return
    world, tasks = min(layout.n_shards, MAX_PARTS), list[tuple[ArrayExamples, tuple[int, int]]]()
    for rank in range(world):
        shards = part_shards(layout.n_shards, rank, world)
        first, end = layout.example_range(shards[0])[0], layout.example_range(shards[-1])[1]
        tasks.append((examples.part(first, end), (rank, world)))
    write = partial(_write_part, root.url, storage_options, options._replace(progress=False))
    for _ in map_shards(write, tasks, client):
        pass
    finalize_store(root, metadata)


def _write_part(
    root: str,
    storage_options: Mapping[str, object] | None,
    options: ImportOptions,
    task: tuple[ArrayExamples, tuple[int, int]],
) -> None:
    """Write a part: its examples, and which part it is."""
    examples, part = task
    import_examples(examples, open_transport(root, storage_options), options, part=part)
