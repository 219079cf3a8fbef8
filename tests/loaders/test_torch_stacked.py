"""Rows of several layers as tensors: every loader and the random access equal the tensor of the store, and one another."""

from __future__ import annotations

import itertools
import json

import ml_dtypes
import numpy as np
import pytest
from plain_stores import Plain, plain_store

torch = pytest.importorskip("torch")

from saev_store import ShardStore, new_metadata, pair  # after the check that torch is there
from saev_store.errors import ArgumentError  # after the check that torch is there
from saev_store.loaders import Medium, ShuffledPairLoader  # after the check that torch is there
from saev_store.torch import (  # after the check that torch is there
    IndexedConfig,
    IndexedDataset,
    OrderedConfig,
    OrderedDataLoader,
    ShuffledConfig,
    ShuffledDataLoader,
    tensors,
)

LAYERS = (11, 2)


@pytest.fixture(scope="module")
def plain(tmp_path_factory) -> Plain:
    return plain_store(tmp_path_factory.mktemp("stacked"), n=43, tokens=7, per_shard=9, labels=True, d_model=16)


def loader_of(plain: Plain, kind: str, **options):
    options = {"shards": plain.path, "layer": LAYERS, "stack_layers": True, "batch_size": 32, **options}
    if kind == "ordered":
        return OrderedDataLoader(OrderedConfig(**options))
    return ShuffledDataLoader(ShuffledConfig(window_bytes=9000, **options))


def check(plain: Plain, batch) -> None:
    example, token = batch["example_idx"].numpy(), batch["token_idx"].numpy()
    truth = plain.acts[example[:, None], [2, 0], token[:, None] + 1]
    assert batch["act"].dtype == torch.float32
    assert torch.equal(batch["act"], torch.from_numpy(truth))
    assert "layer" not in batch
    known = np.where(token < 0, 255, plain.labels[example, np.maximum(token, 0)])
    assert np.array_equal(batch["token_labels"].numpy(), known)


@pytest.mark.parametrize("kind", ["ordered", "shuffled"])
@pytest.mark.parametrize(
    ("layer", "stack_layers", "keys"),
    [(LAYERS, True, LAYERS), ("all", True, (2, 5, 11)), ("all", False, (2, 5, 11)), (5, False, (5,))],
)
def test_d_model_is_that_of_a_vector_however_many_a_row_has(plain, kind, layer, stack_layers, keys):
    with loader_of(plain, kind, layer=layer, stack_layers=stack_layers) as loader:
        assert (loader.d_model, loader.layer_keys) == (16, keys)


@pytest.mark.parametrize("tokens", ["content", "all"])
@pytest.mark.parametrize("kind", ["ordered", "shuffled"])
def test_batches_equal_the_tensor(plain, kind, tokens):
    with loader_of(plain, kind, tokens=tokens) as loader:
        seen = []
        for batch in loader:
            check(plain, batch)
            seen += zip(batch["example_idx"].tolist(), batch["token_idx"].tolist(), strict=True)
    first = 0 if tokens == "content" else -1
    assert sorted(seen) == list(itertools.product(range(43), range(first, 7)))
    assert len(seen) == loader.n_samples


@pytest.mark.parametrize("options", [{}, {"ignore_labels": range(100)}, {"scale_norm": True}])
def test_a_window_on_a_device_gives_the_same_batches(plain, options):
    host = list(loader_of(plain, "shuffled", **options))
    there = list(loader_of(plain, "shuffled", window_device="cpu", **options))
    assert len(host) == len(there) > 0
    for one, other in zip(host, there, strict=True):
        assert one.keys() == other.keys()
        assert all(torch.equal(one[name], other[name]) for name in one)


@pytest.mark.parametrize("kind", ["ordered", "shuffled"])
def test_resuming(plain, kind):
    whole = list(loader_of(plain, kind))
    for stop_at in range(0, len(whole), 3):
        loader = loader_of(plain, kind)
        list(itertools.islice(loader, stop_at))
        state = json.loads(json.dumps(loader.state_dict()))
        again = loader_of(plain, kind)
        again.load_state_dict(state)
        rest = list(again)
        assert len(rest) == len(whole) - stop_at
        assert all(torch.equal(a["act"], b["act"]) for a, b in zip(rest, whole[stop_at:], strict=True))
        with pytest.raises(ArgumentError, match="saved with rows"):
            loader_of(plain, kind, stack_layers=False, layer=LAYERS[0]).load_state_dict(state)


