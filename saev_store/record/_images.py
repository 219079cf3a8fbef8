"""`Images`: images of a folder, of Energon or of any data set with numbered samples, as a source of examples."""

from __future__ import annotations

import os
from collections.abc import Iterable, Iterator, Mapping
from typing import TYPE_CHECKING, TypeAlias, cast

import numpy as np

from saev_store.core.arguments import check_count, is_mapping
from saev_store.errors import ArgumentError, brief
from saev_store.record._adapters import VisionAdapter
from saev_store.record._examples import Batch, ExampleSource, Geometry, Recorded
from saev_store.record._identity import config_digest
from saev_store.record._masks import Masks
from saev_store.record._processing import framing_of, process
from saev_store.sources import Source, recorded_from
from saev_store.sources.images import ImageFolder, ImageKey, image_of, image_px, is_pillow, name_of
from saev_store.sources.map_style import DataSet, MapStyle
from saev_store.sources.pixels import decode_rgb, to_rgb
from saev_store.sources.sniff import open_images

if TYPE_CHECKING:
    import numpy.typing as npt
    import torch

    from saev_store.record._adapters import Adapter
    from saev_store.record._processing import Processor

Address: TypeAlias = str | os.PathLike[str]
_REMEDY = (
    "Pass the model's image processor as processor=…, or normalised pixels; of pairs (image, label) pass image_key=0."
)


