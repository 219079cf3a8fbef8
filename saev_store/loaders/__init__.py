"""Batches of activations as NumPy arrays, at the speed of the hardware: in storage order, or shuffled. Needs no torch.

`saev_store.torch` has the same loaders for PyTorch, with configs.
"""

from __future__ import annotations

from saev_store.loaders._dressing import NO_LABEL
from saev_store.loaders._explain import Explanation
from saev_store.loaders._metrics import Metrics
from saev_store.loaders._run import Batch, BatchIterator
from saev_store.loaders.cache import CachedTransport
from saev_store.loaders.ordered import OrderedLoader
from saev_store.loaders.quality import BatchEntropy, ShuffleQuality, batch_entropy, shuffle_quality
from saev_store.loaders.shuffled import ShuffledLoader
from saev_store.loaders.staging import stage, stage_in_background
from saev_store.order import Mixing

__all__ = [
    "NO_LABEL",
    "Batch",
    "BatchEntropy",
    "BatchIterator",
    "CachedTransport",
    "Explanation",
    "Metrics",
    "Mixing",
    "OrderedLoader",
    "ShuffleQuality",
    "ShuffledLoader",
    "batch_entropy",
    "shuffle_quality",
    "stage",
    "stage_in_background",
]
