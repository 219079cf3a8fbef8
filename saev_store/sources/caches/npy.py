"""One array in a `.npy` file of this machine, mapped."""

from __future__ import annotations

import math
from typing import cast

import numpy as np
import numpy.typing as npt

from saev_store.core.dtypes import StoredDtype, numpy_dtype
from saev_store.errors import ArgumentError, CorruptShardError, DocumentError, brief
from saev_store.sources.address import full_url
from saev_store.transport import Transport

ENDING = ".npy"
_MAX_HEADER_NBYTES = 1 << 16
#: Version 3 differs from 2 in the names of fields only, which no array of numbers has.
_VERSIONS = {(1, 0), (2, 0), (3, 0)}


def mapped(transport: Transport, name: str, dtype: StoredDtype | None) -> npt.NDArray[np.generic]:
    """The array in a file, read-only.

    Args:
        transport: The folder of the file.
        name: The file.
        dtype: What the store will hold. If that is bfloat16, two bytes that are no float are its bits: NumPy saves them so.

    Raises:
        ArgumentError: the file is not on this machine.
        DocumentError: it is no such file, or holds objects.
        CorruptShardError: it is shorter or longer than its header says.
    """
    where = full_url(transport, name)
    if transport.local_path is None:
        raise ArgumentError(
            "a .npy file is mapped, so it has to be on this machine", where=where, remedy="Copy it first."
        )
    path, nbytes = f"{transport.local_path}/{name}", transport.size(name)
    try:
        with open(path, "rb") as file:
            version = np.lib.format.read_magic(file)
            if version not in _VERSIONS:
                raise ValueError(f"version {version} of the format is not known")
            read = np.lib.format.read_array_header_1_0 if version == (1, 0) else np.lib.format.read_array_header_2_0
            shape, is_fortran, found = read(file, max_header_size=_MAX_HEADER_NBYTES)
            start = file.tell()
    except Exception as error:  # NumPy's reader lets through what Python's parser of literals raises
        raise DocumentError(f"no .npy file: {brief(str(error))}", where=where) from None
    if min(shape, default=0) < 0:
        raise DocumentError(f"its header tells of shape {shape}", where=where)
    if found.hasobject:
        raise DocumentError("it holds Python objects, which are never loaded", where=where)
    if start + math.prod(shape) * found.itemsize != nbytes:
        raise CorruptShardError(
            f"its header tells of {found.name} of shape {shape}, which end at byte {start + math.prod(shape) * found.itemsize}; "
            f"the file has {nbytes} bytes",
            where=where,
        )
    if nbytes == start:
        raise DocumentError(f"it is empty: its shape is {shape}", where=where)
    order = "F" if is_fortran else "C"
    array = cast("npt.NDArray[np.generic]", np.memmap(path, found, "r", offset=start, shape=shape, order=order))
    if dtype == "bfloat16" and found.itemsize == 2 and found.kind in "iuV":
        return array.view(numpy_dtype("bfloat16"))
    return array
