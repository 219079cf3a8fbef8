"""The fields of metadata.json under their canonical names, and the rules for their values. Imports pydantic."""

from __future__ import annotations

from typing import Annotated, ClassVar, cast

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, PlainValidator
from pydantic_core import PydanticCustomError

from saev_store.core.layout import MAX_INT64

MIN_INT64 = -(2**63)
#: Wrong layers that are reported one by one.
LAYERS_SHOWN = 20


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

    The keys of the file are translated before they get here. Types are strict, instances frozen; keys that the version
    does not know are kept in `model_extra`.
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
