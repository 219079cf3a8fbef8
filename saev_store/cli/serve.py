"""`saev-store serve`: serves the Zarr view over HTTP until Ctrl-C."""

from __future__ import annotations

import warnings
from typing import Annotated

import typer

from saev_store._runtime.optional import need
from saev_store.cli._options import AsJson, Chunks, Pairs, StorageOptions, Url, integers, storage_options
from saev_store.cli._output import emit, emit_json
from saev_store.errors import SaevStoreWarning


def serve(
    url: Url,
    host: Annotated[
        str, typer.Option(help="Address to listen on; only this machine reaches the default.")
    ] = "127.0.0.1",
    port: Annotated[int, typer.Option(help="Port to listen on; 0 takes any free one.")] = 8000,
    chunks: Chunks = None,
    sharded: Annotated[bool, typer.Option("--sharded", help="One key per shard, read by ranges.")] = False,
    origin: Annotated[
        list[str] | None,
        typer.Option(
            metavar="URL", help="Origin of web pages that may read (CORS), or *; may be repeated [default: none]."
        ),
    ] = None,
    allow_host: Annotated[
        list[str] | None,
        typer.Option(
            metavar="NAME",
            help="Host name under which clients reach the server; may be repeated. Numeric addresses are always allowed.",
        ),
    ] = None,
    as_json: AsJson = False,
    options: StorageOptions = None,
    option: Pairs = None,
) -> None:
    """Serve a store as Zarr over plain HTTP, read-only, for other languages and browsers, until Ctrl-C."""
    for library in ("starlette", "uvicorn"):
        need(library, install="saev-store[serve]", where="serve")
    from saev_store import serve as server
    from saev_store.store.store import ShardStore

    shape = "auto" if chunks is None else integers(chunks, where="--chunks")
    with ShardStore.open(url, storage_options(options, option), damaged_ok=True) as store:
        app = server.application(
            store, chunks=shape, sharded=sharded, origins=origin or (), hosts=[host, *(allow_host or ())]
        )
        n_damaged = sum(problem.severity == "error" for problem in store.problems)
        if n_damaged:
            warnings.warn(
                f"{n_damaged} problems: requests for lost chunks are answered with status 410",
                SaevStoreWarning,
                stacklevel=2,
            )
        listening, address = server.listen(host, port)
        emit_json({"url": address}, indent=None) if as_json else emit(address)
        server.serve(app, listening)
