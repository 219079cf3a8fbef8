"""Protocol 1.0.0: images and patches. `data` was a string for its first days, an object after that."""

from __future__ import annotations

from pydantic import ConfigDict

from saev_store.documents.versions._base import IMAGES, Document, WrittenVersion, spelled


class Document100(Document):
    """metadata.json of protocol 1.0.0."""

    model_config = ConfigDict(alias_generator=spelled(IMAGES))


VERSION = WrittenVersion(
    since="2025-06-19",
    protocol="1.0.0",
    model=Document100,
    spelling=IMAGES,
    data="either",
    recipe="sorted-ascii",
    style="indent-4-ascii",
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
        "dtype",
        "protocol",
    ),
)
