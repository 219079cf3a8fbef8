"""Real processes, real SIGKILLs: see `kill_harness.py`, which can be run for longer."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path

import pytest

#: A kill leaves memory and disk alike (a power cut does not: `test_writer_crashes.py`), and memory does not wait for
#: fsync: most kills are survived there, some on the disk.
MEMORY = "/dev/shm"


@pytest.mark.slow
@pytest.mark.timeout(400)
@pytest.mark.parametrize(("where", "n_kills"), [("memory", 220), ("disk", 20)])
def test_hundreds_of_kills_never_show(tmp_path: Path, where: str, n_kills: int) -> None:
    n_kills = int(os.environ.get("SAEV_STORE_KILLS", n_kills))
    harness = Path(__file__).with_name("kill_harness.py")
    parent = MEMORY if where == "memory" and os.access(MEMORY, os.W_OK) else tmp_path
    with tempfile.TemporaryDirectory(dir=parent) as folder:
        done = subprocess.run(
            [sys.executable, harness, folder, "--kills", str(n_kills)],
            capture_output=True,
            text=True,
            timeout=110 + n_kills,
            check=False,
        )
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout)["kills"] >= n_kills
