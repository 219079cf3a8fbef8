"""The documents in `.nv-meta`, of all generations: shards, splits and the sample type. Pure: bytes in, values out.

Energon 5 and 6 write `.info.yaml`, 7 writes `.info.json` (from 7.4 on with the version of the writer); the other documents
are the same.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import cast

import numpy as np

from saev_store.core.layout import IntArray
from saev_store.documents import parse_json
from saev_store.errors import DocumentError, SaevStoreError, brief
from saev_store.problems import Problem
from saev_store.sources.energon import _yaml
from saev_store.sources.energon.field_map import FieldPath, parse_field_map
from saev_store.sources.energon.keys import check_shard_names
from saev_store.sources.energon.samples import CRUDE, SAMPLE_TYPES, type_of_factory
from saev_store.sources.energon.split import MAX_EXPANDED_CHARACTERS, NAME_OVERHEAD, collapse, escape, expand

MAX_DOCUMENT_NBYTES = 256 << 20
#: The writer that `.info.json` names: the release of Energon whose files these are equal to.
FORMAT_VERSION = "7.4.1"
MODULE = "megatron.energon"
#: Modules of sample types that Energon does not export with the others.
_MODULES = {"VQAOCRSample": f"{MODULE}.flavors.vqa_and_ocr"}
#: Limit of the samples in one shard.
_MAX_COUNT = 2**40


@dataclass(frozen=True)
class Info:
    """`.info.json` or `.info.yaml`: the shards in the order of `tar_file_id`, and the number of samples in each.

    Attributes:
        shards: Paths below the data set's folder.
        counts: Number of samples in each, int64.
        version: The release of Energon that prepared it; None before 7.4.
    """

    shards: tuple[str, ...]
    counts: IntArray
    version: str | None = None


@dataclass(frozen=True)
class Splits:
    """`split.yaml`: the shards of each split, and exclusions.

    Attributes:
        parts: Shards of each split, braces expanded, without excluded shards.
        exclude: Excluded samples, as (shard, key).
        problems: Warnings about it.
    """

    parts: Mapping[str, tuple[str, ...]]
    exclude: frozenset[tuple[str, str]] = frozenset()
    problems: tuple[Problem, ...] = ()


@dataclass(frozen=True)
class Definition:
    """`dataset.yaml`: the type of a sample.

    Attributes:
        sample_type: Name of one of `SAMPLE_TYPES`; `"CrudeWebdataset"` for parts as they are; None for other types.
        field_map: The origin of each field.
        problems: Warnings about it.
    """

    sample_type: str | None = None
    field_map: Mapping[str, FieldPath] = field(default_factory=dict[str, FieldPath])
    problems: tuple[Problem, ...] = ()


def parse_info(raw: bytes, *, where: str) -> Info:
    """Parse `.info.json`, or `.info.yaml` (by the ending of `where`).

    Raises:
        DocumentError: it has no shards, or impossible numbers of samples.
        UnsafeContentError: a shard is outside the data set.
    """
    document = _load(raw, where)
    shards = document.get("shard_counts")
    if not isinstance(shards, dict):
        raise _error("it has no mapping 'shard_counts' from shards to numbers of samples", where)
    counts = cast("dict[object, object]", shards)
    problems = [
        Problem("shard_counts", f"{brief(name)}: {brief(count)} is no number of samples", where)
        for name, count in counts.items()
        if not isinstance(name, str)
        or isinstance(count, bool)
        or not isinstance(count, int)
        or not 0 <= count < _MAX_COUNT
    ]
    if problems:
        raise DocumentError("; ".join(each.message for each in problems[:8]), where=where, problems=problems)
    names = tuple(cast("dict[str, int]", counts))
    check_shard_names(names, where=where)
    if sum(cast("dict[str, int]", counts).values()) >= _MAX_COUNT * 1024:
        raise _error("its numbers of samples add up to more than any disk holds", where)
    version = document.get("energon_version")
    return Info(
        names,
        np.fromiter(cast("dict[str, int]", counts).values(), np.int64, len(names)),
        version if isinstance(version, str) else None,
    )


def info_bytes(shards: Mapping[str, int]) -> bytes:
    """The content of `.info.json` for shards in order, with their numbers of samples."""
    document = {"energon_version": FORMAT_VERSION, "shard_counts": dict(shards)}
    return json.dumps(document, indent=2, ensure_ascii=False).encode()


def parse_splits(raw: bytes, info: Info, *, where: str) -> Splits:
    """Parse `split.yaml` (or `split.json`) against the shards of `info`.

    Raises:
        DocumentError: it breaks a rule, or names shards that `info` does not have.
        UnsafeContentError: a shard is outside the data set.
    """
    document = _load(raw, where)
    parts = _yaml.as_mapping(document.get("split_parts"))
    if parts is None:
        raise _error("it has no mapping 'split_parts' from names of splits to lists of shards", where)
    exclude = document.get("exclude")
    budget = MAX_EXPANDED_CHARACTERS
    expanded: dict[str, list[str]] = {}
    for name, patterns in {**parts, "": exclude}.items():
        what = f"split_parts[{name!r}]" if name else "exclude"
        found: list[str] = []
        for pattern in _strings(patterns, what, where):
            names = expand(pattern, where=where, max_characters=budget)
            budget -= sum(map(len, names)) + NAME_OVERHEAD * len(names)
            found += names
        expanded[name] = found
    return _resolve(expanded, info, where)


def _resolve(expanded: dict[str, list[str]], info: Info, where: str) -> Splits:
    problems: list[Problem] = []
    known = set(info.shards)
    excluded_shards, excluded_samples = set[str](), set[tuple[str, str]]()
    for entry in expanded.pop(""):
        shard = _shard_of(entry, known)
        if entry in known:
            excluded_shards.add(entry)
        elif shard is not None:
            excluded_samples.add((shard, entry[len(shard) + 1 :]))
        else:
            message = f"exclude names {brief(entry)}, which is no shard and no sample of one: it is ignored"
            problems.append(Problem("unknown_exclude", message, where, severity="info"))
    parts: dict[str, tuple[str, ...]] = {}
    missing: list[str] = []
    for name, shards in expanded.items():
        check_shard_names(shards, where=where)
        missing += [shard for shard in shards if shard not in known and shard not in excluded_shards]
        kept = [shard for shard in shards if shard not in excluded_shards]
        if len(set(kept)) < len(kept):
            message = f"split {name!r} lists a shard twice: its samples come twice"
            problems.append(Problem("repeated_shard", message, where, severity="warning"))
        parts[name] = tuple(kept)
    if missing:
        shown = ", ".join(map(brief, missing[:8])) + (f" and {len(missing) - 8} more" if len(missing) > 8 else "")
        raise _error(f"it names shards that the index does not have: {shown}", where)
    return Splits(parts, frozenset(excluded_samples), tuple(problems))


def _shard_of(entry: str, known: set[str]) -> str | None:
    """The shard of the sample that an entry of `exclude` names."""
    at = entry.rfind("/")
    while at > 0:
        if entry[:at] in known:
            return entry[:at]
        at = entry.rfind("/", 0, at)
    return None


def split_bytes(parts: Mapping[str, list[str]], exclude: list[str]) -> bytes:
    """The content of `split.yaml`; consecutive shards are collapsed into braces."""
    document = {
        "split_parts": {name: collapse(shards) for name, shards in parts.items()},
        "exclude": [escape(entry) for entry in exclude],
    }
    return _yaml.dumps(document)


def parse_definition(raw: bytes, *, where: str) -> Definition:
    """Parse `dataset.yaml`. The classes that it names are looked up in `SAMPLE_TYPES`, never imported.

    Raises:
        DocumentError: it breaks a rule, or its field map does not fit its sample type.
    """
    document = _yaml.loads(raw, where=where)
    if not isinstance(document, dict):
        raise _error("it is no mapping", where)
    mapping = cast("dict[str, object]", document)
    sample_type, problem = _sample_type(mapping, where)
    problems = [problem] if problem else []
    found = mapping.get("field_map")
    field_map = parse_field_map(found, where=where) if found is not None else {}
    if sample_type in SAMPLE_TYPES and field_map:
        SAMPLE_TYPES[sample_type].check_fields(field_map, where=where)
    for name in ("sample_loader", "part_filter", "decoder"):
        if mapping.get(name) is not None:
            message = f"{name} is code ({brief(mapping[name])}); it is not run, parts are returned as they are"
            problems.append(Problem("code_not_run", message, where, severity="warning"))
    if mapping.get("sample_loader") is not None:
        sample_type = None
    return Definition(sample_type, field_map, tuple(problems))


def _sample_type(mapping: dict[str, object], where: str) -> tuple[str | None, Problem | None]:
    nested = _yaml.as_mapping(mapping.get("sample_type"))
    module, name = mapping.get("__module__"), type_of_factory(mapping.get("__class__"))
    if nested is not None:
        module, name = nested.get("__module__"), nested.get("__class__")
    ours = isinstance(module, str) and (module == MODULE or module.startswith(f"{MODULE}."))
    if ours and isinstance(name, str) and (name in SAMPLE_TYPES or name == CRUDE):
        return name, None
    message = (
        f"the sample type is {brief(module)}, {brief(name)}: not one of Energon's, so parts are returned as they are"
    )
    return None, Problem("unknown_sample_type", message, where, severity="warning")


def definition_bytes(sample_type: str, field_map: Mapping[str, str]) -> bytes:
    """The content of `dataset.yaml` for one of Energon's sample types."""
    if sample_type == CRUDE:
        return _yaml.dumps({"__module__": MODULE, "__class__": CRUDE})
    module = _MODULES.get(sample_type, MODULE)
    return _yaml.dumps({"sample_type": {"__module__": module, "__class__": sample_type}, "field_map": dict(field_map)})


def _load(raw: bytes, where: str) -> dict[object, object]:
    if where.endswith(".json"):
        document = parse_json(raw, where=where, max_nbytes=MAX_DOCUMENT_NBYTES)
    else:
        document = _yaml.loads(raw, where=where)
    return cast("dict[object, object]", document) if isinstance(document, dict) else {}


def _strings(value: object, what: str, where: str) -> list[str]:
    if value is None:
        return []
    if not isinstance(value, list):
        raise _error(f"{what} is {brief(value)}; it must be a list of names", where)
    wrong = [item for item in cast("list[object]", value) if not isinstance(item, str)]
    if wrong:
        raise _error(f"{what} holds {brief(wrong[0])}, which is no text; put quotes around it", where)
    return cast("list[str]", value)


def _error(message: str, where: str) -> SaevStoreError:
    return DocumentError(message, where=where, problems=[Problem("nv_meta", message, where)])
