"""The image of a sample, whatever the source: in a folder, a part of an Energon sample, a column of a data set."""

from __future__ import annotations

import sys
from collections.abc import Mapping
from typing import TYPE_CHECKING, TypeGuard, cast

import numpy as np

from saev_store.core.arguments import is_mapping
from saev_store.errors import ArgumentError, DocumentError, brief
from saev_store.sources.address import Url, full_url
from saev_store.sources.energon import EnergonDataset, RawSample
from saev_store.sources.energon.samples import resolve
from saev_store.sources.image_folder import ImageFolder
from saev_store.sources.pixels import FORMATS, opened, upright_px
from saev_store.sources.sniff import has_info
from saev_store.transport import open_transport

if TYPE_CHECKING:
    from PIL.Image import Image as PilImage

    from saev_store.sources._source import Source

#: The name of a column, or a place in a pair such as (image, label).
ImageKey = str | int


def open_images(url: Url, storage_options: Mapping[str, object] | None = None) -> Source[object]:
    """The images at an address: an Energon data set, or else a folder of images; raises as these."""
    transport = open_transport(url, storage_options)
    return (EnergonDataset if has_info(transport, "") else ImageFolder)("", transport=transport)


def picture_of(source: Source[object], sample: object, image_key: ImageKey | None, *, where: str) -> object:
    """The image of a sample: the bytes of a file, an image of Pillow, or whatever array the data set has.

    Args:
        source: The data set of the sample.
        sample: One of its samples.
        image_key: The part or column that is the image; None: the sample, the field `image` of an Energon data set, or the only image
            among the parts.
        where: For messages.

    Raises:
        ArgumentError: several parts are images, or there is no such column.
        DocumentError: there is no image.
    """
    if isinstance(sample, RawSample):
        return _part_of(source, sample, image_key, where=where)
    if image_key is not None:
        try:
            sample = cast("Mapping[ImageKey, object]", sample)[image_key]
        except (KeyError, IndexError, TypeError) as error:
            raise ArgumentError(f"{where} is {brief(sample)}, without {image_key!r}", where="image_key") from error
    # An image of Hugging Face that is not decoded.
    raw = sample.get("bytes") if is_mapping(sample) else None
    return raw if isinstance(raw, bytes) else sample


def picture_px(picture: object, *, where: str) -> tuple[int, int] | None:
    """(height, width) of the result of `picture_of`, upright; None if that is not known. Of a file only the header is read."""
    if isinstance(picture, bytes):
        with opened(picture, where=where) as image:
            return upright_px(image)
    if is_pillow(picture):
        return upright_px(picture)
    shape = np.shape(cast("np.ndarray", picture)) if hasattr(picture, "shape") else ()
    if len(shape) != 3:
        return None
    # Channels are few, and last or first.
    return (shape[0], shape[1]) if shape[2] <= 4 else (shape[1], shape[2])


def is_pillow(value: object) -> TypeGuard[PilImage]:
    """Return True for an image of Pillow; does not import it."""
    pillow = sys.modules.get("PIL.Image")
    return pillow is not None and isinstance(value, pillow.Image)


def _part_of(source: Source[object], sample: RawSample, image_key: ImageKey | None, *, where: str) -> bytes:
    """The image among the parts of an Energon sample."""
    parts = sample.parts
    if image_key is None and isinstance(source, EnergonDataset):
        field = source.documents.field_map.get("image")
        found = None if field is None else resolve(field, parts, where=where, images="bytes")
        if isinstance(found, bytes):
            return found
    names = [name for name in parts if name.rpartition(".")[2].lower() in FORMATS]
    if image_key is not None:
        names = [name for name in parts if name == image_key]
    if len(names) > 1:
        message = f"{where} has several images: {', '.join(names)}"
        raise ArgumentError(message, where="image_key", remedy="Name the part of the image.")
    if not names:
        raise DocumentError(f"the sample has no such image; its parts are {', '.join(parts) or 'none'}", where=where)
    return parts[names[0]]


def name_of(source: Source[object], sample_idx: int) -> str:
    """A sample as messages name it: its address, or its number in a data set that has none."""
    if isinstance(source, (ImageFolder, EnergonDataset)):
        return full_url(source.transport, source.key(sample_idx))
    return f"image {sample_idx}"
