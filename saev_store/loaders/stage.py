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
from saev_store.errors import ArgumentError, DeadlineError, NotFoundError, WriterConflictError, brief
from saev_store.store.identity import recording_identity
from saev_store.store.store import ShardStore
from saev_store.transport import open_transport

_POLL_S = 0.5
#: Document beside the copy: the recording that is copied and, when the copy is complete, its name.
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
    """Return the path of a copy of a store that holds only the layers and tokens asked for, in a folder of this machine.

    All processes of a machine may call it with the same arguments: one copies, the others wait for it. An interrupted copy is
    continued. A finished copy is used again, unless the source has a new recording: then it is deleted, and made again. A loader's state
    continues on the copy.

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
        LayerNotFoundError, NotFoundError, TransportError: see `saev_store.writer.copy_store`.
        CorruptShardError: the same, or a file of the copy is missing or short.

    >>> import tempfile
    >>> folder = tempfile.mkdtemp()
    >>> near = stage(SAMPLE, folder, layers=5, tokens="content")
    >>> ShardStore.open(near).shape, stage(SAMPLE, folder, layers=5, tokens="content") == near
    ((7, 1, 4, 8), True)
    """
    from saev_store.writer import copy_store

    deadline_s = time.monotonic() + check_number(timeout_s, name="timeout_s", zero_ok=True)
    is_path = isinstance(to, (str, os.PathLike))  # pyright: ignore[reportUnnecessaryIsInstance]  # callers may not check types
    folder = os.path.expandvars(os.fsdecode(to)) if is_path else ""
    if not folder or "$" in folder or (root := open_transport(folder)).local_path is None:
        raise ArgumentError(f"to is {brief(to)}; it must be a folder of this machine", where="to")
    with ShardStore.open(url, storage_options) as store:
        wanted = None
        if not isinstance(layers, str):
            wanted = list(cast("Sequence[LayerKey]", layers)) if are_several(layers) else [cast("LayerKey", layers)]
            wanted = [store.layout.layer_keys[store.layout.layer_index(key)] for key in wanted]
        recording = recording_identity(store.transport, store.layout, files=store.recorded_files())
        name = f"staged-{xxh3_128(json.dumps([store.url, wanted, tokens], default=repr).encode()).hexdigest()}"
    place = root.at(name)

    def staged() -> str:
        """Return the copy, which is made if there is none."""
        try:
            found = cast("dict[str, object]", json.loads(place.read(_STAGED, max_bytes=_MAX_BYTES)))
        except (NotFoundError, ValueError):
            found = dict[str, object]()
        if found.get("recording") != recording:
            place.delete(_STAGED)  # first: what is deleted in part is not a copy
            root.delete(name)
            place.put(_STAGED, json.dumps({"recording": recording}).encode())
        elif "copy" in found:
            with ShardStore.open(os.path.join(place.url, str(found["copy"]))) as near:
                near.validate(progress=False).raise_if_bad()
                return near.url
        made = copy_store(url, place.url, layers=wanted, tokens=tokens, storage_options=storage_options, progress=False)
        place.put(_STAGED, json.dumps({"recording": recording, "copy": os.path.basename(made)}).encode())
        return str(made)

    while True:
        try:
            with root.lock(f"{name}.lock"):
                return staged()
        except WriterConflictError:
            if time.monotonic() > deadline_s:
                raise DeadlineError(
                    f"another process has been copying the store for {timeout_s:g} s", where=place.url
                ) from None
        time.sleep(_POLL_S)
