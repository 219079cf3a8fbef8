"""Statistics of an opened store: those that lie beside it, or new ones."""

from __future__ import annotations

import operator
import warnings
from typing import TYPE_CHECKING, NamedTuple, cast

import numpy as np

from saev_store.errors import (
    AccessError,
    ArgumentError,
    DocumentError,
    NotFoundError,
    ReadOnlyError,
    SaevStoreError,
    SaevStoreWarning,
)
from saev_store.layout import IntArray
from saev_store.stats._compute import compute, compute_here
from saev_store.stats._document import max_nbytes, parse_stats, stats_bytes
from saev_store.stats._result import Stats
from saev_store.transport import Writes

if TYPE_CHECKING:
    from distributed import Client

    from saev_store.store import ShardStore

STATS_NAME = "stats.json"


class Sample(NamedTuple):
    """So many examples, chosen by a seed."""

    n_examples: int
    seed: int


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

    Computed with dask in float64, holding some tens of MiB for each worker. They are kept beside the store as `stats.json`
    where that may be written, and read from there the next time.

    Args:
        store: The opened store.
        sample: Use so many examples only, drawn without repeats; kept statistics of all examples are preferred.
        seed: Of the sample.
        client: A `distributed.Client`, or the address of a scheduler whose workers can read the store. Default: the
            active client, if there is one, else threads of this process.
        refresh: Compute anew what is kept.
        save: Keep the result beside the store.
        progress: Show a bar on stderr; default: when it is a terminal.

    Raises:
        ArgumentError: the sample is no positive number.
        CorruptShardError: a shard is missing or short.
        MissingDependencyError: dask (or distributed, with `client`) is not installed.
        TransportError: no scheduler answers.

    Warns:
        SaevStoreWarning: what is kept is broken or about another store; it is replaced.
    """
    wanted = None if sample is None else _sample(store, sample, seed)
    if not refresh:
        kept = _kept(store, wanted)
        if kept is not None:
            return kept
    chosen = None if wanted is None else _chosen(store, wanted)
    moments = compute(store, chosen, client=client, progress=progress)
    stats = Stats(store.layout, moments, store.layout.n_examples if wanted is None else wanted.n_examples)
    if save:
        _keep(store, stats, wanted)
    return stats


def sampled_stats(store: ShardStore, n_examples: int, *, seed: int = 0) -> Stats:
    """Statistics of at least so many examples: those beside the store, or what `ShardStore.stats(sample=…, seed=…)` gives.

    Computed here and now, without dask, for samples so small that one thread is enough; kept beside the store.
    """
    wanted = _sample(store, n_examples, seed)
    kept = _kept(store, wanted, or_more=True)
    if kept is not None:
        return kept
    moments = compute_here(store, None if wanted is None else _chosen(store, wanted))
    stats = Stats(store.layout, moments, store.layout.n_examples if wanted is None else wanted.n_examples)
    _keep(store, stats, wanted)
    return stats


def _sample(store: ShardStore, sample: int, seed: int) -> Sample | None:
    """None where the sample is everything."""
    try:
        n_examples, seed = operator.index(cast("int", sample)), operator.index(cast("int", seed))
    except TypeError:
        raise ArgumentError(f"{sample!r} and {seed!r} are not two integers", where="sample, seed") from None
    if n_examples < 1 or seed < 0:
        raise ArgumentError(f"a sample of {n_examples} by the seed {seed}: at least 1 and 0", where="sample, seed")
    return None if n_examples >= store.layout.n_examples else Sample(n_examples, seed)


def _chosen(store: ShardStore, sample: Sample) -> IntArray:
    """Ascending, so that neighbours share a request."""
    drawn = np.random.default_rng(sample.seed).choice(
        store.layout.n_examples, sample.n_examples, replace=False, shuffle=False
    )
    return np.sort(drawn).astype(np.int64)


def _kept(store: ShardStore, wanted: Sample | None, *, or_more: bool = False) -> Stats | None:
    """What lies beside the store, if it answers the question: everything answers for any sample."""
    where = f"{store.url}/{STATS_NAME}"
    try:
        raw = store.transport.read(STATS_NAME, max_bytes=max_nbytes(store.metadata))
        stats, seed = parse_stats(raw, store.metadata, where=where)
    except NotFoundError:
        return None
    except DocumentError as error:
        warnings.warn(f"{error}. The statistics are computed anew", SaevStoreWarning, stacklevel=5)
        return None
    except SaevStoreError as error:
        warnings.warn(f"{where} cannot be read: {error}", SaevStoreWarning, stacklevel=5)
        return None
    if not stats.is_sample or (or_more and wanted is not None and stats.n_examples >= wanted.n_examples):
        return stats
    return stats if wanted == Sample(stats.n_examples, -1 if seed is None else seed) else None


def _keep(store: ShardStore, stats: Stats, sample: Sample | None) -> None:
    transport = store.transport
    if not isinstance(transport, Writes):
        return
    try:
        transport.put(STATS_NAME, stats_bytes(stats, store.metadata, seed=sample.seed if sample else None))
    except (AccessError, ReadOnlyError):
        return  # somebody else's store
    except SaevStoreError as error:
        warnings.warn(f"{STATS_NAME} could not be kept beside the store: {error}", SaevStoreWarning, stacklevel=4)
