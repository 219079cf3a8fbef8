"""The tensor as Zarr, without copying or rewriting a byte.

`store.as_zarr()` makes a `ZarrView`; `zarr.open_group(store.as_zarr(), mode="r")` reads it. After this import zarr knows the data
type `bfloat16`.
"""

from __future__ import annotations

from saev_store.zarr._view import ZarrView, open_view
from saev_store.zarr.bfloat16 import BFloat16

__all__ = ["BFloat16", "ZarrView", "open_view"]
