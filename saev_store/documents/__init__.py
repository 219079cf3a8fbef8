"""The JSON documents of a store: metadata.json of every version, shards.json, and the size of labels.bin.

Takes bytes and gives checked values, or one exception with all that is wrong; opens nothing.
"""

from saev_store.documents._parse import parse_json
from saev_store.documents.metadata import (
    METADATA_MAX_NBYTES,
    Metadata,
    match_hash,
    new_metadata,
    parse_metadata,
)
from saev_store.documents.shards import ShardsIndex, parse_shards, parse_token_array_size, rewriting
from saev_store.documents.versions import (
    COUNT_KEYS,
    PROTOCOLS,
    RECIPES,
    VERSIONS,
    WRITABLE_VERSIONS,
)
from saev_store.documents.writing import SHARDS_MAX_NBYTES, content_hashes, shards_bytes

__all__ = [
    "COUNT_KEYS",
    "METADATA_MAX_NBYTES",
    "PROTOCOLS",
    "RECIPES",
    "SHARDS_MAX_NBYTES",
    "VERSIONS",
    "WRITABLE_VERSIONS",
    "Metadata",
    "ShardsIndex",
    "content_hashes",
    "match_hash",
    "new_metadata",
    "parse_json",
    "parse_metadata",
    "parse_shards",
    "parse_token_array_size",
    "rewriting",
    "shards_bytes",
]
