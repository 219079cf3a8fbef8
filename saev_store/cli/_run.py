"""The command line as one object, and the run of a command: from its arguments to its exit code."""

from __future__ import annotations

import os
import sys
import traceback
import warnings
from collections.abc import Mapping, Sequence
from typing import Annotated, Protocol, cast

import typer

from saev_store._runtime.progress import counting
from saev_store._version import __version__
from saev_store.cli._common import PipeClosedError, UsageText, discard_output, emit, emit_error, unwritable
from saev_store.cli._help import Explained, explain
from saev_store.cli._tables import is_drawn
from saev_store.cli._wording import SubCommand, Wording, as_commands
from saev_store.cli.converting import convert
from saev_store.cli.documentation import docs
from saev_store.cli.finishing import finalize
from saev_store.cli.importing import import_
from saev_store.cli.ls import ls
from saev_store.cli.prepare import prepare
from saev_store.cli.reading import estimate, head, info, stats, validate
from saev_store.cli.recording import record
from saev_store.cli.repairing import repair
from saev_store.cli.viewing import view
from saev_store.cli.writing import clean, copy, demo
from saev_store.errors import ArgumentError, LayerNotFoundError, SaevStoreError, SaevStoreWarning, SelectionError

OK, REFUSED, USAGE, DEFECT, INTERRUPTED, PIPE_CLOSED = 0, 1, 2, 3, 130, 141
_HELP = """Inspect, validate and copy stores of transformer activations.

Results go to standard output, everything else to standard error. Exit codes: 0 success, 1 a problem of a store or an
address, 2 wrong usage, 3 a defect of this program, 130 interrupted."""
_HELP_NAMES = {"help_option_names": ["-h", "--help"]}


class Command(Protocol):
    """The part of click's groups that is used; typer versions differ in whether they vendor click."""

    commands: Mapping[str, SubCommand]

    def __call__(self, *, args: Sequence[str], prog_name: str, standalone_mode: bool) -> object: ...


def app() -> Command:
    """The command line as a callable command."""
    typed = typer.Typer(
        help=_HELP,
        add_completion=False,
        no_args_is_help=False,
        rich_markup_mode="rich" if is_drawn() else None,
        pretty_exceptions_enable=False,
        context_settings=_HELP_NAMES,
    )
    typed.callback(invoke_without_command=True)(_top)
    for command in (
        info,
        estimate,
        ls,
        head,
        validate,
        copy,
        import_,
        clean,
        convert,
        prepare,
        stats,
        view,
        record,
        repair,
        finalize,
        docs,
        demo,
    ):
        # Without a short help of its own a command's description is cut in the list of commands.
        first = " ".join((command.__doc__ or "").partition("\n\n")[0].split())
        typed.command(command.__name__.rstrip("_"), short_help=first, context_settings=_HELP_NAMES)(command)
    group = typer.main.get_command(typed)
    explain(cast("Mapping[str, Explained]", cast("Command", group).commands), is_drawn=is_drawn())
    return cast("Command", group)


def _top(
    context: typer.Context,
    version: Annotated[bool, typer.Option("--version", help="Print the version.")] = False,
    debug: Annotated[bool, typer.Option("--debug", help="Show tracebacks; accepted at any position.")] = False,  # noqa: ARG001  # read from the arguments before they are parsed
) -> None:
    if version:
        emit(f"saev-store {__version__}")
        raise typer.Exit
    if context.invoked_subcommand is None:
        emit(context.get_help())
        raise typer.Exit(2)


def _usage_text(error: Exception) -> UsageText | None:
    """The message and usage of a mistake in the arguments; None for any other error."""
    format_message = getattr(error, "format_message", None)
    if format_message is None:
        return None
    context = getattr(error, "ctx", None)
    hint = f"\n{context.get_usage()}\nTry '{context.command_path} --help'." if context is not None else ""
    return UsageText(f"{format_message()}{hint}")


def run(argv: list[str]) -> int:
    """Run a command; see `saev_store.cli`."""
    for name in ("stdout", "stderr"):  # closed by the caller: `2>&-`
        if getattr(sys, name) is None:
            setattr(sys, name, open(os.devnull, "w", encoding="utf-8"))  # noqa: SIM115  # to the end of the process
    debug = "--debug" in argv
    as_json = "--json" in argv
    argv = [argument for argument in argv if argument != "--debug"]
    seen: list[str] = []  # with --json, standard error is one document if the command fails

    def show_warning(message: Warning | str, *_: object, **__: object) -> None:
        text = as_commands(str(message))
        if as_json:
            seen.append(text)
        else:
            print(f"warning: {text}", file=sys.stderr)

    def fail(error: Exception, code: int) -> int:
        if debug:
            traceback.print_exception(error)
        emit_error(error, as_json=as_json, seen=seen)
        return code

    def interrupted() -> int:
        if not as_json:
            continues = argv[:1] in (["copy"], ["import"])
            print("interrupted" + ("; the same command continues" if continues else ""), file=sys.stderr)
        return INTERRUPTED

    try:
        with warnings.catch_warnings():
            warnings.simplefilter("always", SaevStoreWarning)
            warnings.showwarning = show_warning
            with counting():
                code = app()(args=argv, prog_name="saev-store", standalone_mode=False)
        sys.stdout.flush()
    except KeyboardInterrupt:  # before and after the command
        return interrupted()
    except (PipeClosedError, BrokenPipeError):
        discard_output()
        return PIPE_CLOSED
    except SaevStoreError as error:
        wording = Wording(app().commands, argv)
        if isinstance(error, ArgumentError | SelectionError | LayerNotFoundError) and error.where:
            error.where = wording.names(error.where, error.message)
        error.message = as_commands(error.message)
        error.remedy = None if error.remedy is None else wording.remedy(error.remedy)
        is_usage = isinstance(error, ArgumentError) or (error.where or "").startswith("--")
        return fail(error, USAGE if is_usage else REFUSED)
    except SystemExit as error:
        if isinstance(error.__context__, BrokenPipeError):  # of a help text, which the command line library prints
            discard_output()
            return PIPE_CLOSED
        return error.code if isinstance(error.code, int) else REFUSED
    except Exception as error:
        usage = _usage_text(error)
        if usage is not None:
            return fail(usage, USAGE)
        if isinstance(error, OSError) and {"-h", "--help"} & {*argv}:  # the command line library prints help texts
            return fail(unwritable(error), REFUSED)
        # The command line library converts Ctrl-C into Abort.
        if type(error).__name__ == "Abort":
            return interrupted()
        return fail(error, DEFECT)
    for message in seen:
        print(f"warning: {message}", file=sys.stderr)
    if code == INTERRUPTED:  # what the command line library makes of Ctrl-C
        return interrupted()
    return code if isinstance(code, int) else OK
