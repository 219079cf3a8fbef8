"""`Masks`: labels of patches from segmentation masks."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING, cast

import numpy as np

from saev_store.errors import ArgumentError, NotFoundError, brief
from saev_store.sources import Source
from saev_store.sources.images import ImageFolder, is_pillow, name_of
from saev_store.sources.map_style import DataSet, MapStyle
from saev_store.sources.pixels import mask_of, opened

if TYPE_CHECKING:
    from collections.abc import Mapping

    import numpy.typing as npt

    from saev_store.sources.places import Framing, SizePx

#: Labels are uint8.
_N_LABELS = 256


class Masks:
    """Segmentation masks of the samples of a source: a label for each pixel. `Images(…, masks=…)` makes one.

    Args:
        masks: A map-style data set with the mask of sample i at i: (height, width) integers, or images of Pillow with one channel.
            Or the address of a folder of images whose paths are the keys of the samples, with any endings.
        source: Source of the images.
        storage_options: Of that folder.

    Raises:
        ArgumentError: their number is not that of the samples, or two have one name.
        NotFoundError: a sample has no mask.

    >>> masks = Masks([np.array([[1, 2, 7, 7], [2, 1, 0, 0]])], MapStyle(["an image"]))
    >>> masks.labels(0, (2, 4), (2, 2), None, None).tolist()
    [1, 0]
    """

    def __init__(
        self,
        masks: os.PathLike[str] | str | DataSet,
        source: Source[object],
        storage_options: Mapping[str, object] | None = None,
    ) -> None:
        self._source = source
        if isinstance(masks, (str, os.PathLike)):
            self._masks: ImageFolder | MapStyle = ImageFolder(masks, storage_options)
            self._positions = _matched(self._masks, source)
            return
        self._masks, self._positions = MapStyle(masks), list(range(len(source)))
        if len(self._masks) != len(source):
            message = f"there are {len(self._masks)} masks, but {len(source)} images; each image has one"
            raise ArgumentError(message, where="masks")

    def identity(self) -> dict[str, object]:
        """The digest of a folder of masks; empty for others."""
        return {"digest": self._masks.describe()["digest"]} if isinstance(self._masks, ImageFolder) else {}

    def labels(
        self,
        sample_idx: int,
        input_px: SizePx,
        patch_px: SizePx,
        original_px: SizePx | None,
        framing: Framing | None,
    ) -> npt.NDArray[np.uint8]:
        """The label of each whole patch of a sample, row by row: its most frequent value, of equally frequent ones the smallest.

        The sizes are those of the model's input, of a patch and of the original image; `framing` is how the input was made of it.
        `ArgumentError` for a mask of another size, or a label that uint8 cannot hold.
        """
        mask = self._mask(sample_idx)
        framed = mask if mask.shape == input_px else None
        if framing is not None and mask.shape == original_px:
            framed = framing.framed(mask)
        if framed is None or framed.shape != input_px or framed.min() < 0 or framed.max() >= _N_LABELS:
            raise ArgumentError(
                f"{self._name(sample_idx)} has {mask.shape} pixels from {mask.min()} to {mask.max()}; the model's input has "
                f"{input_px}, made of {original_px}, and labels are from 0 to {_N_LABELS - 1}",
                where="masks",
                remedy="Pass masks of the input's size.",
            )
        (high, wide), (height, width) = patch_px, input_px
        rows, columns = height // high, width // wide
        patches = framed[: rows * high, : columns * wide].reshape(rows, high, columns, wide).swapaxes(1, 2)
        flat = patches.reshape(rows * columns, high * wide).astype(np.int64)
        counts = np.bincount(
            (flat + np.arange(len(flat))[:, None] * _N_LABELS).reshape(-1), minlength=len(flat) * _N_LABELS
        )
        return counts.reshape(-1, _N_LABELS).argmax(axis=1).astype(np.uint8)

    def _name(self, sample_idx: int) -> str:
        return f"the mask of {name_of(self._source, sample_idx)}"

    def _mask(self, sample_idx: int) -> npt.NDArray[np.integer]:
        """The mask of a sample, (height, width)."""
        position = self._positions[sample_idx]
        if isinstance(self._masks, ImageFolder):
            where = self._masks.transport.where(self._masks.paths[position])
            with opened(self._masks.raw(position), where=where) as image:
                return mask_of(image, where=where)
        found, what = self._masks[position], self._name(sample_idx)
        values = mask_of(found, where=what) if is_pillow(found) else np.asarray(found)
        if values.ndim != 2 or values.dtype.kind not in "iub" or not values.size:
            raise ArgumentError(f"{what} is {brief(found)}; it must be integers (height, width)", where="masks")
        return cast("npt.NDArray[np.integer]", values)


def _matched(folder: ImageFolder, source: Source[object]) -> list[int]:
    """The position in the folder of the mask of each sample."""
    if isinstance(source, MapStyle):
        message = "the samples of this data set have no names by which masks could be found"
        raise ArgumentError(message, where="masks", remedy="Pass a list of masks in the order of the samples.")
    by_name = {path.rpartition(".")[0]: position for position, path in enumerate(folder.paths)}
    if len(by_name) < len(folder):
        raise ArgumentError(f"{folder.url} has several masks of one name, with other endings", where="masks")
    keys = [source.key(sample_idx) for sample_idx in range(len(source))]
    names = [key.rpartition(".")[0] for key in keys] if isinstance(source, ImageFolder) else keys
    for name in names:
        if name not in by_name:
            raise NotFoundError(f"a sample has no mask there: {name}.png", where=folder.url)
    return [by_name[name] for name in names]
