"""`saev-store export`: writes references to the shards for readers without this package."""

from __future__ import annotations

import json
from typing import Annotated, Literal

import typer

from saev_store.cli._options import AsJson, Chunks, Pairs, StorageOptions, Url, integers, storage_options
from saev_store.cli._output import emit, emit_json
from saev_store.errors import ArgumentError


def export(
    url: Url,
    out: Annotated[str, typer.Argument(metavar="OUT", help="The file or folder to write.")],
    format: Annotated[
        Literal["kerchunk", "kerchunk-parquet", "icechunk", "tensorstore"],
        typer.Option("--format", help="Format of the references."),
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
    with ShardStore.open(url, storage_options(options, option)) as store:
        match format:
            case "tensorstore":
                from saev_store.export import array_names

                specs = {name: store.to_tensorstore_spec(name, base=template) for name in array_names(store)}
                with open(out, "w", encoding="utf-8") as file:
                    json.dump(specs, file, indent=1)
            case "icechunk":
                store.to_icechunk(out, chunks=shape, base=template, append=append)
            case "kerchunk" | "kerchunk-parquet":
                kind = "parquet" if format == "kerchunk-parquet" else "json"
                target = storage_options(out_options, None, name="--out-storage-options")
                store.to_kerchunk(out, format=kind, chunks=shape, base=template, storage_options=target)
    emit_json({"out": out, "format": format}) if as_json else emit(out)
