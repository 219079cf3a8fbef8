"""The command line `saev-store`: one small file per command, one document on standard output each.

Results go to standard output (with `--json` as one JSON document), progress, warnings and errors to standard error.
Exit codes: 0 fine, 1 a problem with a store or an address, 2 wrong usage, 3 a defect of this program, 130 interrupted,
141 the reader of our output went away.
"""

from __future__ import annotations

import os
import sys

from saev_store.cli._run import INTERRUPTED, run

__all__ = ["main"]


def main(argv: list[str] | None = None) -> int:
    """Run one command and return its exit code; nothing is raised, no traceback is shown without `--debug`.

    Args:
        argv: The arguments, `sys.argv[1:]` by default.
    """
    if argv is not None:
        return run(list(argv))
    code = run(sys.argv[1:])
    if code == INTERRUPTED:
        # A read that hangs in another thread must not keep an interrupted command alive.
        sys.stderr.flush()
        os._exit(code)
    return code
