"""Processes that help a loader and are killed: an error that says so, and nothing wrong afterwards."""

from __future__ import annotations

import signal
import subprocess
import sys

import numpy as np
import pytest
from plain_stores import Plain, plain_store
from waiting import HANG_S

from saev_store import ShardStore
from saev_store.loaders import stage


@pytest.fixture(scope="module")
def plain(tmp_path_factory: pytest.TempPathFactory) -> Plain:
    return plain_store(tmp_path_factory.mktemp("helpers"), n=43, tokens=7, per_shard=5, labels=True, d_model=16)


_TRAINS = """
import os, signal, sys
sys.path[:0] = {path!r}
import numpy as np
from torch.utils.data import DataLoader
from saev_store.torch import IndexedConfig, IndexedDataset

if __name__ == "__main__":
    acts = np.load({acts!r})
    dataset = IndexedDataset(IndexedConfig(shards={url!r}, layer=5))
    loader = DataLoader(
        dataset, sampler=list(range(len(dataset))) * 4, batch_size=16, num_workers=1, timeout={hang_s},
        collate_fn=IndexedDataset.collate, multiprocessing_context="fork",
    )
    batches, n = iter(loader), 0
    for batch in batches:
        found, example, token = (batch[name].numpy() for name in ("act", "example_idx", "token_idx"))
        if not np.array_equal(found, acts[example, 1, token + 1]):
            print("WRONG", flush=True)
        if n == 0:
            print("killing", flush=True)
            os.kill(batches._workers[0].pid, signal.SIGKILL)
        n += len(found)
    print("ENDED", flush=True)
"""


def test_a_killed_worker_of_pytorchs_loader(plain, tmp_path):
    """Batches that arrive are right; then the script ends with an error.

    Which error is PyTorch's matter: its own RuntimeError, or EOFError or ConnectionResetError where the worker dies
    while it passes a descriptor, raised from a signal handler wherever that finds the script.
    """
    pytest.importorskip("torch")
    np.save(tmp_path / "acts.npy", plain.acts)
    script = tmp_path / "train.py"
    script.write_text(
        _TRAINS.format(path=sys.path, acts=str(tmp_path / "acts.npy"), url=str(plain.path), hang_s=HANG_S)
    )
    done = subprocess.run([sys.executable, str(script)], capture_output=True, text=True, timeout=HANG_S, check=False)
    assert done.stdout == "killing\n"
    assert done.returncode == 1
    assert "Error" in done.stderr


_STAGES = """
import os, signal, sys
sys.path[:0] = {path!r}
from saev_store.loaders import stage
left = {n_writes}
def counted(real):
    def call(*arguments, **named):
        global left
        left -= 1
        if left < 0:
            os.kill(os.getpid(), signal.SIGKILL)
        return real(*arguments, **named)
    return call
for name in ("fsync", "rename", "replace", "link"):
    setattr(os, name, counted(getattr(os, name)))
stage({url!r}, {to!r}, layers=[5, 11])
print("staged")
"""


@pytest.mark.parametrize("n_writes", [2, 7])
def test_a_killed_copy_is_continued(n_writes, plain, tmp_path):
    """The process that staged is killed at some step; who asks next, or waits already, gets the whole copy."""
    script = _STAGES.format(path=sys.path, n_writes=n_writes, url=str(plain.path), to=str(tmp_path / "near"))
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, timeout=HANG_S, check=False)
    assert done.returncode == -signal.SIGKILL, (done.stdout, done.stderr)
    near = ShardStore.open(stage(plain.path, tmp_path / "near", layers=[5, 11]))
    np.testing.assert_array_equal(near[:, :], plain.acts[:, 1:])
    near.validate(deep=True).raise_if_bad()
