"""`saev-store validate`: what is wrong with a store, and which examples that costs."""

from __future__ import annotations

from typing import Annotated

import typer

from saev_store.cli._options import AsJson, Pairs, Progress, StorageOptions, Url, storage_options
from saev_store.cli._output import emit, emit_json


def validate(
    url: Url,
    deep: Annotated[
        bool, typer.Option("--deep", help="Read every byte: digests, rows of zeros, swapped shards.")
    ] = False,
    as_json: AsJson = False,
    options: StorageOptions = None,
    option: Pairs = None,
    progress: Progress = None,
) -> None:
    """Check a store; exit with 1 if anything in it is lost or wrong."""
    from saev_store.store import ShardStore

    with ShardStore.open(url, storage_options(options, option), damaged_ok=True) as store:
        report = store.validate(deep=deep, progress=progress)
    emit_json(report.to_dict()) if as_json else emit(str(report))
    if not report.ok:
        raise typer.Exit(1)
