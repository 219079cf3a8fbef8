"""Protocol 2.1: examples and tokens. `data` is a string (a base64 pickle, from its writers); `pixel_agg` may be null."""

from __future__ import annotations

from pydantic import ConfigDict

from saev_store.documents.versions._base import TOKENS, DocumentWithDataset, WrittenVersion, spelled


class Document21(DocumentWithDataset):
    """metadata.json of protocol 2.1."""

    model_config = ConfigDict(alias_generator=spelled(TOKENS))


VERSION = WrittenVersion(
    since="2025-10-13",
    protocol="2.1",
    model=Document21,
    spelling=TOKENS,
    data="string",
    recipe="field-order-8",
    style="indent-2-utf8",
    writes=(
        "family",
        "ckpt",
        "layers",
        "content_tokens_per_example",
        "cls_token",
        "d_model",
        "n_examples",
        "max_tokens_per_shard",
        "data",
        "dataset",
        "pixel_agg",
        "dtype",
        "protocol",
    ),
)
