"""Runs operations in child processes, kills them with SIGKILL at a chosen system call, and runs them again until they finish.

After every kill what is there is right or is not taken for a store; at the end it is right. A script of its own, so that it
forks a warm process without threads: `python tests/helpers/kills.py FOLDER --kills 50 write parts` prints a line of JSON.
"""

from __future__ import annotations

import argparse
import gc
import json
import os
import shutil
import signal
import sys
from collections.abc import Callable
from pathlib import Path

import numpy as np

sys.path[:0] = [str(Path(__file__).parent), str(Path(__file__).parents[2])]

from kill_children import ended, in_child
from operations import OPERATIONS, Operation, WriteInParts

#: Calls that change what is on the disk, or are between two that do.
CALLS = (
    "open", "write", "pwrite", "pwritev", "fsync", "fdatasync", "rename", "replace", "link", "mkdir", "ftruncate", "unlink",
    "rmdir", "close", "copy_file_range", "sendfile",
)  # fmt: skip


def run_until(operation: Operation, folder: Path, dies_at: int, count: Path | None = None) -> int:
    """Run an operation in a child that dies at its call number `dies_at`, before it or after; its exit code."""

    def work() -> None:
        n_calls = 0

        def wrapped(real: Callable) -> Callable:
            def call(*args, **kwargs):
                nonlocal n_calls
                n_calls += 1
                dies = n_calls == dies_at
                if dies and dies_at % 2:
                    os.kill(os.getpid(), signal.SIGKILL)
                found = real(*args, **kwargs)
                if dies:
                    os.kill(os.getpid(), signal.SIGKILL)
                return found

            return call

        for name in CALLS:
            setattr(os, name, wrapped(getattr(os, name)))
        operation.run(folder)
        if count is not None:
            count.write_text(str(n_calls))

    return ended(in_child(work, on_warning="ignore"))


def kill_until_done(make: Callable[[int], Operation], folder: Path, seed: int, rng: np.random.Generator) -> int:
    """Kill and run again until an operation has finished; the number of kills."""
    operation, count = make(seed), folder / "count"
    ended(in_child(lambda: operation.set_up(folder / "whole")))
    if run_until(operation, folder / "whole", 0, count):
        raise AssertionError("a run without a kill failed")
    n_calls, n_kills, code = int(count.read_text()), 0, -1
    ended(in_child(lambda: operation.set_up(folder / "killed")))
    while code:
        if isinstance(operation, WriteInParts):  # any number of ranks continues what any other number has begun
            operation.world = int(rng.choice([1, 2, 4]))
        code = run_until(operation, folder / "killed", int(rng.integers(1, n_calls * (1 + n_kills / 20))))
        if code not in (0, -signal.SIGKILL):
            raise AssertionError(f"a child failed after {n_kills} kills of {operation}")
        n_kills += code != 0
        operation.check(folder / "killed", finished=code == 0)
    return n_kills


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("folder", type=Path)
    parser.add_argument("names", nargs="*", default=[*OPERATIONS])
    parser.add_argument("--kills", type=int, default=50)
    parser.add_argument("--seed", type=int, default=0)
    args = parser.parse_args()
    gc.collect()
    gc.freeze()  # children share all that is there
    rng, n_kills, n_done = np.random.default_rng(args.seed), 0, 0
    while n_kills < args.kills:
        folder = args.folder / str(n_done)
        folder.mkdir()
        name = args.names[n_done % len(args.names)]
        n_kills += kill_until_done(OPERATIONS[name], folder, args.seed + n_done, rng)
        shutil.rmtree(folder)
        n_done += 1
    sys.stdout.write(json.dumps({"kills": n_kills, "finished": n_done}) + "\n")


if __name__ == "__main__":
    main()
