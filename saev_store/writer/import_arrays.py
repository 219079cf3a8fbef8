"""The examples of an array: of NumPy, mapped from a file, of zarr, h5py, xarray, dask or torch, read in slices.

None of these libraries is imported here: an array has a shape, a dtype, and slices.
"""

# pyright: reportUnnecessaryIsInstance=false

from __future__ import annotations

import math
import operator
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple, cast

import numpy as np
import numpy.typing as npt
import xxhash

from saev_store.core.dtypes import ITEMSIZES, StoredDtype
from saev_store.core.token_arrays import DTYPES, MEANINGS
from saev_store.documents import Metadata
from saev_store.errors import ArgumentError, brief, kind_of
from saev_store.writer.digests import ALGORITHM
from saev_store.writer.inputs import as_array

#: The axes of a store. An array may lack layers or tokens: it then has one of them.
AXES = ("example", "layer", "token", "d_model")
_DEFAULT_DIMS = {2: ("example", "d_model"), 3: ("example", "token", "d_model"), 4: AXES}
#: So many examples are digested to identify an array; all of one that is not larger than this.
_N_SAMPLES, _FULL_NBYTES = 8, 64 << 20


class ArrayBlock(NamedTuple):
    """Examples from `first` on: (k, layers, tokens, d_model), which may be float64, and (k, content tokens) for each token array."""

    first: int
    acts: npt.NDArray[np.generic]
    token_arrays: Mapping[str, npt.NDArray[np.generic]]


class _Slices:
    """An array of any of these libraries, read in slices along one axis; a lazy one is computed here."""

    def __init__(self, array: object, *, where: str) -> None:
        self.array, self._where = cast("Any", array), where
        try:
            is_other = isinstance(array, (str, bytes, Mapping)) or not hasattr(array, "dtype")
            self.shape = () if is_other else tuple(map(operator.index, self.array.shape))
        except (TypeError, AttributeError, RuntimeError):
            self.shape = ()
        if not self.shape:
            raise ArgumentError(
                f"{kind_of(cast('object', array))}; it must be an array of NumPy, zarr, h5py, xarray, dask or torch, of known shape",
                where=where,
                remedy='Open files first: numpy.load(path, mmap_mode="r"), zarr.open_array(path), h5py.File(path)[name]. Of dask '
                "call compute_chunk_sizes().",
            )
        try:
            self.dtype = np.dtype(self.array.dtype)
        except TypeError:  # of torch
            self.dtype = self.read(0, 0).dtype

    def sliced(self, start: int, end: int, axis: int = 0) -> object:
        """A slice as it is, perhaps not computed."""
        return self.array[(*(slice(None),) * axis, slice(start, end))]

    def read(self, start: int, end: int, axis: int = 0) -> npt.NDArray[np.generic]:
        """A slice as a NumPy array."""
        try:
            value = self.sliced(start, end, axis)
        except (RuntimeError, NotImplementedError, TypeError) as error:  # a sparse tensor
            raise ArgumentError(f"{kind_of(self.array)} that cannot be sliced: {error}", where=self._where) from error
        compute = getattr(value, "compute", None)  # of dask and xarray
        return as_array(compute(scheduler="threads") if callable(compute) else value, where=self._where)


