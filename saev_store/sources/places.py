"""The meaning of content tokens in the metadata: tokens of a text, or patches of an image."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Annotated, ClassVar, Self, cast

import numpy as np
import numpy.typing as npt
from pydantic import BaseModel, ConfigDict, Field, model_validator

from saev_store.core.layout import IntArray
from saev_store.sources.framing import Box, Framing, Pair, SizePx

#: The number of a sample or of a token in it; sums of two are 64-bit integers.
Position = Annotated[int, Field(ge=0, lt=1 << 62)]


class Part(BaseModel):
    """A part of the description in `metadata.data`."""

    model_config: ClassVar[ConfigDict] = ConfigDict(strict=True, frozen=True)


class Tokens(Part):
    """Content tokens are tokens of a text: token t of an example is `first + t` of the sample."""

    first: Position | None


class Patches(Part):
    """Content tokens are patches of an image, row by row. Without `patch_px` they fill it."""

    grid: Pair
    image_px: Pair
    patch_px: Pair | None = None
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


class Content(Part):
    """The meaning of content tokens: tokens of a text, or patches of an image."""

    tokens: Tokens | None = None
    patches: Patches | None = None


def ids_of(sample: object) -> npt.NDArray[np.integer] | None:
    """The token ids of a sample; None for anything but an array of them."""
    is_text = isinstance(sample, np.ndarray) and cast("npt.NDArray[np.generic]", sample).ndim == 1
    return cast("npt.NDArray[np.integer]", sample) if is_text else None


def sample_of(examples: IntArray, skipped: Sequence[int]) -> IntArray:
    """The sample of each example if some samples, in ascending order, are not examples.

    >>> sample_of(np.arange(4), [1, 2, 5]).tolist()
    [0, 3, 4, 6]
    """
    # A skipped sample comes before an example if fewer unskipped ones come before it.
    unskipped_before = np.asarray(skipped, np.int64) - np.arange(len(skipped))
    return examples + np.searchsorted(unskipped_before, examples, side="right")
