"""`saev-store validate`: lists the problems of a store and the examples that they make unreadable."""

from __future__ import annotations

from typing import Annotated

import typer

from saev_store.cli._options import AsJson, Pairs, Progress, StorageOptions, Url, storage_options
from saev_store.cli._output import emit, emit_json


def validate(
    url: Url,
    deep: Annotated[
        bool, typer.Option("--deep", help="Read every byte: compare digests, find rows of zeros and swapped shards.")
    ] = False,
    as_json: AsJson = False,
    options: StorageOptions = None,
    option: Pairs = None,
    progress: Progress = None,
) -> None:
    """Validate a store or a data set; exit with 1 if there is an error."""
    from saev_store.cli.sources import source_at, source_validate
    from saev_store.store.store import ShardStore

    given = storage_options(options, option)
    source = source_at(url, given)
    if source is not None:
        source_validate(source, deep=deep, as_json=as_json, progress=progress)
        return
    with ShardStore.open(url, given, damaged_ok=True) as store:
        report = store.validate(deep=deep, progress=progress)
    emit_json(report.to_dict()) if as_json else emit(str(report))
    if not report.ok:
        raise typer.Exit(1)
