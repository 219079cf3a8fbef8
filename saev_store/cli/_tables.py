"""Tables and cards of commands: drawn in a terminal, plain aligned text elsewhere. Nothing is cut off in either."""

from __future__ import annotations

import os
import sys
from collections.abc import Iterable, Sequence

from saev_store.cli._common import emit
from saev_store.names import one_line

#: A column of text is not made narrower than this; where not all columns fit, each row becomes lines of name and value.
_LEAST_WIDTH = 14
_BETWEEN = 3


def is_drawn() -> bool:
    """Whether standard output is a terminal that shows lines and colours; `NO_COLOR` leaves only the colours out."""
    encoding = (sys.stdout.encoding or "").lower().replace("-", "")
    return sys.stdout.isatty() and os.environ.get("TERM") != "dumb" and encoding.startswith("utf8")


def table(header: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    """Rows as aligned columns of plain text.

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


def emit_table(
    header: Sequence[str],
    rows: Iterable[Sequence[str]],
    *,
    right: str = "",
    whole: str = "",
    plain: str | None = None,
) -> None:
    """Print a table to standard output.

    Args:
        header: The names of the columns.
        rows: A text for each of them.
        right: Names of the columns of numbers, separated by spaces; a drawn table has them at the right, on one line.
        whole: Names of other columns that are not folded, such as those of names that are copied.
        plain: What is printed where no table is drawn, if not aligned columns.

    Raises:
        PipeClosedError: the reader has stopped.
    """
    lines = [tuple(map(one_line, row)) for row in rows]
    if is_drawn():
        emit(drawn_table(header, lines, right=right.split(), whole=whole.split()))
    else:
        emit(table(header, lines) if plain is None else plain)


def emit_card(title: str, rows: Sequence[tuple[str, str]]) -> None:
    """Print names and texts to standard output, in a terminal with the texts folded beside the names.

    Raises:
        PipeClosedError: the reader has stopped.
    """
    title, rows = one_line(title), [(name, one_line(text)) for name, text in rows]
    if is_drawn():
        emit(_drawn_pairs(title, rows))
        return
    width = max((len(name) for name, _ in rows), default=0)
    emit("\n".join([title, *(f"  {name:<{width}}  {text}" for name, text in rows)]))


def drawn_table(
    header: Sequence[str], rows: Sequence[Sequence[str]], *, right: Sequence[str] = (), whole: Sequence[str] = ()
) -> str:
    """A table with lines as wide as the terminal at most: long texts are folded, numbers are not."""
    from rich import box
    from rich.console import Console
    from rich.table import Table
    from rich.text import Text

    console = Console(force_terminal=True)
    widths = [max(map(len, column)) for column in zip(header, *rows, strict=True)]
    least = [
        width if name in {*right, *whole} else min(width, _LEAST_WIDTH)
        for name, width in zip(header, widths, strict=True)
    ]
    if sum(least) + _BETWEEN * len(header) > console.width:
        return "\n".join(
            _drawn_pairs(f"{header[0]} {row[0]}".strip(), list(zip(header[1:], row[1:], strict=True))) for row in rows
        )
    drawn = Table(box=box.SIMPLE_HEAD, pad_edge=False, show_edge=False, header_style="bold")
    for name, width in zip(header, least, strict=True):
        justify = "right" if name in right else "left"
        drawn.add_column(
            Text(name), justify=justify, no_wrap=name in {*right, *whole}, overflow="fold", min_width=width
        )
    for row in rows:
        drawn.add_row(*map(Text, row))
    with console.capture() as found:
        console.print(drawn)
    return _trimmed(found.get())


def _drawn_pairs(title: str, rows: Sequence[tuple[str, str]]) -> str:
    from rich.console import Console
    from rich.table import Table
    from rich.text import Text

    console = Console(force_terminal=True)
    pairs = Table.grid(padding=(0, 2))
    pairs.add_column(no_wrap=True, style="bold")
    pairs.add_column(overflow="fold")
    for name, text in rows:
        pairs.add_row(Text(f"  {name}"), Text(text))
    with console.capture() as found:
        console.print(Text(title, style="bold"), overflow="fold")
        console.print(pairs)
    return _trimmed(found.get())


def _trimmed(drawn: str) -> str:
    """Without empty lines around it, and spaces at the ends of lines."""
    return "\n".join(line.rstrip() for line in drawn.strip("\n").splitlines() if line.strip())
