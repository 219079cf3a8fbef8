"""Statistics of a store per layer and token position, computed with dask and kept beside the store.

Use `store.stats()`.
"""

from __future__ import annotations

from saev_store.stats._result import STATISTICS, Stats
from saev_store.stats._store import STATS_NAME, Sample, sampled_stats, store_stats

__all__ = ["STATISTICS", "STATS_NAME", "Sample", "Stats", "sampled_stats", "store_stats"]
