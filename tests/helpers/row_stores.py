"""Stores whose vectors say which row they are, for tests that look at what arrives at a trainer."""

from __future__ import annotations

from pathlib import Path

import numpy as np

from saev_store import ShardStore, new_metadata

N_EXAMPLES, N_TOKENS, D_MODEL = 48, 7, 8


def row_store(root: Path, *, layers: tuple[int, ...] = (5, 11), seed: int = 0, **more: object) -> Path:
    """48 examples of 7 content tokens. A vector begins with its example, its content token (-1 for CLS) and its layer's position; the rest is normal."""
    metadata = new_metadata(
        family="gpt2", ckpt="coordinates", layers=layers, content_tokens_per_example=N_TOKENS, cls_token=True, d_model=D_MODEL,
        n_examples=N_EXAMPLES, max_tokens_per_shard=5 * (N_TOKENS + 1) * len(layers), data={"seed": seed}, **more,
    )  # fmt: skip
    acts = np.random.default_rng(seed).standard_normal(metadata.layout.shape, dtype=np.float32)
    acts[..., 0] = np.arange(N_EXAMPLES)[:, None, None]
    acts[..., 1] = np.arange(-1, N_TOKENS)
    acts[..., 2] = np.arange(len(layers))[:, None]
    arrays = {"token_ids": np.arange(N_EXAMPLES * N_TOKENS).reshape(N_EXAMPLES, N_TOKENS)}
    with ShardStore.create(root, metadata, progress=False) as writer:
        writer.append(acts, **(arrays if more else {}))
    return root / metadata.hash


def rows_of(vectors: np.ndarray) -> list[list[int]]:
    """(example, content token) of vectors."""
    return np.asarray(vectors)[..., :2].astype(int).tolist()
