"""Writing stores that survive a crash: append, resume, publish, repair, clean up."""

from saev_store._runtime.progress import Progress
from saev_store.writer._create import create_store
from saev_store.writer._digests import Digests, FileDigests, load_digests
from saev_store.writer._leftovers import (
    Cleaned,
    Leftover,
    Unfinished,
    clean_leftovers,
    discard_unfinished,
    unfinished,
)
from saev_store.writer._publish import finalize_store
from saev_store.writer._requests import writing_requests
from saev_store.writer._resume import metadata_differences
from saev_store.writer.repair import RepairedFile, RepairWriter, open_repair
from saev_store.writer.shard_writer import ShardWriter

__all__ = [
    "Cleaned",
    "Digests",
    "FileDigests",
    "Leftover",
    "Progress",
    "RepairWriter",
    "RepairedFile",
    "ShardWriter",
    "Unfinished",
    "clean_leftovers",
    "create_store",
    "discard_unfinished",
    "finalize_store",
    "load_digests",
    "metadata_differences",
    "open_repair",
    "unfinished",
    "writing_requests",
]
