"""Traces a vector back to its origin: the sample of a data set that it was computed from, and the place in it.

A store that was recorded from a source has a description in `metadata.data`, made by `recorded_from`: the source's own
description (format, address, digest), which sample each example is, and what its content tokens are. It is plain JSON;
nothing in it is executed or imported.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Annotated, TypeVar, cast

import numpy as np
from pydantic import Field, ValidationError

from saev_store.core.arguments import check_count, check_flag
from saev_store.errors import (
    ArgumentError,
    CorruptShardError,
    DocumentError,
    SelectionError,
    UnsafeContentError,
    brief,
)
from saev_store.sources._source import DigestScope, check_index
from saev_store.sources.places import (
    Content,
    Part,
    Patches,
    PatchPlace,
    Position,
    TokenPlace,
    Tokens,
    ids_of,
    patch_place,
    sample_of,
    token_place,
)
from saev_store.sources.sniff import reopen

if TYPE_CHECKING:
    from saev_store.documents import Metadata
    from saev_store.sources._source import Source
    from saev_store.sources.address import Url
    from saev_store.sources.framing import Framing
    from saev_store.store.text import TextReading

_REMEDY = "Stores recorded with data=recorded_from(source) name theirs."


class _Examples(Part):
    """The sample of example i: `samples[i]`, or the i-th one from `first` on that is not skipped; or that of each token, as recorded."""

    first: Position | None = None
    skipped: list[Position] | None = None
    # Of one that no source has, the others are known all the same.
    samples: list[Annotated[int, Field(gt=-(1 << 62), lt=1 << 62)]] | None = None
    by_token: bool = False


PartT = TypeVar("PartT", bound=Part)


@dataclass(frozen=True)
class Origin:
    """The origin of a vector, or of a whole example.

    Attributes:
        sample_idx: Position of the sample in the source.
        key: Its key there.
        sample: The sample itself.
        place: The place in it; None for CLS and for whole examples.
    """

    sample_idx: int
    key: str
    sample: object
    place: TokenPlace | PatchPlace | None


def recorded_from(
    source: Source[object],
    *,
    first: int = 0,
    samples: Sequence[int] | None = None,
    first_token: int | None = None,
    by_token: bool = False,
    skipped: Sequence[int] = (),
    patches: tuple[int, int] | None = None,
    image_px: tuple[int, int] | None = None,
    patch_px: tuple[int, int] | None = None,
    framing: Framing | None = None,
    image_key: str | int | None = None,
    digest: DigestScope = "sampled",
) -> dict[str, object]:
    """The description of a source to pass as `data` to `new_metadata` when recording from it.

    Args:
        source: The data set that the examples are taken from.
        first: Example i is sample `first + i`.
        samples: Instead of `first`: example i is sample `samples[i]`. The whole list is stored, so use it for small
            selections.
        first_token: For texts: content token t is token `first_token + t` of the sample. Needed for stores with a special
            token (`cls_token`): 1 if that token (BOS) is the sample's first one, 0 if it was put before the sample. Stores
            without a special token begin with token 0.
        by_token: For texts that were cut or laid end to end: the sample of a token is its `document_ids` in the store, and its place
            there is its `positions`, so the store has to have both token arrays.
        skipped: Beside `first`: samples that are not examples, in ascending order; each moves the later examples on by one.
        patches: For images: content token t is patch t of a grid of (rows, columns), row by row.
        image_px: For images: (height, width) of the model's input, in pixels.
        patch_px: For images: (height, width) of a patch, where patches do not fill the input.
        framing: For images: how the input was made of the original image, for boxes in that.
        image_key: For images: which part of a sample is the image, see `saev_store.sources.pictures.picture_of`.
        digest: What the source's digest covers.

    Raises:
        ArgumentError: the numbers fit neither the source nor each other.

    >>> from saev_store.sources import open_source
    >>> recorded_from(open_source(TOKENS), first=1)["examples"]
    {'first': 1}
    """
    if by_token and (first or samples is not None or first_token is not None or patches is not None):
        raise ArgumentError("by_token traces each token; leave the others out", where="by_token")
    examples: dict[str, object]
    if by_token:
        examples = {"by_token": True}
    elif samples is not None:
        examples = {"samples": [check_index(sample, len(source), what="sample") for sample in samples]}
    else:
        examples = {"first": check_count(first, name="first", least=0)}
        if skipped:
            checked = [check_index(sample, len(source), what="sample") for sample in skipped]
            if checked != sorted({*checked}) or checked[0] < first:
                message = f"must be samples from {first} on, in ascending order, got {brief(list(skipped))}"
                raise ArgumentError(message, where="skipped")
            examples["skipped"] = checked
    content: dict[str, object]
    if patches is None and image_px is None:
        first_token = None if first_token is None else check_count(first_token, name="first_token", least=0)
        content = {"tokens": {"first": first_token}}
    else:
        framed = None if framing is None else {"resize": framing.resize, "crop": framing.crop}
        given = {"grid": patches, "image_px": image_px, "patch_px": patch_px, "framing": framed, "image_key": image_key}
        try:
            found = Patches.model_validate(given).model_dump(mode="json")
        except ValidationError as error:
            message = f"{brief(given)} describes no patches: {error.errors()[0]['msg']}"
            raise ArgumentError(message, where="patches") from None
        content = {"patches": {name: value for name, value in found.items() if value is not None}}
    described = source.describe(digest=digest)
    return {"__class__": "Source", "source": described, "examples": examples, "content": content}


def source_of(
    metadata: Metadata,
    storage_options: Mapping[str, object] | None = None,
    *,
    url: Url | None = None,
    outside_ok: bool = False,
) -> Source[object]:
    """Open the source that a store was recorded from, and compare its digest with the one in the metadata.

    Args:
        metadata: The document of the store.
        storage_options: Options of the fsspec file system of the source.
        url: The address of the source now, if it was moved.
        outside_ok: Send requests to the server that the metadata name; paths of this machine need no permission.

    Raises:
        UnsafeContentError: the metadata name a server, and neither `url` nor `outside_ok` is given.
        DocumentError: the metadata name no source.
        NotFoundError: it is no longer at its address; pass `url`.
        CorruptShardError: the data at the address are not those that were described.
    """
    outside_ok = check_flag(outside_ok, name="outside_ok")
    description = cast("Mapping[str, object]", _described(metadata)["source"])
    if description.get("format") == "map_style":
        raise DocumentError(
            f"was recorded from a data set in memory, a {brief(description.get('class'))}, which has no address",
            where=metadata.where,
            remedy="Pass it on: store.origin(…, source=MapStyle(data)), of saev_store.sources.",
        )
    address = description.get("url")
    scheme = address.partition("://")[0] if isinstance(address, str) and "://" in address else "file"
    if url is None and not outside_ok and scheme not in {"file", "local", "memory"}:
        raise UnsafeContentError(
            f"names {brief(address)} as its source; requests go there only if you allow it",
            where=metadata.where,
            remedy="Pass outside_ok=True if you trust the store, or url= of the source.",
        )
    return reopen(description, storage_options, url=url)


def origin_of(
    store: TextReading,
    source: Source[object],
    example_idx: int,
    token_idx: int | None = None,
    *,
    neighbours: int = 8,
) -> Origin:
    """The origin of one vector.

    Args:
        store: The store. Of one that was recorded with `by_token=True` the token arrays are read; an example as a whole, and its CLS
            token, are then of the sample of its first content token.
        source: The source, from `source_of`.
        example_idx: Position of the example; negative ones count from the end.
        token_idx: The content token, as loaders and `Selection.coordinates` number it: -1 is CLS. None for the example.
        neighbours: Number of tokens of a text to return on each side.

    Raises:
        SelectionError: there is no such example or token, or it is padding.
        CorruptShardError: `source` is not the data set that was recorded.
        DocumentError: the description in the metadata is not usable.
    """
    metadata, layout = store.metadata, store.metadata.layout
    described, reach = _described(metadata), check_count(neighbours, name="neighbours", least=0)
    example = check_index(example_idx, layout.n_examples, what="example")
    if token_idx == -1 and layout.cls_token:
        token_idx = None
    if token_idx is not None and not 0 <= token_idx < layout.content_tokens_per_example:
        cls = "-1 for CLS, or " if layout.cls_token else ""
        raise SelectionError(
            f"token {brief(token_idx)} does not exist; it is {cls}from 0 to {layout.content_tokens_per_example - 1}",
            where="token_idx",
        )
    examples = _part(_Examples, "examples", described, metadata)
    _check_given(source, described)
    if examples.by_token:
        return _origin_by_token(store, source, example, token_idx, reach)
    sample_idx = _sample_of(examples, example, metadata)
    sample, place = _checked_sample(source, sample_idx, example, metadata), None
    if token_idx is not None:
        content = _part(Content, "content", described, metadata)
        if content.patches is not None:
            place = _patch(content.patches, token_idx, source, sample, metadata)
        else:
            place = _token(content.tokens, token_idx, sample, reach, metadata)
    return Origin(sample_idx, source.key(sample_idx), sample, place)


def _origin_by_token(
    store: TextReading, source: Source[object], example: int, token_idx: int | None, reach: int
) -> Origin:
    """The origin of a token by what the store recorded for it."""
    metadata, token_arrays, token = store.metadata, store.token_arrays, token_idx or 0
    if missing := {"document_ids", "positions"}.difference(token_arrays):
        message = f"tokens are traced by {missing.pop()}, which the store does not have"
        raise DocumentError(message, where=metadata.where, remedy=_REMEDY)
    sample_idx, position = (int(token_arrays[name][example, token]) for name in ("document_ids", "positions"))
    if sample_idx < 0:
        message = f"content token {token} of example {example} is padding: it is of no sample"
        raise SelectionError(message, where="token_idx")
    sample = _checked_sample(source, sample_idx, example, metadata)
    ids, place = ids_of(sample), None
    if token_idx is not None and ids is not None:
        place = token_place(ids, token, position, reach)
        recorded = int(token_arrays["token_ids"][example, token]) if "token_ids" in token_arrays else place.token_id
        if place.token_id != recorded:
            raise _other_data(f"token {position} of sample {sample_idx}", place.token_id, recorded)
    elif token_idx is not None and "token_ids" in token_arrays:
        found = store.context(example, token, before=reach, after=reach)
        place = TokenPlace(position, found.token_id, found.before, found.after)
    return Origin(sample_idx, source.key(sample_idx), sample, place)


def _described(metadata: Metadata) -> dict[str, object]:
    """The description of the source in a store's metadata."""
    data = metadata.data
    if isinstance(data, str):  # protocol 2.1 has a string: JSON from this package, a pickle from others, never loaded
        try:
            data = cast("object", json.loads(data))
        except (ValueError, RecursionError):
            data = None
    if isinstance(data, Mapping) and isinstance(cast("dict[str, object]", data).get("source"), Mapping):
        return dict(cast("Mapping[str, object]", data))
    raise DocumentError("names no source that its examples were recorded from", where=metadata.where, remedy=_REMEDY)


