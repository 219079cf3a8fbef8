"""`saev-store info`: describes a store or a data set without reading activations."""

from __future__ import annotations

from typing import TYPE_CHECKING

from saev_store.cli._options import AsJson, Pairs, StorageOptions, Url, storage_options
from saev_store.cli._output import emit, emit_json
from saev_store.errors import DocumentError

if TYPE_CHECKING:
    from saev_store.store.store import ShardStore


def info(url: Url, as_json: AsJson = False, options: StorageOptions = None, option: Pairs = None) -> None:
    """Describe a store, or a data set that stores are recorded from. Opens damaged stores too."""
    from saev_store.cli.sources import source_at, source_info
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
