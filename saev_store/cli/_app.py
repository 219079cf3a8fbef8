"""The commands, put together."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Annotated, Protocol, cast

import typer

from saev_store._version import __version__
from saev_store.cli._output import UsageText, emit
from saev_store.cli.clean import clean
from saev_store.cli.copy import copy
from saev_store.cli.demo import demo
from saev_store.cli.export import export
from saev_store.cli.head import head
from saev_store.cli.info import info
from saev_store.cli.ls import ls
from saev_store.cli.prepare import prepare
from saev_store.cli.serve import serve
from saev_store.cli.sources import convert
from saev_store.cli.stats import stats
from saev_store.cli.validate import validate

_HELP = """Look at, check and copy stores of transformer activations.

Results go to standard output, everything else to standard error. Exit codes: 0 fine, 1 something is wrong with a store
or an address, 2 wrong usage, 3 a defect of this program, 130 interrupted."""


class Command(Protocol):
    """What is needed of click's groups, which typer now vendors and now imports."""

    commands: Mapping[str, object]

    def __call__(self, *, args: Sequence[str], prog_name: str, standalone_mode: bool) -> object: ...


def app() -> Command:
    """The command line as a callable command."""
    typed = typer.Typer(
        help=_HELP, add_completion=False, no_args_is_help=False, rich_markup_mode=None, pretty_exceptions_enable=False
    )
    typed.callback(invoke_without_command=True)(_top)
    for command in (info, ls, head, validate, copy, clean, convert, prepare, export, stats, serve, demo):
        typed.command()(command)
    return cast("Command", typer.main.get_command(typed))


def _top(
    context: typer.Context,
    version: Annotated[bool, typer.Option("--version", help="Print the version.")] = False,
    debug: Annotated[bool, typer.Option("--debug", help="Show tracebacks; may stand anywhere.")] = False,  # noqa: ARG001  # read from the arguments before they are parsed
) -> None:
    if version:
        emit(f"saev-store {__version__}")
        raise typer.Exit
    if context.invoked_subcommand is None:
        emit(context.get_help())
        raise typer.Exit(2)


def usage_text(error: Exception) -> UsageText | None:
    """What a mistake in the arguments is about, if `error` is one."""
    format_message = getattr(error, "format_message", None)
    if format_message is None:
        return None
    context = getattr(error, "ctx", None)
    hint = f"\n{context.get_usage()}\nTry '{context.command_path} --help'." if context is not None else ""
    return UsageText(f"{format_message()}{hint}")