def _part(kind: type[PartT], name: str, described: Mapping[str, object], metadata: Metadata) -> PartT:
    """A part of the description, validated."""
    try:
        return kind.model_validate(described.get(name))
    except ValidationError:
        raise _unusable(name, described.get(name), metadata) from None


def _unusable(name: str, value: object, metadata: Metadata) -> DocumentError:
    message = f"data.{name} is {brief(value)}, which does not show where examples come from"
    return DocumentError(message, where=metadata.where, remedy=_REMEDY)


def _sample_of(examples: _Examples, example: int, metadata: Metadata) -> int:
    if examples.samples is not None and example < len(examples.samples):
        return examples.samples[example]
    if examples.samples is None and examples.first is not None:
        return int(sample_of(np.array([examples.first + example]), examples.skipped or [])[0])
    raise _unusable("examples", examples.model_dump(), metadata)


def _check_given(source: Source[object], described: Mapping[str, object]) -> None:
    """Compare the caller's source with the description, if that reads nothing; others were compared when they were opened."""
    description = cast("Mapping[str, object]", described["source"])
    if source.format not in {"map_style", "text"} or description.get("format") != source.format:
        return
    now = source.describe()
    for name in ("n_samples", "fingerprint", "digest"):
        if name in description and name in now and now[name] != description[name]:
            raise _other_data(name, now[name], description[name])


