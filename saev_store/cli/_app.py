"""The command line as one object, and the run of a command: from its arguments to its exit code."""

from __future__ import annotations

import json
import sys
import traceback
import warnings
from collections.abc import Callable, Mapping
from typing import Annotated, Protocol, cast

import typer

from saev_store._version import __version__
from saev_store.cli._common import emit, problem_dicts
from saev_store.cli.formats import convert, prepare
from saev_store.cli.ls import ls
from saev_store.cli.reading import docs, estimate, head, info, stats, validate, view
from saev_store.cli.recording import demo, finalize, record, repair
from saev_store.cli.writing import clean, copy, import_
from saev_store.errors import (
    ArgumentError,
    LayerNotFoundError,
    SaevStoreError,
    SaevStoreWarning,
    SelectionError,
    TokenArrayNotFoundError,
)

OK, REFUSED, USAGE, DEFECT, INTERRUPTED = 0, 1, 2, 3, 130
_HELP = """Record, inspect, validate and copy stores of transformer activations.

Results go to standard output, everything else to standard error. Exit codes: 0 success, 1 a problem of a store,
2 wrong usage, 3 a defect of this program, 130 interrupted."""
#: Commands with an example of each, in the order of the help.
_COMMANDS: tuple[tuple[Callable[..., None], str], ...] = (
    (record, "--model gpt2 --text t.jsonl --context 64 --layers 6 --to out"),
    (repair, "/scratch/shards/1a2b3c4d --config recording.toml"),
    (finalize, "/scratch/shards/1a2b3c4d"),
    (import_, "cache --to /scratch/shards --family gpt2"),
    (info, "s3://lab/shards/1a2b3c4d -o anon=true"),
    (estimate, "s3://lab/shards/1a2b3c4d"),
    (ls, "/scratch/shards"),
    (head, "/scratch/shards/1a2b3c4d --layer 13 -n 3"),
    (validate, "/scratch/shards/1a2b3c4d --deep"),
    (stats, "s3://lab/shards/1a2b3c4d --sample 1000 --no-save"),
    (view, "/scratch/shards/1a2b3c4d --open"),
    (copy, "/scratch/shards/1a2b3c4d s3://lab/shards --dst-option endpoint_url=http://127.0.0.1:9000"),
    (clean, "/scratch/shards --dry-run"),
    (convert, "docs.idx docs.batch --seq-len 2048 --batch-size 8"),
    (prepare, "/data/photos --split 8,1,1"),
    (demo, "--out /scratch/demo"),
    (docs, "--no-open"),
)
#: Errors of the arguments of a command.
_OF_USAGE = (ArgumentError, LayerNotFoundError, SelectionError, TokenArrayNotFoundError)


class Command(Protocol):
    """The part of click's groups that is used; typer versions differ in whether they vendor click."""

    commands: Mapping[str, object]

    def __call__(self, *, args: list[str], prog_name: str, standalone_mode: bool) -> object: ...


def app() -> Command:
    """The command line as a callable command."""
    settings = {"help_option_names": ["-h", "--help"]}
    typed = typer.Typer(help=_HELP, rich_markup_mode=None, pretty_exceptions_enable=False, context_settings=settings)
    typed.callback(invoke_without_command=True)(_top)
    for command, example in _COMMANDS:
        name = command.__name__.rstrip("_")
        # Without a short help of its own, a command's description is cut in the list of commands.
        first = " ".join((command.__doc__ or "").partition("\n\n")[0].split())
        epilog = f"Example: saev-store {name} {example}"
        typed.command(name, short_help=first, epilog=epilog, context_settings=settings)(command)
    return cast("Command", typer.main.get_command(typed))


def _top(
    context: typer.Context,
    version: Annotated[bool, typer.Option("--version", help="Print the version.")] = False,
    debug: Annotated[bool, typer.Option("--debug", help="Show tracebacks; accepted at any position.")] = False,  # noqa: ARG001  # read from the arguments before they are parsed
) -> None:
    if version:
        emit(f"saev-store {__version__}")
    elif context.invoked_subcommand is None:
        emit(context.get_help())
        raise typer.Exit(USAGE)


def run(argv: list[str]) -> int:
    """Run a command; see `saev_store.cli`."""
    debug, as_json = "--debug" in argv, "--json" in argv
    argv = [argument for argument in argv if argument != "--debug"]
    seen: list[str] = []  # with --json, standard error is one document if the command fails

    def show_warning(message: Warning | str, *_: object, **__: object) -> None:
        if as_json:
            seen.append(str(message))
        else:
            print(f"warning: {message}", file=sys.stderr)

    try:
        with warnings.catch_warnings():
            warnings.simplefilter("always", SaevStoreWarning)
            warnings.showwarning = show_warning
            code = app()(args=argv, prog_name="saev-store", standalone_mode=False)
    except SystemExit as error:  # of shell completion
        return error.code if isinstance(error.code, int) else REFUSED
    except (Exception, KeyboardInterrupt) as error:
        # The command line library converts Ctrl-C into Abort.
        if isinstance(error, KeyboardInterrupt) or type(error).__name__ == "Abort":
            code = INTERRUPTED
        else:
            if debug:
                traceback.print_exception(error)
            document, code = _described(error)
            text = f"error: {error if isinstance(error, SaevStoreError) else document['message']}"
            if code == DEFECT:
                text += "\nThis is a defect of saev-store; --debug shows where it happened."
            if as_json:
                text = json.dumps({"error": document, **({"warnings": seen} if seen else {})}, indent=2)
            print(text, file=sys.stderr)
            return code
    for message in seen:
        print(f"warning: {message}", file=sys.stderr)
    if code == INTERRUPTED and not as_json:
        print("interrupted; the same command continues an unfinished store", file=sys.stderr)
    return code if isinstance(code, int) else OK


def _described(error: Exception) -> tuple[dict[str, object], int]:
    """An error as plain JSON types, and the exit code: `kind` is stable, `problems` lists all problems."""
    document: dict[str, object] = {"kind": "defect", "message": f"{type(error).__name__}: {error}"}
    document |= {"where": None, "remedy": None, "problems": []}
    if isinstance(error, SaevStoreError):
        document |= {"kind": error.kind, "message": error.message, "where": error.where, "remedy": error.remedy}
        document["problems"] = problem_dicts(getattr(error, "problems", ()))
        return document, USAGE if isinstance(error, _OF_USAGE) else REFUSED
    format_message = getattr(error, "format_message", None)
    if format_message is None:
        return document, DEFECT
    context = getattr(error, "ctx", None)
    hint = f"\n{context.get_usage()}\nTry '{context.command_path} --help'." if context is not None else ""
    return document | {"kind": "usage", "message": f"{format_message()}{hint}"}, USAGE
