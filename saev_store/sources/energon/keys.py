"""Names: sample and part of a file in a tar, and safe names of shards. Pure."""

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

_META_MEMBER = re.compile(r"__[^/]*__(?:/|$)", re.DOTALL)


def split_name(name: str) -> tuple[str, str] | None:
    """Key and part of a member's name; None for a member that is no part of a sample. Energon's expression `((?:.*/|)[^.]+)[.]([^/]*)`.

    No parts are names without a dot or with nothing before it, and everything below a leading folder such as `__meta__/`.

    >>> split_name("doc.v1/000.img1.jpg"), split_name("__meta__/x.json"), split_name(".hidden")
    (('doc.v1/000', 'img1.jpg'), None, None)
    """
    if _META_MEMBER.match(name):
        return None
    # The file's own name begins behind the last slash. Dots of folders belong to the key.
    own = name.rfind("/") + 1
    dot = name.find(".", own)
    if dot == own and "." in name[name.rfind("/", 0, max(own - 1, 0)) + 1 : own]:
        return None  # with nothing before it, the folder's name is before it: it has no dot then
    return (name[:dot], name[dot + 1 :]) if dot > 0 else None


def join_name(key: str, part: str) -> str:
    """The name in the tar: the inverse of `split_name`."""
    return f"{key}.{part}"


def is_safe_path(name: str) -> bool:
    r"""Whether a shard's name stays below the data set's folder.

    >>> is_safe_path("shards/000.tar"), is_safe_path("../x.tar"), is_safe_path("/x.tar"), is_safe_path("a\\b.tar")
    (True, False, False, False)
    """
    if not name or "\0" in name or "\\" in name or "://" in name or "::" in name:
        return False
    return not any(part in {"", ".", ".."} for part in name.split("/")) and name.isprintable()


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
