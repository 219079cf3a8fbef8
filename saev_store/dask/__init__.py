"""The tensor as a dask array: tasks that follow the shards and read through the store itself."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Literal, cast

import numpy as np

from saev_store._runtime.optional import need
from saev_store.core.chunk_grid import task_lengths
from saev_store.core.indexing import Block, outer_block
from saev_store.errors import ArgumentError, brief

if TYPE_CHECKING:
    import dask.array

    from saev_store.store.store import ShardStore


def from_store(store: ShardStore, *, chunks: Literal["auto"] | Sequence[object] = "auto") -> dask.array.Array:
    """The tensor as a lazy dask array, whose tasks read through the store; slices read only what they keep.

    `compute` of the array, and of slices of it, reads into the result: it takes no more memory than that. Blocks are copies,
    also of mapped files: a view would end the worker if the file were cut while a task computes.

    Args:
        store: The opened store.
        chunks: As dask takes them; `"auto"` follows the shards, in tasks of about 128 MiB.

    Raises:
        ArgumentError: dask cannot lay `chunks` over the tensor.
        MissingDependencyError: dask is not installed.

    >>> from saev_store import ShardStore
    >>> array = from_store(ShardStore.open(SAMPLE), chunks=(3, 1, -1, -1))
    >>> array.chunks
    ((3, 3, 1), (1, 1, 1), (5,), (8,))
    >>> array[:, 1].mean(axis=0).compute().shape
    (5, 8)
    """
    need("dask", install="saev-store[xarray]", where="as_dask")
    import dask.array

    layout = store.layout
    sizes = (task_lengths(layout), *layout.shape[1:]) if isinstance(chunks, str) and chunks == "auto" else chunks
    try:
        array = dask.array.from_array(  # pyright: ignore[reportUnknownMemberType, reportUnknownVariableType]  # dask is not annotated
            store,
            chunks=cast("str", sizes),  # dask takes more than its annotation says
            asarray=False,
            fancy=True,
            meta=np.empty((0,) * 4, np.float32),
        )
    except (ValueError, TypeError, ArithmeticError) as error:
        raise ArgumentError(
            f"{brief(chunks)} cannot be laid over a tensor of shape {layout.shape}: {brief(str(error))}", where="chunks"
        ) from error
    return read_into_result(cast("dask.array.Array", array), store, outer_block([slice(None)] * 4, layout.shape))


def read_into_result(
    array: dask.array.Array, store: ShardStore, block: Block, valid: Callable[[], bool] | None = None
) -> dask.array.Array:
    """The same dask array, but `compute` reads its blocks straight into the result, without a second copy.

    Args:
        array: An array of float32; its tasks read `block` of `store`.
        store: The opened store.
        block: The vectors, in the shape of the array.
        valid: Whether the tasks still read the store; asked when the array is computed. None: they always do.
    """
    from saev_store.dask._result import always, with_source

    return with_source(array, store, block, valid or always)


def computed_beside(array: dask.array.Array) -> dask.array.Array:
    """The same dask array, such as labels, but the tensor that is computed with it is read into its result.

    dask optimizes arrays that are computed together with the optimizer of the first of them.
    """
    from saev_store.dask._result import optimized

    return optimized(array)


def sliced(array: dask.array.Array, part: dask.array.Array, inner: Block) -> dask.array.Array:
    """What `inner` selects of `array`, given as dask's `part`: `read_into_result` or `computed_beside` as `array` is."""
    from saev_store.dask._result import is_optimized, optimized, source_of, with_source

    source = source_of(array)
    if source is not None:
        return with_source(part, source.store, source.block.narrowed(inner), source.valid)
    return optimized(part) if is_optimized(array) else part
