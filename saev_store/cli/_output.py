"""Output of commands: text or one JSON document on standard output, errors on standard error."""

from __future__ import annotations

import json
import math
import sys
from collections.abc import Iterable, Sequence
from typing import cast

from saev_store.errors import SaevStoreError


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
    except UnicodeEncodeError:
        encoding = sys.stdout.encoding or "ascii"
        print(text.encode(encoding, "backslashreplace").decode(encoding), flush=True)


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
    if isinstance(error, UsageText):
        return {"kind": "usage", "message": str(error)}
    if not isinstance(error, SaevStoreError):
        return {"kind": "defect", "message": f"{type(error).__name__}: {error}"}
    from saev_store.validation import problem_to_dict

    problems = getattr(error, "problems", ())
    return {
        "kind": error.kind,
        "message": error.message,
        "where": error.where,
        "remedy": error.remedy,
        "problems": [problem_to_dict(problem) for problem in problems],
    }


def table(header: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    """Rows as aligned columns.

    >>> print(table(["name", "size"], [["a", "12 B"], ["longer", "3 B"]]))
    name    size
    a       12 B
    longer  3 B
    """
    lines = [list(header), *(list(row) for row in rows)]
    widths = [max(len(line[column]) for line in lines) for column in range(len(header))]
    return "\n".join(
        "  ".join(cell.ljust(width) for cell, width in zip(line, widths, strict=True)).rstrip() for line in lines
    )
