"""Protocol 2.0 as its published text has it: examples and patches, with `dataset`."""

from __future__ import annotations

from pydantic import ConfigDict

from saev_store.documents.versions._base import EXAMPLES, DocumentWithDataset, WrittenVersion, spelled


class Document20(DocumentWithDataset):
    """metadata.json of protocol 2.0."""

    model_config = ConfigDict(alias_generator=spelled(EXAMPLES))


VERSION = WrittenVersion(
    since="2025-10-03",
    protocol="2.0",
    model=Document20,
    spelling=EXAMPLES,
    data="object",
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
        "dataset",
        "dtype",
        "protocol",
    ),
)
