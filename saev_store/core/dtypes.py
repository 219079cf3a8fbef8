"""The numbers that a store holds, those that a reader gets, and the way from one to the other.

bfloat16 is a dtype of the package `ml_dtypes`, which is imported when a store or a caller names it.
"""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING, Literal, TypeAlias, cast, get_args

import numpy as np
import numpy.typing as npt

from saev_store.errors import ArgumentError, brief

if TYPE_CHECKING:
    from collections.abc import Mapping

#: What a store may hold: little-endian IEEE float32, bfloat16 (the upper half of one), and IEEE float16.
StoredDtype: TypeAlias = Literal["float32", "bfloat16", "float16"]
#: What a reader may ask for; "stored" gives the bits of the store.
ReadDtype: TypeAlias = Literal["float32", "float64", "bfloat16", "float16", "stored"] | np.dtype[np.generic]
#: Bytes of one number, for all dtypes that a store may hold.
ITEMSIZES: Mapping[str, int] = {"float32": 4, "bfloat16": 2, "float16": 2}
#: The largest finite number of each of them, as a float32 number.
LARGEST: Mapping[str, float] = {
    "float32": float.fromhex("0x1.fffffep127"),
    "bfloat16": float.fromhex("0x1.fep127"),
    "float16": 65504.0,
}
#: The bits of infinity of those that have 16; every number that is not finite has at least these, besides the sign.
INFINITY_BITS: Mapping[str, int] = {"bfloat16": 0x7F80, "float16": 0x7C00}
#: So many numbers are looked at twice while they are in the processor's cache.
_LOOK_NUMBERS = 1 << 17
FLOAT32 = np.dtype(np.float32)
_READABLE = (*ITEMSIZES, "float64")


def numpy_dtype(name: str) -> np.dtype[np.generic]:
    """The NumPy dtype of a name, little-endian; of bfloat16 that of `ml_dtypes`.

    >>> numpy_dtype("float32"), numpy_dtype("bfloat16").itemsize
    (dtype('float32'), 2)
    """
    if name == "bfloat16":
        import ml_dtypes

        return np.dtype(ml_dtypes.bfloat16)
    dtype = np.dtype(name)
    return dtype if sys.byteorder == "little" else dtype.newbyteorder("<")


def dtype_name(asked: object) -> str | None:
    """The name of a dtype: the text itself, or that of a NumPy, `ml_dtypes` or torch dtype; None if it is none of these.

    >>> dtype_name("bfloat16"), dtype_name(np.int32), dtype_name(np.dtype(">f4")), dtype_name(7)
    ('bfloat16', 'int32', 'float32', None)
    """
    if isinstance(asked, str):
        return asked
    if type(asked).__module__ == "torch":  # which is not imported for it; its dtypes print as `torch.bfloat16`
        return str(asked).removeprefix("torch.")
    if asked is None:  # float64 to NumPy
        return None
    try:
        return np.dtype(cast("npt.DTypeLike", asked)).name
    except (TypeError, ValueError):
        return None


def read_dtype(asked: ReadDtype, stored: str) -> np.dtype[np.generic]:
    """The NumPy dtype that a reader asks for.

    Args:
        asked: A name, `"stored"`, or a NumPy or torch dtype of one of these names.
        stored: The name of the store's dtype.

    Raises:
        ArgumentError: it is not one of `ReadDtype`.

    >>> read_dtype("stored", "float16"), read_dtype("float32", "float16")
    (dtype('float16'), dtype('float32'))
    """
    name = asked if isinstance(asked, str) else dtype_name(asked)
    if name == "stored":
        name = stored
    if name not in _READABLE:
        choices = ", ".join(repr(choice) for choice in get_args(get_args(ReadDtype)[0]))
        raise ArgumentError(f"dtype is {brief(asked)}; it must be one of {choices}", where="dtype")
    return numpy_dtype(name)


