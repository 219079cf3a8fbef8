"""Rows of several layers: what a selection gives equals what dense NumPy takes, for every protocol version and dtype."""

from __future__ import annotations

from pathlib import Path

import ml_dtypes
import numpy as np
import pytest
from dense_stores import plain_store as store_of_1
from hypothesis import given
from hypothesis import strategies as st
from plain_stores import plain_store
from stacked import Stacked, stacked_rows

from saev_store import ShardStore, new_metadata
from saev_store.core.layout import Layout
from saev_store.errors import ArgumentError, LayerNotFoundError, SelectionError

ENGINES = ["mmap", "pread", "fsspec"]


def same(found, truth):
    """Equal bits; float32 may have other bits for what is no number."""
    assert (found.dtype, found.shape) == (truth.dtype, truth.shape)
    if truth.dtype.itemsize == 2:
        found, truth = found.view(np.uint16), truth.view(np.uint16)
    assert np.array_equal(found, truth, equal_nan=truth.dtype.kind == "f")


@given(stacked_rows(), st.data())
def test_selections_equal_dense_numpy(case: Stacked, data: st.DataObject):
    rows, truth = case.selection(), case.truth
    n, n_special = len(truth), case.layout.n_special_tokens
    assert (len(rows), rows.shape) == (n, truth.shape)
    assert rows.layers == tuple(case.layout.layers[position] for position in case.layer_idx)
    same(rows[:], truth)
    for row, expected in zip(rows, truth, strict=True):
        same(row, expected)
    if n:
        picked = data.draw(st.lists(st.integers(-n, n - 1), max_size=9))
        same(rows.rows(picked), truth[picked])
        same(rows[picked], truth[picked])
        one = data.draw(st.integers(-n, n - 1))
        same(rows[one], truth[one])
    some = data.draw(st.builds(slice, st.integers(-3, n), st.none(), st.sampled_from([None, 2, -1, -3])))
    same(rows[some], truth[some])
    out = np.zeros(truth[some].shape, truth.dtype)
    assert rows.rows(some, out=out) is out
    same(out, truth[some])
    where = rows.coordinates(some)
    assert (
        list(zip(where.example_idx.tolist(), (where.token_idx + n_special).tolist(), strict=True)) == case.where[some]
    )
    assert where.layer.tolist() == [list(rows.layers)] * len(truth[some])
    assert rows.estimate(some).bytes_wanted == truth[some].size * case.layout.itemsize


@given(stacked_rows())
def test_stacked_rows_are_the_rows_of_each_layer_alone(case: Stacked):
    """The same rows in the same order: row i of the stack is row i of every layer by itself."""
    found = case.selection()[:]
    for nth, position in enumerate(case.layer_idx):
        alone = case.one_layer(layer=case.layout.layers[position])
        same(found[:, nth], alone[:])
        assert np.array_equal(alone.coordinates().token_idx, case.selection().coordinates().token_idx)


@pytest.fixture(params=["1.0.0", "2.0", "bfloat16", "float16"])
def made(request, tmp_path: Path):
    """(path, tensor, layers to choose by, their positions): a store of each generation."""
    if request.param == "1.0.0":
        dense = store_of_1(Layout(11, (2, 5, 11), 6, True, 8, 4))
        return dense.write(tmp_path), dense.dense, [11, 2], [2, 0]
    if request.param == "2.0":
        plain = plain_store(tmp_path, n=11, tokens=6)
        return plain.path, plain.acts, [11, 2], [2, 0]
    dtype = np.dtype(ml_dtypes.bfloat16 if request.param == "bfloat16" else np.float16)
    metadata = new_metadata(
        family="gpt2", ckpt="random", layers=(2, 5, 5), hook_points=["resid_post", "attn_out", "resid_post"],
        content_tokens_per_example=6, cls_token=True, d_model=8, n_examples=11, max_tokens_per_shard=90,
        dtype=request.param,
    )  # fmt: skip
    acts = np.random.default_rng(3).integers(0, 2**16, (11, 3, 7, 8), dtype=np.uint16).view(dtype)
    with ShardStore.create(tmp_path, metadata, on_nonfinite="allow", progress=False) as writer:
        writer.append(acts)
    return tmp_path / metadata.hash, acts, [(5, "resid_post"), 2], [2, 0]


@pytest.mark.parametrize("engine", ENGINES)
def test_every_generation_of_stores_and_every_engine(made, engine):
    path, acts, layers, positions = made
    store = ShardStore.open(path, engine=engine)
    every = list(store.layout.layer_keys)
    for layer, at in ((layers, positions), ("all", [0, 1, 2]), (every[::-1], [2, 1, 0]), (layers[0], [positions[0]])):
        for tokens, some in (("content", slice(1, None)), ("special", slice(0, 1)), ("all", slice(None))):
            truth = acts[:, at, some].swapaxes(1, 2).reshape(-1, len(at), 8)
            rows = store.sel(layer=layer, tokens=tokens, stack_layers=True, dtype="stored")
            same(rows[:], truth)
            same(rows[[5, 0, 5]], truth[[5, 0, 5]])
            with np.errstate(all="ignore"):
                same(store.sel(layer=layer, tokens=tokens, stack_layers=True)[3:9], truth[3:9].astype(np.float32))


@pytest.mark.parametrize("engine", ENGINES)
def test_conditions_choose_tokens_of_all_layers(tmp_path, engine):
    rng = np.random.default_rng(1)
    metadata = new_metadata(
        family="gpt2", ckpt="random", layers=(2, 5, 9), content_tokens_per_example=6, cls_token=True, d_model=4,
        n_examples=13, max_tokens_per_shard=90, dtype="bfloat16", token_arrays={"labels": "uint8", "mask": "bool"},
    )  # fmt: skip
    acts = rng.standard_normal((13, 3, 7, 4)).astype(ml_dtypes.bfloat16)
    labels, mask = rng.integers(0, 3, (13, 6)).astype(np.uint8), rng.integers(0, 2, (13, 6)).astype(bool)
    with ShardStore.create(tmp_path, metadata, progress=False) as writer:
        writer.append(acts, labels=labels, mask=mask)
    store = ShardStore.open(tmp_path / metadata.hash, engine=engine)
    every = np.ones_like(mask)
    for keep, conditions in (
        (mask, {}),
        (every, {"masked": True}),
        (mask & (labels == 1), {"where": {"labels": 1}}),
        (labels == 1, {"where": {"labels": 1}, "masked": True}),
        (mask & (labels != 0), {"ignore_labels": [0]}),
        (every & False, {"where": {"labels": 7}}),
    ):
        rows = store.sel(layer=(9, 2), tokens="content", stack_layers=True, dtype="stored", **conditions)
        same(rows[:], acts[:, [2, 0], 1:].swapaxes(1, 2)[keep])
        where = rows.coordinates()
        assert np.array_equal(np.argwhere(keep), np.stack([where.example_idx, where.token_idx], axis=1))


def test_what_is_refused_as_ever(tmp_path):
    store = ShardStore.open(plain_store(tmp_path).path)
    with pytest.raises(LayerNotFoundError):
        store.sel(layer=(2, 4), stack_layers=True)
    with pytest.raises(SelectionError):
        store.sel(layer=(2, 2), stack_layers=True)
    rows = store.sel(layer=(2, 11), stack_layers=True)
    with pytest.raises(ArgumentError):
        rows.rows(slice(None), out=np.empty((70, 8), np.float32))
    with pytest.raises(SelectionError):
        rows[0, 1]
    assert repr(rows) == "<Selection 35 rows x 2 x 8 of layers [2, 11], 5 tokens>"
