"""The command line `saev-store`.

Results go to standard output (with `--json` as one JSON document); progress, warnings and errors go to standard error.
Exit codes: 0 success, 1 a problem of a store or an address, 2 wrong usage, 3 a defect of this program, 130 interrupted,
141 the reader of standard output has stopped.
"""

from __future__ import annotations

import os
import sys

from saev_store.cli._app import INTERRUPTED, run

__all__ = ["main"]


def main(argv: list[str] | None = None) -> int:
    """Run one command and return its exit code. Raises nothing; shows tracebacks with `--debug` only.

    Args:
        argv: The arguments, `sys.argv[1:]` by default.

    >>> main(["--version"])
    saev-store ...
    0
    """
    code = run(sys.argv[1:] if argv is None else list(argv))
    if argv is None and code == INTERRUPTED:
        # A blocked read in another thread must not delay the end of an interrupted command.
        sys.stderr.flush()
        os._exit(code)
    return code
