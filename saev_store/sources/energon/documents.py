"""The documents in `.nv-meta`, of all generations: shards, splits and the sample type. All of them are untrusted.

Energon 5 and 6 write `.info.yaml`, 7 writes `.info.json` (from 7.4 on with the version of the writer); the other documents
are the same.
"""

from __future__ import annotations

import contextlib
import json
from collections.abc import Hashable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, TypeGuard, cast

import numpy as np
import yaml

from saev_store.core.layout import IntArray
from saev_store.documents import parse_json
from saev_store.errors import ArgumentError, DocumentError, NotFoundError, SaevStoreError, UnsafeContentError, brief
from saev_store.problems import Problem
from saev_store.sources.address import full_url
from saev_store.sources.energon.field_map import FieldPath
from saev_store.sources.energon.keys import (
    DATASET_YAML,
    INFO_JSON,
    INFO_YAML,
    SPLIT_JSON,
    SPLIT_YAML,
    check_shard_names,
)
from saev_store.sources.energon.samples import CRUDE, SAMPLE_TYPES
from saev_store.sources.energon.split import MAX_EXPANDED_CHARACTERS, collapse, expand
from saev_store.transport import Transport

MAX_JSON_NBYTES = 256 << 20
#: Consecutive shards share one line, so YAML documents are small.
MAX_YAML_NBYTES = 1 << 20
MODULE = "megatron.energon"
#: The writer that `.info.json` names: the release of Energon whose files ours are equal to.
_FORMAT_VERSION = "7.4.1"
#: Modules of sample types that Energon does not export with the others.
_MODULES = {"VQAOCRSample": f"{MODULE}.flavors.vqa_and_ocr"}
_MAX_DEPTH = 32
#: Limit of the samples in one shard, and in all.
_MAX_COUNT, _MAX_TOTAL = 2**40, 2**50
_BASE = cast("type[yaml.SafeLoader]", getattr(yaml, "CSafeLoader", yaml.SafeLoader))


@dataclass(frozen=True)
class Documents:
    """The documents in `.nv-meta`.

    Attributes:
        shards: Paths of the tars below the data set's folder, in the order of `tar_file_id`.
        counts: Number of samples in each, int64.
        version: The release of Energon that prepared it; None before 7.4.
        splits: Shards of each split, braces expanded, without excluded shards.
        exclude: Excluded samples, as (shard, key).
        sample_type: One of `SAMPLE_TYPES`; `"CrudeWebdataset"` for parts as they are; None for other types.
        field_map: The origin of each field.
        problems: Warnings about the documents.
    """

    shards: tuple[str, ...]
    counts: IntArray
    version: str | None
    splits: Mapping[str, tuple[str, ...]] = field(default_factory=dict[str, tuple[str, ...]])
    exclude: frozenset[tuple[str, str]] = frozenset()
    sample_type: str | None = None
    field_map: Mapping[str, FieldPath] = field(default_factory=dict[str, FieldPath])
    problems: tuple[Problem, ...] = ()


def read_documents(transport: Transport) -> Documents:
    """Read the documents in `.nv-meta`. The classes that `dataset.yaml` names are looked up, never imported.

    Raises:
        NotFoundError: the folder was not prepared.
        DocumentError: a document breaks a rule.
        UnsafeContentError: a document names files outside the folder, or has tags that create objects.
    """
    info = _load(transport, INFO_JSON, INFO_YAML)
    if info is None:
        raise NotFoundError(
            f"there is no {INFO_JSON}: this is not an Energon data set, or it was not prepared",
            where=transport.url,
            remedy="Run `saev-store prepare` on a folder of tars.",
        )
    shards, counts = _counts(*info)
    version = info[0].get("energon_version")
    splits, exclude, problems = read_splits(transport, shards)
    definition = _load(transport, DATASET_YAML)
    sample_type, field_map = None, dict[str, FieldPath]()
    if definition is None:
        message = f"there is no {DATASET_YAML}: parts are returned as they are"
        problems.append(Problem("no_definition", message, DATASET_YAML, severity="info"))
    else:
        sample_type, field_map = _definition(*definition, problems)
    return Documents(
        shards,
        np.array(counts, np.int64),
        version if isinstance(version, str) else None,
        splits,
        exclude,
        sample_type,
        field_map,
        tuple(problems),
    )


