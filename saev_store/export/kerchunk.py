"""Kerchunk references: Zarr v2 documents and byte ranges, as one JSON document or as a folder of Parquet files.

fsspec's `reference://` file system reads them, and so do zarr and xarray. In JSON all ranges name the template `u`: if the store
moves, one line changes, or `template_overrides={"u": …}` is passed. The Parquet layout has no templates.
"""

# pandas and fastparquet have no stubs.
# pyright: reportMissingTypeStubs=false

from __future__ import annotations

import base64
import io
import json
import os
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from typing import TYPE_CHECKING, Literal

import numpy as np

from saev_store._runtime.optional import need
from saev_store.core.arguments import check_choice, check_flag
from saev_store.core.layout import IntArray
from saev_store.errors import ArgumentError, NotFoundError, SaevStoreError, StoreExistsError
from saev_store.export._references import ArrayReferences, References, check_text, references, warn_if_many
from saev_store.export.targets import open_file, open_folder
from saev_store.sources.address import Url
from saev_store.transport import Entry, Transport
from saev_store.transport.durable import TEMP_PREFIX
from saev_store.zarr import Chunks

if TYPE_CHECKING:
    from saev_store.store.store import ShardStore

Format = Literal["json", "parquet"]

#: References formatted at once.
_STEP = 1 << 16
#: References in one Parquet file: some hundred KB, which a reader loads for each access.
_RECORD_SIZE = 100_000
_ROOT = ".zmetadata"
#: In the folder of an export that is not complete.
_UNFINISHED = ".saev_store_export"
_DTYPES = {"float32": "<f4", "float16": "<f2", "bool": "|b1", "uint8": "|u1", "int32": "<i4", "int64": "<i8"}


def write_kerchunk(
    store: ShardStore,
    path: Url,
    *,
    format: Format = "json",
    chunks: Chunks = "auto",
    base: str | None = None,
    templates: bool = True,
    storage_options: Mapping[str, object] | None = None,
) -> None:
    """Write references for fsspec's `reference://`, so for zarr and xarray without this package.

    Args:
        store: The opened store.
        path: The JSON document (a file of that name is replaced, if it is not in the folder of a store), or the folder of
            Parquet files (new, or an earlier export, complete or not); any fsspec URL.
        format: One JSON document, relocated by its template `u`; or Parquet, for very many references.
        chunks: As in `saev_store.zarr.open_view`; `"auto"` as for remote stores.
        base: Address of the store's folder for readers; default: its address here. With `""` Parquet files contain only the
            names of the shards, for readers with a file system of their own.
        templates: Whether a JSON document names `base` once, as the template `u`; if not, every range names it, as VirtualiZarr's
            `KerchunkJSONParser` requires.
        storage_options: For writing to `path`.

    Raises:
        AccessError: the storage of `path` cannot be written.
        ArgumentError: `chunks` is not a legal shape, the store holds bfloat16, it has no address for other processes, or
            `path` is no address, or names a file in the folder of a store.
        CorruptShardError: shards are missing or short.
        MissingDependencyError: `"parquet"` without fastparquet.
        StoreExistsError: the folder contains other files.

    Warns:
        SaevStoreWarning: there are a million references or more.
    """
    check_choice(format, ("json", "parquet"), name="format")
    templates = check_flag(templates, name="templates")
    if format == "parquet":
        need("fastparquet", install="saev-store[kerchunk]", where="format")
    elif base == "":
        raise ArgumentError("a JSON document names the store's folder once, in its template", where="base")
    if store.layout.dtype not in _DTYPES:
        raise ArgumentError(
            f"the store holds {store.layout.dtype}, which Zarr v2, and so these references, have no name for",
            where=store.url,
            remedy="Export to Icechunk or as a TensorStore spec, or copy the store as float32.",
        )
    if format == "json":
        target, name = open_file(store, path, storage_options)
        found = references(store, chunks=chunks, base=base)
        warn_if_many(found, what="a JSON document")
        # Readers would take braces in the template's value for a template.
        templates = templates and "{{" not in found.base
        target.put(name, b"".join(_json_pieces(found, templates=templates)))
    else:
        folder = open_folder(store, path, storage_options)
        check_text(store, base)
        found = references(store, chunks=chunks, base=base)
        warn_if_many(found, what="a set of Parquet files")
        _write_parquet(found, os.fspath(path), folder)


# -- documents ---------------------------------------------------------------------------------------------------------


def v2_documents(found: References) -> dict[str, dict[str, object]]:
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
        "fill_value": "NaN" if data_type in {"float16", "float32"} else None,
        "order": "C",
        "dimension_separator": ".",
    }
    return {f"{name}/.zarray": array, f"{name}/.zattrs": {"_ARRAY_DIMENSIONS": list(dims)}}


# -- JSON --------------------------------------------------------------------------------------------------------------