def are_finite(bits: npt.NDArray[np.uint16], dtype: str) -> bool:
    """Return True if all numbers of a dtype of 16 bits, given by their bits, are finite.

    Among unsigned integers the negative numbers that are not finite are the largest, among signed ones the positive ones.

    Args:
        bits: At least one axis.
        dtype: `"bfloat16"` or `"float16"`.

    >>> are_finite(np.float16([1, -65504]).view(np.uint16), "float16"), are_finite(np.uint16([0xFF80]), "bfloat16")
    (True, False)
    """
    infinity, step = INFINITY_BITS[dtype], max(1, _LOOK_NUMBERS * len(bits) // max(bits.size, 1))
    for start in range(0, len(bits) if bits.size else 0, step):
        some = bits[start : start + step]
        if some.max() >= 0x8000 + infinity or some.view(np.int16).max() >= infinity:
            return False
    return True


def convert(source: npt.NDArray[np.generic], out: npt.NDArray[np.generic]) -> None:
    """Copy numbers into an array of another float dtype and of the same shape; widening is exact, narrowing rounds to nearest even.

    NumPy widens float16 at a tenth of the speed of a copy: torch does it where the process has imported it anyway. The numbers are
    equal; signalling NaNs become quiet there, so what is stored is made by `stored_as`.
    """
    if source.dtype == out.dtype:
        out[...] = source
        return
    torch = sys.modules.get("torch") if source.dtype == np.float16 and out.dtype == FLOAT32 else None
    if torch is not None and source.flags.writeable and out.flags.c_contiguous and source.flags.c_contiguous:
        # Flat, because torch refuses negative strides, which an axis of one position may have.
        torch.from_numpy(out.reshape(-1)).copy_(torch.from_numpy(source.reshape(-1)))
        return
    _copy_cast(source, out)


def stored_as(source: npt.NDArray[np.generic], dtype: np.dtype[np.generic]) -> npt.NDArray[np.generic]:
    """The numbers in another dtype as a fresh array, or the array itself if it has that dtype; the same bits in every process.

    Like `converted`, but always by NumPy and ml_dtypes.
    """
    if source.dtype == dtype:
        return source
    out = np.empty(source.shape, dtype=dtype)
    _copy_cast(source, out)
    return out


def narrowed(source: npt.NDArray[np.generic], dtype: str) -> npt.NDArray[np.generic]:
    """float64 as float32, on the way to the dtype of a store; all else as it is.

    To float32 the numbers are rounded to nearest even. On the way to 16 bits, where another rounding follows, they are rounded to
    odd: the last bit of what is not exact is 1, so that the two give what one rounding to nearest even gives (Boldo and Melquiond,
    "Emulation of a FMA and correctly rounded sums", 2008).

    >>> tie = np.array([1 + 2**-11 + 2**-30])  # just above the middle of two numbers of float16
    >>> float(narrowed(tie, "float16").astype(np.float16)[0]), float(tie.astype(np.float32).astype(np.float16)[0])
    (1.0009765625, 1.0)
    """
    if source.dtype.name != "float64":
        return source
    if dtype == "float32":
        return stored_as(source, FLOAT32)
    wide = cast("npt.NDArray[np.float64]", np.ascontiguousarray(source))
    found = np.empty(source.shape, np.float32)
    flat, out = wide.reshape(-1), found.reshape(-1)
    for first in range(0, flat.size, _LOOK_NUMBERS):
        piece, rounded = flat[first : first + _LOOK_NUMBERS], out[first : first + _LOOK_NUMBERS]
        _copy_cast(piece, rounded)
        with np.errstate(invalid="ignore"):  # NaN is neither
            is_above, is_below = rounded > piece, rounded < piece
        bits = rounded.view(np.uint32)
        # Towards zero, to the number whose magnitude is the next smaller one; of infinity that is the largest.
        bits -= np.where(np.signbit(piece), is_below, is_above)
        bits |= is_above | is_below
    return found


def _copy_cast(source: npt.NDArray[np.generic], out: npt.NDArray[np.generic]) -> None:
    # Signalling NaNs are invalid, and numbers that the narrower dtype does not hold overflow.
    with np.errstate(over="ignore", invalid="ignore"):
        np.copyto(out, source, casting="unsafe")


def converted(source: npt.NDArray[np.generic], dtype: np.dtype[np.generic]) -> npt.NDArray[np.generic]:
    """The numbers in another dtype as a fresh array, or the array itself if it has that dtype."""
    if source.dtype == dtype:
        return source
    out = np.empty(source.shape, dtype=dtype)
    convert(source, out)
    return out
