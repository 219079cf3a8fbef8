"""Copies of a store closer to the training: on this machine's disk, or in a nearer bucket."""

from __future__ import annotations

import json
import os
import re
import secrets
import shutil
import socket
import threading
import time
import weakref
from collections.abc import Mapping, Sequence
from concurrent.futures import Future
from contextlib import nullcontext, suppress
from types import TracebackType
from typing import cast

from saev_store.core.arguments import check_number
from saev_store.core.layout import LayerKey, shard_name
from saev_store.core.rows import Layers, Tokens, are_several
from saev_store.errors import (
    ArgumentError,
    DeadlineError,
    NotFoundError,
    SaevStoreError,
    StoreExistsError,
    TransportError,
    WriterConflictError,
    brief,
)
from saev_store.names import METADATA_NAME
from saev_store.store.identity import recording_identity
from saev_store.store.store import ShardStore
from saev_store.transport import Transport, open_transport
from saev_store.transport.checks import os_errors
from saev_store.transport.durable import ASIDE_PREFIX
from saev_store.writer.folder import TEMPORARY, Folder

#: How often the document changes.
BEAT_S = 5.0
#: Looks that find the document unchanged before another process takes the lease, at least. Each process adds a random number
#: of up to as many, so that usually one of them takes it. Looks are counted instead of seconds: a suspended machine loses nothing.
PATIENCE = 60
_MAX_BYTES = 4096


class Lease:
    """Heartbeat lease for storage without locks: the context is True if this process holds it, False to try again later.

    Args:
        transport: The place.
        path: The document; it is removed when the context ends.

    Raises:
        ReadOnlyError: nothing can be written there.
        TransportError: the system gives no more threads.
    """

    def __init__(self, transport: Transport, path: str) -> None:
        self._folder, self._path = Folder(transport, ""), path
        self._patience = PATIENCE + secrets.randbelow(PATIENCE)
        self._attempt = secrets.token_hex(8)
        self._seen: bytes | None = None
        self._n_same = self._n_beats = 0
        self._ended = threading.Event()
        self._beating: threading.Thread | None = None

    def __enter__(self) -> bool:
        found = self._look()
        if found is not None and not self._is_given_up(found):
            return False
        if found is not None:
            self._folder.put(self._path, self._document())
        else:
            try:
                if self._folder.create(self._path, self._document()) == "taken":
                    return False
            except StoreExistsError:  # created, and deleted, by another process meanwhile
                return False
        if not self.is_ours():  # another process was as quick, where creating is not atomic
            return False
        self._ended = threading.Event()
        self._beating = threading.Thread(
            target=_beat, args=(weakref.ref(self), self._ended), name="saev-lease", daemon=True
        )
        try:
            self._beating.start()
        except TransportError:
            self._beating = None
            self._folder.delete(self._path)
            raise
        except BaseException:  # Ctrl-C: nobody will leave what was not entered
            self._ended.set()
            raise
        return True

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, tb: TracebackType | None) -> None:
        if self._beating is None:
            return
        self._ended.set()
        self._beating.join()
        self._beating = None
        with suppress(SaevStoreError):  # the others will find that it does not change any more
            if self.is_ours():
                self._folder.delete(self._path)

    def _is_given_up(self, found: bytes) -> bool:
        """Whether the document has not changed for as many looks as patience allows."""
        self._n_same = self._n_same + 1 if found == self._seen else 0
        self._seen = found
        return self._n_same >= self._patience

    def renew(self) -> bool:
        """Change the document; False if the lease was lost."""
        with suppress(SaevStoreError):  # the next beat may arrive
            if not self.is_ours():
                return False
            self._folder.put(self._path, self._document())
        return True

    def _document(self) -> bytes:
        """The next content of the document."""
        self._n_beats += 1
        who = {"attempt": self._attempt, "pid": os.getpid(), "host": socket.gethostname(), "beat": self._n_beats}
        return json.dumps(who).encode()

    def _look(self) -> bytes | None:
        return self._folder.read(self._path, max_bytes=_MAX_BYTES)

    def is_ours(self) -> bool:
        """Whether this process wrote the document."""
        return self._attempt.encode() in (self._look() or b"")


_POLL_S = 0.5
#: The mark of a copy of another recording while it is removed.
_REMOVING = b"removing"
#: What stands before the address of the source in a mark.
_FROM = b" from "


def _beat(found: weakref.ref[Lease], ended: threading.Event) -> None:
    """Renew a lease until it ends, is lost, or is held by nobody: an interrupt may come before its end."""
    while not ended.wait(BEAT_S):
        lease = found()
        if lease is None or not lease.renew():
            return
        del lease


