"""Pixels that a model is given, by its own image processor, and the part of an image that they show."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Protocol, cast

import numpy as np

from saev_store.errors import ArgumentError
from saev_store.sources.places import Framing

if TYPE_CHECKING:
    import numpy.typing as npt

#: Classes of processors that resize the whole image, and then crop its centre, as their configuration has it.
_KNOWN = re.compile(r"(ViT|CLIP|Bit|Siglip|DeiT|Beit|DINOv3ViT)ImageProcessor(Pil|Fast)?")


class Processor(Protocol):
    """An image processor of `transformers`."""

    def __call__(self, *, images: Sequence[object], return_tensors: str) -> Mapping[str, npt.ArrayLike]: ...


def process(processor: Processor, images: Sequence[object], what: str) -> npt.NDArray[np.float32]:
    """The pixels of images, (images, channels, height, width), by the processor of a model."""
    try:
        pixels = np.asarray(processor(images=images, return_tensors="np")["pixel_values"], dtype=np.float32)
        if pixels.ndim < 1 or len(pixels) != len(images):
            raise ValueError(f"pixels of shape {pixels.shape} of {len(images)} images")
    except MemoryError:
        raise
    except Exception as error:  # processors raise many kinds of errors
        raise ArgumentError(
            f"{type(processor).__name__} makes no pixels of {what}: {type(error).__name__}: {error}",
            where="processor",
            remedy="Pass the image processor of the model, such as AutoImageProcessor.from_pretrained(…).",
        ) from error
    return pixels


def framing_of(processor: Processor | None) -> Framing | None:
    """The resizing and cropping of a processor; None if they are not known. Without one images are the model's input as they are."""
    if processor is None:
        return Framing()
    to_dict: Callable[[], Mapping[str, object]] | None = getattr(processor, "to_dict", None)
    if to_dict is None or not _KNOWN.fullmatch(type(processor).__name__):
        return None
    settings = to_dict()
    if settings.get("do_pad") or settings.get("crop_pct") is not None:
        return None
    try:
        resize = _size_of(settings["size"]) if settings.get("do_resize") else None
        crop = _size_of(settings["crop_size"]) if settings.get("do_center_crop") else None
    except (KeyError, TypeError, AttributeError):  # other keys, such as a limit of the longest edge
        return None
    return None if isinstance(crop, int) else Framing(resize, crop)


def _size_of(size: object) -> tuple[int, int] | int:
    """(height, width), or the shortest edge."""
    found = {key: value for key, value in cast("Mapping[str, int | None]", size).items() if value is not None}
    if {*found} == {"shortest_edge"}:
        return found["shortest_edge"]
    if {*found} != {"height", "width"}:
        raise KeyError(size)
    return found["height"], found["width"]
