"""The examples of an array: of NumPy, mapped from a file, of zarr, h5py, xarray, dask or torch, read in slices.

None of these libraries is imported here: an array is what has a shape, a dtype, and slices.
"""

# pyright: reportUnnecessaryIsInstance=false

from __future__ import annotations

import math
import operator
from bisect import bisect_right
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from itertools import accumulate
from typing import Any, Protocol, SupportsIndex, cast

import numpy as np
import numpy.typing as npt
import xxhash
from numpy.lib.array_utils import byte_bounds

from saev_store.core.dtypes import ITEMSIZES, StoredDtype
from saev_store.core.token_arrays import DTYPES, MEANINGS
from saev_store.documents import Metadata
from saev_store.errors import ArgumentError, brief, kind_of
from saev_store.writer._arrays import as_array
from saev_store.writer._digests import ALGORITHM
from saev_store.writer.importing._examples import Block

#: The axes of a store. An array may lack layers or tokens: it then has one of them.
AXES = ("example", "layer", "token", "d_model")
_DEFAULT_DIMS = {2: ("example", "d_model"), 3: ("example", "token", "d_model"), 4: AXES}
#: So many examples are digested to identify an array; all of one that is no larger than this.
_N_SAMPLES, _FULL_NBYTES = 8, 64 << 20


class Sliceable(Protocol):
    """The part of an array that is used here."""

    @property
    def shape(self) -> tuple[int, ...]: ...
    @property
    def dtype(self) -> object: ...
    def __getitem__(self, key: tuple[slice, ...], /) -> object: ...


class ArrayAxes:
    """An array under the axes of a store.

    Args:
        array: Of any kind that is described above.
        dims: The names of its axes in their order; None: those of xarray, else by their number.

    Attributes:
        dims: The names of its axes.
        shape: (examples, layers, tokens, d_model).
        dtype: Of its numbers.

    Raises:
        ArgumentError: it is no such array, or has other axes or another dtype.
    """

    def __init__(self, array: object, dims: Sequence[str] | None) -> None:
        self.array, sizes = _sliceable(array, where="array"), _sizes(array, where="array")
        _check_not_persisted(array)
        self.dims = _dims_of(array, dims, len(sizes))
        by_name = dict(zip(self.dims, sizes, strict=True))
        self.shape = tuple(by_name.get(axis, 1) for axis in AXES)
        if min(self.shape) < 1:
            raise ArgumentError(f"the array has shape {sizes}; no axis of a store is empty", where="array")
        self.dtype = _dtype_of(self.array)
        self._axis = self.dims.index("example")
        self._bounds = _chunk_ends(self.array, self._axis, self.shape[0])

    def read(self, start: int, end: int) -> npt.NDArray[np.generic]:
        """Some examples, (end - start, layers, tokens, d_model)."""
        key = tuple(slice(start, end) if axis == self._axis else slice(None) for axis in range(len(self.dims)))
        found = computed(self.array[key], where="array")
        expected = tuple(end - start if axis == "example" else self.shape[AXES.index(axis)] for axis in self.dims)
        if found.shape != expected or found.dtype.name != self.dtype.name:
            raise ArgumentError(
                f"examples {start} to {end - 1} of the array come as {found.dtype.name} {found.shape}; "
                f"they must be {self.dtype.name} {expected}, as the array says",
                where="array",
            )
        order = [self.dims.index(axis) for axis in AXES if axis in self.dims]
        missing = tuple(position for position, axis in enumerate(AXES) if axis not in self.dims)
        return np.expand_dims(found.transpose(order), missing)

    def part(self, first: int, end: int, prepared: Callable[[object], object]) -> ArrayAxes:
        """Some examples as an array of its own, of the same kind; nothing is read."""
        key = tuple(slice(first, end) if axis == self._axis else slice(None) for axis in range(len(self.dims)))
        return ArrayAxes(prepared(self.array[key]), self.dims)

    def steps(self, first: int, end: int, most: int) -> Iterator[tuple[int, int]]:
        """Ranges of at most `most` examples, which end where chunks of the array do if these are not longer."""
        while first < end:
            until = min(first + most, end)
            if self._bounds is not None and until < end:
                found = self._bounds.last_up_to(until)
                until = found if found > first else until
            yield first, until
            first = until


