"""The image of an example as the model saw it, and the places of its tokens."""

from __future__ import annotations

import io
import math
from typing import TYPE_CHECKING

import numpy as np

from saev_store.errors import DocumentError, NotFoundError
from saev_store.sources.images import image_of, is_pillow
from saev_store.sources.pixels import decode_rgb, to_rgb
from saev_store.sources.places import Content, Patches
from saev_store.view._answers import Answer

if TYPE_CHECKING:
    from PIL.Image import Image as PilImage

    from saev_store.view._viewed import Viewed

#: Length of the longer edge of an image that is sent, at most.
_MOST_PX = 448


def picture_answer(viewed: Viewed, example: int) -> Answer | None:
    """The grid of tokens, and where the image of an example is served; None for a store of texts. Does not read the image.

    `is_framed` is false where it is not known which part of the image the model saw, so that no token can be placed in it.
    """
    patches = viewed.once("patches", lambda: _patches(viewed))
    if patches is None:
        edge = math.isqrt(viewed.layout.content_tokens_per_example)
        if viewed.is_text or edge < 2 or edge**2 != viewed.layout.content_tokens_per_example:
            return None
        # Not described, but a square number of tokens per image.
        return {"grid": [edge, edge], "covered": [1.0, 1.0], "image_px": [edge, edge], "is_framed": False, "src": None}
    source, why_not = viewed.source()
    (rows, columns), (height, width) = patches.grid, patches.image_px
    high, wide = patches.patch_px or (height // rows, width // columns)
    return {
        "grid": [rows, columns],
        # Pixels behind the last whole patch belong to none.
        "covered": [rows * high / height, columns * wide / width],
        "image_px": [height, width],
        "is_framed": patches.framing is not None,
        "src": None if source is None else f"image/{example}",
        "why_not": why_not,
    }


def _patches(viewed: Viewed) -> Patches | None:
    """The grid of patches that the metadata describe; None where they describe none that fits."""
    try:
        found = Content.model_validate(viewed.described.get("content")).patches
    except ValueError:
        return None
    if found is None or math.prod(found.grid) < viewed.layout.content_tokens_per_example:
        return None
    return found


def picture_bytes(viewed: Viewed, example: int) -> bytes:
    """The image of an example as a PNG: the part that the model saw where that is known, made smaller.

    Raises:
        NotFoundError: the store has no images, or its data set is not there.
        DocumentError: the image does not decode.
    """
    patches = viewed.once("patches", lambda: _patches(viewed))
    source, why_not = viewed.source()
    if patches is None or source is None:
        raise NotFoundError(why_not or "the examples of this store are not known to be images", where="image")
    viewed.check(example=example)
    image = _as_rgb(
        image_of(source, viewed.store.origin(example, source=source).sample, patches.image_key, where="image")
    )
    if patches.framing is not None:
        height, width = patches.image_px
        box = patches.framing.original_box((0, 0, width, height), (image.height, image.width))
        if box is not None:
            left, top, right, bottom = map(round, box)
            image = image.crop((left, top, right, bottom))
            image = image.resize((min(width, 4096), min(height, 4096)))
    image.thumbnail((_MOST_PX, _MOST_PX))
    file = io.BytesIO()
    image.save(file, "PNG")
    return file.getvalue()


def _as_rgb(picture: object) -> PilImage:
    """The result of `image_of` as an image of Pillow that this function owns."""
    if isinstance(picture, bytes):
        return decode_rgb(picture, where="image")
    if is_pillow(picture):
        return to_rgb(picture, where="image")
    from PIL import Image

    values = np.asarray(picture)
    if values.ndim != 3 or values.shape[2] != 3 or values.dtype != np.uint8:
        raise DocumentError("the image must be an array of uint8 (height, width, 3)", where="image")
    return Image.fromarray(values)
