"""Statistics of a store per layer and token position, computed in threads or on a dask cluster, and kept beside the store.

Use `store.stats()`.
"""

from __future__ import annotations

from saev_store.stats.compute import stats_of, store_stats
from saev_store.stats.file import STATS_NAME, kept_stats
from saev_store.stats.result import STATISTICS, Stats

__all__ = ["STATISTICS", "STATS_NAME", "Stats", "kept_stats", "stats_of", "store_stats"]
