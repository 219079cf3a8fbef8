"""Deletions of a store's files that are interrupted."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import pytest

from saev_store.writer.folder import Folder


@contextmanager
def interrupting_deletions(monkeypatch: pytest.MonkeyPatch, stops_at: int) -> Iterator[list[str]]:
    """A block in which a Ctrl-C comes instead of deletion number `stops_at` in the folder of a store; the paths so far."""
    delete, paths = Folder.delete, list[str]()

    def interrupted(self: Folder, path: str) -> None:
        if self.name:
            paths.append(path)
            if len(paths) == stops_at:
                raise KeyboardInterrupt
        delete(self, path)

    with monkeypatch.context() as changed:
        changed.setattr(Folder, "delete", interrupted)
        yield paths
