"""Documents as bytes: metadata.json and shards.json as each version's writers make them, and the hashes of metadata."""

from __future__ import annotations

import hashlib
import json
import os
import re
from collections.abc import Mapping
from typing import Literal, cast

import numpy as np

from saev_store.core.arguments import is_mapping
from saev_store.core.layout import Layout
from saev_store.documents.versions import NEW_FIELDS, SPEC, WRITABLE_VERSIONS, Recipe, WrittenVersion
from saev_store.errors import ArgumentError, brief

#: The most bytes that a shards.json may have: room for about eight million shards.
SHARDS_MAX_NBYTES = 512 * 2**20
SHORTEST_ENTRY_NBYTES = 45
#: Fields that identify the version of a document; a change would make another version of it.
_FIXED = frozenset({"dtype", "protocol", "spec"})
#: What a new document has where no value was given, in the versions that write the key.
_DEFAULTS = {"dataset": "", "pixel_agg": "majority", "spec": SPEC}
#: A string, which is left alone, or a number with a positive exponent.
_STRING_OR_EXPONENT = re.compile(rb'"(?:[^"\\]|\\.)*"|(\d[eE])\+?(?=\d)')


def content_hashes(document: Mapping[str, object], *, plus: bytes = b"+") -> dict[Recipe, str]:
    """The hash of a metadata document by each recipe (docs/protocol.md, section 6).

    * `"sorted-ascii"`: 64 hex digits of SHA-256 over compact JSON, keys sorted at every level, all else than ASCII
      escaped, floats as Python prints them. The recipe of the published specifications.
    * `"field-order"`: 64 hex digits of SHA-256 over compact JSON in UTF-8, the top-level keys in the order of the
      document, keys of nested objects sorted, floats as short as Rust's writers print them.
    * `"field-order-8"`: the first 8 of those.

    Args:
        document: The parsed metadata.json, in the order of the file; unknown keys count.
        plus: The sign of positive exponents in the field order; older writers have none.

    Raises:
        ArgumentError: something in it has no JSON form.

    >>> content_hashes({"protocol": "2.1", "layers": [2, 5]})["field-order-8"]
    '78d80334'
    """
    from pydantic_core import PydanticSerializationError

    try:
        ordered = {key: json.loads(json.dumps(value, sort_keys=True)) for key, value in document.items()}
        ascii_form = json.dumps(ordered, sort_keys=True, separators=(",", ":")).encode("ascii")
        try:
            field_form = _utf8_json(ordered, nan="null", plus=plus)
        except PydanticSerializationError:  # half a surrogate pair: no writer of this recipe can hash one
            field_form = ascii_form
    except (TypeError, ValueError, RecursionError) as exc:
        raise ArgumentError(f"the document has no JSON form ({exc})", where="document") from None
    field_order = hashlib.sha256(field_form).hexdigest()
    sorted_ascii = hashlib.sha256(ascii_form).hexdigest()
    return {"sorted-ascii": sorted_ascii, "field-order": field_order, "field-order-8": field_order[:8]}


def _utf8_json(
    value: object, *, indent: int | None = None, nan: Literal["constants", "null"] = "constants", plus: bytes = b"+"
) -> bytes:
    """The bytes of reference writers: UTF-8, and `1e+16` for floats that pydantic before 2.13 writes as `1e16`."""
    from pydantic_core import to_json

    text = to_json(value, indent=indent, inf_nan_mode=nan)
    return _STRING_OR_EXPONENT.sub(lambda found: found[1] + plus if found[1] else found[0], text)


def composed(values: Mapping[str, object], extra: Mapping[str, object]) -> bytes:
    """The file of a new document, from canonical names.

    Raises:
        ArgumentError: the protocol is not one that is written or has no such key, or a value has no JSON form.
    """
    protocol = values["protocol"]
    if not isinstance(protocol, str) or protocol not in WRITABLE_VERSIONS:
        known = ", ".join(WRITABLE_VERSIONS)
        raise ArgumentError(f"protocol is {brief(protocol)}; new stores are written as {known}", where="protocol")
    version = WRITABLE_VERSIONS[protocol]
    known = version.fields if "dataset" in version.writes else version.writes
    document: dict[str, object] = {}
    for name, given in values.items():
        value = _DEFAULTS.get(name) if given is None and name in version.writes else given
        if value is not None and name not in known:
            raise ArgumentError(f"protocol {protocol} has no {name}", where="protocol", remedy="Leave one of them out.")
        if value is not None or (name in version.writes and name not in NEW_FIELDS):
            document[version.spelling.keys[name]] = _data_for(version, value) if name == "data" else value
    is_plain = document.get("dtype") == "float32" and not document.keys() & {"hook_points", "token_arrays", "text"}
    if is_plain == (protocol == "3.0"):
        rule = "16 bits, hook points, token arrays and texts need protocol 3.0, and all else must be 2.0 or older"
        raise ArgumentError(f"protocol is {protocol}; {rule}", where="protocol", remedy="Leave protocol out.")
    if not is_mapping(extra):
        raise ArgumentError(f"extra is {brief(extra)}; it must map names to JSON values", where="extra")
    taken = sorted(extra.keys() & document.keys())
    if taken:
        raise ArgumentError(f"extra has {', '.join(taken)}, which protocol {protocol} defines itself", where="extra")
    return encoded({**document, **extra}, version, allow_nan=False)


