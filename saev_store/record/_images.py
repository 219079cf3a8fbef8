"""Images as a source of examples: `Images` of a random-access data set, `ImageBatches` of any iterable."""

from __future__ import annotations

import itertools
from abc import abstractmethod
from collections.abc import Mapping
from typing import TYPE_CHECKING, Protocol, TypeAlias, cast

import numpy as np

from saev_store.core.dtypes import dtype_name
from saev_store.errors import ArgumentError
from saev_store.record._adapters import VisionAdapter
from saev_store.record._examples import Batch, ExampleSource, Geometry, Recorded, check_batch_size
from saev_store.record._identity import config_digest

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Sequence

    import numpy.typing as npt
    import torch

    from saev_store.record._adapters import Adapter

    Labels: TypeAlias = npt.NDArray[np.uint8]
    PixelBatch: TypeAlias = npt.NDArray[np.float32] | torch.Tensor


class MapStyle(Protocol):
    """A map-style data set: a list, an array, or a torch data set."""

    def __len__(self) -> int: ...

    def __getitem__(self, example: int, /) -> object: ...


class Processor(Protocol):
    """An image processor of `transformers`."""

    def __call__(self, *, images: Sequence[object], return_tensors: str) -> Mapping[str, npt.ArrayLike]: ...


class _ImageSource(ExampleSource):
    """What both kinds of images share: an example is an image."""

    def __init__(
        self, n_examples: int, cls_token: bool | None, labels: Labels | None, data: Mapping[str, object] | None
    ) -> None:
        self.n_examples, self.cls_token, self.labels = n_examples, cls_token, labels
        self.data = {"__class__": type(self).__name__} if data is None else dict(data)

    def describe(self) -> dict[str, object]:
        return dict(self.data)

    def geometry(self, adapter: Adapter) -> Geometry:
        if not isinstance(adapter, VisionAdapter):
            raise ArgumentError(
                f"{type(adapter.model).__name__} is a model of tokens; these are images",
                where="source",
                remedy="Use Texts.",
            )
        content = adapter.content_tokens(self._shape())
        if self.labels is not None and self.labels.shape != (self.n_examples, content):
            raise ArgumentError(
                f"labels has the shape {self.labels.shape}; one per patch is {(self.n_examples, content)}",
                where="labels",
            )
        return Geometry(
            self.n_examples,
            content,
            adapter.keeps_cls(self.cls_token),
            {} if self.labels is None else {"labels": "uint8"},
            identity=self._identity(),
        )

    def assemble(self, computed: Iterable[tuple[Batch, torch.Tensor]], start: int) -> Iterator[Recorded]:
        del start  # batches are whole examples
        for batch, acts in computed:
            labels = {} if self.labels is None else {"labels": self.labels[batch.first : batch.first + len(acts)]}
            yield Recorded(batch.first, acts, labels)
            del batch, acts  # not held while the next ones are waited for

    @abstractmethod
    def _shape(self) -> tuple[int, ...]:
        """The shape of a batch, (batch, channels, height, width)."""

    def _identity(self) -> dict[str, object]:
        return {}


