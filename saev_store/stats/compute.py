"""Statistics in tasks that read some examples piece by piece, run by threads of this process or by a dask cluster.

The partition into tasks depends on the layout alone, and their results are merged in order, so the result does not depend on the
number of threads or workers.
"""

from __future__ import annotations

import warnings
from contextlib import closing
from functools import partial
from typing import TYPE_CHECKING, TypeAlias

import numpy as np
import numpy.typing as npt

from saev_store._runtime.cluster import map_shards
from saev_store._runtime.progress import Progress
from saev_store.core.arguments import check_count, check_flag
from saev_store.core.chunk_grid import task_lengths
from saev_store.core.layout import IntArray, Layout
from saev_store.errors import (
    AccessError,
    ArgumentError,
    ReadOnlyError,
    SaevStoreError,
    SaevStoreWarning,
    brief,
    outside,
)
from saev_store.stats.file import STATS_NAME, read_stats, recording_of, write_stats
from saev_store.stats.moments import Moments, merge, moments_of
from saev_store.stats.result import Stats
from saev_store.store.opening import OpenedStore
from saev_store.store.token_arrays import MASK

if TYPE_CHECKING:
    from distributed import Client

    from saev_store.store.store import ShardStore

#: Examples of one task.
Work: TypeAlias = "range | IntArray"

#: Bytes of activations in memory per task; at least one layer of one example.
_READ_BYTES = 16 << 20
_TASK_BYTES = 128 << 20
#: Upper bound on the tasks of one call: a scheduler spends about a millisecond on each.
_MAX_TASKS = 4096


def store_stats(
    store: ShardStore,
    *,
    sample: int | None = None,
    seed: int = 0,
    client: Client | str | None = None,
    refresh: bool = False,
    save: bool = True,
    progress: bool | None = None,
) -> Stats:
    """Statistics of a store for each layer and token position: those kept beside it, or computed now.

    Computed in float64 by threads or by a dask cluster, which hold some tens of MiB each. They are kept beside the store as
    `stats.json`, if that can be written, and read from there the next time.

    Args:
        store: The opened store.
        sample: Read only this number of examples, drawn without repeats; kept statistics of all examples are preferred.
        seed: Seed of the sample.
        client: A `distributed.Client`, or the address of a scheduler whose workers can read the store. Default:
            threads of this process.
        refresh: Compute again, even if statistics are kept.
        save: Keep the result beside the store.
        progress: Show a bar on stderr; default: when it is a terminal.

    Raises:
        ArgumentError: `store` is not an opened store, the sample is not a positive integer, an option is not a boolean, or the
            client is asynchronous.
        CorruptShardError: a shard is missing or short.
        MissingDependencyError: `client` is an address, and distributed is not installed.
        TransportError: no scheduler answers.

    Warns:
        SaevStoreWarning: the kept statistics are broken and are replaced, or new ones cannot be written.
    """
    if not isinstance(store, OpenedStore):  # pyright: ignore[reportUnnecessaryIsInstance]  # callers may not check types
        raise ArgumentError(f"store is {brief(store)}; it must be a ShardStore", where="store")
    refresh, save = check_flag(refresh, name="refresh"), check_flag(save, name="save")
    progress = check_flag(progress, name="progress", other=None)
    layout, chosen = store.layout, None
    if sample is not None:
        sample, seed = check_count(sample, name="sample"), check_count(seed, name="seed", least=0)
    if sample is None or sample >= layout.n_examples:
        wanted = layout.n_examples, None
    else:
        wanted = sample, seed
        drawn = np.random.default_rng(seed).choice(layout.n_examples, sample, replace=False, shuffle=False)
        chosen = np.sort(drawn).astype(np.int64)  # so that neighbours share a request
    kept = _kept(store)
    if kept is not None and not refresh and (not kept.is_sample or (kept.n_examples, kept.seed) == wanted):
        return kept
    store.check_wide()
    recording = recording_of(store)
    stats = Stats(layout, _compute(store, chosen, client=client, progress=progress), *wanted)
    is_better = kept is None or kept.is_sample or not stats.is_sample
    if save and is_better and recording_of(store) == recording:  # else files were replaced while they were read
        _keep(store, stats, recording)
    return stats


