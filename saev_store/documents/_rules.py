"""The rules of metadata.json: which version a document follows, and what is refused."""

from __future__ import annotations

import contextlib
import re
import warnings
from collections.abc import Callable, Mapping
from typing import Any, TypeAlias

from saev_store.core.arguments import is_list, is_mapping
from saev_store.core.dtypes import ITEMSIZES
from saev_store.core.layout import MAX_INT64, Layout
from saev_store.core.token_arrays import MAX_ARRAYS, TokenArray
from saev_store.documents._parse import Findings
from saev_store.documents.versions import PROTOCOLS, SPEC, VERSIONS, WrittenVersion
from saev_store.errors import ArgumentError, BreakingProtocolWarning, UnknownProtocolError, brief, outside

MIN_INT64 = -(2**63)
#: The first number of a version is its major version.
_VERSION = re.compile(r"(0|[1-9][0-9]{0,8})(?:\.(?:0|[1-9][0-9]{0,8})){1,3}", re.ASCII)
_MAJORS = {int(protocol.partition(".")[0]) for protocol in PROTOCOLS}
_SPELLINGS = tuple(dict.fromkeys(version.spelling for version in VERSIONS))
#: Keys of documents from before protocol 1.0.0.
_UNVERSIONED_KEYS = {"n_patches_per_shard", "model", "model_org", "model_ckpt"}
_HOOK_POINT = re.compile(r"[A-Za-z0-9_.-]{1,128}", re.ASCII)
_GEOMETRY = (
    "n_examples", "layers", "content_tokens_per_example", "cls_token", "d_model", "max_tokens_per_shard",
)  # fmt: skip
#: What a field must be: a check of its value, and the rule in words.
Rule: TypeAlias = tuple[Callable[[object], bool], str]


def _are_layers(value: object) -> bool:
    items = value if is_list(value) else ()
    return len(items) > 0 and all(type(item) is int and MIN_INT64 <= item <= MAX_INT64 for item in items)


def _are_hook_points(value: object) -> bool:
    names = value if is_list(value) else ()
    are_names = all(isinstance(name, str) and _HOOK_POINT.fullmatch(name) for name in names)
    return value is None or (len(names) > 0 and are_names)


def _are_token_arrays(value: object) -> bool:
    items = value if is_list(value) else (None,)
    return len(items) <= MAX_ARRAYS and all(is_mapping(item) and {*item} == {"name", "dtype"} for item in items)


def _is_text_cut(value: object) -> bool:
    text = value if is_mapping(value) else dict[str, object]()
    return value is None or (text.get("layout") in ("window", "stream") and isinstance(text.get("bos", False), bool))


_TEXT: Rule = (lambda value: isinstance(value, str), "a string")
_COUNT: Rule = (lambda value: type(value) is int and 1 <= value <= MAX_INT64, "an integer from 1 to 2^63 - 1")
_TEXT_OR_NULL: Rule = (lambda value: value is None or isinstance(value, str), "a string or null")
_RULES: Mapping[str, Rule] = {
    **dict.fromkeys(("family", "ckpt", "dtype", "protocol", "spec"), _TEXT),
    **dict.fromkeys(("content_tokens_per_example", "d_model", "n_examples", "max_tokens_per_shard"), _COUNT),
    "layers": (_are_layers, "an array of integers of 64 bits, at least one"),
    "cls_token": (lambda value: isinstance(value, bool), "true or false"),
    # Opaque. It may be a pickle: it is never decoded.
    "data": (lambda value: isinstance(value, (str, dict)), "an object or a string"),
    **dict.fromkeys(("dataset", "pixel_agg"), _TEXT_OR_NULL),
    "hook_points": (
        _are_hook_points,
        "an array of names of 1 to 128 letters, digits, '_', '.' and '-', one for each of the layers",
    ),
    "token_arrays": (
        _are_token_arrays,
        "an array of at most 64 objects that have a name and a dtype and nothing else",
    ),
    "text": (_is_text_cut, 'an object whose layout is "window" or "stream" and whose bos is true or false'),
}


