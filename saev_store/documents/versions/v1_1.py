"""Protocol 1.1: the keys of 1.0.0, labels.bin beside them, and `pixel_agg` from the second day on."""

from __future__ import annotations

from pydantic import ConfigDict

from saev_store.documents.versions._base import IMAGES, Document, WrittenVersion, spelled


class Document11(Document):
    """metadata.json of protocol 1.1."""

    model_config = ConfigDict(alias_generator=spelled(IMAGES))


VERSION = WrittenVersion(
    since="2025-09-15",
    protocol="1.1",
    model=Document11,
    spelling=IMAGES,
    data="object",
    recipe="sorted-ascii",
    style="indent-4-ascii",
)
