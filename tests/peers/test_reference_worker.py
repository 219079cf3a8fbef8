"""The reference project's whole training worker on `saev_store.integrations.saev`: it trains, evaluates, writes checkpoints, infers.

    git clone https://github.com/OSU-NLP-Group/saev /tmp/saev
    pip install beartype cloudpickle einops jaxtyping orjson psutil scipy tyro wandb
    SAEV_STORE_REFERENCE=/tmp/saev python -m pytest tests/peers/test_reference_worker.py

Nothing of it is copied; `reference_worker.py` reads its modules from the checkout and changes one import.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path

import numpy as np
import pytest

from saev_store import ShardStore, new_metadata
from saev_store.writer import copy_store

CHECKOUT = os.environ.get("SAEV_STORE_REFERENCE")
HELPERS = Path(__file__).parents[1] / "helpers"
NEEDS = ("beartype", "cloudpickle", "einops", "jaxtyping", "orjson", "PIL", "psutil", "scipy", "torch", "tyro", "wandb")

pytestmark = [
    pytest.mark.skipif(not CHECKOUT, reason="SAEV_STORE_REFERENCE names no checkout of the reference project"),
    pytest.mark.slow,
]


def made(root: Path, protocol: str) -> Path:
    """A store of 100 examples of random numbers, with labels."""
    metadata = new_metadata(
        protocol=protocol, family="clip", ckpt="made up", layers=[4, 11], content_tokens_per_example=9, cls_token=True,
        d_model=16, n_examples=100, max_tokens_per_shard=600, dataset="/data/birds", data={"made": "up"},
    )  # fmt: skip
    rng = np.random.default_rng(0)
    with ShardStore.create(root, metadata, progress=False) as writer:
        labels = rng.integers(1, 5, (100, 9)).astype(np.uint8)
        writer.append(rng.standard_normal(metadata.layout.shape, dtype=np.float32), labels=labels)
    return root / metadata.hash


def run(driver: str, folder: Path, *arguments: Path) -> str:
    """What a driver prints."""
    for name in NEEDS:
        if find_spec(name) is None:
            pytest.skip(f"{name} is not installed")
    environment = {
        **os.environ,
        "PYTHONPATH": str(HELPERS.parents[1]),
        "CUDA_VISIBLE_DEVICES": "",
        "WANDB_SILENT": "true",
    }
    command = [sys.executable, str(HELPERS / driver), str(CHECKOUT), *map(str, arguments)]
    done = subprocess.run(command, cwd=folder, env=environment, capture_output=True, text=True, timeout=280)
    assert done.returncode == 0, done.stderr[-5000:]
    return done.stdout


@pytest.mark.parametrize("protocol", ["2.0", "2.1"])
def test_its_training_worker_runs(protocol: str, tmp_path: Path):
    store = made(tmp_path / "saev" / "shards", protocol)
    found = json.loads(run("reference_worker.py", tmp_path, store, tmp_path / "runs").splitlines()[-1])
    assert found["shapes"] == [[16, 32], [16, 32]]
    assert found["differ"]
    assert found["train_shards"] == [str(store)] * 2
    for config in found["configs"]:
        assert (config["shards"], config["layer"], config["seed"], config["ignore_labels"]) == (str(store), 11, 42, [])
    assert found["inference"] == [
        "config.json",
        "distributions.pt",
        "mean_values.pt",
        "metrics.json",
        "sparsity.pt",
        "token_acts.npz",
    ]
    assert found["metrics"]["n_tokens"] == 900


def test_its_own_classes_read_a_store_that_was_rewritten(tmp_path: Path):
    """And say the same of it as ours."""
    store = copy_store(made(tmp_path / "old", "2.0"), tmp_path / "saev" / "shards", protocol="2.1", progress=False)
    run("reference_names.py", tmp_path, Path(store))
