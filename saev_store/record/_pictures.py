"""The images of a source that are recorded: which samples they are, and each as the processor gets it."""

# Public arguments are checked whatever their annotation.
# pyright: reportUnnecessaryIsInstance=false

from __future__ import annotations

import os
import warnings
from typing import TYPE_CHECKING, Literal, TypeAlias, cast, get_args

import numpy as np

from saev_store._runtime.threads import ahead
from saev_store.core.arguments import check_choice
from saev_store.errors import ArgumentError, DocumentError, SaevStoreWarning, brief, outside
from saev_store.record._in_memory import digest_of, is_in_memory
from saev_store.sources import Source
from saev_store.sources.image_folder import ImageFolder
from saev_store.sources.map_style import DataSet, MapStyle
from saev_store.sources.pictures import (
    ImageKey,
    is_pillow,
    name_of,
    open_images,
    picture_of,
    shared_between_threads,
)
from saev_store.sources.pixels import decode_rgb, to_rgb
from saev_store.sources.places import sample_of

if TYPE_CHECKING:
    from collections.abc import Mapping

    from saev_store.core.layout import IntArray

Address: TypeAlias = str | os.PathLike[str]
OnBadImage = Literal["raise", "skip"]
_N_THREADS = 8


class Pictures:
    """The images of a source, without those that are left out.

    Args:
        images: As of `Images`, as are the others.

    Attributes:
        source: Where the samples are from.
        image_key: Which part of a sample is the image.
        skipped: Positions of the samples that are left out, in order, and why.
        digest_scope: What digests of files cover.
    """

    def __init__(
        self,
        images: Address | Source[object] | DataSet,
        image_key: ImageKey | None,
        on_bad_image: OnBadImage,
        digest: Literal["sampled", "full"],
        storage_options: Mapping[str, object] | None,
    ) -> None:
        if on_bad_image not in get_args(OnBadImage):
            raise ArgumentError(
                f"on_bad_image is {brief(on_bad_image)}; it must be 'raise' or 'skip'", where="on_bad_image"
            )
        check_choice(digest, ("sampled", "full"), name="digest")
        self.digest_scope: Literal["sampled", "full"] = digest
        if isinstance(images, (str, os.PathLike)):
            self.source: Source[object] = open_images(images, storage_options)
        else:
            self.source = cast("Source[object]", images) if isinstance(images, Source) else MapStyle(images)
        if self.source.format in {"mmididx", "llmbatch"}:
            raise ArgumentError(f"{self.source.url} has token ids; these are no images", where="images", remedy="Record them as texts.")  # fmt: skip
        self.image_key = image_key
        self.skipped: dict[int, str] = {}
        if len(self.source) < 1:
            raise ArgumentError("images is empty; there must be at least one example", where="images")
        if on_bad_image == "skip":
            self._skip()

    def __len__(self) -> int:
        return len(self.source) - len(self.skipped)

    def samples(self, first: int, last: int) -> IntArray:
        """The positions in the source of examples `first` to `last - 1`."""
        return sample_of(np.arange(first, last), list(self.skipped))

    def images(self, samples: IntArray) -> list[object]:
        """The images at these positions: of files and of Pillow as RGB, others as they are.

        Raises:
            DocumentError: one does not decode; the message names it.
        """
        found = zip(samples.tolist(), self.source.rows(samples), strict=True)
        try:
            return [self._image(sample_idx, sample) for sample_idx, sample in found]
        except DocumentError as error:
            error.remedy = error.remedy or 'on_bad_image="skip" leaves out images that do not decode.'
            raise

    def digest(self, *, is_described: bool) -> object:
        """The digest of the images: of those in memory, or that of the source; None where a data set makes them when it is asked.

        Args:
            is_described: Whether the metadata have the description of the source, and with it that digest.
        """
        if isinstance(self.source, MapStyle) and is_in_memory(self.source.data):
            return digest_of(map(self._in_memory, self.samples(0, len(self)).tolist()))
        return None if is_described else self.source.describe(digest=self.digest_scope).get("digest")

    def _in_memory(self, sample_idx: int) -> object:
        """What decides the image at a position: its file, its RGB values, or the array."""
        where = name_of(self.source, sample_idx)
        picture = picture_of(self.source, self.source[sample_idx], self.image_key, where=where)
        return to_rgb(picture, where=where) if is_pillow(picture) else picture

    def _image(self, sample_idx: int, sample: object) -> object:
        where = name_of(self.source, sample_idx)
        if isinstance(self.source, ImageFolder):
            from PIL import Image

            return Image.fromarray(cast("np.ndarray", sample))  # arrays leave open where their channels are
        picture = picture_of(self.source, sample, self.image_key, where=where)
        if isinstance(picture, bytes):
            return decode_rgb(picture, where=where)
        return to_rgb(picture, where=where) if is_pillow(picture) else picture

    def _skip(self) -> None:
        """Decode all images, and leave out those that do not decode."""
        n_threads = _N_THREADS if shared_between_threads(self.source) else 1
        for sample_idx, why in enumerate(ahead(self._fault, range(len(self.source)), n_threads)):
            if why is not None:
                self.skipped[sample_idx] = why
        if not self.skipped:
            return
        shown = [f"{name_of(self.source, sample_idx)}: {why}" for sample_idx, why in [*self.skipped.items()][:3]]
        text = f"{len(self.skipped)} of {len(self.source)} images do not decode: {'; '.join(shown)}"
        if len(self) < 1:
            raise ArgumentError(text, where="images", remedy="Check image_key, and whether these are images.")
        warnings.warn(f"{text}. They are left out", SaevStoreWarning, stacklevel=outside())

    def _fault(self, sample_idx: int) -> str | None:
        """Why an image does not decode; None for one that does."""
        try:
            self._image(sample_idx, self.source[sample_idx])
        except DocumentError as error:
            return error.message
        return None
