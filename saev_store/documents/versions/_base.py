"""What all versions of metadata.json share: the canonical fields, the spellings of their keys, the rules for values."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Annotated, ClassVar, Literal, cast

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, PlainValidator
from pydantic_core import PydanticCustomError

from saev_store.documents.hashing import Recipe
from saev_store.layout import MAX_INT64

MIN_INT64 = -(2**63)


@dataclass(frozen=True)
class Spelling:
    """How a family of versions spells the keys whose names have changed.

    Attributes:
        name: What messages call it.
        keys: Canonical name to key, for the keys that differ between spellings; the others are spelled alike in all.
        count_key: The key of the number of examples in the entries of shards.json.
        majors: Major protocol versions that documents with these keys were written under.
    """

    name: str
    keys: Mapping[str, str] = field(hash=False)
    count_key: str
    majors: frozenset[int]

    def key(self, canonical: str) -> str:
        """The key that stands for a canonical name."""
        return self.keys.get(canonical, canonical)


def _spelling(name: str, count_key: str, majors: set[int], **keys: str) -> Spelling:
    return Spelling(name, MappingProxyType(keys), count_key, frozenset(majors))


IMAGES = _spelling(
    "images and patches (protocol 1.x)",
    "n_imgs",
    {1},
    family="vit_family",
    ckpt="vit_ckpt",
    content_tokens_per_example="n_patches_per_img",
    d_model="d_vit",
    n_examples="n_imgs",
    max_tokens_per_shard="max_patches_per_shard",
)
EXAMPLES = _spelling(
    "examples and patches (protocol 2.0, October 2025)",
    "n_ex",
    {1, 2},
    family="family",
    ckpt="ckpt",
    content_tokens_per_example="patches_per_ex",
    d_model="d_model",
    n_examples="n_ex",
    max_tokens_per_shard="patches_per_shard",
)
N_CONTENT_TOKENS = _spelling(
    "examples and n_content_tokens (protocol 2.0, 7 October 2025)",
    "n_examples",
    {2},
    family="family",
    ckpt="ckpt",
    content_tokens_per_example="n_content_tokens_per_example",
    d_model="d_model",
    n_examples="n_examples",
    max_tokens_per_shard="max_tokens_per_shard",
)
TOKENS = _spelling(
    "examples and tokens (protocol 2.x)",
    "n_examples",
    {2},
    family="family",
    ckpt="ckpt",
    content_tokens_per_example="content_tokens_per_example",
    d_model="d_model",
    n_examples="n_examples",
    max_tokens_per_shard="max_tokens_per_shard",
)


@dataclass(frozen=True)
class WrittenVersion:
    """One way in which metadata.json has been written.

    Attributes:
        since: The day of the first writer, year first.
        protocol: What it writes as `protocol`.
        model: The pydantic model of its keys.
        spelling: The names of its keys.
        data: Whether its `data` is an object, a string, or either.
        recipe: How its writer named the folder.
        style: How its writer formatted the file: `json.dump(indent=4)` in ASCII, or two spaces and raw UTF-8.
        writes: Canonical names of the keys of a new document, in order; empty for a version that is only read.
    """

    since: str
    protocol: str
    model: type[Document]
    spelling: Spelling
    data: Literal["object", "string", "either"]
    recipe: Recipe
    style: Literal["indent-4-ascii", "indent-2-utf8"]
    writes: tuple[str, ...] = ()

    @property
    def title(self) -> str:
        """How messages and cards call it.

        >>> from saev_store.documents.versions import written_versions
        >>> written_versions()[-1].title
        'protocol 2.1 (as written since 2025-10-13)'
        """
        return f"protocol {self.protocol} (as written since {self.since})"


def _text(value: object) -> str:
    # Not pydantic's own check: that one refuses half a surrogate pair, which a path in an old document may hold.
    if not isinstance(value, str):
        raise PydanticCustomError("wrong_type", "must be a string")
    return value


def _text_or_null(value: object) -> str | None:
    return None if value is None else _text(value)


def _data(value: object) -> object:
    if not isinstance(value, str | dict):
        raise PydanticCustomError("wrong_type", "must be an object or a string")
    return cast("object", value)


def _layers(value: object) -> object:
    """Every label that breaks a rule, up to a bound: pydantic would list a million of them."""
    if not isinstance(value, list) or not value:
        raise PydanticCustomError("wrong_type", "must be an array that is not empty")
    bad: list[tuple[int, object, str]] = []
    seen: set[int] = set()
    for i, label in enumerate(cast("list[object]", value)):
        if type(label) is not int or not MIN_INT64 <= label <= MAX_INT64:
            bad.append((i, label, "each layer must be an integer of 64 bits"))
        elif label in seen:
            bad.append((i, label, "each layer may occur once"))
        else:
            seen.add(label)
        if len(bad) == LAYERS_SHOWN:
            break
    if bad:
        raise PydanticCustomError("bad_layers", "has layers that break a rule", {"bad": bad})
    return cast("object", value)


#: Wrong layers that are reported one by one.
LAYERS_SHOWN = 20

Text = Annotated[str, PlainValidator(_text), Field(description="a string")]
TextOrNull = Annotated[str | None, PlainValidator(_text_or_null), Field(description="a string or null")]
Count = Annotated[int, Field(ge=1, le=MAX_INT64, description="an integer from 1 to 2^63 - 1")]
Layers = Annotated[
    tuple[int, ...],
    Field(strict=False, description="an array of distinct integers, at least one"),
    BeforeValidator(_layers),
]


class Document(BaseModel):
    """The fields of metadata.json under their canonical names, whatever the keys in the file are called.

    A version sets an `alias_generator` for the keys it spells differently; nothing is accepted under two names. Types are
    strict, instances frozen, keys that the version does not know are kept in `model_extra`.
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
    #: Opaque. It may be a pickle: it is never decoded.
    data: Annotated[object, PlainValidator(_data), Field(description="an object or a string")]
    dataset: TextOrNull = None
    pixel_agg: TextOrNull = None
    dtype: Text
    protocol: Text


class DocumentWithDataset(Document):
    """The fields of versions that demand `dataset`."""

    dataset: Text  # pyright: ignore[reportIncompatibleVariableOverride, reportGeneralTypeIssues]  # required here, optional in the base


def spelled(spelling: Spelling) -> Callable[[str], str]:
    """The `alias_generator` of a spelling."""
    return spelling.key