def _json_pieces(found: References, *, templates: bool) -> Iterator[bytes]:
    """One entry per line; the template is first, where it is easy to find."""
    known = f'"templates": {{"u": {json.dumps(found.base)}}}, ' if templates else ""
    yield f'{{"version": 1, {known}"refs": {{\n'.encode()
    documents = v2_documents(found)
    consolidated = {"zarr_consolidated_format": 1, "metadata": documents}
    for key, document in {".zmetadata": consolidated, **documents}.items():
        yield f"{json.dumps(key)}: {json.dumps(json.dumps(document, allow_nan=False))},\n".encode()
    for array in found.arrays:
        yield from _array_pieces(array, "{{u}}" if templates else json.dumps(found.base)[1:-1])
    entries = [f'"{name}/0": {json.dumps(_inline(values.tobytes()))}' for name, values in found.coordinates.items()]
    yield (",\n".join(entries) + "\n}}\n").encode()


def _array_pieces(array: ArrayReferences, base: str) -> Iterator[bytes]:
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
                lines.append(f'"{key}": ["{base}/{array.files[file]}", {offset}, {array.chunk_nbytes}],\n')
        yield "".join(lines).encode()


def _inline(data: bytes) -> str:
    return f"base64:{base64.b64encode(data).decode()}"


# -- Parquet -----------------------------------------------------------------------------------------------------------


def _write_parquet(found: References, path: str, target: Transport) -> None:
    """The layout of fsspec's `LazyReferenceMapper`: `<array>/refs.<n>.parq` of equally many rows, and `.zmetadata` last."""
    if "{" in path or "}" in path:  # fsspec's reader fills in what is between them
        raise ArgumentError(f"{path!r} has braces, which readers of references take for a pattern", where="path")
    lock = f"{TEMP_PREFIX}lock"
    with target.lock(lock):
        try:
            _write_records(found, path, target)
        finally:
            with suppress(SaevStoreError):  # it does no harm
                target.delete(lock)


def _write_records(found: References, path: str, target: Transport) -> None:
    """All files of an export, in a folder whose lock is held."""
    # What is begun and not yet renamed is of an export that was killed, or of another one.
    names = {entry.path for entry in _listed(target) if not entry.name.startswith(TEMP_PREFIX)}
    if names and not names & {_ROOT, _UNFINISHED}:
        raise StoreExistsError(
            "the folder contains files that are not an export",
            where=path,
            remedy="Name a folder that is new, or one that an export may replace.",
        )
    target.put(_UNFINISHED, b"")
    target.delete(_ROOT)
    for array in found.arrays:
        for record in range(-(-array.n_chunks // _RECORD_SIZE)):
            numbers = np.arange(record * _RECORD_SIZE, min((record + 1) * _RECORD_SIZE, array.n_chunks))
            target.put(f"{array.name}/refs.{record}.parq", _record(array, numbers, found.base))
    for name, values in found.coordinates.items():
        target.put(f"{name}/refs.0.parq", _parquet({"raw": [values.tobytes()]}))
    document = {"metadata": v2_documents(found), "record_size": _RECORD_SIZE}
    target.put(_ROOT, json.dumps(document, allow_nan=False).encode())
    target.delete(_UNFINISHED)


def _listed(target: Transport) -> Sequence[Entry]:
    try:
        return target.list("")
    except NotFoundError:
        return ()


def _record(array: ArrayReferences, numbers: IntArray, base: str) -> bytes:
    """One file of references. It has a column `raw` only if a value is given as bytes: readers test its absence."""
    import pandas as pd

    files, offsets = array.locate(numbers)
    first, last = int(files.min()), int(files.max())
    names = [f"{base}/{name}" if base else name for name in array.files[first : last + 1]]
    codes, sizes = files - first, np.full(len(numbers), array.chunk_nbytes)
    columns: dict[str, object] = {"offset": offsets, "size": sizes}
    inline = {place: array.inline[n] for place, n in enumerate(numbers.tolist()) if n in array.inline}
    if inline:
        for place in inline:
            codes[place], offsets[place], sizes[place] = -1, 0, 0
        columns["raw"] = [inline.get(place) for place in range(len(numbers))]
    paths = pd.Categorical.from_codes(codes, names)  # pyright: ignore[reportUnknownMemberType]  # codes have no type
    return _parquet({"path": paths, **columns})


def _parquet(columns: Mapping[str, object]) -> bytes:
    import fastparquet
    import pandas as pd

    frame = pd.DataFrame(
        {name: pd.Series(values, dtype=object) if name == "raw" else values for name, values in columns.items()}
    )
    kept = _Kept()
    fastparquet.write(  # pyright: ignore[reportUnknownMemberType]  # most arguments have no types
        "refs",
        frame,
        open_with=lambda *_: kept,  # pyright: ignore[reportUnknownLambdaType]  # called with a path and a mode
        compression="ZSTD",
        write_index=False,
        stats=False,  # pyright: ignore[reportArgumentType]  # takes a bool, though its default is a list
        object_encoding={"path": "utf8", "raw": "bytes"},  # pyright: ignore[reportArgumentType]  # takes a dict, though its default is a str
        has_nulls=[name for name in ("path", "raw") if name in columns],  # pyright: ignore[reportArgumentType]  # takes a list, though its default is a bool
    )
    return kept.getvalue()


class _Kept(io.BytesIO):
    """A file in memory whose content stays readable after `close()`."""

    def close(self) -> None:
        pass
