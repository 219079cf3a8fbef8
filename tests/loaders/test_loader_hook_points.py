"""Rows of several hook points of one layer: what a batch says about a row tells which vector of the store it is."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from saev_store import ShardStore, new_metadata
from saev_store.loaders import OrderedLoader, ShuffledLoader

LAYERS = [(5, "resid_pre"), (5, "resid_post"), (9, "resid_pre"), (5, "attn_out")]
#: What is chosen, and which entries of the layer axis that are.
CHOICES = {
    "all": ("all", [0, 1, 2, 3]),
    "some": (((5, "attn_out"), 9, (5, "resid_pre")), [3, 2, 0]),
    "one label": (((5, "resid_post"), (5, "resid_pre")), [1, 0]),
}
OPTIONS = {"batch_size": 16}


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, np.ndarray]:
    root = tmp_path_factory.mktemp("hooked")
    metadata = new_metadata(
        family="gpt2", ckpt="x", layers=[label for label, _ in LAYERS], hook_points=[point for _, point in LAYERS],
        content_tokens_per_example=3, cls_token=True, d_model=4, n_examples=13, max_tokens_per_shard=64,
        token_arrays={"layer_key_idx": "int32"},
    )  # fmt: skip
    acts = np.random.default_rng(0).standard_normal((13, 4, 4, 4), dtype=np.float32)
    with ShardStore.create(root, metadata, progress=False) as writer:
        writer.append(acts, layer_key_idx=np.zeros((13, 3), np.int32))
    return root / metadata.hash, acts


def check(batches: list, layer_keys: tuple, positions: list[int], acts: np.ndarray) -> None:
    """Every row is the vector that its columns name, and every vector comes once."""
    assert layer_keys == tuple(LAYERS[position] for position in positions)
    seen = set()
    for batch in batches:
        assert str(batch["layer_key_idx"].dtype).endswith("int64")
        numbers = [batch[key].tolist() for key in ("example_idx", "layer", "layer_key_idx", "token_idx")]
        for act, example, label, number, token in zip(batch["act"], *numbers, strict=True):
            pair = layer_keys[number]
            assert pair[0] == label
            assert np.array_equal(np.asarray(act), acts[example, LAYERS.index(pair), token + 1])
            seen.add((example, pair, token))
    assert len(seen) == 13 * len(positions) * 4


@pytest.mark.parametrize("choice", CHOICES)
@pytest.mark.parametrize("kind", [OrderedLoader, ShuffledLoader])
def test_rows_of_several_hook_points_can_be_told_apart(made, kind, choice):
    path, acts = made
    layer, positions = CHOICES[choice]
    rows = ShardStore.open(path).sel(layer=layer)
    with kind(rows, **OPTIONS) as loader:
        check(list(loader), loader.layer_keys, positions, acts)
    assert rows.layer_keys == tuple(LAYERS[position] for position in positions)


@pytest.mark.parametrize("use_tmpdir", [False, True])
@pytest.mark.parametrize("choice", CHOICES)
def test_tensors_too_and_a_copy_of_the_layers_gives_the_same_numbers(made, choice, use_tmpdir, tmp_path, monkeypatch):
    pytest.importorskip("torch")
    from saev_store import torch as ours

    path, acts = made
    monkeypatch.setenv("TMPDIR", str(tmp_path))
    layer, positions = CHOICES[choice]
    options = {"shards": path, "layer": layer, "tokens": "all"}
    for cls, config in (
        (ours.OrderedDataLoader, ours.OrderedConfig),
        (ours.ShuffledDataLoader, ours.ShuffledConfig),
    ):
        with cls(config(**options, **OPTIONS, use_tmpdir=use_tmpdir)) as loader:
            check(list(loader), loader.layer_keys, positions, acts)
    indexed = ours.IndexedDataset(ours.IndexedConfig(**options))
    check([indexed.batch(np.arange(len(indexed)))], indexed.layer_keys, positions, acts)
    example = indexed[len(indexed) - 1]
    assert (example["layer"], example["layer_key_idx"]) == (LAYERS[positions[-1]][0], len(positions) - 1)
    assert {type(value) for name, value in example.items() if name != "act"} == {int}
    indexed.close()


@pytest.mark.parametrize("options", [{"layer": (5, "attn_out")}, {"layer": "all", "stack_layers": True}])
def test_rows_of_one_pair_and_stacked_rows_have_no_such_column(made, options):
    with OrderedLoader(ShardStore.open(made[0]).sel(tokens="content", **options), **OPTIONS) as loader:
        assert next(iter(loader)).keys() == {"act", "example_idx", "token_idx"}


def test_a_token_array_of_that_name_has_another_key(made):
    with OrderedLoader(ShardStore.open(made[0]).sel(), **OPTIONS, token_arrays=["layer_key_idx"]) as loader:
        batch = next(iter(loader))
    assert batch["tokens_layer_key_idx"].dtype == np.int32
    assert batch["layer_key_idx"].dtype == np.int64


def test_stores_without_hook_points_have_labels_only(tmp_path):
    metadata = new_metadata(
        family="gpt2", ckpt="x", layers=[5, 9], content_tokens_per_example=3, cls_token=False, d_model=4, n_examples=2,
        max_tokens_per_shard=64, dtype="bfloat16",
    )  # fmt: skip
    with ShardStore.create(tmp_path, metadata, progress=False) as writer:
        writer.append(np.zeros((2, 2, 3, 4), np.float32))
    with OrderedLoader(ShardStore.open(tmp_path / metadata.hash).sel(), **OPTIONS) as loader:
        assert next(iter(loader)).keys() == {"act", "example_idx", "token_idx", "layer"}
        assert loader.layer_keys == (5, 9)
