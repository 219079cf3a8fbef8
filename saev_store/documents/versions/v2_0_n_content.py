"""Protocol 2.0 with `n_content_tokens_per_example`, a name that lived for a day."""

from __future__ import annotations

from pydantic import ConfigDict

from saev_store.documents.versions._base import N_CONTENT_TOKENS, DocumentWithDataset, WrittenVersion, spelled


class Document20NContent(DocumentWithDataset):
    """metadata.json of 7 October 2025."""

    model_config = ConfigDict(alias_generator=spelled(N_CONTENT_TOKENS))


VERSION = WrittenVersion(
    since="2025-10-07",
    protocol="2.0",
    model=Document20NContent,
    spelling=N_CONTENT_TOKENS,
    data="object",
    recipe="sorted-ascii",
    style="indent-4-ascii",
)
