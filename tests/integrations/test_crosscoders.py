"""Batches for crosscoders and transcoders hold the vectors of the same tokens, as dense NumPy has them, and go on exactly."""

from __future__ import annotations

import itertools
import pickle
from pathlib import Path

import numpy as np
import pytest
from row_stores import row_store

torch = pytest.importorskip("torch")

from saev_store import ShardStore, pair
from saev_store.errors import ArgumentError, SelectionError
from saev_store.integrations.crosscoders import PairedActivations, layer_batches, model_batches, transcoder_batches
from saev_store.torch import StoreLoader


@pytest.fixture(scope="module")
def stores(tmp_path_factory: pytest.TempPathFactory) -> list[Path]:
    return [row_store(tmp_path_factory.mktemp("coders"), seed=seed) for seed in (0, 1)]


def one(stores: list[Path], layer: tuple[int, ...] = (11, 5)) -> StoreLoader:
    return StoreLoader(str(stores[0]), layer=layer, stack_layers=True, batch_size=32, drop_last=True)


def two(stores: list[Path], layer_b: object = 11) -> StoreLoader:
    a, b = map(ShardStore.open, stores)
    return StoreLoader(pair(a, b).sel(layer_a=11, layer_b=layer_b), batch_size=32, drop_last=True)


def dense(path: Path, position: int, rows: torch.Tensor) -> np.ndarray:
    """What a store has, by position of the layer, for the tokens that rows say they are."""
    where = rows.numpy()[:, :2].astype(int)
    return ShardStore.open(path)[:][where[:, 0], position, where[:, 1] + 1]


def test_layers_models_and_targets_are_of_the_same_tokens(stores: list[Path]):
    with layer_batches(one(stores)) as layers, model_batches(two(stores)) as models:
        for acts in itertools.islice(layers, 12):  # into the second epoch
            for place, position in enumerate((1, 0)):
                np.testing.assert_array_equal(acts[:, place].numpy(), dense(stores[0], position, acts[:, 0]))
        for acts in itertools.islice(models, 12):
            for place, path in enumerate(stores):
                np.testing.assert_array_equal(acts[:, place].numpy(), dense(path, 1, acts[:, 0]))
    with transcoder_batches(one(stores)) as layers, transcoder_batches(two(stores, layer_b=(5, 11))) as models:
        source, target = next(layers)
        np.testing.assert_array_equal(source.numpy(), dense(stores[0], 1, source))
        np.testing.assert_array_equal(target.numpy(), dense(stores[0], 0, source))
        source, target = next(models)
        np.testing.assert_array_equal(source.numpy(), dense(stores[0], 1, source))
        np.testing.assert_array_equal(target[:, 1].numpy(), dense(stores[1], 1, source))


def test_pairs_go_on_after_any_batch(stores: list[Path]):
    with model_batches(two(stores)) as batches:
        whole = [acts.clone() for acts in itertools.islice(batches, 23)]
    for n in (0, 4, 10, 13):
        with model_batches(two(stores)) as first, model_batches(two(stores)) as resumed:
            for _ in range(n):
                next(first)
            resumed.load_state_dict(first.state_dict())
            assert torch.equal(torch.cat(list(itertools.islice(resumed, 10))), torch.cat(whole[n : n + 10]))


def test_what_is_no_pair_is_refused(stores: list[Path]):
    with transcoder_batches(one(stores, (5,))) as batches, pytest.raises(ArgumentError, match="a row has 1 layers"):
        next(batches)
    with model_batches(one(stores)) as batches, pytest.raises(ArgumentError, match="no act_a"):
        next(batches)
    with model_batches(two(stores, layer_b=(5, 11))) as batches, pytest.raises(ArgumentError, match="act_b is"):
        next(batches)
    a, b = map(ShardStore.open, stores)
    with pytest.raises(ArgumentError, match="one layer of each store"):
        PairedActivations(pair(a, b).sel(layer_a=5, layer_b="all"))


def test_rows_by_number_are_those_of_both_stores(stores: list[Path]):
    a, b = map(ShardStore.open, stores)
    truth = np.stack([store[:, 1, 1:].reshape(-1, 8) for store in (a, b)], axis=1)
    rows = PairedActivations(pair(a, b).sel(layer_a=11, layer_b=11))
    assert len(rows) == len(truth)
    np.testing.assert_array_equal(rows[7].numpy(), truth[7])
    np.testing.assert_array_equal(rows[torch.tensor(-1)].numpy(), truth[-1])
    np.testing.assert_array_equal(rows[5:50:3].numpy(), truth[5:50:3])
    np.testing.assert_array_equal(rows[[7, 3]].numpy(), truth[[7, 3]])
    np.testing.assert_array_equal(rows[torch.tensor([7])].numpy(), truth[[7]])
    for wrong in (True, 3.7, "3", None):
        with pytest.raises(SelectionError):
            rows[wrong]
    batches = torch.utils.data.DataLoader(pickle.loads(pickle.dumps(rows)), batch_size=50)
    np.testing.assert_array_equal(torch.cat(list(batches)).numpy(), truth)
