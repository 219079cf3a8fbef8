"""Batches of activations as NumPy arrays: shuffled or in storage order, of one store or of two. Needs no torch."""

from __future__ import annotations

from saev_store.loaders.explain import Explanation
from saev_store.loaders.filters import filtered
from saev_store.loaders.loader import Batch, Loader
from saev_store.loaders.options import LoaderOptions
from saev_store.loaders.stage import stage
from saev_store.order import Mixing

__all__ = ["Batch", "Explanation", "Loader", "LoaderOptions", "Mixing", "filtered", "stage"]
