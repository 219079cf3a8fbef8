"""Bringing what is trained on closer: to this machine's own disk, before or while it is read."""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Mapping, Sequence
from concurrent.futures import Future
from contextlib import nullcontext
from typing import Literal

from saev_store.core.rows import Tokens
from saev_store.errors import DeadlineError, NotFoundError, WriterConflictError
from saev_store.loaders._lease import Lease
from saev_store.loaders.cache import CachedTransport
from saev_store.store.store import ShardStore
from saev_store.transport import Transport, open_transport
from saev_store.writer.folder import METADATA, TEMPORARY

Layer = int | Sequence[int] | Literal["all"]

_POLL_S = 0.5


def stage(
    url: str | os.PathLike[str],
    to: str | os.PathLike[str],
    *,
    layers: Layer = "all",
    tokens: Tokens = "all",
    storage_options: Mapping[str, object] | None = None,
    timeout_s: float = 24 * 3600.0,
) -> str:
    """The address of a checked copy of a store below `to` that holds only the layers and tokens asked for.

    Every process of a machine may call it with the same arguments: one copies, the others wait for it. A copy that was
    interrupted is continued, a finished one is used again. Only the bytes of these layers and tokens are read. A loader's
    state goes on with the copy.

    A bucket has no locks: there the one that copies leaves a sign of life every few seconds, and the others go on with its
    work when they have seen none for half a minute to a minute.

    Args:
        url: The store.
        to: A folder, such as the machine's `$TMPDIR`, or an address; environment variables in it are filled in.
        layers: A label, several, or `"all"`.
        tokens: `"content"`, `"special"` (then the first content token comes along, because no store is without) or `"all"`.
        storage_options: For the source's file system.
        timeout_s: How long to wait for another process's copy.

    Raises:
        DeadlineError: another process did not finish its copy in time.
        LayerNotFoundError, NotFoundError, CorruptShardError, TransportError: see `saev_store.writer.copying.copy_store`.
    """
    from saev_store.writer.copying import copy_store, target_of

    wanted = None if isinstance(layers, str) else [layers] if isinstance(layers, int) else list(layers)
    folder = os.path.expandvars(os.fspath(to))
    with ShardStore.open(url, storage_options) as store:
        target = target_of(store, folder, wanted, tokens)
    root = open_transport(target.root)
    # A copy on a disk has locks, which end with their process.
    is_local = root.is_local
    lease = nullcontext(True) if is_local else Lease(root, f"{TEMPORARY}stage-{target.name}")
    deadline = time.monotonic() + timeout_s
    while True:
        try:
            # What is published can be had by all at once.
            with nullcontext(True) if _is_published(root, target.name) else lease as ours:
                if ours:
                    return copy_store(
                        url, folder, layers=wanted, tokens=tokens, storage_options=storage_options, progress=False
                    )
        except WriterConflictError:
            pass
        if time.monotonic() > deadline:
            raise DeadlineError(f"another process has been copying the store for {timeout_s:g} s", where=folder)
        time.sleep(_POLL_S)


def _is_published(root: Transport, name: str) -> bool:
    try:
        root.size(f"{name}/{METADATA}")
    except NotFoundError:
        return False
    return True


def stage_in_background(
    url: str | os.PathLike[str],
    to: str | os.PathLike[str],
    *,
    layers: Layer = "all",
    tokens: Tokens = "all",
    storage_options: Mapping[str, object] | None = None,
) -> Future[str]:
    """`stage` in a thread: train from the far store meanwhile, and go on from `result()` with the same loader state."""
    future: Future[str] = Future()

    def work() -> None:
        try:
            future.set_result(stage(url, to, layers=layers, tokens=tokens, storage_options=storage_options))
        except BaseException as error:
            future.set_exception(error)

    future.set_running_or_notify_cancel()
    threading.Thread(target=work, name="saev-stage", daemon=True).start()
    return future


def open_for_training(
    url: str,
    storage_options: Mapping[str, object] | None,
    *,
    layer: Layer,
    tokens: Tokens,
    use_tmpdir: bool,
    cache_dir: str | None,
    cache_bytes: int,
    damaged_ok: bool = False,
) -> ShardStore:
    """The store: a copy in $TMPDIR, or behind a cache, where that was asked for.

    Args:
        url: The store.
        storage_options: For its file system.
        layer: What will be trained on; nothing else is copied.
        tokens: Likewise.
        use_tmpdir: Copy to $TMPDIR where that is set.
        cache_dir: Keep what is read in this folder.
        cache_bytes: How much of it.
        damaged_ok: Open also where shards are missing or short. A damaged store is not copied.
    """
    if use_tmpdir and os.environ.get("TMPDIR"):
        return ShardStore.open(stage(url, "$TMPDIR", layers=layer, tokens=tokens, storage_options=storage_options))
    store = ShardStore.open(url, storage_options, damaged_ok=damaged_ok)
    if cache_dir is None:
        return store
    key = store.metadata.raw
    return ShardStore.open(
        CachedTransport(store.transport, os.path.expandvars(cache_dir), cache_bytes, key), damaged_ok=damaged_ok
    )
