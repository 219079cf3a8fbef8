"""`stats.json`: the statistics of a store, kept beside it with the identity of the recording that they were computed from."""

from __future__ import annotations

import hashlib
import json
from typing import TYPE_CHECKING

import numpy as np

from saev_store.core.arguments import is_mapping
from saev_store.core.layout import shard_name
from saev_store.documents import parse_json
from saev_store.errors import DocumentError, NotFoundError, SaevStoreError, brief
from saev_store.stats.moments import Moments
from saev_store.stats.result import Stats
from saev_store.store.identity import recording_identity
from saev_store.store.token_arrays import MASK

if TYPE_CHECKING:
    from saev_store.store.store import ShardStore

STATS_NAME = "stats.json"
_VERSION = 3
_COUNTS = ("n_values", "n_finite", "n_zeros", "n_saturated", "n_subnormal", "n_vectors")
#: Values that replace null while sums are merged.
_NONE = {"mean": 0.0, "m2": 0.0, "mean_norm": 0.0, "low": np.inf, "high": -np.inf}
#: Upper bound on the length of the numbers of a layer and token.
_ENTRY_BYTES = 320


def recording_of(store: ShardStore) -> dict[str, str]:
    """The entries of the file that identify the recording as it is now."""
    layout, arrays = store.layout, store.token_arrays
    names = list(map(shard_name, range(layout.n_shards)))
    if arrays.is_declared and MASK in arrays:  # it decides which tokens count
        names.append(arrays.declared(MASK).file_name)
    identity = recording_identity(store.transport, layout, files=names, prefer="versions")
    return {"metadata_sha256": hashlib.sha256(store.metadata.raw).hexdigest(), "recording": str(identity)}


def kept_stats(store: ShardStore) -> Stats | None:
    """The statistics kept beside the store, of all examples or of a sample; None if there are none that are usable.

    Computes nothing. Reads at most `stats.json`, and the versions of the files.
    """
    try:
        return read_stats(store)
    except SaevStoreError:
        return None


def read_stats(store: ShardStore) -> Stats | None:
    """The statistics kept beside the store; None if there are none, older ones, or those of another recording.

    Raises:
        DocumentError: the file breaks a rule.
        TransportError: it cannot be read.
    """
    layout, where = store.layout, f"{store.url}/{STATS_NAME}"
    max_nbytes = 4096 + _ENTRY_BYTES * layout.n_layers * layout.tokens_per_example
    try:
        raw = store.transport.read(STATS_NAME, max_bytes=max_nbytes)
    except NotFoundError:
        return None
    document = parse_json(raw, where=where, max_nbytes=max_nbytes)
    found = document if is_mapping(document) else dict[str, object]()
    if found.get("version") != _VERSION or not recording_of(store).items() <= found.items():
        return None
    try:
        arrays = {name: np.array(found[name]) for name in _COUNTS}
        is_right = all(array.dtype == np.int64 for array in arrays.values())
        for name, replacement in _NONE.items():
            numbers = np.array(found[name], dtype=np.float64)
            arrays[name] = np.where(np.isnan(numbers), replacement, numbers)
        n_examples, seed = found["n_examples"], found["seed"]
    except (KeyError, TypeError, ValueError, OverflowError) as error:
        raise DocumentError(f"an entry is missing or of another type: {brief(str(error))}", where=where) from error
    is_right &= all(array.shape == layout.shape[1:3] for array in arrays.values())
    if not is_right or type(n_examples) is not int or not (seed is None or isinstance(seed, int)):
        raise DocumentError(f"its numbers must be of shape {layout.shape[1:3]}, (layer, token)", where=where)
    if not 1 <= n_examples <= layout.n_examples:
        raise DocumentError(f"n_examples is {n_examples}; the store has {layout.n_examples}", where=where)
    return Stats(layout, Moments(**arrays), n_examples, seed)


def write_stats(store: ShardStore, stats: Stats, recording: dict[str, str]) -> None:
    """Write the file: one row per layer, one entry per token, null where a statistic is undefined.

    Floats are written so that they read back exactly.

    Raises:
        AccessError, ReadOnlyError, TransportError: it cannot be written.
    """
    moments = stats.moments
    columns: dict[str, list[list[object]]] = {name: getattr(moments, name).tolist() for name in _COUNTS}
    for name in _NONE:
        has = moments.n_vectors > 0 if name == "mean_norm" else moments.n_finite > 0
        columns[name] = np.where(has, getattr(moments, name), np.array(None)).tolist()
    head = {"version": _VERSION, **recording, "n_examples": stats.n_examples, "seed": stats.seed}
    document = json.dumps({**head, **columns}, allow_nan=False, separators=(",", ":"))
    store.transport.put(STATS_NAME, document.encode())
