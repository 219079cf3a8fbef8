"""The JSON documents of a store: metadata.json of every version, shards.json, and the size of labels.bin.

Takes bytes and gives checked values, or one exception with all that is wrong; opens nothing.
"""

from saev_store.documents._choose import depth_order
from saev_store.documents._json import loads as parse_json
from saev_store.documents.hashing import RECIPES, Recipe, content_hashes
from saev_store.documents.metadata import (
    METADATA_MAX_NBYTES,
    Metadata,
    match_hash,
    new_metadata,
    parse_metadata,
)
from saev_store.documents.shards import (
    COUNT_KEYS,
    SHARDS_MAX_NBYTES,
    ShardsIndex,
    labels_nbytes,
    parse_labels_size,
    parse_shards,
    shards_bytes,
)
from saev_store.documents.versions import PROTOCOLS, VERSIONS, WRITABLE_VERSIONS, WrittenVersion

__all__ = [
    "COUNT_KEYS",
    "METADATA_MAX_NBYTES",
    "PROTOCOLS",
    "RECIPES",
    "SHARDS_MAX_NBYTES",
    "VERSIONS",
    "WRITABLE_VERSIONS",
    "Metadata",
    "Recipe",
    "ShardsIndex",
    "WrittenVersion",
    "content_hashes",
    "depth_order",
    "labels_nbytes",
    "match_hash",
    "new_metadata",
    "parse_json",
    "parse_labels_size",
    "parse_metadata",
    "parse_shards",
    "shards_bytes",
]