def stage(
    url: str | os.PathLike[str],
    to: str | os.PathLike[str],
    *,
    layers: Layers = "all",
    tokens: Tokens = "all",
    storage_options: Mapping[str, object] | None = None,
    timeout_s: float = 24 * 3600.0,
) -> str:
    """The address of a checked copy of a store below `to` that holds only the layers and tokens asked for.

    Every process of a machine may call it with the same arguments: one copies, the others wait for it. An interrupted copy is
    continued. A finished copy is used again while it is of the same recording (`recording_identity`); after a new recording
    of the source it is replaced; a copy of another source with the same metadata is not. Where its files have changed since, it
    is first compared with its digests.
    Only the bytes of these layers and tokens are read. Where the source has a `digests.json`, its examples are read whole, once, and
    compared (of examples above 64 MiB the blocks of these layers). A loader's state continues on the copy.

    A bucket has no locks. There the copying process renews a lease every few seconds; another process takes over when it has
    not changed for half a minute to a minute.

    Args:
        url: The store.
        to: A folder, such as the machine's `$TMPDIR`, or an address; environment variables in it are filled in.
        layers: A label, or a pair (label, hook point), several of them, or `"all"`.
        tokens: `"content"`, `"special"` (then the first content token comes along, because no store is without) or `"all"`.
        storage_options: For the source's file system.
        timeout_s: How long to wait for another process's copy.

    Raises:
        ArgumentError: `to` is empty.
        DeadlineError: another process did not finish its copy in time.
        StoreExistsError: a copy of another source with the same metadata is there.
        LayerNotFoundError, NotFoundError, CorruptShardError, TransportError: see `saev_store.writer.copying.copy_store`.
    """
    from saev_store.writer.copying import check_bytes, copy_store, target_of

    timeout_s = check_number(timeout_s, name="timeout_s", zero_ok=True)
    wanted: list[LayerKey] | None = None
    if not isinstance(layers, str):
        wanted = list(cast("Sequence[LayerKey]", layers)) if are_several(layers) else [cast("LayerKey", layers)]
    folder = _folder_of(to, name="to")
    with ShardStore.open(url, storage_options) as store:
        target = target_of(store, folder, wanted, tokens)
        recording = str(recording_identity(store.transport, store.layout, files=store.recorded_files())).encode()
        source = os.fsencode(store.url)
    root, copied = open_transport(target.root), recording + b" copied "
    lease, mark = Lease(root, f"{TEMPORARY}stage-{target.name}"), f"{TEMPORARY}staged-{target.name}"
    deadline = time.monotonic() + timeout_s
    while True:
        there = Folder(root, "")
        found, other = _mark_of(there.read(mark)) if _is_published(root, target.name) else (b"", b"")
        # A published copy is checked by all at once. A copy on a disk is made under a lock that ends with its process.
        is_copied = found is not None and found.startswith(copied)
        if found and found not in {recording, _REMOVING} and not is_copied and other not in {b"", source}:
            raise StoreExistsError(
                f"a copy of another recording with the same metadata is there, of {os.fsdecode(other)}",
                where=target.url,
                remedy="Stage it to another folder; who reads that copy would get other vectors.",
            )
        free = is_copied or found in {recording, None} or (found == b"" and root.is_local)
        held = None if free else lease
        with suppress(WriterConflictError), held or nullcontext(True) as ours:
            if ours:
                if found and found != recording and not is_copied:
                    # Another process may have replaced it since the mark was read.
                    if _mark_of(there.read(mark))[0] == found:
                        there.put(mark, _REMOVING)
                        _remove(root, target.name, held)
                        there.delete(mark)
                elif found == b"":
                    if there.read(mark) == _REMOVING:  # of a process that was interrupted
                        _remove(root, target.name, held)
                    there.put(mark, recording + _FROM + source)
                if is_copied:  # after a comparison with the source
                    with ShardStore.open(root.at(target.name)) as near:
                        near.validate().raise_if_bad()
                        # Reading terabytes again at each start of a training run would cost as much as copying them.
                        if found != (now := copied + _versions(near)):
                            used = map(near.layout.used_nbytes, range(near.layout.n_shards))
                            needed = [shard_name(idx) for idx, nbytes in enumerate(used) if nbytes]
                            check_bytes(Folder(root, target.name), progress=False, needed=needed)
                            there.put(mark, now + _FROM + source)
                    return near.url if root.local_path is not None else target.url
                if found in {recording, None, b""}:
                    # What was begun of another recording is not wanted; a whole copy goes on in it.
                    made = copy_store(
                        url, folder, layers=wanted, tokens=tokens, storage_options=storage_options, progress=False,
                        replace=found == b"" and not target.is_whole,
                    )  # fmt: skip
                    if found is not None:
                        with ShardStore.open(root.at(target.name)) as near:
                            there.put(mark, copied + _versions(near) + _FROM + source)
                    return made
                continue
        if time.monotonic() > deadline:
            raise DeadlineError(f"another process has been copying the store for {timeout_s:g} s", where=folder)
        time.sleep(_POLL_S)