class ArrayExamples:
    """An array and token arrays, whose first example is `first` of the store, under the axes of a store; a source of examples."""

    metadata: Metadata

    def __init__(
        self, array: object, dims: Sequence[str] | None, token_arrays: Mapping[str, object], *, first: int = 0
    ) -> None:
        self._array, self._first = _Slices(array, where="array"), first
        sizes, self.dtype = self._array.shape, self._array.dtype
        self.dims = _dims_of(array, dims, len(sizes))
        by_name = dict(zip(self.dims, sizes, strict=True))
        self.shape = tuple(by_name.get(axis, 1) for axis in AXES)
        if min(self.shape) < 1:
            raise ArgumentError(f"the array has shape {sizes}; no axis of a store is empty", where="array")
        self._axis = self.dims.index("example")
        self._tokens = {name: _Slices(values, where=name) for name, values in token_arrays.items()}
        self.token_dtypes = {name: _token_dtype(values, name, self.shape[0]) for name, values in self._tokens.items()}

    def read(self, start: int, end: int) -> npt.NDArray[np.generic]:
        """Some examples, (end - start, layers, tokens, d_model)."""
        order = [self.dims.index(axis) for axis in AXES if axis in self.dims]
        missing = tuple(position for position, axis in enumerate(AXES) if axis not in self.dims)
        return np.expand_dims(self._array.read(start, end, self._axis).transpose(order), missing)

    def blocks(self, first: int, end: int, max_block_bytes: int) -> Iterator[ArrayBlock]:
        """The examples from `first` to `end`, in blocks of at most so many bytes or of one example."""
        most = max(1, max_block_bytes // (math.prod(self.shape[1:]) * self.dtype.itemsize))
        for start in range(first, end, most):
            low, high = start - self._first, min(start + most, end) - self._first
            rows = {name: values.read(low, high) for name, values in self._tokens.items()}
            yield ArrayBlock(start, self.read(low, high), rows)

    def part(self, first: int, end: int) -> ArrayExamples:
        """Some examples, to be sent to another process: their token arrays, and the tasks of dask that compute them."""
        import dask

        if not cast("Any", dask).is_dask_collection(self._array.array):
            raise ArgumentError(
                "a cluster writes dask arrays only: others would be sent to the workers",
                where="client",
                remedy="Pass dask.array.from_zarr(…) or another array whose chunks the workers can compute.",
            )
        arrays = {name: values.read(first, end) for name, values in self._tokens.items()}
        (needed,) = cast("Any", dask).optimize(self._array.sliced(first, end, self._axis))
        found = ArrayExamples(needed, self.dims, arrays, first=first)
        found.metadata = self.metadata
        return found

    def identity(self) -> dict[str, object]:
        """The description of the source for `data["imported"]`: its address, axes and dtype, and digests."""
        is_small = math.prod(self.shape) * self.dtype.itemsize <= _FULL_NBYTES
        url, n = _address(self._array.array), self.shape[0]
        found: dict[str, object] = {
            "format": "array", **({} if url is None else {"url": url}), "dims": list(self.dims), "shape": list(self.shape),
            "dtype": self.dtype.name, "digest": _digest(self.read, n, is_small=is_small),
        }  # fmt: skip
        tokens = {name: _digest(values.read, n, is_small=is_small) for name, values in self._tokens.items()}
        return {**found, "token_arrays": tokens} if tokens else found


def _digest(read: Callable[[int, int], npt.NDArray[np.generic]], n: int, *, is_small: bool) -> dict[str, object]:
    """The digest of eight of `n` examples, or of all."""
    samples = [(i, i + 1) for i in sorted({i * (n - 1) // (_N_SAMPLES - 1) for i in range(_N_SAMPLES)})]
    hasher = xxhash.xxh3_128()
    for start, end in [(0, n)] if is_small else samples:
        values = read(start, end)
        hasher.update(np.ascontiguousarray(values, values.dtype.newbyteorder("<")).view(np.uint8).data)
    return {"algorithm": ALGORITHM, "scope": "full" if is_small else "sampled", "value": hasher.hexdigest()}


def stored_dtype(found: np.dtype[np.generic], asked: StoredDtype | None) -> StoredDtype:
    """The dtype of the store: that of the array, or the one asked for; float64 is taken only with another one."""
    if asked is not None and (not isinstance(asked, str) or asked not in ITEMSIZES):
        raise ArgumentError(f"dtype is {brief(asked)}; it must be one of {', '.join(ITEMSIZES)}", where="dtype")
    if found.name not in ITEMSIZES and (found.name != "float64" or asked is None):
        raise ArgumentError(
            f"the array is {found.name}; a store holds {', '.join(ITEMSIZES)}",
            where="array",
            remedy='Pass dtype="float32" to round float64. Bits of bfloat16 are taken as .view(ml_dtypes.bfloat16).',
        )
    return asked or cast("StoredDtype", found.name)


def _dims_of(array: object, dims: Sequence[str] | None, n_axes: int) -> tuple[str, ...]:
    named = getattr(array, "dims", None)  # of xarray; h5py has another kind of object there
    if dims is None:
        dims = cast("tuple[str, ...]", named) if isinstance(named, tuple) else _DEFAULT_DIMS.get(n_axes, ())
    found = () if isinstance(dims, str) or not isinstance(dims, Sequence) else tuple(dims)
    if not (len(found) == n_axes == len(set(found)) and {"example", "d_model"} <= set(found) <= set(AXES)):
        raise ArgumentError(
            f"the {n_axes} axes of the array are {brief(dims)}; they must be example and d_model, and may be layer and token, "
            "each once, in any order",
            where="dims",
            remedy='Name them: dims=("layer", "example", "token", "d_model").',
        )
    return found


def _token_dtype(values: _Slices, name: str, n_examples: int) -> str:
    """The dtype under which a token array is declared; `ArgumentError` for one that none may have, or another shape."""
    found = values.dtype
    if len(values.shape) != 2 or values.shape[0] != n_examples:
        raise ArgumentError(f"{name} has shape {values.shape}; it must be ({n_examples}, content tokens)", where=name)
    declared = MEANINGS.get(name) or found.name
    if declared not in DTYPES or (found.kind not in "biuf" and found.name != "bfloat16"):
        raise ArgumentError(f"{name} has dtype {found}; it must be one of {', '.join(DTYPES)}", where=name)
    return declared


def _address(array: object) -> str | None:
    """The file of an array that is in one, by its own attribute."""
    file = getattr(array, "file", None)
    if isinstance(name := getattr(file, "filename", None), str):  # h5py
        return f"{name}::{getattr(array, 'name', '')}"
    path = getattr(array, "filename", None) or getattr(array, "store_path", None)  # numpy.memmap, zarr
    return None if path is None else str(path)
