"""Two stores of the same tokens: refused where they are not, and selections take the same rows of both."""

from __future__ import annotations

import ml_dtypes
import numpy as np
import pytest
from dense_stores import plain_store as store_of_1
from plain_stores import plain_store

from saev_store import ShardStore, new_metadata, pair
from saev_store.core.layout import Layout
from saev_store.errors import ArgumentError, LayerNotFoundError, SaevStoreError, SelectionError

N, CONTENT = 13, 6


def written(
    root, *, dtype="bfloat16", layers=(2, 5, 9), d_model=4, cls_token=True, n=N, content=CONTENT, seed=0, **arrays
):
    """(store, tensor): a store with token arrays."""
    metadata = new_metadata(
        family="gpt2", ckpt=f"random/{seed}", layers=layers, content_tokens_per_example=content, cls_token=cls_token,
        d_model=d_model, n_examples=n, max_tokens_per_shard=90, dtype=dtype,
        token_arrays={name: values.dtype.name for name, values in arrays.items()},
    )  # fmt: skip
    shape = (n, len(layers), content + cls_token, d_model)
    acts = (
        np.random.default_rng(seed).standard_normal(shape).astype(ml_dtypes.bfloat16 if dtype == "bfloat16" else dtype)
    )
    with ShardStore.create(root, metadata, progress=False) as writer:
        writer.append(acts, **arrays)
    return ShardStore.open(root / metadata.hash), acts


def ids(seed=0) -> dict[str, np.ndarray]:
    rng = np.random.default_rng(seed)
    return {
        "token_ids": rng.integers(0, 50257, (N, CONTENT), dtype=np.int32),
        "document_ids": np.sort(rng.integers(0, 5, N * CONTENT)).reshape(N, CONTENT),
    }


def test_rows_of_two_models_equal_dense_numpy(tmp_path):
    a, acts_a = written(tmp_path, **ids())
    b, acts_b = written(tmp_path, dtype="float32", layers=(7, 1), d_model=6, cls_token=False, seed=1, **ids())
    both = pair(a, b)
    assert (both.a, both.b) == (a, b)
    rows = both.sel(layer_a=5, layer_b=1)
    assert len(rows) == N * CONTENT
    found = rows.rows([70, 3, 3])
    assert np.array_equal(found.act_a, acts_a[:, 1, 1:].reshape(-1, 4)[[70, 3, 3]].astype(np.float32))
    assert np.array_equal(found.act_b, acts_b[:, 1].reshape(-1, 6)[[70, 3, 3]])
    rows = both.sel(layer_a=(9, 2), layer_b="all", examples=[4, 1], dtype="stored")
    found = rows.rows(slice(None))
    truth = acts_a[[4, 1]][:, [2, 0], 1:].swapaxes(1, 2).reshape(-1, 2, 4)
    assert found.act_a.dtype == ml_dtypes.bfloat16
    assert np.array_equal(found.act_a.view(np.uint16), truth.view(np.uint16))
    assert np.array_equal(found.act_b, acts_b[[4, 1]].swapaxes(1, 2).reshape(-1, 2, 6))
    where = rows.coordinates([0, 7])
    assert (where.example_idx.tolist(), where.token_idx.tolist()) == ([4, 1], [0, 1])
    assert both.sel(layer_a=[5], layer_b=1).rows([0]).act_a.shape == (1, 1, 4), "a list is stacked, also of one"
    assert repr(rows) == f"<PairSelection of {rows.a!r} and {rows.b!r}>"


def test_stores_of_every_generation(tmp_path):
    """Where one says nothing about tokens, their numbers are what there is to compare."""
    old = store_of_1(Layout(N, (2, 5, 11), CONTENT, True, 8, 4), labelled=True)
    a = ShardStore.open(old.write(tmp_path))
    plain = plain_store(tmp_path, n=N, tokens=CONTENT)
    c, acts = written(tmp_path, **ids())
    rows = pair(a, ShardStore.open(plain.path)).sel(layer_a=2, layer_b=11, tokens="all")
    found = rows.rows(slice(None))
    assert found.act_a.tobytes() == old.dense[:, 0].tobytes()
    assert np.array_equal(found.act_b, plain.acts[:, 2].reshape(-1, 8))
    rows = pair(a, c).sel(layer_a=5, layer_b=9, ignore_labels=[0, 2])
    stays = np.isin(old.labels, [1, 3])
    assert rows.rows(slice(None)).act_a.tobytes() == old.dense[:, 1, 1:][stays].tobytes()
    assert np.array_equal(rows.rows(slice(None)).act_b, acts[:, 2, 1:][stays].astype(np.float32))


