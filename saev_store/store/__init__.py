"""An open store: `ShardStore`, the selections and reads it offers, and the listing of roots."""

from saev_store.store.store import ShardStore

__all__ = ["ShardStore"]
