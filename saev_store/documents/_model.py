"""The rules of metadata.json: which version a document follows, what is refused, and a pydantic model of the values.

Imports pydantic, so other modules import this one when a document is read.
"""

from __future__ import annotations

import contextlib
import re
import warnings
from collections.abc import Mapping
from functools import partial
from typing import Annotated, ClassVar, cast

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, InstanceOf, ValidationError
from pydantic_core import PydanticCustomError

from saev_store.core.dtypes import ITEMSIZES
from saev_store.core.layout import MAX_INT64, Layout
from saev_store.core.token_arrays import MAX_ARRAYS, TokenArray
from saev_store.documents._parse import Findings, key_list, shown
from saev_store.documents.versions import FIELDS, PROTOCOLS, SPEC, VERSIONS, WrittenVersion
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


def _layers(value: object, *, unique: bool = True) -> object:
    """Check labels one by one, and stop after some wrong ones: pydantic would list a million of them."""
    if not isinstance(value, list) or not value:
        raise PydanticCustomError("wrong_type", "must be an array that is not empty")
    bad: list[tuple[int, object, str]] = []
    seen: set[int] = set()
    labels = cast("list[object]", value)
    for i, label in enumerate(labels):
        if type(label) is not int or not MIN_INT64 <= label <= MAX_INT64:
            bad.append((i, label, "each layer must be an integer of 64 bits"))
        elif unique and label in seen:
            bad.append((i, label, "each layer may occur once"))
        else:
            seen.add(label)
        if len(bad) == LAYERS_SHOWN:
            break
    if bad:
        raise PydanticCustomError("bad_layers", "has layers that break a rule", {"bad": bad})
    return labels


def _hook_points(value: object) -> object:
    if value is None:
        return None
    names = cast("list[object]", value) if isinstance(value, list) else []
    if not names or not all(isinstance(name, str) and _HOOK_POINT.fullmatch(name) for name in names):
        raise PydanticCustomError("wrong_type", "must be an array of names of hook points")
    return tuple(names)


def _token_arrays(value: object) -> object:
    items: list[dict[str, str]] = cast("list[dict[str, str]]", value) if isinstance(value, list) else [{}]
    if len(items) > MAX_ARRAYS or not all(isinstance(i, dict) and i.keys() == {"name", "dtype"} for i in items):  # pyright: ignore[reportUnnecessaryIsInstance]  # unchecked JSON
        raise PydanticCustomError("wrong_type", "must be an array of objects with name and dtype")
    try:
        found = [TokenArray(**item) for item in items]
    except ArgumentError as error:
        raise PydanticCustomError("bad_token_array", "is no token array", {"why": error.message}) from None
    if len({array.name for array in found}) < len(found):
        raise PydanticCustomError("bad_token_array", "is no token array", {"why": "two token arrays have one name"})
    return tuple(found)


def _text(value: object) -> object:
    if value is None:
        return None
    if not isinstance(value, dict):
        raise PydanticCustomError("wrong_type", "must be an object")
    text = cast("dict[str, object]", value)
    if text.get("layout") not in TEXT_LAYOUTS or not isinstance(text.get("bos", False), bool):
        raise PydanticCustomError("wrong_type", "must have a layout")
    return text


# Not pydantic's own check of strings, which refuses half a surrogate pair: a path in an old document may hold one.
Text = Annotated[InstanceOf[str], Field(description="a string")]
TextOrNull = Annotated[InstanceOf[str] | None, Field(description="a string or null")]
Count = Annotated[int, Field(ge=1, le=MAX_INT64, description="an integer from 1 to 2^63 - 1")]
Layers = Annotated[
    tuple[int, ...],
    Field(strict=False, description="an array of distinct integers, at least one"),
    BeforeValidator(_layers),
]
#: Opaque. It may be a pickle: it is never decoded.
Data = Annotated[InstanceOf[str] | InstanceOf[dict[str, object]], Field(description="an object or a string")]


class Document(BaseModel):
    """The fields of metadata.json under their canonical names, whatever the keys in the file are called.

    Types are strict, instances frozen; keys that the version does not know are kept in `model_extra`.
    """

    model_config: ClassVar[ConfigDict] = ConfigDict(strict=True, frozen=True, extra="allow")

    family: Text
    ckpt: Text
    layers: Layers
    content_tokens_per_example: Count
    cls_token: Annotated[bool, Field(description="true or false")]
    d_model: Count
    n_examples: Count
    max_tokens_per_shard: Count
    data: Data
    dataset: TextOrNull = None
    pixel_agg: TextOrNull = None
    dtype: Text
    protocol: Text


class DocumentWithDataset(Document):
    """The fields of versions that demand `dataset`."""

    dataset: Text  # pyright: ignore[reportIncompatibleVariableOverride, reportGeneralTypeIssues]  # required here, optional in the base