class Images(_ImageSource):
    """Images of a random-access data set, in batches that are cut at multiples of `batch_size` regardless of the start.

    A resumed recording therefore runs the same forward passes as an uninterrupted one, and loads no image of a batch that it
    does not run.

    Args:
        images: `images[i]` is one example's pixels, (channels, height, width), normalised as the model wants it; or with a
            `processor` whatever that takes, such as images of Pillow.
        batch_size: Images in a batch; the last one may have fewer.
        processor: An image processor of `transformers`, which makes pixels of a list of images. It is part of the recording's
            identity.
        cls_token: Whether to record the CLS token; None: if the model has one.
        labels: (n_examples, content tokens) uint8, a label for each patch; may be a memory map.
        data: Description of the data set for the metadata; any JSON object.

    >>> images = Images(np.zeros((5, 3, 8, 8)), batch_size=2)
    >>> [(batch.first, batch.inputs[0].shape[0]) for batch in images.batches(3, 5)]
    [(2, 2), (4, 1)]
    """

    def __init__(
        self,
        images: MapStyle,
        batch_size: int = 32,
        *,
        processor: Processor | None = None,
        cls_token: bool | None = None,
        labels: Labels | None = None,
        data: Mapping[str, object] | None = None,
    ) -> None:
        self.images, self.batch_size, self.processor = images, check_batch_size(batch_size), processor
        if len(images) < 1:
            raise ArgumentError("images is empty; there must be at least one example", where="images")
        super().__init__(len(images), cls_token, labels, data)
        self._example_shape: tuple[int, ...] | None = None

    def batches(self, start: int, end: int) -> Iterator[Batch]:
        """The batches from the one that contains example `start` to the one that contains `end - 1`."""
        for first in range(start // self.batch_size * self.batch_size, end, self.batch_size):
            last = min(first + self.batch_size, self.n_examples)
            yield Batch((self._pixels(range(first, last)),), first)

    def _pixels(self, examples: range) -> npt.NDArray[np.float32]:
        """(examples, channels, height, width): what the model is given."""
        images = [self.images[i] for i in examples]
        for i, image in zip(examples, images, strict=True):
            if isinstance(image, (tuple, Mapping)):
                raise _not_alone(f"image {i}", cast("object", image))
        if self.processor is not None:
            made = self.processor(images=images, return_tensors="np")["pixel_values"]
            return np.asarray(made, dtype=np.float32)
        pixels = [_as_pixels(image, f"image {i}") for i, image in zip(examples, images, strict=True)]
        shapes = {image.shape for image in pixels}
        if len(shapes) != 1:
            raise ArgumentError(
                f"the images {examples[0]} to {examples[-1]} have the shapes {sorted(shapes)}; they must be equal",
                where="images",
            )
        return np.stack(pixels)

    def _shape(self) -> tuple[int, ...]:
        if self._example_shape is None:
            self._example_shape = self._pixels(range(1)).shape
        return self._example_shape

    def _identity(self) -> dict[str, object]:
        if self.processor is None:
            return {"batch_size": self.batch_size}
        made_by = {"class": type(self.processor).__name__, "config": config_digest(self.processor)}
        return {"batch_size": self.batch_size, "processor": made_by}


class ImageBatches(_ImageSource):
    """Images that come in batches, for example from a `DataLoader`.

    To resume, pass an iterable that starts at its beginning: batches that are recorded are read, and not run.

    Args:
        pixels: Yields (batch, channels, height, width), normalised as the model wants it.
        n_examples: Number of images in all batches together: the metadata is written before they are read.
        cls_token: As of `Images`.
        labels: As of `Images`.
        data: As of `Images`.
    """

    def __init__(
        self,
        pixels: Iterable[PixelBatch],
        n_examples: int,
        *,
        cls_token: bool | None = None,
        labels: Labels | None = None,
        data: Mapping[str, object] | None = None,
    ) -> None:
        self._pixels = pixels
        self._begun: Iterator[PixelBatch] | None = (
            None  # what is left after a look at the first batch, which is put back
        )
        super().__init__(n_examples, cls_token, labels, data)

    def batches(self, start: int, end: int) -> Iterator[Batch]:
        """The batches of which at least one example is from `start` to `end - 1`."""
        begun, self._begun = self._begun, None
        first = 0
        for pixels in self._pixels if begun is None else begun:
            _check_batch(pixels, first)
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
            _check_batch(pixels, 0)
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


def _check_batch(pixels: object, first: int) -> None:
    """Refuse a batch that is no array of floats."""
    what = f"the batch from image {first} on"
    if not hasattr(pixels, "shape"):
        raise _not_alone(what, pixels)
    _check_floats(getattr(pixels, "dtype", None), what)


def _check_floats(dtype: object, what: str) -> None:
    name = dtype_name(dtype)
    if name is None or "float" not in name:
        raise ArgumentError(
            f"{what} has {name} numbers; pixels are normalised floats",
            where="images",
            remedy="Pass the model's image processor as processor=… of `Images`, or normalise them.",
        )


def _not_alone(what: str, value: object) -> ArgumentError:
    """The error for pixels that come with something else, such as a label."""
    return ArgumentError(
        f"{what} is a {type(value).__name__}; it must be pixels alone",
        where="images",
        remedy="Of pairs (image, label) hand over the images alone.",
    )
