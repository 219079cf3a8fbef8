"""Writing stores that survive a crash: append, resume, publish, copy, repair, clean up."""

from saev_store.writer.cleaning import Leftover, clean, discard_unfinished
from saev_store.writer.copying import copy_store
from saev_store.writer.create import create_store
from saev_store.writer.digests import Digests, FileDigests, load_digests
from saev_store.writer.publish import finalize_store
from saev_store.writer.repair import RepairedFile, RepairWriter, open_repair
from saev_store.writer.shard_writer import ShardWriter

__all__ = [
    "Digests",
    "FileDigests",
    "Leftover",
    "RepairWriter",
    "RepairedFile",
    "ShardWriter",
    "clean",
    "copy_store",
    "create_store",
    "discard_unfinished",
    "finalize_store",
    "load_digests",
    "open_repair",
]
