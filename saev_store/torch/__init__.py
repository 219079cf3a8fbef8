"""Loaders for PyTorch: batches for training, and random access."""

from __future__ import annotations

from saev_store.torch.batch import ExampleBatch, tensors
from saev_store.torch.dataset import BatchDataset, StoreDataset
from saev_store.torch.loader import StoreLoader
from saev_store.torch.normalize import Normalization
from saev_store.torch.rows import RowOptions, StoreOptions
from saev_store.torch.share import Consumer, SharedLoader

__all__ = [
    "BatchDataset",
    "Consumer",
    "ExampleBatch",
    "Normalization",
    "RowOptions",
    "SharedLoader",
    "StoreDataset",
    "StoreLoader",
    "StoreOptions",
    "tensors",
]
