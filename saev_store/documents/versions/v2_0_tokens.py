"""Protocol 2.0 with the keys of 2.1. From 2025-10-10 its writer hashed in field order; the keys stayed."""

from __future__ import annotations

from pydantic import ConfigDict

from saev_store.documents.versions._base import TOKENS, DocumentWithDataset, WrittenVersion, spelled


class Document20Tokens(DocumentWithDataset):
    """metadata.json of 8 to 12 October 2025."""

    model_config = ConfigDict(alias_generator=spelled(TOKENS))


VERSION = WrittenVersion(
    since="2025-10-08",
    protocol="2.0",
    model=Document20Tokens,
    spelling=TOKENS,
    data="object",
    recipe="sorted-ascii",
    style="indent-4-ascii",
)
