"""One array in a `.npy` file of this machine, mapped."""

from __future__ import annotations

import os
import weakref
from typing import BinaryIO, cast

import numpy as np
import numpy.typing as npt

from saev_store.core.dtypes import StoredDtype, numpy_dtype
from saev_store.errors import ArgumentError, CorruptShardError, DocumentError, brief
from saev_store.sources.address import full_url
from saev_store.sources.npy_header import HEAD_NBYTES, parse_npy_header
from saev_store.transport import Transport
from saev_store.transport.checks import from_os_error, os_errors
from saev_store.transport.local.files import check_regular

ENDING = ".npy"


class NpyArray:
    """An array in a mapped file; parts of it are copied out.

    A map of a file that is cut later ends the process that reads it, so the size is compared before each copy.

    Args:
        array: The map.
        file: The mapped file, open.
        nbytes: Its size.

    Attributes:
        shape: Of the array.
        dtype: Of the array.
        filename: Of the file.
    """

    def __init__(self, array: npt.NDArray[np.generic], file: BinaryIO, nbytes: int) -> None:
        self.shape, self.dtype, self.filename = array.shape, array.dtype, file.name
        self._array, self._file, self._nbytes = array, file, nbytes
        weakref.finalize(self, file.close)

    def __getitem__(self, key: tuple[slice, ...]) -> npt.NDArray[np.generic]:
        """A part as fresh memory; `CorruptShardError` if the file was cut."""
        with os_errors(self.filename, "read"):
            nbytes = os.fstat(self._file.fileno()).st_size
        if nbytes < self._nbytes:
            raise CorruptShardError(
                f"it was cut from {self._nbytes:,} to {nbytes:,} bytes while it was read", where=self.filename
            )
        return np.array(self._array[key])


def mapped(transport: Transport, name: str, dtype: StoredDtype | None) -> NpyArray:
    """The array in a file.

    Args:
        transport: The folder of the file.
        name: The file.
        dtype: What the store will hold. If that is bfloat16, two bytes that are no float are its bits: NumPy saves them so.

    Raises:
        ArgumentError: the file is not on this machine.
        DocumentError: it is no such file, or holds objects.
        CorruptShardError: it is shorter or longer than its header says.
        NotFoundError, AccessError, TransportError: it cannot be opened.
    """
    where = full_url(transport, name)
    if transport.local_path is None:
        raise ArgumentError(
            "a .npy file is mapped, so it has to be on this machine", where=where, remedy="Copy it first."
        )
    with os_errors(where, "open"):
        # Opening a pipe would wait for its writer.
        file = open(f"{transport.local_path}/{name}", "rb", opener=_without_waiting)  # noqa: SIM115 (closed with the array)
        status = os.fstat(file.fileno())
    nbytes = status.st_size
    try:
        check_regular(status.st_mode, where=where)
        array = _map(file, nbytes, where)
    except BaseException:
        file.close()
        raise
    if dtype == "bfloat16" and array.dtype.itemsize == 2 and array.dtype.kind in "iuV":
        array = array.view(numpy_dtype("bfloat16"))
    return NpyArray(array, file, nbytes)


def _without_waiting(path: str, flags: int) -> int:
    return os.open(path, flags | getattr(os, "O_NONBLOCK", 0))


def _map(file: BinaryIO, nbytes: int, where: str) -> npt.NDArray[np.generic]:
    """The array in an open file."""
    try:
        header = parse_npy_header(file.read(HEAD_NBYTES))
    except OSError as error:
        raise from_os_error(error, where=where, doing="read") from error
    except ValueError as error:
        raise DocumentError(f"no .npy file: {error}", where=where) from None
    if header.end != nbytes:
        raise CorruptShardError(
            f"its header tells of {header.dtype.name} of shape {brief(header.shape)}, which end at byte {brief(header.end)}; "
            f"the file has {nbytes} bytes",
            where=where,
        )
    if nbytes == header.start:
        raise DocumentError(f"it is empty: its shape is {brief(header.shape)}", where=where)
    order = "F" if header.is_fortran else "C"
    with os_errors(where, "map"):
        found = np.memmap(file, header.dtype, "r", offset=header.start, shape=header.shape, order=order)
    return cast("npt.NDArray[np.generic]", found)
