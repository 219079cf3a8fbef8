"""The rules of metadata.json: which version a document follows, and what is refused."""

from __future__ import annotations

import contextlib
import re
import warnings
from collections.abc import Callable, Mapping
from typing import Any, TypeAlias, cast

from saev_store.core.dtypes import ITEMSIZES
from saev_store.core.layout import MAX_INT64, Layout
from saev_store.core.token_arrays import MAX_ARRAYS, TokenArray
from saev_store.documents._parse import Findings, key_list, shown
from saev_store.documents.versions import FIELDS, NEW_FIELDS, PROTOCOLS, SPEC, VERSIONS, WrittenVersion
from saev_store.errors import ArgumentError, BreakingProtocolWarning, UnknownProtocolError, outside

MIN_INT64 = -(2**63)
#: Wrong layers that are reported one by one.
LAYERS_SHOWN = 20
#: The first number of a version is its major version.
_VERSION = re.compile(r"(0|[1-9][0-9]{0,8})(?:\.(?:0|[1-9][0-9]{0,8})){1,3}", re.ASCII)
_MAJORS = sorted({int(protocol.partition(".")[0]) for protocol in PROTOCOLS})
_SPELLINGS = tuple(dict.fromkeys(version.spelling for version in VERSIONS))
#: Keys that only documents from before protocol 1.0.0 have.
_UNVERSIONED_KEYS = frozenset({"n_patches_per_shard", "model", "model_org", "model_ckpt"})
_HOOK_POINT = re.compile(r"[A-Za-z0-9_.-]{1,128}", re.ASCII)
TEXT_LAYOUTS = ("window", "stream")
_GEOMETRY = (
    "n_examples", "layers", "content_tokens_per_example", "cls_token", "d_model", "max_tokens_per_shard",
)  # fmt: skip


#: What a field must be: a check of its value, and the rule in words.
Rule: TypeAlias = tuple[Callable[[object], bool], str]


def _are_hook_points(value: object) -> bool:
    names = cast("list[object]", value) if isinstance(value, list) else []
    return value is None or (
        bool(names) and all(isinstance(name, str) and _HOOK_POINT.fullmatch(name) for name in names)
    )


def _are_token_arrays(value: object) -> bool:
    items = cast("list[object]", value) if isinstance(value, list) else [None]
    return len(items) <= MAX_ARRAYS and all(
        isinstance(item, dict) and cast("dict[object, object]", item).keys() == {"name", "dtype"} for item in items
    )


def _is_text_cut(value: object) -> bool:
    text = cast("dict[str, object]", value) if isinstance(value, dict) else {}
    return value is None or (text.get("layout") in TEXT_LAYOUTS and isinstance(text.get("bos", False), bool))


