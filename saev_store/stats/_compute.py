"""The work, as a dask graph: one task reads some examples piece by piece, and results are merged in a tree.

What is cut where depends on the layout alone, so the numbers are the same whoever computes them, and however many at once.
"""

from __future__ import annotations

import sys
import uuid
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, TypeAlias

import numpy as np

from saev_store.chunks import task_lengths
from saev_store.errors import MissingDependencyError, TransportError
from saev_store.layout import IntArray, Layout
from saev_store.stats._moments import Moments, merge, merge_all, moments_of
from saev_store.writer._progress import Progress

if TYPE_CHECKING:
    from distributed import Client

    from saev_store.store import ShardStore

#: What a task does: a half-open range of examples, or a list of some.
Work: TypeAlias = "tuple[int, int] | IntArray"

#: A task holds this much at a time, or one layer of one example where that is more.
_READ_BYTES = 16 << 20
_TASK_BYTES = 128 << 20
#: A scheduler spends about a millisecond on a task.
_TASKS_AT_MOST = 4096
_MERGED_AT_ONCE = 8
_CONNECT_TIMEOUT_S = 10


def compute(
    store: ShardStore, chosen: IntArray | None, *, client: Client | str | None, progress: bool | None
) -> Moments:
    """The moments of all examples, or of the chosen ones (ascending).

    Raises:
        MissingDependencyError: dask, or distributed for a cluster, is not installed.
        TransportError: no scheduler answers at the address.
        CorruptShardError: a shard that is needed is missing or short.
    """
    try:
        from dask.delayed import delayed
    except ImportError as error:
        raise MissingDependencyError(
            "dask is not installed", where="stats", remedy="pip install 'saev_store[xarray]'"
        ) from error
    layout = store.layout
    works = plan(layout, chosen)
    n_examples = layout.n_examples if chosen is None else len(chosen)
    # A cluster that is shared knows tasks by their names, whosever they are.
    run = f"saev-stats-{uuid.uuid4().hex}"
    # Neither looked into nor hashed by dask: a store looks like an array from the outside.
    shared = delayed(store, traverse=False, name=f"{run}-store")
    names = [f"{run}-{number}" for number in range(len(works))]
    parts = [
        delayed(work_on, pure=False)(shared, work, dask_key_name=name) for name, work in zip(names, works, strict=True)
    ]
    with _connected(client) as cluster, Progress(n_examples * layout.example_nbytes, "stats", shown=progress) as bar:
        sizes = dict(zip(names, (nbytes(layout, work) for work in works), strict=True))
        if cluster is not None:
            return _on_cluster(cluster, parts, sizes, bar)
        with _counting(sizes, bar):
            return _tree(parts, run).compute()


def compute_here(store: ShardStore, chosen: IntArray | None) -> Moments:
    """The same sums in this thread, without dask."""
    return merge_all([work_on(store, work) for work in plan(store.layout, chosen)])


def plan(layout: Layout, chosen: IntArray | None) -> list[Work]:
    """Examples for each task: whole shards or equal parts of one, or about as many of a sample.

    >>> plan(Layout(7, (2,), 4, True, 8, 3), None)
    [(0, 7)]
    """
    task_bytes = max(_TASK_BYTES, layout.nbytes // _TASKS_AT_MOST)
    if chosen is not None:
        n_tasks = max(1, -(-len(chosen) * layout.example_nbytes // task_bytes))
        return list(np.array_split(chosen, min(n_tasks, len(chosen))))
    ends = np.cumsum(task_lengths(layout, task_bytes=task_bytes)).tolist()
    return list(zip([0, *ends[:-1]], ends, strict=True))


def nbytes(layout: Layout, work: Work) -> int:
    """Bytes that a task reads."""
    n_examples = work[1] - work[0] if isinstance(work, tuple) else len(work)
    return int(n_examples) * layout.example_nbytes


def work_on(store: ShardStore, work: Work) -> Moments:
    """The moments of a task's examples; holds one piece of them at a time."""
    layout = store.layout
    found = Moments.empty(layout.shape[1:3])
    by_layer = layout.example_nbytes > _READ_BYTES
    for examples in _pieces(layout, work):
        for layers in [slice(n, n + 1) for n in range(layout.n_layers)] if by_layer else [slice(None)]:
            block = moments_of(store.as_numpy((examples, layers)))
            found.put(layers, merge(found.at(layers), block))
    return found


def _pieces(layout: Layout, work: Work) -> Iterator[slice | IntArray]:
    """Parts of a task that fit into memory, none of which spans two shards: those are views of mapped files."""
    step = max(1, _READ_BYTES // layout.example_nbytes)
    if not isinstance(work, tuple):
        yield from (work[at : at + step] for at in range(0, len(work), step))
        return
    start, stop = work
    while start < stop:
        end_of_shard = (start // layout.examples_per_shard + 1) * layout.examples_per_shard
        end = min(start + step, end_of_shard, stop)
        yield slice(start, end)
        start = end


# -- dask --------------------------------------------------------------------------------------------------------------


def _merge_these(*parts: Moments) -> Moments:
    return merge_all(parts)


def _tree(parts: Sequence[Any], name: str) -> Any:  # noqa: ANN401  # dask's Delayed has no type of its own
    from dask.delayed import delayed

    level = 0
    while len(parts) > 1:
        parts = [
            delayed(_merge_these, pure=False)(*group, dask_key_name=f"{name}-merge-{level}-{number}")
            for number, group in enumerate(_groups(parts))
        ]
        level += 1
    return parts[0]


def _groups(parts: Sequence[Any]) -> list[Sequence[Any]]:
    return [parts[at : at + _MERGED_AT_ONCE] for at in range(0, len(parts), _MERGED_AT_ONCE)]


@contextmanager
def _counting(sizes: Mapping[str, int], bar: Progress) -> Iterator[None]:
    """Advance the bar when a task of ours ends, on this machine."""
    from dask.callbacks import Callback

    def ended(key: object, *_: object) -> None:
        if str(key) in sizes:
            bar.advance(sizes[str(key)])

    with Callback(posttask=ended):
        yield


def _on_cluster(client: Client, parts: Sequence[Any], sizes: Mapping[str, int], bar: Progress) -> Moments:
    """In groups, so that there is something to count."""
    groups = _groups(parts)
    # Futures that nobody holds any more end their tasks, so a failure needs no cleaning up.
    merged: Any = client.compute([_tree(group, f"{group[0].key}-group") for group in groups])
    for future, group in zip(merged, groups, strict=True):
        future.result()  # raises what a task raised
        bar.advance(sum(sizes[part.key] for part in group))
    while len(merged) > 1:
        merged = [client.submit(_merge_these, *group, pure=False) for group in _groups(merged)]
    return merged[0].result()


@contextmanager
def _connected(client: Client | str | None) -> Iterator[Client | None]:
    """The client to use: the one given, one for the address given, the one that is active, or none."""
    if client is None and "distributed" in sys.modules:
        from distributed import default_client

        try:
            client = default_client()
        except ValueError:
            client = None
    if not isinstance(client, str):
        yield client
        return
    try:
        from distributed import Client
    except ImportError as error:
        raise MissingDependencyError(
            "distributed is not installed", where="client", remedy="pip install distributed"
        ) from error
    try:
        opened = Client(client, timeout=_CONNECT_TIMEOUT_S, set_as_default=False)
    except (OSError, ValueError) as error:
        raise TransportError(f"no dask scheduler answers: {error}", where=client) from error
    with opened:
        yield opened
