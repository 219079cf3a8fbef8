"""Statistics, and scales that follow from them, leave out what the mask of a store leaves out, such as padding."""

from __future__ import annotations

from pathlib import Path

import numpy as np

from saev_store import ShardStore, new_metadata


def masked_store(root: Path, *, cls_token: bool, seed: int = 0) -> tuple[ShardStore, np.ndarray, np.ndarray]:
    """A store, its vectors, and which of all its tokens count; token 3 of the content never does."""
    rng = np.random.default_rng(seed)
    meta = new_metadata(
        family="gpt2", ckpt="x", layers=[0, 4], content_tokens_per_example=4, cls_token=cls_token, d_model=6, n_examples=9,
        max_tokens_per_shard=40, token_arrays={"mask": "bool"},
    )  # fmt: skip
    acts = rng.normal(size=meta.layout.shape).astype(np.float32)
    acts[2, 0, 1, 3], acts[3, 1, 0] = np.nan, 0
    mask = rng.random((9, 4)) < 0.6
    mask[:, 3] = False
    acts[:, :, -4:][~np.broadcast_to(mask[:, None], (9, 2, 4))] = np.array([0, 1e30, np.inf, 0, -7, 0], np.float32)
    with ShardStore.create(root, meta, on_nonfinite="allow") as writer:
        writer.append(acts, mask=mask)
    kept = np.concatenate((np.ones((9, int(cls_token)), bool), mask), axis=1)
    return ShardStore.open(root / meta.hash), acts.astype(np.float64), kept


def test_stats_of_a_store_with_a_mask_leave_out_what_it_hides(tmp_path: Path) -> None:
    for cls_token in (False, True):
        store, acts, kept = masked_store(tmp_path / str(cls_token), cls_token=cls_token)
        found = store.stats()
        for layer in range(2):
            for token in range(acts.shape[2]):
                vectors = acts[kept[:, token], layer, token]
                finite = vectors[np.isfinite(vectors)]
                whole = vectors[np.isfinite(vectors).all(1)]
                assert found.count[layer, token] == finite.size
                wanted = {
                    "mean": finite.mean, "std": finite.std, "min": finite.min, "max": finite.max,
                    "mean_norm": lambda whole=whole: np.linalg.norm(whole, axis=1).mean(),
                    "zero_fraction": lambda vectors=vectors: (vectors == 0).mean(),
                    "nonfinite_fraction": lambda vectors=vectors: (~np.isfinite(vectors)).mean(),
                }  # fmt: skip
                for name, value in wanted.items():
                    expected = value() if finite.size else np.nan
                    np.testing.assert_allclose(getattr(found, name)[layer, token], expected, rtol=1e-12, err_msg=name)
        rows = store.sel(layer=4, tokens="content")[:].astype(np.float64)
        norms = np.linalg.norm(rows[np.isfinite(rows).all(1)], axis=1)
        np.testing.assert_allclose(found.scale(4), np.sqrt(6) / norms.mean())


def test_kept_stats_of_a_store_with_a_mask_are_read_again_but_not_those_that_counted_padding(tmp_path: Path) -> None:
    store, _, _ = masked_store(tmp_path, cls_token=False)
    first = store.stats()
    file = tmp_path / store.metadata.hash / "stats.json"
    assert ShardStore.open(file.parent).stats().to_dict()["per_layer"] == first.to_dict()["per_layer"]
    raw = file.read_bytes()
    file.write_bytes(raw.replace(b'"version":3', b'"version":2').replace(b'"n_vectors":[[', b'"n_vectors":[[9', 1))
    np.testing.assert_array_equal(ShardStore.open(file.parent).stats().count, first.count)
    assert file.read_bytes() == raw
