"""Writing stores that survive a crash: append, resume, publish, repair."""

from saev_store.writer._create import Unfinished, create_store, discard_unfinished, unfinished
from saev_store.writer._digests import Digests, FileDigests, load_digests
from saev_store.writer._publish import finalize_store
from saev_store.writer.shard_writer import ShardWriter

__all__ = [
    "Digests",
    "FileDigests",
    "ShardWriter",
    "Unfinished",
    "create_store",
    "discard_unfinished",
    "finalize_store",
    "load_digests",
    "unfinished",
]
