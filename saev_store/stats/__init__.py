"""Statistics of a store per layer and token position, computed in threads or on a dask cluster, and kept beside the store.

Use `store.stats()`.
"""

from __future__ import annotations

from saev_store.stats.compute import STATS_NAME, kept_stats, store_stats
from saev_store.stats.moments import moments_of
from saev_store.stats.result import STATISTICS, Stats

__all__ = ["STATISTICS", "STATS_NAME", "Stats", "kept_stats", "moments_of", "store_stats"]
