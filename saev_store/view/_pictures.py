"""The image of an example as the model saw it, and where in it its tokens are."""

from __future__ import annotations

import io
from typing import TYPE_CHECKING, cast

import numpy as np

from saev_store.errors import DocumentError, NotFoundError, SaevStoreError
from saev_store.sources.pictures import is_pillow, picture_of
from saev_store.sources.pixels import decode_rgb, to_rgb
from saev_store.sources.places import Content, Patches
from saev_store.view._places import described_data, without_places

if TYPE_CHECKING:
    from PIL.Image import Image as PilImage

    from saev_store.view._viewed import Viewed

#: Length of the longer edge of an image that is sent, at most.
_MOST_PX = 448


def picture_answer(viewed: Viewed, example: int) -> dict[str, object] | None:
    """Where the image of an example is served, and the grid of its tokens; None for a store of no images.

    Without reading the image. `grid` is None where it is not known which part of the image the model saw: then no token can
    be placed in it.
    """
    patches = viewed.once("patches", lambda: patches_of(viewed))
    if patches is None:
        return None
    source, why_not = viewed.source()
    (rows, columns), (height, width) = patches.grid, patches.image_px
    high, wide = patches.patch_px or (height // rows, width // columns)
    answer: dict[str, object] = {
        "grid": [rows, columns],
        # Pixels behind the last whole patch belong to none.
        "covered": [rows * high / height, columns * wide / width],
        "image_px": [height, width],
        "is_framed": patches.framing is not None,
    }
    if source is None:
        return {**answer, "src": None, "why_not": without_places(why_not, viewed.places)}
    return {**answer, "src": f"image/{example}"}


def patches_of(viewed: Viewed) -> Patches | None:
    """The grid of patches that the metadata describe; None where they describe none that fits."""
    content = described_data(viewed.store.metadata.data).get("content")
    try:
        found = Content.model_validate(content).patches
    except ValueError:
        return None
    if found is None or found.grid[0] * found.grid[1] < viewed.layout.content_tokens_per_example:
        return None
    return found


def picture_bytes(viewed: Viewed, example: int) -> bytes:
    """The image of an example as a PNG: the part that the model saw where that is known, made smaller.

    Raises:
        NotFoundError: the store has no images, or its data set is not there.
        DocumentError: the image does not decode.
    """
    patches = viewed.once("patches", lambda: patches_of(viewed))
    source, why_not = viewed.source()
    if patches is None or source is None:
        raise NotFoundError(why_not or "the examples of this store are no images", where="image")
    origin = viewed.store.origin(viewed.check_example(example), source=source)
    picture = picture_of(source, origin.sample, patches.image_key, where="image")
    try:
        image = _as_rgb(picture)
        if patches.framing is not None:
            height, width = patches.image_px
            framing = patches.framing.framing()
            box = framing.original_box((0, 0, width, height), (image.height, image.width))
            if box is not None:
                # Of what is cut, Pillow fills the outside with black.
                image = image.crop(cast("tuple[int, int, int, int]", tuple(round(edge) for edge in box)))
                image = image.resize((min(width, 4096), min(height, 4096)))
    except SaevStoreError:
        raise
    except Exception as error:  # Pillow raises many kinds of errors
        raise DocumentError(f"the image cannot be shown: {type(error).__name__}", where="image") from None
    image.thumbnail((_MOST_PX, _MOST_PX))
    file = io.BytesIO()
    image.save(file, "PNG")
    return file.getvalue()


def _as_rgb(picture: object) -> PilImage:
    """What `picture_of` returns, as an image of Pillow that is this function's own."""
    if isinstance(picture, bytes):
        return decode_rgb(picture, where="image")
    if is_pillow(picture):
        return to_rgb(picture, where="image")
    from PIL import Image

    values = np.asarray(picture)
    if values.ndim != 3 or values.shape[2] != 3 or values.dtype != np.uint8:
        raise DocumentError("the image is no array of uint8 (height, width, 3)", where="image")
    return Image.fromarray(values)
