"""Recording is killed again and again, and the same call goes on: the store has the bytes of one that was never interrupted."""

from __future__ import annotations

import os
import time
from pathlib import Path

import numpy as np
import pytest
from kill_children import content, ended, in_child, killed
from tiny_models import VOCABULARY, tiny_language

from saev_store import ShardStore
from saev_store.record import Texts, record

torch = pytest.importorskip("torch")
pytestmark = pytest.mark.skipif(not hasattr(os, "fork"), reason="children are forked")

N_KILLS = int(os.environ.get("SAEV_STORE_KILLS", "3"))


def dump(root: Path, layout: str) -> None:
    """About eighty batches. One thread: torch's pool does not survive a fork."""
    torch.set_num_threads(1)
    rng = np.random.default_rng(4)
    documents = [rng.integers(3, VOCABULARY, n) for n in rng.integers(1, 60, 120)]
    record(
        tiny_language("GPT2Model"),
        Texts(documents, context=20, layout=layout, bos=1, batch_size=3),
        root,
        layers=(2, 0),
        hook_points=("resid_post", "attn_out"),
        dtype="bfloat16",
        ckpt="tiny",
        max_tokens_per_shard=4 * 21 * 16,
        exist_ok=True,
        progress=False,
    )


@pytest.mark.parametrize("layout", ["window", "stream"])
def test_killed_recordings_end_with_the_same_bytes(tmp_path: Path, layout: str) -> None:
    tiny_language("GPT2Model")  # what children need is imported once
    began_s = time.monotonic()
    assert ended(in_child(lambda: dump(tmp_path / "whole", layout))) == 0
    whole_s = time.monotonic() - began_s
    rng = np.random.default_rng(9)
    n_kills = n_stores = 0
    while n_kills < N_KILLS:
        root = tmp_path / f"cut{n_stores}"
        child = in_child(lambda root=root: dump(root, layout))
        time.sleep(whole_s * rng.uniform(0.1, 0.9))
        code = killed(child)
        assert code in {-9, 0}
        n_kills += code == -9
        n_stores += code == 0  # it had come to its end: the next one begins anew
    assert ended(in_child(lambda: dump(root, layout))) == 0
    for cut in tmp_path.glob("cut*"):
        assert content(cut) == content(tmp_path / "whole")
    (store,) = (tmp_path / "whole").iterdir()
    assert ShardStore.open(store).validate(deep=True, progress=False).ok
