"""Pixels that a model is given: its own image processor, and a look at whether they are normalised."""

from __future__ import annotations

import re
import warnings
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Protocol, cast

import numpy as np

from saev_store.errors import ArgumentError, SaevStoreError, SaevStoreWarning, brief, kind_of, outside
from saev_store.sources.framing import Framing

if TYPE_CHECKING:
    import numpy.typing as npt

#: Normalised pixels are at most this far from 0; those from 0 to 255 are not.
_MOST = 10.0
#: Classes of processors that resize the whole image, and then crop its centre, as their configuration has it.
_KNOWN = re.compile(r"(ViT|CLIP|Bit|Siglip|DeiT|Beit|DINOv3ViT)ImageProcessor(Pil|Fast)?")
#: A size with other keys, such as a limit of the longest edge.
_UNKNOWN = (0, 0)
_REMEDY = "Pass the model's image processor as processor=… of `Images`, or normalise them; any_range=True accepts them as they are."


class Processor(Protocol):
    """An image processor of `transformers`."""

    def __call__(self, *, images: Sequence[object], return_tensors: str) -> Mapping[str, npt.ArrayLike]: ...


def process(processor: Processor, images: Sequence[object], what: str) -> npt.NDArray[np.float32]:
    """The pixels of images, (images, channels, height, width), by the processor of a model.

    Raises:
        ArgumentError: it refuses them, or does not return pixels, one array for each image.
    """
    name = type(processor).__name__
    try:
        made = processor(images=images, return_tensors="np")
    except (SaevStoreError, MemoryError):
        raise
    except Exception as error:
        raise ArgumentError(f"{name} refuses {what}: {type(error).__name__}: {error}", where="processor") from error
    try:
        pixels = np.asarray(made["pixel_values"], dtype=np.float32)
        if pixels.ndim < 1 or len(pixels) != len(images):
            raise ValueError(f"pixels of shape {pixels.shape} of {len(images)} images")
    except (KeyError, TypeError, ValueError) as error:
        names = ", ".join(made) if hasattr(made, "keys") else kind_of(made)
        raise ArgumentError(
            f"{brief(name)} returns {names}; images are the array 'pixel_values', one for each image: {error}",
            where="processor",
            remedy="Pass the image processor of the model, such as AutoImageProcessor.from_pretrained(…).",
        ) from error
    return pixels


def check_range(pixels: npt.NDArray[np.floating], what: str, *, warn: bool) -> None:
    """Refuse pixels that cannot be normalised ones; warn of those from 0 to 1.

    Args:
        pixels: Floats, at least one.
        what: For messages.
        warn: Whether pixels from 0 to 1 are unusual.

    Raises:
        ArgumentError: a number is further from 0 than 10.

    Warns:
        SaevStoreWarning: they are from 0 to 1, and none is negative.
    """
    low, high = float(pixels.min()), float(pixels.max())
    found = f"{what} has pixels from {low:.3g} to {high:.3g} with the mean {float(pixels.mean()):.3g}"
    if max(-low, high) > _MOST:
        raise ArgumentError(
            f"{found}; normalised ones are between -{_MOST:.0f} and {_MOST:.0f}", where="images", remedy=_REMEDY
        )
    if warn and low >= 0 and 0 < high <= 1:
        warnings.warn(f"{found}, as if they were not normalised. {_REMEDY}", SaevStoreWarning, stacklevel=outside())


def framing_of(processor: Processor | None) -> Framing | None:
    """The resizing and cropping of a processor; None for one of which that is not known.

    Without a processor images are the model's input as they are.
    """
    if processor is None:
        return Framing()
    to_dict: Callable[[], Mapping[str, object]] | None = getattr(processor, "to_dict", None)
    if to_dict is None or not _KNOWN.fullmatch(type(processor).__name__):
        return None
    settings = to_dict()
    if settings.get("do_pad") or settings.get("crop_pct") is not None:
        return None
    resize = _size_of(settings.get("size")) if settings.get("do_resize") else None
    crop = _size_of(settings.get("crop_size")) if settings.get("do_center_crop") else None
    if resize is _UNKNOWN or crop is _UNKNOWN or isinstance(crop, int):
        return None
    return Framing(resize, crop)


def _size_of(size: object) -> tuple[int, int] | int:
    """(height, width), or the shortest edge."""
    given = cast("Mapping[str, object]", size if isinstance(size, Mapping) else {})
    found = {key: value for key, value in given.items() if isinstance(value, int)}
    if {*found} == {"shortest_edge"}:
        return found["shortest_edge"]
    if {*found} == {"height", "width"}:
        return found["height"], found["width"]
    return _UNKNOWN
