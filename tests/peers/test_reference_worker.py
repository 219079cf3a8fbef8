"""The reference project's whole training worker on `saev_store.compat.saev`: it trains, evaluates, writes checkpoints, infers.

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

CHECKOUT = os.environ.get("SAEV_STORE_REFERENCE")
DRIVER = Path(__file__).parents[1] / "helpers" / "reference_worker.py"
NEEDS = ("beartype", "cloudpickle", "einops", "jaxtyping", "orjson", "psutil", "scipy", "torch", "tyro", "wandb")

pytestmark = [
    pytest.mark.skipif(not CHECKOUT, reason="SAEV_STORE_REFERENCE names no checkout of the reference project"),
    pytest.mark.slow,
]


@pytest.mark.parametrize("protocol", ["2.0", "2.1"])
def test_its_training_worker_runs(protocol: str, tmp_path: Path):
    for name in NEEDS:
        if find_spec(name) is None:
            pytest.skip(f"{name} is not installed")
    metadata = new_metadata(
        protocol=protocol, family="clip", ckpt="made up", layers=[4, 11], content_tokens_per_example=9, cls_token=True,
        d_model=16, n_examples=100, max_tokens_per_shard=600,
    )  # fmt: skip
    rng = np.random.default_rng(0)
    root = tmp_path / "saev" / "shards"
    with ShardStore.create(root, metadata, progress=False) as writer:
        writer.append(rng.standard_normal(metadata.layout.shape, dtype=np.float32))
    store = root / metadata.hash
    environment = {
        **os.environ,
        "PYTHONPATH": str(DRIVER.parents[2]),
        "CUDA_VISIBLE_DEVICES": "",
        "WANDB_SILENT": "true",
    }
    command = [sys.executable, str(DRIVER), str(CHECKOUT), str(store), str(tmp_path / "runs")]
    done = subprocess.run(command, cwd=tmp_path, env=environment, capture_output=True, text=True, timeout=280)
    assert done.returncode == 0, done.stderr[-5000:]
    found = json.loads(done.stdout.splitlines()[-1])
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
