"""MMIDIDX: token sequences and documents, and samples of one length over them (`docs/formats.md`)."""

from __future__ import annotations

from saev_store.sources.mmididx.reader import IndexedDataset
from saev_store.sources.mmididx.samples import SampleIndices, TokenSamples, build_indices, build_sample_idx
from saev_store.sources.mmididx.writer import IndexedDatasetBuilder

__all__ = [
    "IndexedDataset",
    "IndexedDatasetBuilder",
    "SampleIndices",
    "TokenSamples",
    "build_indices",
    "build_sample_idx",
]
