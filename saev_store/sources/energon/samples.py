"""Sample types of Energon's specification, and the field maps that fill them from parts: `image: jpg,png`, `caption: json[caption]`."""

from __future__ import annotations

import dataclasses
import io
import math
import re
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from typing import Literal, TypeAlias, cast

import numpy as np
import numpy.typing as npt

from saev_store._runtime.optional import need
from saev_store.documents import parse_json
from saev_store.errors import ArgumentError, DocumentError, SaevStoreError, brief
from saev_store.sources.pixels import FORMATS, opened

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


@dataclass(kw_only=True)
class CrudeSample(Sample):
    """Parts as they are stored, by name."""

    parts: Mapping[str, bytes]


_ANSWERS = "answers answer_weights"
#: Fields that a sample must have, and others.
_FIELDS = {
    "CaptioningSample": ("image caption", ""),
    "ImageSample": ("image", ""),
    "ImageClassificationSample": ("image", "label label_name"),
    "InterleavedSample": ("sequence", ""),
    "MultiChoiceVQASample": ("image context", "choices correct_choice_idx"),
    "OCRSample": (
        "image text",
        "block_boxes block_classes block_text lines_boxes lines_text words_boxes words_text chars_boxes chars_text",
    ),
    "TextSample": ("text", ""),
    "VidQASample": ("video context", _ANSWERS),
    "VQASample": ("image context", _ANSWERS),
    "VQAOCRSample": ("image context text", f"{_ANSWERS} words_boxes words_text"),
}


def _made(name: str, required: str, optional: str) -> type[Sample]:
    fields = [(each, "object") for each in required.split()]
    others = [(each, "object", dataclasses.field(default=None)) for each in optional.split()]
    there = {"__module__": __name__}
    made = dataclasses.make_dataclass(name, [*fields, *others], bases=(Sample,), kw_only=True, namespace=there)
    return cast("type[Sample]", made)


#: Data classes by the names that `dataset.yaml` uses.
SAMPLE_TYPES: dict[str, type[Sample]] = {
    "Sample": Sample,
    **{name: _made(name, *each) for name, each in _FIELDS.items()},
}


globals().update(SAMPLE_TYPES)  # where `pickle` looks for them


def check_fields(sample_type: str, names: Collection[str], *, where: str) -> None:
    """Raise `DocumentError` unless a field map fills only fields of a type, and all required ones."""
    required, optional = (each.split() for each in _FIELDS.get(sample_type, ("", "")))
    if not set(required) <= set(names) <= {*required, *optional}:
        rule = f"{sample_type} has the fields {', '.join([*required, *optional])}"
        raise DocumentError(f"field_map has {', '.join(names) or 'nothing'}; {rule}", where=where)


# -- field maps --------------------------------------------------------------------------------------------------------

#: An image decodes to uint8 (height, width, 3), or stays bytes.
Images = Literal["rgb8", "bytes"]
_MAX_JSON_NBYTES = 256 << 20
_OPTION = re.compile(r"([^\[\]]+)((?:\[[^\[\]]+\])*)")
_MISSING = object()


#: The origin of a field: alternatives, each a part and the keys to follow inside it.
FieldPath: TypeAlias = tuple[tuple[str, tuple[str, ...]], ...]


def parse_path(text: str, *, where: str) -> FieldPath:
    """The origin that a text such as `json[caption][0],txt` describes; `ArgumentError` for another text."""
    matches = [_OPTION.fullmatch(option.strip()) for option in text.split(",")]
    if None in matches:
        raise ArgumentError(f"{brief(text)} is not a path such as 'jpg,png' or 'json[caption]'", where=where)
    return tuple((match[1], tuple(re.findall(r"[^\[\]]+", match[2]))) for match in matches if match)


def resolve(
    path: FieldPath, parts: Mapping[str, bytes], *, where: str, images: Images = "rgb8", is_optional: bool = False
) -> object:
    """The value of a field: that of the first alternative that the sample has; `DocumentError`, or None, if it has none."""
    for part, keys in path:
        if part in parts:
            found = _follow(decode(part, parts[part], where=where, images=images), keys)
            if found is not _MISSING:
                return found
    if is_optional:
        return None
    wanted = " or ".join(part + "".join(f"[{key}]" for key in keys) for part, keys in path)
    raise DocumentError(f"the sample has no {brief(wanted)}; its parts are {', '.join(parts) or 'none'}", where=where)


def _follow(value: object, keys: tuple[str, ...]) -> object:
    for key in keys:
        if isinstance(value, dict):
            value = cast("dict[object, object]", value).get(key, _MISSING)
        elif isinstance(value, list) and key.isascii() and key.isdigit() and len(key) < 19:
            items = cast("list[object]", value)
            value = items[int(key)] if int(key) < len(items) else _MISSING
        else:
            return _MISSING
    return value


def decode(part: str, raw: bytes, *, where: str, images: Images = "rgb8") -> object:
    """The value of a part, decoded by the last ending of its name; bytes where no safe decoder is known.

    Pickles (`.pyd`, `.pkl`, `.pth`) stay bytes, and so does everything else that is not listed here.
    """
    try:
        match part.rpartition(".")[2].lower():
            case "json" | "jsn":
                return parse_json(raw, where=where, max_nbytes=_MAX_JSON_NBYTES)
            case "txt" | "text" | "transcript":
                return raw.decode()
            case "cls" | "cls2" | "index" | "inx" | "id":
                return int(raw)
            case "npy":
                return _array(raw)
            case "mp" | "msg":
                need("msgpack", install="saev-store[energon]", where=where)
                import msgpack

                return cast("object", msgpack.unpackb(raw, strict_map_key=False, ext_hook=msgpack.ExtType))  # pyright: ignore[reportUnknownMemberType]  # the stubs
            case kind if images != "bytes" and kind in FORMATS:
                with opened(raw, where=where) as image:
                    return np.asarray(image.convert("RGB"))
            case _:
                return raw
    except (ValueError, OverflowError, EOFError, RecursionError, KeyError, TypeError, OSError) as error:
        why = error.message if isinstance(error, SaevStoreError) else str(error)
        message = f"part {brief(part)} does not decode: {why or type(error).__name__}"
        raise DocumentError(message, where=where) from None


def _array(raw: bytes) -> npt.NDArray[np.generic]:
    """The numbers of a `.npy` file, whose header is compared with its size first."""
    stream = io.BytesIO(raw)
    try:
        version = np.lib.format.read_magic(stream)
        read = np.lib.format.read_array_header_1_0 if version == (1, 0) else np.lib.format.read_array_header_2_0
        shape, is_fortran, dtype = read(stream)
    except Exception as error:  # NumPy lets through what Python's parser of literals raises, MemoryError too
        raise ValueError(brief(str(error))) from None
    if stream.tell() + math.prod(shape) * dtype.itemsize != len(raw) or not dtype.itemsize or dtype.hasobject:
        raise ValueError(f"{dtype} of {brief(shape)} is not what {len(raw):,} bytes hold")
    return np.ndarray(shape, dtype, raw, stream.tell(), order="F" if is_fortran else "C").copy()
