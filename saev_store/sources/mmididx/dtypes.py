"""The token types of MMIDIDX: a byte in the header that tools do not agree on."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from saev_store.errors import ArgumentError, UnknownProtocolError, brief

#: What a code may mean; where tools disagree, the size of an element decides. Megatron's reading comes first.
TYPES: dict[int, tuple[str, ...]] = {
    1: ("uint8",),
    2: ("int8",),
    3: ("int16",),
    4: ("int32",),
    5: ("int64",),
    6: ("float64", "float32"),
    7: ("float32", "float64"),
    8: ("uint16",),
    9: ("uint32",),
    10: ("uint64",),
}


def candidates(code: int, *, where: str) -> tuple[np.dtype[np.generic], ...]:
    """The token types, little-endian, that a code may stand for.

    Raises:
        UnknownProtocolError: no tool writes this code.
    """
    try:
        return tuple(np.dtype(name).newbyteorder("<") for name in TYPES[code])
    except KeyError:
        raise UnknownProtocolError(
            f"dtype code {code} is unknown; {min(TYPES)} to {max(TYPES)} are read", where=where
        ) from None


def code_of(dtype: npt.DTypeLike) -> int:
    """The code that our writer gives a token type: Megatron's.

    Raises:
        ArgumentError: the format has no code for it.

    >>> code_of("uint16"), code_of(np.float32)
    (8, 7)
    """
    try:
        name = np.dtype(dtype).newbyteorder("=").name
    except TypeError as error:
        raise ArgumentError(f"{brief(dtype)} is no dtype: {error}", where="dtype") from None
    for code, names in TYPES.items():
        if names[0] == name:
            return code
    known = ", ".join(sorted({names[0] for names in TYPES.values()}))
    raise ArgumentError(f"{name} has no code in this format: {known} do", where="dtype")
