"""A script of `examples/` in a process of its own: to its end, or killed while it writes a checkpoint.

    python example_process.py SCRIPT N_CHECKPOINTS ARGUMENTS…

After so many checkpoints (-1: never) the next one is cut in the middle by SIGKILL.
"""

from __future__ import annotations

import os
import runpy
import signal
import sys
from pathlib import Path


def main(script: str, n_checkpoints: int) -> None:
    import torch

    torch.set_num_threads(1)
    save, n_saved = torch.save, 0

    def save_or_die(state: object, path: str | Path) -> None:
        nonlocal n_saved
        if n_saved == n_checkpoints:
            Path(path).write_bytes(b"half of a checkpoint")
            os.kill(os.getpid(), signal.SIGKILL)
        save(state, path)
        n_saved += 1

    torch.save = save_or_die
    sys.path.insert(0, str(Path(script).parent))  # as `python SCRIPT` has it
    runpy.run_path(script, run_name="__main__")
    # Threads of gloo abort one process in twenty or so at its end on a busy machine, whatever it did before.
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(0)


if __name__ == "__main__":
    _, script, n_checkpoints, *arguments = sys.argv
    sys.argv = [script, *arguments]
    main(script, int(n_checkpoints))
