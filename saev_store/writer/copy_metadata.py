"""What describes a copy: fewer layers or tokens, another protocol version, another dtype."""

from __future__ import annotations

import contextlib
from collections.abc import Mapping, Sequence
from typing import cast

from saev_store.core.dtypes import ITEMSIZES, StoredDtype
from saev_store.core.layout import RESID_POST
from saev_store.documents import WRITABLE_VERSIONS, Metadata, new_metadata, parse_json
from saev_store.errors import ArgumentError, DocumentError, brief

#: The only token array that protocol 2.0 has, which it does not declare.
_LABELS_ONLY: Mapping[str, str] = {"labels": "uint8"}
#: The key under which a description that is no object is kept where the protocol wants one.
_OPAQUE_DATA = "opaque"


def part_of(metadata: Metadata, layer_idx: Sequence[int], first_token: int, n_tokens: int) -> Metadata:
    """What describes a copy of these layers and tokens."""
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
    """The same as a document of another protocol version, without keys that it does not know.

    Raises:
        ArgumentError: the version is not written, or wants an object for `data`, which is a string that is not one.
    """
    version = WRITABLE_VERSIONS.get(protocol)
    if version is metadata.version:
        return metadata
    data = metadata.data
    if version is not None and version.data != "string":
        data = _parsed(data)
        if isinstance(data, str):
            raise ArgumentError(
                f"data is {brief(data)}; protocol {protocol} wants an object, which a copy does not make up",
                where="protocol",
                remedy=f"Leave protocol out: the copy stays {metadata.protocol}.",
            )
    return _written(
        metadata,
        protocol=protocol,
        data=data,
        dtype=metadata.dtype,
        token_arrays={array.name: array.dtype for array in metadata.token_arrays},
    )


def in_dtype(metadata: Metadata, dtype: str, *, protocol: str | None, token_arrays: Mapping[str, str]) -> Metadata:
    """The same for a store of another dtype: protocol 2.0 where it can say everything, else 3.0.

    Args:
        metadata: Of the source.
        dtype: Another one than the source's.
        protocol: A protocol version instead; keys that it does not know are then left out.
        token_arrays: Name to dtype of all that the source has, declared or not.

    Raises:
        ArgumentError: there is no such dtype, or the version cannot hold it.
    """
    if not isinstance(dtype, str) or dtype not in ITEMSIZES:  # pyright: ignore[reportUnnecessaryIsInstance]  # callers may not check types
        raise ArgumentError(f"dtype is {brief(dtype)}; it must be one of {', '.join(ITEMSIZES)}", where="dtype")
    is_plain = set(metadata.hook_points or [RESID_POST]) == {RESID_POST} and metadata.text is None
    if dtype == "float32" and protocol != "3.0" and is_plain and token_arrays == _LABELS_ONLY:
        token_arrays = {}
    data = metadata.data
    if WRITABLE_VERSIONS.get(protocol or "3.0", WRITABLE_VERSIONS["3.0"]).data != "string":
        data = _parsed(data)
        if isinstance(data, str):  # a pickle of 2.1, for one: nothing decodes it
            data = {_OPAQUE_DATA: data}
    new = _written(metadata, protocol=protocol, data=data, dtype=dtype, token_arrays=token_arrays)
    extra = {name: value for name, value in metadata.extra.items() if name not in new.version.spelling.keys}
    if protocol is not None or not extra:
        return new
    return _written(metadata, protocol=None, data=data, dtype=dtype, token_arrays=token_arrays, extra=extra)


def _parsed(data: object) -> object:
    """The object whose JSON a string is; all else as it is."""
    if isinstance(data, str):
        with contextlib.suppress(DocumentError):
            found = parse_json(data.encode("utf-8", "surrogatepass"), where="data", max_nbytes=4 * len(data))
            return cast("object", found) if isinstance(found, dict) else data
    return data


def _written(
    metadata: Metadata,
    *,
    protocol: str | None,
    data: object,
    dtype: str,
    token_arrays: Mapping[str, str],
    extra: Mapping[str, object] | None = None,
) -> Metadata:
    version = WRITABLE_VERSIONS.get(protocol or "2.0")
    knows_dataset = version is None or "dataset" in version.writes
    return new_metadata(
        protocol=protocol,
        family=metadata.family,
        ckpt=metadata.ckpt,
        layers=metadata.layers,
        content_tokens_per_example=metadata.content_tokens_per_example,
        cls_token=metadata.cls_token,
        d_model=metadata.d_model,
        n_examples=metadata.n_examples,
        max_tokens_per_shard=metadata.max_tokens_per_shard,
        data=cast("Mapping[str, object] | str", data),
        dataset=metadata.dataset if knows_dataset else None,
        pixel_agg=metadata.pixel_agg if knows_dataset else None,
        dtype=cast("StoredDtype", dtype),
        hook_points=metadata.hook_points,
        token_arrays=token_arrays,
        text=metadata.text,
        extra=extra,
    )
