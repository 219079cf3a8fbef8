"""Telling whether a file is still the one that was opened, where the transport itself has forgotten it."""

from __future__ import annotations

import os
from typing import Protocol, runtime_checkable

from saev_store.transport import Transport
from saev_store.transport.checks import os_errors


@runtime_checkable
class ResolvesPaths(Protocol):
    """A transport whose files are files of this machine."""

    def resolve(self, path: str) -> str:
        """Return the file's path on this machine, links followed."""
        ...


def file_identity(transport: Transport, path: str) -> tuple[int, ...]:
    """Return what another file of the same name has different: device, inode, size and time; elsewhere the size.

    Raises:
        NotFoundError: there is no such file.
    """
    if not isinstance(transport, ResolvesPaths):
        return (transport.size(path),)
    where = transport.resolve(path)
    with os_errors(where, "look at it"):
        status = os.stat(where)
    return status.st_dev, status.st_ino, status.st_size, status.st_mtime_ns
