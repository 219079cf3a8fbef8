"""Decodes parts, and finds the fields of a sample in them: `image: jpg,png`, `caption: json[caption]`."""

# msgpack has no stubs.
# pyright: reportMissingTypeStubs=false
from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal, cast

import numpy as np

from saev_store._runtime.optional import need
from saev_store.documents import parse_json
from saev_store.errors import ArgumentError, DocumentError, SaevStoreError, brief
from saev_store.problems import Problem
from saev_store.sources.npy_header import parse_npy_header
from saev_store.sources.pixels import FORMATS, opened

#: An image decodes to uint8 (height, width, 3), to float32 (3, height, width) from 0 to 1 as in Energon, or stays bytes.
Images = Literal["rgb8", "torchrgb", "bytes"]
IMAGES: tuple[Images, ...] = ("rgb8", "torchrgb", "bytes")
_MAX_JSON_NBYTES = 256 << 20
_OPTION = re.compile(r"([^\[\]]+)((?:\[[^\[\]]+\])*)")
_MISSING = object()


@dataclass(frozen=True, slots=True)
class FieldPath:
    """The origin of a field: alternatives, each a part and the keys to follow inside it.

    >>> FieldPath.parse("json[caption][0],txt", where="field_map").options
    (('json', ('caption', '0')), ('txt', ()))
    """

    options: tuple[tuple[str, tuple[str, ...]], ...]

    @classmethod
    def parse(cls, text: str, *, where: str) -> FieldPath:
        """The path that `text` describes.

        Raises:
            ArgumentError: it is written in another way.
        """
        options: list[tuple[str, tuple[str, ...]]] = []
        for option in text.split(","):
            match = _OPTION.fullmatch(option.strip())
            if match is None:
                raise ArgumentError(
                    f"{brief(text)} is not a path; write for example 'jpg,png' or 'json[caption]'", where=where
                )
            options.append((match[1], tuple(match[2][1:-1].split("][")) if match[2] else ()))
        return cls(tuple(options))


def resolve(path: FieldPath, parts: Mapping[str, bytes], *, where: str, images: Images = "rgb8") -> object:
    """The value of a field: that of the first alternative that the sample has.

    Raises:
        DocumentError: the sample has none of them, or a part does not decode (with `problems`).
    """
    for part, keys in path.options:
        if part in parts:
            found = _follow(decode(part, parts[part], where=where, images=images), keys)
            if found is not _MISSING:
                return found
    shown = ",".join(part + "".join(f"[{key}]" for key in keys) for part, keys in path.options)
    raise DocumentError(f"the sample has no {brief(shown)}; its parts are {', '.join(parts) or 'none'}", where=where)


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

    Text, JSON, numbers, `.npy` (never with objects), MessagePack and images are decoded. Pickles (`.pyd`, `.pkl`, `.pth`)
    and everything else stay bytes: nothing in a data set is executed.

    Raises:
        DocumentError: it does not decode.
        MissingDependencyError: an image needs Pillow, a MessagePack part msgpack.

    >>> decode("detail.json", b'{"a": 1}', where="x"), decode("cls", b"7", where="x"), decode("pth", b"..", where="x")
    ({'a': 1}, 7, b'..')
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
                return _npy(raw)
            case "mp" | "msg":
                return _msgpack(raw, where)
            case kind if images != "bytes" and kind in FORMATS:
                return _image(raw, where=where, images=images)
            case _:
                return raw
    except (ValueError, OverflowError, EOFError, RecursionError, KeyError, TypeError, OSError) as error:
        why = error.message if isinstance(error, SaevStoreError) else str(error)
        text = f"part {brief(part)} does not decode: {why or type(error).__name__}"
        raise DocumentError(text, where=where, problems=[Problem("bad_part", text, where)]) from None


def _npy(raw: bytes) -> object:
    header = parse_npy_header(raw)
    if header.end != len(raw):
        n_behind = len(raw) - header.start
        raise ValueError(f"the array is {header.dtype} of shape {brief(header.shape)}, but {n_behind:,} bytes follow")
    order = "F" if header.is_fortran else "C"
    return np.ndarray(header.shape, header.dtype, raw, offset=header.start, order=order).copy()


def _msgpack(raw: bytes, where: str) -> object:
    need("msgpack", install="saev-store[energon]", where=where)
    import msgpack

    return cast("object", msgpack.unpackb(raw, strict_map_key=False, ext_hook=msgpack.ExtType))  # pyright: ignore[reportUnknownMemberType]  # the stubs


def _image(raw: bytes, *, where: str, images: Images) -> np.ndarray:
    """An image as RGB: uint8 (height, width, 3) for `"rgb8"`, float32 (3, height, width) in 0 to 1 for `"torchrgb"`."""
    with opened(raw, where=where) as image:
        rgb = np.asarray(image.convert("RGB"))
    if images == "torchrgb":
        return np.ascontiguousarray(rgb.transpose(2, 0, 1), dtype=np.float32) / np.float32(255)
    return rgb
