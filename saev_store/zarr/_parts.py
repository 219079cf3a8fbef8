"""Parts of a value of the Zarr view: what Zarr asks for, where the bytes are, what they are converted to. Pure."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
import numpy.typing as npt
from zarr.abc.store import ByteRequest, OffsetByteRequest, RangeByteRequest, SuffixByteRequest

from saev_store.core.chunk_grid import Extent
from saev_store.core.dtypes import FLOAT32, converted
from saev_store.transport import Buffer


class Parts(NamedTuple):
    """Parts of one value, and where their bytes are.

    Attributes:
        value: A document, or a place in a file.
        path: The file; "" for a document.
        shown: First bytes of the parts and one past their last, as Zarr counts.
        stored: The same in stored bytes.
        in_file: Bytes of the value that the file has.
        starts: First bytes in the file.
        ends: One past the last bytes in the file.
    """

    value: bytes | Extent
    path: str
    shown: Sequence[tuple[int, int]]
    stored: Sequence[tuple[int, int]]
    in_file: int
    starts: list[int]
    ends: list[int]


def parts_of(
    value: bytes | Extent, shown: Sequence[tuple[int, int]], stored: Sequence[tuple[int, int]], in_file: int
) -> Parts:
    """Parts of a value, of which the file has the first `in_file` bytes."""
    path, first = ("", 0) if isinstance(value, bytes) else (value.path, value.start)
    starts = [first + min(start, in_file) for start, _ in stored]
    ends = [first + min(stop, in_file) for _, stop in stored]
    return Parts(value, path, shown, stored, in_file, starts, ends)


def convert(numbers: npt.NDArray[np.generic], start: int, stop: int) -> Buffer:
    """The bytes from `start` to `stop` of float32 numbers, of which the first is the one that `start` is in."""
    skipped = start // FLOAT32.itemsize * FLOAT32.itemsize
    return converted(numbers, FLOAT32).view(np.uint8).data[start - skipped : stop - skipped]


def nbytes_of(value: bytes | Extent) -> int:
    return len(value) if isinstance(value, bytes) else value.nbytes


def bounds(request: ByteRequest | None, nbytes: int) -> tuple[int, int]:
    """First byte and one past the last of what a byte request means for a value of that length."""
    match request:
        case None:
            return 0, nbytes
        case RangeByteRequest(start, end):
            start, end = min(start, nbytes), min(end, nbytes)
            return start, max(start, end)
        case OffsetByteRequest(offset):
            return min(offset, nbytes), nbytes
        case SuffixByteRequest(suffix):
            return max(nbytes - suffix, 0), nbytes
        case _:
            raise ValueError(f"Unexpected byte_range, got {request!r}; a Range-, Offset- or SuffixByteRequest is one")
