"""Ctrl-C at any place: the caller is told, nothing hangs afterwards, and what was interrupted can be used or continued."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
from plain_stores import plain_store
from waiting import HANG_S

#: Scenes, and what they need beside this package.
SCENES = {
    **dict.fromkeys(
        ["threads", "requests", "flags", "ordered", "shuffled", "kept", "locks", "leases", "writer", "documents"]
    ),
    "opened": "aiohttp",
    "gathered": "torch",
    "shared": "torch",
    "hooks": "torch",
    "servers": "uvicorn",
}


@pytest.mark.parametrize("what", SCENES)
def test_at_every_place(tmp_path, what):
    if (needed := SCENES[what]) is not None:
        pytest.importorskip(needed)
    plain = plain_store(tmp_path / "root", n=12, tokens=7, per_shard=5)
    script = Path(__file__).parents[1] / "helpers/interrupts.py"
    command = [sys.executable, "-W", "ignore", str(script), what, str(plain.path)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=HANG_S)
    assert (done.stdout, done.stderr) == ("fine\n", "")
