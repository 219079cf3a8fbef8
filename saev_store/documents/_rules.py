"""The rules for the values of metadata.json, by canonical name."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from itertools import islice

from saev_store.core.layout import MAX_INT64

#: Wrong layers that are reported one by one.
LAYERS_SHOWN = 20


def _is_text(value: object) -> bool:
    return isinstance(value, str)


def _is_text_or_null(value: object) -> bool:
    return value is None or isinstance(value, str)


def _is_count(value: object) -> bool:
    return type(value) is int and 1 <= value <= MAX_INT64


_TEXT = ("a string", _is_text)
_TEXT_OR_NULL = ("a string or null", _is_text_or_null)
_COUNT = ("an integer from 1 to 2^63 - 1", _is_count)
#: What each value must be, in words and as a check. `text` is the rule of `dataset` in versions that demand it.
RULES: Mapping[str, tuple[str, Callable[[object], bool]]] = {
    "text": _TEXT,
    "family": _TEXT,
    "ckpt": _TEXT,
    "layers": ("an array of distinct integers, at least one", lambda value: isinstance(value, list) and value != []),
    "content_tokens_per_example": _COUNT,
    "cls_token": ("true or false", lambda value: isinstance(value, bool)),
    "d_model": _COUNT,
    "n_examples": _COUNT,
    "max_tokens_per_shard": _COUNT,
    # Opaque. It may be a pickle: it is never decoded.
    "data": ("an object or a string", lambda value: isinstance(value, str | dict)),
    "dataset": _TEXT_OR_NULL,
    "pixel_agg": _TEXT_OR_NULL,
    "dtype": _TEXT,
    "protocol": _TEXT,
}


def bad_layers(layers: list[object]) -> Iterator[tuple[int, object, str]]:
    """The position, the label and the broken rule of the first `LAYERS_SHOWN` wrong labels."""
    return islice(_bad_layers(layers), LAYERS_SHOWN)


def _bad_layers(layers: list[object]) -> Iterator[tuple[int, object, str]]:
    seen: set[int] = set()
    for i, label in enumerate(layers):
        if type(label) is not int or not -(2**63) <= label <= MAX_INT64:
            yield i, label, "each layer must be an integer of 64 bits"
        elif label in seen:
            yield i, label, "each layer may occur once"
        else:
            seen.add(label)
