"""The loaders for PyTorch: random access, storage order, shuffled.

A training script written for an older generation of loaders runs after changing the import:

    from saev_store.torch import ShuffledConfig, ShuffledDataLoader
"""

from __future__ import annotations

from saev_store.torch.batch import ExampleBatch, tensors
from saev_store.torch.config import ConfigError, IndexedConfig, OrderedConfig, ShuffledConfig
from saev_store.torch.indexed import IndexedDataset
from saev_store.torch.loaders import BatchDataset, OrderedDataLoader, ShuffledDataLoader

#: The specification's name of `IndexedDataset`.
Dataset = IndexedDataset

__all__ = [
    "BatchDataset",
    "ConfigError",
    "Dataset",
    "ExampleBatch",
    "IndexedConfig",
    "IndexedDataset",
    "OrderedConfig",
    "OrderedDataLoader",
    "ShuffledConfig",
    "ShuffledDataLoader",
    "tensors",
]
