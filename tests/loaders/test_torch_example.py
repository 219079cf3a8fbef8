"""The example trains, draws its picture, and resumes exactly; also on two ranks."""

from __future__ import annotations

import os
import runpy
import subprocess
import sys
from pathlib import Path

import pytest
from plain_stores import plain_store

torch = pytest.importorskip("torch")

EXAMPLE = Path(__file__).resolve().parents[2] / "examples" / "train_sae.py"
OPTIONS = ["--layer", "5", "--batch-size", "32", "--latents", "64", "--k", "4", "--save-every", "4"]


@pytest.fixture(scope="module")
def store(tmp_path_factory) -> str:
    return str(plain_store(tmp_path_factory.mktemp("example"), n=60, tokens=7, per_shard=9, d_model=16).path)


def train(monkeypatch, store: str, out: Path, *more: str) -> dict:
    monkeypatch.setattr(sys, "argv", ["train_sae.py", store, *OPTIONS, "--out", str(out), *more])
    runpy.run_path(str(EXAMPLE), run_name="__main__")
    return torch.load(out / "checkpoint.pt", weights_only=True)


def test_training_resumes_exactly(store, tmp_path, monkeypatch):
    whole = train(monkeypatch, store, tmp_path / "whole", "--steps", "30")  # two epochs and a bit
    assert whole["losses"][-1] < 0.9 * whole["losses"][0]
    assert "<polyline" in (tmp_path / "whole" / "loss.svg").read_text()
    train(monkeypatch, store, tmp_path / "parts", "--steps", "7")
    again = train(monkeypatch, store, tmp_path / "parts", "--steps", "30", "--resume")
    assert again["losses"] == whole["losses"]
    assert all(torch.equal(again["model"][name], value) for name, value in whole["model"].items())


def test_two_ranks_take_the_same_batches(store, tmp_path, monkeypatch):
    """Begun on one rank, continued on two: the same rows, so nearly the same losses."""
    one = train(monkeypatch, store, tmp_path / "one", "--steps", "12")
    train(monkeypatch, store, tmp_path / "two", "--steps", "4")
    command = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", "2", "--master-port", "0"]
    command += ["--rdzv-backend", "c10d", "--rdzv-endpoint", "localhost:0"]
    command += [str(EXAMPLE), store, *OPTIONS, "--out", str(tmp_path / "two"), "--steps", "12", "--resume"]
    root = str(EXAMPLE.parent.parent)
    environment = {**os.environ, "PYTHONPATH": root, "OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": ""}
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=110, check=False)
    assert done.returncode == 0, done.stderr[-3000:]
    two = torch.load(tmp_path / "two" / "checkpoint.pt", weights_only=True)
    assert two["loader"] == one["loader"]
    assert two["losses"][:4] == one["losses"][:4]
    assert two["losses"][4:] == pytest.approx(one["losses"][4:], rel=0.1)
