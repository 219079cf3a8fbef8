"""Metadata of a copy: fewer layers or tokens, another protocol version, another dtype."""

from __future__ import annotations

import contextlib
from collections.abc import Mapping, Sequence
from typing import Any, cast

from saev_store.core.layout import RESID_POST
from saev_store.documents import WRITABLE_VERSIONS, Metadata, new_metadata, parse_json
from saev_store.errors import DocumentError

#: The only token array that protocol 2.0 has, which it does not declare.
_LABELS_ONLY: Mapping[str, str] = {"labels": "uint8"}
#: The key under which a description that is not an object is kept where the protocol wants one.
_OPAQUE_DATA = "opaque"
_KEPT = (
    "family", "ckpt", "layers", "content_tokens_per_example", "cls_token", "d_model", "n_examples", "max_tokens_per_shard",
    "hook_points", "text",
)  # fmt: skip


def part_of(metadata: Metadata, layer_idx: Sequence[int], first_token: int, n_tokens: int) -> Metadata:
    """Metadata of a copy of these layers and tokens."""
    layout = metadata.layout
    changes: dict[str, object] = {"layers": [layout.layers[position] for position in layer_idx]}
    if layout.hook_points is not None:
        changes["hook_points"] = [layout.hook_points[position] for position in layer_idx]
    if n_tokens < layout.tokens_per_example:
        has_special = first_token == 0 and layout.cls_token
        changes["cls_token"] = has_special
        changes["content_tokens_per_example"] = n_tokens - has_special
    return metadata.replace(**changes)


def in_protocol(metadata: Metadata, protocol: str) -> Metadata:
    """The same as a document of another protocol version, without keys that it does not know."""
    if WRITABLE_VERSIONS.get(protocol) is metadata.version:
        return metadata
    arrays = {array.name: array.dtype for array in metadata.token_arrays}
    return _written(metadata, protocol=protocol, dtype=metadata.dtype, token_arrays=arrays)


def in_dtype(metadata: Metadata, dtype: str, *, protocol: str | None, token_arrays: Mapping[str, str]) -> Metadata:
    """The same for a store of another dtype: protocol 2.0 if it can hold everything, else 3.0, without unknown keys.

    `token_arrays` has the dtype of all that the source has, declared or not.
    """
    is_plain = set(metadata.hook_points or [RESID_POST]) == {RESID_POST} and metadata.text is None
    if dtype == "float32" and protocol != "3.0" and is_plain and token_arrays == _LABELS_ONLY:
        token_arrays = {}
    return _written(metadata, protocol=protocol, dtype=dtype, token_arrays=token_arrays)


def _written(metadata: Metadata, *, protocol: str | None, **new: Any) -> Metadata:
    version, data = WRITABLE_VERSIONS.get(protocol or "2.0"), metadata.data
    if version is None or version.data != "string":
        data = _parsed(data)
    if version is None or "dataset" in version.writes:
        new |= {"dataset": metadata.dataset, "pixel_agg": metadata.pixel_agg}
    kept = {name: getattr(metadata, name) for name in _KEPT}
    return new_metadata(protocol=protocol, data=cast("str", data), **kept, **new)


def _parsed(data: object) -> object:
    """The object whose JSON a string is, or one that holds the string: a pickle of 2.1, for one, which nothing decodes."""
    if not isinstance(data, str):
        return data
    with contextlib.suppress(DocumentError):
        found = parse_json(data.encode("utf-8", "surrogatepass"), where="data", max_nbytes=4 * len(data))
        if isinstance(found, dict):
            return cast("object", found)
    return {_OPAQUE_DATA: data}
