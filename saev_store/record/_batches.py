"""`Batches`: batches of random-access images that can start at any example."""

# Public arguments are checked whatever their annotation.
# pyright: reportUnnecessaryIsInstance=false

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol

import numpy as np

from saev_store.errors import ArgumentError

if TYPE_CHECKING:
    from collections.abc import Iterator
    from typing import TypeAlias

    import numpy.typing as npt
    import torch

    PixelBatch: TypeAlias = npt.NDArray[np.float32] | torch.Tensor


class Images(Protocol):
    """A map-style dataset: a list, an array, or a torch dataset."""

    def __len__(self) -> int: ...

    def __getitem__(self, example: int, /) -> npt.ArrayLike: ...


@dataclass(frozen=True)
class Batches:
    """Batches of a random-access dataset, cut at multiples of `batch_size` regardless of the start.

    A resumed recording therefore runs the same forward passes as an uninterrupted one, and loads no image of a batch that is
    already recorded.

    Args:
        images: `images[i]` is one example's pixels, (channels, height, width).
        batch_size: Examples in a batch; the last one may have fewer.

    >>> batches = Batches(np.zeros((5, 3, 8, 8)), batch_size=2)
    >>> [(first, len(pixels)) for first, pixels in batches.starting_at(3)]
    [(2, 2), (4, 1)]
    """

    images: Images
    batch_size: int

    def __post_init__(self) -> None:
        if not isinstance(self.batch_size, int) or isinstance(self.batch_size, bool) or self.batch_size < 1:
            raise ArgumentError(f"batch_size is {self.batch_size!r}; it must be a positive integer", where="batch_size")
        if len(self.images) < 1:
            raise ArgumentError("images is empty; there must be at least one example", where="images")

    @property
    def n_examples(self) -> int:
        """Number of examples in all batches together."""
        return len(self.images)

    def __iter__(self) -> Iterator[npt.NDArray[np.float32]]:
        for _, pixels in self.starting_at(0):
            yield pixels

    def starting_at(self, example: int) -> Iterator[tuple[int, npt.NDArray[np.float32]]]:
        """Yield (first example, pixels) of the batch that contains `example` and of all later batches."""
        for first in range(example // self.batch_size * self.batch_size, self.n_examples, self.batch_size):
            last = min(first + self.batch_size, self.n_examples)
            yield first, np.stack([np.asarray(self.images[i], dtype=np.float32) for i in range(first, last)])