def _counts(document: Mapping[object, object], where: str) -> tuple[tuple[str, ...], list[int]]:
    """The shards and the numbers of samples of an info document."""
    found = document.get("shard_counts")
    if not is_mapping(found):
        raise _error("it has no mapping 'shard_counts' from shards to numbers of samples", where)
    counts: list[int] = []
    for name, count in found.items():
        if type(count) is not int or not 0 <= count < _MAX_COUNT:
            raise _error(f"{brief(name)}: {brief(count)} is not a number of samples", where)
        counts.append(count)
    if sum(counts) >= _MAX_TOTAL:
        raise _error("its numbers of samples add up to more than any disk holds", where)
    check_shard_names(found, where=where)
    return tuple(found), counts


def read_splits(
    transport: Transport, shards: Sequence[str]
) -> tuple[dict[str, tuple[str, ...]], frozenset[tuple[str, str]], list[Problem]]:
    """The shards of each split, the excluded samples, and warnings, from `split.yaml` (or `split.json`).

    Raises:
        DocumentError: it breaks a rule, or names shards that are not among `shards`.
        UnsafeContentError: a shard is outside the data set.
    """
    loaded = _load(transport, SPLIT_YAML, SPLIT_JSON)
    if loaded is None:
        message = f"there is no {SPLIT_YAML}: the data set has no splits"
        return {}, frozenset(), [Problem("no_splits", message, SPLIT_YAML, severity="info")]
    document, where = loaded
    parts = document.get("split_parts")
    if not is_mapping(parts):
        raise _error("it has no mapping 'split_parts' from names of splits to lists of shards", where)
    problems: list[Problem] = []
    left, known = MAX_EXPANDED_CHARACTERS, set(shards)

    def names(patterns: object, what: str) -> Iterator[str]:
        nonlocal left
        if not isinstance(patterns, list | None):
            raise _error(f"{what} is {brief(patterns)}; it must be a list of names", where)
        for pattern in cast("list[object]", patterns or []):
            if not isinstance(pattern, str):
                raise _error(f"{what} holds {brief(pattern)}, which is not a text; put quotes around it", where)
            found = expand(pattern, where=where, max_characters=left)
            left -= sum(map(len, found)) + 64 * len(found)
            yield from found

    excluded_shards, excluded = set[str](), set[tuple[str, str]]()
    for entry in names(document.get("exclude"), "exclude"):
        # A key may have slashes, so each beginning of the entry may be the shard.
        slashes = [i for i, character in enumerate(entry) if character == "/"]
        shard = next((entry[:i] for i in reversed(slashes) if entry[:i] in known), None)
        if entry in known:
            excluded_shards.add(entry)
        elif shard is not None:
            excluded.add((shard, entry[len(shard) + 1 :]))
        else:
            message = f"exclude names {brief(entry)}, which is neither a shard nor a sample of one: it is ignored"
            problems.append(Problem("unknown_exclude", message, where, severity="info"))
    splits: dict[str, tuple[str, ...]] = {}
    for name, patterns in parts.items():
        listed = list(names(patterns, f"split_parts[{name!r}]"))
        check_shard_names(listed, where=where)
        unknown = next((shard for shard in listed if shard not in known), None)
        if unknown is not None:
            raise _error(f"it names {brief(unknown)}, a shard that the index does not have", where)
        kept = tuple(shard for shard in listed if shard not in excluded_shards)
        if len(set(kept)) < len(kept):
            message = f"split {name!r} lists a shard twice: its samples come twice"
            problems.append(Problem("repeated_shard", message, where, severity="warning"))
        splits[name] = kept
    return splits, frozenset(excluded), problems


def _definition(
    document: Mapping[object, object], where: str, problems: list[Problem]
) -> tuple[str | None, dict[str, FieldPath]]:
    """The sample type and field map of a `dataset.yaml`; warnings are added to `problems`."""
    nested = document.get("sample_type")
    types = nested if is_mapping(nested) else document
    module, name = types.get("__module__"), types.get("__class__")
    if types is document and isinstance(name, str) and name != CRUDE and name.endswith("Webdataset"):
        name = name.removesuffix("Webdataset") + "Sample"  # the classes that older releases name
    sample_type = name if isinstance(name, str) and (name in SAMPLE_TYPES or name == CRUDE) else None
    if sample_type is None or not isinstance(module, str) or not f"{module}.".startswith(f"{MODULE}."):
        message = f"the sample type is {brief(module)}, {brief(name)}: not one of Energon's, so parts are returned as they are"
        problems.append(Problem("unknown_sample_type", message, where, severity="warning"))
        sample_type = None
    found, field_map = document.get("field_map"), dict[str, FieldPath]()
    if found is not None and not is_mapping(found):
        raise _error(f"field_map is {brief(found)}; it must map fields to parts", where)
    for name, path in (found or {}).items():
        if not isinstance(path, str):
            raise _error(f"field_map has {brief(path)}; it must map fields to parts", where)
        try:
            field_map[name] = FieldPath.parse(path, where=where)
        except ArgumentError as error:
            raise _error(error.message, where) from None
    if sample_type in SAMPLE_TYPES and field_map:
        SAMPLE_TYPES[sample_type].check_fields(field_map, where=where)
    for name in ("sample_loader", "part_filter", "decoder"):
        if document.get(name) is not None:
            message = f"{name} is code ({brief(document[name])}); it is not run, parts are returned as they are"
            problems.append(Problem("code_not_run", message, where, severity="warning"))
    return (None if document.get("sample_loader") is not None else sample_type), field_map


