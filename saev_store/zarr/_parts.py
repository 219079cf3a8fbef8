"""Parts of a value of the Zarr view: what Zarr asks for, where the bytes are, what they are converted to. Pure."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

import numpy as np
import numpy.typing as npt
from zarr.abc.store import ByteRequest, OffsetByteRequest, RangeByteRequest, SuffixByteRequest

from saev_store.core.chunk_grid import Extent
from saev_store.core.dtypes import FLOAT32, converted
from saev_store.transport import Buffer


@dataclass(frozen=True)
class Parts:
    """Parts of one value, and where their bytes are.

    Attributes:
        value: A document, or a place in a file.
        shown: First bytes of the parts and one past their last, as Zarr counts.
        stored: The same in stored bytes.
        in_file: Bytes of the value that the file has.
    """

    value: bytes | Extent
    shown: Sequence[tuple[int, int]]
    stored: Sequence[tuple[int, int]]
    in_file: int

    @property
    def path(self) -> str:
        """The file; "" for a document."""
        return "" if isinstance(self.value, bytes) else self.value.path

    @cached_property
    def starts(self) -> list[int]:
        """First bytes in the file."""
        return self._in_file([start for start, _ in self.stored])

    @cached_property
    def ends(self) -> list[int]:
        """One past the last bytes in the file."""
        return self._in_file([stop for _, stop in self.stored])

    @property
    def nbytes(self) -> int:
        """Bytes of all parts in the file."""
        return sum(self.ends) - sum(self.starts)

    def _in_file(self, places: Sequence[int]) -> list[int]:
        first = 0 if isinstance(self.value, bytes) else self.value.start
        return [first + min(place, self.in_file) for place in places]


def convert(numbers: npt.NDArray[np.generic], start: int, stop: int) -> Buffer:
    """The bytes from `start` to `stop` of float32 numbers, of which the first is the one that `start` is in."""
    skipped = start // FLOAT32.itemsize * FLOAT32.itemsize
    return converted(numbers, FLOAT32).view(np.uint8).data[start - skipped : stop - skipped]


def nbytes_of(value: bytes | Extent) -> int:
    return len(value) if isinstance(value, bytes) else value.nbytes + value.index_nbytes


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
