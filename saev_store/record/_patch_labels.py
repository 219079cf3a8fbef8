"""Segmentation masks to labels of patches."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING, Literal, cast

import numpy as np

from saev_store.errors import ArgumentError, NotFoundError, brief, kind_of
from saev_store.record._in_memory import digest_of, is_in_memory
from saev_store.sources.address import full_url
from saev_store.sources.image_folder import ImageFolder
from saev_store.sources.map_style import DataSet, MapStyle
from saev_store.sources.pictures import is_pillow, name_of
from saev_store.sources.pixels import decode_mask, mask_of

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping

    import numpy.typing as npt

    from saev_store.sources import Source
    from saev_store.sources.framing import Framing, SizePx

#: The largest label: labels are uint8.
_MOST = 255


class Masks:
    """The segmentation masks of the samples of a source: a label for each pixel.

    Args:
        masks: A map-style data set with the mask of sample i at i: (height, width) integers, or images of Pillow with one channel.
            Or the address of a folder of images whose paths are the keys of the samples, with any endings.
        source: Where the images are from.
        samples: Positions of the samples that are recorded.
        storage_options: Of that folder.

    Raises:
        ArgumentError: their number is not that of the samples, or two have one name.
        NotFoundError: a sample has no mask.
    """

    def __init__(
        self,
        masks: object,
        source: Source[object],
        samples: Iterable[int],
        storage_options: Mapping[str, object] | None = None,
    ) -> None:
        self._source, self._samples = source, list(samples)
        self._folder: ImageFolder | None = None
        if isinstance(masks, (str, os.PathLike)):
            self._folder = ImageFolder(cast("str", masks), storage_options)
            self._positions = _matched(self._folder, source, self._samples)
            return
        self._given = MapStyle(cast("DataSet", masks))
        if len(self._given) != len(source):
            raise ArgumentError(
                f"there are {len(self._given)} masks, but {len(source)} images; each image has one", where="masks"
            )

    def describe(self, digest: Literal["sampled", "full"]) -> dict[str, object]:
        """What decides the labels, as far as that can be told: nothing where a data set makes the masks when it is asked.

        Args:
            digest: As of `Images`.
        """
        if self._folder is not None:
            return {"digest": self._folder.describe(digest=digest)["digest"]}
        if not is_in_memory(self._given.data):
            return {}
        names = (f"the mask of {name_of(self._source, sample)}" for sample in self._samples)
        return {"digest": digest_of(map(self._mask, self._samples, names))}

    def labels(
        self,
        sample_idx: int,
        *,
        input_px: SizePx,
        patch_px: SizePx,
        original_px: SizePx | None,
        framing: Framing | None,
    ) -> npt.NDArray[np.uint8]:
        """The label of each patch of a sample, row by row.

        Args:
            sample_idx: Position of the sample in the source.
            input_px: (height, width) of the model's input.
            patch_px: (height, width) of a patch.
            original_px: (height, width) of the original image, if known.
            framing: How the input was made of it, if known.

        Raises:
            ArgumentError: the mask has another size, or a label that uint8 cannot hold.
            DocumentError: it does not decode.
        """
        what = f"the mask of {name_of(self._source, sample_idx)}"
        mask = self._mask(sample_idx, what)
        framed = mask if mask.shape == input_px else None
        if framing is not None and mask.shape == original_px:
            framed = framing.framed(mask)
        if framed is None or framed.shape != input_px:
            raise ArgumentError(
                f"{what} has {mask.shape[0]} x {mask.shape[1]} pixels, and the model's input {input_px[0]} x {input_px[1]}"
                + ("" if original_px is None else f", made of {original_px[0]} x {original_px[1]}"),
                where="masks",
                remedy="Pass masks of the input's size. Those of the image's size are resized and cropped only as a processor "
                "does of which that is known.",
            )
        low, high = int(framed.min()), int(framed.max())
        if low < 0 or high > _MOST:
            raise ArgumentError(
                f"{what} has values from {low} to {high}; labels are from 0 to {_MOST}",
                where="masks",
                remedy="Join classes, or choose which of them to keep.",
            )
        return majority(framed.astype(np.uint8), patch_px)

    def _mask(self, sample_idx: int, what: str) -> npt.NDArray[np.integer]:
        """The mask of a sample, (height, width)."""
        if self._folder is not None:
            position = self._positions[sample_idx]
            return decode_mask(
                self._folder.raw(position), where=full_url(self._folder.transport, self._folder.paths[position])
            )
        found = self._given[sample_idx]
        if is_pillow(found):
            return mask_of(found, where=what)
        values = np.asarray(found)
        if values.ndim != 2 or values.dtype.kind not in "iub" or not values.size:
            raise ArgumentError(
                f"{what} is {brief(found)}; it must be integers (height, width)",
                where="masks",
                remedy="Pass one label for each pixel.",
            )
        return cast("npt.NDArray[np.integer]", values)


def as_labels(labels: object) -> npt.NDArray[np.uint8]:
    """Labels as an array; what is one already, such as a memory map or a tensor, stays as it is."""
    if hasattr(labels, "shape") and hasattr(labels, "dtype"):
        return cast("npt.NDArray[np.uint8]", labels)
    try:
        found = np.asarray(labels)
    except (TypeError, ValueError):
        found = None
    if found is None or found.dtype.kind not in "iub":
        raise ArgumentError(
            f"labels is {kind_of(labels)} that is no array of integers",
            where="labels",
            remedy="Pass (n_examples, content tokens) integers from 0 to 255.",
        )
    return cast("npt.NDArray[np.uint8]", found)


def majority(mask: npt.NDArray[np.uint8], patch_px: SizePx) -> npt.NDArray[np.uint8]:
    """The most frequent value of each patch, row by row; of equally frequent ones the smallest.

    Pixels behind the last whole patch are left out, as by the model.

    >>> majority(np.array([[1, 2, 7, 7], [2, 1, 0, 0]], np.uint8), (2, 2)).tolist()
    [1, 0]
    """
    (high, wide), (height, width) = patch_px, mask.shape
    rows, columns = height // high, width // wide
    patches = mask[: rows * high, : columns * wide].reshape(rows, high, columns, wide).swapaxes(1, 2)
    flat = patches.reshape(rows * columns, high * wide).astype(np.int64)
    n_labels = _MOST + 1
    counts = np.bincount(
        (flat + np.arange(len(flat))[:, None] * n_labels).reshape(-1), minlength=len(flat) * n_labels
    ).reshape(-1, n_labels)
    return counts.argmax(axis=1).astype(np.uint8)


def _matched(folder: ImageFolder, source: Source[object], samples: Iterable[int]) -> dict[int, int]:
    """The position in the folder of the mask of each sample."""
    by_name: dict[str, int] = {}
    for position, path in enumerate(folder.paths):
        name = _without_ending(path)
        if name in by_name:
            raise ArgumentError(
                f"{folder.paths[by_name[name]]} and {path} in {folder.url} are masks of one name", where="masks"
            )
        by_name[name] = position
    if isinstance(source, MapStyle):
        raise ArgumentError(
            "the samples of this data set have no names by which masks could be found",
            where="masks",
            remedy="Pass a list of masks in the order of the samples.",
        )
    found: dict[int, int] = {}
    is_folder = isinstance(source, ImageFolder)
    for sample_idx in samples:
        key = source.key(sample_idx)
        name = _without_ending(key) if is_folder else key
        if name not in by_name:
            raise NotFoundError(
                f"sample {brief(key)} has no mask there", where=folder.url, remedy=f"It is searched as {name}.png."
            )
        found[sample_idx] = by_name[name]
    return found


def _without_ending(path: str) -> str:
    return path.rpartition(".")[0]