def test_conditions_of_both_stores_choose_the_same_tokens(tmp_path):
    rng = np.random.default_rng(2)
    labels, (mask_a, mask_b) = rng.integers(0, 3, (N, CONTENT), dtype=np.uint8), rng.random((2, N, CONTENT)) < 0.6
    a, acts_a = written(tmp_path, labels=labels, mask=mask_a, **ids())
    b, acts_b = written(tmp_path, seed=1, labels=2 - labels, mask=mask_b, **ids())
    c, acts_c = written(tmp_path, seed=2, **ids())
    every = np.ones_like(mask_a)
    for (one, acts_one), (other, acts_other), keep, conditions in (
        ((a, acts_a), (b, acts_b), mask_a & mask_b, {}),
        ((a, acts_a), (c, acts_c), mask_a, {}),
        ((c, acts_c), (a, acts_a), mask_a, {}),
        ((a, acts_a), (b, acts_b), every, {"masked": True}),
        ((a, acts_a), (b, acts_b), labels == 0, {"masked": True, "where": {"labels": 0}}),
        ((b, acts_b), (a, acts_a), (labels == 2) & mask_a & mask_b, {"where": {"labels": 0}}),
        ((a, acts_a), (b, acts_b), mask_a & mask_b & (labels != 1), {"ignore_labels": [1]}),
        # Of two stores that have labels the first one's count: the other calls 2 what this one calls 0.
        ((a, acts_a), (b, acts_b), mask_a & mask_b & (labels != 0), {"ignore_labels": [0]}),
        ((b, acts_b), (a, acts_a), mask_a & mask_b & (labels != 2), {"ignore_labels": [0]}),
        ((a, acts_a), (b, acts_b), every & False, {"where": {"labels": 9}}),
    ):
        rows = pair(one, other).sel(layer_a=9, layer_b=(5, 2), **conditions)
        found = rows.rows(slice(None))
        assert len(rows) == len(rows.b) == keep.sum()
        assert np.array_equal(found.act_a, acts_one[:, 2, 1:][keep].astype(np.float32))
        assert np.array_equal(found.act_b, acts_other[:, [1, 0], 1:].swapaxes(1, 2)[keep].astype(np.float32))
        for side in (rows.a, rows.b):
            where = side.coordinates()
            assert np.array_equal(np.argwhere(keep), np.stack([where.example_idx, where.token_idx], axis=1))
    rows = pair(a, c).sel(layer_a=9, layer_b=5)
    found, keep = rows.only(mask_b).rows(slice(None)), mask_a & mask_b
    assert np.array_equal(found.act_a, acts_a[:, 2, 1:][keep].astype(np.float32))
    assert np.array_equal(found.act_b, acts_c[:, 1, 1:][keep].astype(np.float32))


def test_stores_of_other_tokens_are_refused(tmp_path, monkeypatch):
    a, _ = written(tmp_path, **ids())

    def refused(other: object) -> None:
        with pytest.raises(ArgumentError) as caught:
            pair(a, other)
        assert caught.value.where == "pair"

    refused(written(tmp_path, n=12, seed=1)[0])
    refused(written(tmp_path, content=5, seed=1)[0])
    for seed, (name, at) in enumerate((("token_ids", (7, 2)), ("document_ids", (N - 1, CONTENT - 1))), 1):
        changed = ids()
        changed[name][at] += 1
        other, _ = written(tmp_path, seed=seed, **changed)
        for piece in (1, 50, 1 << 20):
            monkeypatch.setattr("saev_store.store.pair._PIECE", piece)
            refused(other)
    only_ids, _ = written(tmp_path, seed=3, token_ids=ids()["token_ids"])
    pair(only_ids, other), pair(a, only_ids)  # each has one that the other lacks, or the same
    for bad in (3, a.sel(), None):
        for call, where in ((lambda bad=bad: pair(a, bad), "b"), (lambda bad=bad: pair(bad, a), "a")):
            with pytest.raises(ArgumentError) as caught:
                call()
            assert caught.value.where == where


def test_what_one_store_does_not_hold_is_an_error(tmp_path):
    a, _ = written(tmp_path, **ids())
    b, _ = written(tmp_path, cls_token=False, seed=1, **ids())
    both = pair(a, b)
    with pytest.raises(SelectionError):
        both.sel(layer_a=2, layer_b=2, tokens="all")
    for wrong in (
        {"layer_a": 3, "layer_b": 2},
        {"layer_a": 2, "layer_b": (2, 3)},
        {"layer_a": (2, 2), "layer_b": 2},
        {"layer_a": 2, "layer_b": 2, "tokens": "special"},
        {"layer_a": 2, "layer_b": 2, "where": {"nothing": 1}},
        {"layer_a": 2, "layer_b": 2, "ignore_labels": [1]},
        {"layer_a": 2, "layer_b": 2, "examples": N},
    ):
        with pytest.raises((SelectionError, LayerNotFoundError)) as caught:
            both.sel(**wrong)
        assert isinstance(caught.value, SaevStoreError)
    with pytest.raises(SelectionError):
        both.sel(layer_a=2, layer_b=2).rows([N * CONTENT])


def test_hook_points(tmp_path):
    acts = np.random.default_rng(0).standard_normal((N, 2, CONTENT, 4)).astype(np.float16)
    metadata = new_metadata(
        family="gpt2", ckpt="hooks", layers=(5, 5), hook_points=["mlp_in", "mlp_out"], content_tokens_per_example=CONTENT,
        cls_token=False, d_model=4, n_examples=N, max_tokens_per_shard=90, dtype="float16",
    )  # fmt: skip
    with ShardStore.create(tmp_path, metadata, progress=False) as writer:
        writer.append(acts)
    store = ShardStore.open(tmp_path / metadata.hash)
    rows = pair(store, store).sel(layer_a=(5, "mlp_in"), layer_b=[(5, "mlp_out"), (5, "mlp_in")])
    found = rows.rows([0, 77])
    wide = acts.astype(np.float32).swapaxes(1, 2).reshape(-1, 2, 4)[[0, 77]]
    assert np.array_equal(found.act_a, wide[:, 0])
    assert np.array_equal(found.act_b, wide[:, ::-1])
