"""The name of a store's folder: a hash over its metadata, by any of the recipes that writers have used."""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Mapping
from typing import Literal, cast

from saev_store.errors import ArgumentError

Recipe = Literal["sorted-ascii", "field-order", "field-order-8"]
#: Every recipe, in the order in which a folder's name is compared with them.
RECIPES: tuple[Recipe, ...] = ("sorted-ascii", "field-order", "field-order-8")
#: A string, which is left alone, or a number with a positive exponent.
_STRING_OR_EXPONENT = re.compile(rb'"(?:[^"\\]|\\.)*"|(\d[eE])\+(?=\d)')


def content_hashes(document: Mapping[str, object]) -> dict[Recipe, str]:
    """The hash of a metadata document by each recipe (docs/protocol.md, section 6).

    * `"sorted-ascii"`: 64 hex digits of SHA-256 over compact JSON, keys sorted at every level, all else than ASCII
      escaped, floats as Python prints them. The recipe of the published specifications.
    * `"field-order"`: 64 hex digits of SHA-256 over compact JSON in UTF-8, the top-level keys in the order of the
      document, keys of nested objects sorted, floats as short as Rust's writers print them.
    * `"field-order-8"`: the first 8 of those.

    Args:
        document: The parsed metadata.json, in the order of the file; unknown keys count.

    Raises:
        ArgumentError: something in it has no JSON form.

    >>> content_hashes({"protocol": "2.1", "layers": [2, 5]})["field-order-8"]
    '78d80334'
    """
    ascii_form, field_form = _forms(document)
    field_order = hashlib.sha256(field_form).hexdigest()
    return {
        "sorted-ascii": hashlib.sha256(ascii_form).hexdigest(),
        "field-order": field_order,
        "field-order-8": field_order[:8],
    }


def known_names(document: Mapping[str, object]) -> dict[str, Recipe]:
    """Every name that a writer may have given the document's folder, and its recipe.

    More than `content_hashes`: writers of the field order print 1e16 as `1e16` or as `1e+16`, by the age of their JSON
    library, so a document that holds such a float has two names by that recipe.

    Raises:
        ArgumentError: something in it has no JSON form.

    >>> sorted(len(name) for name in known_names({"scale": 1e16, "protocol": "2.1"}))
    [8, 8, 64, 64, 64]
    """
    hashes = content_hashes(document)
    # Where recipes agree, the first one is named.
    names: dict[str, Recipe] = {hashes[recipe]: recipe for recipe in reversed(RECIPES)}
    _, field_form = _forms(document)
    older = hashlib.sha256(_STRING_OR_EXPONENT.sub(_without_plus, field_form)).hexdigest()
    names.setdefault(older, "field-order")
    names.setdefault(older[:8], "field-order-8")
    return names


def _forms(document: Mapping[str, object]) -> tuple[bytes, bytes]:
    try:
        ordered: dict[str, object] = {key: _sorted_inside(value) for key, value in document.items()}
        ascii_form = json.dumps(ordered, sort_keys=True, separators=(",", ":")).encode("ascii")
        return ascii_form, _compact_utf8(ordered)
    except (TypeError, ValueError, RecursionError) as exc:
        raise ArgumentError(f"the document has no JSON form ({exc})", where="document") from None


def _without_plus(found: re.Match[bytes]) -> bytes:
    return found[1] or found[0]


def _sorted_inside(value: object) -> object:
    if isinstance(value, dict):
        return {key: _sorted_inside(inner) for key, inner in sorted(cast("dict[str, object]", value).items())}
    if isinstance(value, list | tuple):
        return [_sorted_inside(inner) for inner in cast("list[object]", value)]
    return value


def _compact_utf8(document: dict[str, object]) -> bytes:
    from pydantic_core import PydanticSerializationError, to_json

    try:
        return to_json(document, inf_nan_mode="null")
    except PydanticSerializationError:
        # Half a surrogate pair, which the ASCII form of an old document can escape. No writer of this recipe can hash
        # it, so no folder has such a name; the hash only has to exist and to tell documents apart.
        return json.dumps(document, separators=(",", ":"), ensure_ascii=False).encode("utf-8", "surrogatepass")
