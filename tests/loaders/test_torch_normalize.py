"""Normalized batches equal what dense NumPy makes of all rows, on every path to the trainer, and a continued run gets the same."""

from __future__ import annotations

import itertools
import json
import shutil
from pathlib import Path

import numpy as np
import pytest

torch = pytest.importorskip("torch")

from saev_store import ShardStore, new_metadata  # after the check that torch is there
from saev_store.errors import ArgumentError  # after the check that torch is there
from saev_store.torch import (  # after the check that torch is there
    ConfigError,
    OrderedConfig,
    OrderedDataLoader,
    OrderedPairConfig,
    OrderedPairDataLoader,
    ShuffledConfig,
    ShuffledDataLoader,
    ShuffledPairConfig,
    ShuffledPairDataLoader,
)
from saev_store.torch.normalize import Normalization  # after the check that torch is there

N, LAYERS, TOKENS, D_MODEL = 40, (9, 2, 5), 6, 8
KINDS = ("scale_norm_per_layer", "center", "center_and_scale_norm")


def acts_of(seed: int = 0) -> np.ndarray:
    """Vectors around another point, and of another length, in each layer."""
    rng = np.random.default_rng(seed)
    acts = rng.standard_normal((N, len(LAYERS), TOKENS, D_MODEL))
    centres = rng.standard_normal((len(LAYERS), D_MODEL)) * np.array([[1], [5], [30]])
    return (acts * np.array([1, 4, 0.5])[:, None, None] + centres[:, None]).astype(np.float32)


def write(root: Path, seed: int = 0, **more: object) -> Path:
    metadata = new_metadata(
        family="gpt2", ckpt="normalize", layers=LAYERS, content_tokens_per_example=TOKENS, cls_token=False, d_model=D_MODEL,
        n_examples=N, max_tokens_per_shard=7 * TOKENS * len(LAYERS), data={"seed": seed}, **more,
    )  # fmt: skip
    with ShardStore.create(root, metadata, progress=False) as writer:
        writer.append(acts_of(seed))
    return root / metadata.hash


