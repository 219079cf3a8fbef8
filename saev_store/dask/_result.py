"""Read the blocks of a dask array straight into the result of `compute`.

dask keeps all blocks of an array until the last one is there and then copies them into the result, which takes twice the
memory of the result. Here the task that joins the blocks is replaced, when the graph is optimized, by a task that allocates
the result and one for each block that reads into its place. Blocks that are persisted, needed by other tasks or computed on
a cluster are left to dask.
"""

# dask is not annotated.
# pyright: reportUnknownMemberType=false, reportUnknownVariableType=false, reportUnknownArgumentType=false
# pyright: reportUnknownParameterType=false, reportPrivateUsage=false

from __future__ import annotations

import itertools
import math
import uuid
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import TypeAlias, cast

import dask.array as da
import numpy as np
from dask._task_spec import List, Task, TaskRef  # the tasks of the public documentation have no other module
from dask.array.core import finalize
from dask.core import flatten
from dask.highlevelgraph import HighLevelGraph, MaterializedLayer

from saev_store.core.dtypes import FLOAT32
from saev_store.core.indexing import Block, Progression, parse_key
from saev_store.store.selection import PIECE_BYTES, FloatArray, prepared
from saev_store.store.store import ShardStore

Place: TypeAlias = tuple[slice, ...]
_ATTRIBUTE = "_saev_store_source"


def always() -> bool:
    """Nothing changes what the tasks read."""
    return True


@dataclass(frozen=True, eq=False)
class Source:
    """What a dask array of this name reads: these vectors of a store, in the shape of the array.

    The name tells whether the array still is the one: an assignment to a part of a dask array changes it in place.
    `valid` tells whether its tasks still read the store.
    """

    store: ShardStore
    block: Block
    name: str
    valid: Callable[[], bool]

    def parts(self, chunks: Sequence[Sequence[int]]) -> Iterator[tuple[tuple[int, ...], Place, Block]]:
        """For each block: its position among the blocks, its place in the result, and the vectors that it has."""
        ends = [list(itertools.accumulate(lengths)) for lengths in chunks]
        for position in itertools.product(*(range(len(lengths)) for lengths in chunks)):
            place = tuple(slice(ends[axis][n] - chunks[axis][n], ends[axis][n]) for axis, n in enumerate(position))
            yield position, place, self.block.narrowed(cast("Block", parse_key(place, self.block.shape)))


def with_source(array: da.Array, store: ShardStore, block: Block, valid: Callable[[], bool]) -> da.Array:
    """The same dask array, read into its result by `compute`; as it is if its shape is not that of the vectors.

    A class of its own would not do: xarray refuses to compute dask arrays of two classes together. dask looks the methods up
    on the object.
    """
    if not isinstance(array, da.Array) or array.shape != block.shape:  # pyright: ignore[reportUnnecessaryIsInstance]  # plugins of dask may change it
        return array
    made = cast("da.Array", array.copy())  # pyright: ignore[reportAttributeAccessIssue]  # not annotated
    source = Source(store, block, made.name, valid)
    joined = _Join(source, made.chunks), ()
    vars(made).update({_ATTRIBUTE: source, "__dask_postcompute__": lambda: joined, "__dask_optimize__": _OPTIMIZER})
    return made


def optimized(array: da.Array) -> da.Array:
    """The same dask array with the optimizer of those of `with_source`; one that has it is returned as it is."""
    if is_optimized(array):
        return array
    made = cast("da.Array", array.copy())  # pyright: ignore[reportAttributeAccessIssue]  # not annotated
    vars(made)["__dask_optimize__"] = _OPTIMIZER
    return made


def is_optimized(array: da.Array) -> bool:
    """Whether an array was made by `with_source` or `optimized`."""
    return "__dask_optimize__" in vars(array)


def source_of(array: object) -> Source | None:
    """What an array reads, if it was made by `with_source` and not changed since."""
    source = cast("Source | None", getattr(array, _ATTRIBUTE, None))
    return source if source is not None and source.name == cast("da.Array", array).name else None


class _Result:
    """Memory for a result, until that is returned; without memory in another process, where each block has its own."""

    def __init__(self, shape: tuple[int, ...] | None) -> None:
        self.memory = None if shape is None else prepared(None, shape, FLOAT32)

    def __reduce__(self) -> tuple[type[_Result], tuple[None]]:
        return _Result, (None,)


@dataclass(frozen=True, eq=False)
class _Part:
    """A block that was read into its place; another process gets its values."""

    result: _Result
    store: ShardStore
    block: Block
    place: Place

    def values(self) -> FloatArray:
        """A view of the result, or, once that was returned, the block read anew."""
        memory = self.result.memory
        return np.asarray(self.store.read(self.block)) if memory is None else memory[self.place]

    def __reduce__(self) -> tuple[Callable[..., object], tuple[FloatArray]]:
        return np.asarray, (self.values(),)

    def __sizeof__(self) -> int:
        """For clusters, which count what their workers hold."""
        return math.prod(self.block.shape) * FLOAT32.itemsize


def _read(result: _Result, store: ShardStore, block: Block, place: Place) -> _Part | FloatArray:
    """Read a block into its place, or return it where there is no memory for the result."""
    if result.memory is None:
        return np.asarray(store.read(block))
    target = result.memory[place]
    if target.flags.c_contiguous:
        store.read(block, out=target)
    else:
        for piece in _pieces(block, target):
            target[piece] = store.read(block.narrowed(cast("Block", parse_key((piece,), block.shape))))
    return _Part(result, store, block, place)


