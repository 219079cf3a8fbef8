"""The keys of the Zarr view and the places of their values, computed: no list of chunks is kept."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import product
from operator import lt
from typing import Literal, TypeAlias, cast

from saev_store.core.chunk_grid import ChunkGrid, Extent, Shape, default_chunk
from saev_store.core.layout import Layout
from saev_store.core.token_arrays import TokenArray
from saev_store.errors import ArgumentError, brief
from saev_store.zarr.documents import ARRAY, array_documents, coordinates, group_document, to_json

#: A chunk shape over (example, layer, token, d_model), or the one that suits the readers.
Chunks: TypeAlias = Literal["auto"] | Sequence[int]

#: A chunk of a token array has at most about this size.
_TOKEN_CHUNK_BYTES = 16 << 20
_DOCUMENT = "zarr.json"
#: A place in the grid as keys spell it, and the key of a chunk: the name of its array and its places.
_NUMBER = re.compile(r"0|[1-9][0-9]{0,18}")
_CHUNK = re.compile(rf"([^/]+)/c/((?:{_NUMBER.pattern})(?:/(?:{_NUMBER.pattern}))*)")


@dataclass(frozen=True)
class TensorKeys:
    """The keys of a store's Zarr group and the places of their values. Pure: nothing here reads a file.

    Attributes:
        grid: The grid of chunks.
        attributes: The group's attributes.
        token_arrays: The token arrays by the name of their variable.
        dtype: What readers see; where it is not the stored one, the view converts.
    """

    grid: ChunkGrid
    attributes: Mapping[str, object]
    token_arrays: Mapping[str, TokenArray]
    dtype: str = "float32"

    @cached_property
    def converts(self) -> bool:
        """Whether readers see another dtype than the stored one."""
        return self.dtype != self.grid.layout.dtype

    def rows_of(self, array: TokenArray) -> int:
        """Examples in a chunk of a token array: those of a shard, or as many as fit into 16 MiB."""
        layout = self.grid.layout
        most = max(1, _TOKEN_CHUNK_BYTES // array.example_nbytes(layout))
        return min(layout.n_examples, layout.examples_per_shard, most)

    @cached_property
    def documents(self) -> dict[str, bytes]:
        """The documents by key."""
        tokens = {name: (array.dtype, self.rows_of(array)) for name, array in self.token_arrays.items()}
        arrays = array_documents(self.grid, tokens, dtype=self.dtype)
        documents = {f"{name}/{_DOCUMENT}": to_json(document) for name, document in arrays.items()}
        return {_DOCUMENT: to_json(group_document(self.attributes, arrays)), **documents}

    @cached_property
    def counts(self) -> dict[str, tuple[int, ...]]:
        """How many chunks each array has along each of its axes."""
        counts: dict[str, tuple[int, ...]] = {ARRAY: self.grid.counts}
        layout = self.grid.layout
        counts |= dict.fromkeys(coordinates(layout, labelled=bool(self.token_arrays)), (1,))
        for name, array in self.token_arrays.items():
            counts[name] = (-(-layout.n_examples // self.rows_of(array)), 1)
        return counts

    def find(self, key: str) -> bytes | Extent | None:
        """The value of a key, or its place in a file, or None if there is no such key."""
        document = self.documents.get(key)
        if document is not None:
            return document
        chunk = _CHUNK.fullmatch(key)
        if chunk is None:
            return None
        name, position = chunk[1], [*map(int, chunk[2].split("/"))]
        counts = self.counts.get(name)
        if counts is None or len(position) != len(counts) or not all(map(lt, position, counts)):
            return None
        if name == ARRAY:
            return self.grid.extent(position)
        layout, array = self.grid.layout, self.token_arrays.get(name)
        if array is not None:
            nbytes = self.rows_of(array) * array.example_nbytes(layout)
            start = position[0] * nbytes
            return Extent(array.file_name, start, min(start + nbytes, array.nbytes(layout)), nbytes)
        return coordinates(layout, labelled=bool(self.token_arrays))[name].tobytes()

    def below(self, prefix: str) -> Iterator[str]:
        """All keys that begin with a prefix, in no particular order."""
        yield from (key for key in self.documents if key.startswith(prefix))
        for array, counts in self.counts.items():
            folder = f"{array}/c/"
            if folder.startswith(prefix):
                given, partial = [], ""
            elif prefix.startswith(folder):
                *given, partial = prefix[len(folder) :].split("/")
            else:
                continue
            if len(given) >= len(counts):
                continue
            fixed = [_number(part) for part in given]
            if any(not 0 <= place < count for place, count in zip(fixed, counts, strict=False)):
                continue
            here, *rest = counts[len(given) :]
            head = "".join(f"{place}/" for place in fixed)
            for place in _beginning_with(partial, here):
                for places in product(*map(range, rest)):
                    yield f"{folder}{head}{'/'.join(map(str, (place, *places)))}"

    def children(self, folder: str) -> Iterator[str]:
        """The names directly below a folder (`""`, or a path without a slash at its end)."""
        if folder == "":
            yield _DOCUMENT
            yield from self.counts
            return
        array, *parts = folder.split("/")
        counts = self.counts.get(array)
        if counts is None:
            return
        if not parts:
            yield from (_DOCUMENT, "c")
        elif parts[0] == "c" and len(parts) <= len(counts):
            fixed = [_number(part) for part in parts[1:]]
            if all(0 <= place < count for place, count in zip(fixed, counts, strict=False)):
                yield from map(str, range(counts[len(fixed)]))

    def __getstate__(self) -> dict[str, object]:
        # What can be computed again is not pickled.
        return {
            "grid": self.grid,
            "attributes": self.attributes,
            "token_arrays": self.token_arrays,
            "dtype": self.dtype,
        }

    def __hash__(self) -> int:
        return hash((self.grid, tuple(self.token_arrays), self.dtype))


def chunk_shape(layout: Layout, chunks: Chunks, *, max_gap_bytes: float) -> Shape:
    """The given shape as plain integers, which `ChunkGrid` checks; for `"auto"` the one that suits readers with `max_gap_bytes`.

    Raises:
        ArgumentError: `chunks` is neither `"auto"` nor a sequence.
    """
    if isinstance(chunks, str) and chunks == "auto":
        return default_chunk(layout, max_gap_bytes=max_gap_bytes)
    try:
        if isinstance(chunks, str):
            raise TypeError
        return cast(
            "Shape", tuple(int(n) if hasattr(n, "__index__") and not isinstance(n, bool) else n for n in chunks)
        )
    except TypeError:
        raise ArgumentError(
            f'{brief(chunks)} is not a chunk shape: pass four integers or "auto"', where="chunks"
        ) from None


def _number(text: str) -> int:
    """A place in the grid as keys spell it, or -1."""
    return int(text) if _NUMBER.fullmatch(text) else -1


def _beginning_with(text: str, count: int) -> Iterator[int]:
    """The numbers below `count` whose digits begin with `text`."""
    if text == "":
        yield from range(count)
        return
    low = _number(text)
    if low < 0:
        return
    high = low + 1
    while low < count:
        yield from range(low, min(high, count))
        if low == 0:
            return
        low, high = low * 10, high * 10
