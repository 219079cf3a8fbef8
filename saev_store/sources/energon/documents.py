"""The documents in `.nv-meta`, of all generations: shards, splits and the sample type. All of them are untrusted.

Energon 6 writes `.info.yaml`, 7 writes `.info.json`; the other documents are the same.
"""

from __future__ import annotations

import contextlib
import math
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from fractions import Fraction
from itertools import islice, product
from typing import Annotated, Any, ClassVar, NoReturn, TypeVar, cast

import numpy as np
import yaml
from pydantic import BaseModel, ConfigDict, Field, ValidationError

from saev_store.core.layout import IntArray
from saev_store.documents import parse_json
from saev_store.errors import ArgumentError, DocumentError, NotFoundError, SaevStoreError, UnsafeContentError, brief
from saev_store.sources.energon.keys import DATASET_YAML, INFO_JSON, INFO_YAML, SPLIT_JSON, SPLIT_YAML, check_names
from saev_store.sources.energon.samples import CRUDE, SAMPLE_TYPES, FieldPath, check_fields, parse_path
from saev_store.transport import Transport

_MAX_JSON_NBYTES = 256 << 20
#: Consecutive shards share one line, so YAML documents are small.
MAX_YAML_NBYTES = 1 << 20
_MAX_DEPTH = 32
MODULE = "megatron.energon"
SPLITS = ("train", "val", "test")
#: Limit of the characters of all names of a document; each name counts 64 more.
MAX_EXPANDED_CHARACTERS = 64 << 20
_MAX_PATTERN_CHARACTERS = 65_536
_TOKEN = re.compile(r"\\(.)|\{([^{}\\]*)\}|([{}])|([^{}\\]+|\\)", re.DOTALL)
_RANGE = re.compile(r"(-?\d{1,18})\.\.(-?\d{1,18})(?:\.\.-?(\d{1,18}))?", re.ASCII)
_LAST_NUMBER = re.compile(r"(.*?)(\d{1,18})(\D*)", re.ASCII | re.DOTALL)
_SPECIAL = re.compile(r"[\\{}]")
_SHARE = re.compile(r"\d{1,9}(?:\.\d{0,9})?", re.ASCII)
#: Numbers to the base 60, which YAML has, too: they take quadratic time.
_SEXAGESIMAL = re.compile(r"(?::[0-9]{1,2}){64}", re.ASCII)
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
    sample_type: dict[str, object] | None = None
    field_map: dict[str, str] | None = None
    module: object = Field(None, alias="__module__")
    name: object = Field(None, alias="__class__")
    sample_loader: object = None


DocumentT = TypeVar("DocumentT", bound=Document)


@dataclass(frozen=True)
class Documents:
    """The documents in `.nv-meta`. Splits have the shards that are not excluded; `exclude` is shards and keys of samples.

    `sample_type` is one of `SAMPLE_TYPES`, `"CrudeWebdataset"` for parts as they are, or None.
    """

    shards: tuple[str, ...]
    counts: IntArray
    splits: Mapping[str, tuple[str, ...]]
    exclude: frozenset[tuple[str, str]]
    sample_type: str | None
    field_map: Mapping[str, FieldPath]


def read_documents(transport: Transport) -> Documents:
    """Read the documents in `.nv-meta`. The classes that `dataset.yaml` names are looked up, never imported."""
    found = _load(_Info, transport, INFO_JSON, INFO_YAML)
    if found is None:
        remedy = "Run `saev-store prepare` on a folder of tars."
        raise NotFoundError(f"there is no {INFO_JSON}: it was not prepared", where=transport.url, remedy=remedy)
    info, where = found
    check_names(info.shard_counts, where=where)
    shards, counts = tuple(info.shard_counts), np.array(list(info.shard_counts.values()), np.int64)
    return Documents(shards, counts, *read_splits(transport, shards), *_read_definition(transport))