_TEXT: Rule = (lambda value: isinstance(value, str), "a string")
_COUNT: Rule = (lambda value: type(value) is int and 1 <= value <= MAX_INT64, "an integer from 1 to 2^63 - 1")
_TEXT_OR_NULL: Rule = (lambda value: value is None or isinstance(value, str), "a string or null")
_RULES: Mapping[str, Rule] = {
    **dict.fromkeys(("family", "ckpt", "dtype", "protocol", "spec"), _TEXT),
    **dict.fromkeys(("content_tokens_per_example", "d_model", "n_examples", "max_tokens_per_shard"), _COUNT),
    "layers": (lambda value: isinstance(value, list) and value != [], "an array of distinct integers, at least one"),
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
    n_errors = findings.n_errors
    values = _checked_values(document, version, findings)
    layout = None
    if findings.n_errors == n_errors:
        geometry = (*_GEOMETRY, "dtype", "hook_points") if "spec" in version.fields else _GEOMETRY
        try:
            layout = Layout.from_budget(**{name: values[name] for name in geometry})
        except ArgumentError as error:
            name = error.where or ""
            key = version.spelling.keys.get(name, name)
            text = error.message.replace(name, key) if name else error.message
            text = f"{text}. {error.remedy}" if error.remedy else text
            findings.add("layout", text, loc=(key,) if key != "layout" else ())
    if layout is None or findings.n_errors:
        raise findings.error(remedy=f"The rules are those of {version.title}.")
    return values, version, layout


def _checked_values(document: Mapping[str, object], version: WrittenVersion, findings: Findings) -> dict[str, Any]:
    """The values of a version's fields by canonical name, as they are kept; wrong ones are added to the findings."""
    values = dict[str, Any]()
    for name in (*FIELDS, *NEW_FIELDS):
        if name not in version.fields:
            continue
        key = version.spelling.keys[name]
        value = document.get(key)
        if key not in document:
            if key in version.required_keys:
                why = ", for nothing else describes how the vectors are laid out" if key == "protocol" else ""
                findings.add("missing_key", f'the key "{key}" is missing; {version.title} demands it{why}', loc=(key,))
            values[name] = () if name == "token_arrays" else None
            continue
        check, rule = _RULES["family" if name == "dataset" and version.requires_dataset else name]
        if not check(value):
            findings.add("wrong_value", f'"{key}" is {shown(value)}; it must be {rule}', loc=(key,))
        elif name == "layers":
            labels = cast("list[object]", value)
            _find_bad_layers(labels, key, findings, are_unique="spec" not in version.fields)
            values[name] = tuple(labels)
        elif name == "token_arrays":
            values[name] = _token_arrays(cast("list[dict[str, str]]", value), key, findings)
        else:
            values[name] = tuple(cast("list[str]", value)) if name == "hook_points" and value is not None else value
    return values


def _find_bad_layers(labels: list[object], key: str, findings: Findings, *, are_unique: bool) -> None:
    """Add an error for each label that breaks a rule, up to some."""
    n_bad, seen = 0, set[object]()
    for i, label in enumerate(labels):
        if type(label) is not int or not MIN_INT64 <= label <= MAX_INT64:
            rule = "each layer must be an integer of 64 bits"
        elif are_unique and label in seen:
            rule = "each layer may occur once"
        else:
            seen.add(label)
            continue
        findings.add("wrong_value", f'"{key}"[{i}] is {shown(label)}; {rule}', loc=(key, i))
        n_bad += 1
        if n_bad == LAYERS_SHOWN:
            return


def _token_arrays(items: list[dict[str, str]], key: str, findings: Findings) -> tuple[TokenArray, ...]:
    """The token arrays of a document; an error is added if one breaks a rule."""
    try:
        found = tuple(TokenArray(**item) for item in items)
    except ArgumentError as error:
        findings.add("wrong_value", f'"{key}": {error.message}', loc=(key,))
        return ()
    if len({array.name for array in found}) < len(found):
        findings.add("wrong_value", f'"{key}": two token arrays have one name', loc=(key,))
    return found


def _refuse(document: Mapping[str, object], findings: Findings) -> None:
    """Refuse documents without a version (before June 2025), of an unknown major version, and of another dtype.

    Warns:
        BreakingProtocolWarning: with the error for the last two, as section 9 of docs/protocol.md demands.
    """
    protocol, dtype = document.get("protocol"), document.get("dtype")
    old = sorted(_UNVERSIONED_KEYS & document.keys())
    if "protocol" not in document and (old or ("dtype" not in document and "vit_family" in document)):
        known_by = f" and has {key_list(old)}" if old else ""
        findings.add(
            "unversioned",
            f'it has no "protocol"{known_by}: it was written before protocol 1.0.0 (June 2025), and nothing in it describes how '
            "its vectors are laid out",
            loc=("protocol",),
        )
        raise findings.error(remedy="Record the activations again; a guess could give wrong vectors.")
    match = _VERSION.fullmatch(protocol) if isinstance(protocol, str) else None
    major = int(match[1]) if match else None
    is_foreign = major == 3 and document.get("spec") != SPEC
    if is_foreign:
        findings.add(
            "unknown_protocol",
            f'"protocol" is {shown(protocol)} without "spec": "{SPEC}": it is another project\'s version 3; this version of '
            f"saev_store reads {', '.join(PROTOCOLS)}, the last one only with that key",
            loc=("protocol",),
        )
    elif isinstance(protocol, str) and major not in _MAJORS:
        findings.add(
            "unknown_protocol",
            f'"protocol" is {shown(protocol)}; this version of saev_store reads {", ".join(PROTOCOLS)} and other minor '
            f"versions of {', '.join(map(str, _MAJORS[:-1]))} and {_MAJORS[-1]}",
            loc=("protocol",),
        )
    is_ours = major == 3 and not is_foreign
    held = tuple(ITEMSIZES) if is_ours else ("float32",)
    if isinstance(dtype, str) and dtype not in held:
        whose = "protocol 3.x holds" if is_ours else "protocols 1.x and 2.x hold"
        findings.add("unknown_dtype", f'"dtype" is {shown(dtype)}; {whose} {key_list(held)} only', loc=("dtype",))
    if not findings.n_errors:
        return
    with contextlib.suppress(BreakingProtocolWarning):  # where warnings are errors: the error below has more
        warnings.warn(
            f"{findings.where}: breaking change of the protocol: protocol {shown(protocol)}, dtype {shown(dtype)}; the "
            "shards are not read",
            BreakingProtocolWarning,
            stacklevel=outside(),
        )
    raise findings.error(remedy="Look for a newer saev_store, or for a copy of the store.", kind=UnknownProtocolError)


def _choose_version(document: Mapping[str, object], findings: Findings) -> WrittenVersion:
    """The version whose keys a document has. Keys of two spellings, or of another major version, are errors."""
    # The later one of equals: the error names its missing keys.
    spelling = max(reversed(_SPELLINGS), key=lambda s: sum(key in document for key in s.renamed.values()))
    own = set(spelling.renamed.values())
    strays = {key for other in _SPELLINGS for key in other.renamed.values() if key in document and key not in own}
    while strays:
        # One error for each generation that is mixed in, not for each that happens to share a key.
        other = max(reversed(_SPELLINGS), key=lambda s: len(strays & set(s.renamed.values())))
        theirs = [key for key in other.renamed.values() if key in strays]
        mine = key_list([key for key in spelling.renamed.values() if key in document])
        message = (
            f"keys of two generations are mixed: {mine} of {spelling.name}, and {key_list(theirs)} of {other.name}"
        )
        findings.add("mixed_spellings", f"{message}; a document uses one of them", loc=(theirs[0],))
        strays -= set(theirs)

    protocol = document.get("protocol")
    number = int(protocol.partition(".")[0]) if isinstance(protocol, str) else None
    if number is not None and number not in spelling.majors:
        findings.add(
            "mixed_spellings",
            f'"protocol" is {shown(protocol)}, but the keys are those of {spelling.name}',
            loc=("protocol",),
        )
    versions = [version for version in VERSIONS if version.spelling == spelling]
    written_as = [version for version in versions if version.protocol == protocol]
    same_major = [version for version in versions if int(version.protocol.partition(".")[0]) == number]
    return max(
        written_as or same_major or versions,
        key=lambda version: (-sum(key not in document for key in version.required_keys), version.since),
    )
