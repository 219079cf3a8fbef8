"""Batches for cross-layer transcoders: sources and targets of every layer, of the same tokens, in the loader's order, continued exactly."""

from __future__ import annotations

import itertools
import json
from pathlib import Path

import numpy as np
import pytest

torch = pytest.importorskip("torch")

from saev_store import ShardStore, new_metadata  # after the check that torch is there
from saev_store.errors import ArgumentError  # after the check that torch is there
from saev_store.integrations.crosslayer_coding import CrosslayerActivations  # after the check that torch is there
from saev_store.torch import StoreLoader

N, TOKENS, D_MODEL, BATCH = 30, 4, 8, 16
LAYERS, POINTS = (0, 0, 1, 1, 2, 2), ("mlp_out", "mlp_in") * 3
KEYS = tuple(zip(LAYERS, POINTS, strict=True))


def acts_of() -> np.ndarray:
    return np.random.default_rng(0).standard_normal((N, len(LAYERS), TOKENS, D_MODEL), dtype=np.float32)


@pytest.fixture(scope="module")
def store(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("crosslayer")
    metadata = new_metadata(
        family="gpt2", ckpt="crosslayer", layers=LAYERS, hook_points=POINTS, content_tokens_per_example=TOKENS, cls_token=False,
        d_model=D_MODEL, n_examples=N, max_tokens_per_shard=7 * TOKENS * len(LAYERS),
    )  # fmt: skip
    with ShardStore.create(root, metadata, progress=False) as writer:
        writer.append(acts_of())
    return root / metadata.hash


def make(store: Path, layer: object = (*KEYS[1::2], *KEYS[::2]), **more: object) -> StoreLoader:
    given = {"stack_layers": True, "batch_size": BATCH, "window_bytes": 20_000, "drop_last": True, **more}
    return StoreLoader(store, layer=layer, **given)


def test_sources_and_targets_are_those_of_the_same_tokens(store: Path):
    acts, plain = acts_of(), make(store)
    with CrosslayerActivations(make(store), source="mlp_in", target="mlp_out") as found:
        assert (found.layer_indices, found.d_model, found.dtype) == ([0, 1, 2], D_MODEL, torch.float32)
        assert (found.device, found.train_batch_size_tokens, found.total_tokens) == (
            torch.device("cpu"),
            BATCH,
            7 * BATCH,
        )
        assert len(found) == N * TOKENS // BATCH == 7
        for batch in itertools.chain(plain, plain):  # the second epoch has another order
            example, token = batch["example_idx"].numpy(), batch["token_idx"].numpy()
            sources, targets = found.get_batch()
            assert list(sources) == list(targets) == [0, 1, 2]
            for layer in (0, 1, 2):
                assert np.array_equal(sources[layer].numpy(), acts[example, 2 * layer + 1, token])
                assert np.array_equal(targets[layer].numpy(), acts[example, 2 * layer, token])


def test_a_state_goes_on(store: Path):
    with CrosslayerActivations(make(store), source="mlp_in", target="mlp_out") as found:
        for _ in range(9):
            next(found)
        state = json.loads(json.dumps(found.state_dict()))
        wanted = [next(found)[0][2].tolist() for _ in range(8)]
    with CrosslayerActivations(make(store), source="mlp_in", target="mlp_out") as found:
        found.load_state_dict(state)
        assert [next(found)[0][2].tolist() for _ in range(8)] == wanted


def test_dtype_and_device_are_those_of_the_batches(store: Path):
    loader = make(store, dtype="bfloat16", device="cpu:0")
    with CrosslayerActivations(loader, source="mlp_in", target="mlp_out") as found:
        assert found.dtype == found.get_batch()[1][0].dtype == torch.bfloat16
        assert found.device == torch.device("cpu", 0)


@pytest.mark.parametrize("layer", [KEYS[1::2], KEYS[:3], ((0, "mlp_in"), (1, "mlp_out"))])
def test_layers_without_source_or_target_are_refused(store: Path, layer: object):
    with pytest.raises(ArgumentError, match="of each layer"):
        CrosslayerActivations(make(store, layer), source="mlp_in", target="mlp_out")


def test_other_loaders_are_refused(store: Path):
    with pytest.raises(ArgumentError, match="of each layer"):
        CrosslayerActivations(make(store), source="mlp_in", target="mlp_in")
    with pytest.raises(ArgumentError, match="of each layer"):
        CrosslayerActivations(make(store), source="resid_mid", target="mlp_out")
    with pytest.raises(ArgumentError, match="one row"):
        CrosslayerActivations(make(store, stack_layers=False), source="mlp_in", target="mlp_out")
