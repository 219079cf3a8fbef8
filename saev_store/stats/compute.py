"""Statistics, computed in tasks by threads of this process or by a dask cluster, and kept beside the store in `stats.json`.

The partition into tasks depends on the layout alone, and their results are merged in order, so the result does not depend on the
number of threads or workers.
"""

from __future__ import annotations

import hashlib
import json
from contextlib import closing, suppress
from functools import partial
from typing import TYPE_CHECKING, Any, cast

import numpy as np
import numpy.typing as npt

from saev_store._runtime.cluster import map_shards
from saev_store._runtime.progress import Progress
from saev_store.core.arguments import check_count, check_flag
from saev_store.core.chunk_grid import task_lengths
from saev_store.core.layout import IntArray, Layout, shard_name
from saev_store.documents import parse_json
from saev_store.errors import SaevStoreError
from saev_store.stats.moments import Moments, merge, moments_of
from saev_store.stats.result import Stats
from saev_store.store.identity import recording_identity
from saev_store.store.token_arrays import MASK

if TYPE_CHECKING:
    from distributed import Client

    from saev_store.store.store import ShardStore

STATS_NAME = "stats.json"
_VERSION = 4
#: Upper bound on the length of the numbers of a layer and token in the file.
_ENTRY_BYTES = 320
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
    save: bool = True,
    progress: bool | None = None,
) -> Stats:
    """Statistics of a store for each layer and token position: those kept beside it, or computed now.

    They are kept as `stats.json`, if that can be written, and read from there the next time.

    Args:
        store: The opened store.
        sample: Read only this number of examples, drawn without repeats; kept statistics of all examples are preferred.
        seed: Seed of the sample.
        client: A `distributed.Client`, or the address of a scheduler whose workers can read the store. Default:
            threads of this process.
        save: Keep the result beside the store.
        progress: Show a bar on stderr; default: when it is a terminal.

    Raises:
        ArgumentError: the sample is not a positive integer, an option is not a boolean, or the client is asynchronous.
        CorruptShardError: a shard is missing or short.
        MissingDependencyError: `client` is an address, and distributed is not installed.
        TransportError: no scheduler answers.
    """
    save, progress = check_flag(save, name="save"), check_flag(progress, name="progress", other=None)
    layout, chosen = store.layout, None
    wanted: tuple[int, int | None] = layout.n_examples, None
    if sample is not None:
        sample, seed = check_count(sample, name="sample"), check_count(seed, name="seed", least=0)
        if sample < layout.n_examples:
            wanted = sample, seed
            drawn = np.random.default_rng(seed).choice(layout.n_examples, sample, replace=False, shuffle=False)
            chosen = np.sort(drawn).astype(np.int64)  # so that neighbours share a request
    kept = kept_stats(store)
    if kept is not None and (not kept.is_sample or (kept.n_examples, kept.seed) == wanted):
        return kept
    store.check_wide()
    recording = recording_of(store)
    stats = Stats(layout, _compute(store, chosen, client=client, progress=progress), *wanted)
    if save and recording_of(store) == recording:  # else files were replaced while they were read
        head = {"version": _VERSION, **recording, "n_examples": stats.n_examples, "seed": stats.seed}
        columns = {name: array.tolist() for name, array in stats.moments._asdict().items()}
        with suppress(SaevStoreError):  # such as a store that is only read
            store.transport.put(STATS_NAME, json.dumps({**head, **columns}, separators=(",", ":")).encode())
    return stats


def _compute(
    store: ShardStore, chosen: IntArray | None, *, client: Client | str | None, progress: bool | None
) -> Moments:
    """The moments of all examples, or of the chosen ones."""
    layout, found = store.layout, Moments.empty(store.shape[1:3])
    works = plan(layout, chosen)
    parts = map_shards(partial(_work_on, store.unmapped()), works, client)
    with Progress(sum(map(len, works)) * layout.example_nbytes, "stats", shown=progress) as bar, closing(parts):
        for work, part in zip(works, parts, strict=True):
            found = merge(found, part)
            bar.advance(len(work) * layout.example_nbytes)
    return found


def plan(layout: Layout, chosen: IntArray | None) -> list[range | IntArray]:
    """Examples of each task: whole shards, equal parts of one shard, or equal parts of a sample."""
    task_bytes = max(_TASK_BYTES, layout.nbytes // _MAX_TASKS)
    if chosen is not None:
        n_tasks = -(-len(chosen) * layout.example_nbytes // task_bytes)
        return list(np.array_split(chosen, min(n_tasks, len(chosen))))
    ends = np.cumsum(task_lengths(layout, task_bytes=task_bytes)).tolist()
    return list(map(range, [0, *ends[:-1]], ends))


def _work_on(store: ShardStore, work: range | IntArray) -> Moments:
    """The moments of a task's examples; holds one piece of them at a time."""
    layout, found = store.layout, Moments.empty(store.shape[1:3])
    by_layer = layout.example_nbytes > _READ_BYTES
    step = max(1, _READ_BYTES // layout.example_nbytes)
    for at in range(0, len(work), step):
        piece = work[at : at + step]
        examples = slice(piece.start, piece.stop) if isinstance(piece, range) else piece
        for layers in [slice(n, n + 1) for n in range(layout.n_layers)] if by_layer else [slice(None)]:
            part = moments_of(store.read((examples, layers)), _kept_vectors(store, examples))
            found.put(layers, merge(found.at(layers), part))
    return found


def _kept_vectors(store: ShardStore, examples: slice | IntArray) -> npt.NDArray[np.bool_] | None:
    """The tokens of some examples that the mask of the store keeps, bool (example, token); None if there is no mask."""
    arrays = store.token_arrays
    if not arrays.is_declared or MASK not in arrays:
        return None
    mask = arrays[MASK][examples] != 0
    return np.concatenate((np.ones((len(mask), store.layout.n_special_tokens), np.bool_), mask), axis=1)


def recording_of(store: ShardStore) -> dict[str, str]:
    """The entries of the file that identify the recording as it is now."""
    layout, arrays = store.layout, store.token_arrays
    names = list(map(shard_name, range(layout.n_shards)))
    if arrays.is_declared and MASK in arrays:  # it decides which tokens count
        names.append(arrays.declared(MASK).file_name)
    identity = recording_identity(store.transport, layout, files=names, prefer="versions")
    return {"metadata_sha256": hashlib.sha256(store.metadata.raw).hexdigest(), "recording": str(identity)}


def kept_stats(store: ShardStore) -> Stats | None:
    """The statistics kept beside the store, of all examples or of a sample; None if there are none of this recording."""
    layout = store.layout
    max_nbytes = 4096 + _ENTRY_BYTES * layout.n_layers * layout.tokens_per_example
    try:
        raw = store.transport.read(STATS_NAME, max_bytes=max_nbytes)
        found = cast("dict[str, Any]", parse_json(raw, where=STATS_NAME, max_nbytes=max_nbytes))
        if found["version"] != _VERSION or not recording_of(store).items() <= found.items():
            return None
        moments = Moments(
            **{name: np.array(found[name], np.int64 if name[:2] == "n_" else float) for name in Moments._fields}
        )
        n_examples, seed = found["n_examples"], found["seed"]
    except (SaevStoreError, KeyError, TypeError, ValueError, OverflowError, AttributeError):
        return None
    has_shape = all(array.shape == layout.shape[1:3] for array in moments)
    is_number = type(n_examples) is int and 1 <= n_examples <= layout.n_examples
    return Stats(layout, moments, n_examples, seed) if has_shape and is_number else None
