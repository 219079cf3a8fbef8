"""Exports: the tensor for people without this package, as documents that point at the bytes of the shards.

Nothing is copied or rewritten. What an export says stays true for as long as the shards lie where it says.
"""

from __future__ import annotations

from saev_store.export.icechunk import write_icechunk
from saev_store.export.kerchunk import write_kerchunk
from saev_store.export.tensorstore import array_names, tensorstore_spec

__all__ = ["array_names", "tensorstore_spec", "write_icechunk", "write_kerchunk"]
