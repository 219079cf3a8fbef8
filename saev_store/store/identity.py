"""Recording identity: a short text that changes when the files of a recording change.

What is derived from a store and kept (statistics, names of dask tasks, staged copies) records it. It begins with `digests:` if it was
taken from a `digests.json` that covers all files, which copies share; or with `versions:` of sizes and ETags, or inodes and times.
Digests describe what was *written*: a damaged file has the same after its repair. Values of bytes that were not compared with
them need `prefer="versions"`.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Sequence
from functools import partial
from typing import Literal

from saev_store._runtime.threads import ahead
from saev_store.core.layout import Layout, shard_name
from saev_store.errors import AccessError, DocumentError, NotFoundError, TransportError
from saev_store.transport import Transport

#: Files that are looked at side by side.
_N_THREADS = 16


def recording_identity(
    transport: Transport, layout: Layout, *, files: Sequence[str] | None = None,
    prefer: Literal["digests", "versions"] = "digests",
) -> str:  # fmt: skip
    """The identity of files as they are now, by default of all shards. A file that is missing is part of it."""
    names = [shard_name(idx) for idx in range(layout.n_shards)] if files is None else list(files)
    kind, facts = "digests", _digests(transport, names) if prefer == "digests" else None
    if facts is None:
        kind, facts = "versions", [*zip(names, ahead(partial(_version, transport), names, _N_THREADS), strict=True)]
    text = json.dumps([layout.shape, layout.examples_per_shard, facts], separators=(",", ":"))
    return f"{kind}:{hashlib.blake2b(text.encode(), digest_size=20).hexdigest()}"


def exists(transport: Transport, path: str) -> bool:
    """Return True if there is a file of that name."""
    try:
        transport.size(path)
    except NotFoundError:
        return False
    return True


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
    except (NotFoundError, AccessError, TransportError) as error:
        if isinstance(error, TransportError) and not transport.is_local:  # which may pass
            raise
        return -1, type(error).__name__
