"""Runs a command: from its arguments to its exit code."""

from __future__ import annotations

import os
import sys
import traceback
import warnings

from saev_store.cli._output import PipeClosedError, emit_error
from saev_store.errors import ArgumentError, LayerNotFoundError, SaevStoreError, SaevStoreWarning, SelectionError

OK, REFUSED, USAGE, DEFECT, INTERRUPTED, PIPE_CLOSED = 0, 1, 2, 3, 130, 141


def run(argv: list[str]) -> int:
    """Run a command; see `saev_store.cli`."""
    from saev_store.cli._app import app, option_names, usage_text

    debug = "--debug" in argv
    as_json = "--json" in argv
    argv = [argument for argument in argv if argument != "--debug"]
    seen: list[str] = []  # with --json, standard error is one document if the command fails

    def show_warning(message: Warning | str, *_: object, **__: object) -> None:
        if as_json:
            seen.append(str(message))
        else:
            print(f"warning: {message}", file=sys.stderr)

    def fail(error: Exception, code: int) -> int:
        if debug:
            traceback.print_exception(error)
        emit_error(error, as_json=as_json, seen=seen)
        return code

    try:
        with warnings.catch_warnings():
            warnings.simplefilter("always", SaevStoreWarning)
            warnings.showwarning = show_warning
            code = app()(args=argv, prog_name="saev-store", standalone_mode=False)
        sys.stdout.flush()
    except KeyboardInterrupt:
        return INTERRUPTED
    except (PipeClosedError, BrokenPipeError):
        return _pipe_closed()
    except SaevStoreError as error:
        if isinstance(error, ArgumentError | SelectionError | LayerNotFoundError) and error.where:
            error.where = option_names(error.where, argv)
        return fail(error, USAGE if isinstance(error, ArgumentError) else REFUSED)
    except SystemExit as error:
        return error.code if isinstance(error.code, int) else REFUSED
    except Exception as error:
        usage = usage_text(error)
        if usage is not None:
            return fail(usage, USAGE)
        if type(error).__name__ == "Abort":  # the command line library converts Ctrl-C into this
            return INTERRUPTED
        return fail(error, DEFECT)
    for message in seen:
        print(f"warning: {message}", file=sys.stderr)
    return code if isinstance(code, int) else OK


def _pipe_closed() -> int:
    # Python flushes standard output again at exit; discard that.
    os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
    return PIPE_CLOSED
