"""`saev-store validate`: lists the problems of a store and the examples that they make unreadable."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated

import typer

from saev_store.cli._options import AsJson, Pairs, Progress, StorageOptions, Url, storage_options
from saev_store.cli._output import emit, emit_json
from saev_store.cli.info import source_at
from saev_store.errors import CorruptShardError, DocumentError, NotFoundError, UnsafeContentError

if TYPE_CHECKING:
    from saev_store.sources.sniff import Found


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


def source_validate(found: Found, *, deep: bool, as_json: bool, progress: bool | None) -> None:
    """Validate a data set, also one that does not open; exit with 1 if there is an error."""
    from saev_store.problems import Problem
    from saev_store.sources.address import full_url
    from saev_store.validation import Report

    try:
        with found.open(damaged_ok=True) as source:
            report = source.validate(deep=deep, progress=progress)
    except (DocumentError, CorruptShardError, UnsafeContentError, NotFoundError) as error:
        problems = tuple(getattr(error, "problems", ())) or (Problem(error.kind, error.message, error.where or ""),)
        report = Report(full_url(found.transport, found.path), 0, 0, problems)
    emit_json(report.to_dict()) if as_json else emit(str(report))
    if not report.ok:
        raise typer.Exit(1)
