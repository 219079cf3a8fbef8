"""`Images`: images of a folder, of Energon or of any data set with numbered samples, as a source of examples."""

from __future__ import annotations

import os
import warnings
from collections.abc import Iterable, Iterator, Mapping
from typing import TYPE_CHECKING, Literal, TypeAlias, cast

import numpy as np

from saev_store._runtime.threads import ahead
from saev_store.core.arguments import check_choice, check_count
from saev_store.core.dtypes import dtype_name
from saev_store.errors import ArgumentError, DocumentError, SaevStoreWarning, outside
from saev_store.record._adapters import VisionAdapter
from saev_store.record._examples import Batch, ExampleSource, Geometry, Recorded
from saev_store.record._identity import config_digest, digest_of
from saev_store.record._masks import Masks
from saev_store.record._processing import framing_of, process
from saev_store.sources import Source, recorded_from
from saev_store.sources.image_folder import ImageFolder
from saev_store.sources.map_style import DataSet, MapStyle
from saev_store.sources.pictures import (
    ImageKey,
    is_pillow,
    name_of,
    open_images,
    picture_of,
    picture_px,
    shared_between_threads,
)
from saev_store.sources.pixels import decode_rgb, to_rgb
from saev_store.sources.places import sample_of

if TYPE_CHECKING:
    import numpy.typing as npt
    import torch

    from saev_store.core.layout import IntArray
    from saev_store.record._adapters import Adapter
    from saev_store.record._processing import Processor

    Labels: TypeAlias = npt.NDArray[np.uint8]

Address: TypeAlias = str | os.PathLike[str]
_N_THREADS = 8