def info_bytes(shards: Mapping[str, int]) -> bytes:
    """The content of `.info.json` for shards in order, with their numbers of samples."""
    document = {"energon_version": _FORMAT_VERSION, "shard_counts": dict(shards)}
    return json.dumps(document, indent=2, ensure_ascii=False).encode()


def split_bytes(splits: Mapping[str, Sequence[str]]) -> bytes:
    """The content of `split.yaml`; consecutive shards are collapsed into braces."""
    return _dump({"split_parts": {name: collapse(shards) for name, shards in splits.items()}, "exclude": []})


def definition_bytes(sample_type: str, field_map: Mapping[str, str]) -> bytes:
    """The content of `dataset.yaml` for one of Energon's sample types."""
    if sample_type == CRUDE:
        return _dump({"__module__": MODULE, "__class__": CRUDE})
    module = _MODULES.get(sample_type, MODULE)
    return _dump({"sample_type": {"__module__": module, "__class__": sample_type}, "field_map": dict(field_map)})


def _dump(value: object) -> bytes:
    return yaml.safe_dump(value, sort_keys=False, allow_unicode=True, width=2**20).encode()


# -- untrusted YAML ----------------------------------------------------------------------------------------------------


class _Loader(_BASE):
    """The safe loader; a repeated key in a mapping is an error."""

    def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict[Hashable, Any]:
        made = super().construct_mapping(node, deep=deep)
        if len(made) < len(node.value):
            raise yaml.constructor.ConstructorError(None, None, "a key is repeated", node.start_mark)
        return made


def load_yaml(raw: bytes, *, where: str) -> object:
    """The plain Python objects of a YAML document: dict, list, str, int, float, bool, None, date.

    Raises:
        UnsafeContentError: the document has tags, which create objects.
        DocumentError: it is not YAML, is nested deeper than such a document is, repeats a key, or has references.
    """
    try:
        text, depth = raw.decode("utf-8-sig"), 0
        for event in cast("Iterator[Any]", yaml.parse(text, Loader=_BASE)):  # pyright: ignore[reportUnknownMemberType]  # the stubs
            if getattr(event, "tag", None) is not None:
                raise UnsafeContentError(
                    f"line {event.start_mark.line + 1} has the tag {brief(event.tag)}; the document must be plain data",
                    where=where,
                    remedy="Remove the tag.",
                )
            depth += isinstance(event, yaml.CollectionStartEvent) - isinstance(event, yaml.CollectionEndEvent)
            if depth > _MAX_DEPTH or isinstance(event, yaml.AliasEvent):
                raise _error(f"it has references, or is nested more than {_MAX_DEPTH} levels deep", where)
        return cast("object", yaml.load(text, Loader=_Loader))  # noqa: S506 - a safe loader
    except SaevStoreError:  # some of ours are ValueErrors
        raise
    except (yaml.YAMLError, ValueError, LookupError, OverflowError, TypeError) as error:
        raise _error(f"it is not YAML that can be read: {' '.join(str(error).split())}", where) from None


def is_mapping(value: object) -> TypeGuard[Mapping[str, object]]:
    """Return True for a mapping with keys that are text."""
    return isinstance(value, dict) and all(isinstance(key, str) for key in cast("dict[object, object]", value))


def _load(transport: Transport, *paths: str) -> tuple[Mapping[object, object], str] | None:
    """The first of some documents that exists, a mapping, and its address."""
    for path in paths:
        is_json, where = path.endswith(".json"), full_url(transport, path)
        with contextlib.suppress(NotFoundError):
            raw = transport.read(path, max_bytes=MAX_JSON_NBYTES if is_json else MAX_YAML_NBYTES)
            found = parse_json(raw, where=where, max_nbytes=MAX_JSON_NBYTES) if is_json else load_yaml(raw, where=where)
            if not isinstance(found, dict):
                raise _error("it is not a mapping", where)
            return cast("dict[object, object]", found), where
    return None


def _error(message: str, where: str) -> DocumentError:
    return DocumentError(message, where=where, problems=[Problem("nv_meta", message, where)])
