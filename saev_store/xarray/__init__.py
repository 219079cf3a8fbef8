"""Stores as `xarray.Dataset`s: `engine="saev"`, `store.as_xarray()` and `ShardStore.concat`.

`xr.open_dataset(url, engine="saev", storage_options=…)` works wherever the package is installed, without importing it.
"""

from saev_store.xarray._backend import SaevBackend, concat, dataset_of, open_store

__all__ = ["SaevBackend", "concat", "dataset_of", "open_store"]
