"""The examples train, draw their losses, and go on exactly after a kill; also on two ranks. SAELens's is in test_training_peers.py."""

from __future__ import annotations

import os
import runpy
import signal
import subprocess
import sys
import xml.etree.ElementTree as ET
from pathlib import Path

import numpy as np
import pytest
from sparse_stores import sparse_store

torch = pytest.importorskip("torch")

from saev_store.torch import StoreLoader

ROOT = Path(__file__).resolve().parents[2]
EXAMPLES, PROCESS = ROOT / "examples", ROOT / "tests/helpers/example_process.py"
OPTIONS = ["--batch-size", "32", "--latents", "64", "--k", "4", "--lr", "0.01", "--save-every", "4", "--steps", "30"]
#: Script -> what it takes beside the options; STORE is replaced.
SCRIPTS = {
    "train_sae.py": ["STORE", "--layer", "5"],
    "train_crosscoder.py": ["STORE", "--layers", "2", "5", "11"],
    "train_transcoder.py": ["STORE", "STORE", "--source", "5", "--target", "11"],
}


@pytest.fixture(scope="module")
def store(tmp_path_factory: pytest.TempPathFactory) -> str:
    return str(sparse_store(tmp_path_factory.mktemp("examples")))


@pytest.fixture
def rows(monkeypatch: pytest.MonkeyPatch) -> list[list[int]]:
    """The tokens of each batch that a script in this process gets."""
    seen: list[list[int]] = []
    iterate = StoreLoader.__iter__

    def watched(loader):
        for batch in iterate(loader):
            seen.append((batch["example_idx"] * 7 + batch["token_idx"]).tolist())
            yield batch

    monkeypatch.setattr(StoreLoader, "__iter__", watched)
    return seen


def arguments(script: str, store: str, out: Path) -> list[str]:
    return [store if part == "STORE" else part for part in SCRIPTS[script]] + [*OPTIONS, "--out", str(out)]


def train(monkeypatch: pytest.MonkeyPatch, script: str, store: str, out: Path, *more: str) -> dict:
    """Run a script in this process; its last checkpoint."""
    monkeypatch.setattr(sys, "argv", [script, *arguments(script, store, out), *more])
    monkeypatch.syspath_prepend(str(EXAMPLES))
    n_threads = torch.get_num_threads()
    torch.set_num_threads(1)  # as in the other processes, so that sums are the same
    try:
        runpy.run_path(str(EXAMPLES / script), run_name="__main__")
    finally:
        torch.set_num_threads(n_threads)
        sys.modules.pop("training", None)
    return torch.load(out / "checkpoint.pt", weights_only=True)


def started(command: list[str]) -> subprocess.CompletedProcess[str]:
    """The end of another process."""
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": ""}
    return subprocess.run(
        [sys.executable, *command], env=environment, capture_output=True, text=True, timeout=280, check=False
    )


@pytest.mark.parametrize("script", SCRIPTS)
def test_training_goes_on_exactly_after_it_was_stopped(
    script: str, store: str, rows: list, tmp_path: Path, monkeypatch
):
    whole = train(monkeypatch, script, store, tmp_path / "whole")
    assert len(whole["losses"]) == len(rows) == 30  # two epochs of 13 batches, and a bit
    assert len({token for batch in rows[:13] for token in batch}) == 13 * 32  # none came twice
    assert np.mean(whole["losses"][-5:]) < 0.7 * np.mean(whole["losses"][:3])

    out = tmp_path / "killed"
    if script == "train_sae.py":  # a process of its own takes seconds to import torch
        killed = started([str(PROCESS), str(EXAMPLES / script), "2", *arguments(script, store, out)])
        assert killed.returncode == -signal.SIGKILL, killed.stderr
    else:
        train(monkeypatch, script, store, out, "--steps", "8")
    assert torch.load(out / "checkpoint.pt", weights_only=True)["losses"] == whole["losses"][:8]

    expected = rows[8:30]
    rows.clear()
    again = train(monkeypatch, script, store, out, "--resume")
    assert rows == expected
    assert again["losses"] == whole["losses"]
    assert all(torch.equal(again["model"][name], value) for name, value in whole["model"].items())


@pytest.mark.slow  # starts three processes that import torch
def test_two_ranks_go_on_with_what_one_began(store: str, tmp_path: Path, monkeypatch):
    """The same rows, so nearly the same losses: each rank compares with the variance of its half."""
    script = "train_transcoder.py"
    one = train(monkeypatch, script, store, tmp_path / "one")
    train(monkeypatch, script, store, tmp_path / "two", "--steps", "4")
    ranks = ["-m", "torch.distributed.run", "--nproc-per-node", "2", "--rdzv-backend", "c10d"]
    ranks += ["--rdzv-endpoint", "localhost:0", str(PROCESS), str(EXAMPLES / script), "-1"]
    done = started([*ranks, *arguments(script, store, tmp_path / "two"), "--resume"])
    assert done.returncode == 0, done.stderr[-3000:]
    two = torch.load(tmp_path / "two/checkpoint.pt", weights_only=True)
    assert two["loader"] == one["loader"]
    assert two["losses"][:4] == one["losses"][:4]
    assert two["losses"][4:] == pytest.approx(one["losses"][4:], rel=0.25)


def test_the_picture_has_axes_and_all_losses(store: str, tmp_path: Path, monkeypatch):
    losses = train(monkeypatch, "train_sae.py", store, tmp_path)["losses"]
    picture = ET.parse(tmp_path / "loss.svg").getroot()
    texts = ["".join(text.itertext()) for text in picture.findall(".//{*}text")]
    assert {"step", "unexplained variance", "0", "6", "30", f"{max(losses):.2g}"} <= set(texts)
    (line,) = picture.findall(".//{*}polyline")
    points = np.array([point.split(",") for point in line.get("points").split()], float)
    slope, offset = np.polyfit(losses, points[:, 1], 1)
    assert len(points) == 30
    np.testing.assert_allclose(slope * np.array(losses) + offset, points[:, 1], atol=0.1)


def test_a_batch_that_is_never_full_is_refused(store: str, tmp_path: Path, monkeypatch):
    with pytest.raises(SystemExit, match="do not fill a batch"):
        train(monkeypatch, "train_sae.py", store, tmp_path, "--batch-size", "1000")
