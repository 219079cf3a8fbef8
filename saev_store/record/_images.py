"""Images as a source of examples: `Images` of a random-access data set, `ImageBatches` of any iterable."""

from __future__ import annotations

import itertools
from abc import abstractmethod
from collections.abc import Mapping
from typing import TYPE_CHECKING, Literal, TypeAlias, cast

import numpy as np

from saev_store.core.arguments import check_flag
from saev_store.core.dtypes import dtype_name
from saev_store.errors import ArgumentError, brief, kind_of
from saev_store.record._adapters import VisionAdapter
from saev_store.record._examples import Batch, ExampleSource, Geometry, Recorded, check_batch_size
from saev_store.record._in_memory import digest_rows
from saev_store.record._patch_labels import Masks, as_labels
from saev_store.record._pictures import Pictures
from saev_store.record._processing import check_range, framing_of, normalises, process, settings_digest
from saev_store.sources import recorded_from
from saev_store.sources.pictures import name_of, picture_px

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator

    import numpy.typing as npt
    import torch

    from saev_store.core.layout import IntArray
    from saev_store.record._adapters import Adapter
    from saev_store.record._pictures import Address, OnBadImage
    from saev_store.record._processing import Processor
    from saev_store.sources import Source
    from saev_store.sources.map_style import DataSet
    from saev_store.sources.pictures import ImageKey

    Labels: TypeAlias = npt.NDArray[np.uint8]
    PixelBatch: TypeAlias = npt.NDArray[np.float32] | torch.Tensor


class _ImageSource(ExampleSource):
    """What both kinds of images share: an example is an image."""

    def __init__(
        self, n_examples: int, cls_token: bool | None, labels: Labels | None, data: Mapping[str, object] | None
    ) -> None:
        if data is not None and not isinstance(data, Mapping):  # pyright: ignore[reportUnnecessaryIsInstance]  # callers may not check types
            raise ArgumentError(f"data is {brief(data)}; it must be a mapping", where="data")
        self.n_examples, self.cls_token = n_examples, cls_token
        self.labels = None if labels is None else as_labels(labels)
        self._input_shape: tuple[int, ...] = ()  # (channels, height, width) of every image, when the first one was seen
        self.data = {"__class__": type(self).__name__} if data is None else dict(data)

    def describe(self) -> dict[str, object]:
        return dict(self.data)

    def digests(self) -> dict[str, object]:
        return {} if self.labels is None else {"labels": {"digest": digest_rows(self.labels, self.n_examples)}}

    def geometry(self, adapter: Adapter) -> Geometry:
        if not isinstance(adapter, VisionAdapter):
            raise ArgumentError(
                f"{type(adapter.model).__name__} is a model of tokens; these are images",
                where="source",
                remedy="Give it texts, or choose a model of images.",
            )
        shape = self._shape()
        content = adapter.content_tokens(shape)
        self._input_shape = shape[1:]
        self._look_at(shape, adapter.patch_px)
        if self.labels is not None and self.labels.shape != (self.n_examples, content):
            raise ArgumentError(
                f"labels has the shape {self.labels.shape}; one per patch is {(self.n_examples, content)}",
                where="labels",
            )
        return Geometry(
            self.n_examples,
            content,
            adapter.keeps_cls(self.cls_token),
            {"labels": "uint8"} if self._has_labels() else {},
            identity=self._identity(),
        )

    def assemble(self, computed: Iterable[tuple[Batch, torch.Tensor]], start: int) -> Iterator[Recorded]:
        del start  # batches are whole examples
        for batch, acts in computed:
            end = batch.first + len(acts)
            labels = batch.token_arrays if self.labels is None else {"labels": self.labels[batch.first : end]}
            yield Recorded(batch.first, acts, labels)
            del batch, acts  # not held while the next ones are waited for

    def _check_shape(self, shape: tuple[int, ...], what: str) -> None:
        """Refuse images of another size, whose patches would be other places, also where there are as many of them."""
        if self._input_shape and shape[1:] != self._input_shape:
            raise ArgumentError(
                f"{what} have the shape {shape[1:]}, the first image has {self._input_shape}; all must be equal",
                where="images",
                remedy="Crop or resize them to one size; an image processor does that.",
            )

    @abstractmethod
    def _shape(self) -> tuple[int, ...]:
        """The shape of a batch, (batch, channels, height, width)."""

    def _has_labels(self) -> bool:
        return self.labels is not None

    def _look_at(self, shape: tuple[int, ...], patch_px: tuple[int, int]) -> None:
        """Learn the shape of a batch, and the height and width of a patch."""

    def _identity(self) -> dict[str, object]:
        return {}


