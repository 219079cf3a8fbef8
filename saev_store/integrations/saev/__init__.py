"""The names of the reference project's `saev.data` and `saev.data.shards`: its scripts run after changing the import.

    import saev_store.integrations.saev  # instead of saev.data

Not here: its data sets and models. `saev_store` and `saev_store.torch`, which do the work, have more options.
"""

from __future__ import annotations

from saev_store.integrations.saev._documents import Index, IndexMap, Metadata, PixelAgg, Shard, ShardInfo
from saev_store.integrations.saev._loaders import (
    IndexedConfig,
    IndexedDataset,
    OrderedConfig,
    OrderedDataLoader,
    ShuffledConfig,
    ShuffledDataLoader,
    make_ordered_config,
)
from saev_store.integrations.saev._recording import (
    LabelsWriter,
    RecordedTransformer,
    ShardWriter,
    pixel_to_patch_labels,
)

__all__ = [
    "Index", "IndexMap", "IndexedConfig", "IndexedDataset", "LabelsWriter", "Metadata", "OrderedConfig", "OrderedDataLoader",
    "PixelAgg", "RecordedTransformer", "Shard", "ShardInfo", "ShardWriter", "ShuffledConfig", "ShuffledDataLoader",
    "make_ordered_config", "pixel_to_patch_labels",
]  # fmt: skip