def read_splits(
    transport: Transport, shards: Sequence[str]
) -> tuple[dict[str, tuple[str, ...]], frozenset[tuple[str, str]]]:
    """The shards of each split, and the excluded samples, from `split.yaml` (or `split.json`)."""
    found = _load(_Split, transport, SPLIT_YAML, SPLIT_JSON)
    if found is None:
        return {}, frozenset()
    document, where = found
    left, known = MAX_EXPANDED_CHARACTERS, set(shards)

    def names(patterns: list[str] | None) -> Iterator[str]:
        nonlocal left
        for pattern in patterns or ():
            made = expand(pattern, where=where, max_characters=left)
            left -= sum(map(len, made)) + 64 * len(made)
            yield from made

    excluded_shards, excluded = set[str](), set[tuple[str, str]]()
    for entry in names(document.exclude):
        # A key may have slashes, so each beginning of the entry may be the shard; unknown ones are ignored, as in Energon.
        slashes = [i for i, character in enumerate(entry) if character == "/"]
        shard = next((entry[:i] for i in reversed(slashes) if entry[:i] in known), None)
        if entry in known:
            excluded_shards.add(entry)
        elif shard is not None:
            excluded.add((shard, entry[len(shard) + 1 :]))
    splits: dict[str, tuple[str, ...]] = {}
    for name, patterns in document.split_parts.items():
        listed = list(names(patterns))
        check_names(listed, where=where)
        if unknown := next((shard for shard in listed if shard not in known), None):
            raise DocumentError(f"it names {brief(unknown)}, a shard that the index does not have", where=where)
        splits[name] = tuple(shard for shard in listed if shard not in excluded_shards)
    return splits, frozenset(excluded)


def _read_definition(transport: Transport) -> tuple[str | None, dict[str, FieldPath]]:
    """The sample type and field map of `dataset.yaml`."""
    found = _load(_Definition, transport, DATASET_YAML)
    if found is None:
        return None, {}
    document, where = found
    module, name = document.module, document.name
    if document.sample_type is not None:
        module, name = document.sample_type.get("__module__"), document.sample_type.get("__class__")
    elif isinstance(name, str) and name != CRUDE and name.endswith("Webdataset"):
        name = name.removesuffix("Webdataset") + "Sample"  # the classes that older releases name
    try:
        field_map = {name: parse_path(path, where=where) for name, path in (document.field_map or {}).items()}
    except ArgumentError as error:
        raise DocumentError(error.message, where=where) from None
    is_ours = isinstance(module, str) and f"{module}.".startswith(f"{MODULE}.") and document.sample_loader is None
    if not is_ours or not isinstance(name, str) or (name not in SAMPLE_TYPES and name != CRUDE):
        return None, field_map
    if name in SAMPLE_TYPES and field_map:
        check_fields(name, field_map, where=where)
    return name, field_map


# -- untrusted documents -----------------------------------------------------------------------------------------------


def load_yaml(model: type[DocumentT], raw: bytes, *, where: str) -> DocumentT:
    """The fields of a YAML document without tags, which create objects, and without references."""
    try:
        text, depth = raw.decode("utf-8-sig"), 0
        if _SEXAGESIMAL.search(text):
            raise ValueError("it has a number of more than 64 parts")
        for event in cast("Iterator[Any]", yaml.parse(text, Loader=_YAML)):  # pyright: ignore[reportUnknownMemberType]  # the stubs
            if getattr(event, "tag", None) is not None:
                message = f"line {event.start_mark.line + 1} has the tag {brief(event.tag)}; it must be plain data"
                raise UnsafeContentError(message, where=where, remedy="Remove the tag.")
            depth += isinstance(event, yaml.CollectionStartEvent) - isinstance(event, yaml.CollectionEndEvent)
            if depth > _MAX_DEPTH or isinstance(event, yaml.AliasEvent):
                raise DocumentError(f"it has references, or is nested more than {_MAX_DEPTH} levels deep", where=where)
        return _checked(model, yaml.load(text, Loader=_YAML), where=where)  # noqa: S506 - a safe loader
    except SaevStoreError:  # some of ours are ValueErrors
        raise
    except (yaml.YAMLError, ValueError, LookupError, OverflowError, TypeError) as error:
        message = f"it is not YAML that can be read: {' '.join(str(error).split())}"
        raise DocumentError(message, where=where) from None


def _checked(model: type[DocumentT], found: object, *, where: str) -> DocumentT:
    try:
        return model.model_validate(found)
    except ValidationError as error:
        first = error.errors(include_url=False)[0]
        place = "".join(f"[{part!r}]" for part in first["loc"])
        message = f"{place or 'it'} is {brief(first['input'])}: {first['msg']}"
        raise DocumentError(message, where=where) from None


def _load(model: type[DocumentT], transport: Transport, *paths: str) -> tuple[DocumentT, str] | None:
    """The first of some documents that exists, and its address."""
    for path in paths:
        where, nbytes = transport.where(path), _MAX_JSON_NBYTES if path.endswith(".json") else MAX_YAML_NBYTES
        with contextlib.suppress(NotFoundError):
            raw = transport.read(path, max_bytes=nbytes)
            if path.endswith(".json"):
                return _checked(model, parse_json(raw, where=where, max_nbytes=nbytes), where=where), where
            return load_yaml(model, raw, where=where), where
    return None


# -- splits ------------------------------------------------------------------------------------------------------------


