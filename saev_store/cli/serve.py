"""`saev-store serve`: the Zarr view over HTTP, until Ctrl-C."""

from __future__ import annotations

import warnings
from typing import Annotated

import typer

from saev_store.cli._options import AsJson, Pairs, StorageOptions, Url, storage_options
from saev_store.cli._output import emit, emit_json
from saev_store.cli.export import parse_chunks
from saev_store.errors import MissingDependencyError, SaevStoreWarning


def serve(
    url: Url,
    host: Annotated[
        str, typer.Option(help="The address to listen on; the default is this machine's own.")
    ] = "127.0.0.1",
    port: Annotated[int, typer.Option(help="0 takes any that is free.")] = 8000,
    chunks: Annotated[
        str | None, typer.Option(metavar="1,1,197,768", help="Shape of a chunk [default: what suits remote readers].")
    ] = None,
    sharded: Annotated[bool, typer.Option("--sharded", help="One key for each shard, read by ranges.")] = False,
    origin: Annotated[
        list[str] | None,
        typer.Option(metavar="URL", help="Web pages that may read; may be repeated [default: all]."),
    ] = None,
    as_json: AsJson = False,
    options: StorageOptions = None,
    option: Pairs = None,
) -> None:
    """Publish a store as Zarr over plain HTTP, read-only, for other languages and browsers; Ctrl-C ends it."""
    try:
        from saev_store import serve as server
    except ImportError as error:
        raise MissingDependencyError(
            f"{error.name} is not installed", where="serve", remedy="pip install 'saev_store[serve]'"
        ) from error
    from saev_store.store import ShardStore

    shape = "auto" if chunks is None else parse_chunks(chunks)
    with ShardStore.open(url, storage_options(options, option), damaged_ok=True) as store:
        app = server.application(store, chunks=shape, sharded=sharded, origins=origin or ("*",))
        n_damaged = sum(problem.severity == "error" for problem in store.problems)
        if n_damaged:
            warnings.warn(
                f"{n_damaged} problems: chunks that are lost are answered with 500", SaevStoreWarning, stacklevel=2
            )
        listening, address = server.listen(host, port)
        emit_json({"url": address}) if as_json else emit(address)
        server.serve(app, listening)
