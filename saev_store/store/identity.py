"""Recording identity: a short value that changes when the bytes of a recording change.

Everything that is derived from a store and kept (statistics, names of dask tasks, HTTP entity tags, cached extents, staged
copies) records the identity it was derived from, and is discarded when the store has another one.

The identity is taken from the first of these that is available:

1. `contents`: a digest of the bytes, for a store in memory.
2. `digests`: the block digests in `digests.json`, when they cover all files. Copies of a recording have the same identity,
   wherever they are.
3. `versions`: the size, modification time and change time (ns) of each local file, or its size and version (ETag, generation)
   where the transport reports one. Copies have different identities; so has a file that was only touched or linked.
4. `sizes`: the size of each file, and 4 KiB at its start, middle and end. A file that differs elsewhere only is not noticed.

Digests describe what was *written*. Pass `prefer="versions"` for values derived from bytes that were not compared with the
digests: a damaged file has the same digests after its repair, but another change time.

>>> from saev_store import ShardStore
>>> store = ShardStore.open(SAMPLE)
>>> recording_identity(store.transport, store.layout).kind
'versions'
"""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Literal, get_args

from saev_store._runtime.threads import ahead
from saev_store.core.layout import Layout, shard_name
from saev_store.core.token_arrays import LABELS, TokenArray
from saev_store.errors import AccessError, DocumentError, NotFoundError
from saev_store.transport import Transport
from saev_store.transport.checks import os_errors

IdentityKind = Literal["digests", "versions", "contents", "sizes"]
_DIGEST_BYTES = 20
#: What is read in three places of a file that has no version.
_SAMPLE_BYTES = 4096
#: Far files that are looked at side by side.
_N_THREADS = 16


@dataclass(frozen=True, slots=True)
class RecordingIdentity:
    """The identity of the files of one recording. Two recordings are the same if both attributes are equal.

    Attributes:
        kind: What the value was derived from.
        value: 40 hexadecimal digits.
    """

    kind: IdentityKind
    value: str

    def __str__(self) -> str:
        return f"{self.kind}:{self.value}"

    @classmethod
    def parse(cls, text: str) -> RecordingIdentity | None:
        """The identity that `str` has written; None for any other text.

        >>> identity = RecordingIdentity("sizes", "0" * 40)
        >>> RecordingIdentity.parse(str(identity)) == identity, RecordingIdentity.parse("sizes:1")
        (True, None)
        """
        kind, _, value = text.partition(":")
        hexadecimal = len(value) == 2 * _DIGEST_BYTES and set(value) <= set("0123456789abcdef")
        for known in get_args(IdentityKind):
            if kind == known and hexadecimal:
                return cls(known, value)
        return None


def recording_identity(
    transport: Transport,
    layout: Layout,
    *,
    files: Sequence[str] | None = None,
    prefer: Literal["digests", "versions"] = "digests",
) -> RecordingIdentity:
    """The identity of a store's files, as they are now. A file that is missing is part of the identity.

    Reads `digests.json`, or the size of each file. File contents are read only where they are in memory, and in three places where a
    file has no version.

    Args:
        transport: Rooted at the store's folder.
        layout: The store's geometry.
        files: Names relative to the store; default: all shards that hold examples.
        prefer: Which of digests and versions to use where both are available.

    Raises:
        AccessError, TransportError: a file cannot be looked at, or `digests.json` not read.
    """
    names = [shard_name(idx) for idx in range(layout.n_shards)] if files is None else list(files)
    by_digests = _by_digests(transport, layout, names) if prefer == "digests" else None
    if by_digests is not None:
        return by_digests
    found = ahead(partial(_facts, transport), names, _N_THREADS)
    facts = [(name, *fact) for name, fact in zip(names, found, strict=True)]
    if all(version is not None for _, _, version, _ in facts):
        return _identity("versions", layout, facts)
    by_digests = _by_digests(transport, layout, names) if prefer == "versions" else None
    return by_digests or _identity("sizes", layout, facts)


def recorded_files(transport: Transport, layout: Layout, declared: Iterable[TokenArray] | None) -> list[str]:
    """Shards and token arrays: the `files` of what is derived from both, such as copies, and rows that a mask chooses.

    Args:
        transport: Rooted at the store's folder.
        layout: The store's geometry.
        declared: The token arrays that the document declares; None where it does not say, and `labels.bin` is looked for.
    """
    names = [shard_name(idx) for idx in range(layout.n_shards)]
    if declared is not None:
        return [*names, *(array.file_name for array in declared)]
    try:
        transport.size(LABELS.file_name)
    except NotFoundError:
        return names
    return [*names, LABELS.file_name]


def _identity(kind: IdentityKind, layout: Layout, facts: object) -> RecordingIdentity:
    text = json.dumps([kind, layout.shape, layout.examples_per_shard, facts], separators=(",", ":"))
    return RecordingIdentity(kind, hashlib.blake2b(text.encode(), digest_size=_DIGEST_BYTES).hexdigest())


def _by_digests(transport: Transport, layout: Layout, names: Sequence[str]) -> RecordingIdentity | None:
    """None where `digests.json` is missing, breaks a rule, or lacks a file."""
    from saev_store.writer.digests import load_digests

    # One that cannot be read just then is an error: another kind of identity would say that this is another recording.
    try:
        digests = load_digests(transport)
    except DocumentError:
        return None
    if digests is None or not all(name in digests.files for name in names):
        return None
    return _identity("digests", layout, [digests.block_bytes, [[name, digests.files[name].digests] for name in names]])


def _facts(transport: Transport, name: str) -> tuple[int, str | None, str]:
    """Size and version of a file, and a digest of some of its bytes where it has no version.

    (-1, "missing", "") where there is none, and (-1, "denied", "") where a folder of this machine may not be looked into.
    """
    folder, where = transport.local_path, f"{transport.url}/{name}"
    try:
        with os_errors(where, "look at it"):
            if folder is not None:
                status = os.stat(os.path.join(folder, name))
                # A backup comes back with the old time of its content, but not with the old time of its entry.
                return status.st_size, f"{status.st_mtime_ns} {status.st_ctime_ns}", ""
            size = transport.size(name)
            return size, (transport.version(name) or None) if size else None, ""
    except NotFoundError:
        return -1, "missing", ""
    except AccessError:
        if folder is None:
            raise
        return -1, "denied", ""
