"""The command `finalize`, and what `record` says of a part whose store is not published yet."""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING, Annotated

import typer

from saev_store.cli._common import AsJson, Pairs, StorageOptions, emit, emit_json, storage_options
from saev_store.errors import ArgumentError

if TYPE_CHECKING:
    from saev_store.record import Part, RecordedPart


def finalize(
    url: Annotated[
        str, typer.Argument(metavar="URL", help="The folder of the unfinished store, as `record --part` prints it.")
    ],
    as_json: AsJson = False,
    options: StorageOptions = None,
    option: Pairs = None,
) -> None:
    """Publish a store whose parts are all recorded; says which examples are missing if they are not.

    The last process of `record --part` publishes by itself. This is for when it was killed just then, or could not.
    """
    from saev_store.record import finalize as publish

    store = publish(url, storage_options=storage_options(options, option))
    if as_json:
        emit_json({"url": store.url, "published": True, "shape": store.shape})
    else:
        emit(store.url)


def emit_part(done: RecordedPart, *, as_json: bool) -> None:
    """Print what `record --part` has done where others are not done: the address of the store, and which parts are left."""
    rank, n = done.part
    left = [f"{other + 1}/{n}" for other in done.ranks_left]
    if as_json:
        emit_json(
            {
                "url": done.url,
                "published": False,
                "part": f"{rank + 1}/{n}",
                "parts_left": left,
                "examples_left": [list(found) for found in done.missing],
            }
        )
        return
    emit(done.url)
    waits = (
        f"not recorded yet: --part {', '.join(left)}; the last one publishes the store"
        if left
        else "another process publishes the store; if it was killed: saev-store finalize"
    )
    print(f"part {rank + 1}/{n} is recorded; {waits}", file=sys.stderr)


def parse_part(text: str) -> Part:
    """The part of an option `--part 3/16`, where parts count from 1; `auto` is itself.

    >>> parse_part("3/16"), parse_part("auto")
    ((2, 16), 'auto')
    """
    if text == "auto":
        return "auto"
    number, slash, n = text.partition("/")
    if slash and number.isdecimal() and n.isdecimal() and 1 <= int(number) <= int(n):
        return int(number) - 1, int(n)
    raise ArgumentError(
        f"{text!r} is not a part",
        where="part",
        remedy="Write 1/4 to 4/4 for four processes, or auto under torchrun and Slurm.",
    )