class Images(ExampleSource):
    """Images of a source, in batches that are cut at multiples of `batch_size`. Only the images of a batch are in memory.

    Args:
        images: The address of a folder of images or of an Energon data set; an open source of images, see
            `saev_store.sources.ImageFolder` and `open_source`; or any data set with a length and numbered samples, such as a list,
            an array, a data set of torch or of Hugging Face. Without a `processor` a sample is pixels (channels, height, width),
            normalised as the model wants them. With one it is whatever that takes; files and images of Pillow are converted to
            RGB first, see `saev_store.sources.pixels.to_rgb`.
        batch_size: Images in a batch; the last one may have fewer.
        processor: An image processor of `transformers`, which makes pixels of a list of images. Its settings are part of the
            recording's identity.
        cls_token: Whether to record the CLS token; None: if the model has one.
        labels: (n_examples, content tokens) uint8, a label for each patch; may be a memory map.
        masks: Instead of `labels`: for each sample a label for each pixel, see `Masks`.
        image_key: Of samples with several parts the name of the image, or its place in a pair (image, label).
        data: Description of the data set for the metadata, any JSON object; None: what `store.origin` needs.
        storage_options: Options of the file system of an address.

    Attributes:
        source: Source of the samples.

    Raises:
        ArgumentError: an argument breaks a rule, or there is no image.
        NotFoundError: there is nothing at an address, or a mask is missing.

    >>> images = Images(np.zeros((5, 3, 8, 8)), batch_size=2)
    >>> [(batch.first, batch.inputs[0].shape[0]) for batch in images.batches(3, 5)]
    [(2, 2), (4, 1)]
    """

    def __init__(
        self,
        images: Address | Source[object] | DataSet,
        batch_size: int = 32,
        *,
        processor: Processor | None = None,
        cls_token: bool | None = None,
        labels: npt.NDArray[np.uint8] | None = None,
        masks: Address | DataSet | None = None,
        image_key: ImageKey | None = None,
        data: Mapping[str, object] | None = None,
        storage_options: Mapping[str, object] | None = None,
    ) -> None:
        self.batch_size = check_count(batch_size, name="batch_size")
        self.processor, self.cls_token = processor, cls_token
        if masks is not None and labels is not None:
            message = "masks and labels both give labels of patches"
            raise ArgumentError(message, where="masks", remedy="Pass one of them.")
        if data is not None and not is_mapping(data):
            raise ArgumentError(f"data is {brief(data)}; it must be a JSON object", where="data")
        self.source = _opened(images, storage_options)
        self.image_key, self._data, self.n_examples = image_key, data, len(self.source)
        self.labels = None if labels is None else labels if hasattr(labels, "shape") else np.asarray(labels)
        self._masks = None if masks is None else Masks(masks, self.source, storage_options)
        self._shape: tuple[int, ...] = ()  # of a batch, when the first image was seen
        self._patch_px = (0, 0)

    def geometry(self, adapter: Adapter) -> Geometry:
        if not isinstance(adapter, VisionAdapter):
            raise ArgumentError(
                f"{type(adapter.model).__name__} is a model of tokens; these are images", where="source"
            )
        if not self._shape:
            self._shape = self._pixels(*self._images(0, 1)).shape
        content = adapter.content_tokens(self._shape)
        self._patch_px = adapter.patch_px
        if self.labels is not None and self.labels.shape != (self.n_examples, content):
            message = f"labels has the shape {self.labels.shape}; one per patch is {(self.n_examples, content)}"
            raise ArgumentError(message, where="labels")
        arrays = {} if self.labels is None and self._masks is None else {"labels": "uint8"}
        return Geometry(self.n_examples, content, adapter.keeps_cls(self.cls_token), arrays)

    def describe(self) -> dict[str, object]:
        """The description of the source; for a model that `geometry` was asked for."""
        if self._data is not None:
            return dict(self._data)
        (height, width), (high, wide) = self._shape[2:], self._patch_px
        return recorded_from(
            self.source,
            patches=(height // high, width // wide),
            image_px=(height, width),
            patch_px=(high, wide),
            framing=framing_of(self.processor),
            image_key=self.image_key,
        )

    def identity(self) -> dict[str, object]:
        found: dict[str, object] = {"batch_size": self.batch_size}
        if self.processor is not None:
            found["processor"] = {"class": type(self.processor).__name__, "config": config_digest(self.processor)}
        if self._data is not None:  # else the description of the source has both
            if self.image_key is not None:
                found["image_key"] = self.image_key
            if (digest := self.source.describe().get("digest")) is not None:
                found["images"] = {"digest": digest}
        if self._masks is not None and (masks := self._masks.identity()):
            found["masks"] = masks
        return found

    def batches(self, start: int, end: int) -> Iterator[Batch]:
        """The batches from the one that contains example `start` to the one that contains `end - 1`."""
        for first in range(start // self.batch_size * self.batch_size, end, self.batch_size):
            last = min(first + self.batch_size, self.n_examples)
            names, images = self._images(first, last)
            pixels = self._pixels(names, images)
            labels = None if self.labels is None else self.labels[first:last]
            if self._masks is not None:
                input_px, framing = (pixels.shape[2], pixels.shape[3]), framing_of(self.processor)
                labels = np.stack(
                    [
                        self._masks.labels(
                            first + i, input_px, self._patch_px, image_px(image, where="images"), framing
                        )
                        for i, image in enumerate(images)
                    ]
                )
            yield Batch((pixels,), first, {} if labels is None else {"labels": labels})

    def assemble(self, computed: Iterable[tuple[Batch, torch.Tensor]], start: int) -> Iterator[Recorded]:
        del start  # batches are whole examples
        for batch, acts in computed:
            yield Recorded(batch.first, acts, batch.token_arrays)
            del batch, acts  # not held while the next ones are waited for

    def _images(self, first: int, last: int) -> tuple[list[str], list[object]]:
        """Names and images of examples `first` to `last - 1`: files and images of Pillow as RGB, others as they are."""
        names = [name_of(self.source, sample_idx) for sample_idx in range(first, last)]
        samples = self.source.rows(slice(first, last))
        return names, [self._decoded(sample, where) for where, sample in zip(names, samples, strict=True)]

    def _decoded(self, sample: object, where: str) -> object:
        if isinstance(self.source, ImageFolder):
            from PIL import Image

            return Image.fromarray(cast("np.ndarray", sample))  # arrays leave open where their channels are
        picture = image_of(self.source, sample, self.image_key, where=where)
        if isinstance(picture, bytes):
            return decode_rgb(picture, where=where)
        return to_rgb(picture, where=where) if is_pillow(picture) else picture

    def _pixels(self, names: list[str], images: list[object]) -> npt.NDArray[np.float32]:
        """(examples, channels, height, width): the input of the model."""
        what = f"{names[0]} to {names[-1]}"
        if self.processor is not None:
            pixels = process(self.processor, images, what)
        else:
            each = [_as_pixels(image, name) for name, image in zip(names, images, strict=True)]
            same = len({image.shape for image in each}) == 1
            pixels = np.stack(each) if same else np.empty((len(each), 0, 0, 0), np.float32)
        shape = self._shape[1:] or pixels.shape[1:]
        if pixels.shape[1:] != shape or not pixels.size:  # their patches would be other places
            raise ArgumentError(
                f"{what} have other shapes than the first image, {shape}; all must be equal",
                where="images",
                remedy="Crop or resize them to one size; an image processor does that.",
            )
        return pixels


def _opened(images: Address | Source[object] | DataSet, storage_options: Mapping[str, object] | None) -> Source[object]:
    """The source of images; `ArgumentError` for one of token ids, and for an empty one."""
    if isinstance(images, (str, os.PathLike)):
        source = open_images(images, storage_options)
    else:
        source = cast("Source[object]", images) if isinstance(images, Source) else MapStyle(images)
    if len(source) < 1 or source.format in {"mmididx", "llmbatch"}:
        raise ArgumentError(f"{source.url or 'the data set'} has no images", where="images")
    return source


def _as_pixels(image: object, what: str) -> npt.NDArray[np.float32]:
    """An image as float32; `ArgumentError` if it is not an array of floats."""
    import torch

    if isinstance(image, torch.Tensor):
        image = image.detach().cpu()
        image = image.float() if image.is_floating_point() else image  # NumPy has no bfloat16
    try:
        found = np.asarray(image)
    except ValueError as error:
        raise ArgumentError(f"{what} is not an array of numbers: {error}", where="images", remedy=_REMEDY) from error
    if found.dtype.kind != "f":
        raise ArgumentError(f"{what} has {found.dtype} numbers, not normalised floats", where="images", remedy=_REMEDY)
    return found.astype(np.float32, copy=False)
