"""`saev-store clean`: removes what killed writers left."""

from __future__ import annotations

import re
from dataclasses import asdict
from typing import Annotated

import typer

from saev_store.cli._options import AsJson, Pairs, StorageOptions, storage_options
from saev_store.cli._output import emit, emit_json, table
from saev_store.errors import ArgumentError
from saev_store.transport import open_transport

_UNITS_S = {"s": 1.0, "m": 60.0, "h": 3600.0, "d": 86_400.0}
_NOT_LISTED = (
    "Unfinished multipart uploads cannot be listed by this client; a life-cycle rule of the bucket removes them, see "
    "docs/cloud.md. Where s3fs is installed, --engine fsspec lists those of S3."
)


def clean(
    url: Annotated[str, typer.Argument(metavar="URL", help="A folder of stores, or one store: a path or fsspec URL.")],
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Only list what would be removed.")] = False,
    older_than: Annotated[
        str,
        typer.Option(metavar="AGE", help="Keep what was written later than this: 90s, 30m, 12h, 2d; 0 keeps nothing."),
    ] = "1d",
    engine: Annotated[str, typer.Option(help='"auto", or "fsspec" to list unfinished uploads on S3.')] = "auto",
    as_json: AsJson = False,
    options: StorageOptions = None,
    option: Pairs = None,
) -> None:
    """Remove what killed writers left: unfinished stores, hidden and temporary files, uploads. Published files stay."""
    from saev_store.store.card import human_bytes
    from saev_store.writer import clean_leftovers

    if engine not in ("auto", "fsspec"):
        raise ArgumentError(f"{engine!r} is not an engine here", where="--engine", remedy="Use auto or fsspec.")
    older_than_s = parse_age(older_than)
    transport = open_transport(url, storage_options(options, option), engine="fsspec" if engine == "fsspec" else "auto")
    cleaned = clean_leftovers(transport, dry_run=dry_run, older_than_s=older_than_s)
    if as_json:
        emit_json({
            "url": transport.url,
            "dry_run": dry_run,
            "uploads_listed": cleaned.uploads_listed,
            "leftovers": [asdict(leftover) for leftover in cleaned.leftovers],
        })  # fmt: skip
        return
    done = "would be removed" if dry_run else "removed"
    rows = [
        (
            leftover.path or ".",
            leftover.kind,
            "" if leftover.nbytes is None else human_bytes(leftover.nbytes),
            f"kept: {leftover.kept_because}" if leftover.kept_because else done,
        )
        for leftover in cleaned.leftovers
    ]
    emit(table(("path", "what", "size", "state"), rows) if rows else "Nothing to clean.")
    if not cleaned.uploads_listed:
        emit(_NOT_LISTED)


def parse_age(text: str) -> float:
    """Seconds from a number with a unit.

    >>> parse_age("90s"), parse_age("2d"), parse_age("0")
    (90.0, 172800.0, 0.0)
    """
    found = re.fullmatch(r"(\d+(?:\.\d+)?)([smhd]?)", text)
    if found is None or (not found[2] and float(found[1])):
        raise ArgumentError(f"{text!r} is not an age", where="--older-than", remedy="Write 90s, 30m, 12h or 2d.")
    return float(found[1]) * _UNITS_S.get(found[2], 1.0)
