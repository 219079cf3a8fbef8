"""LLMBATCH: token ids in batches that are formed when they are written (`docs/formats/llmbatch.md`)."""

from __future__ import annotations

from saev_store.formats.llmbatch.header import Header, parse_header
from saev_store.formats.llmbatch.manifest import Manifest
from saev_store.formats.llmbatch.reader import BatchFileReader

__all__ = ["BatchFileReader", "Header", "Manifest", "parse_header"]
