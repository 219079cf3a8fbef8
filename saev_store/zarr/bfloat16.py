"""The data type `bfloat16` of the zarr-extensions registry for zarr-python, which does not have it.

zarr 3.4.1 and newer finds it by the entry point `zarr.data_type` of this package; older versions know it once `saev_store.zarr`
has been imported.
"""

from __future__ import annotations

import math
import sys
from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar, Literal, Self

import ml_dtypes
import numpy as np
from zarr.core.dtype.common import HasEndianness, HasItemSize
from zarr.dtype import ZDType, data_type_registry

try:
    from zarr.errors import DataTypeValidationError  # pyright: ignore[reportAttributeAccessIssue, reportUnknownVariableType]  # of zarr 3.3
except ImportError:  # before zarr 3.3
    from zarr.dtype import DataTypeValidationError

if TYPE_CHECKING:
    from zarr.core.common import JSON, ZarrFormat
    from zarr.core.dtype.common import DTypeJSON

NAME = "bfloat16"
_DTYPE: np.dtype[np.generic] = np.dtype(ml_dtypes.bfloat16)
#: The NaN that is spelled "NaN"; others are spelled by their bits.
_NAN_BITS = 0x7FC0
_SPECIAL = {"NaN": math.nan, "Infinity": math.inf, "-Infinity": -math.inf}


@dataclass(frozen=True, kw_only=True)
class BFloat16(ZDType[np.dtype[np.generic], np.generic], HasEndianness, HasItemSize):
    """`bfloat16`, the upper half of a float32, as `ml_dtypes.bfloat16`. Zarr v3 only: v2 has no name for it.

    >>> BFloat16().to_native_dtype().name, BFloat16().to_json(3)
    ('bfloat16', 'bfloat16')
    """

    dtype_cls: ClassVar[type[np.dtype[np.generic]]] = type(_DTYPE)
    _zarr_v3_name: ClassVar[str] = NAME

    @property
    def item_size(self) -> int:
        """Bytes of a number."""
        return _DTYPE.itemsize

    @classmethod
    def from_native_dtype(cls, dtype: np.dtype[np.generic]) -> Self:
        """The data type of a NumPy dtype.

        Raises:
            DataTypeValidationError: it is another one.
        """
        if type(dtype) is not cls.dtype_cls:
            raise DataTypeValidationError(f"{dtype} is not {NAME}")
        swapped: Literal["little", "big"] = "big" if sys.byteorder == "little" else "little"
        return cls(endianness=sys.byteorder if dtype.isnative else swapped)

    def to_native_dtype(self) -> np.dtype[np.generic]:
        """The NumPy dtype."""
        return _DTYPE if self.endianness == sys.byteorder else _DTYPE.newbyteorder()

    @classmethod
    def _from_json_v2(cls, data: DTypeJSON) -> Self:
        raise DataTypeValidationError(f"Zarr v2 has no {NAME}: {data!r}")

    @classmethod
    def _from_json_v3(cls, data: DTypeJSON) -> Self:
        if data != NAME:
            raise DataTypeValidationError(f"{data!r} is not {NAME}")
        return cls()

    def to_json(self, zarr_format: ZarrFormat) -> str:  # pyright: ignore[reportIncompatibleMethodOverride]  # never v2's dict
        """The name.

        Raises:
            ValueError: of a Zarr v2 array.
        """
        if zarr_format != 3:
            raise ValueError(f"Zarr v2 has no data type {NAME}; use zarr_format=3, or float32")
        return NAME

    def _check_scalar(self, data: object) -> bool:
        return isinstance(data, (int, float, str, np.generic))

    def cast_scalar(self, data: object) -> np.generic:
        """A number as one of this data type.

        Raises:
            TypeError: it is not a number.
        """
        if self._check_scalar(data):
            try:
                number = float(data) if isinstance(data, str) else data
                return _DTYPE.type(number)
            except ValueError:
                pass
        raise TypeError(f"{data!r} is not a number, so it cannot be {NAME}")

    def default_scalar(self) -> np.generic:
        """Zero."""
        return self.cast_scalar(0.0)

    def from_json_scalar(self, data: JSON, *, zarr_format: ZarrFormat) -> np.generic:
        """A fill value as documents spell it: a number, "NaN", "Infinity", "-Infinity", or its bits such as "0x7fc0".

        Raises:
            TypeError: it is none of these.
        """
        del zarr_format
        if isinstance(data, str) and data in _SPECIAL:
            return self.cast_scalar(_SPECIAL[data])
        if isinstance(data, str) and len(data) == 6 and data.startswith("0x"):
            try:
                return np.array([int(data, 16)], dtype=np.uint16).view(_DTYPE)[0]
            except ValueError:
                pass
        elif isinstance(data, (int, float)) and not isinstance(data, bool):
            return self.cast_scalar(data)
        raise TypeError(f"{data!r} is not a fill value of {NAME}")

    def to_json_scalar(self, data: object, *, zarr_format: ZarrFormat) -> float | str:
        """A fill value as documents spell it."""
        del zarr_format
        number = self.cast_scalar(data)
        value, bits = float(number.item()), int(np.asarray(number).view(np.uint16))
        if math.isnan(value):
            return "NaN" if bits == _NAN_BITS else f"{bits:#06x}"
        return value if math.isfinite(value) else "Infinity" if value > 0 else "-Infinity"


if NAME not in data_type_registry.contents:
    data_type_registry.register(NAME, BFloat16)
#: What zarr uses: its own data type, where a version of it has one, or one that another package has registered.
DATA_TYPE = data_type_registry.contents[NAME]
