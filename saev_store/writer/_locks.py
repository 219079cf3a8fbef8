"""The locks of a store's folder, which its writers hold while they live."""

from __future__ import annotations

from collections.abc import Collection
from contextlib import ExitStack, suppress

from saev_store.errors import IncompleteStoreError
from saev_store.names import WORK_FOLDER
from saev_store.writer.folder import Folder, read_claim


def take_locks(folder: Folder, held: ExitStack, *, but: Collection[str] = ()) -> None:
    """Hold all locks of a folder but those that are held already: no writer, copy, publisher or repair is at work there then.

    Raises:
        WriterConflictError: one of them is.
        TransportError: the system gives no more locks.
    """
    taken = set(but)
    while new := [what for what in lock_names(folder) if what not in taken]:  # others appear while these are taken
        for what in new:
            held.enter_context(folder.lock(what))
        taken.update(new)


def lock_names(folder: Folder) -> list[str]:
    """The locks of a folder that a writer may hold, or may take: also of parts that were not begun yet."""
    found = {name.removesuffix(".lock") for name in folder.names(f"{WORK_FOLDER}/locks") or ()}
    found |= {"part00000", "publish", "copy", "repair"}
    with suppress(IncompleteStoreError):  # with a claim that is not understood no part can be begun
        if (claim := read_claim(folder)) is not None:
            found |= {f"part{rank:05d}" for rank in range(claim.options.world)}
    return sorted(found)
