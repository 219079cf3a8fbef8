"""LLMBATCH: token ids in batches that are formed when they are written (`docs/formats.md`)."""

from __future__ import annotations

from saev_store.sources.llmbatch.header import Header
from saev_store.sources.llmbatch.loader import BatchNativeLoader
from saev_store.sources.llmbatch.reader import BatchFileReader
from saev_store.sources.llmbatch.writer import record_order, write_batch_dataset, write_batch_file

__all__ = [
    "BatchFileReader",
    "BatchNativeLoader",
    "Header",
    "record_order",
    "write_batch_dataset",
    "write_batch_file",
]