def _mark_of(raw: bytes | None) -> tuple[bytes | None, bytes]:
    """What the mark of a copy says of its recording, and the address of its source; b"" in marks of older releases."""
    if raw is None:
        return None, b""
    found, _, source = raw.partition(_FROM)
    return found, source


def _versions(store: ShardStore) -> bytes:
    """What changes when a file of a copy is written."""
    found = recording_identity(store.transport, store.layout, files=store.recorded_files(), prefer="versions")
    return str(found).encode()


def _remove(root: Transport, name: str, lease: Lease | None) -> None:
    """Delete a copy. On a disk its folder goes in one step; elsewhere its metadata goes first, so that it is a copy no more.

    Raises:
        WriterConflictError: the lease was lost meanwhile: another process may have made the next copy.
    """
    if root.local_path is not None:
        aside = f"{ASIDE_PREFIX}{name}-"
        where = os.path.join(root.local_path, name)
        with os_errors(where, "move aside"), suppress(FileNotFoundError):
            os.rename(where, os.path.join(root.local_path, aside + secrets.token_hex(4)))
        with suppress(OSError):
            for found in os.listdir(root.local_path):
                if found.startswith(aside):  # also what an earlier call has left
                    shutil.rmtree(os.path.join(root.local_path, found), ignore_errors=True)
        return
    folder = Folder(root, name)
    for entry in [METADATA_NAME, *(name for name in folder.names() or () if name != METADATA_NAME)]:
        if lease is not None and not lease.is_ours():
            raise WriterConflictError(
                "another process has taken over", where=folder.url, remedy="Wait for it, or call again."
            )
        folder.delete(entry)


def _is_published(root: Transport, name: str) -> bool:
    """Whether a copy has its metadata, which is written last."""
    try:
        root.size(f"{name}/{METADATA_NAME}")
    except NotFoundError:
        return False
    return True


def stage_in_background(
    url: str | os.PathLike[str],
    to: str | os.PathLike[str],
    *,
    layers: Layers = "all",
    tokens: Tokens = "all",
    storage_options: Mapping[str, object] | None = None,
) -> Future[str]:
    """`stage` in a thread: train from the far store meanwhile, and go on from `result()` with the same loader state.

    Raises:
        TransportError: the system gives no more threads.
    """
    future: Future[str] = Future()

    def work() -> None:
        """Copy, and set the result."""
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
    layer: Layers,
    tokens: Tokens,
    use_tmpdir: bool,
    damaged_ok: bool = False,
) -> ShardStore:
    """The store, or a copy of it in $TMPDIR.

    Args:
        url: The store.
        storage_options: For its file system.
        layer: What will be trained on; nothing else is copied.
        tokens: Likewise.
        use_tmpdir: Copy to $TMPDIR where that is set.
        damaged_ok: Open also where shards are missing or short. A damaged store is not copied.
    """
    if use_tmpdir and os.environ.get("TMPDIR"):
        return ShardStore.open(stage(url, "$TMPDIR", layers=layer, tokens=tokens, storage_options=storage_options))
    return ShardStore.open(url, storage_options, damaged_ok=damaged_ok)


def _folder_of(given: object, *, name: str, kind: str = "a folder or an address") -> str:
    """A folder or an address, with the environment variables in it filled in.

    Raises:
        ArgumentError: it is neither, or begins with a variable that is empty: the rest would begin at the root of the disk.
    """
    if not isinstance(given, (str, os.PathLike)):
        raise ArgumentError(f"{name} is {brief(given)}; it must be {kind}", where=name)
    text = os.fsdecode(cast("str | os.PathLike[str]", given))
    variable = re.match(r"\$(?:\w+|\{[^}]*\})", text)
    if not text or (variable is not None and not os.path.expandvars(variable[0])):
        raise ArgumentError(f"{name} is {brief(text)}, which is empty; it must be {kind}", where=name)
    return os.path.expandvars(text)
