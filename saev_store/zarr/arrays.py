"""The arrays of a store's Zarr group, and the places of their chunks: arithmetic, no list of chunks is kept."""

from __future__ import annotations

import math
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, fields
from functools import cached_property
from itertools import product
from typing import NamedTuple

from saev_store.core.chunk_grid import Shape
from saev_store.core.layout import DIMS, Layout, shard_name
from saev_store.core.token_arrays import TokenArray
from saev_store.zarr.documents import (
    ARRAY,
    TOKEN_DIMS,
    Document,
    coordinates,
    group_document,
    to_json,
)

_DOCUMENT = "zarr.json"
_NUMBER = re.compile(r"0|[1-9][0-9]{0,18}", re.ASCII)


class Extent(NamedTuple):
    """The place of a chunk: bytes `start` to `end` of a file, then zeros up to `nbytes`.

    Attributes:
        path: The file, relative to the store.
        start: First byte.
        end: One past the last byte that has to be in the file.
        nbytes: Length of the chunk; more than `end - start` where it goes beyond the examples.
        dtype: The stored dtype of 16 bits, if the numbers are shown as float32; else "".
    """

    path: str
    start: int
    end: int
    nbytes: int
    dtype: str = ""


@dataclass(frozen=True)
class ChunkedArray:
    """An uncompressed array whose chunks follow each other in files, in C order.

    Attributes:
        dtype: Of what is stored, as Zarr v3 spells it.
        shape: Its shape.
        chunk: Shape of a chunk.
        dims: Names of its axes.
        itemsize: Bytes of a stored number.
        file_nbytes: Bytes of its chunks in each file but the last.
        file_name: Its only file; "" for shards.
        values: The bytes of its only chunk, if that is in no file.
        shown_dtype: What readers see, if that is another dtype.
        counts: Chunks along each axis.
        chunk_nbytes: Stored bytes of a chunk.
    """

    dtype: str
    shape: tuple[int, ...]
    chunk: tuple[int, ...]
    dims: tuple[str, ...]
    itemsize: int
    file_nbytes: int
    file_name: str = ""
    values: bytes | None = None
    shown_dtype: str = ""

    counts: tuple[int, ...] = field(init=False)
    chunk_nbytes: int = field(init=False)

    def __post_init__(self) -> None:
        counts = tuple(-(-full // part) for full, part in zip(self.shape, self.chunk, strict=True))
        # Frozen: fields cannot be assigned.
        self.__dict__.update(counts=counts, chunk_nbytes=math.prod(self.chunk) * self.itemsize)

    @property
    def document(self) -> Document:
        """Its `zarr.json`."""
        dtype = self.shown_dtype or self.dtype
        endian = {} if dtype in {"bool", "uint8"} else {"configuration": {"endian": "little"}}
        return {
            "zarr_format": 3,
            "node_type": "array",
            "shape": list(self.shape),
            "data_type": dtype,
            "chunk_grid": {"name": "regular", "configuration": {"chunk_shape": list(self.chunk)}},
            "chunk_key_encoding": {"name": "default", "configuration": {"separator": "/"}},
            # No chunk is ever missing. If this value is read all the same, it must not look like an activation.
            "fill_value": "NaN" if "float" in dtype else False if dtype == "bool" else 0,
            "codecs": [{"name": "bytes", **endian}],
            "attributes": {},
            "dimension_names": list(self.dims),
            "storage_transformers": [],
        }

    def find(self, place: str) -> bytes | Extent | None:
        """The chunk at a place in the grid as keys spell it, such as `0/2/0/0`; None if there is none.

        >>> labels = ChunkedArray("uint8", (7, 4), (3, 4), ("example", "content_token"), 1, 28, "labels.bin")
        >>> labels.find("2/0"), labels.find("3/0")
        (Extent(path='labels.bin', start=24, end=28, nbytes=12, dtype=''), None)
        """
        parts, number = place.split("/"), 0  # its number in C order
        if len(parts) != len(self.counts):
            return None
        for part, count in zip(parts, self.counts, strict=True):
            if not _NUMBER.fullmatch(part) or int(part) >= count:
                return None
            number = number * count + int(part)
        if self.values is not None:
            return self.values
        file_idx, start = divmod(number * self.chunk_nbytes, self.file_nbytes)
        left = math.prod(self.shape) * self.itemsize - file_idx * self.file_nbytes
        end = min(start + self.chunk_nbytes, left)
        path = self.file_name or shard_name(file_idx)
        return Extent(path, start, end, self.chunk_nbytes, self.dtype if self.shown_dtype else "")


def stored_arrays(
    layout: Layout, chunk: Shape, token_arrays: Mapping[str, TokenArray], *, dtype: str, token_rows: Mapping[str, int]
) -> dict[str, ChunkedArray]:
    """The arrays that are in files, by name: the activations, and token arrays.

    Args:
        layout: The geometry.
        chunk: Shape of a chunk of the activations, which `chunk_shape` has checked.
        token_arrays: By the names of their variables.
        dtype: What readers see of the activations.
        token_rows: Examples in a chunk of each token array.
    """
    shown = "" if dtype == layout.dtype else dtype
    found = {
        ARRAY: ChunkedArray(
            layout.dtype, layout.shape, chunk, DIMS, layout.itemsize, layout.shard_nbytes, shown_dtype=shown
        )
    }
    n_content = layout.content_tokens_per_example
    for name, array in token_arrays.items():
        shape, rows = (layout.n_examples, n_content), (token_rows[name], n_content)
        itemsize = array.numpy_dtype.itemsize
        found[name] = ChunkedArray(
            array.dtype, shape, rows, TOKEN_DIMS, itemsize, array.nbytes(layout), array.file_name
        )
    return found


@dataclass(frozen=True)
class TensorKeys:
    """The keys of a store's Zarr group and the places of their values. Pure: nothing here reads a file.

    Attributes:
        layout: The geometry.
        arrays: The arrays that are in files, by name.
        token_arrays: Token arrays by the names of their files.
        attributes: The group's.
        readable: Leading bytes that can be trusted of damaged shards, by file name.
    """

    layout: Layout
    arrays: Mapping[str, ChunkedArray]
    token_arrays: Mapping[str, TokenArray]
    attributes: Mapping[str, object]
    readable: Mapping[str, int]

    @cached_property
    def every(self) -> dict[str, ChunkedArray]:
        """All arrays by name, with the coordinates."""
        found = dict(self.arrays)
        for name, values in coordinates(self.layout, labelled=bool(self.token_arrays)).items():
            n = len(values)
            found[name] = ChunkedArray("int64", (n,), (n,), (name,), 8, 8 * n, values=values.tobytes())
        return found

    @cached_property
    def documents(self) -> dict[str, bytes]:
        """The documents by key; the group's contains those of all arrays, so that opening is one read."""
        arrays = {name: array.document for name, array in self.every.items()}
        documents = {f"{name}/{_DOCUMENT}": to_json(document) for name, document in arrays.items()}
        return {_DOCUMENT: to_json(group_document(self.attributes, arrays)), **documents}

    def find(self, key: str) -> bytes | Extent | None:
        """The value of a key, or its place in a file, or None if there is no such key."""
        if key in self.documents:
            return self.documents[key]
        name, _, place = key.partition("/c/")
        array = self.every.get(name)
        return None if array is None else array.find(place)

    def list(self) -> Iterator[str]:
        """All keys; a store of millions of chunks has millions."""
        yield from self.documents
        for name, array in self.every.items():
            for place in product(*map(range, array.counts)):
                yield f"{name}/c/{'/'.join(map(str, place))}"

    def children(self, folder: str) -> Iterator[str]:
        """The names directly below a folder (`""`, or a path without a slash at its end)."""
        name, *rest = folder.split("/")
        array = self.every.get(name)
        if folder == "":
            yield from (_DOCUMENT, *self.every)
        elif array is not None and not rest:
            yield from (_DOCUMENT, "c")
        elif array is not None and rest[0] == "c" and len(rest) <= len(array.counts):
            zeros = ["0"] * (len(array.counts) - len(rest) + 1)
            if array.find("/".join([*rest[1:], *zeros])) is not None:
                yield from map(str, range(array.counts[len(rest) - 1]))

    def __getstate__(self) -> dict[str, object]:
        # What can be computed again is not pickled.
        return {each.name: vars(self)[each.name] for each in fields(self)}
