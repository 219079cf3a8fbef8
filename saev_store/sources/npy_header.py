"""The header of a `.npy` file, read without trusting a number in it (NumPy's format, versions 1 to 3)."""

from __future__ import annotations

import io
import math
from typing import NamedTuple

import numpy as np

from saev_store.errors import brief

_MAX_HEADER_NBYTES = 1 << 16


class NpyHeader(NamedTuple):
    """Shape of an array, True if its first axis is the fastest, its dtype, and the place of its first byte."""

    shape: tuple[int, ...]
    is_fortran: bool
    dtype: np.dtype[np.generic]
    start: int

    @property
    def end(self) -> int:
        """Position behind its last byte."""
        return self.start + math.prod(self.shape) * self.dtype.itemsize


def parse_npy_header(head: bytes) -> NpyHeader:
    """The header of an array of numbers, from the first bytes of a file or all of it; takes no memory for the array.

    Raises:
        ValueError: it is not a header, it names Python objects or items without bytes, or its shape is that of no array.
    """
    stream = io.BytesIO(head[:_MAX_HEADER_NBYTES])
    try:
        version = np.lib.format.read_magic(stream)
        read = np.lib.format.read_array_header_1_0 if version == (1, 0) else np.lib.format.read_array_header_2_0
        shape, is_fortran, dtype = read(stream, max_header_size=_MAX_HEADER_NBYTES)
    except Exception as error:  # NumPy's reader lets through what Python's parser of literals raises, MemoryError too
        raise ValueError(brief(str(error) or type(error).__name__)) from None
    if any(type(n) is not int or not 0 <= n < 2**63 for n in shape) or not dtype.itemsize or dtype.hasobject:
        raise ValueError(f"its header has shape {brief(shape)} and {dtype}")
    return NpyHeader(shape, is_fortran, dtype, stream.tell())
