"""Stores that a sparse dictionary explains, for tests in which something is trained."""

from __future__ import annotations

from pathlib import Path

import numpy as np

from saev_store import ShardStore, new_metadata

N_EXAMPLES, N_TOKENS, D_MODEL = 60, 7, 16


def sparse_store(root: Path) -> Path:
    """420 tokens in the layers 2, 5 and 11: the same sparse mixture of 16 directions, of each layer its own."""
    metadata = new_metadata(
        family="gpt2", ckpt="sparse", layers=[2, 5, 11], content_tokens_per_example=N_TOKENS, cls_token=False, d_model=D_MODEL,
        n_examples=N_EXAMPLES, max_tokens_per_shard=9 * 3 * N_TOKENS,
    )  # fmt: skip
    rng, shape = np.random.default_rng(0), (N_EXAMPLES, 1, N_TOKENS, 16)
    active = rng.uniform(1, 2, shape) * (rng.random(shape) < 0.1)
    acts = active @ rng.standard_normal((1, 3, 16, D_MODEL))
    acts += 0.01 * rng.standard_normal(metadata.layout.shape)
    with ShardStore.create(root, metadata, progress=False) as writer:
        writer.append(acts.astype(np.float32))
    return root / metadata.hash
