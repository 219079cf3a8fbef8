"""The formats that activations are recorded from: token streams, pre-formed batches, folders of images and text.

>>> from saev_store.sources import open_source
>>> source = open_source(TOKENS)
>>> source.format, len(source), source[1].tolist()
('mmididx', 3, [100, 101, 102, 103])
"""

from __future__ import annotations

from saev_store.sources._source import Source
from saev_store.sources.images import ImageFolder
from saev_store.sources.map_style import MapStyle
from saev_store.sources.provenance import Origin, recorded_from
from saev_store.sources.sniff import open_source, reopen
from saev_store.sources.texts import TextFile

__all__ = [
    "ImageFolder",
    "MapStyle",
    "Origin",
    "Source",
    "TextFile",
    "open_source",
    "recorded_from",
    "reopen",
]