class ArrayExamples:
    """An array and token arrays, as something to import.

    Args:
        acts: The activations.
        token_arrays: (examples, content tokens) for each token array, by name.
        metadata: Of the store.
        first: The position of the array's first example in the store.
    """

    def __init__(
        self, acts: ArrayAxes, token_arrays: Mapping[str, Sliceable], metadata: Metadata, *, first: int = 0
    ) -> None:
        self._acts, self._token_arrays, self._first = acts, token_arrays, first
        self.metadata = metadata

    def blocks(self, first: int, end: int, max_block_bytes: int) -> Iterator[Block]:
        """The examples from `first` to `end`, in blocks of at most so many bytes or of one example."""
        offset = self._first
        most = max(1, max_block_bytes // (math.prod(self._acts.shape[1:]) * self._acts.dtype.itemsize))
        for start, stop in self._acts.steps(first - offset, end - offset, most):
            acts = self._acts.read(start, stop)
            rows = {name: _rows(values, name, start, stop) for name, values in self._token_arrays.items()}
            yield Block(start + offset, acts, rows)

    @property
    def is_lazy(self) -> bool:
        """Whether the array is one of dask, or of xarray with one of dask inside."""
        graph = getattr(self._acts.array, "__dask_graph__", None)
        return callable(graph) and graph() is not None

    def part(self, first: int, end: int, prepared: Callable[[object], object]) -> ArrayExamples:
        """Some examples, to be sent to another process: their token arrays, and the prepared array, which is not read."""
        arrays = {name: _rows(values, name, first, end) for name, values in self._token_arrays.items()}
        acts = self._acts.part(first, end, prepared)
        return ArrayExamples(acts, cast("Mapping[str, Sliceable]", arrays), self.metadata, first=first)


def identity(acts: ArrayAxes, token_arrays: Mapping[str, Sliceable]) -> dict[str, object]:
    """What tells one array from another, as `data["imported"]` has it: where it lies, its axes and dtype, digests of it and its token arrays."""
    is_small = math.prod(acts.shape) * acts.dtype.itemsize <= _FULL_NBYTES
    url = _address(acts.array)
    found: dict[str, object] = {
        "format": "array",
        **({} if url is None else {"url": url}),
        "dims": list(acts.dims),
        "shape": list(acts.shape),
        "dtype": acts.dtype.name,
        "digest": _digest(acts.read, acts.shape[0], is_small=is_small),
    }
    if token_arrays:
        digests = {
            name: _digest(partial(_rows, values, name), acts.shape[0], is_small=is_small)
            for name, values in token_arrays.items()
        }
        found["token_arrays"] = digests
    return found


def _rows(values: Sliceable, name: str, start: int, end: int) -> npt.NDArray[np.generic]:
    """Some rows of a token array."""
    found = computed(values[start:end,], where=name)
    if found.shape != (end - start, values.shape[1]) or found.dtype.kind == "O":  # a sparse matrix of scipy
        raise ArgumentError(
            f"examples {start} to {end - 1} of {name} come as {found.dtype.name} {found.shape}; they must be numbers, "
            f"{(end - start, values.shape[1])}",
            where=name,
            remedy="Pass a dense array.",
        )
    return found


def _digest(read: Callable[[int, int], npt.NDArray[np.generic]], n: int, *, is_small: bool) -> dict[str, object]:
    """The digest of eight of `n` examples, or of all."""
    samples = [(i, i + 1) for i in sorted({i * (n - 1) // (_N_SAMPLES - 1) for i in range(_N_SAMPLES)})]
    hasher = xxhash.xxh3_128()
    for start, end in [(0, n)] if is_small else samples:
        values = read(start, end)
        hasher.update(np.ascontiguousarray(values, values.dtype.newbyteorder("<")).view(np.uint8).data)
    return {"algorithm": ALGORITHM, "scope": "full" if is_small else "sampled", "value": hasher.hexdigest()}


def checked_token_arrays(
    given: Mapping[str, object] | None, n_examples: int, n_content: int
) -> tuple[dict[str, Sliceable], dict[str, str]]:
    """Token arrays and their dtypes by name.

    Raises:
        ArgumentError: one has another shape, or a dtype that none may have.
    """
    if given is not None and not isinstance(given, Mapping):
        raise ArgumentError(f"token_arrays is {kind_of(given)}; it must map names to arrays", where="token_arrays")
    arrays, dtypes = dict[str, Sliceable](), dict[str, str]()
    for name, value in (given or {}).items():
        arrays[name] = _sliceable(value, where=name)
        shape = _sizes(value, where=name)
        if shape != (n_examples, n_content):
            raise ArgumentError(
                f"{name} has shape {shape}; it must be ({n_examples}, {n_content}): one for every content token of every "
                "example, none for CLS",
                where=name,
            )
        dims = getattr(value, "dims", None)  # of xarray
        named = cast("tuple[object, ...]", dims) if isinstance(dims, tuple) else ()
        if "example" in named[1:] or "token" in named[:1]:
            raise ArgumentError(
                f"{name} has the axes {brief(named)}; they must be example and token, in this order",
                where=name,
                remedy=f"Transpose it: {name}.transpose().",
            )
        found = _numbers(arrays[name], where=name)
        if found.kind not in "biuf" and found.name != "bfloat16":
            raise ArgumentError(
                f"{name} has dtype {found}; it must be one of {', '.join(DTYPES)}",
                where=name,
                remedy=f"Convert it: {name}.astype({MEANINGS.get(name, 'float32')!r}).",
            )
        dtypes[name] = MEANINGS.get(name) or found.name
        if dtypes[name] not in DTYPES:
            raise ArgumentError(f"{name} has dtype {dtypes[name]}; it must be one of {', '.join(DTYPES)}", where=name)
    return arrays, dtypes


def stored_dtype(found: np.dtype[np.generic], asked: StoredDtype | None, array: object = np.ndarray) -> StoredDtype:
    """The dtype of the store: that of the array, or the one asked for. Of `array` the remedy tells how its bits are taken.

    Raises:
        ArgumentError: no store holds it; float64 is taken only where another dtype is asked for.
    """
    if asked is not None and (not isinstance(asked, str) or asked not in ITEMSIZES):  # pyright: ignore[reportUnnecessaryIsInstance]  # callers may not check types
        raise ArgumentError(f"dtype is {brief(asked)}; it must be one of {', '.join(ITEMSIZES)}", where="dtype")
    if found.name in ITEMSIZES:
        return asked or cast("StoredDtype", found.name)
    if found.name == "float64":
        if asked is not None:
            return asked
        raise ArgumentError(
            "the array is float64, which no store holds",
            where="array",
            remedy='Pass dtype="float32" to round its numbers, or another dtype.',
        )
    is_bits = found.itemsize == 2 and found.kind in "iuV"
    raise ArgumentError(
        f"the array is {found.name}; a store holds {', '.join(ITEMSIZES)}",
        where="array",
        remedy=f"If these are the bits of bfloat16, pass {_viewed(array)}." if is_bits else "Convert it.",
    )


def _viewed(array: object) -> str:
    """The call that takes the bits of an array for bfloat16."""
    if hasattr(array, "detach"):
        return "array.view(torch.bfloat16)"
    lazy = "array" if hasattr(array, "view") else "dask.array.from_array(array)"  # h5py, zarr and xarray have no views
    return f"{lazy}.view(ml_dtypes.bfloat16)"


def computed(value: object, *, where: str) -> npt.NDArray[np.generic]:
    """A slice as a NumPy array; what is lazy is computed by threads of this process."""
    compute = getattr(value, "compute", None)  # of dask and xarray
    return as_array(compute(scheduler="threads") if callable(compute) else value, where=where)


# -- what an array says of itself ---------------------------------------------------------------------------------------


def _sliceable(array: object, *, where: str) -> Sliceable:
    try:
        is_array = hasattr(array, "shape") and hasattr(array, "dtype")
    except RuntimeError as error:
        raise ArgumentError(
            f"{kind_of(array)} without a shape: {error}", where=where, remedy="Pass a dense tensor, or a NumPy array."
        ) from error
    if isinstance(array, (str, bytes, Mapping)) or not is_array:
        raise ArgumentError(
            f"it is of type {type(cast('object', array)).__name__}; it must be an array of NumPy, zarr, h5py, xarray, dask or torch",
            where=where,
            remedy='Open files first: numpy.load(path, mmap_mode="r"), zarr.open_array(path), h5py.File(path)[name].',
        )
    return cast("Sliceable", array)


def _check_not_persisted(array: object) -> None:
    """Refuse an array of dask whose chunks are in the memory of a cluster: threads of one process cannot compute them."""
    layers = getattr(getattr(array, "dask", None), "layers", None)
    for layer in cast("Mapping[str, Any]", layers).values() if isinstance(layers, Mapping) else ():
        if layer.is_materialized() and type(next(iter(layer.values()), None)).__name__ == "Future":
            raise ArgumentError(
                "the array was persisted: its chunks are in the memory of a cluster",
                where="array",
                remedy="Pass the array as it was before persist(), or array.compute() if it fits into memory.",
            )


def _sizes(array: object, *, where: str) -> tuple[int, ...]:
    """Its shape in Python's integers. Lengths that dask does not know are no integers."""
    shape = cast("Sequence[SupportsIndex]", cast("Any", array).shape)
    try:
        return tuple(operator.index(size) for size in shape)
    except (TypeError, AttributeError):  # of torch, what is jagged has no such method
        is_dask = hasattr(array, "compute_chunk_sizes")
        raise ArgumentError(
            f"it has shape {tuple(shape)}, of which not all is known",
            where=where,
            remedy="Call compute_chunk_sizes()." if is_dask else "Pass a dense tensor, or a NumPy array.",
        ) from None


def _dims_of(array: object, dims: Sequence[str] | None, n_axes: int) -> tuple[str, ...]:
    named = getattr(array, "dims", None)  # of xarray; h5py has another kind of object there
    if dims is None and isinstance(named, tuple):
        dims = cast("tuple[str, ...]", named)
    if dims is None:
        dims = _DEFAULT_DIMS.get(n_axes, ())
    if isinstance(dims, str) or not isinstance(dims, Sequence) or not all(isinstance(name, str) for name in dims):
        raise ArgumentError(f"dims is {brief(dims)}; it must be a list of names", where="dims")
    found = tuple(dims)
    is_right = (
        len(found) == n_axes == len(set(found)) and set(found) <= set(AXES) and {"example", "d_model"} <= set(found)
    )
    if not is_right:
        raise ArgumentError(
            f"the {n_axes} axes of the array are {brief(list(found))}; they must be example and d_model, and may be layer and token, "
            "each once, in any order",
            where="dims",
            remedy='Name them: dims=("layer", "example", "token", "d_model").',
        )
    return found


def _numbers(array: Sliceable, *, where: str) -> np.dtype[np.generic]:
    """Its dtype; that of torch is found by an empty slice."""
    try:
        return np.dtype(cast("Any", array.dtype))
    except TypeError:
        try:
            none = array[slice(0, 0),]
        except (RuntimeError, NotImplementedError, TypeError) as error:  # a sparse tensor
            raise ArgumentError(
                f"{kind_of(array)} that cannot be sliced: {error}",
                where=where,
                remedy="Pass a dense tensor, or a NumPy array.",
            ) from error
        return as_array(none, where=where).dtype


def _dtype_of(array: Sliceable) -> np.dtype[np.generic]:
    found = _numbers(array, where="array")
    if found.kind not in "fiuV":
        raise ArgumentError(f"the array has dtype {found}; a store holds {', '.join(ITEMSIZES)}", where="array")
    return found


class _ChunkEnds:
    """Where the chunks of an array end along its examples.

    Args:
        lengths: That of all chunks, or that of each.
    """

    def __init__(self, lengths: int | tuple[int, ...]) -> None:
        self._length = lengths if isinstance(lengths, int) else None
        self._ends = [] if isinstance(lengths, int) else list(accumulate(lengths))

    def last_up_to(self, position: int) -> int:
        """The largest end that is not beyond a position; 0 where there is none."""
        if self._length is not None:
            return position // self._length * self._length
        found = bisect_right(self._ends, position)
        return self._ends[found - 1] if found else 0


def _chunk_ends(array: Sliceable, axis: int, n: int) -> _ChunkEnds | None:
    """Where chunks end; None where the array has none, or says something else by that name."""
    chunks = getattr(array, "chunks", None)
    if not isinstance(chunks, tuple) or len(cast("tuple[object, ...]", chunks)) != len(array.shape):
        return None
    along = cast("tuple[object, ...]", chunks)[axis]
    if isinstance(along, tuple):
        lengths = cast("tuple[int, ...]", along)
        return _ChunkEnds(lengths) if sum(lengths) == n else None
    return _ChunkEnds(along) if isinstance(along, int) and along > 0 else None


def _address(array: object) -> str | None:
    """The file of an array that is in one, as it says itself."""
    file = getattr(array, "file", None)
    if isinstance(name := getattr(file, "filename", None), str):  # h5py
        return f"{name}::{getattr(array, 'name', '')}"
    path = getattr(array, "filename", None) or getattr(array, "store_path", None)  # numpy.memmap, zarr
    return None if path is None else f"{path}{_part_of_map(array)}"


def _part_of_map(array: object) -> str:
    """Which bytes a part of a `numpy.memmap` has, since a part has the name of the whole file; "" for what is no part."""
    if not isinstance(array, np.memmap) or not isinstance(array.base, np.ndarray):
        return ""
    whole = byte_bounds(cast("npt.NDArray[np.generic]", array.base))
    part = byte_bounds(cast("npt.NDArray[np.generic]", array))
    return "" if part == whole else f"::{part[0] - whole[0]}:{part[1] - whole[0]}"
