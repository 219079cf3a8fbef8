"""The commands that write stores, or delete what writers left: `copy`, `clean` and `demo`."""

from __future__ import annotations

import re
import shlex
import sys
from dataclasses import asdict
from pathlib import Path
from typing import Annotated, Literal

import typer

from saev_store._runtime.progress import Progress as Counter
from saev_store.cli._common import (
    AsJson,
    DstOptions,
    DstPairs,
    Pairs,
    Progress,
    Scheduler,
    StorageOptions,
    check_destination,
    emit,
    emit_json,
    layer_keys,
    naming_what_to_check,
    storage_options,
)
from saev_store.cli._ends import say_done
from saev_store.cli._tables import emit_table
from saev_store.errors import ArgumentError
from saev_store.transport import open_transport

_UNITS_S = {"s": 1.0, "m": 60.0, "h": 3600.0, "d": 86_400.0}
_NOT_LISTED = (
    "Unfinished multipart uploads cannot be listed by this client; a life-cycle rule of the bucket removes them, see "
    "docs/cloud.md. Where s3fs is installed, --engine fsspec lists those of S3."
)


def copy(
    src: Annotated[str, typer.Argument(metavar="SRC", help="The store to copy: a path, or any fsspec URL.")],
    dst: Annotated[str, typer.Argument(metavar="DST", help="The folder in which the copy's folder is created.")],
    layers: Annotated[
        str | None,
        typer.Option(metavar="2,5:attn_out", help="Copy only these layers, by label, as a new store [default: all]."),
    ] = None,
    tokens: Annotated[
        Literal["all", "content", "special"],
        typer.Option(help="Copy only these tokens, as a new store; special: with the first content token."),
    ] = "all",
    protocol: Annotated[
        str | None,
        typer.Option(
            metavar="2.1",
            help="Rewrite the documents in this protocol version, 1.0.0, 2.0, 2.1 or 3.0; the shards stay [default: the source's].",
        ),
    ] = None,
    dtype: Annotated[
        Literal["float32", "bfloat16", "float16"] | None,
        typer.Option(
            help="Round the numbers to this dtype, as a new store, and say what that changed [default: the source's]."
        ),
    ] = None,
    on_overflow: Annotated[
        Literal["raise", "warn", "saturate"],
        typer.Option(help="With --dtype: what to do with numbers that would become infinite."),
    ] = "raise",
    resume: Annotated[
        bool, typer.Option("--resume/--no-resume", help="Continue an unfinished copy, or refuse to.")
    ] = True,
    max_mb_per_s: Annotated[
        float | None,
        typer.Option(
            metavar="MB", help="Limit of MB (10^6 bytes) per second, reads and writes together [default: none]."
        ),
    ] = None,
    max_requests_per_s: Annotated[
        float | None,
        typer.Option(
            metavar="N", help="Limit of requests per second, to source and destination together [default: none]."
        ),
    ] = None,
    scheduler: Scheduler = None,
    as_json: AsJson = False,
    options: StorageOptions = None,
    option: Pairs = None,
    dst_options: DstOptions = None,
    dst_option: DstPairs = None,
    progress: Progress = None,
) -> None:
    """Copy a store and verify every byte; an interrupted copy continues where it stopped."""
    from saev_store.writer import copy_store

    for name, limit in (("--max-mb-per-s", max_mb_per_s), ("--max-requests-per-s", max_requests_per_s)):
        if limit is not None and not limit > 0:
            raise ArgumentError(f"the limit is {limit}; it must be more than 0", where=name)
    if on_overflow != "raise" and dtype is None:
        raise ArgumentError(
            "a copy in the dtype of its source has no numbers that overflow",
            where="on_overflow",
            remedy="Pass dtype=…, or leave it out.",
        )
    target = storage_options(dst_options, dst_option, name="--dst-storage-options")
    check_destination(dst, target, where="DST", options_name="--dst-storage-options")
    url = copy_store(
        src,
        dst,
        layers=None if layers is None else layer_keys(layers, where="--layers"),
        tokens=tokens,
        protocol=protocol,
        dtype=dtype,
        on_overflow=on_overflow,
        storage_options=storage_options(options, option),
        dst_storage_options=target,
        resume=resume,
        max_mb_per_s=max_mb_per_s,
        max_requests_per_s=max_requests_per_s,
        client=scheduler,
        progress=progress,
    )
    nothing = (
        "all of it was there" if protocol is None else "its shards were there, or share their bytes with the source"
    )
    say_done("copied", "copying writing", at=url, as_json=as_json, nothing=nothing)
    if as_json:
        emit_json({"url": url} if url.rounding is None else {"url": url, "conversion": url.rounding.to_dict()})
    else:
        emit(url if url.rounding is None else f"{url}\n{url.rounding}")


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
    with Counter(0, "cleaning", shown=False, unit="leftovers") as counter, naming_what_to_check():
        cleaned = clean_leftovers(transport, dry_run=dry_run, older_than_s=older_than_s)
        counter.advance(sum(not leftover.kept_because for leftover in cleaned.leftovers))
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
    if rows:
        emit_table(("path", "what", "size", "state"), rows, right="size")
    else:
        emit("Nothing to clean.")
    if not dry_run:
        nothing = "what was left over is kept" if rows else "nothing was left over"
        say_done("removed", "cleaning", at=transport.url, as_json=as_json, nothing=nothing)
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


def demo(
    out: Annotated[Path, typer.Option(help="Folder in which the stores and the picture are made.")] = Path("saev-demo"),
    device: Annotated[
        str | None, typer.Option(help="Device on which the models run, such as cuda [default: cpu].")
    ] = None,
    as_json: AsJson = False,
    progress: Progress = None,
) -> None:
    """Record a vision transformer over photographs and a language model over fables, validate both stores, and plot what is in one.

    A second run with the same --out uses what is finished, and continues an interrupted recording.
    """
    from saev_store.record import run_demo

    def say(line: str) -> None:
        print(line, file=sys.stderr) if as_json else emit(line)

    try:
        result = run_demo(out, device=device, progress=progress, say=say)
    except KeyboardInterrupt:
        again = f"saev-store demo --out {shlex.quote(str(out))}"
        print(f"\nRecorded examples are kept; continue with: {again}", file=sys.stderr)
        raise typer.Exit(130) from None
    if as_json:
        emit_json(result.to_dict())
    else:
        emit(f"finished   in {result.seconds:.0f} s; inspect them with: saev-store ls {shlex.quote(str(out))}")
    if not result.ok:
        raise typer.Exit(1)
