"""Real processes, real SIGKILLs: see `kill_harness.py`, which can be run for longer."""

from __future__ import annotations

import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
from kill_children import harness_result
from kill_harness_oracle import case
from waiting import HANG_S

from saev_store.transport import open_transport
from saev_store.writer import create_store


@pytest.mark.slow
@pytest.mark.timeout(400)
@pytest.mark.parametrize(("where", "n_kills"), [("memory", 220), ("disk", 20)])
def test_hundreds_of_kills_never_show(tmp_path: Path, where: str, n_kills: int) -> None:
    met = harness_result("kill_harness.py", where, n_kills, tmp_path=tmp_path, limit_s=110)
    assert met["kills"] >= met["n_asked"]


ENDLESS = """
import sys, time
sys.path[:0] = [{tests!r}, {root!r}]
from kill_harness_oracle import case
from saev_store.transport import open_transport
from saev_store.writer import create_store
this = case(n=100_000, per_shard=1000, labelled=False)
with create_store(open_transport({folder!r}), this.metadata, block_bytes=64, on_nonfinite="allow") as writer:
    for i in range(100_000):
        writer.append(this.acts[i])
        if i == 1500:
            print("going", flush=True)
        time.sleep(0.0005 * (i > 1500))
"""


def test_ctrl_c_ends_quickly_and_loses_little(tmp_path: Path) -> None:
    this = case(n=100_000, per_shard=1000, labelled=False)
    tests = Path(__file__).parents[1] / "helpers"
    code = ENDLESS.format(tests=str(tests), root=str(tests.parents[1]), folder=str(tmp_path))
    with subprocess.Popen(
        [sys.executable, "-c", code], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    ) as run:
        assert run.stdout is not None
        assert run.stdout.readline() == "going\n"
        time.sleep(0.05)
        run.send_signal(signal.SIGINT)
        _, errors = run.communicate(timeout=HANG_S)
    assert run.returncode == -signal.SIGINT
    assert "KeyboardInterrupt" in errors
    with (
        pytest.raises(ZeroDivisionError),
        create_store(
            open_transport(tmp_path), this.metadata, resume=True, block_bytes=64, on_nonfinite="allow"
        ) as writer,
    ):
        assert writer.next_example > 1400  # at most one block of those that were appended is lost
        1 / 0  # noqa: B018  # raises
