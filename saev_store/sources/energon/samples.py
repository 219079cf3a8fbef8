"""The sample types that Energon's specification lists, as plain data classes. Images are NumPy arrays."""

from __future__ import annotations

import dataclasses
from collections.abc import Collection, Mapping
from dataclasses import dataclass

import numpy as np

from saev_store.errors import DocumentError, brief

#: The class in `dataset.yaml` of samples whose parts are not decoded.
CRUDE = "CrudeWebdataset"


@dataclass(kw_only=True)
class Sample:
    """The fields of all samples.

    Attributes:
        __key__: Key of the sample in its data set.
        __restore_key__: Its origin: the URL of the data set, the shard, and its number in the shard.
        __subflavors__: Set by metadata sets of Energon; None here.
    """

    __key__: str
    __restore_key__: tuple[str | int, ...] = ()
    __subflavors__: dict[str, object] | None = None

    @classmethod
    def fields(cls) -> dict[str, bool]:
        """The fields that a field map may fill, and True for those that it has to fill."""
        fields = dataclasses.fields(cls)
        return {each.name: each.default is dataclasses.MISSING for each in fields if not each.name.startswith("__")}

    @classmethod
    def check_fields(cls, names: Collection[str], *, where: str) -> None:
        """Check that a field map fills only fields of this type, and all required ones.

        Raises:
            DocumentError: it does not.
        """
        fields = cls.fields()
        odd = [f"has no field {brief(name)}" for name in names if name not in fields]
        odd += [f"needs {name!r}" for name, is_required in fields.items() if is_required and name not in names]
        if odd:
            raise DocumentError(
                f"field_map does not fit: {cls.__name__} {', '.join(odd[:8])}",
                where=where,
                remedy=f"Its fields are {', '.join(fields)}.",
            )


@dataclass(kw_only=True)
class CrudeSample(Sample):
    """Parts as they are stored, by name."""

    parts: Mapping[str, bytes]


@dataclass(kw_only=True)
class CaptioningSample(Sample):
    """An image and its caption."""

    image: np.ndarray
    caption: str


@dataclass(kw_only=True)
class ImageSample(Sample):
    """An image."""

    image: np.ndarray


@dataclass(kw_only=True)
class ImageClassificationSample(Sample):
    """An image and its class."""

    image: np.ndarray
    label: int | None = None
    label_name: str | None = None


@dataclass(kw_only=True)
class InterleavedSample(Sample):
    """Images and texts in a sequence."""

    sequence: list[np.ndarray | str]


@dataclass(kw_only=True)
class MultiChoiceVQASample(Sample):
    """An image, a question, answers to choose from, and which one is right."""

    image: np.ndarray
    context: str
    choices: list[str] | None = None
    correct_choice_idx: int | None = None


@dataclass(kw_only=True)
class OCRSample(Sample):
    """An image and the text in it; boxes are (n, 4 or 5): x, y, width, height and perhaps a confidence."""

    image: np.ndarray
    text: str
    block_boxes: np.ndarray | None = None
    block_classes: np.ndarray | list[str] | None = None
    block_text: list[str] | None = None
    lines_boxes: np.ndarray | None = None
    lines_text: list[str] | None = None
    words_boxes: np.ndarray | None = None
    words_text: list[str] | None = None
    chars_boxes: np.ndarray | None = None
    chars_text: list[str] | None = None


@dataclass(kw_only=True)
class TextSample(Sample):
    """A text."""

    text: str


@dataclass(kw_only=True)
class VidQASample(Sample):
    """A video, encoded, with a question and answers."""

    video: bytes
    context: str
    answers: list[str] | None = None
    answer_weights: np.ndarray | None = None


@dataclass(kw_only=True)
class VQASample(Sample):
    """An image, a question and answers."""

    image: np.ndarray
    context: str
    answers: list[str] | None = None
    answer_weights: np.ndarray | None = None


@dataclass(kw_only=True)
class VQAOCRSample(Sample):
    """An image, the text in it, a question and answers."""

    image: np.ndarray
    context: str
    text: str
    answers: list[str] | None = None
    answer_weights: np.ndarray | None = None
    words_boxes: np.ndarray | None = None
    words_text: list[str] | None = None


#: By the names that `dataset.yaml` uses.
SAMPLE_TYPES: dict[str, type[Sample]] = {
    each.__name__: each
    for each in (
        Sample, CaptioningSample, ImageSample, ImageClassificationSample, InterleavedSample,
        MultiChoiceVQASample, OCRSample, TextSample, VidQASample, VQASample, VQAOCRSample,
    )
}  # fmt: skip

#: Fields whose lists of numbers become arrays.
_ARRAYS = ("answer_weights", "block_boxes", "lines_boxes", "words_boxes", "chars_boxes")


def build(
    kind: type[Sample], values: Mapping[str, object], *, key: str, restore_key: tuple[str | int, ...], where: str
) -> Sample:
    """A sample of one of the types, from its fields.

    Raises:
        DocumentError: a field that should be an array is something else.
    """
    fields: dict[str, object] = dict(values)
    for name in _ARRAYS:
        if isinstance(fields.get(name), list):
            try:
                array = np.asarray(fields[name])
            except ValueError:
                array = np.asarray(None)
            if array.dtype.kind not in "iufb":
                raise DocumentError(f"{name} is {brief(values[name])}; it must be numbers in even rows", where=where)
            fields[name] = array
    return kind(__key__=key, __restore_key__=restore_key, **fields)  # type: ignore[arg-type]  # the fields are those of the kind that was chosen
