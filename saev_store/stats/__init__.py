"""Statistics of a store per layer and token position, computed in threads or on a dask cluster, and kept beside the store.

Use `store.stats()`.
"""

from __future__ import annotations

from saev_store.stats._compute import kept_vectors
from saev_store.stats._result import STATISTICS, Stats
from saev_store.stats._store import STATS_NAME, kept_stats, sampled_stats, stats_of, store_stats

__all__ = [
    "STATISTICS",
    "STATS_NAME",
    "Stats",
    "kept_stats",
    "kept_vectors",
    "sampled_stats",
    "stats_of",
    "store_stats",
]
