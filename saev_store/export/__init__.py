"""References to the bytes of the shards, for readers without this package; no data is copied or rewritten."""

from __future__ import annotations

from saev_store.export._virtual import SaevParser, to_virtual_dataset

__all__ = ["SaevParser", "to_virtual_dataset"]