def _pieces(block: Block, target: FloatArray) -> Iterator[slice]:
    """Of the first axis, of about `PIECE_BYTES` each; positions in a list may repeat and are read together."""
    first = block.axes[block.dropped.index(False)]
    step = max(1, PIECE_BYTES * len(target) // target.nbytes) if isinstance(first, Progression) else len(target)
    yield from (slice(start, start + step) for start in range(0, len(target), step))


def _take(result: _Result, blocks: object, places: Sequence[Place]) -> object:
    """The result, once its blocks have been read; on a cluster, some were read elsewhere.

    It is given away: what keeps the results of tasks, such as `dask.cache`, keeps no memory of this one.
    """
    if result.memory is None:
        return finalize(_arrays(blocks))
    for block, place in zip(flatten(blocks), places, strict=True):
        if not isinstance(block, _Part) or block.result is not result:
            result.memory[place] = cast("FloatArray", _arrays(block))
    memory, result.memory = result.memory, None
    return memory


def _arrays(blocks: object) -> object:
    """The same nested lists with the values of blocks."""
    if isinstance(blocks, list):
        return [_arrays(block) for block in cast("list[object]", blocks)]
    return blocks.values() if isinstance(blocks, _Part) else blocks


class _Join:
    """dask's function that joins blocks, with what they read; in another process dask's alone.

    It equals dask's, as `_Optimizer` does.
    """

    def __init__(self, source: Source, chunks: Sequence[Sequence[int]]) -> None:
        self.source = source
        self.chunks = chunks

    def __call__(self, blocks: object) -> object:
        """Join blocks as dask does, wherever the optimizer has not replaced this."""
        return finalize(blocks)

    def __eq__(self, other: object) -> bool:
        return isinstance(other, _Join) or other is finalize

    def __hash__(self) -> int:
        return hash(finalize)

    def __reduce__(self) -> tuple[Callable[..., object], tuple[()]]:
        return _dasks_join, ()


def _dasks_join() -> Callable[[object], object]:
    return finalize


class _Optimizer:
    """dask's optimizer of arrays behind the replacement; in another process, such as a cluster's scheduler, dask's alone.

    It equals dask's: `dask.compute` optimizes collections in groups of equal optimizers, dask 2025.4 also of equal functions that
    join blocks, and returns the results in the order of the groups, not in that of the arguments. The first of a group does the
    work, for arrays of any origin.
    """

    def __call__(self, graph: object, keys: object, **options: object) -> object:
        if isinstance(graph, HighLevelGraph):
            graph = _replaced(graph)
        return da.Array.__dask_optimize__(graph, keys, **options)

    def __eq__(self, other: object) -> bool:
        return isinstance(other, _Optimizer) or other == da.Array.__dask_optimize__

    def __hash__(self) -> int:
        return hash(da.Array.__dask_optimize__)

    def __reduce__(self) -> tuple[Callable[..., object], tuple[object, str]]:
        return getattr, (da.Array, "__dask_optimize__")


_OPTIMIZER = _Optimizer()


def _replaced(graph: HighLevelGraph) -> HighLevelGraph:
    """The graph with other tasks for the results that are joined of blocks of one store, each needed once."""
    joins = {
        layer_name: task
        for layer_name, layer in graph.layers.items()
        if isinstance(layer, MaterializedLayer) and len(layer) == 1
        for task in layer.values()
        if isinstance(task, Task) and isinstance(task.func, _Join)
    }
    stores = [cast("_Join", task.func).source.store for task in joins.values()]
    layers, dependencies = dict(graph.layers), dict(graph.dependencies)
    for layer_name, task in joins.items():
        join = cast("_Join", task.func)
        source, chunks = join.source, join.chunks
        is_whole = task.args == (_nested(source.name, chunks),)
        if is_whole and source.valid() and sum(store is source.store for store in stores) == 1:
            layers[layer_name], dependencies[layer_name] = MaterializedLayer(_tasks(task, source, chunks)), set()
    return HighLevelGraph(layers, dependencies)


def _tasks(task: Task, source: Source, chunks: Sequence[Sequence[int]]) -> dict[object, Task]:
    """Allocate the result, read each block into it, return it: under keys that no other graph has."""
    token = uuid.uuid4().hex
    allocated, read = f"result-{token}", f"read-{token}"
    tasks: dict[object, Task] = {allocated: Task(allocated, _Result, source.block.shape)}
    places: list[Place] = []
    for position, place, block in source.parts(chunks):
        key = (read, *position)
        tasks[key] = Task(key, _read, TaskRef(allocated), source.store, block, place)
        places.append(place)
    tasks[task.key] = Task(task.key, _take, TaskRef(allocated), _nested(read, chunks), places)
    return tasks


def _nested(name: str, chunks: Sequence[Sequence[int]], position: tuple[int, ...] = ()) -> object:
    """References to all blocks as nested lists, one level for each dimension."""
    if len(position) == len(chunks):
        return TaskRef((name, *position))
    return List(*(_nested(name, chunks, (*position, n)) for n in range(len(chunks[len(position)]))))
