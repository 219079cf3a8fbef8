"""`saev-store stats`: statistics per layer; with --json per token position too."""

from __future__ import annotations

from typing import Annotated

import typer

from saev_store.cli._options import AsJson, Pairs, Progress, StorageOptions, Url, storage_options
from saev_store.cli._output import emit, emit_json


def stats(
    url: Url,
    sample: Annotated[int | None, typer.Option(metavar="N", help="Read only N examples.")] = None,
    seed: Annotated[int, typer.Option(help="Seed that chooses the examples of a sample.")] = 0,
    scheduler: Annotated[
        str | None,
        typer.Option(
            metavar="ADDRESS", help="A dask scheduler, such as tcp://host:8786, whose workers read the store."
        ),
    ] = None,
    refresh: Annotated[bool, typer.Option("--refresh", help="Compute again what stats.json holds.")] = False,
    save: Annotated[
        bool, typer.Option("--save/--no-save", help="Keep the result in stats.json beside the store.")
    ] = True,
    as_json: AsJson = False,
    options: StorageOptions = None,
    option: Pairs = None,
    progress: Progress = None,
) -> None:
    """Show count, mean, std, mean norm, min, max, zeros and non-finite values of each layer."""
    from saev_store.store.store import ShardStore

    with ShardStore.open(url, storage_options(options, option)) as store:
        found = store.stats(sample=sample, seed=seed, client=scheduler, refresh=refresh, save=save, progress=progress)
    emit_json(found.to_dict()) if as_json else emit(str(found))