def _kept(store: ShardStore) -> Stats | None:
    try:
        return read_stats(store)
    except SaevStoreError as error:
        message = f"{str(error).removesuffix('.')}. The statistics are computed again"
        warnings.warn(message, SaevStoreWarning, stacklevel=outside())
        return None


def _keep(store: ShardStore, stats: Stats, recording: dict[str, str]) -> None:
    try:
        write_stats(store, stats, recording)
    except (AccessError, ReadOnlyError):
        pass  # statistics of a read-only store are not kept
    except SaevStoreError as error:
        message = f"{STATS_NAME} could not be written beside the store: {error}"
        warnings.warn(message, SaevStoreWarning, stacklevel=outside())


def stats_of(layout: Layout, acts: npt.NDArray[np.float32], kept: npt.NDArray[np.bool_] | None = None) -> Stats:
    """Statistics of examples in memory.

    Args:
        layout: The geometry of the store that they are from.
        acts: Their vectors as the store gives them, float32 (example, layer, token, d_model).
        kept: Which tokens count, bool (example, token); None for all.
    """
    return Stats(layout, moments_of(acts, layout.dtype, kept), len(acts))


def _compute(
    store: ShardStore, chosen: IntArray | None, *, client: Client | str | None, progress: bool | None
) -> Moments:
    """The moments of all examples, or of the chosen ones."""
    layout, found = store.layout, Moments.empty(store.shape[1:3])
    works = plan(layout, chosen)
    total = sum(map(len, works)) * layout.example_nbytes
    call = partial(_work_on, store.unmapped())
    with Progress(total, "stats", shown=progress) as bar, closing(map_shards(call, works, client)) as parts:
        for work, part in zip(works, parts, strict=True):
            found = merge(found, part)
            bar.advance(len(work) * layout.example_nbytes)
    return found


def plan(layout: Layout, chosen: IntArray | None) -> list[Work]:
    """Examples of each task: whole shards, equal parts of one shard, or equal parts of a sample.

    >>> plan(Layout(7, (2,), 4, True, 8, 3), None)
    [range(0, 7)]
    """
    task_bytes = max(_TASK_BYTES, layout.nbytes // _MAX_TASKS)
    if chosen is not None:
        n_tasks = -(-len(chosen) * layout.example_nbytes // task_bytes)
        return list(np.array_split(chosen, min(n_tasks, len(chosen))))
    ends = np.cumsum(task_lengths(layout, task_bytes=task_bytes)).tolist()
    return list(map(range, [0, *ends[:-1]], ends))


def _work_on(store: ShardStore, work: Work) -> Moments:
    """The moments of a task's examples; holds one piece of them at a time.

    Raises:
        CorruptShardError: a shard is missing or short.
    """
    layout, found = store.layout, Moments.empty(store.shape[1:3])
    by_layer = layout.example_nbytes > _READ_BYTES
    step = max(1, _READ_BYTES // layout.example_nbytes)
    for at in range(0, len(work), step):
        piece = work[at : at + step]
        examples = slice(piece.start, piece.stop) if isinstance(piece, range) else piece
        for layers in [slice(n, n + 1) for n in range(layout.n_layers)] if by_layer else [slice(None)]:
            part = moments_of(store.read((examples, layers)), layout.dtype, _kept_vectors(store, examples))
            found.put(layers, merge(found.at(layers), part))
    return found


def _kept_vectors(store: ShardStore, examples: slice | IntArray) -> npt.NDArray[np.bool_] | None:
    """The tokens of some examples that the mask of the store keeps, bool (example, token); None if there is no mask."""
    arrays = store.token_arrays
    if not arrays.is_declared or MASK not in arrays:
        return None
    mask = arrays[MASK][examples] != 0
    return np.concatenate((np.ones((len(mask), store.layout.n_special_tokens), np.bool_), mask), axis=1)
