"""Ranks are killed, and others go on: the store has the bytes of one process."""

from __future__ import annotations

import os
import time
from pathlib import Path

import numpy as np
import pytest
from kill_children import content, ended, in_child, killed
from tiny_models import VOCABULARY, tiny_language

from saev_store.record import Texts, record

torch = pytest.importorskip("torch")
pytestmark = pytest.mark.skipif(not hasattr(os, "fork"), reason="children are forked")

N_KILLS = int(os.environ.get("SAEV_STORE_KILLS", "3"))


def dump(root: Path, part: tuple[int, int] | None) -> None:
    """About eighty batches. One thread: torch's pool does not survive a fork."""
    torch.set_num_threads(1)
    rng = np.random.default_rng(4)
    documents = [rng.integers(3, VOCABULARY, n) for n in rng.integers(1, 60, 120)]
    record(
        tiny_language("GPT2Model"),
        Texts(documents, context=20, layout="stream", bos=1, batch_size=3),
        root,
        layers=(2, 0),
        dtype="bfloat16",
        ckpt="tiny",
        max_tokens_per_shard=2 * 20 * 8,
        part=part,
        exist_ok=True,
        progress=False,
    )


def start(root: Path, part: tuple[int, int] | None) -> int:
    return in_child(lambda: dump(root, part))


def test_killed_ranks_are_continued_by_others(tmp_path: Path) -> None:
    """Four ranks at once, one of them killed; then two; then again, until enough were killed."""
    tiny_language("GPT2Model")  # what children need is imported once
    began_s = time.monotonic()
    assert ended(start(tmp_path / "whole", None)) == 0
    whole_s = time.monotonic() - began_s
    rng = np.random.default_rng(9)
    n_kills = n_stores = 0
    while n_kills < N_KILLS:
        root = tmp_path / f"cut{n_stores}"
        children = [start(root, (rank, 4)) for rank in range(4)]
        time.sleep(whole_s * rng.uniform(0.1, 0.9))
        code = killed(children.pop(int(rng.integers(4))))
        assert code in {-9, 0}
        assert [ended(child) for child in children] == [0, 0, 0]
        n_kills += code == -9
        assert [ended(child) for child in [start(root, (rank, 2)) for rank in range(2)]] == [0, 0]
        assert content(root) == content(tmp_path / "whole")
        n_stores += 1
