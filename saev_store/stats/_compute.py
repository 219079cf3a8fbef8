"""Statistics as a dask graph: a task reads some examples piece by piece, and results are merged in a tree.

The partition into tasks depends on the layout alone, so results do not depend on the number of workers.
"""

# dask and distributed have partial types: delayed objects and futures are unknown to the type checker.
# pyright: reportUnknownMemberType=false, reportUnknownVariableType=false, reportUnknownArgumentType=false

from __future__ import annotations

import sys
import uuid
from collections.abc import Generator, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, TypeAlias, cast

import numpy as np

from saev_store.core.chunk_grid import task_lengths
from saev_store.core.layout import IntArray, Layout, shard_name
from saev_store.errors import ArgumentError, CorruptShardError, MissingDependencyError, TransportError
from saev_store.stats._moments import Moments, merge, merge_all, moments_of
from saev_store.validation import Promised
from saev_store.writer import Progress

if TYPE_CHECKING:
    from distributed import Client

    from saev_store.store.store import ShardStore

#: Examples of one task: a half-open range, or their positions.
Work: TypeAlias = "tuple[int, int] | IntArray"

#: Bytes of activations in memory per task; at least one layer of one example.
_READ_BYTES = 16 << 20
_TASK_BYTES = 128 << 20
#: Upper bound on tasks: a scheduler spends about a millisecond on each.
_MAX_TASKS = 4096
_MERGE_WIDTH = 8
_CONNECT_TIMEOUT_S = 10


