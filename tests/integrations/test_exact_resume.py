"""Every provider goes on exactly from a state: in the middle of an epoch, at its ends, in the next ones; wrong states are refused."""

from __future__ import annotations

import itertools
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from row_stores import row_store

torch = pytest.importorskip("torch")

from saev_store import ShardStore, pair
from saev_store.errors import ArgumentError
from saev_store.integrations.crosscoders import layer_batches, model_batches, transcoder_batches
from saev_store.integrations.dictionary_learning import activation_buffer
from saev_store.integrations.saelens import data_provider, multi_hook_data_provider
from saev_store.torch import StoreLoader

BATCH, N_BATCHES = 32, 10  # of 336 rows; half a batch is dropped


@pytest.fixture(scope="module")
def stores(tmp_path_factory: pytest.TempPathFactory) -> list[Path]:
    """Two of the same tokens."""
    root = tmp_path_factory.mktemp("resume")
    return [row_store(root, seed=0), row_store(root, seed=1)]


def one(stores: list[Path], **more: object) -> StoreLoader:
    return StoreLoader(stores[0], **{"layer": 11, "batch_size": BATCH, "drop_last": True, **more})


def stacked(stores: list[Path], **more: object) -> StoreLoader:
    return one(stores, **{"layer": (5, 11), "stack_layers": True, **more})


def two(stores: list[Path], **more: object) -> StoreLoader:
    rows = pair(ShardStore.open(stores[0]), ShardStore.open(stores[1])).sel(layer_a=11, layer_b=11)
    return StoreLoader(rows, **{"batch_size": BATCH, "drop_last": True, **more})


PROVIDERS: dict[str, Callable[..., Any]] = {
    "saelens": lambda stores, **more: data_provider(one(stores, **more)),
    "saelens of several hooks": lambda stores, **more: multi_hook_data_provider(stacked(stores, **more)),
    "dictionary_learning": lambda stores, **more: activation_buffer(one(stores, **more)),
    "crosscoder of layers": lambda stores, **more: layer_batches(stacked(stores, **more)),
    "crosscoder of models": lambda stores, **more: model_batches(two(stores, **more)),
    "transcoder of layers": lambda stores, **more: transcoder_batches(stacked(stores, **more)),
    "transcoder of models": lambda stores, **more: transcoder_batches(two(stores, **more)),
}


def flat(found: Any) -> list[float]:
    """All numbers of what a provider hands out."""
    if isinstance(found, dict):
        return [number for part in found.values() for number in flat(part)]
    return [number for part in found for number in flat(part)] if isinstance(found, tuple) else found.flatten().tolist()


def taken(provider: Any, n: int) -> list[list[float]]:
    return [flat(found) for found in itertools.islice(iter(provider), n)]


@pytest.mark.parametrize("name", PROVIDERS)
def test_a_state_goes_on_in_every_epoch(name: str, stores: list[Path]):
    make = PROVIDERS[name]
    with make(stores) as provider:
        whole = taken(provider, 2 * N_BATCHES + 6)
    assert len({tuple(found) for found in whole}) == len(whole)  # the epochs have other orders
    for n in (0, 1, N_BATCHES - 1, N_BATCHES, N_BATCHES + 1, 2 * N_BATCHES):
        with make(stores) as first, make(stores, n_threads=2) as resumed:
            assert taken(first, n) == whole[:n]
            taken(resumed, 3)  # it is in the middle of something else
            resumed.load_state_dict(json.loads(json.dumps(first.state_dict())))
            assert taken(resumed, 5) == whole[n : n + 5]


@pytest.mark.parametrize("name", PROVIDERS)
def test_a_wrong_state_is_refused_and_changes_nothing(name: str, stores: list[Path]):
    make = PROVIDERS[name]
    with make(stores) as provider, make(stores, seed=3) as seed, make(stores, batch_size=16) as batch_size:
        taken(provider, 2)
        state = provider.state_dict()
        wrong = [{**state, "batch": -1}, {**state, "epoch": "2"}, {**state, "rows": "of another store"}]
        for other in [seed.state_dict(), batch_size.state_dict(), {}, *wrong]:
            with pytest.raises(ArgumentError):
                provider.load_state_dict(other)
        assert provider.state_dict() == state
        found = taken(provider, 2)
    with make(stores) as provider:
        assert taken(provider, 4)[-2:] == found
