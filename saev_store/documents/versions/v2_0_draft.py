"""Protocol 2.0 on its first day, without the `dataset` that its text demands."""

from __future__ import annotations

from pydantic import ConfigDict

from saev_store.documents.versions._base import EXAMPLES, Document, WrittenVersion, spelled


class Document20Draft(Document):
    """metadata.json of the evening of 2 October 2025."""

    model_config = ConfigDict(alias_generator=spelled(EXAMPLES))


VERSION = WrittenVersion(
    since="2025-10-02",
    protocol="2.0",
    model=Document20Draft,
    spelling=EXAMPLES,
    data="object",
    recipe="sorted-ascii",
    style="indent-4-ascii",
)
