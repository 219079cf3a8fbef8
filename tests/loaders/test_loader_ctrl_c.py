"""Ctrl-C in a real process: it ends within a second, whatever its reads are doing."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest
from plain_stores import plain_store
from waiting import HANG_S

from saev_store.loaders._iteration import JOIN_S, SLICE_S

#: What a user notices; time in which the machine did not let the process run is left out (`ctrl_c.Awake`).
LIMIT_S = 1.0


def test_waits_are_bounded():
    """What is waited for by the clock after a Ctrl-C: one slice, until it is noticed, and then for threads."""
    assert JOIN_S + SLICE_S < LIMIT_S - 0.2


SITUATIONS = ["hung reads", "ordered", "slow reads", "training", "obstore", "fsspec", "worker"]
CASES = [(what, who) for what in SITUATIONS for who in ("group", "any")]
#: A terminal tells the worker process, too; what the main thread waits for itself ends at once when it is told.
CASES = [*CASES[:-1], ("indexed obstore", "any"), ("indexed fsspec", "any"), ("fetched obstore", "group")]


@pytest.mark.parametrize(("situation", "receiver"), CASES)
def test_ctrl_c_ends_within_a_second(tmp_path: Path, situation: str, receiver: str):
    """Reads hang for good or take their time, here or on a server that stops in the middle of an answer.

    The signal comes to the process group, as from a terminal, or to a thread that is not the main one.
    """
    for word, module in (("obstore", "obstore"), ("fsspec", "aiohttp"), ("worker", "torch")):
        if situation.endswith(word):
            pytest.importorskip(module)
    plain = plain_store(tmp_path, n=24, tokens=7, per_shard=5, d_model=640)
    script = Path(__file__).parents[1] / "helpers/ctrl_c.py"
    command = [sys.executable, str(script), situation, str(plain.path), str(tmp_path / "told"), receiver]
    pipe = subprocess.PIPE
    with subprocess.Popen(command, stdout=pipe, stderr=pipe, text=True, start_new_session=True) as process:
        try:
            said, errors = process.communicate(timeout=HANG_S)
        finally:
            if process.poll() is None:
                os.killpg(process.pid, signal.SIGKILL)
    assert "KeyboardInterrupt" in errors
    assert process.returncode == -signal.SIGINT
    after = json.loads(said.splitlines()[-1])
    assert 0 <= after["awake_s"] < LIMIT_S, after