@pytest.fixture(scope="module")
def store(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write(tmp_path_factory.mktemp("normalize"))


def normalized(acts: np.ndarray, kind: str) -> np.ndarray:
    """All vectors (example, layer, token, d_model), by dense NumPy; there are fewer of a layer than a sample takes."""
    acts = acts.astype(np.float64)
    if kind.startswith("center"):
        acts = acts - acts.mean(axis=(0, 2), keepdims=True)
    if kind.endswith("scale_norm_per_layer") or kind == "center_and_scale_norm":
        acts = acts * np.sqrt(D_MODEL) / np.linalg.norm(acts, axis=3).mean(axis=(0, 2))[:, None, None]
    return acts


def make(kind: str, store: Path, **more: object) -> OrderedDataLoader | ShuffledDataLoader:
    given = {"shards": store, "batch_size": 16, **more}
    if kind == "ordered":
        return OrderedDataLoader(OrderedConfig(**given))
    return ShuffledDataLoader(ShuffledConfig(**{"window_bytes": 5000, **given}))


def check(loader: object, truth: np.ndarray, layers: list[int], *, stacked: bool = False, rtol: float = 1e-5) -> None:
    """Compare all batches of two epochs with the truth (example, layer, token, d_model)."""
    n = 0
    for batch in itertools.chain(loader, loader):
        example, token = batch["example_idx"].numpy(), batch["token_idx"].numpy()
        if stacked:
            wanted = truth[example[:, None], layers, token[:, None]]
        else:
            layer = [LAYERS.index(label) for label in batch["layer"]] if "layer" in batch else layers[0]
            wanted = truth[example, layer, token]
        np.testing.assert_allclose(batch["act"].double().numpy(), wanted, rtol=rtol, atol=rtol * 30)
        n += len(batch["act"])
    assert n == 2 * loader.n_samples


@pytest.mark.parametrize("normalize", KINDS)
@pytest.mark.parametrize("kind", ["ordered", "shuffled"])
def test_batches_equal_dense_numpy(store: Path, kind: str, normalize: str):
    truth = normalized(acts_of(), normalize)
    for layers, stacked in (([1], False), ([2, 0], False), ([2, 0, 1], True)):
        labels = tuple(LAYERS[i] for i in layers)
        with make(kind, store, layer=labels, stack_layers=stacked, normalize=normalize) as loader:
            check(loader, truth, layers, stacked=stacked)


@pytest.mark.parametrize("dtype", ["bfloat16", "float16", "float64"])
def test_other_dtypes_are_computed_in_at_least_float32(store: Path, dtype: str):
    truth = normalized(acts_of(), "center_and_scale_norm")
    with make("shuffled", store, layer=(9, 5), dtype=dtype, normalize="center_and_scale_norm") as loader:
        assert next(iter(loader))["act"].dtype == getattr(torch, dtype)
        check(loader, truth, [0, 2], rtol={"bfloat16": 2**-8, "float16": 2**-10, "float64": 1e-6}[dtype])


@pytest.mark.parametrize("normalize", KINDS)
@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
@pytest.mark.parametrize("kind", ["ordered", "shuffled"])
def test_vectors_are_rounded_once_after_they_are_normalized(store: Path, kind: str, dtype: str, normalize: str):
    """Around a point at 30 times the spread, what was rounded first would be off by an eighth of the spread."""
    with (
        make(kind, store, layer=(9, 5), normalize=normalize) as wide,
        make(kind, store, layer=(9, 5), dtype=dtype, normalize=normalize) as narrow,
    ):
        for whole, rounded in zip(wide, narrow, strict=True):
            assert torch.equal(rounded["act"], whole["act"].to(getattr(torch, dtype)))
            assert torch.equal(rounded["token_idx"], whole["token_idx"])


def test_on_a_device_with_a_window_there(store: Path):
    truth = normalized(acts_of(), "center")
    some = {"device": "cpu", "window_device": "cpu", "normalize": "center"}
    with make("shuffled", store, layer=(2, 5), **some) as loader:
        check(loader, truth, [1, 2])


@pytest.mark.parametrize("stacked", [False, True])
@pytest.mark.parametrize("normalize", KINDS)
def test_of_several_layers_with_tokens_left_out(tmp_path: Path, normalize: str, stacked: bool):
    acts, labels = acts_of(), np.random.default_rng(1).integers(0, 4, (N, TOKENS)).astype(np.uint8)
    metadata = new_metadata(
        family="gpt2", ckpt="labels", layers=LAYERS, content_tokens_per_example=TOKENS, cls_token=False, d_model=D_MODEL,
        n_examples=N,
    )  # fmt: skip
    with ShardStore.create(tmp_path, metadata, progress=False) as writer:
        writer.append(acts, labels=labels)
    kept = labels != 2
    some = {"layer": (2, 9), "ignore_labels": (2,), "normalize": normalize, "stack_layers": stacked}
    with make("ordered", tmp_path / metadata.hash, **some) as loader:
        for at, layer in enumerate((1, 0)):
            left = acts[:, layer][kept].astype(np.float64)
            mean = left.mean(axis=0) if normalize.startswith("center") else np.zeros(D_MODEL)
            scale = 1 if normalize == "center" else np.sqrt(D_MODEL) / np.linalg.norm(left - mean, axis=1).mean()
            np.testing.assert_allclose(loader.normalization.mean[at].numpy(), mean, rtol=1e-5, atol=1e-5)
            np.testing.assert_allclose(loader.normalization.scale[at].numpy(), scale, rtol=1e-5)
        assert loader.n_samples == kept.sum() * (1 if stacked else 2)


def test_rows_that_are_repeated_for_ranks_are_normalized_once(store: Path):
    truth = normalized(acts_of(), "center_and_scale_norm")
    some = {"examples": range(37), "layer": 2, "normalize": "center_and_scale_norm", "n_partitions": 4, "batch_size": 6}
    part = normalized(acts_of()[:37], "center_and_scale_norm")
    assert not np.allclose(part[0], truth[0], rtol=1e-4)
    for rank in range(2):
        with make("shuffled", store, rank=rank, world=2, **some) as loader:
            for batch in loader:
                example, token = batch["example_idx"].numpy(), batch["token_idx"].numpy()
                np.testing.assert_allclose(batch["act"].numpy(), part[example, 1, token], rtol=1e-5, atol=3e-4)


def test_hook_points_of_one_layer_have_each_its_own(tmp_path: Path):
    metadata = new_metadata(
        family="gpt2", ckpt="hooks", layers=(5, 5, 7), hook_points=["mlp_out", "attn_out", "mlp_out"],
        content_tokens_per_example=TOKENS, cls_token=False, d_model=D_MODEL, n_examples=N,
    )  # fmt: skip
    with ShardStore.create(tmp_path, metadata, progress=False) as writer:
        writer.append(acts_of())
    truth = normalized(acts_of(), "center")
    with make(
        "shuffled", tmp_path / metadata.hash, layer=((7, "mlp_out"), (5, "attn_out")), normalize="center"
    ) as loader:
        for batch in loader:
            example, token = batch["example_idx"].numpy(), batch["token_idx"].numpy()
            layer = np.array([2, 1])[batch["layer_key_idx"].numpy()]
            np.testing.assert_allclose(batch["act"].numpy(), truth[example, layer, token], rtol=1e-5, atol=3e-4)


def test_both_stores_of_a_pair(tmp_path: Path):
    a, b = (write(tmp_path / str(seed), seed) for seed in (0, 1))
    truth = [normalized(acts_of(seed), "center_and_scale_norm") for seed in (0, 1)]
    some = {
        "shards_a": a,
        "shards_b": b,
        "layer_a": 9,
        "layer_b": (5, 2),
        "batch_size": 16,
        "normalize": "center_and_scale_norm",
    }
    for loader in (
        OrderedPairDataLoader(OrderedPairConfig(**some)),
        ShuffledPairDataLoader(ShuffledPairConfig(**some)),
    ):
        with loader:
            for batch in loader:
                example, token = batch["example_idx"].numpy(), batch["token_idx"].numpy()
                np.testing.assert_allclose(batch["act_a"].numpy(), truth[0][example, 0, token], rtol=1e-5, atol=3e-4)
                wanted = truth[1][example[:, None], [2, 1], token[:, None]]
                np.testing.assert_allclose(batch["act_b"].numpy(), wanted, rtol=1e-5, atol=3e-4)
        assert [found.layer_keys for found in loader.normalization] == [(9,), (5, 2)]
    with (
        OrderedPairDataLoader(OrderedPairConfig(**some)) as wide,
        OrderedPairDataLoader(OrderedPairConfig(**some, dtype="bfloat16")) as narrow,
    ):
        for whole, rounded in zip(wide, narrow, strict=True):
            for name in ("act_a", "act_b"):
                assert torch.equal(rounded[name], whole[name].bfloat16())


def test_it_is_of_the_rows_that_are_loaded(store: Path):
    """Tokens that are left out say nothing about the mean."""
    some = {"layer": 5, "examples": (3, 8, 9), "remove_bos": True, "normalize": "center"}
    with make("ordered", store, **some) as loader:
        mean = acts_of()[[3, 8, 9], 2, 1:].astype(np.float64).mean(axis=(0, 1))
        np.testing.assert_allclose(loader.normalization.mean.numpy(), mean[None], rtol=1e-6)
        assert loader.normalization.scale.tolist() == [1.0]


def test_it_can_be_undone(store: Path):
    with make("ordered", store, layer=2, normalize="center_and_scale_norm") as loader:
        batch = next(iter(loader))
        acts = batch["act"] / loader.normalization.scale + loader.normalization.mean
        np.testing.assert_allclose(acts.numpy(), acts_of()[0:3, 1].reshape(-1, D_MODEL)[:16], rtol=1e-5, atol=1e-4)


def test_a_sample_stands_for_many_rows(tmp_path: Path):
    """Of 12,000 rows some thousands are read; the mean norm is right to a hundredth."""
    rng = np.random.default_rng(3)
    acts = rng.standard_normal((2000, 1, 6, 8), dtype=np.float32) + 3
    metadata = new_metadata(
        family="gpt2",
        ckpt="many",
        layers=(1,),
        content_tokens_per_example=6,
        cls_token=False,
        d_model=8,
        n_examples=2000,
    )
    with ShardStore.create(tmp_path, metadata, progress=False) as writer:
        writer.append(acts)
    with make("ordered", tmp_path / metadata.hash, layer=1, normalize="center_and_scale_norm") as loader:
        rows = torch.cat([batch["act"].clone() for batch in loader]).double()
        again = make("shuffled", tmp_path / metadata.hash, layer=1, normalize="center_and_scale_norm").normalization
    assert rows.mean(0).abs().max() < 0.04
    assert abs(float(rows.norm(dim=1).mean()) / np.sqrt(8) - 1) < 0.01
    assert torch.equal(again.mean, loader.normalization.mean)  # the same in every loader


@pytest.mark.parametrize("normalize", KINDS)
def test_a_continued_run_gets_the_same_and_other_loaders_refuse_its_state(store: Path, normalize: str):
    def batches(loader: object) -> list:
        return [batch["act"].tolist() for batch in loader]

    some = {"layer": (9, 2), "stack_layers": True, "normalize": normalize}
    with make("shuffled", store, **some) as loader:
        whole = batches(loader)
        loader.set_epoch(0)
        for _ in itertools.islice(loader, 4):
            pass
        state = json.loads(json.dumps(loader.state_dict()))
    with make("shuffled", store, **some) as loader:
        loader.load_state_dict(state)
        assert batches(loader) == whole[4:]
    for other in (None, *KINDS):
        if other != normalize:
            with pytest.raises(ArgumentError, match="normalize"):
                make("shuffled", store, **{**some, "normalize": other}).load_state_dict(state)


def test_scale_norm_is_the_loaders_own(store: Path):
    """A state of the one goes on with the other."""
    one, other = (
        make("shuffled", store, layer=2, scale_norm=True),
        make("shuffled", store, layer=2, normalize="scale_norm"),
    )
    assert one.scale == other.scale and other.normalization is None
    other.load_state_dict(one.state_dict())
    with pytest.raises(ConfigError, match="normalize"):
        make("shuffled", store, layer=2, scale_norm=True, normalize="center")


def test_a_number_for_scale_norm_is_that_number(store: Path):
    for kind in ("ordered", "shuffled"):
        with make(kind, store, layer=2, scale_norm=2.0) as loader:
            assert loader.scale == 2.0
            batch = next(iter(loader))
            wanted = 2 * acts_of()[batch["example_idx"], 1, batch["token_idx"]]
            assert torch.equal(batch["act"], torch.from_numpy(wanted))


def test_a_layer_without_a_mean_norm_is_refused(tmp_path: Path, store: Path):
    metadata = new_metadata(
        family="gpt2", ckpt="zeros", layers=(1,), content_tokens_per_example=6, cls_token=False, d_model=8, n_examples=3
    )
    with ShardStore.create(tmp_path, metadata, progress=False) as writer:
        writer.append(np.ones((3, 1, 6, 8), np.float32))
    with pytest.raises(ArgumentError, match="layer 1"):
        next(iter(make("ordered", tmp_path / metadata.hash, layer=1, normalize="center_and_scale_norm")))
    for left_out in ({}, {"examples": [0, 2]}):  # by the statistics of the store, and by a sample of the rest
        for acts in (np.zeros((3, 1, 6, 8)), np.full((3, 1, 6, 8), np.nan)):
            with ShardStore.create(tmp_path / "zeros", metadata, on_nonfinite="allow", progress=False) as writer:
                writer.append(acts.astype(np.float32))
            with pytest.raises(ArgumentError, match="layer 1 are all zero, or none of them is finite") as refused:
                make("ordered", tmp_path / "zeros" / metadata.hash, layer=1, max_norm_multiple=2.0, **left_out)
            assert refused.value.where == "max_norm_multiple"
            shutil.rmtree(tmp_path / "zeros")
    acts = np.random.default_rng(0).standard_normal((3, 1, 6, 8)).astype(np.float32)
    acts[1, 0, 2, 5], acts[2, 0, 1, 5] = np.inf, -np.inf
    metadata = metadata.replace(ckpt="infinite")
    with ShardStore.create(tmp_path, metadata, on_nonfinite="allow", progress=False) as writer:
        writer.append(acts)
    for kind in ("scale_norm_per_layer", "center", "center_and_scale_norm"):
        with pytest.raises(ArgumentError, match="18 sampled rows of layer 1 .* not finite") as refused:
            _ = make("ordered", tmp_path / metadata.hash, layer=1, normalize=kind).normalization
        assert "max_norm_multiple" in str(refused.value)
        left = make("ordered", tmp_path / metadata.hash, layer=1, normalize=kind, max_norm_multiple=1e6).normalization
        assert torch.isfinite(left.mean).all()
        assert (left.scale > 0).all()
    with pytest.raises(ArgumentError, match="0 sampled rows"):
        _ = make("ordered", store, layer=2, examples=(), normalize="center").normalization
    with pytest.raises(ConfigError, match="normalize"):
        OrderedConfig(shards=store, normalize="layer_norm")


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.float16, torch.bfloat16])
@pytest.mark.parametrize("kind", ["one layer", "rows of two", "stacked"])
def test_numbers_are_computed_in_their_own_precision_or_in_float32(dtype: torch.dtype, kind: str) -> None:
    rng = np.random.default_rng(0)
    mean, scale = torch.tensor([[1 / 3, -2.0], [5.0, 1e-3]]), torch.tensor([1 / 7, 3.0])
    shape = (5, 2, 2) if kind == "stacked" else (5, 2)
    act = torch.as_tensor(rng.standard_normal(shape)).to(dtype)
    layer_idx = torch.tensor([0, 1, 1, 0, 1]) if kind == "rows of two" else None
    wide = torch.float64 if dtype == torch.float64 else torch.float32
    means, scales = mean.to(wide).numpy(), scale.to(wide).numpy()
    rows = act.to(wide).numpy()
    if kind == "stacked":
        truth = (rows - means) * scales[:, None]
    elif kind == "one layer":
        truth = (rows - means[0]) * scales[0]
    else:
        truth = (rows - means[layer_idx.numpy()]) * scales[layer_idx.numpy()][:, None]
    Normalization(((2, "a"), (5, "b")), mean, scale).apply_(act, layer_idx)
    assert act.dtype == dtype
    assert torch.equal(act, torch.from_numpy(truth).to(dtype))
