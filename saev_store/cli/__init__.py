"""The command line `saev-store`.

Results go to standard output (with `--json` as one JSON document); progress, warnings and errors go to standard error.
Exit codes: 0 success, 1 a problem of a store or an address, 2 wrong usage, 3 a defect of this program, 130 interrupted,
141 the reader of standard output has stopped.
"""

from __future__ import annotations

import os
import signal
import sys
import threading
from functools import partial
from typing import TYPE_CHECKING

from saev_store.cli._run import INTERRUPTED, run

if TYPE_CHECKING:
    from sys import UnraisableHookArgs

__all__ = ["main"]

#: Long enough for the hook to return, short enough for nobody to press Ctrl-C again.
_AGAIN_S = 0.05


def main(argv: list[str] | None = None) -> int:
    """Run one command and return its exit code. Raises nothing; shows tracebacks with `--debug` only.

    Args:
        argv: The arguments, `sys.argv[1:]` by default.
    """
    if argv is not None:
        return run(list(argv))
    sys.unraisablehook = _interrupt_again
    try:
        code = run(sys.argv[1:])
    except KeyboardInterrupt:  # another one, while the first was handled
        code = INTERRUPTED
    if code == INTERRUPTED:
        # A blocked read in another thread must not delay the end of an interrupted command.
        sys.stderr.flush()
        os._exit(code)
    return code


def _interrupt_again(lost: UnraisableHookArgs) -> None:
    """Send Ctrl-C anew if it arrived within a finalizer: the interpreter ignores what is raised there, and the command would go on."""
    if not issubclass(lost.exc_type, KeyboardInterrupt):
        sys.__unraisablehook__(lost)
        return
    # The whole process: a call that waits in the main thread must end. Elsewhere `os.kill` would not send, but kill.
    send = partial(os.kill, os.getpid()) if os.name == "posix" else signal.raise_signal
    again = threading.Timer(_AGAIN_S, send, [signal.SIGINT])
    again.daemon = True
    again.start()