def _other_data(name: str, now: object, then: object) -> CorruptShardError:
    message = f"{name} is {brief(now)}, but was {brief(then)} when the store was recorded"
    return CorruptShardError(message, where="source", remedy="Pass the data set that was recorded.")


def _checked_sample(source: Source[object], sample_idx: int, example: int, metadata: Metadata) -> object:
    """A sample; `DocumentError` if the source does not have it."""
    if 0 <= sample_idx < len(source):
        return source[sample_idx]
    message = f"example {example} is sample {brief(sample_idx)}, but the source has {len(source)}"
    remedy = "Check that the metadata describe this source."
    raise DocumentError(message, where=metadata.where, remedy=remedy)


def _token(tokens: Tokens | None, token: int, sample: object, neighbours: int, metadata: Metadata) -> TokenPlace | None:
    """The token of a text; None for a sample that is not a text."""
    if tokens is None:
        raise _unusable("content", None, metadata)
    ids = ids_of(sample)
    if ids is None:
        return None
    if tokens.first is None and metadata.layout.cls_token:
        raise DocumentError(
            "does not record whether the special token of the store is the first token of a sample",
            where=metadata.where,
            remedy="Record with recorded_from(source, first_token=1) if it is (BOS), else with first_token=0.",
        )
    return token_place(ids, token, (tokens.first or 0) + token, neighbours)


def _patch(patches: Patches, token: int, source: Source[object], sample: object, metadata: Metadata) -> PatchPlace:
    from saev_store.sources.pictures import picture_of, picture_px

    original_px = None
    if patches.framing is not None:
        picture = picture_of(source, sample, patches.image_key, where="source")
        original_px = picture_px(picture, where="source")
    place = patch_place(patches, token, original_px)
    if place is None:
        raise _unusable("content.patches.grid", patches.grid, metadata)
    return place
