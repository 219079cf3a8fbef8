"""Traces a vector back to its origin: the sample of a data set that it was computed from, and the place in it.

A store that was recorded from a source has a description in `metadata.data`, made by `recorded_from`: the source's own
description (format, address, digest), which sample each example is, and what its content tokens are. It is plain JSON;
nothing in it is executed or imported.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Annotated, cast

from pydantic import Field, ValidationError

from saev_store.core.arguments import check_count, check_flag, is_mapping
from saev_store.errors import ArgumentError, DocumentError, SelectionError, UnsafeContentError, brief
from saev_store.sources._source import check_index
from saev_store.sources.places import Content, ExamplePart, Patches, Position, ids_of
from saev_store.sources.sniff import other_data, reopen

if TYPE_CHECKING:
    from saev_store.documents import Metadata
    from saev_store.sources._source import Source
    from saev_store.sources.address import Url
    from saev_store.sources.places import Box, Framing
    from saev_store.store.text import TextReading


class _Examples(ExamplePart):
    """The sample of example i: `samples[i]`, or the i-th one from `first` on that is not skipped; or that of each token, as recorded."""

    first: Position | None = None
    skipped: list[Position] | None = None
    # Of one that no source has, the others are known all the same.
    samples: list[Annotated[int, Field(gt=-(1 << 62), lt=1 << 62)]] | None = None
    by_token: bool = False


class _Described(ExamplePart):
    """The description of the source in a store's metadata."""

    source: dict[str, object]
    examples: _Examples
    content: Content = Content()


@dataclass(frozen=True)
class Origin:
    """The origin of a vector, or of a whole example.

    Attributes:
        sample_idx: Position of the sample in the source.
        key: Its key there.
        sample: The sample itself.
        position: For texts, the token in the sample; None for CLS and for whole examples.
        box: For images, (left, top, right, bottom) of the patch in pixels of the original image, turned by its EXIF orientation; None if it
            is not known how that was resized and cropped.
    """

    sample_idx: int
    key: str
    sample: object
    position: int | None = None
    box: Box | None = None


def recorded_from(
    source: Source[object],
    *,
    first_token: int | None = None,
    by_token: bool = False,
    patches: tuple[int, int] | None = None,
    image_px: tuple[int, int] | None = None,
    patch_px: tuple[int, int] | None = None,
    framing: Framing | None = None,
    image_key: str | int | None = None,
) -> dict[str, object]:
    """The description of a source to pass as `data` to `new_metadata` when recording from it.

    Args:
        source: The data set that the examples are taken from: example i is sample i.
        first_token: For texts: content token t is token `first_token + t` of the sample. Needed for stores with a special
            token (`cls_token`): 1 if that token (BOS) is the sample's first one, 0 if it was put before the sample. Stores
            without a special token begin with token 0.
        by_token: For texts that were cut or laid end to end: the sample of a token is its `document_ids` in the store, and its place
            there is its `positions`, so the store has to have both token arrays.
        patches: For images: content token t is patch t of a grid of (rows, columns), row by row.
        image_px: For images: (height, width) of the model's input, in pixels.
        patch_px: For images: (height, width) of a patch, if patches do not fill the input.
        framing: For images: how the input was made of the original image, for boxes in that.
        image_key: For images: the part of a sample that is the image.

    Raises:
        ArgumentError: the numbers fit neither the source nor each other.

    >>> from saev_store.sources import open_source
    >>> recorded_from(open_source(TOKENS))["examples"]
    {'first': 0}
    """
    if by_token and (first_token is not None or patches is not None):
        raise ArgumentError("by_token traces each token; leave the others out", where="by_token")
    if patches is None and image_px is None:
        first_token = None if first_token is None else check_count(first_token, name="first_token", least=0)
        content: dict[str, object] = {"tokens": {"first": first_token}}
    else:
        given = {
            "grid": patches, "image_px": image_px, "patch_px": patch_px, "framing": framing, "image_key": image_key,
        }  # fmt: skip
        try:
            found = Patches.model_validate(given).model_dump(mode="json")
        except ValidationError as error:
            message = f"{brief(given)} describes no patches: {error.errors()[0]['msg']}"
            raise ArgumentError(message, where="patches") from None
        content = {"patches": {name: value for name, value in found.items() if value is not None}}
    examples: dict[str, object] = {"by_token": True} if by_token else {"first": 0}
    return {"__class__": "Source", "source": source.describe(), "examples": examples, "content": content}


def source_of(
    metadata: Metadata,
    storage_options: Mapping[str, object] | None = None,
    *,
    url: Url | None = None,
    outside_ok: bool = False,
) -> Source[object]:
    """Open the source that a store was recorded from, and compare its digest with the one in the metadata.

    `url` is its address now, if it was moved. Requests go to a server that the metadata name only with `outside_ok`.

    Raises:
        UnsafeContentError: the metadata name a server, and neither `url` nor `outside_ok` is given.
        DocumentError: the metadata name no source.
        NotFoundError: it is no longer at its address; pass `url`.
        CorruptShardError: the data at the address are not those that were described.
    """
    outside_ok = check_flag(outside_ok, name="outside_ok")
    description = cast("Mapping[str, object]", _data_of(metadata)["source"])
    address = description.get("url")
    scheme = address.partition("://")[0] if isinstance(address, str) and "://" in address else "file"
    if url is None and not outside_ok and scheme not in {"file", "local", "memory"}:
        raise UnsafeContentError(
            f"names {brief(address)} as its source; requests go there only if you allow it",
            where=metadata.where,
            remedy="Pass outside_ok=True if you trust the store, or url= of the source.",
        )
    return reopen(description, storage_options, url=url)


