"""The tensor as Zarr, without copying or rewriting a byte.

`store.as_zarr()` is what makes a `ZarrView`; `zarr.open_group(store.as_zarr(), mode="r")` is what reads it.
"""

from __future__ import annotations

from saev_store.zarr._keys import Keys, TensorKeys
from saev_store.zarr._open import Chunks, Sharded, open_view
from saev_store.zarr._view import ZarrView
from saev_store.zarr.documents import ARRAY

__all__ = ["ARRAY", "Chunks", "Keys", "Sharded", "TensorKeys", "ZarrView", "open_view"]
