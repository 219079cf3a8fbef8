"""Energon: WebDatasets with an index in `.nv-meta` (`docs/formats.md`)."""

from __future__ import annotations

from saev_store.sources.energon.reader import EnergonDataset, RawSample
from saev_store.sources.energon.samples import SAMPLE_TYPES, CrudeSample, Sample

__all__ = ["SAMPLE_TYPES", "CrudeSample", "EnergonDataset", "RawSample", "Sample"]