def check_document(document: Mapping[str, object], findings: Findings) -> tuple[dict[str, Any], WrittenVersion, Layout]:
    """The checked values of a document by canonical name, the version that it follows, and its geometry.

    Raises:
        UnknownProtocolError: it follows another major version, or holds another dtype.
        DocumentError: it breaks a rule; all problems are in `problems`.
    """
    _refuse(document, findings)
    version = _choose_version(document, findings)
    keys, values = version.spelling.keys, dict[str, Any]()
    for name in version.fields:
        key = keys[name]
        values[name] = value = document.get(key)
        check, rule = _RULES["family" if name == "dataset" and version.requires_dataset else name]
        if key in document and not check(value):
            findings.add("wrong_value", f'"{key}" is {brief(value)}; it must be {rule}', key)
        elif key not in document and key in version.required_keys:
            findings.add("missing_key", f'the key "{key}" is missing; {version.title} demands it', key)
    try:
        arrays = tuple(TokenArray(**item) for item in values.get("token_arrays") or ())
        if len({array.name for array in arrays}) < len(arrays):
            raise ArgumentError("two token arrays have one name", where="token_arrays")
        if not findings.errors:
            geometry = (*_GEOMETRY, "dtype", "hook_points") if "spec" in version.fields else _GEOMETRY
            values |= {name: tuple(values[name]) for name in ("layers", "hook_points") if values.get(name)}
            values |= {"token_arrays": arrays} if "spec" in version.fields else {}
            return values, version, Layout.from_budget(**{name: values[name] for name in geometry})
    except TypeError:
        pass  # an entry of token arrays has other keys, which is among the errors
    except ArgumentError as error:
        name = error.where or ""
        key = keys.get(name, name)
        kind = "layout" if name in ("layout", "max_tokens_per_shard") else "wrong_value"
        findings.add(kind, error.message.replace(name, key), *([] if key == "layout" else [key]))
    raise findings.error(f"The rules are those of {version.title}.")


def _refuse(document: Mapping[str, object], findings: Findings) -> None:
    """Refuse documents from before protocol 1.0.0, of an unknown major version, and of another dtype.

    Warns:
        BreakingProtocolWarning: with the error for the last two, as section 9 of docs/protocol.md demands.
    """
    protocol, dtype = document.get("protocol"), document.get("dtype")
    is_old = document.keys() & _UNVERSIONED_KEYS or ("dtype" not in document and "vit_family" in document)
    if "protocol" not in document and is_old:
        message = (
            'it has no "protocol": it is from before protocol 1.0.0 (June 2025), and nothing in it gives its layout'
        )
        findings.add("unversioned", message, "protocol")
        raise findings.error("Record the activations again; a guess could give wrong vectors.")
    match = _VERSION.fullmatch(protocol) if isinstance(protocol, str) else None
    major = int(match[1]) if match else None
    is_ours = major == 3 and document.get("spec") == SPEC
    if isinstance(protocol, str) and (major not in _MAJORS or (major == 3 and not is_ours)):
        known = f'{", ".join(PROTOCOLS)} (the last one only with "spec": "{SPEC}") and other minor versions of these'
        findings.add("unknown_protocol", f'"protocol" is {brief(protocol)}; this saev_store reads {known}', "protocol")
    held = ", ".join(ITEMSIZES) if is_ours else "float32"
    if isinstance(dtype, str) and dtype not in held.split(", "):
        whose = "protocol 3.x holds" if is_ours else "protocols 1.x and 2.x hold"
        findings.add("unknown_dtype", f'"dtype" is {brief(dtype)}; {whose} {held} only', "dtype")
    if findings.errors:
        with contextlib.suppress(BreakingProtocolWarning):  # if warnings are errors: the error below has more
            message = f"{findings.where}: breaking change of the protocol: {findings.errors[0].message}"
            warnings.warn(message, BreakingProtocolWarning, stacklevel=outside())
        raise findings.error("Look for a newer saev_store, or for a copy of the store.", UnknownProtocolError)


def _choose_version(document: Mapping[str, object], findings: Findings) -> WrittenVersion:
    """The version whose keys a document has. Keys of two spellings, or of another major version, are errors."""
    # The later one of equals: the error names its missing keys.
    spelling = max(reversed(_SPELLINGS), key=lambda s: sum(key in document for key in s.renamed.values()))
    own = set(spelling.renamed.values())
    strays = [key for other in _SPELLINGS for key in other.renamed.values() if key in document and key not in own]
    if strays:
        message = f"keys of two generations are mixed: {', '.join(strays)} are not among those of {spelling.name}"
        findings.add("mixed_spellings", message, strays[0])
    protocol = document.get("protocol")
    number = int(protocol.partition(".")[0]) if isinstance(protocol, str) else None
    if number is not None and number not in spelling.majors:
        message = f'"protocol" is {brief(protocol)}, but the keys are those of {spelling.name}'
        findings.add("mixed_spellings", message, "protocol")
    versions = [version for version in VERSIONS if version.spelling == spelling]
    written_as = [version for version in versions if version.protocol == protocol]
    same_major = [version for version in versions if int(version.protocol.partition(".")[0]) == number]
    return max(
        written_as or same_major or versions,
        key=lambda version: (-sum(key not in document for key in version.required_keys), version.since),
    )
