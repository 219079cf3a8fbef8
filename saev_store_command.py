"""The command `saev-store`. A module beside the package, because the package is what takes a second to import."""

from __future__ import annotations

import os
import signal
from contextlib import suppress


def main() -> int:
    """Run the command of `sys.argv`, and return its exit code; Ctrl-C while modules are imported is 130 and one line."""
    # Where Ctrl-C is ignored, as below `nohup`, it stays so.
    is_usual = signal.getsignal(signal.SIGINT) is signal.default_int_handler
    if is_usual:
        signal.signal(signal.SIGINT, _interrupted)
    from saev_store.cli import main as run

    if is_usual:
        signal.signal(signal.SIGINT, signal.default_int_handler)
    code = 130
    with suppress(KeyboardInterrupt):
        code = run()
        if is_usual:
            signal.signal(signal.SIGINT, _ended)
    return code


def _ended(*_: object) -> None:
    """End the process at once: its work is done, and the interpreter is ending, where Ctrl-C would be a traceback."""
    os._exit(130)


def _interrupted(*_: object) -> None:
    """End the process at once: nothing was begun, and half-imported modules clean up nothing."""
    os.write(2, b"interrupted\n")
    os._exit(130)