class Document3(DocumentWithDataset):
    """The fields of protocol 3.0."""

    layers: Annotated[
        tuple[int, ...],
        Field(strict=False, description="an array of integers, at least one"),
        BeforeValidator(partial(_layers, unique=False)),
    ]
    hook_points: Annotated[
        tuple[str, ...] | None,
        Field(
            description="an array of names of 1 to 128 letters, digits, '_', '.' and '-', one for each of the layers"
        ),
        BeforeValidator(_hook_points),
    ] = None
    token_arrays: Annotated[
        tuple[InstanceOf[TokenArray], ...],
        Field(description="an array of at most 64 objects that have a name and a dtype and nothing else"),
        BeforeValidator(_token_arrays),
    ] = ()
    text: Annotated[
        InstanceOf[dict[str, object]] | None,
        Field(description='an object whose layout is "window" or "stream" and whose bos is true or false'),
        BeforeValidator(_text),
    ] = None
    spec: Text


def check_document(document: Mapping[str, object], findings: Findings) -> tuple[Document, WrittenVersion, Layout]:
    """The checked fields of a document, the version that it follows, and its geometry.

    Raises:
        UnknownProtocolError: it follows another major version, or holds another dtype.
        DocumentError: it breaks a rule; all problems are in `problems`.
    """
    _refuse(document, findings)
    version = _choose_version(document, findings)
    is_ours = "spec" in version.fields
    model = Document3 if is_ours else DocumentWithDataset if version.requires_dataset else Document
    canonical = {key: name for name, key in version.spelling.keys.items()}
    # A canonical name that this version spells differently is an unknown key, not an alias.
    renamed = {
        canonical.get(key, key): value for key, value in document.items() if key in canonical or key not in FIELDS
    }
    checked = layout = None
    try:
        checked = model.model_validate(renamed)
        geometry = (*_GEOMETRY, "dtype", "hook_points") if is_ours else _GEOMETRY
        layout = Layout.from_budget(**{name: getattr(checked, name) for name in geometry})
    except ValidationError as error:
        _add_invalid(error, model, version, findings)
    except ArgumentError as error:
        name = error.where or ""
        key = version.spelling.keys.get(name, name)
        text = error.message.replace(name, key) if name else error.message
        text = f"{text}. {error.remedy}" if error.remedy else text
        findings.add("layout", text, loc=(key,) if key != "layout" else ())
    if checked is None or layout is None or findings.n_errors:
        raise findings.error(remedy=f"The rules are those of {version.title}.")
    return checked, version, layout


def _refuse(document: Mapping[str, object], findings: Findings) -> None:
    """Refuse documents without a version (before June 2025), of an unknown major version, and of another dtype.

    Warns:
        BreakingProtocolWarning: with the error for the last two, as section 9 of docs/protocol.md demands.
    """
    protocol, dtype = document.get("protocol"), document.get("dtype")
    old = sorted(_UNVERSIONED_KEYS & document.keys())
    if "protocol" not in document and (old or ("dtype" not in document and "vit_family" in document)):
        told_by = f" and has {key_list(old)}" if old else ""
        findings.add(
            "unversioned",
            f'it has no "protocol"{told_by}: it was written before protocol 1.0.0 (June 2025), and nothing in it says how '
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
    with contextlib.suppress(BreakingProtocolWarning):  # where warnings are errors: the error below says more
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


def _add_invalid(invalid: ValidationError, model: type[Document], version: WrittenVersion, findings: Findings) -> None:
    """Add what pydantic refuses, one error for each field."""
    seen: set[str] = set()
    for error in invalid.errors(include_url=False):
        if not error["loc"]:
            findings.add("wrong_type", "a key is not Unicode text (it holds half a surrogate pair)")
            continue
        name = str(error["loc"][0])
        if name in seen:  # each type of a union is an error
            continue
        seen.add(name)
        key = version.spelling.keys[name]
        if error["type"] == "missing":
            why = ", for nothing else says how the vectors are laid out" if key == "protocol" else ""
            findings.add("missing_key", f'the key "{key}" is missing; {version.title} demands it{why}', loc=(key,))
        elif error["type"] == "bad_layers":
            bad = cast("list[tuple[int, object, str]]", error.get("ctx", {})["bad"])
            for i, label, rule in bad:
                findings.add("wrong_value", f'"{key}"[{i}] is {shown(label)}; {rule}', loc=(key, i))
        elif error["type"] == "bad_token_array":
            findings.add("wrong_value", f'"{key}": {error.get("ctx", {})["why"]}', loc=(key,))
        else:
            rule = model.model_fields[name].description
            findings.add("wrong_value", f'"{key}" is {shown(error["input"])}; it must be {rule}', loc=(key,))
