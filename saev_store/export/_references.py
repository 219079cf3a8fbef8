"""The content of all exports: shape and chunks of each array, and the byte range of each chunk.

Other readers do not pad: a chunk that ends after its file is exported as bytes. There is at most one for each array, small by
default: the last one of the activations, if the last shard is cut, and those of the token arrays.
"""

from __future__ import annotations

import math
import warnings
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING
from urllib.parse import SplitResult, urlsplit

import numpy as np

from saev_store.core.chunk_grid import ChunkGrid, divisors
from saev_store.core.layout import DIMS, IntArray, shard_name
from saev_store.core.token_arrays import TokenArray
from saev_store.errors import ArgumentError, SaevStoreWarning, brief, outside
from saev_store.names import printable
from saev_store.zarr import Chunks, chunk_shape
from saev_store.zarr.documents import ARRAY, TOKEN_DIMS, attributes_of, coordinates, token_variables

if TYPE_CHECKING:
    from saev_store.store.store import ShardStore

#: Readers of exports make a request for each chunk, so chunks suit remote stores.
_MAX_GAP_BYTES = 1 << 20
_TOKEN_CHUNK_BYTES = 1 << 20
#: Upper bound on a chunk that is exported as bytes.
_INLINE_MAX_BYTES = 32 << 20
#: About 100 MB of JSON.
MANY_REFERENCES = 1_000_000


