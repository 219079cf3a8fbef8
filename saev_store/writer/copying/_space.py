"""Is there room? Asked before the first byte, where the question has an answer."""

from __future__ import annotations

import os
import shutil

from saev_store.errors import TransportError
from saev_store.store.card import human_bytes


def check_space(url: str, nbytes: int) -> None:
    """Refuse to begin what a local disk cannot hold.

    Raises:
        TransportError: the disk has less room than `nbytes`.
    """
    folder: str = url.removeprefix("file://")
    if not folder.startswith("/"):
        return
    while not os.path.isdir(folder) and folder != "/":
        folder = os.path.dirname(folder)
    free = shutil.disk_usage(folder).free
    if free < nbytes:
        raise TransportError(
            f"{human_bytes(nbytes)} are to be written, but only {human_bytes(free)} are free",
            where=url,
            remedy="Make room, copy fewer layers, or copy elsewhere.",
        )
