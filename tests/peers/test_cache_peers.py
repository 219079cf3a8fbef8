"""Caches that SAELens's own runner and safetensors' own writer have made become stores, bit for bit.

Runs where `SAEV_STORE_CACHES_PYTHON` names an interpreter with both, in an environment of its own:

    pip install torch sae-lens && pip install --no-deps hs-connectors

vLLM itself needs a GPU. Its connector calls `safetensors.torch.save_file` with these two tensors, and hs-connectors is what reads them
for speculators.
"""

from __future__ import annotations

import os
import subprocess
from pathlib import Path

import numpy as np
import pytest

from saev_store.sources.caches import import_cache

PEER = os.environ.get("SAEV_STORE_CACHES_PYTHON")
SCRIPT = Path(__file__).parents[1] / "helpers/peer_caches.py"
MODEL = {"family": "tiny", "ckpt": "tiny", "progress": False}

pytestmark = [
    pytest.mark.skipif(
        not PEER, reason="SAEV_STORE_CACHES_PYTHON names no interpreter with sae-lens and hs-connectors"
    ),
    pytest.mark.slow,
]


def cached(format: str, folder: Path, dtype: str) -> tuple[Path, np.ndarray, np.ndarray]:
    """A cache of the peer: its folder, and what the peer reads from it."""
    environment = {**os.environ, "HF_HUB_OFFLINE": "1", "HF_HOME": str(folder / "home")}
    environment.pop("PYTHONPATH", None)
    command = [str(PEER), str(SCRIPT), format, str(folder), dtype]
    done = subprocess.run(command, capture_output=True, text=True, timeout=280, env=environment)
    assert done.returncode == 0, done.stderr
    return folder / "cache", np.load(folder / "acts.npy"), np.load(folder / "ids.npy")


@pytest.mark.parametrize("dtype", ["float32", "float16"])
def test_a_cache_of_saelens_s_runner(dtype: str, tmp_path: Path):
    pytest.importorskip("pyarrow")
    folder, acts, ids = cached("saelens", tmp_path, dtype)
    assert acts.shape[1:] == (8, 16)
    assert len(acts) >= 24  # the runner fills its last buffer
    assert acts.any()
    store = import_cache(folder, tmp_path / "out", **MODEL, max_tokens_per_shard=40)
    assert store.read(dtype="stored").tobytes() == acts.tobytes()
    np.testing.assert_array_equal(store.token_arrays["token_ids"], ids)
    assert (store.layers, store.shape) == ((1,), (len(acts), 1, 8, 16))


@pytest.mark.parametrize("dtype", ["bfloat16", "float16", "float32"])
def test_hidden_states_as_hs_connectors_reads_them(dtype: str, tmp_path: Path):
    folder, acts, ids = cached("hidden-states", tmp_path, dtype)
    n = len(ids)
    store = import_cache(folder, tmp_path / "out", **MODEL, layer_ids=[1, 2, 3], context=7, max_tokens_per_shard=63)
    stored = store.read(dtype="stored").swapaxes(1, 2).reshape(-1, 3, 16)
    assert stored[:n].tobytes() == acts.tobytes()
    np.testing.assert_array_equal(store.token_arrays["token_ids"].reshape(-1)[:n], ids)
    assert store.layers == (0, 1, 2)
