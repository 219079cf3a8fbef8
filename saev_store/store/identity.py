"""Recording identity: a short text that changes when the files of a recording change.

What is derived from a store and kept (statistics, names of dask tasks, staged copies) records the identity it was derived from, and is
discarded when the store has another one. It begins with what it was taken from:

* `digests:` the block digests in `digests.json`, if they cover all files. Copies of a recording have the same identity, wherever they are.
* `versions:` the size and version of each file: its ETag or generation, or its inode and modification time. Copies have different
  identities, and so has a file that was only touched.

Digests describe what was *written*. Pass `prefer="versions"` for values derived from bytes that were not compared with the
digests: a damaged file has the same digests after its repair, but another version.

>>> from saev_store import ShardStore
>>> store = ShardStore.open(SAMPLE)
>>> recording_identity(store.transport, store.layout).partition(":")[0]
'versions'
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable, Sequence
from functools import partial
from typing import Literal

from saev_store._runtime.threads import ahead
from saev_store.core.layout import Layout, shard_name
from saev_store.core.token_arrays import LABELS, TokenArray
from saev_store.errors import AccessError, DocumentError, NotFoundError
from saev_store.transport import Transport

#: Files that are looked at side by side.
_N_THREADS = 16


def recording_identity(
    transport: Transport,
    layout: Layout,
    *,
    files: Sequence[str] | None = None,
    prefer: Literal["digests", "versions"] = "digests",
) -> str:
    """The identity of a store's files, as they are now. A file that is missing is part of the identity.

    Reads `digests.json`, or asks for the size and version of each file.

    Args:
        transport: Rooted at the store's folder.
        layout: The store's geometry.
        files: Names relative to the store; default: all shards that hold examples.
        prefer: Use versions even if there are digests.

    Raises:
        TransportError: a file cannot be looked at, or `digests.json` not read.
    """
    names = [shard_name(idx) for idx in range(layout.n_shards)] if files is None else list(files)
    kind, facts = "digests", _digests(transport, names) if prefer == "digests" else None
    if facts is None:
        kind, facts = "versions", [*zip(names, ahead(partial(_version, transport), names, _N_THREADS), strict=True)]
    text = json.dumps([layout.shape, layout.examples_per_shard, facts], separators=(",", ":"))
    return f"{kind}:{hashlib.blake2b(text.encode(), digest_size=20).hexdigest()}"


def recorded_files(transport: Transport, layout: Layout, declared: Iterable[TokenArray] | None) -> list[str]:
    """Shards and token arrays: the `files` of what is derived from both, such as copies, and rows that a mask chooses.

    Args:
        transport: Rooted at the store's folder.
        layout: The store's geometry.
        declared: The token arrays that the document declares; None if it declares none, and `labels.bin` is looked for.
    """
    names = [shard_name(idx) for idx in range(layout.n_shards)]
    if declared is not None:
        return [*names, *(array.file_name for array in declared)]
    try:
        transport.size(LABELS.file_name)
    except NotFoundError:
        return names
    return [*names, LABELS.file_name]


def _digests(transport: Transport, names: Sequence[str]) -> object:
    """The digests of files; None where `digests.json` is missing, breaks a rule, or lacks a file."""
    from saev_store.writer.digests import load_digests

    try:
        found = load_digests(transport)
    except DocumentError:
        return None
    if found is None or not all(name in found.files for name in names):
        return None
    return [found.block_bytes, [[name, found.files[name].nbytes, found.files[name].digests] for name in names]]


def _version(transport: Transport, name: str) -> tuple[int, str]:
    """Size and version of a file; (-1, the class of the error) if it cannot be looked at."""
    try:
        return transport.stat(name)
    except (NotFoundError, AccessError) as error:
        return -1, type(error).__name__
