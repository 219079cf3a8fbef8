"""Statistics in tasks that read some examples piece by piece, run by threads of this process or by a dask cluster.

The partition into tasks depends on the layout alone, and their results are merged in order, so the result does not depend on the
number of threads or workers.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import closing
from functools import partial
from typing import TYPE_CHECKING, TypeAlias

import numpy as np
import numpy.typing as npt

from saev_store._runtime.cluster import map_shards
from saev_store._runtime.progress import Progress
from saev_store.core.chunk_grid import task_lengths
from saev_store.core.layout import IntArray, Layout, shard_name
from saev_store.errors import CorruptShardError, MissingShardError, NotFoundError
from saev_store.stats._moments import Moments, merge, moments_of
from saev_store.store.token_arrays import MASK
from saev_store.validation import Promised

if TYPE_CHECKING:
    from distributed import Client

    from saev_store.store.store import ShardStore

#: Examples of one task: a half-open range, or their positions.
Work: TypeAlias = "tuple[int, int] | IntArray"
#: Examples of one task, and the digests to compare their bytes with.
Task: TypeAlias = "tuple[Work, Promised | None]"

#: Bytes of activations in memory per task; at least one layer of one example.
_READ_BYTES = 16 << 20
_TASK_BYTES = 128 << 20
#: Upper bound on the tasks of one call: a scheduler spends about a millisecond on each.
_MAX_TASKS = 4096


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
        MissingDependencyError: a scheduler's address is given, and distributed is not installed.
        TransportError: no scheduler answers at the address.
        CorruptShardError: a shard that is needed is missing, short, or differs from its digests.
    """
    layout, found = store.layout, Moments.empty(store.shape[1:3])
    works = plan(layout, chosen)
    total = sum(nbytes(layout, work) for work in works)
    call = partial(work_on, store.unmapped())
    tasks = [(work, _digests_of(digests, layout, work)) for work in works]
    with Progress(total, "stats", shown=progress) as bar, closing(map_shards(call, tasks, client)) as parts:
        for work, part in zip(works, parts, strict=True):
            found = merge(found, part)
            bar.advance(nbytes(layout, work))
    return found


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


def work_on(store: ShardStore, task: Task) -> Moments:
    """The moments of a task's examples; holds one piece of them at a time.

    Raises:
        CorruptShardError: a shard is missing, short, or differs from its digests.
    """
    (work, digests), layout = task, store.layout
    if digests is not None and isinstance(work, tuple):
        _compare(store, work, digests)
    found = Moments.empty(layout.shape[1:3])
    by_layer = layout.example_nbytes > _READ_BYTES
    for examples in _pieces(layout, work):
        for layers in [slice(n, n + 1) for n in range(layout.n_layers)] if by_layer else [slice(None)]:
            part = moments_of(store.read((examples, layers)), layout.dtype, kept_vectors(store, examples))
            found.put(layers, merge(found.at(layers), part))
    return found


def kept_vectors(store: ShardStore, examples: slice | IntArray) -> npt.NDArray[np.bool_] | None:
    """Which tokens of some examples the mask of the store keeps, bool (example, token); None where there is no mask."""
    arrays = store.token_arrays
    if not arrays.is_declared or MASK not in arrays:
        return None
    mask = arrays[MASK][examples] != 0
    return np.concatenate((np.ones((len(mask), store.layout.n_special_tokens), np.bool_), mask), axis=1)


def _shards_of(layout: Layout, work: tuple[int, int]) -> range:
    return range(work[0] // layout.examples_per_shard, -(-work[1] // layout.examples_per_shard))


def _digests_of(digests: Promised | None, layout: Layout, work: Work) -> Promised | None:
    """The digests of the shards of a task: those of all shards would be sent with every task."""
    if digests is None or not isinstance(work, tuple):
        return None
    names = [shard_name(shard_idx) for shard_idx in _shards_of(layout, work)]
    return Promised(digests.block_bytes, {name: digests.files[name] for name in names}, ())


def _compare(store: ShardStore, work: tuple[int, int], digests: Promised) -> None:
    """Compare the blocks that hold a range of examples with their digests."""
    from xxhash import xxh3_128_hexdigest

    layout, size = store.layout, digests.block_bytes
    for shard_idx in _shards_of(layout, work):
        name = shard_name(shard_idx)
        start, end = layout.example_range(shard_idx)
        first, last = max(work[0], start) - start, min(work[1], end) - start
        used = layout.used_nbytes(shard_idx)
        for block in range(first * layout.example_nbytes // size, -(-last * layout.example_nbytes // size)):
            low, high = block * size, min((block + 1) * size, used)
            try:
                (found,) = store.transport.get_ranges(name, starts=[low], ends=[high])
            except NotFoundError as error:
                raise MissingShardError(
                    f"the shard of examples {start} to {end - 1} is missing",
                    where=f"{store.url}/{name}",
                    remedy="`store.validate()` lists everything that is lost, `store.repair()` records it again.",
                ) from error
            if xxh3_128_hexdigest(found) != digests.files[name][block]:
                raise CorruptShardError(
                    f"bytes {low:,} to {high:,} differ from their digest in digests.json, so statistics of them are refused",
                    where=f"{store.url}/{name}",
                    remedy="`store.validate(deep=True)` lists the damage, `store.repair()` records it again.",
                )


def _pieces(layout: Layout, work: Work) -> Iterator[slice | IntArray]:
    """Parts of a task that fit into memory."""
    step = max(1, _READ_BYTES // layout.example_nbytes)
    if isinstance(work, tuple):
        yield from (slice(at, min(at + step, work[1])) for at in range(*work, step))
    else:
        yield from (work[at : at + step] for at in range(0, len(work), step))