def expand(pattern: str, *, where: str, max_characters: int = MAX_EXPANDED_CHARACTERS) -> list[str]:
    r"""The names that a pattern in braces stands for, in order; they are counted before any is made.

    Braces contain ranges of numbers or alternatives: `{000..002}`, `{0..9..3}`, `{train,val}`. A `\` escapes the next
    character. Braces around anything else are kept.
    """
    if len(pattern) > _MAX_PATTERN_CHARACTERS:
        _refuse(pattern, f"has {len(pattern):,} characters; at most {_MAX_PATTERN_CHARACTERS:,} are read", where)
    choices: list[tuple[Sequence[object], str]] = []
    for escaped, inside, brace, text in _TOKEN.findall(pattern):
        if brace:
            _refuse(pattern, "has braces that do not match, or are nested", where)
        choices.append(([escaped or text], "") if escaped or text else _choices(inside))
    n_names, limit = math.prod(len(values) for values, _ in choices), max_characters // (len(pattern) + 64)
    if n_names > limit:
        _refuse(pattern, f"stands for {brief(n_names)} names; at most {limit:,} are read", where)
    return ["".join(each) for each in product(*([format(value, spec) for value in values] for values, spec in choices))]


def _choices(inside: str) -> tuple[Sequence[object], str]:
    """The values that braces around a text stand for, and their format."""
    match = _RANGE.fullmatch(inside)
    if match is None:
        return (inside.split(",") if "," in inside else [f"{{{inside}}}"]), ""
    first, last, step = match.groups()
    start, stop, by = int(first), int(last), int(step or 1) or 1
    numbers = range(start, stop + 1, by) if start <= stop else range(start, stop - 1, -by)
    is_padded = any(end.lstrip("-").startswith("0") and end not in {"0", "-0"} for end in (first, last))
    return numbers, f"0{max(len(first), len(last))}d" if is_padded else "d"


def _refuse(pattern: str, rule: str, where: str) -> NoReturn:
    raise DocumentError(f"{brief(pattern)} {rule}", where=where, remedy="List the shards one by one.")


def collapse(names: Sequence[str]) -> list[str]:
    """Patterns that expand to `names`, in that order: names whose last number counts up become a range."""
    patterns: list[str] = []
    head, tail, first, last = "", "", "", ""
    for name in names:
        match = _LAST_NUMBER.fullmatch(name)
        is_next = match is not None and last and match.group(1, 3) == (head, tail)
        if match is not None and is_next and len(match[2]) == len(last) and int(match[2]) == int(last) + 1:
            last = match[2]
            patterns[-1] = f"{_escape(head)}{{{first}..{last}}}{_escape(tail)}"
        else:
            head, first, tail = match.group(1, 2, 3) if match else (name, "", "")
            last = first
            patterns.append(_escape(name))
    return patterns


def _escape(name: str) -> str:
    return _SPECIAL.sub(r"\\\g<0>", name)


def shares_of(text: str) -> tuple[Fraction, ...]:
    """The shares of train, val and test, exactly as written: `8,1,1` or `0.8,0.1,0.1`."""
    parts = [part.strip() for part in text.split(",")] if isinstance(text, str) and len(text) < 256 else []  # pyright: ignore[reportUnnecessaryIsInstance]  # callers may not check types
    if len(parts) != len(SPLITS) or not all(map(_SHARE.fullmatch, parts)) or not any(map(Fraction, parts)):
        raise ArgumentError(f"{brief(text)} is not a split such as '8,1,1', of train, val and test", where="split")
    return tuple(map(Fraction, parts))


def deal(shards: Sequence[str], shares: Sequence[Fraction]) -> dict[str, list[str]]:
    """All shards, in order, as close to the shares of train, val and test as whole shards can be.

    Each share gets its quota rounded down; the remaining shards go to the largest remainders, earlier shares first.
    """
    quotas = [len(shards) * share / sum(shares) for share in shares]
    counts = [int(quota) for quota in quotas]
    by_remainder = sorted(range(len(quotas)), key=lambda i: counts[i] - quotas[i])
    for i in by_remainder[: len(shards) - sum(counts)]:
        counts[i] += 1
    rest = iter(shards)
    return {name: list(islice(rest, n)) for name, n in zip(SPLITS, counts, strict=True)}


def split_bytes(splits: Mapping[str, Sequence[str]]) -> bytes:
    """The content of `split.yaml`."""
    found = {"split_parts": {name: collapse(shards) for name, shards in splits.items()}, "exclude": list[str]()}
    return yaml.safe_dump(found, sort_keys=False, allow_unicode=True, width=2**20).encode()
