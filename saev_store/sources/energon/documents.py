"""The documents in `.nv-meta`, of all generations: shards, splits and the sample type. All of them are untrusted.

Energon 5 and 6 write `.info.yaml`, 7 writes `.info.json` (from 7.4 on with the version of the writer); the other documents
are the same.
"""

from __future__ import annotations

import contextlib
import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Annotated, Any, ClassVar, TypeVar, cast

import numpy as np
import yaml
from pydantic import BaseModel, ConfigDict, Field, ValidationError

from saev_store.core.layout import IntArray
from saev_store.documents import parse_json
from saev_store.errors import ArgumentError, DocumentError, NotFoundError, SaevStoreError, UnsafeContentError, brief
from saev_store.problems import Problem
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
_YAML = cast("type[yaml.SafeLoader]", getattr(yaml, "CSafeLoader", yaml.SafeLoader))


class Document(BaseModel):
    """An untrusted document of Energon; other keys are ignored."""

    model_config: ClassVar[ConfigDict] = ConfigDict(strict=True)


class _Info(Document):
    #: No tar has 2**36 samples, and numbers of as many shards as a document has room for add up to an int64.
    shard_counts: dict[str, Annotated[int, Field(ge=0, lt=2**36)]]


class _Split(Document):
    split_parts: dict[str, list[str] | None]
    exclude: list[str] | None = None


class _Definition(Document):
    sample_type: object = None
    field_map: dict[str, str] | None = None
    module: object = Field(None, alias="__module__")
    name: object = Field(None, alias="__class__")
    sample_loader: object = None
    part_filter: object = None
    decoder: object = None


DocumentT = TypeVar("DocumentT", bound=Document)


@dataclass(frozen=True)
class Documents:
    """The documents in `.nv-meta`.

    Attributes:
        shards: Paths of the tars below the data set's folder, in the order of `tar_file_id`.
        counts: Number of samples in each, int64.
        splits: Shards of each split, braces expanded, without excluded shards.
        exclude: Excluded samples, as (shard, key).
        sample_type: One of `SAMPLE_TYPES`; `"CrudeWebdataset"` for parts as they are; None for other types.
        field_map: The origin of each field.
        problems: Warnings about the documents.
    """

    shards: tuple[str, ...]
    counts: IntArray
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
    found = _load(_Info, transport, INFO_JSON, INFO_YAML)
    if found is None:
        raise NotFoundError(
            f"there is no {INFO_JSON}: this is not an Energon data set, or it was not prepared",
            where=transport.url,
            remedy="Run `saev-store prepare` on a folder of tars.",
        )
    info, where = found
    check_shard_names(info.shard_counts, where=where)
    splits, exclude, problems = read_splits(transport, list(info.shard_counts))
    sample_type, field_map, others = _read_definition(transport)
    return Documents(
        tuple(info.shard_counts),
        np.array(list(info.shard_counts.values()), np.int64),
        splits,
        exclude,
        sample_type,
        field_map,
        (*problems, *others),
    )


def read_splits(
    transport: Transport, shards: Sequence[str]
) -> tuple[dict[str, tuple[str, ...]], frozenset[tuple[str, str]], list[Problem]]:
    """The shards of each split, the excluded samples, and warnings, from `split.yaml` (or `split.json`).

    Raises:
        DocumentError: it breaks a rule, or names shards that are not among `shards`.
        UnsafeContentError: a shard is outside the data set.
    """
    found = _load(_Split, transport, SPLIT_YAML, SPLIT_JSON)
    if found is None:
        return {}, frozenset(), []
    document, where = found
    problems: list[Problem] = []
    left, known = MAX_EXPANDED_CHARACTERS, set(shards)

    def names(patterns: list[str] | None) -> Iterator[str]:
        nonlocal left
        for pattern in patterns or ():
            made = expand(pattern, where=where, max_characters=left)
            left -= sum(map(len, made)) + 64 * len(made)
            yield from made

    excluded_shards, excluded = set[str](), set[tuple[str, str]]()
    for entry in names(document.exclude):
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
    for name, patterns in document.split_parts.items():
        listed = list(names(patterns))
        check_shard_names(listed, where=where)
        unknown = next((shard for shard in listed if shard not in known), None)
        if unknown is not None:
            raise _error(f"it names {brief(unknown)}, a shard that the index does not have", where)
        splits[name] = tuple(shard for shard in listed if shard not in excluded_shards)
        if len(set(splits[name])) < len(splits[name]):
            message = f"split {name!r} lists a shard twice: its samples come twice"
            problems.append(Problem("repeated_shard", message, where, severity="warning"))
    return splits, frozenset(excluded), problems


