"""The numbers that a store holds, those that a reader gets, and the way from one to the other.

bfloat16 is a dtype of the package `ml_dtypes`, which is imported when a store or a caller names it.
"""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING, Literal, TypeAlias, cast

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
FLOAT32 = np.dtype(np.float32)
_READABLE = (*ITEMSIZES, "float64")
_Numbers = npt.NDArray[np.generic]


def numpy_dtype(name: str) -> np.dtype[np.generic]:
    """The NumPy dtype of a name, little-endian; of bfloat16 that of `ml_dtypes`."""
    if name == "bfloat16":
        import ml_dtypes

        return np.dtype(ml_dtypes.bfloat16)
    dtype = np.dtype(name)
    return dtype if sys.byteorder == "little" else dtype.newbyteorder("<")


def dtype_name(asked: object) -> str | None:
    """The name of a dtype: the text itself, or that of a NumPy, `ml_dtypes` or torch dtype; None if it is none of these."""
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
    """The NumPy dtype that a reader of a store of the dtype `stored` asks for; `ArgumentError` if it is not a `ReadDtype`."""
    name = stored if isinstance(asked, str) and asked == "stored" else dtype_name(asked)
    if name not in _READABLE:
        raise ArgumentError(f"dtype is {brief(asked)}; it must be one of {', '.join(_READABLE)}, stored", where="dtype")
    return numpy_dtype(name)


def are_finite(bits: npt.NDArray[np.uint16], dtype: str) -> bool:
    """Return True if all numbers of a dtype of 16 bits, given by their bits, are finite."""
    # Among unsigned integers the negative numbers that are not finite are the largest, among signed ones the positive ones.
    infinity = INFINITY_BITS[dtype]
    return bits.size == 0 or bool(bits.max() < 0x8000 + infinity and bits.view(np.int16).max() < infinity)


def convert(source: _Numbers, out: _Numbers) -> None:
    """Copy numbers into an array of another float dtype and of the same shape; narrowing rounds to nearest even.

    NumPy widens float16 at a tenth of the speed of a copy: torch does it where the process has imported it anyway. The numbers are
    equal; signalling NaNs become quiet there, so what is stored is made by `stored_as`.
    """
    torch = sys.modules.get("torch") if source.dtype == np.float16 and out.dtype == FLOAT32 else None
    if torch is not None and source.flags.writeable and out.flags.c_contiguous and source.flags.c_contiguous:
        # Flat, because torch refuses negative strides, which an axis of one position may have.
        torch.from_numpy(out.reshape(-1)).copy_(torch.from_numpy(source.reshape(-1)))
        return
    _copy_cast(source, out)


def converted(source: _Numbers, dtype: np.dtype[np.generic]) -> _Numbers:
    """The numbers in another dtype as a fresh array, or the array itself if it has that dtype."""
    if source.dtype == dtype:
        return source
    out = np.empty(source.shape, dtype=dtype)
    convert(source, out)
    return out


def stored_as(source: _Numbers, dtype: np.dtype[np.generic]) -> _Numbers:
    """Like `converted`, but always by NumPy and ml_dtypes: the same bits in every process."""
    if source.dtype == dtype:
        return source
    out = np.empty(source.shape, dtype=dtype)
    _copy_cast(source, out)
    return out


def narrowed(source: _Numbers, dtype: str) -> _Numbers:
    """float64 as float32, on the way to the dtype of a store; all else as it is.

    On the way to 16 bits, where another rounding follows, numbers are rounded to odd: the last bit of what is not exact is 1, so
    that the two give what one rounding to nearest even gives (Boldo and Melquiond, "Emulation of a FMA and correctly rounded
    sums", 2008).
    """
    if source.dtype.name != "float64":
        return source
    found = np.empty(source.shape, np.float32)
    _copy_cast(source, found)
    if dtype != "float32":
        wide = cast("npt.NDArray[np.float64]", source)
        with np.errstate(invalid="ignore"):  # NaN is neither
            is_above, is_below = found > wide, found < wide
        bits = found.view(np.uint32)
        # Towards zero, to the number whose magnitude is the next smaller one; of infinity that is the largest.
        bits -= np.where(np.signbit(wide), is_below, is_above)
        bits |= is_above | is_below
    return found


def _copy_cast(source: _Numbers, out: _Numbers) -> None:
    # Signalling NaNs are invalid, and numbers that the narrower dtype does not hold overflow.
    with np.errstate(over="ignore", invalid="ignore"):
        np.copyto(out, source, casting="unsafe")
