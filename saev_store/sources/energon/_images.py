"""Decodes raster images with Pillow; sizes are checked before pixels are decoded."""

from __future__ import annotations

import io
from typing import Literal

import numpy as np

from saev_store.errors import DocumentError, MissingDependencyError

#: What an image decodes to: uint8 (height, width, 3), float32 (3, height, width) from 0 to 1 as Energon does, or as stored.
Images = Literal["rgb8", "torchrgb", "bytes"]
#: Pixels of one image: larger ones are refused before they are decoded.
MAX_PIXELS = 1 << 28
#: Decoders that may be used: none that starts a program (EPS) or reads other files.
FORMATS = {
    "jpg": "JPEG", "jpeg": "JPEG", "jpe": "JPEG", "jfif": "JPEG", "png": "PNG", "apng": "PNG", "webp": "WEBP", "gif": "GIF",
    "bmp": "BMP", "tif": "TIFF", "tiff": "TIFF", "jp2": "JPEG2000", "j2k": "JPEG2000", "jpx": "JPEG2000", "ppm": "PPM",
    "pgm": "PPM", "pbm": "PPM", "pnm": "PPM", "tga": "TGA", "ico": "ICO",
}  # fmt: skip


def decode_image(raw: bytes, *, where: str, images: Images) -> np.ndarray:
    """An image as RGB: uint8 (height, width, 3) for `"rgb8"`, float32 (3, height, width) in 0 to 1 for `"torchrgb"`."""
    try:
        from PIL import Image
    except ImportError as error:
        raise MissingDependencyError(
            "an image needs Pillow",
            where=where,
            remedy="""Run: pip install "saev-store[energon]", or pass images="bytes".""",
        ) from error
    try:
        # The content decides, not the name.
        with Image.open(io.BytesIO(raw), formats=sorted(set(FORMATS.values()))) as image:
            if image.width * image.height > MAX_PIXELS:
                raise DocumentError(
                    f"the image has {image.width} x {image.height} pixels; at most {MAX_PIXELS:,} are decoded"
                )
            rgb = np.asarray(image.convert("RGB"))
    except DocumentError:
        raise
    except Exception as error:
        # Pillow's plug-ins raise many kinds of errors for damaged files.
        raise DocumentError(f"it is no image that can be decoded: {str(error) or type(error).__name__}") from None
    if images == "torchrgb":
        return np.ascontiguousarray(rgb.transpose(2, 0, 1), dtype=np.float32) / np.float32(255)
    return rgb
