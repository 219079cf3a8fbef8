"""Options shared by several commands."""

from __future__ import annotations

import json
from typing import Annotated, cast

import typer

from saev_store.errors import ArgumentError

Url = Annotated[str, typer.Argument(metavar="URL", help="The store's folder: a path, or any fsspec URL.")]
AsJson = Annotated[bool, typer.Option("--json", help="Print one JSON document.")]
StorageOptions = Annotated[
    str | None,
    typer.Option("--storage-options", metavar="JSON", help="""Options of the file system: '{"anon": true}'."""),
]
Pairs = Annotated[
    list[str] | None, typer.Option("-o", "--option", metavar="KEY=VALUE", help="One storage option; may be repeated.")
]
DstOptions = Annotated[
    str | None, typer.Option("--dst-storage-options", metavar="JSON", help="Options of the destination's file system.")
]
DstPairs = Annotated[
    list[str] | None,
    typer.Option("--dst-option", metavar="KEY=VALUE", help="One option of the destination; may be repeated."),
]
Chunks = Annotated[
    str | None, typer.Option(metavar="1,1,197,768", help="Shape of a chunk [default: suits remote readers].")
]
Progress = Annotated[
    bool | None, typer.Option("--progress/--no-progress", help="Show a bar on standard error [default: on a terminal].")
]


def storage_options(
    text: str | None, pairs: list[str] | None, *, name: str = "--storage-options"
) -> dict[str, object] | None:
    """Options of a file system, from a JSON object and `key=value` pairs; None if there are none.

    A value is parsed as JSON (`anon=true`, `port=9000`), else taken as text. Pairs take precedence.

    Raises:
        ArgumentError: the text is not a JSON object, or a pair has no `=`.

    >>> storage_options('{"anon": true}', ["endpoint_url=http://127.0.0.1:9000"])
    {'anon': True, 'endpoint_url': 'http://127.0.0.1:9000'}
    """
    options: dict[str, object] = {}
    if text is not None:
        try:
            parsed = cast("object", json.loads(text))
        except (ValueError, RecursionError) as error:
            raise ArgumentError(
                f"{text!r} is not JSON ({error})", where=name, remedy="""Quote it for the shell: '{"anon": true}'."""
            ) from None
        if not isinstance(parsed, dict):
            raise ArgumentError(f"{text!r} is JSON, but not an object", where=name, remedy="""Pass '{"key": value}'.""")
        options.update(cast("dict[str, object]", parsed))
    for pair in pairs or ():
        key, equals, value = pair.partition("=")
        if not equals or not key:
            raise ArgumentError(
                f"{pair!r} is not KEY=VALUE", where="--option", remedy="Write for example -o anon=true."
            )
        try:
            options[key] = cast("object", json.loads(value))
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
