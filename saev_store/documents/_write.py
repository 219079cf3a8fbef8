"""Documents in the form in which each version's writers put them into a file."""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from typing import cast

import numpy as np

from saev_store.documents._findings import key_list, shown
from saev_store.documents.versions import FIELDS, WRITABLE_VERSIONS, WrittenVersion
from saev_store.errors import ArgumentError

#: Fields that say which version a document is of; a change would make another version of it.
_FIXED = frozenset({"dtype", "protocol"})


def composed(values: Mapping[str, object], extra: Mapping[str, object]) -> bytes:
    """The file of a new document, from canonical names.

    Raises:
        ArgumentError: the protocol is not one that is written or has no such key, or a value has no JSON form.
    """
    protocol = values["protocol"]
    if not isinstance(protocol, str) or protocol not in WRITABLE_VERSIONS:
        raise ArgumentError(
            f"protocol is {shown(protocol)}; new stores are written as {', '.join(WRITABLE_VERSIONS)}",
            where="protocol",
        )
    version = WRITABLE_VERSIONS[protocol]
    document: dict[str, object] = {}
    for name, value in values.items():
        chosen = _value_for(version, name, value)
        if name in version.writes or chosen is not None:
            document[version.spelling.key(name)] = chosen
    if not isinstance(extra, Mapping) or not all(isinstance(name, str) for name in extra):  # pyright: ignore[reportUnnecessaryIsInstance]  # callers without a type checker
        raise ArgumentError(f"extra is {shown(extra)}; it must map names to JSON values", where="extra")
    taken = sorted(extra.keys() & document.keys())
    if taken:
        raise ArgumentError(f"extra has {key_list(taken)}, which protocol {protocol} defines itself", where="extra")
    return encoded({**document, **extra}, version, allow_nan=False)


def replaced(document: Mapping[str, object], version: WrittenVersion, changes: Mapping[str, object]) -> bytes:
    """The file of a document with some values changed, the others and the order of the keys kept.

    Raises:
        ArgumentError: a name cannot be changed in this version, or a value has no JSON form.
    """
    changed = dict(document)
    for name, value in changes.items():
        if name not in FIELDS or name in _FIXED:
            can = [field for field in FIELDS if field not in _FIXED]
            raise ArgumentError(f"{name!r} cannot be changed; these can: {', '.join(can)}", where=name)
        key = version.spelling.key(name)
        is_new = key not in changed
        changed[key] = _data_for(version, value) if name == "data" and not isinstance(value, str) else plain(value)
        if is_new:  # It comes where writers have it, which is before the last two.
            for last in ("dtype", "protocol"):
                changed[last] = changed.pop(last)
    return encoded(changed, version, allow_nan=True)


def encoded(document: Mapping[str, object], version: WrittenVersion, *, allow_nan: bool) -> bytes:
    """The bytes of the file, formatted as the version's writers format them.

    Raises:
        ArgumentError: something in it has no JSON form.
    """
    try:
        text = json.dumps(document, indent=4, allow_nan=allow_nan)
        if version.style == "indent-4-ascii":
            return text.encode("ascii")
        from pydantic_core import to_json

        # Through the text first: the fast writer would accept sets, bytes and dates.
        return to_json(json.loads(text), indent=2)
    except (TypeError, ValueError, RecursionError) as exc:
        raise ArgumentError(f"it has no JSON form ({exc})", where="metadata", remedy="Use plain values.") from None


def plain(value: object) -> object:
    """NumPy scalars and arrays, ranges, tuples and paths as what JSON has for them; all else as it is."""
    if isinstance(value, np.ndarray | np.generic):
        return cast("object", value.tolist())
    if isinstance(value, tuple | range):
        return [plain(item) for item in cast("tuple[object, ...]", value)]
    if isinstance(value, list):
        return [plain(item) for item in cast("list[object]", value)]
    if isinstance(value, os.PathLike):
        return os.fspath(cast("os.PathLike[str]", value))
    return value


def _value_for(version: WrittenVersion, name: str, value: object) -> object:
    """What a new document has under a name: its default where none was given, None where the key is left out."""
    if name == "data":
        return _data_for(version, value)
    if name == "dataset":
        if "dataset" in version.writes:
            return "" if value is None else plain(value)
        if value is not None:
            raise ArgumentError(f"protocol {version.protocol} has no dataset", where="dataset", remedy="Leave it out.")
    if name == "pixel_agg":
        if value is None:
            return "majority" if "pixel_agg" in version.writes else None
        if "dataset" not in version.writes:
            raise ArgumentError(
                f"protocol {version.protocol} has no pixel_agg", where="pixel_agg", remedy="Leave it out."
            )
    return plain(value)


def _data_for(version: WrittenVersion, value: object) -> object:
    if value is None:
        value = {}
    if not isinstance(value, Mapping):
        if version.data != "string":
            raise ArgumentError(
                f"data is {shown(value)}; protocol {version.protocol} wants an object",
                where="data",
                remedy="Pass a dict.",
            )
        return value
    described = dict(cast("Mapping[str, object]", value))
    if version.data != "string":
        return described
    try:
        return json.dumps(described, sort_keys=True, separators=(",", ":"), allow_nan=False)
    except (TypeError, ValueError, RecursionError) as exc:
        raise ArgumentError(f"data has no JSON form ({exc})", where="data", remedy="Use plain values.") from None
