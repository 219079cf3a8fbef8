"""Places in a sample: a token of a text, a patch of an image; and how metadata describe what content tokens are."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Annotated, ClassVar, Self, cast

import numpy as np
import numpy.typing as npt
from pydantic import BaseModel, ConfigDict, Field, model_validator

from saev_store.core.layout import IntArray
from saev_store.errors import SelectionError
from saev_store.sources.framing import Box, Framing, SizePx

#: Pixels along an edge, or patches; no image has more, and arrays are made of them.
EdgePx = Annotated[int, Field(ge=1, le=1 << 20)]
Pair = Annotated[tuple[EdgePx, EdgePx], Field(strict=False)]
#: The number of a sample or of a token in it; sums of two are 64-bit integers.
Position = Annotated[int, Field(ge=0, lt=1 << 62)]


class Part(BaseModel):
    """A part of the description in `metadata.data`."""

    model_config: ClassVar[ConfigDict] = ConfigDict(strict=True, frozen=True)


class Tokens(Part):
    """Content tokens are tokens of a text: token t of an example is `first + t` of the sample."""

    first: Position | None


class Framed(Part):
    """Steps from an image to the model's input, see `Framing`."""

    resize: EdgePx | Pair | None
    crop: Pair | None

    def framing(self) -> Framing:
        """The arithmetic."""
        return Framing(self.resize, self.crop)


class Patches(Part):
    """Content tokens are patches of an image, row by row. Without `patch_px` they fill it."""

    grid: Pair
    image_px: Pair
    patch_px: Pair | None = None
    framing: Framed | None = None
    image_key: str | int | None = None

    @property
    def size_px(self) -> SizePx:
        """(height, width) of a patch."""
        return self.patch_px or (self.image_px[0] // self.grid[0], self.image_px[1] // self.grid[1])

    @model_validator(mode="after")
    def _check_sizes(self) -> Self:
        for n, px, image_px in zip(self.grid, self.size_px, self.image_px, strict=True):
            if n * px > image_px or (self.patch_px is None and n * px != image_px):
                rule = "be" if self.patch_px is None else "fit into"
                raise ValueError(
                    f"{n} patches of {px} pixels must {rule} {image_px}; pass patch_px=… if they do not fill it"
                )
        return self


class Content(Part):
    """The meaning of content tokens: tokens of a text, or patches of an image."""

    tokens: Tokens | None = None
    patches: Patches | None = None


@dataclass(frozen=True)
class TokenPlace:
    """A token of a text.

    Attributes:
        position: Its position in the sample.
        token_id: Its id.
        before: The ids before it, nearest last.
        after: The ids after it, nearest first.
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
        original_box: The same box in pixels of the original image, turned by its EXIF orientation; None where it is not known how that was
            resized and cropped.
    """

    row: int
    column: int
    box: tuple[int, int, int, int]
    image_px: tuple[int, int]
    original_box: Box | None = None


def ids_of(sample: object) -> npt.NDArray[np.integer] | None:
    """The token ids of a sample; None for anything but an array of them."""
    is_text = isinstance(sample, np.ndarray) and cast("npt.NDArray[np.generic]", sample).ndim == 1
    return cast("npt.NDArray[np.integer]", sample) if is_text else None


def token_place(ids: npt.NDArray[np.integer], token: int, position: int, neighbours: int) -> TokenPlace:
    """The place of a content token at a position of a sample of token ids."""
    if not 0 <= position < len(ids):
        raise SelectionError(
            f"content token {token} is token {position} of a sample that has {len(ids)}: it is padding",
            where="token_idx",
        )
    before = ids[max(0, position - neighbours) : position].tolist()
    after = ids[position + 1 : position + 1 + neighbours].tolist()
    return TokenPlace(position, ids[position].item(), tuple(before), tuple(after))


def patch_place(patches: Patches, token: int, original_px: SizePx | None) -> PatchPlace | None:
    """The place of a patch; None where the grid has fewer.

    Args:
        patches: The description in the metadata.
        token: The content token.
        original_px: (height, width) of the original image, if known.
    """
    (rows, columns), (high, wide) = patches.grid, patches.size_px
    if token >= rows * columns:
        return None
    row, column = divmod(token, columns)
    box = (column * wide, row * high, (column + 1) * wide, (row + 1) * high)
    original_box = None
    if patches.framing is not None and original_px is not None:
        framing = patches.framing.framing()
        if framing.input_px(original_px) == patches.image_px:
            original_box = framing.original_box(box, original_px)
    return PatchPlace(row, column, box, patches.image_px, original_box)


def sample_of(examples: IntArray, skipped: Sequence[int]) -> IntArray:
    """The sample of each example if some samples are not examples.

    Args:
        examples: Positions.
        skipped: Positions of samples, in ascending order.

    >>> sample_of(np.arange(4), [1, 2, 5]).tolist()
    [0, 3, 4, 6]
    """
    # A skipped sample comes before an example if fewer unskipped ones come before it.
    unskipped_before = np.asarray(skipped, np.int64) - np.arange(len(skipped))
    return examples + np.searchsorted(unskipped_before, examples, side="right")