def compute(
    store: ShardStore,
    chosen: IntArray | None,
    *,
    digests: Promised | None,
    client: Client | str | None,
    progress: bool | None,
) -> Moments:
    """The moments of all examples, or of the chosen ones.

    Args:
        store: An opened store; it is sent to the workers.
        chosen: Ascending positions of examples; None for all.
        digests: Compare all bytes with these digests first; only with `chosen=None`.
        client: As in `ShardStore.stats`.
        progress: Show a bar on stderr; default: when it is a terminal.

    Raises:
        ArgumentError: the client is asynchronous.
        MissingDependencyError: dask, or distributed for a cluster, is not installed.
        TransportError: no scheduler answers at the address.
        CorruptShardError: a shard that is needed is missing, short, or differs from its digests.
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
    # Task names are global on a shared cluster.
    run = f"saev-stats-{uuid.uuid4().hex}"
    # Dask must neither traverse nor hash the store, which looks like an array.
    shared = delayed((store, digests), traverse=False, name=f"{run}-store")
    names = [f"{run}-{number}" for number in range(len(works))]
    task = delayed(_task, pure=False)
    parts = [task(shared, work, dask_key_name=name) for name, work in zip(names, works, strict=True)]
    with _connected(client) as cluster, Progress(n_examples * layout.example_nbytes, "stats", shown=progress) as bar:
        sizes = dict(zip(names, (nbytes(layout, work) for work in works), strict=True))
        if cluster is not None:
            return _on_cluster(cluster, parts, sizes, bar)
        # By default dask would compute on the cluster: in a task, it would wait for the very worker that runs this.
        on_cluster = _in_cluster_task() or _active_client() is not None
        scheduler = {"scheduler": "threads"} if on_cluster else {}
        with _counting(sizes, bar):
            return cast("Moments", _tree(parts, run).compute(**scheduler))


def compute_here(store: ShardStore, chosen: IntArray | None, *, digests: Promised | None) -> Moments:
    """The same as `compute` in this thread, without dask."""
    return merge_all([work_on(store, work, digests) for work in plan(store.layout, chosen)])


def plan(layout: Layout, chosen: IntArray | None) -> list[Work]:
    """Examples of each task: whole shards, equal parts of one shard, or equal parts of a sample.

    >>> plan(Layout(7, (2,), 4, True, 8, 3), None)
    [(0, 7)]
    """
    task_bytes = max(_TASK_BYTES, layout.nbytes // _MAX_TASKS)
    if chosen is not None:
        n_tasks = max(1, -(-len(chosen) * layout.example_nbytes // task_bytes))
        return list(np.array_split(chosen, min(n_tasks, len(chosen))))
    ends = np.cumsum(task_lengths(layout, task_bytes=task_bytes)).tolist()
    return list(zip([0, *ends[:-1]], ends, strict=True))


def nbytes(layout: Layout, work: Work) -> int:
    """Bytes of activations that a task reads."""
    n_examples = work[1] - work[0] if isinstance(work, tuple) else len(work)
    return int(n_examples) * layout.example_nbytes


def _task(shared: tuple[ShardStore, Promised | None], work: Work) -> Moments:
    return work_on(shared[0], work, shared[1])


def work_on(store: ShardStore, work: Work, digests: Promised | None) -> Moments:
    """The moments of a task's examples; holds one piece of them at a time.

    Raises:
        CorruptShardError: a shard is missing, short, or differs from its digests.
    """
    layout = store.layout
    if digests is not None and isinstance(work, tuple):
        _compare(store, work, digests)
    found = Moments.empty(layout.shape[1:3])
    by_layer = layout.example_nbytes > _READ_BYTES
    for examples in _pieces(layout, work):
        for layers in [slice(n, n + 1) for n in range(layout.n_layers)] if by_layer else [slice(None)]:
            block = moments_of(store.read((examples, layers)))
            found.put(layers, merge(found.at(layers), block))
    return found


def _compare(store: ShardStore, work: tuple[int, int], digests: Promised) -> None:
    """Compare the blocks that hold a range of examples with their digests."""
    from xxhash import xxh3_128_hexdigest

    layout, size = store.layout, digests.block_bytes
    for shard_idx in range(work[0] // layout.examples_per_shard, -(-work[1] // layout.examples_per_shard)):
        name = shard_name(shard_idx)
        start, end = layout.example_range(shard_idx)
        first, last = max(work[0], start) - start, min(work[1], end) - start
        used = layout.used_nbytes(shard_idx)
        for block in range(first * layout.example_nbytes // size, -(-last * layout.example_nbytes // size)):
            low, high = block * size, min((block + 1) * size, used)
            (found,) = store.transport.get_ranges(name, starts=[low], ends=[high])
            if xxh3_128_hexdigest(found) != digests.files[name][block]:
                raise CorruptShardError(
                    f"bytes {low:,} to {high:,} differ from their digest in digests.json, so statistics of them are refused",
                    where=f"{store.url}/{name}",
                    remedy="`store.validate(deep=True)` lists the damage, `store.repair()` records it again.",
                )


def _pieces(layout: Layout, work: Work) -> Iterator[slice | IntArray]:
    """Parts of a task that fit into memory; none spans two shards, so that each is a view of a mapped file."""
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


def _tree(parts: Sequence[Any], name: str) -> Any:  # noqa: ANN401  # dask's Delayed has no type stubs
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
    return [parts[at : at + _MERGE_WIDTH] for at in range(0, len(parts), _MERGE_WIDTH)]


@contextmanager
def _counting(sizes: Mapping[str, int], bar: Progress) -> Generator[None]:
    """Advance the bar whenever one of our tasks ends; for schedulers of this machine."""
    from dask.callbacks import Callback

    def ended(key: object, *_: object) -> None:
        if str(key) in sizes:
            bar.advance(sizes[str(key)])

    with Callback(posttask=ended):
        yield


def _in_cluster_task() -> bool:
    """Whether this runs in a task of a distributed cluster."""
    if "distributed" not in sys.modules:
        return False
    from distributed import get_worker

    try:
        get_worker()
    except ValueError:
        return False
    return True


def _active_client() -> Client | None:
    """The active client, if there is one."""
    if "distributed" not in sys.modules:
        return None
    from distributed import default_client

    try:
        return cast("Client", default_client())
    except ValueError:
        return None


def _on_cluster(client: Client, parts: Sequence[Any], sizes: Mapping[str, int], bar: Progress) -> Moments:
    """Compute in groups, whose ends advance the bar."""
    groups = _groups(parts)
    # Releasing a future cancels its task, so a failure needs no clean-up.
    merged: Any = client.compute([_tree(group, f"{group[0].key}-group") for group in groups])
    for future, group in zip(merged, groups, strict=True):
        future.result()  # raises what a task raised
        bar.advance(sum(sizes[part.key] for part in group))
    while len(merged) > 1:
        merged = [client.submit(_merge_these, *group, pure=False) for group in _groups(merged)]
    return merged[0].result()


@contextmanager
def _connected(client: Client | str | None) -> Generator[Client | None]:
    """The client to use: the given one, one for the given address, the active one, or None for threads of this process.

    In a task of a cluster the active client is not used: the task would occupy a thread of a worker, and wait for tasks that
    need one.
    """
    if client is None and not _in_cluster_task():
        active = _active_client()
        client = None if active is None or active.asynchronous else active
    if not isinstance(client, str):
        if client is not None and client.asynchronous:
            raise ArgumentError(
                "the client is asynchronous, and statistics are computed synchronously",
                where="client",
                remedy="Pass its scheduler's address instead.",
            )
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
