"""What all commands share: their options, and output as text or one JSON document."""

from __future__ import annotations

import contextlib
import json
import math
import os
import re
import sys
from collections.abc import Generator, Iterable, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from typing import TYPE_CHECKING, Annotated, cast

import typer

from saev_store.cli._wording import as_commands
from saev_store.errors import ArgumentError, NotFoundError, SaevStoreError, TransportError
from saev_store.transport import open_transport

if TYPE_CHECKING:
    from saev_store.core.layout import LayerKey
    from saev_store.problems import Problem

Url = Annotated[str, typer.Argument(metavar="URL", help="The store's folder: a path, or any fsspec URL.")]
AsJson = Annotated[bool, typer.Option("--json", help="Print the result as one JSON document.")]
StorageOptions = Annotated[
    str | None,
    typer.Option(
        "--storage-options",
        metavar="JSON",
        help="""Options of the file system, as one JSON object, such as '{"anon": true}'.""",
    ),
]
Pairs = Annotated[
    list[str] | None,
    typer.Option(
        "-o", "--option", metavar="KEY=VALUE", help="One option of the file system, such as anon=true; may be repeated."
    ),
]
DstOptions = Annotated[
    str | None,
    typer.Option(
        "--dst-storage-options", metavar="JSON", help="Options of the destination's file system, as one JSON object."
    ),
]
DstPairs = Annotated[
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
                f"{pair!r} is not KEY=VALUE",
                where=name.replace("-storage-options", "-option"),
                remedy=f"Write for example {name.replace('-storage-options', '-option')} anon=true.",
            )
        try:
            options[key] = cast("object", json.loads(value))
        except (ValueError, RecursionError):
            options[key] = value
    return options or None


def check_destination(
    url: str,
    options: Mapping[str, object] | None = None,
    *,
    where: str,
    options_name: str = "--storage-options",
    is_file: bool = False,
) -> None:
    """Refuse what is no address to write to, before anything else is done.

    Args:
        url: A folder, or with `is_file` a file.
        options: Options of its file system.
        where: The option or argument that has the address.
        options_name: The option that has the options.
        is_file: It will be a file.

    Raises:
        ArgumentError: it is empty, a file where a folder is written or the other way round, a URL with one slash, which would
            be the name of a local folder, or takes no such options.
    """
    kind, other = ("file", "folder") if is_file else ("folder", "file")
    if not url:
        raise ArgumentError(f"it is empty; it must be a {kind}, or a URL of one", where=where)
    scheme = re.match(r"([a-z][a-z0-9+.-]+):/(?!/)", url)
    if scheme is not None and scheme[1] not in {"file", "local"}:
        raise ArgumentError(
            f"{url!r} is no URL: two slashes follow the colon", where=where, remedy=f"Write {scheme[1]}://…."
        )
    if os.path.isdir(url) if is_file else os.path.isfile(url):
        raise ArgumentError(f"{url!r} is a {other}; it must be a {kind}", where=where)
    if is_file and os.path.exists(url) and not os.path.isfile(url):  # it would be replaced, even if it is a device
        raise ArgumentError(f"{url!r} is no regular file", where=where, remedy="Name a file.")
    try:
        open_transport(url, options).close()
    except ArgumentError as error:
        error.where = {"storage_options": options_name, "url": where}.get(error.where or "", error.where)
        raise


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
    """Layers from a comma-separated list: labels, or labels with their hook points; none twice.

    Raises:
        ArgumentError: the text is something else.

    >>> layer_keys("5:attn_out,-2", where="--layers")
    [(5, 'attn_out'), -2]
    """
    parts = [part.partition(":") for part in text.split(",")]
    try:
        found: list[LayerKey] = [
            (int(label), hook_point) if colon else int(label) for label, colon, hook_point in parts
        ]
    except ValueError:
        found = []
    if found and all(hook_point or not colon for _, colon, hook_point in parts):
        if len(set(found)) == len(found):
            return found
        raise ArgumentError(f"{text!r} names a layer twice", where=where, remedy="Name each layer once.")
    raise ArgumentError(
        f"{text!r} is not a list of layers",
        where=where,
        remedy=f"Separate them by commas: {where} 2,5. With hook points: {where} 2:attn_out,5:resid_mid.",
    )


@contextmanager
def naming_what_to_check() -> Generator[None]:
    """Says what to do in errors of a folder that is not there."""
    try:
        yield
    except NotFoundError as error:
        error.remedy = error.remedy or "Check the address, and that its disk is mounted."
        raise


class PipeClosedError(Exception):
    """The reader of standard output has stopped (`saev-store ls | head`)."""


class UsageText(Exception):
    """A mistake in the arguments, with the usage as text."""


def emit(text: str) -> None:
    """Print to standard output.

    Raises:
        PipeClosedError: the reader has stopped.
    """
    try:
        print(text, flush=True)
    except BrokenPipeError as error:
        raise PipeClosedError from error
    except OSError as error:
        raise unwritable(error) from error
    except UnicodeEncodeError:
        encoding = sys.stdout.encoding or "ascii"
        print(text.encode(encoding, "backslashreplace").decode(encoding), flush=True)


def unwritable(error: OSError) -> TransportError:
    """What to raise where standard output takes no text; what is left of it is discarded."""
    discard_output()
    return TransportError(f"it cannot be written: {error.strerror}", where="standard output")


def discard_output() -> None:
    """Let Python, which flushes standard output again at exit, write to nowhere."""
    with contextlib.suppress(OSError, ValueError):  # it may be no file
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


def emit_json(value: object, *, indent: int | None = 2) -> None:
    """Print one JSON document; NaN and infinity become null. `indent=None` prints one line."""
    emit(json.dumps(_finite(value), indent=indent, ensure_ascii=True, allow_nan=False))


def _finite(value: object) -> object:
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    if isinstance(value, dict):
        return {key: _finite(item) for key, item in cast("dict[str, object]", value).items()}
    if isinstance(value, list | tuple):
        return [_finite(item) for item in cast("Sequence[object]", value)]
    return value


def emit_error(error: Exception, *, as_json: bool, seen: Sequence[str] = ()) -> None:
    """Print an error on standard error; `seen` are earlier warnings."""
    if as_json:
        document: dict[str, object] = {"error": error_to_dict(error)}
        if seen:
            document["warnings"] = list(seen)
        print(json.dumps(document, indent=2), file=sys.stderr)
    elif isinstance(error, SaevStoreError | UsageText):
        print(f"error: {error}", file=sys.stderr)
    else:
        print(
            f"internal error: {type(error).__name__}: {error}\nThis is a defect; --debug shows where it happened.",
            file=sys.stderr,
        )


def error_to_dict(error: Exception) -> dict[str, object]:
    """An error as plain JSON types: `kind` is stable, `problems` lists all problems."""
    if not isinstance(error, SaevStoreError):
        is_usage = isinstance(error, UsageText)
        kind, message = ("usage", str(error)) if is_usage else ("defect", f"{type(error).__name__}: {error}")
        return {"kind": kind, "message": message, "where": None, "remedy": None, "problems": []}
    return {
        "kind": error.kind,
        "message": error.message,
        "where": error.where,
        "remedy": error.remedy,
        "problems": told(getattr(error, "problems", ())),
    }


def told(problems: Iterable[Problem]) -> list[dict[str, object]]:
    """Problems as plain JSON types, whose messages name commands."""
    from saev_store.validation import problem_to_dict

    return [problem_to_dict(replace(problem, message=as_commands(problem.message))) for problem in problems]
