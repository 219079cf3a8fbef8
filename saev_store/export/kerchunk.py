"""Kerchunk references: Zarr v2 documents and byte ranges as one JSON document.

fsspec's `reference://` file system reads it, and so do zarr and xarray. All ranges name the template `u`: if the store moves, one
line changes, or `template_overrides={"u": …}` is passed.
"""

from __future__ import annotations

import base64
import json
import posixpath
from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING

import numpy as np

from saev_store.errors import AccessError
from saev_store.export._references import ArrayReferences, References, references, warn_if_many
from saev_store.transport import Writes, open_transport
from saev_store.zarr import Chunks

if TYPE_CHECKING:
    from saev_store.store.store import ShardStore

#: References formatted at once.
_STEP = 1 << 16
_DTYPES = {"float32": "<f4", "uint8": "|u1", "int64": "<i8"}


def write_kerchunk(
    store: ShardStore,
    path: str,
    *,
    chunks: Chunks = "auto",
    base: str | None = None,
    storage_options: Mapping[str, object] | None = None,
) -> None:
    """Write references for fsspec's `reference://`, so for zarr and xarray without this package.

    Args:
        store: The opened store.
        path: The JSON document; any fsspec URL.
        chunks: As in `saev_store.zarr.open_view`; `"auto"` as for remote stores.
        base: Address of the store's folder for readers; default: its address here.
        storage_options: For writing to `path`.

    Raises:
        AccessError: `path` cannot be written.
        ArgumentError: `chunks` is not a legal shape, or the store has no address for other processes.
        CorruptShardError: shards are missing or short.

    Warns:
        SaevStoreWarning: there are a million references or more.
    """
    found = references(store, chunks=chunks, base=base)
    warn_if_many(found, what="a JSON document")
    folder, name = posixpath.split(path.rstrip("/"))
    transport = open_transport(folder or ".", storage_options)
    if not isinstance(transport, Writes):
        raise AccessError("this storage cannot be written", where=transport.url)
    transport.put(name, b"".join(_json_pieces(found)))


def _v2_documents(found: References) -> dict[str, dict[str, object]]:
    """The Zarr v2 documents by key, without `.zmetadata`."""
    documents: dict[str, dict[str, object]] = {".zgroup": {"zarr_format": 2}, ".zattrs": dict(found.attributes)}
    for array in found.arrays:
        documents |= _array_documents(array.name, array.data_type, array.shape, array.chunk, array.dims)
    for name, values in found.coordinates.items():
        documents |= _array_documents(name, "int64", values.shape, values.shape, (name,))
    return documents


def _array_documents(
    name: str, data_type: str, shape: tuple[int, ...], chunk: tuple[int, ...], dims: tuple[str, ...]
) -> dict[str, dict[str, object]]:
    array: dict[str, object] = {
        "zarr_format": 2,
        "shape": list(shape),
        "chunks": list(chunk),
        "dtype": _DTYPES[data_type],
        "compressor": None,
        "filters": None,
        # xarray masks values that equal a v2 fill value: a label 0 would become NaN.
        "fill_value": "NaN" if data_type == "float32" else None,
        "order": "C",
        "dimension_separator": ".",
    }
    return {f"{name}/.zarray": array, f"{name}/.zattrs": {"_ARRAY_DIMENSIONS": list(dims)}}


def _json_pieces(found: References) -> Iterator[bytes]:
    """One entry per line; the template is first, where it is easy to find."""
    yield f'{{"version": 1, "templates": {{"u": {json.dumps(found.base)}}}, "refs": {{\n'.encode()
    documents = _v2_documents(found)
    consolidated = {"zarr_consolidated_format": 1, "metadata": documents}
    for key, document in {".zmetadata": consolidated, **documents}.items():
        yield f"{json.dumps(key)}: {json.dumps(json.dumps(document, allow_nan=False))},\n".encode()
    for array in found.arrays:
        yield from _array_pieces(array)
    entries = [f'"{name}/0": {json.dumps(_inline(values.tobytes()))}' for name, values in found.coordinates.items()]
    yield (",\n".join(entries) + "\n}}\n").encode()


def _array_pieces(array: ArrayReferences) -> Iterator[bytes]:
    for first in range(0, array.n_chunks, _STEP):
        numbers = np.arange(first, min(first + _STEP, array.n_chunks))
        files, offsets = array.locate(numbers)
        places = zip(*(axis.tolist() for axis in np.unravel_index(numbers, array.counts)), strict=True)
        lines: list[str] = []
        for number, place, file, offset in zip(numbers.tolist(), places, files.tolist(), offsets.tolist(), strict=True):
            key = f"{array.name}/{'.'.join(map(str, place))}"
            if number in array.inline:
                lines.append(f'"{key}": "{_inline(array.inline[number])}",\n')
            else:
                lines.append(f'"{key}": ["{{{{u}}}}/{array.files[file]}", {offset}, {array.chunk_nbytes}],\n')
        yield "".join(lines).encode()


def _inline(data: bytes) -> str:
    return f"base64:{base64.b64encode(data).decode()}"
