"""The tensor as a dask array: tasks that follow the shards and read through the store itself."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, Literal

import numpy as np

from saev_store._runtime.optional import need
from saev_store.core.chunk_grid import task_lengths
from saev_store.errors import ArgumentError, brief

if TYPE_CHECKING:
    import dask.array

    from saev_store.store.store import ShardStore


def from_store(store: ShardStore, *, chunks: Literal["auto"] | Sequence[object] = "auto") -> dask.array.Array:
    """Implements `ShardStore.as_dask`: a lazy dask array, whose tasks read through the store; slices read only what they keep.

    Blocks are copies, also of mapped files: a view would end the worker if the file were cut while a task computes. dask keeps
    all blocks while it joins them, so `compute` takes twice the memory of its result.

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
    sizes: Any = (task_lengths(layout), *layout.shape[1:]) if isinstance(chunks, str) and chunks == "auto" else chunks
    try:
        return dask.array.from_array(  # pyright: ignore[reportUnknownMemberType, reportUnknownVariableType]  # dask is not annotated
            store,
            chunks=sizes,  # dask takes more than it annotates
            asarray=False,
            fancy=True,
            meta=np.empty((0,) * 4, np.float32),
        )
    except (ValueError, TypeError, ArithmeticError) as error:
        raise ArgumentError(
            f"{brief(chunks)} cannot be laid over a tensor of shape {layout.shape}: {brief(str(error))}", where="chunks"
        ) from error