class Images(_ImageSource):
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
        processor: An image processor of `transformers`, which makes pixels of a list of images. It is part of the recording's
            identity.
        cls_token: Whether to record the CLS token; None: if the model has one.
        labels: (n_examples, content tokens) uint8, a label for each patch; may be a memory map.
        masks: Instead of `labels`: for each sample a label for each pixel. A map-style data set of integers (height, width) or of
            images with one channel, or the address of a folder with the masks under the names of the images. The label of a
            patch is the most frequent one, of equally frequent ones the smallest.
        image_key: Of samples with several parts the name of the image, or its place in a pair (image, label).
        on_bad_image: `"raise"`, or `"skip"` to leave out images that do not decode. All images are then decoded once before
            recording begins. Which are left out is part of the metadata.
        any_range: Accept pixels that do not look normalised.
        data: Description of the data set for the metadata, any JSON object; None: what `store.origin` needs.
        digest: What the digests of files cover that are part of the identity, see `ImageFolder.describe`: `"sampled"` reads some of
            the bytes, `"full"` all of them.
        storage_options: Options of the file system of an address.

    Attributes:
        source: Where the samples are from.
        skipped: Positions of the samples that are left out, and why.

    Raises:
        ArgumentError: an argument breaks a rule, or there is no image.
        NotFoundError: there is nothing at an address, or a mask is missing.

    Warns:
        SaevStoreWarning: images are left out, or pixels look as if they were not normalised.

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
        on_bad_image: OnBadImage = "raise",
        any_range: bool = False,
        data: Mapping[str, object] | None = None,
        digest: Literal["sampled", "full"] = "sampled",
        storage_options: Mapping[str, object] | None = None,
    ) -> None:
        self.batch_size, self.processor = check_batch_size(batch_size), processor
        self._any_range = check_flag(any_range, name="any_range")
        if masks is not None and labels is not None:
            raise ArgumentError(
                "masks and labels both say what patches show", where="masks", remedy="Pass one of them."
            )
        self._pictures = Pictures(images, image_key, on_bad_image, digest, storage_options)
        super().__init__(len(self._pictures), cls_token, labels, data)
        self._has_data, self._masks = data is not None, None
        if masks is not None:
            used = self._pictures.samples(0, self.n_examples).tolist()
            self._masks = Masks(masks, self.source, used, storage_options)
        self._shape_of_batch: tuple[int, ...] | None = None
        self._patch_px: tuple[int, int] | None = None
        self._warns = normalises(processor)

    @property
    def source(self) -> Source[object]:
        """Where the samples are from."""
        return self._pictures.source

    @property
    def skipped(self) -> Mapping[int, str]:
        """Positions of the samples that are left out, and why."""
        return self._pictures.skipped

    def describe(self) -> dict[str, object]:
        if self._has_data:
            return dict(self.data)
        if self._shape_of_batch is None or self._patch_px is None:
            raise ArgumentError("the model is not known yet", where="source", remedy="Call geometry(adapter) first.")
        (height, width), (high, wide) = self._shape_of_batch[2:], self._patch_px
        return recorded_from(
            self.source,
            skipped=list(self.skipped),
            patches=(height // high, width // wide),
            image_px=(height, width),
            patch_px=(high, wide),
            framing=framing_of(self.processor),
            image_key=self._pictures.image_key,
            digest=self._pictures.digest_scope,
        )

    def batches(self, start: int, end: int) -> Iterator[Batch]:
        """The batches from the one that contains example `start` to the one that contains `end - 1`."""
        for first in range(start // self.batch_size * self.batch_size, end, self.batch_size):
            yield self._batch(first, min(first + self.batch_size, self.n_examples))

    def _batch(self, first: int, last: int) -> Batch:
        samples = self._pictures.samples(first, last)
        images = self._pictures.images(samples)
        pixels = self._pixels(images, samples)
        if self._masks is None or self._patch_px is None:
            return Batch((pixels,), first)
        framing = framing_of(self.processor)
        labels = [
            self._masks.labels(
                sample,
                input_px=(pixels.shape[2], pixels.shape[3]),
                patch_px=self._patch_px,
                original_px=picture_px(image, where="images"),
                framing=framing,
            )
            for sample, image in zip(samples.tolist(), images, strict=True)
        ]
        return Batch((pixels,), first, {"labels": np.stack(labels)})

    def _pixels(self, images: list[object], samples: IntArray) -> npt.NDArray[np.float32]:
        """(examples, channels, height, width): what the model is given."""
        names = [name_of(self.source, int(sample)) for sample in samples]
        for name, image in zip(names, images, strict=True):
            if isinstance(image, (tuple, Mapping)):
                raise _not_alone(name, cast("object", image))
        what = names[0] if len(names) == 1 else f"{names[0]} to {names[-1]}"
        if self.processor is not None:
            pixels = process(self.processor, images, what)
        else:
            each = [_as_pixels(image, name) for name, image in zip(names, images, strict=True)]
            shapes = {image.shape for image in each}
            if len(shapes) != 1:
                raise ArgumentError(f"{what} have the shapes {sorted(shapes)}; they must be equal", where="images")
            pixels = np.stack(each)
        self._check_shape(pixels.shape, what)
        if not self._any_range and pixels.size:
            check_range(pixels, what, warn=self._warns)
            self._warns = False
        return pixels

    def _shape(self) -> tuple[int, ...]:
        if self._shape_of_batch is None:
            samples = self._pictures.samples(0, 1)
            self._shape_of_batch = self._pixels(self._pictures.images(samples), samples).shape
        return self._shape_of_batch

    def _has_labels(self) -> bool:
        return self.labels is not None or self._masks is not None

    def _look_at(self, shape: tuple[int, ...], patch_px: tuple[int, int]) -> None:
        self._shape_of_batch, self._patch_px = shape, patch_px

    def _identity(self) -> dict[str, object]:
        said: dict[str, object] = {"batch_size": self.batch_size}
        if self.processor is not None:
            said["processor"] = {"class": type(self.processor).__name__, "config": settings_digest(self.processor)}
        if self._has_data and self._pictures.image_key is not None:  # else the description of the source has it
            said["image_key"] = self._pictures.image_key
        if self.skipped:
            said["skipped"] = list(self.skipped)
        return said

    def digests(self) -> dict[str, object]:
        said, images = super().digests(), self._pictures.digest(is_described=not self._has_data)
        if images is not None:
            said["images"] = {"digest": images}
        if self._masks is not None:
            said["masks"] = self._masks.describe(self._pictures.digest_scope)
        return said


class ImageBatches(_ImageSource):
    """Images that come in batches, for example from a `DataLoader`.

    To resume, pass an iterable that starts at its beginning: batches that are recorded are read, and not run.

    Args:
        pixels: Yields (batch, channels, height, width), normalised as the model wants it.
        n_examples: Number of images in all batches together: the metadata is written before they are read.
        cls_token: As of `Images`.
        labels: As of `Images`.
        any_range: As of `Images`.
        data: Description of the data set for the metadata, any JSON object.
    """

    def __init__(
        self,
        pixels: Iterable[PixelBatch],
        n_examples: int,
        *,
        cls_token: bool | None = None,
        labels: Labels | None = None,
        any_range: bool = False,
        data: Mapping[str, object] | None = None,
    ) -> None:
        self._pixels, self._any_range = pixels, check_flag(any_range, name="any_range")
        self._begun: Iterator[PixelBatch] | None = (
            None  # what is left after a look at the first batch, which is put back
        )
        super().__init__(n_examples, cls_token, labels, data)

    def batches(self, start: int, end: int) -> Iterator[Batch]:
        """The batches of which at least one example is from `start` to `end - 1`."""
        begun, self._begun = self._begun, None
        first = 0
        for pixels in self._pixels if begun is None else begun:
            _check_batch(pixels, first, any_range=self._any_range)
            self._check_shape(tuple(pixels.shape), f"the images from {first} on")
            last = first + len(pixels)
            if last > self.n_examples:
                raise ArgumentError(
                    f"there are at least {last} examples, but n_examples is {self.n_examples}", where="source"
                )
            if last > start:
                yield Batch((pixels,), first)
            first = last
            if last >= end and end < self.n_examples:
                return
        if first < end:
            raise ArgumentError(
                f"there are only {first} examples, but n_examples is {self.n_examples}",
                where="source",
                remedy="The store is unfinished; call again with all of them.",
            )

    def _shape(self) -> tuple[int, ...]:
        rest = iter(self._pixels) if self._begun is None else self._begun
        for pixels in rest:
            _check_batch(pixels, 0, any_range=self._any_range)
            self._begun = itertools.chain([pixels], rest)
            return tuple(pixels.shape)
        raise ArgumentError("there are no batches; there must be at least one", where="source")


def _as_pixels(image: object, what: str) -> npt.NDArray[np.float32]:
    """An image as float32; `ArgumentError` for one that is no array of floats."""
    detach = getattr(image, "detach", None)
    try:
        found = cast("torch.Tensor", detach()) if callable(detach) else np.asarray(image)
    except ValueError as error:
        raise ArgumentError(f"{what} is no array of numbers: {error}", where="images") from error
    _check_floats(found.dtype, what)
    # NumPy has no bfloat16.
    return found.astype(np.float32, copy=False) if isinstance(found, np.ndarray) else found.float().cpu().numpy()


def _check_batch(pixels: PixelBatch, first: int, *, any_range: bool) -> None:
    """Refuse a batch that is no array of normalised floats; the first one may give a warning."""
    what = f"the batch from image {first} on"
    if not hasattr(pixels, "shape"):
        raise _not_alone(what, pixels)
    _check_floats(getattr(pixels, "dtype", None), what)
    if not any_range and 0 not in pixels.shape:
        check_range(pixels, what, warn=first == 0)


def _check_floats(dtype: object, what: str) -> None:
    name = dtype_name(dtype)
    if name is None or "float" not in name:
        raise ArgumentError(
            f"{what} has {name} numbers; pixels are normalised floats",
            where="images",
            remedy="Pass the model's image processor as processor=…, or normalise them.",
        )


def _not_alone(what: str, value: object) -> ArgumentError:
    """The error for pixels that come with something else, such as a label."""
    return ArgumentError(
        f"{what} is {kind_of(value)}; it must be pixels alone",
        where="images",
        remedy="Of pairs (image, label) hand over the images alone, or name them with image_key=….",
    )