@pytest.mark.parametrize("kind", ["ordered", "shuffled"])
def test_a_local_copy_continues_a_state(plain, kind, tmp_path, monkeypatch):
    monkeypatch.setenv("TMPDIR", str(tmp_path))
    loader = loader_of(plain, kind)
    whole = list(loader)
    state = {**loader.state_dict(), "epoch": 0, "batch": 4}
    copied = loader_of(plain, kind, use_tmpdir=True)
    assert str(tmp_path) in copied.store.url
    copied.load_state_dict(state)
    assert all(torch.equal(a["act"], b["act"]) for a, b in zip(copied, whole[4:], strict=True))


def test_indexed_rows(plain):
    dataset = IndexedDataset(IndexedConfig(shards=plain.path, layer=LAYERS, tokens="all", stack_layers=True))
    assert len(dataset) == 43 * 8
    truth = plain.acts[:, [2, 0]].swapaxes(1, 2).reshape(-1, 2, 16)
    for i in (0, 7, 8, 200, len(dataset) - 1):
        example = dataset[i]
        assert torch.equal(example["act"], torch.from_numpy(truth[i]))
        assert (example["example_idx"], example["token_idx"] + 1) == divmod(i, 8)
        assert "layer" not in example
    batch = dataset.batch([5, 5, 300])
    assert torch.equal(batch["act"], torch.from_numpy(truth[[5, 5, 300]]))
    check(plain, batch)
    loader = torch.utils.data.DataLoader(dataset, batch_size=50, shuffle=True, collate_fn=IndexedDataset.collate)
    seen = []
    for batch in loader:
        check(plain, batch)
        seen += zip(batch["example_idx"].tolist(), batch["token_idx"].tolist(), strict=True)
    assert sorted(seen) == list(itertools.product(range(43), range(-1, 7)))


@pytest.mark.parametrize("kind", ["flash", "cached"])
def test_large_indexed_batches(plain, kind, monkeypatch):
    """Gathered by several threads, or read vector by vector from a disk."""
    pretended = Medium(kind, "pretended", str(plain.path))
    monkeypatch.setattr(IndexedDataset, "_look_at_medium", lambda self: vars(self).update(_medium=pretended, _n_threads=4))  # fmt: skip
    dataset = IndexedDataset(IndexedConfig(shards=plain.path, layer=LAYERS, stack_layers=True))
    truth = plain.acts[:, [2, 0], 1:].swapaxes(1, 2).reshape(-1, 2, 16)
    rng = np.random.default_rng(0)
    held = []
    for _ in range(6):
        picked = rng.integers(0, len(dataset), 3000)
        held.append((dataset.batch(picked)["act"], truth[picked]))
    assert all(torch.equal(act, torch.from_numpy(rows)) for act, rows in held)
    dataset.close()


def test_stored_bits(tmp_path):
    metadata = new_metadata(
        family="gpt2", ckpt="random", layers=(2, 5, 9), content_tokens_per_example=6, cls_token=False, d_model=4,
        n_examples=13, max_tokens_per_shard=90, dtype="bfloat16",
    )  # fmt: skip
    acts = np.random.default_rng(1).integers(0, 2**16, (13, 3, 6, 4), dtype=np.uint16)
    with ShardStore.create(tmp_path, metadata, on_nonfinite="allow", progress=False) as writer:
        writer.append(acts.view(ml_dtypes.bfloat16))
    options = {"shards": tmp_path / metadata.hash, "layer": (9, 5), "stack_layers": True, "dtype": "stored"}
    dataset = IndexedDataset(IndexedConfig(**options))
    for batch in (
        *OrderedDataLoader(OrderedConfig(**options, batch_size=16)),
        *ShuffledDataLoader(ShuffledConfig(**options, batch_size=16)),
        *ShuffledDataLoader(ShuffledConfig(**options, batch_size=16, window_device="cpu")),
        dataset.batch([3, 1, 70]),
    ):
        truth = acts[batch["example_idx"].numpy()[:, None], [2, 1], batch["token_idx"].numpy()[:, None]]
        assert batch["act"].dtype == torch.bfloat16
        assert np.array_equal(batch["act"].view(torch.int16).numpy().view(np.uint16), truth)


