"""Real processes, real SIGKILLs: see `kill_sources.py`, which can be run for longer."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path

import pytest

#: A kill leaves memory and disk alike, and memory does not wait for fsync.
MEMORY = "/dev/shm"


@pytest.mark.slow
@pytest.mark.timeout(600)
@pytest.mark.parametrize(("where", "n_kills"), [("memory", 100), ("disk", 10)])
def test_no_kill_shows_a_reader_half_a_data_set(tmp_path: Path, where: str, n_kills: int) -> None:
    n_kills = int(os.environ.get("SAEV_STORE_KILLS", n_kills))
    harness = Path(__file__).parents[1] / "helpers/kill_sources.py"
    parent = MEMORY if where == "memory" and os.access(MEMORY, os.W_OK) else tmp_path
    with tempfile.TemporaryDirectory(dir=parent) as folder:
        done = subprocess.run(
            [sys.executable, harness, folder, "--kills", str(n_kills)],
            capture_output=True,
            text=True,
            timeout=300 + n_kills,
            check=False,
        )
    assert done.returncode == 0, done.stderr
    met = json.loads(done.stdout)
    assert min(met["kills"].values()) * 5 >= n_kills
    if where == "memory":  # kills that always met the same moment would show nothing
        assert set().union(*met["found"].values()) == {"None", "0", "1"}
