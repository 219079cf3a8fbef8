"""Decodes images to RGB and masks to integers, with Pillow."""

from __future__ import annotations

import io
from collections.abc import Generator
from contextlib import contextmanager
from typing import TYPE_CHECKING, cast

import numpy as np

from saev_store._runtime.optional import need
from saev_store.errors import DocumentError, SaevStoreError

if TYPE_CHECKING:
    import numpy.typing as npt
    from PIL.Image import Image as PilImage

#: Pillow's decoders by ending; none of them starts a program (as EPS does) or reads other files.
FORMATS = {
    "jpg": "JPEG", "jpeg": "JPEG", "jpe": "JPEG", "jfif": "JPEG", "png": "PNG", "apng": "PNG", "webp": "WEBP", "gif": "GIF",
    "bmp": "BMP", "tif": "TIFF", "tiff": "TIFF", "jp2": "JPEG2000", "j2k": "JPEG2000", "jpx": "JPEG2000", "ppm": "PPM",
    "pgm": "PPM", "pbm": "PPM", "pnm": "PPM", "tga": "TGA", "ico": "ICO",
}  # fmt: skip
#: Tag of EXIF: how the camera was held. From 5 on, rows are columns.
_ORIENTATION, _FIRST_TURNED = 0x0112, 5


@contextmanager
def opened(raw: bytes, *, where: str) -> Generator[PilImage]:
    """An image whose header was read, and whose size is below Pillow's limit; `DocumentError` also for what fails inside the block."""
    need("PIL", install="saev-store[energon]", where=where)
    from PIL import Image

    try:
        # The content decides, not the name.
        with Image.open(io.BytesIO(raw), formats=sorted(set(FORMATS.values()))) as image:
            yield image
    except (SaevStoreError, MemoryError):
        raise
    except Exception as error:  # Pillow's plug-ins raise many kinds of errors for damaged files
        message = f"it is not an image that can be decoded: {type(error).__name__}"
        raise DocumentError(message, where=where) from None


def decode_rgb(raw: bytes, *, where: str) -> PilImage:
    """The image of a file as RGB, see `to_rgb`; of an animation the first frame; `DocumentError` if it does not decode."""
    with opened(raw, where=where) as image:
        return to_rgb(image, where=where)


def to_rgb(image: PilImage, *, where: str) -> PilImage:
    """An image as RGB with 8 bits: turned by its EXIF orientation, 16 bits cut to the upper 8; the rest is Pillow's `convert("RGB")`.

    Raises:
        DocumentError: it has floats, or integers beyond 16 bits, whose white is not known.
    """
    from PIL import Image, ImageOps

    upright = ImageOps.exif_transpose(image)
    if image.mode == "F" or image.mode.startswith("I"):
        values = np.asarray(upright)
        if image.mode == "F" or values.min() < 0 or values.max() > np.iinfo(np.uint16).max:
            message = f"the image has numbers from {values.min()} to {values.max()}; at most 16 bits are known as grey"
            raise DocumentError(message, where=where)
        upright = Image.fromarray((values >> 8).astype(np.uint8))
    return upright.convert("RGB")


def upright_px(image: PilImage) -> tuple[int, int]:
    """(height, width) of an image, turned by its EXIF orientation."""
    is_turned = cast("int", image.getexif().get(_ORIENTATION, 1)) >= _FIRST_TURNED
    return (image.width, image.height) if is_turned else (image.height, image.width)


def mask_of(image: PilImage, *, where: str) -> npt.NDArray[np.integer]:
    """The grey values or places in the palette of a mask of Pillow, (height, width), turned by its EXIF orientation.

    Raises:
        DocumentError: it has more than one channel, or floats.
    """
    from PIL import ImageOps

    values: npt.NDArray[np.integer] = np.asarray(ImageOps.exif_transpose(image))
    if values.ndim != 2 or values.dtype.kind not in "iub":
        rule = "it must have one channel of integers: save masks as grey or palette PNGs"
        raise DocumentError(f"the mask has the mode {image.mode!r}; {rule}", where=where)
    return values
