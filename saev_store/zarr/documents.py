"""The Zarr v3 documents of a store's group: what consumers see, computed from the store's own documents."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from typing import TYPE_CHECKING

import numpy as np

from saev_store._version import __version__
from saev_store.core.layout import DIMS, IntArray, Layout
from saev_store.core.token_arrays import TokenArray, shown_names
from saev_store.names import printable

if TYPE_CHECKING:
    from saev_store.documents import Metadata

Document = Mapping[str, object]

ARRAY = "activations"
#: The axis of token arrays: without special tokens, so it is not the tensor's token axis.
CONTENT = "content_token"
TOKEN_DIMS = ("example", CONTENT)
HOOK_POINT = "hook_point"

#: Names of axes and of other variables, here and in xarray.
_TAKEN = frozenset({ARRAY, *DIMS, CONTENT, HOOK_POINT})


def token_variables(arrays: Iterable[TokenArray]) -> dict[str, TokenArray]:
    """Token arrays by the name of their variable: their own, with `tokens_` in front where another variable has it.

    >>> [*token_variables([TokenArray("labels", "uint8"), TokenArray("token", "int32")])]
    ['labels', 'tokens_token']
    """
    named = {array.name: array for array in arrays}
    shown = shown_names(named, _TAKEN)
    return {shown[name]: array for name, array in named.items()}


def coordinates(layout: Layout, *, labelled: bool) -> dict[str, IntArray]:
    """The coordinates by name, which is also the name of their axis, int64: labels of layers, numbers of tokens (-1 is CLS).

    >>> {name: values.tolist() for name, values in coordinates(Layout(7, (2, 5), 3, True, 8, 3), labelled=True).items()}
    {'layer': [2, 5], 'token': [-1, 0, 1, 2], 'content_token': [0, 1, 2]}
    """
    n_content = layout.content_tokens_per_example
    found = {
        "layer": np.array(layout.layers, dtype="<i8"),
        "token": np.arange(-layout.n_special_tokens, n_content, dtype="<i8"),
    }
    if labelled:
        found[CONTENT] = np.arange(n_content, dtype="<i8")
    return found


def group_document(attributes: Document, arrays: Mapping[str, Document]) -> Document:
    """The group's `zarr.json`, with the arrays' documents inline, so that opening is one read."""
    consolidated = {"kind": "inline", "must_understand": False, "metadata": dict(arrays)}
    return {
        "zarr_format": 3,
        "node_type": "group",
        "attributes": dict(attributes),
        "consolidated_metadata": consolidated,
    }


def attributes_of(metadata: Metadata, *, url: str) -> Document:
    """The metadata of a store under canonical names, and its address."""
    hook_points = metadata.layout.hook_points
    optional = {
        "dataset": metadata.dataset,
        "pixel_agg": metadata.pixel_agg,
        "hook_points": None if hook_points is None else list(hook_points),
    }
    attributes = {
        "protocol": metadata.protocol,
        "family": metadata.family,
        "ckpt": metadata.ckpt,
        "content_tokens_per_example": metadata.content_tokens_per_example,
        "cls_token": metadata.cls_token,
        "d_model": metadata.d_model,
        "n_examples": metadata.n_examples,
        "max_tokens_per_shard": metadata.max_tokens_per_shard,
        "data": metadata.data,
        **{name: value for name, value in optional.items() if value is not None},
        "content_hash": metadata.hash,
        "url": url,
        "software": f"saev_store {__version__}",
    }
    return {name: _strict(value) for name, value in attributes.items()}


def to_json(document: Document) -> bytes:
    """A document as the bytes of its file."""
    return json.dumps(document, ensure_ascii=False, allow_nan=False).encode()


def _strict(value: object) -> object:
    """A value that strict JSON in UTF-8 can hold: no NaN, no infinity, no half of a surrogate pair."""
    try:
        json.dumps(value, ensure_ascii=False, allow_nan=False).encode()
    except ValueError:  # of both steps
        text = value if isinstance(value, str) else repr(value)
        return printable(text)
    return value