def test_batches_of_two_stores_as_tensors(plain, tmp_path):
    metadata = new_metadata(
        family="gpt2", ckpt="random", layers=(3,), content_tokens_per_example=7, cls_token=False, d_model=4,
        n_examples=43, max_tokens_per_shard=90, dtype="bfloat16",
    )  # fmt: skip
    acts = np.random.default_rng(1).standard_normal((43, 1, 7, 4)).astype(ml_dtypes.bfloat16)
    with ShardStore.create(tmp_path, metadata, progress=False) as writer:
        writer.append(acts)
    stores = ShardStore.open(plain.path), ShardStore.open(tmp_path / metadata.hash)
    rows = pair(*stores).sel(layer_a=LAYERS, layer_b=3, dtype="stored")
    held = []
    for batch in map(tensors, ShuffledPairLoader(rows, batch_size=32, labels=stores[0].labels)):
        example, token = batch["example_idx"].numpy(), batch["token_idx"].numpy()
        assert batch["act_b"].dtype == torch.bfloat16
        truth = acts[example, 0, token].view(np.int16)
        held.append((batch["act_b"].view(torch.int16), torch.from_numpy(truth)))
        assert torch.equal(batch["act_a"], torch.from_numpy(plain.acts[example[:, None], [2, 0], token[:, None] + 1]))
        assert batch["token_labels"].dtype == torch.int64
    assert all(torch.equal(one, truth) for one, truth in held)


@pytest.mark.parametrize("stack_layers", [True, False])
@pytest.mark.parametrize("use_tmpdir", [True, False])
def test_hook_points_are_chosen_by_pairs(tmp_path, monkeypatch, stack_layers, use_tmpdir):
    monkeypatch.setenv("TMPDIR", str(tmp_path / "scratch"))
    metadata = new_metadata(
        family="gpt2", ckpt="random", layers=(5, 5, 6), hook_points=["mlp_in", "mlp_out", "mlp_in"],
        content_tokens_per_example=6, cls_token=False, d_model=4, n_examples=13, max_tokens_per_shard=90,
    )  # fmt: skip
    acts = np.random.default_rng(1).standard_normal((13, 3, 6, 4), dtype=np.float32)
    with ShardStore.create(tmp_path, metadata, progress=False) as writer:
        writer.append(acts)
    for layer, at in (
        ((5, "mlp_out"), [1]),
        (((6, "mlp_in"), (5, "mlp_out")), [2, 1]),
        (((5, "mlp_in"),), [0]),
        (6, [2]),
    ):
        options = {"shards": tmp_path / metadata.hash, "layer": layer, "stack_layers": stack_layers}
        indexed = IndexedDataset(IndexedConfig(**options))
        loaders = [
            OrderedDataLoader(OrderedConfig(**options, batch_size=16, use_tmpdir=use_tmpdir)),
            ShuffledDataLoader(ShuffledConfig(**options, batch_size=16, use_tmpdir=use_tmpdir)),
        ]
        n_rows = 78 if stack_layers else 78 * len(at)
        assert [len(indexed), *(loader.n_samples for loader in loaders)] == [n_rows] * 3
        truth = acts[:, at].swapaxes(1, 2) if stack_layers else acts[:, at]
        everything = torch.from_numpy(truth.reshape(n_rows, *([len(at)] if stack_layers else []), 4))
        assert torch.equal(indexed.batch(range(n_rows))["act"], everything)
        assert torch.equal(torch.cat([batch["act"] for batch in loaders[0]]), everything)
        rows = {row.numpy().tobytes() for batch in loaders[1] for row in batch["act"]}
        assert rows == {row.numpy().tobytes() for row in everything}