def origin_of(store: TextReading, source: Source[object], example_idx: int, token_idx: int | None = None) -> Origin:
    """The origin of one vector: `token_idx` is a content token, -1 for CLS, or None for the example as a whole.

    Of a store that was recorded with `by_token=True` the token arrays are read; an example as a whole, and its CLS token, are then of
    the sample of its first content token.

    Raises:
        SelectionError: there is no such example or token, or it is padding.
        CorruptShardError: `source` is not the data set that was recorded.
        DocumentError: the description in the metadata is not usable.
    """
    metadata, layout = store.metadata, store.metadata.layout
    try:
        described = _Described.model_validate(_data_of(metadata))
    except ValidationError:
        raise _unusable(metadata) from None
    example, token = check_index(example_idx, layout.n_examples, what="example"), token_idx
    if token == -1 and layout.cls_token:
        token = None
    if token is not None and not 0 <= token < layout.content_tokens_per_example:
        last = layout.content_tokens_per_example - 1
        raise SelectionError(f"token {brief(token_idx)} must be from 0 to {last}, or -1 for CLS", where="token_idx")
    _check_given(source, described.source)
    sample_idx, position = _place(store, described, example, token)
    if not 0 <= sample_idx < len(source):
        message = f"names sample {brief(sample_idx)}, but the source has {len(source)}"
        raise DocumentError(message, where=metadata.where, remedy="Check that the metadata describe this source.")
    sample = source[sample_idx]
    found = Origin(sample_idx, source.key(sample_idx), sample)
    if token is None:
        return found
    if position is None:
        return replace(found, box=_box(described.content.patches, token, source, sample, metadata))
    ids = ids_of(sample)
    if ids is not None:
        if not position < len(ids):
            raise SelectionError(f"token {position} of a sample of {len(ids)} is padding", where="token_idx")
        if described.examples.by_token and "token_ids" in store.token_arrays:
            now, recorded = int(ids[position]), int(store.token_arrays["token_ids"][example, token])
            if now != recorded:
                raise other_data(f"token {position} of sample {sample_idx}", now, recorded, where="source")
    return replace(found, position=position)


def _place(store: TextReading, described: _Described, example: int, token: int | None) -> tuple[int, int | None]:
    """The sample of a token, and the position in it; None for a patch."""
    examples, content, arrays = described.examples, described.content, store.token_arrays
    if examples.by_token:
        if not {"document_ids", "positions"}.issubset(arrays):
            raise _unusable(store.metadata)
        sample_idx, position = (int(arrays[name][example, token or 0]) for name in ("document_ids", "positions"))
        if sample_idx < 0 or position < 0:
            message = f"content token {token or 0} of example {example} is padding: it is of no sample"
            raise SelectionError(message, where="token_idx")
        return sample_idx, position
    if examples.samples is not None and example < len(examples.samples):
        sample_idx = examples.samples[example]
    elif examples.samples is None and examples.first is not None:
        sample_idx = examples.first + example
        for skipped in sorted(examples.skipped or ()):
            sample_idx += skipped <= sample_idx
    else:
        raise _unusable(store.metadata)
    if token is None or content.patches is not None:
        return sample_idx, None
    if content.tokens is None or (content.tokens.first is None and store.metadata.layout.cls_token):
        raise _unusable(store.metadata)
    return sample_idx, (content.tokens.first or 0) + token


def _data_of(metadata: Metadata) -> Mapping[str, object]:
    """The description of the source in a store's metadata, not validated but for the mapping `source`."""
    data = metadata.data
    if isinstance(data, str):  # protocol 2.1 has a string: JSON from this package, a pickle from others, never loaded
        try:
            data = cast("object", json.loads(data))
        except (ValueError, RecursionError):
            data = None
    if is_mapping(data) and is_mapping(data.get("source")):
        return data
    raise _unusable(metadata)


def _unusable(metadata: Metadata) -> DocumentError:
    return DocumentError(
        "data does not show where examples come from",
        where=metadata.where,
        remedy="Record with data=recorded_from(source); with a special token, first_token= shows if it is the sample's.",
    )


def _check_given(source: Source[object], description: Mapping[str, object]) -> None:
    """Compare the caller's source with the description, if that reads nothing; others were compared when they were opened."""
    if source.format not in {"map_style", "text"} or description.get("format") != source.format:
        return
    now = source.describe()
    for name in ("n_samples", "fingerprint", "digest"):
        if name in description and name in now and now[name] != description[name]:
            raise other_data(name, now[name], description[name], where="source")


def _box(patches: Patches | None, token: int, source: Source[object], sample: object, metadata: Metadata) -> Box | None:
    """A patch in pixels of the original image, if they are known."""
    from saev_store.sources.images import image_of, image_px

    if patches is None or token >= math.prod(patches.grid):
        raise _unusable(metadata)
    if patches.framing is None:
        return None
    image = image_of(source, sample, patches.image_key, where="source")
    return patches.original_box(token, image_px(image, where="source"))
