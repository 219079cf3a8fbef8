"""Processes that are killed at any system call: afterwards the same call continues, and nothing wrong looks complete."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path

import kills

#: 200 and more in the long tests.
N_KILLS = int(os.environ.get("SAEV_STORE_KILLS", "50"))


def test_killed_operations_continue_and_are_right(tmp_path):
    # Memory and disk alike keep what was written before a kill, and memory does not wait for a flush.
    parent = "/dev/shm" if os.access("/dev/shm", os.W_OK) else tmp_path
    with tempfile.TemporaryDirectory(dir=parent) as folder:
        done = subprocess.run(
            [sys.executable, Path(kills.__file__), folder, "--kills", str(N_KILLS)],
            capture_output=True, text=True, timeout=120 + 2 * N_KILLS, check=False,
        )  # fmt: skip
    assert done.returncode == 0, done.stderr[-4000:]
    assert json.loads(done.stdout)["kills"] >= N_KILLS