@dataclass(frozen=True)
class ArrayReferences:
    """An array and the byte ranges of its chunks.

    Attributes:
        name: Its name in the group.
        data_type: As Zarr v3 spells it.
        shape: Its shape.
        chunk: Shape of a chunk.
        dims: Names of its axes.
        chunk_nbytes: Bytes of each chunk.
        files: Names of the files, relative to the store.
        locate: Maps numbers of chunks, in C order, to (numbers of files, first bytes).
        inline: Chunks that are exported as bytes, by number.
        head: Values before the first chunk, which complete the last chunk of an array that this one continues.
    """

    name: str
    data_type: str
    shape: tuple[int, ...]
    chunk: tuple[int, ...]
    dims: tuple[str, ...]
    chunk_nbytes: int
    files: Sequence[str]
    locate: Callable[[IntArray], tuple[IntArray, IntArray]] = field(repr=False)
    inline: Mapping[int, bytes] = field(repr=False)
    head: bytes = field(default=b"", repr=False)

    @property
    def n_in_head(self) -> int:
        """Examples in `head`."""
        return len(self.head) * self.chunk[0] // self.chunk_nbytes

    @property
    def counts(self) -> tuple[int, ...]:
        """Chunks along each axis."""
        return tuple(-(-full // part) for full, part in zip(self.shape, self.chunk, strict=True))

    @property
    def n_chunks(self) -> int:
        return math.prod(self.counts)


@dataclass(frozen=True)
class References:
    """The content of an export: arrays in files, coordinates as values, attributes, and the address of the store.

    Attributes:
        base: Address of the store's folder for readers.
        arrays: `activations`, and the token arrays.
        coordinates: Values by name, which is also the name of their axis.
        attributes: The group's.
    """

    base: str
    arrays: tuple[ArrayReferences, ...]
    coordinates: Mapping[str, IntArray]
    attributes: Mapping[str, object]


def references(
    store: ShardStore,
    *,
    chunks: Chunks = "auto",
    base: str | None = None,
    inline: bool = True,
    token_rows: Mapping[str, int] | None = None,
    n_before: int = 0,
) -> References:
    """The content of an export of a store.

    Args:
        store: An opened store without damage.
        chunks: As in `ShardStore.as_zarr`.
        base: Address of the store's folder for readers; default: its address here.
        inline: Whether a chunk that ends after its file may be given as bytes. If not, chunks are chosen so that none does.
        token_rows: Examples in a chunk of each token array, by the name of its variable; default: about 1 MiB.
        n_before: Examples in the arrays that these continue. Chunks of token arrays begin where a chunk of theirs ends.

    Raises:
        ArgumentError: `chunks` is not a legal shape, more than 32 MiB would have to be copied, a chunk of that shape would
            need bytes and `inline` is false, or the store has no address for other processes and `base` is missing.
        CorruptShardError: shards are missing or short; other readers would return fill values.
    """
    layout = store.layout
    store.validate(progress=False).raise_if_bad()
    address = usable_base(store, base)
    shape = chunk_shape(layout, chunks, max_gap_bytes=_MAX_GAP_BYTES)
    n_last, rows = layout.examples_in(layout.n_shards - 1), shape[0] if shape else 0
    # What is no length at all is refused by `ChunkGrid`.
    if not inline and rows in range(1, layout.n_examples + 1) and n_last % rows:
        common = n_last if layout.n_shards == 1 else math.gcd(n_last, layout.examples_per_shard)
        whole = max(n for n in divisors(common) if n <= rows)
        if chunks != "auto":
            raise ArgumentError(
                f"chunks of {rows} examples do not divide the last shard, which has {n_last}",
                where="chunks",
                remedy=f"Take {whole} examples.",
            )
        shape = (whole, *shape[1:])
    grid = ChunkGrid(layout, shape)
    tokens = token_variables(store.token_arrays.described())
    arrays = [_activations(store, grid)]
    arrays += [
        _tokens(store, name, tokens[name], (token_rows or {}).get(name), n_before=n_before, inline=inline)
        for name in tokens
    ]
    attributes = attributes_of(store.metadata, url=address)
    return References(address, tuple(arrays), coordinates(layout, labelled=bool(tokens)), attributes)


def warn_if_many(found: References, *, what: str) -> None:
    """Warn before an export becomes large."""
    n_references = sum(array.n_chunks for array in found.arrays)
    if n_references >= MANY_REFERENCES:
        warnings.warn(
            f"{n_references:,} references make {what} of about 100 bytes each; larger chunks make fewer",
            SaevStoreWarning,
            stacklevel=outside(),
        )


def usable_base(store: ShardStore, base: str | None) -> str:
    """The address that an export names, without a slash at its end."""
    if base is not None:
        if not isinstance(base, str):  # pyright: ignore[reportUnnecessaryIsInstance]  # callers may not check types
            raise ArgumentError(f"{brief(base)} is not an address of a store's folder", where="base")
        if base and ("{{" in base or not base.strip("/")):
            raise ArgumentError(f"{base!r} is not an address of a store's folder", where="base")
        return base.rstrip("/")
    url = store.url
    if url.startswith("/"):
        return f"file://{url}"
    if url.startswith("memory://") or "::" in url or "{{" in url:
        raise ArgumentError(
            f"{url!r} has no meaning for other processes",
            where="base",
            remedy="Pass the address for readers, such as base='s3://bucket/shards/<HASH>'.",
        )
    return url


def url_parts(url: str, *, where: str) -> SplitResult:
    """The parts of an address.

    Raises:
        ArgumentError: it is none, such as one with half of the brackets of an IPv6 address.
    """
    try:
        return urlsplit(url)
    except ValueError as error:
        raise ArgumentError(f"{brief(url)} is no address: {error}", where=where) from None


def check_text(store: ShardStore, base: str | None) -> None:
    """Refuse an address, `usable_base`, that formats cannot hold whose texts are UTF-8.

    Raises:
        ArgumentError: the name of a folder is not UTF-8.
    """
    address = usable_base(store, base)
    if address.encode(errors="replace").decode() != address:
        raise ArgumentError(
            f"'{printable(address)}' has bytes that are not UTF-8, which this format cannot hold",
            where="base",
            remedy="Name the store by another path, such as a symbolic link.",
        )


def _activations(store: ShardStore, grid: ChunkGrid) -> ArrayReferences:
    layout = grid.layout

    def locate(numbers: IntArray) -> tuple[IntArray, IntArray]:
        # One axis is cut, and those left of it have length 1 (pivot rule): chunks are consecutive.
        example, layer, token, column = np.unravel_index(numbers, grid.counts)
        k, layers, tokens, columns = grid.chunk
        files, offsets = layout.locate_many(example * k, layer * layers, token * tokens)
        return files, offsets + column * columns * layout.itemsize

    inline: dict[int, bytes] = {}
    n_examples_left = layout.examples_in(layout.n_shards - 1) % grid.chunk[0]
    if n_examples_left:
        # Only the last chunk can be short, and only if chunks are whole examples.
        end = layout.used_nbytes(layout.n_shards - 1)
        path, start = shard_name(layout.n_shards - 1), end - n_examples_left * layout.example_nbytes
        if store.transport.size(path) < start + grid.chunk_nbytes:
            last = math.prod(grid.counts) - 1
            inline[last] = _padded(store, path, start, end, grid.chunk_nbytes, where="chunks")
    files = [shard_name(shard_idx) for shard_idx in range(layout.n_shards)]
    return ArrayReferences(
        ARRAY, layout.dtype, layout.shape, grid.chunk, DIMS, grid.chunk_nbytes, files, locate, inline
    )


def _tokens(
    store: ShardStore, name: str, array: TokenArray, rows: int | None, *, n_before: int, inline: bool
) -> ArrayReferences:
    layout, path = store.layout, array.file_name
    example_nbytes = array.example_nbytes(layout)
    rows = rows or max(1, min(layout.n_examples, _TOKEN_CHUNK_BYTES // example_nbytes))
    if not inline:
        rows = max(n for n in divisors(layout.n_examples) if n <= rows)
    nbytes = rows * example_nbytes
    n_in_head = min(-n_before % rows, layout.n_examples)
    n_examples, start = layout.n_examples - n_in_head, n_in_head * example_nbytes

    def locate(numbers: IntArray) -> tuple[IntArray, IntArray]:
        row = np.unravel_index(numbers, (-(-n_examples // rows), 1))[0]
        return np.zeros_like(numbers), start + row.astype(np.int64) * nbytes

    short: dict[int, bytes] = {}
    if n_examples % rows:
        last = n_examples // rows
        short[last] = _padded(store, path, start + last * nbytes, array.nbytes(layout), nbytes, where=name)
    head = bytes(store.transport.get_ranges(path, starts=[0], ends=[start])[0]) if n_in_head else b""
    n_content = layout.content_tokens_per_example
    shape, chunk = (n_examples, n_content), (rows, n_content)
    return ArrayReferences(name, array.dtype, shape, chunk, TOKEN_DIMS, nbytes, [path], locate, short, head)


def _padded(store: ShardStore, path: str, start: int, end: int, nbytes: int, *, where: str) -> bytes:
    if nbytes > _INLINE_MAX_BYTES:
        raise ArgumentError(
            f"the last chunk of {path} has {end - start:,} of {nbytes:,} bytes, and the file ends there: the export would "
            "have to contain the whole chunk",
            where=where,
            remedy=f"Take chunks of at most {_INLINE_MAX_BYTES:,} bytes.",
        )
    (found,) = store.transport.get_ranges(path, starts=[start], ends=[end])
    return bytes(found) + bytes(nbytes - (end - start))
