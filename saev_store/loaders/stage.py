"""`stage`: a copy of the part of a store that is trained on, on this machine's disk."""

from __future__ import annotations

import json
import os
import time
from collections.abc import Mapping, Sequence
from typing import cast

from xxhash import xxh3_128

from saev_store.core.arguments import check_number
from saev_store.core.layout import LayerKey
from saev_store.core.rows import Layers, Tokens, are_several
from saev_store.errors import (
    ArgumentError,
    CorruptShardError,
    DeadlineError,
    NotFoundError,
    WriterConflictError,
    brief,
)
from saev_store.names import DIGESTS_NAME
from saev_store.store.identity import recording_identity
from saev_store.store.store import ShardStore
from saev_store.transport import Transport, open_transport

_POLL_S = 0.5
#: Document beside the copy: the recording that is copied and, when the copy is complete, its address and versions of its files.
_STAGED = "staged.json"
_MAX_BYTES = 1 << 16


def stage(
    url: str | os.PathLike[str],
    to: str | os.PathLike[str],
    *,
    layers: Layers = "all",
    tokens: Tokens = "all",
    storage_options: Mapping[str, object] | None = None,
    timeout_s: float = 24 * 3600.0,
) -> str:
    """Return the path of a checked copy of a store that holds only the layers and tokens asked for, in a folder of this machine.

    All processes of a machine may call it with the same arguments: one copies, the others wait for it. An interrupted copy is
    continued. A finished copy is used again, unless the source has a new recording: then it is deleted, and made again. If files of the
    copy have changed, it is compared with its digests first. A loader's state continues on the copy.

    Args:
        url: The store.
        to: A folder, such as `"$TMPDIR"`; environment variables in it are filled in. Each store, with its layers and tokens, has a
            folder of its own in it.
        layers: A label, or a pair (label, hook point), several of them, or `"all"`.
        tokens: `"content"`, `"special"` (with the first content token, because every store has one) or `"all"`.
        storage_options: For the source's file system.
        timeout_s: Longest wait for another process's copy.

    Raises:
        ArgumentError: `to` is empty, or not a folder of this machine.
        DeadlineError: another process did not finish its copy in time.
        LayerNotFoundError, NotFoundError, CorruptShardError, TransportError: see `saev_store.writer.copy_store`; also of a copy that was
            damaged since.

    >>> import tempfile
    >>> folder = tempfile.mkdtemp()
    >>> near = stage(SAMPLE, folder, layers=5, tokens="content")
    >>> ShardStore.open(near).shape, stage(SAMPLE, folder, layers=5, tokens="content") == near
    ((7, 1, 4, 8), True)
    """
    from saev_store.writer import copy_store

    timeout_s = check_number(timeout_s, name="timeout_s", zero_ok=True)
    root = open_transport(_folder_of(to))
    if root.local_path is None:
        raise ArgumentError(
            f"to is {brief(to)}; it must be a folder of this machine", where="to", remedy="Use copy_store for buckets."
        )
    with ShardStore.open(url, storage_options) as store:
        wanted = None
        if not isinstance(layers, str):
            wanted = list(cast("Sequence[LayerKey]", layers)) if are_several(layers) else [cast("LayerKey", layers)]
            for key in wanted:
                store.layout.layer_index(key)
        recording = recording_identity(store.transport, store.layout, files=store.recorded_files())
        name = f"staged-{xxh3_128(json.dumps([store.url, wanted, tokens]).encode()).hexdigest()}"
    place = root.at(name)
    deadline_s = time.monotonic() + timeout_s
    while True:
        try:
            with root.lock(f"{name}.lock"):
                found: dict[str, object] = _read(place)
                if found.get("recording") != recording:
                    place.delete(_STAGED)  # first: what is deleted in part is not a copy
                    root.delete(name)
                    found = {"recording": recording}
                    place.put(_STAGED, json.dumps(found).encode())
                if "copy" in found:
                    return _checked(place, found)
                made = copy_store(
                    url, place.url, layers=wanted, tokens=tokens, storage_options=storage_options, progress=False
                )
                _write(place, {**found, "copy": os.path.basename(made)})
                return str(made)
        except WriterConflictError:
            if time.monotonic() > deadline_s:
                raise DeadlineError(
                    f"another process has been copying the store for {timeout_s:g} s", where=place.url
                ) from None
        time.sleep(_POLL_S)


def _checked(place: Transport, found: dict[str, object]) -> str:
    """Return the path of a finished copy, after a look at its files; they are read if they have changed.

    Raises:
        CorruptShardError: a file is missing, short or differs from its digests.
    """
    with ShardStore.open(os.path.join(place.url, str(found["copy"]))) as near:
        has_changed = _versions(near) != found.get("versions")
        near.validate(deep=has_changed, progress=False).raise_if_bad()
        if has_changed and not any(entry.name == DIGESTS_NAME for entry in near.transport.list()):
            raise CorruptShardError(
                "files of the copy have changed, and its digests are gone", where=near.url, remedy="Delete the copy."
            )
        _write(place, found)
        return near.url


def _versions(store: ShardStore) -> str:
    """Return text that changes when a file of a copy is written."""
    return recording_identity(store.transport, store.layout, files=store.recorded_files(), prefer="versions")


def _read(place: Transport) -> dict[str, object]:
    """Return what is known of a copy; nothing if there is none yet."""
    try:
        return cast("dict[str, object]", json.loads(place.read(_STAGED, max_bytes=_MAX_BYTES)))
    except (NotFoundError, ValueError):
        return {}


def _write(place: Transport, found: dict[str, object]) -> None:
    """Note that a copy is finished, and how its files are now."""
    with ShardStore.open(os.path.join(place.url, str(found["copy"]))) as near:
        now = {**found, "versions": _versions(near)}
    if now != found:
        place.put(_STAGED, json.dumps(now).encode())


def _folder_of(given: str | os.PathLike[str]) -> str:
    """Return a folder, with the environment variables in it filled in.

    Raises:
        ArgumentError: it is empty, or a variable in it is not set.
    """
    is_path = isinstance(given, (str, os.PathLike))  # pyright: ignore[reportUnnecessaryIsInstance]  # callers may not check types
    text = os.path.expandvars(os.fsdecode(given)) if is_path else ""
    if not text or "$" in text:
        raise ArgumentError(f"to is {brief(given)}; it must be a folder", where="to", remedy="Set its variables.")
    return text
