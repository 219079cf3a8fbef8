"""The meaning of content tokens in the metadata: tokens of a text, or patches of an image; and the arithmetic of their places."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated, ClassVar, Self, TypeAlias, cast

import numpy as np
from pydantic import BaseModel, ConfigDict, Field, model_validator
from pydantic.dataclasses import dataclass

if TYPE_CHECKING:
    import numpy.typing as npt

#: Height and width in pixels.
SizePx: TypeAlias = tuple[int, int]
#: Left, top, right and bottom in pixels.
Box: TypeAlias = tuple[float, float, float, float]
#: The number of a sample or of a token in it; sums of two are 64-bit integers.
Position = Annotated[int, Field(ge=0, lt=1 << 62)]
#: Pixels along an edge, or patches; no image has more, and arrays are made of them.
_EdgePx = Annotated[int, Field(strict=True, ge=1, le=1 << 20)]
_Pair = Annotated[tuple[_EdgePx, _EdgePx], Field(strict=False)]


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

    resize: _Pair | _EdgePx | None = None
    crop: _Pair | None = None

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
        sizes = zip(self.input_px(original_px), offset, original_px, self.resized_px(original_px), strict=True)
        at = [((np.arange(n) + first + 0.5) * from_ / to).astype(np.int64) for n, first, from_, to in sizes]
        return values[np.ix_(*at)]

    def _offset(self, original_px: SizePx) -> SizePx | None:
        """(top, left) of the crop in the resized image; None if that is smaller than the crop."""
        (height, width), (inside_height, inside_width) = self.resized_px(original_px), self.input_px(original_px)
        if inside_height > height or inside_width > width:
            return None
        return (height - inside_height) // 2, (width - inside_width) // 2


class ExamplePart(BaseModel):
    """A part of the description in `metadata.data`."""

    model_config: ClassVar[ConfigDict] = ConfigDict(strict=True, frozen=True)


class Tokens(ExamplePart):
    """Content tokens are tokens of a text: token t of an example is `first + t` of the sample."""

    first: Position | None


class Patches(ExamplePart):
    """Content tokens are patches of an image, row by row. Without `patch_px` they fill it."""

    grid: _Pair
    image_px: _Pair
    patch_px: _Pair | None = None
    framing: Framing | None = None
    image_key: str | int | None = None

    def original_box(self, token: int, original_px: SizePx | None) -> Box | None:
        """A patch in pixels of the original image; None if it is not known how the input was made of that."""
        (row, column), (high, wide), framing = divmod(token, self.grid[1]), self.size_px, self.framing
        if framing is None or original_px is None or framing.input_px(original_px) != self.image_px:
            return None
        return framing.original_box((column * wide, row * high, (column + 1) * wide, (row + 1) * high), original_px)

    @property
    def size_px(self) -> SizePx:
        """(height, width) of a patch."""
        return self.patch_px or (self.image_px[0] // self.grid[0], self.image_px[1] // self.grid[1])

    @model_validator(mode="after")
    def _check_sizes(self) -> Self:
        for n, px, image_px in zip(self.grid, self.size_px, self.image_px, strict=True):
            if n * px > image_px or (self.patch_px is None and n * px != image_px):
                raise ValueError(
                    f"{n} patches of {px} pixels do not fill {image_px}; pass patch_px=… if they are fewer"
                )
        return self


class Content(ExamplePart):
    """The meaning of content tokens: tokens of a text, or patches of an image."""

    tokens: Tokens | None = None
    patches: Patches | None = None


def ids_of(sample: object) -> npt.NDArray[np.integer] | None:
    """The token ids of a sample; None for anything but an array of them."""
    is_text = isinstance(sample, np.ndarray) and cast("npt.NDArray[np.generic]", sample).ndim == 1
    return cast("npt.NDArray[np.integer]", sample) if is_text else None
