"""Exports: references to the bytes of the shards, for readers without this package.

No data is copied or rewritten. An export is valid as long as the shards keep their address.
"""

from __future__ import annotations

from saev_store.export.icechunk import without_icechunk_logs, write_icechunk
from saev_store.export.kerchunk import write_kerchunk
from saev_store.export.tensorstore import array_names, tensorstore_spec
from saev_store.export.virtual import SaevParser, to_virtual_dataset

__all__ = [
    "SaevParser",
    "array_names",
    "tensorstore_spec",
    "to_virtual_dataset",
    "without_icechunk_logs",
    "write_icechunk",
    "write_kerchunk",
]