def replaced(document: Mapping[str, object], version: WrittenVersion, changes: Mapping[str, object]) -> bytes:
    """The file of a document with some values changed, the others and the order of the keys kept.

    Raises:
        ArgumentError: a name cannot be changed in this version, or a value has no JSON form.
    """
    changed = dict(document)
    for name, value in changes.items():
        if name not in version.fields or name in _FIXED:
            can = [field for field in version.fields if field not in _FIXED]
            raise ArgumentError(f"{name!r} cannot be changed; these can: {', '.join(can)}", where=name)
        key = version.spelling.keys[name]
        is_new = key not in changed
        changed[key] = _data_for(version, value) if name == "data" and not isinstance(value, str) else value
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
        text = json.dumps(document, indent=4, allow_nan=allow_nan, default=_plain)
        if version.style == "indent-4-ascii":
            return text.encode("ascii")
        # Through the text first: the fast writer would accept sets, bytes and dates.
        return _utf8_json(json.loads(text), indent=2)
    except (TypeError, ValueError, RecursionError) as exc:
        raise ArgumentError(f"it has no JSON form ({exc})", where="metadata", remedy="Use plain values.") from None


def _plain(value: object) -> object:
    """NumPy scalars and arrays, ranges, mappings and paths as what JSON has for them."""
    if isinstance(value, np.ndarray | np.generic):
        return cast("object", value.tolist())
    if isinstance(value, range) or is_mapping(value):
        return dict(value) if is_mapping(value) else list(cast("range", value))
    if isinstance(value, os.PathLike):
        return os.fspath(cast("os.PathLike[str]", value))
    raise TypeError(f"{type(value).__name__} is not a type of JSON")


def _data_for(version: WrittenVersion, value: object) -> object:
    """`data` as the version has it: an object, or a string with the object's compact JSON."""
    if value is not None and not is_mapping(value):
        if version.data == "string":
            return value
        rule = f"protocol {version.protocol} wants an object"
        raise ArgumentError(f"data is {brief(value)}; {rule}", where="data", remedy="Pass a dict.")
    if version.data != "string":
        return value or {}
    try:
        return json.dumps(value or {}, sort_keys=True, separators=(",", ":"), allow_nan=False)
    except (TypeError, ValueError, RecursionError) as exc:
        raise ArgumentError(f"data has no JSON form ({exc})", where="data", remedy="Use plain values.") from None


def shards_bytes(layout: Layout, count_key: str, *, trailing_empty: bool = False) -> bytes:
    r"""The shards.json of a layout, as the reference writers format it; they list one more shard behind a full last one.

    Raises:
        ArgumentError: the list would be larger than `SHARDS_MAX_NBYTES`.

    >>> shards_bytes(Layout(1, (0,), 4, True, 8, 3), "n_ex")
    b'[\n  {\n    "name": "acts000000.bin",\n    "n_ex": 1\n  }\n]'
    """
    n_listed = layout.n_shards + trailing_empty
    if n_listed * SHORTEST_ENTRY_NBYTES > SHARDS_MAX_NBYTES:
        message = f"{n_listed} shards make a shards.json of more than {SHARDS_MAX_NBYTES} bytes"
        raise ArgumentError(message, where="max_tokens_per_shard", remedy="Use a larger budget for each shard.")
    capacity, last = layout.examples_per_shard, layout.n_shards - 1
    name = '  {\n    "name": "acts%06d.bin",\n    "' + count_key + '": '  # that of `shard_name`, for all shards at once
    entries = [f"{name}{capacity}\n  }}"] * last + [f"{name}{layout.examples_in(last)}\n  }}"]
    entries += [f"{name}0\n  }}"] * trailing_empty
    return ("[\n" + ",\n".join(entries) % tuple(range(n_listed)) + "\n]").encode("ascii")
