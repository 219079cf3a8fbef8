"""The loaders for PyTorch: random access, storage order, shuffled.

A training script written for an older generation of loaders runs after changing the import:

    from saev_store.torch import ShuffledConfig, ShuffledDataLoader
"""

from __future__ import annotations

from saev_store.torch._epochs import BatchDataset
from saev_store.torch.batch import ExampleBatch, tensors
from saev_store.torch.config import ConfigError, IndexedConfig, OrderedConfig, ShuffledConfig
from saev_store.torch.indexed import IndexedDataset
from saev_store.torch.loaders import OrderedDataLoader, ShuffledDataLoader
from saev_store.torch.normalize import Normalization
from saev_store.torch.pairs import OrderedPairConfig, OrderedPairDataLoader, ShuffledPairConfig, ShuffledPairDataLoader
from saev_store.torch.share import Consumer, SharedLoader

#: The specification's name of `IndexedDataset`.
Dataset = IndexedDataset

__all__ = [
    "BatchDataset",
    "ConfigError",
    "Consumer",
    "Dataset",
    "ExampleBatch",
    "IndexedConfig",
    "IndexedDataset",
    "Normalization",
    "OrderedConfig",
    "OrderedDataLoader",
    "OrderedPairConfig",
    "OrderedPairDataLoader",
    "SharedLoader",
    "ShuffledConfig",
    "ShuffledDataLoader",
    "ShuffledPairConfig",
    "ShuffledPairDataLoader",
    "tensors",
]
