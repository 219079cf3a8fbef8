"""`saev-store info`: describes a store or a data set without reading activations."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING

from saev_store.cli._options import AsJson, Pairs, StorageOptions, Url, storage_options
from saev_store.cli._output import emit, emit_json
from saev_store.errors import CorruptShardError, DocumentError, NotFoundError, SaevStoreError

if TYPE_CHECKING:
    from saev_store.sources.sniff import Found
    from saev_store.store.store import ShardStore


_FILES = (".batch", ".idx", ".bin")


def info(url: Url, as_json: AsJson = False, options: StorageOptions = None, option: Pairs = None) -> None:
    """Describe a store, or a data set that stores are recorded from. Opens damaged stores too."""
    from saev_store.store.store import ShardStore

    given = storage_options(options, option)
    source = source_at(url, given)
    if source is not None:
        source_info(source, as_json=as_json)
        return
    with ShardStore.open(url, given, damaged_ok=True) as store:
        emit_json(describe(store)) if as_json else emit(repr(store))


def describe(store: ShardStore) -> dict[str, object]:
    """A store as plain JSON types."""
    from saev_store.validation import problem_to_dict

    layout, metadata = store.layout, store.metadata
    return {
        "url": store.url,
        "name": store.name,
        "hash": metadata.hash,
        "protocol": metadata.protocol,
        "family": metadata.family,
        "ckpt": metadata.ckpt,
        "dataset": metadata.dataset,
        "dims": list(store.dims),
        "shape": list(store.shape),
        "dtype": metadata.dtype,
        "layers": list(store.layers),
        "content_tokens_per_example": layout.content_tokens_per_example,
        "cls_token": layout.cls_token,
        "n_shards": layout.n_shards,
        "examples_per_shard": layout.examples_per_shard,
        "nbytes": store.nbytes,
        "labels": _has_labels(store),
        "engine": store.transport.name,
        "problems": [problem_to_dict(problem) for problem in store.problems],
    }


def _has_labels(store: ShardStore) -> bool:
    """Whether labels can be read; `problems` lists those of a wrong size."""
    try:
        return store.has_labels
    except DocumentError:
        return False


def source_at(url: str, options: Mapping[str, object] | None) -> Found | None:
    """The data set at an address, not opened; None for a store and for unknown formats.

    Raises:
        NotFoundError, DocumentError: the name is that of a data set's file, but the file is missing or invalid.
    """
    from saev_store.names import METADATA_NAME
    from saev_store.sources.sniff import find_source, sniff
    from saev_store.transport import open_transport

    if url.endswith(_FILES):
        return find_source(url, options)
    try:
        open_transport(url, options).size(METADATA_NAME)
        return None
    except NotFoundError:
        return sniff(url, options)
    except SaevStoreError:
        return None


def source_info(found: Found, *, as_json: bool) -> None:
    """Describe a data set."""
    from saev_store.validation import problem_to_dict

    with found.open(damaged_ok=True) as source:
        if not as_json:
            emit(repr(source))
            return
        problems = [problem_to_dict(problem) for problem in source.problems]
        try:
            described = source.describe()
        except (NotFoundError, CorruptShardError):  # a data set with a missing tar has no digest
            described = {"format": source.format, "url": source.url, "n_samples": len(source)}
        emit_json({**described, "problems": problems})
