"""Options that several commands share, and output as text or one JSON document."""

from __future__ import annotations

import json
import math
import os
import sys
from collections.abc import Iterable, Sequence
from dataclasses import asdict
from typing import TYPE_CHECKING, Annotated

import typer

from saev_store._runtime.optional import need
from saev_store.core.arguments import is_list, is_mapping
from saev_store.errors import ArgumentError

if TYPE_CHECKING:
    from tokenizers import Tokenizer

    from saev_store.core.layout import LayerKey
    from saev_store.problems import Problem

Url = Annotated[str, typer.Argument(metavar="URL", help="The store's folder: a path, or any fsspec URL.")]
AsJson = Annotated[bool, typer.Option("--json", help="Print the result as one JSON document.")]
Options = Annotated[
    list[str] | None,
    typer.Option(
        "-o", "--option", metavar="KEY=VALUE", help="One option of the file system, such as anon=true; may be repeated."
    ),
]
DstOptions = Annotated[
    list[str] | None,
    typer.Option(
        "--dst-option", metavar="KEY=VALUE", help="One option of the destination's file system; may be repeated."
    ),
]
Progress = Annotated[
    bool | None,
    typer.Option(
        "--progress/--no-progress", help="Show a bar on standard error, or none [default: a bar in a terminal]."
    ),
]
Scheduler = Annotated[
    str | None,
    typer.Option(
        metavar="ADDRESS", help="A dask scheduler, such as tcp://host:8786, whose workers do the work [default: none]."
    ),
]
PIPE_CLOSED = 141


def pairs_of(pairs: Iterable[str], *, where: str) -> dict[str, str]:
    """Names and values of texts `NAME=VALUE`.

    Raises:
        ArgumentError: a text has no `=`, or no name before it.

    >>> pairs_of(["key=me"], where="--option")
    {'key': 'me'}
    """
    found: dict[str, str] = {}
    for pair in pairs:
        name, equals, value = pair.partition("=")
        if not equals or not name:
            raise ArgumentError(f"{pair!r} is not NAME=VALUE", where=where, remedy=f"Write for example {where} a=b.")
        found[name] = value
    return found


def storage_options(pairs: list[str] | None, *, where: str = "--option") -> dict[str, object] | None:
    """Options of a file system from texts `KEY=VALUE`; None if there are none.

    A value is parsed as JSON (`anon=true`, `port=9000`, `client_kwargs={"verify": false}`), else taken as text.

    Raises:
        ArgumentError: a text has no `=`.

    >>> storage_options(["anon=true", "endpoint_url=http://127.0.0.1:9000"])
    {'anon': True, 'endpoint_url': 'http://127.0.0.1:9000'}
    """
    options: dict[str, object] = {}
    for key, value in pairs_of(pairs or (), where=where).items():
        try:
            options[key] = json.loads(value)
        except (ValueError, RecursionError):
            options[key] = value
    return options or None


def integers(text: str, *, where: str) -> list[int]:
    """Integers from a comma-separated list.

    Raises:
        ArgumentError: the text is something else.

    >>> integers("2,-1", where="--layers")
    [2, -1]
    """
    try:
        return [int(part) for part in text.split(",")]
    except ValueError:
        raise ArgumentError(
            f"{text!r} is not a list of integers", where=where, remedy=f"Separate them by commas: {where} 2,5."
        ) from None


def layer_keys(text: str, *, where: str) -> list[LayerKey]:
    """Layers from a comma-separated list: labels, or labels with their hook points.

    Raises:
        ArgumentError: the text is something else.

    >>> layer_keys("5:attn_out,-2", where="--layers")
    [(5, 'attn_out'), -2]
    """
    parts = [part.partition(":") for part in text.split(",")]
    try:
        return [(int(label), hook_point) if colon else int(label) for label, colon, hook_point in parts]
    except ValueError:
        raise ArgumentError(
            f"{text!r} is not a list of layers",
            where=where,
            remedy=f"Separate them by commas: {where} 2,5. With hook points: {where} 2:attn_out,5:resid_mid.",
        ) from None


def load_tokenizer(name: str) -> Tokenizer:
    """A tokenizer from a file of the tokenizers library.

    Raises:
        MissingDependencyError: the library is not installed.
        ArgumentError: the file is not one of a tokenizer.
    """
    need("tokenizers", install="saev-store[energon]", where=name)
    from tokenizers import Tokenizer

    try:
        return Tokenizer.from_file(name)
    except Exception as error:  # the library raises nothing narrower
        raise ArgumentError(f"not a tokenizer ({error})", where=name) from None


def emit(text: str) -> None:
    """Print to standard output; exit with 141 if its reader has stopped."""
    encoding = sys.stdout.encoding or "ascii"
    try:
        print(text.encode(encoding, "backslashreplace").decode(encoding), flush=True)
    except BrokenPipeError:
        # Python flushes standard output again at exit.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        raise typer.Exit(PIPE_CLOSED) from None


def emit_json(value: object, *, indent: int | None = 2) -> None:
    """Print one JSON document; NaN and infinity become null. `indent=None` prints one line."""
    emit(json.dumps(_finite(value), indent=indent, allow_nan=False))


def _finite(value: object) -> object:
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    if is_mapping(value):
        return {key: _finite(item) for key, item in value.items()}
    if is_list(value):
        return [_finite(item) for item in value]
    return value


def emit_table(header: Sequence[str], rows: Iterable[Sequence[str]]) -> None:
    """Print rows as aligned columns to standard output.

    >>> emit_table(["name", "size"], [["a", "12 B"], ["longer", "3 B"]])
    name    size
    a       12 B
    longer  3 B
    """
    from saev_store.names import one_line

    lines = [list(header), *(list(map(one_line, row)) for row in rows)]
    widths = [max(map(len, column)) for column in zip(*lines, strict=True)]
    padded = [[cell.ljust(width) for cell, width in zip(line, widths, strict=True)] for line in lines]
    emit("\n".join("  ".join(line).rstrip() for line in padded))


def problem_dicts(problems: Iterable[Problem]) -> list[dict[str, object]]:
    """Problems as plain JSON types."""
    return [asdict(problem) for problem in problems]
