"""The storage layer under sparse-autoencoder research: open, check, read and write stores of transformer activations.

>>> from saev_store import ShardStore
>>> ShardStore.open(SAMPLE)[:4, 0, 1:].shape
(4, 4, 8)
"""

from __future__ import annotations

from saev_store._version import __version__
from saev_store.core.layout import Layout
from saev_store.documents import Metadata, new_metadata
from saev_store.errors import SaevStoreError, SaevStoreWarning
from saev_store.problems import Problem
from saev_store.store.pair import PairSelection, StorePair, pair
from saev_store.store.selection import Selection
from saev_store.store.store import ShardStore

__all__ = [
    "Layout",
    "Metadata",
    "PairSelection",
    "Problem",
    "SaevStoreError",
    "SaevStoreWarning",
    "Selection",
    "ShardStore",
    "StorePair",
    "__version__",
    "new_metadata",
    "pair",
]
