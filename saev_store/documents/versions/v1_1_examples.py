"""Protocol 1.1 with the keys of 2.0: written for half a day, before the version was raised."""

from __future__ import annotations

from pydantic import ConfigDict

from saev_store.documents.versions._base import EXAMPLES, Document, WrittenVersion, spelled


class Document11Examples(Document):
    """metadata.json of the morning of 2 October 2025."""

    model_config = ConfigDict(alias_generator=spelled(EXAMPLES))


VERSION = WrittenVersion(
    since="2025-10-02",
    protocol="1.1",
    model=Document11Examples,
    spelling=EXAMPLES,
    data="object",
    recipe="sorted-ascii",
    style="indent-4-ascii",
)
