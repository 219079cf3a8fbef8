"""`saev-store copy`: copies a store, or some layers and tokens of it, and verifies the copy."""

from __future__ import annotations

from typing import Annotated, Literal

import typer

from saev_store.cli._options import (
    AsJson,
    DstOptions,
    DstPairs,
    Pairs,
    Progress,
    StorageOptions,
    integers,
    storage_options,
)
from saev_store.cli._output import emit, emit_json
from saev_store.errors import ArgumentError


def copy(
    src: Annotated[str, typer.Argument(metavar="SRC", help="The store to copy: a path, or any fsspec URL.")],
    dst: Annotated[str, typer.Argument(metavar="DST", help="The folder in which the copy's folder is created.")],
    layers: Annotated[str | None, typer.Option(metavar="2,5", help="Copy only these layers, as a new store.")] = None,
    tokens: Annotated[
        Literal["all", "content", "special"], typer.Option(help="Copy only these tokens, as a new store.")
    ] = "all",
    protocol: Annotated[
        str | None, typer.Option(metavar="2.1", help="Rewrite the documents in this protocol version, not the shards.")
    ] = None,
    resume: Annotated[bool, typer.Option("--resume/--no-resume", help="Continue an unfinished copy.")] = True,
    max_mb_per_s: Annotated[
        float | None, typer.Option(metavar="MB", help="Limit of MB per second, reads and writes together.")
    ] = None,
    max_requests_per_s: Annotated[
        float | None,
        typer.Option(metavar="N", help="Limit of requests per second, to source and destination together."),
    ] = None,
    as_json: AsJson = False,
    options: StorageOptions = None,
    option: Pairs = None,
    dst_options: DstOptions = None,
    dst_option: DstPairs = None,
    progress: Progress = None,
) -> None:
    """Copy a store and verify every byte; an interrupted copy continues where it stopped."""
    from saev_store.writer.copying import copy_store

    for name, limit in (("--max-mb-per-s", max_mb_per_s), ("--max-requests-per-s", max_requests_per_s)):
        if limit is not None and not limit > 0:
            raise ArgumentError(f"the limit is {limit}; it must be more than 0", where=name)
    url = copy_store(
        src,
        dst,
        layers=None if layers is None else integers(layers, where="--layers"),
        tokens=tokens,
        protocol=protocol,
        storage_options=storage_options(options, option),
        dst_storage_options=storage_options(dst_options, dst_option, name="--dst-storage-options"),
        resume=resume,
        max_mb_per_s=max_mb_per_s,
        max_requests_per_s=max_requests_per_s,
        progress=progress,
    )
    emit_json({"url": url}) if as_json else emit(url)
