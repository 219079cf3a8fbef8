"""The Zarr v3 documents of a store's group: what consumers see, computed from the store's own documents."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from typing import TYPE_CHECKING

import numpy as np

from saev_store._version import __version__
from saev_store.core.layout import DIMS, IntArray, Layout
from saev_store.core.token_arrays import TokenArray, shown_names
from saev_store.names import printable

if TYPE_CHECKING:
    from saev_store.core.chunk_grid import ChunkGrid
    from saev_store.documents import Metadata

Document = Mapping[str, object]

ARRAY = "activations"
#: The axis of token arrays: without special tokens, so it is not the tensor's token axis.
CONTENT = "content_token"
TOKEN_DIMS = ("example", CONTENT)
HOOK_POINT = "hook_point"

_LITTLE = {"name": "bytes", "configuration": {"endian": "little"}}
_BYTES = {"name": "bytes"}


_FLOATS = {"float16", "bfloat16", "float32"}
_OF_A_BYTE = {"bool", "uint8"}
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


def array_document(
    data_type: str,
    shape: Sequence[int],
    chunk: Sequence[int],
    dims: Sequence[str],
    *,
    attributes: Document | None = None,
) -> Document:
    """The `zarr.json` of an uncompressed array."""
    codecs: list[Document] = [_BYTES if data_type in _OF_A_BYTE else _LITTLE]
    return {
        "zarr_format": 3,
        "node_type": "array",
        "shape": list(shape),
        "data_type": data_type,
        "chunk_grid": {"name": "regular", "configuration": {"chunk_shape": list(chunk)}},
        "chunk_key_encoding": {"name": "default", "configuration": {"separator": "/"}},
        # No chunk is ever missing. If this value is read all the same, it must not look like an activation.
        "fill_value": "NaN" if data_type in _FLOATS else False if data_type == "bool" else 0,
        "codecs": codecs,
        "attributes": dict(attributes or {}),
        "dimension_names": list(dims),
        "storage_transformers": [],
    }


def array_documents(
    grid: ChunkGrid, token_arrays: Mapping[str, tuple[str, int]], *, dtype: str = "float32"
) -> dict[str, Document]:
    """The documents of all arrays by name.

    Args:
        grid: How the tensor is cut.
        token_arrays: Dtype, and examples in a chunk, of each token array, by the name of its variable.
        dtype: Of the activations.
    """
    layout = grid.layout
    documents = {ARRAY: array_document(dtype, layout.shape, grid.chunk, DIMS)}
    for name, values in coordinates(layout, labelled=bool(token_arrays)).items():
        documents[name] = array_document("int64", values.shape, values.shape, [name])
    n_content = layout.content_tokens_per_example
    for name, (data_type, rows) in token_arrays.items():
        documents[name] = array_document(data_type, [layout.n_examples, n_content], [rows, n_content], TOKEN_DIMS)
    return documents


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
    """What the store's document says, under canonical names, and where the store is."""
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
