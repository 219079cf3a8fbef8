"""The command `export`: references to the shards of a store, which other tools open."""

from __future__ import annotations

import json
import os
from typing import TYPE_CHECKING, Annotated, Literal

import typer

from saev_store._runtime.progress import Progress as Counter
from saev_store.cli._common import (
    AsJson,
    Chunks,
    Pairs,
    StorageOptions,
    Url,
    check_destination,
    emit,
    emit_json,
    integers,
    storage_options,
)
from saev_store.cli._ends import say_done
from saev_store.errors import AccessError, ArgumentError
from saev_store.transport import LocalTransport

if TYPE_CHECKING:
    from saev_store.store.store import ShardStore


def export(
    url: Url,
    out: Annotated[
        str, typer.Argument(metavar="OUT", help="The file or folder to write; a file for kerchunk and tensorstore.")
    ],
    format: Annotated[
        Literal["kerchunk", "kerchunk-parquet", "icechunk", "tensorstore"],
        typer.Option("--format", help="Format of the references; each is for the readers of that name."),
    ] = "kerchunk",
    chunks: Chunks = None,
    template: Annotated[
        str | None, typer.Option(metavar="BASE", help="Address of the store's folder for readers [default: URL].")
    ] = None,
    append: Annotated[
        bool, typer.Option("--append", help="Append the examples to an Icechunk repository of an earlier export.")
    ] = False,
    as_json: AsJson = False,
    options: StorageOptions = None,
    option: Pairs = None,
    out_options: Annotated[
        str | None,
        typer.Option(
            "--out-storage-options", metavar="JSON", help="Options of the file system of OUT (kerchunk only)."
        ),
    ] = None,
) -> None:
    """Write references to a store's shards that other tools open without this package; no data is copied."""
    from saev_store.store.store import ShardStore

    if format == "tensorstore" and chunks is not None:
        raise ArgumentError("TensorStore reads whole shards", where="--chunks")
    if append and format != "icechunk":
        raise ArgumentError("only Icechunk repositories can be appended to", where="--append")
    shape = "auto" if chunks is None else integers(chunks, where="--chunks")
    target = storage_options(out_options, None, name="--out-storage-options")
    is_file = format in {"kerchunk", "tensorstore"}
    check_destination(out, target, where="OUT", options_name="--out-storage-options", is_file=is_file)
    with (
        ShardStore.open(url, storage_options(options, option)) as store,
        Counter(
            store.nbytes, "exporting", shown=False, unit="examples", unit_nbytes=store.layout.example_nbytes
        ) as counter,
    ):
        match format:
            case "tensorstore":
                from saev_store.export import array_names

                specs = {name: store.to_tensorstore_spec(name, base=template) for name in array_names(store)}
                _write_specs(store, out, json.dumps(specs, indent=1))
            case "icechunk":
                from saev_store.export import without_icechunk_logs

                without_icechunk_logs()
                store.to_icechunk(out, chunks=shape, base=template, append=append)
            case "kerchunk" | "kerchunk-parquet":
                kind = "parquet" if format == "kerchunk-parquet" else "json"
                store.to_kerchunk(out, format=kind, chunks=shape, base=template, storage_options=target)
        counter.advance(store.nbytes)
    say_done("exported", "exporting", at=out, as_json=as_json)
    emit_json({"out": out, "format": format}) if as_json else emit(out)


def _write_specs(store: ShardStore, path: str, text: str) -> None:
    """Write a local file, which an earlier one of that name makes room for when it is whole.

    Raises:
        AccessError: the system refuses it, or there is no such folder.
        ArgumentError: it would be in the folder of a store.
    """
    from saev_store.export.targets import refuse_stores_file

    folder, name = os.path.split(os.path.abspath(path))
    if not os.path.isdir(folder):
        raise AccessError(
            "could not write: No such file or directory",
            where=path,
            remedy="Name a file in a local folder that exists.",
        )
    there = LocalTransport(folder)
    refuse_stores_file(store, there, name, url=path, where="OUT")
    there.put(name, text.encode())
