"""Names: the files of `.nv-meta`, sample and part of a file in a tar, and safe names of shards."""

from __future__ import annotations

import re
from collections.abc import Iterable

from saev_store.errors import UnsafeContentError, brief

#: The folder that makes a folder of tars a prepared data set.
META = ".nv-meta"
INFO_JSON, INFO_YAML = f"{META}/.info.json", f"{META}/.info.yaml"
SPLIT_YAML, SPLIT_JSON = f"{META}/split.yaml", f"{META}/split.json"
DATASET_YAML = f"{META}/dataset.yaml"
INDEX_SQLITE, INDEX_UUID = f"{META}/index.sqlite", f"{META}/index.uuid"

#: Energon's own expression: the name is split at the first dot behind the folders.
_MEMBER = re.compile(r"(?!__[^/]*__(?:/|$))((?:.*/|)[^.]+)[.]([^/]*)", re.DOTALL)


def split_name(name: str) -> tuple[str, str] | None:
    """Key and part of a member's name; None for a member that does not belong to a sample."""
    match = _MEMBER.fullmatch(name)
    return (match[1], match[2]) if match else None


def check_names(names: Iterable[str], *, where: str) -> None:
    """Raise `UnsafeContentError` if a file's name leaves its folder."""
    for name in names:
        is_odd = not name.isprintable() or any(mark in name for mark in ("\\", "://", "::"))
        if is_odd or not {"", ".", ".."}.isdisjoint(name.split("/")):
            message = f"{brief(name)} names a file outside the folder; names are relative, without '..'"
            raise UnsafeContentError(message, where=where, remedy="Do not trust this data set.")


def idx_path(shard: str) -> str:
    """The path of the file with the offsets of a shard's samples."""
    return f"{shard.removesuffix('.tar')}.tar.idx"
