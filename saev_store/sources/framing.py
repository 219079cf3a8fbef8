"""The arithmetic of resizing and cropping: from a place in the model's input back to the original image, and masks the other way."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated, TypeAlias

import numpy as np
from pydantic import ConfigDict, Field
from pydantic.dataclasses import dataclass

if TYPE_CHECKING:
    import numpy.typing as npt

#: Height and width in pixels.
SizePx: TypeAlias = tuple[int, int]
#: Left, top, right and bottom in pixels.
Box: TypeAlias = tuple[float, float, float, float]
#: Pixels along an edge, or patches; no image has more, and arrays are made of them.
EdgePx = Annotated[int, Field(strict=True, ge=1, le=1 << 20)]
Pair = Annotated[tuple[EdgePx, EdgePx], Field(strict=False)]


@dataclass(frozen=True, config=ConfigDict(strict=False))
class Framing:
    """Steps from an image to the model's input: resized as a whole, then cropped in the centre.

    Attributes:
        resize: (height, width) of every image after resizing; or the length of the shorter edge, with the proportions kept;
            None: not resized.
        crop: (height, width) of the centre that is left; None: not cropped.

    >>> framing = Framing(resize=256, crop=(224, 224))
    >>> framing.resized_px((480, 640)), framing.input_px((480, 640))
    ((256, 341), (224, 224))
    >>> framing.original_box((0, 0, 14, 14), (512, 1024))
    (288.0, 32.0, 316.0, 60.0)
    """

    resize: Pair | EdgePx | None = None
    crop: Pair | None = None

    def resized_px(self, original_px: SizePx) -> SizePx:
        """(height, width) after resizing an image of this size."""
        if self.resize is None or not isinstance(self.resize, int):
            return self.resize or original_px
        height, width = original_px
        # The longer edge is cut to an integer, as torchvision and transformers do.
        if width <= height:
            return int(self.resize * height / width), self.resize
        return self.resize, int(self.resize * width / height)

    def input_px(self, original_px: SizePx) -> SizePx:
        """(height, width) of the model's input."""
        return self.crop or self.resized_px(original_px)

    def original_box(self, box: Box, original_px: SizePx) -> Box | None:
        """A box of the model's input, in pixels of the original image; None if the input was padded to the size of the crop."""
        offset = self._offset(original_px)
        if offset is None:
            return None
        (height, width), (top, left) = self.resized_px(original_px), offset
        down, across = original_px[0] / height, original_px[1] / width
        return (box[0] + left) * across, (box[1] + top) * down, (box[2] + left) * across, (box[3] + top) * down

    def framed(self, values: npt.NDArray[np.integer]) -> npt.NDArray[np.integer] | None:
        """The values (height, width) of an original image as those of the model's input, by nearest neighbour; None as of `original_box`."""
        original_px = (values.shape[0], values.shape[1])
        offset = self._offset(original_px)
        if offset is None:
            return None
        at = [
            ((np.arange(n) + first + 0.5) * original / resized).astype(np.int64)
            for n, first, original, resized in zip(
                self.input_px(original_px), offset, original_px, self.resized_px(original_px), strict=True
            )
        ]
        return values[np.ix_(*at)]

    def _offset(self, original_px: SizePx) -> SizePx | None:
        """(top, left) of the crop in the resized image; None if that is smaller than the crop."""
        (height, width), (inside_height, inside_width) = self.resized_px(original_px), self.input_px(original_px)
        if inside_height > height or inside_width > width:
            return None
        return (height - inside_height) // 2, (width - inside_width) // 2
