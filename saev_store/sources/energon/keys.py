"""Names: the files of `.nv-meta`, sample and part of a file in a tar, and safe names of shards. Pure."""

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

_MEMBER = re.compile(r"(?!__[^/]*__(?:/|$))((?:.*/|)[^.]+)[.]([^/]*)", re.DOTALL)


def split_name(name: str) -> tuple[str, str] | None:
    """Key and part of a member's name; None for a member that does not belong to a sample.

    The name is split at the first dot after the folders, by the expression that Energon has.

    >>> split_name("doc.v1/000.img1.jpg"), split_name("__meta__/x.json"), split_name(".hidden")
    (('doc.v1/000', 'img1.jpg'), None, None)
    """
    match = _MEMBER.fullmatch(name)
    return (match[1], match[2]) if match else None


def is_safe_path(name: str) -> bool:
    r"""Return True if a shard's name stays below the data set's folder.

    >>> is_safe_path("shards/000.tar"), is_safe_path("../x.tar"), is_safe_path("/x.tar"), is_safe_path("a\\b.tar")
    (True, False, False, False)
    """
    if not name.isprintable() or any(mark in name for mark in ("\\", "://", "::")):
        return False
    return not any(part in {"", ".", ".."} for part in name.split("/"))


def check_shard_names(names: Iterable[str], *, where: str) -> None:
    """Check that every name stays below the data set's folder.

    Raises:
        UnsafeContentError: one does not.
    """
    for name in names:
        if not is_safe_path(name):
            raise UnsafeContentError(
                f"{brief(name)} names a file outside the data set; a shard's name is relative, without '..'",
                where=where,
                remedy="Do not trust this data set: no tool writes such a name.",
            )


def idx_path(shard: str) -> str:
    """The path of the file with the offsets of a shard's samples.

    >>> idx_path("shards/shard_000.tar")
    'shards/shard_000.tar.idx'
    """
    return f"{shard.removesuffix('.tar')}.tar.idx"
