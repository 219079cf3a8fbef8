"""Batches of activations as NumPy arrays: shuffled or in storage order, of one store or of two. Needs no torch."""

from __future__ import annotations

from saev_store._next.loaders.columns import NO_LABEL
from saev_store._next.loaders.explain import Explanation
from saev_store._next.loaders.filters import behind_bos, below_norms, filtered
from saev_store._next.loaders.loader import Batch, Loader
from saev_store._next.loaders.options import LoaderOptions
from saev_store._next.order import Mixing

__all__ = [
    "NO_LABEL",
    "Batch",
    "Explanation",
    "Loader",
    "LoaderOptions",
    "Mixing",
    "behind_bos",
    "below_norms",
    "filtered",
]