def _read_definition(transport: Transport) -> tuple[str | None, dict[str, FieldPath], list[Problem]]:
    """The sample type and field map of `dataset.yaml`, and warnings about it."""
    found = _load(_Definition, transport, DATASET_YAML)
    if found is None:
        return None, {}, []
    document, where = found
    module, name = document.module, document.name
    if isinstance(types := document.sample_type, dict):
        types = cast("dict[object, object]", types)
        module, name = types.get("__module__"), types.get("__class__")
    elif isinstance(name, str) and name != CRUDE and name.endswith("Webdataset"):
        name = name.removesuffix("Webdataset") + "Sample"  # the classes that older releases name
    problems: list[Problem] = []
    sample_type = name if isinstance(name, str) and (name in SAMPLE_TYPES or name == CRUDE) else None
    if sample_type is None or not isinstance(module, str) or not f"{module}.".startswith(f"{MODULE}."):
        message = f"the sample type is {brief(module)}, {brief(name)}: not one of Energon's, so parts are returned as they are"
        problems.append(Problem("unknown_sample_type", message, where, severity="warning"))
        sample_type = None
    try:
        field_map = {name: FieldPath.parse(path, where=where) for name, path in (document.field_map or {}).items()}
    except ArgumentError as error:
        raise _error(error.message, where) from None
    if sample_type in SAMPLE_TYPES and field_map:
        SAMPLE_TYPES[sample_type].check_fields(field_map, where=where)
    for name in ("sample_loader", "part_filter", "decoder"):
        code: object = getattr(document, name)
        if code is not None:
            message = f"{name} is code ({brief(code)}); it is not run, parts are returned as they are"
            problems.append(Problem("code_not_run", message, where, severity="warning"))
    return (None if document.sample_loader is not None else sample_type), field_map, problems


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


# -- untrusted documents -----------------------------------------------------------------------------------------------


def load_yaml(raw: bytes, *, where: str) -> object:
    """The plain Python objects of a YAML document: dict, list, str, int, float, bool, None, date.

    Raises:
        UnsafeContentError: the document has tags, which create objects.
        DocumentError: it is not YAML, is nested deeper than such a document is, or has references.
    """
    try:
        text, depth = raw.decode("utf-8-sig"), 0
        for event in cast("Iterator[Any]", yaml.parse(text, Loader=_YAML)):  # pyright: ignore[reportUnknownMemberType]  # the stubs
            if getattr(event, "tag", None) is not None:
                raise UnsafeContentError(
                    f"line {event.start_mark.line + 1} has the tag {brief(event.tag)}; the document must be plain data",
                    where=where,
                    remedy="Remove the tag.",
                )
            depth += isinstance(event, yaml.CollectionStartEvent) - isinstance(event, yaml.CollectionEndEvent)
            if depth > _MAX_DEPTH or isinstance(event, yaml.AliasEvent):
                raise _error(f"it has references, or is nested more than {_MAX_DEPTH} levels deep", where)
        return cast("object", yaml.load(text, Loader=_YAML))  # noqa: S506 - a safe loader
    except SaevStoreError:  # some of ours are ValueErrors
        raise
    except (yaml.YAMLError, ValueError, LookupError, OverflowError, TypeError) as error:
        raise _error(f"it is not YAML that can be read: {' '.join(str(error).split())}", where) from None


def check_document(model: type[DocumentT], found: object, *, where: str) -> DocumentT:
    """The fields of a document.

    Raises:
        DocumentError: one is missing, or of another type.
    """
    try:
        return model.model_validate(found)
    except ValidationError as error:
        first = error.errors(include_url=False)[0]
        place = "".join(f"[{part!r}]" for part in first["loc"])
        raise _error(f"{place or 'it'} is {brief(first['input'])}: {first['msg']}", where) from None


def _load(model: type[DocumentT], transport: Transport, *paths: str) -> tuple[DocumentT, str] | None:
    """The first of some documents that exists, and its address."""
    for path in paths:
        is_json, where = path.endswith(".json"), transport.where(path)
        with contextlib.suppress(NotFoundError):
            raw = transport.read(path, max_bytes=MAX_JSON_NBYTES if is_json else MAX_YAML_NBYTES)
            found = parse_json(raw, where=where, max_nbytes=MAX_JSON_NBYTES) if is_json else load_yaml(raw, where=where)
            return check_document(model, found, where=where), where
    return None


def _error(message: str, where: str) -> DocumentError:
    return DocumentError(message, where=where, problems=[Problem("nv_meta", message, where)])