class Images(ExampleSource):
    """Images of a source, in batches that are cut at multiples of `batch_size` regardless of the start.

    A resumed recording therefore runs the same forward passes as an uninterrupted one, and loads no image of a batch that it
    does not run. Only the images of a batch are in memory.

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
        masks: Instead of `labels`: for each sample a label for each pixel. A map-style data set of integers (height, width) or of
            images with one channel, or the address of a folder with the masks under the names of the images. The label of a
            patch is the most frequent one, of equally frequent ones the smallest.
        image_key: Of samples with several parts the name of the image, or its place in a pair (image, label).
        on_bad_image: `"raise"`, or `"skip"` to leave out images that do not decode. All images are then decoded once before
            recording begins. Which are left out is part of the metadata.
        data: Description of the data set for the metadata, any JSON object; None: what `store.origin` needs.
        digest: What the digests of files cover that are part of the identity, see `ImageFolder.describe`: `"sampled"` reads some of
            the bytes, `"full"` all of them.
        storage_options: Options of the file system of an address.

    Attributes:
        source: Source of the samples.
        skipped: Positions of the samples that are left out, in order, and why.

    Raises:
        ArgumentError: an argument breaks a rule, or there is no image.
        NotFoundError: there is nothing at an address, or a mask is missing.

    Warns:
        SaevStoreWarning: images are left out.

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
        labels: Labels | None = None,
        masks: Address | DataSet | None = None,
        image_key: ImageKey | None = None,
        on_bad_image: Literal["raise", "skip"] = "raise",
        data: Mapping[str, object] | None = None,
        digest: Literal["sampled", "full"] = "sampled",
        storage_options: Mapping[str, object] | None = None,
    ) -> None:
        self.batch_size = check_count(batch_size, name="batch_size")
        self.processor, self.cls_token = processor, cls_token
        check_choice(on_bad_image, ("raise", "skip"), name="on_bad_image")
        check_choice(digest, ("sampled", "full"), name="digest")
        if masks is not None and labels is not None:
            raise ArgumentError(
                "masks and labels both give labels of patches", where="masks", remedy="Pass one of them."
            )
        self.source = _opened(images, storage_options)
        self.image_key, self._data = image_key, data
        self._digest: Literal["sampled", "full"] = digest
        self.skipped = self._undecodable() if on_bad_image == "skip" else {}
        self.n_examples = len(self.source) - len(self.skipped)
        self.labels = None if labels is None else labels if hasattr(labels, "shape") else np.asarray(labels)
        samples = self._samples(0, self.n_examples).tolist()
        self._masks = None if masks is None else Masks(masks, self.source, samples, storage_options)
        self._shape: tuple[int, ...] = ()  # of a batch, when the first image was seen
        self._patch_px = (0, 0)

    def geometry(self, adapter: Adapter) -> Geometry:
        if not isinstance(adapter, VisionAdapter):
            raise ArgumentError(
                f"{type(adapter.model).__name__} is a model of tokens; these are images",
                where="source",
                remedy="Give it texts, or choose a model of images.",
            )
        if not self._shape:
            self._shape = self._pixels(*self._images(0, 1)).shape
        content = adapter.content_tokens(self._shape)
        self._patch_px = adapter.patch_px
        if self.labels is not None and self.labels.shape != (self.n_examples, content):
            raise ArgumentError(
                f"labels has the shape {self.labels.shape}; one per patch is {(self.n_examples, content)}",
                where="labels",
            )
        arrays = {} if self.labels is None and self._masks is None else {"labels": "uint8"}
        return Geometry(self.n_examples, content, adapter.keeps_cls(self.cls_token), arrays)

    def describe(self) -> dict[str, object]:
        """The description of the source; for a model that `geometry` was asked for."""
        if self._data is not None:
            return dict(self._data)
        (height, width), (high, wide) = self._shape[2:], self._patch_px
        return recorded_from(
            self.source,
            skipped=list(self.skipped),
            patches=(height // high, width // wide),
            image_px=(height, width),
            patch_px=(high, wide),
            framing=framing_of(self.processor),
            image_key=self.image_key,
            digest=self._digest,
        )

    def identity(self) -> dict[str, object]:
        found: dict[str, object] = {"batch_size": self.batch_size}
        if self.processor is not None:
            found["processor"] = {"class": type(self.processor).__name__, "config": config_digest(self.processor)}
        if self._data is not None and self.image_key is not None:  # else the description of the source has it
            found["image_key"] = self.image_key
        if self.skipped:
            found["skipped"] = list(self.skipped)
        if self.labels is not None:
            found["labels"] = {"digest": digest_of(self.labels[i : i + 4096] for i in range(0, self.n_examples, 4096))}
        images = None
        if isinstance(self.source, MapStyle) and _is_in_memory(self.source.data):
            images = digest_of(self._image(sample) for sample in self._samples(0, self.n_examples).tolist())
        elif self._data is not None:
            images = self.source.describe(digest=self._digest).get("digest")
        if images is not None:
            found["images"] = {"digest": images}
        if self._masks is not None:
            found["masks"] = self._masks.identity(self._digest)
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
                        self._masks.labels(sample, input_px, self._patch_px, picture_px(image, where="images"), framing)
                        for sample, image in zip(self._samples(first, last).tolist(), images, strict=True)
                    ]
                )
            yield Batch((pixels,), first, {} if labels is None else {"labels": labels})

    def assemble(self, computed: Iterable[tuple[Batch, torch.Tensor]], start: int) -> Iterator[Recorded]:
        del start  # batches are whole examples
        for batch, acts in computed:
            yield Recorded(batch.first, acts, batch.token_arrays)
            del batch, acts  # not held while the next ones are waited for

    def _samples(self, first: int, last: int) -> IntArray:
        """The positions in the source of examples `first` to `last - 1`."""
        return sample_of(np.arange(first, last), list(self.skipped))

    def _images(self, first: int, last: int) -> tuple[list[str], list[object]]:
        """Names and images of examples `first` to `last - 1`: files and images of Pillow as RGB, others as they are."""
        samples = self._samples(first, last)
        found = zip(samples.tolist(), self.source.rows(samples), strict=True)
        try:
            images = [self._decoded(sample_idx, sample) for sample_idx, sample in found]
        except DocumentError as error:
            error.remedy = error.remedy or 'on_bad_image="skip" leaves out images that do not decode.'
            raise
        return [name_of(self.source, sample) for sample in samples.tolist()], images

    def _image(self, sample_idx: int) -> object:
        """The bytes of the file of an image in memory, its RGB values, or the array."""
        where = name_of(self.source, sample_idx)
        picture = picture_of(self.source, self.source[sample_idx], self.image_key, where=where)
        return to_rgb(picture, where=where) if is_pillow(picture) else picture

    def _decoded(self, sample_idx: int, sample: object) -> object:
        where = name_of(self.source, sample_idx)
        if isinstance(self.source, ImageFolder):
            from PIL import Image

            return Image.fromarray(cast("np.ndarray", sample))  # arrays leave open where their channels are
        picture = picture_of(self.source, sample, self.image_key, where=where)
        if isinstance(picture, bytes):
            return decode_rgb(picture, where=where)
        return to_rgb(picture, where=where) if is_pillow(picture) else picture

    def _pixels(self, names: list[str], images: list[object]) -> npt.NDArray[np.float32]:
        """(examples, channels, height, width): the input of the model."""
        what = names[0] if len(names) == 1 else f"{names[0]} to {names[-1]}"
        if any(isinstance(image, (tuple, Mapping)) for image in images):
            raise ArgumentError(
                f"{what} are samples with several parts; they must be pixels alone",
                where="images",
                remedy="Of pairs (image, label) hand over the images alone, or name them with image_key=….",
            )
        if self.processor is not None:
            pixels = process(self.processor, images, what)
        else:
            each = [_as_pixels(image, name) for name, image in zip(names, images, strict=True)]
            pixels = (
                np.stack(each)
                if len({image.shape for image in each}) == 1
                else np.empty((len(each), 0, 0, 0), np.float32)
            )
        shape = self._shape[1:] or pixels.shape[1:]
        if pixels.shape[1:] != shape or not pixels.size:  # their patches would be other places
            raise ArgumentError(
                f"{what} have other shapes than the first image, {shape}; all must be equal",
                where="images",
                remedy="Crop or resize them to one size; an image processor does that.",
            )
        return pixels

    def _undecodable(self) -> dict[int, str]:
        """Positions of the images that do not decode, and why; decodes all of them."""

        def fault(sample_idx: int) -> str | None:
            try:
                self._decoded(sample_idx, self.source[sample_idx])
            except DocumentError as error:
                return error.message
            return None

        n_threads = _N_THREADS if shared_between_threads(self.source) else 1
        faults = enumerate(ahead(fault, range(len(self.source)), n_threads))
        skipped = {sample_idx: why for sample_idx, why in faults if why is not None}
        if skipped:
            shown = [f"{name_of(self.source, sample_idx)}: {why}" for sample_idx, why in [*skipped.items()][:3]]
            text = f"{len(skipped)} of {len(self.source)} images do not decode: {'; '.join(shown)}"
            if len(skipped) == len(self.source):
                raise ArgumentError(text, where="images", remedy="Check image_key, and whether these are images.")
            warnings.warn(f"{text}. They are left out", SaevStoreWarning, stacklevel=outside())
        return skipped


def _opened(images: Address | Source[object] | DataSet, storage_options: Mapping[str, object] | None) -> Source[object]:
    """The source of images; `ArgumentError` for one of token ids, and for an empty one."""
    if isinstance(images, (str, os.PathLike)):
        source = open_images(images, storage_options)
    else:
        source = cast("Source[object]", images) if isinstance(images, Source) else MapStyle(images)
    if len(source) < 1 or source.format in {"mmididx", "llmbatch"}:
        raise ArgumentError(
            f"{source.url or 'images'} has no images",
            where="images",
            remedy="There must be at least one. Token ids are recorded as texts: Texts(…).",
        )
    return source


def _is_in_memory(data: object) -> bool:
    """Return True if all samples are in memory already: a list, a tuple, an array of NumPy, memory maps included, or a tensor."""
    return isinstance(data, (list, tuple, np.ndarray)) or hasattr(data, "detach")


def _as_pixels(image: object, what: str) -> npt.NDArray[np.float32]:
    """An image as float32; `ArgumentError` if it is not an array of floats."""
    detach = getattr(image, "detach", None)
    try:
        found = cast("torch.Tensor", detach()) if callable(detach) else np.asarray(image)
    except ValueError as error:
        raise ArgumentError(f"{what} is not an array of numbers: {error}", where="images") from error
    name = dtype_name(found.dtype)
    if name is None or "float" not in name:
        raise ArgumentError(
            f"{what} has {name} numbers; pixels are normalised floats",
            where="images",
            remedy="Pass the model's image processor as processor=…, or normalise them.",
        )
    # NumPy has no bfloat16.
    return found.astype(np.float32, copy=False) if isinstance(found, np.ndarray) else found.float().cpu().numpy()
