"""From a vector back to what it was computed from: which sample of which data set, and where in it.

A store that was recorded from a source says so in `metadata.data`, as `recorded_from` puts it: the source's own description
(format, address, digest), which sample each example is, and what its content tokens stand for. Plain JSON throughout; nothing in
it is ever executed or imported.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, cast

import numpy as np

from saev_store.errors import ArgumentError, DocumentError, SelectionError, UnsafeContentError, brief
from saev_store.sources._source import DigestScope, check_count, check_index
from saev_store.sources.sniff import reopen

if TYPE_CHECKING:
    import numpy.typing as npt

    from saev_store.core.layout import Layout
    from saev_store.documents import Metadata
    from saev_store.sources._source import Source
    from saev_store.sources.address import Url

_REMEDY = "Stores recorded with data=recorded_from(source) name theirs."


@dataclass(frozen=True)
class TokenPlace:
    """A token of a text.

    Attributes:
        position: Its position in the sample.
        token_id: What stands there.
        before: The ids to its left, nearest last.
        after: The ids to its right, nearest first.
    """

    position: int
    token_id: int
    before: tuple[int, ...]
    after: tuple[int, ...]


@dataclass(frozen=True)
class PatchPlace:
    """A patch of an image.

    Attributes:
        row, column: Its place in the grid of patches, from the top left.
        box: (left, top, right, bottom) in pixels of the image as the model saw it, right and bottom exclusive.
        image_px: (height, width) of that image, after resizing and cropping.
    """

    row: int
    column: int
    box: tuple[int, int, int, int]
    image_px: tuple[int, int]


@dataclass(frozen=True)
class Origin:
    """Where a vector, or a whole example, comes from.

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
    patches: tuple[int, int] | None = None,
    image_px: tuple[int, int] | None = None,
    digest: DigestScope = "sampled",
) -> dict[str, object]:
    """What to give as `data` to `new_metadata` when recording from a source.

    Args:
        source: What the examples are taken from.
        first: Example i is sample `first + i`.
        samples: Or: example i is sample `samples[i]`. All of them are written down, so keep this for small selections.
        first_token: For texts: content token t is token `first_token + t` of the sample. Needed for stores with a special
            token (`cls_token`): 1 if that token (BOS) is the sample's first one, 0 if it was put before the sample. Stores
            without a special token begin with token 0.
        patches: For images: content token t is patch t of a grid of (rows, columns), row by row.
        image_px: For images: (height, width) of what the model sees, in pixels.
        digest: Whether the source's digest covers every byte or the index and pieces of the rest.

    Raises:
        ArgumentError: the numbers fit neither the source nor each other.

    >>> from saev_store.sources import open_source
    >>> recorded_from(open_source(TOKENS), first=1)["examples"]
    {'first': 1}
    """
    if samples is None:
        examples: dict[str, object] = {"first": check_count(first, name="first", least=0)}
    else:
        examples = {"samples": [check_index(sample, len(source), what="sample") for sample in samples]}
    if (patches is None) != (image_px is None):
        raise ArgumentError("a patch grid needs the image's size in pixels, and the other way round", where="patches")
    if patches is None or image_px is None:
        if first_token is not None:
            first_token = check_count(first_token, name="first_token", least=0)
        content: dict[str, object] = {"tokens": {"first": first_token}}
    else:
        rows, columns = (check_count(n, name="patches") for n in patches)
        height, width = (check_count(n, name="image_px") for n in image_px)
        if height % rows or width % columns:
            raise ArgumentError(
                f"an image of {height} x {width} pixels has no grid of {rows} x {columns} equal patches",
                where="patches",
            )
        content = {"patches": {"grid": [rows, columns], "image_px": [height, width]}}
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
        url: Where the source is now, if not where it was.
        outside_ok: Send requests to the server that the metadata name; paths of this machine need no permission.

    Raises:
        UnsafeContentError: the metadata name a server, and neither `url` nor `outside_ok` is given.
        DocumentError: the metadata name no source.
        NotFoundError: it is not where it was; `url` says where it is now.
        CorruptShardError: other data lie there by now.
    """
    description = _mapping(_described(metadata), "source", metadata)
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
    metadata: Metadata, source: Source[object], example_idx: int, token_idx: int | None = None, *, neighbours: int = 8
) -> Origin:
    """Where one vector comes from.

    Args:
        metadata: The document of the store.
        source: What `source_of` gave.
        example_idx: Position of the example; negative ones count from the end.
        token_idx: The content token, as loaders and `Selection.coordinates` number it: -1 is CLS. None for the example.
        neighbours: So many tokens of a text to each side.

    Raises:
        SelectionError: there is no such example or token.
        DocumentError: the metadata say nothing usable about it.
    """
    layout = metadata.layout
    described = _described(metadata)
    example = check_index(example_idx, layout.n_examples, what="example")
    sample_idx = _sample_of(_mapping(described, "examples", metadata), example, source, metadata)
    sample = source[sample_idx]
    place = None
    if token_idx is not None:
        token = _content_token(token_idx, layout)
        if token is not None:
            content = _mapping(described, "content", metadata)
            place = _place(content, token, sample, neighbours, metadata)
    return Origin(sample_idx, source.key(sample_idx), sample, place)


def _described(metadata: Metadata) -> dict[str, object]:
    data = metadata.data
    if isinstance(data, str):  # protocol 2.1 has a string there; ours is JSON, a foreign one a pickle that stays shut
        try:
            data = cast("object", json.loads(data))
        except (ValueError, RecursionError):
            data = None
    if isinstance(data, Mapping) and isinstance(cast("dict[str, object]", data).get("source"), Mapping):
        return dict(cast("Mapping[str, object]", data))
    raise DocumentError("names no source that its examples were recorded from", where=metadata.where, remedy=_REMEDY)


def _mapping(described: Mapping[str, object], name: str, metadata: Metadata) -> Mapping[str, object]:
    value = described.get(name)
    if isinstance(value, Mapping):
        return cast("Mapping[str, object]", value)
    raise _unusable(name, value, metadata)


def _unusable(name: str, value: object, metadata: Metadata) -> DocumentError:
    return DocumentError(
        f"data.{name} is {brief(value)}, which says nothing about where examples come from",
        where=metadata.where,
        remedy=_REMEDY,
    )


def _numbers(value: object) -> list[int] | None:
    if not isinstance(value, Sequence) or isinstance(value, (str, bytes)):
        return None
    items = cast("Sequence[object]", value)
    good = [item for item in items if isinstance(item, int) and not isinstance(item, bool)]
    return good if len(good) == len(items) else None


def _sample_of(examples: Mapping[str, object], example: int, source: Source[object], metadata: Metadata) -> int:
    listed, first = _numbers(examples.get("samples")), _numbers([examples.get("first")])
    if listed is not None:
        if example >= len(listed):
            raise _unusable("examples.samples", listed, metadata)
        sample = listed[example]
    elif first is not None:
        sample = first[0] + example
    else:
        raise _unusable("examples", dict(examples), metadata)
    if not 0 <= sample < len(source):
        raise DocumentError(
            f"example {example} is said to be sample {brief(sample)}, but the source has {len(source)}",
            where=metadata.where,
            remedy="Check that the metadata describe this source.",
        )
    return sample


def _content_token(token_idx: int, layout: Layout) -> int | None:
    """The content token, or None for CLS."""
    if token_idx == -1 and layout.cls_token:
        return None
    if 0 <= token_idx < layout.content_tokens_per_example:
        return int(token_idx)
    cls = "-1 for CLS, or " if layout.cls_token else ""
    raise SelectionError(
        f"token {brief(token_idx)} does not exist; it is {cls}from 0 to {layout.content_tokens_per_example - 1}",
        where="token_idx",
    )


def _place(
    content: Mapping[str, object], token: int, sample: object, neighbours: int, metadata: Metadata
) -> TokenPlace | PatchPlace | None:
    patches = content.get("patches")
    if isinstance(patches, Mapping):
        return _patch(cast("Mapping[str, object]", patches), token, metadata)
    tokens = content.get("tokens")
    found = cast("Mapping[str, object]", tokens).get("first", "") if isinstance(tokens, Mapping) else ""
    if found is None and metadata.layout.cls_token and isinstance(sample, np.ndarray):
        raise DocumentError(
            "does not say whether the special token of the store is the first token of a sample",
            where=metadata.where,
            remedy="Record with recorded_from(source, first_token=1) if it is (BOS), else with first_token=0.",
        )
    first = _numbers([0 if found is None else found])
    if first is None:
        raise _unusable("content", dict(content), metadata)
    if not isinstance(sample, np.ndarray) or cast("np.ndarray", sample).ndim != 1:
        return None  # a sample that is no text: the example is known, the place in it is not
    ids = cast("npt.NDArray[np.integer]", sample)
    position = first[0] + token
    if not 0 <= position < len(ids):
        raise SelectionError(
            f"content token {token} is token {position} of a sample that has {len(ids)}: it is padding",
            where="token_idx",
        )
    reach = check_count(neighbours, name="neighbours", least=0)
    before = ids[max(0, position - reach) : position].tolist()
    after = ids[position + 1 : position + 1 + reach].tolist()
    return TokenPlace(position, ids[position].item(), tuple(before), tuple(after))


def _patch(patches: Mapping[str, object], token: int, metadata: Metadata) -> PatchPlace:
    grid, image_px = _numbers(patches.get("grid")), _numbers(patches.get("image_px"))
    if grid is None or image_px is None or len(grid) != 2 or len(image_px) != 2 or min(*grid, *image_px) < 1:
        raise _unusable("content.patches", dict(patches), metadata)
    (rows, columns), (height, width) = grid, image_px
    if token >= rows * columns:
        raise _unusable("content.patches.grid", grid, metadata)
    row, column = divmod(token, columns)
    box = (column * width // columns, row * height // rows, (column + 1) * width // columns, (row + 1) * height // rows)
    return PatchPlace(row, column, box, (height, width))
