"""Writing stores that survive a crash: append, resume, publish, repair, clean up."""

from saev_store._next.writer.create import create_store
from saev_store._next.writer.publish import finalize_store
from saev_store._next.writer.shard_writer import ShardWriter

__all__ = ["ShardWriter", "create_store", "finalize_store"]
