"""Writing stores that survive a crash: append, resume, publish, repair, clean up."""

from saev_store._next.writer.clean import (
    Cleaned,
    Leftover,
    Unfinished,
    clean_leftovers,
    discard_unfinished,
    unfinished,
)
from saev_store._next.writer.copying import copy_whole
from saev_store._next.writer.create import create_store
from saev_store._next.writer.publish import finalize_store
from saev_store._next.writer.repair import RepairedFile, RepairWriter, open_repair
from saev_store._next.writer.shard_writer import ShardWriter

__all__ = [
    "Cleaned",
    "Leftover",
    "RepairWriter",
    "RepairedFile",
    "ShardWriter",
    "Unfinished",
    "clean_leftovers",
    "copy_whole",
    "create_store",
    "discard_unfinished",
    "finalize_store",
    "open_repair",
    "unfinished",
]
