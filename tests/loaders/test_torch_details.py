"""Edges of the torch loaders that other tests pass by."""

from __future__ import annotations

import numpy as np
import pytest
from plain_stores import plain_store

from saev_store import ShardStore

pytest.importorskip("torch")

from saev_store.loaders import OrderedLoader  # after the check that torch is there
from saev_store.torch import OrderedConfig, OrderedDataLoader, ShuffledConfig, ShuffledDataLoader


def test_the_scale_is_that_of_the_rows_where_labels_are_ignored(tmp_path):
    """Statistics beside the store are of all vectors, the ignored ones included."""
    plain = plain_store(tmp_path, n=24, tokens=4, labels=True)
    labels = np.tile(np.array([0, 1, 1, 1], np.uint8), (24, 1))
    labels.tofile(plain.path / "labels.bin")
    for shard_idx in range(plain.n_shards):
        acts = plain.truth(shard_idx).copy()
        acts[:, :, 1] *= 1000
        acts.tofile(plain.shard(shard_idx))
    store = ShardStore.open(plain.path)
    store.stats()
    config = OrderedConfig(shards=plain.path, layer=5, batch_size=8, scale_norm=True, ignore_labels=[0])
    expected = OrderedLoader(store.sel(layer=5, tokens="content", ignore_labels=[0]), batch_size=8, scale_norm=True)
    assert OrderedDataLoader(config).scale == expected.scale


def test_a_state_taken_after_set_epoch_is_of_that_epoch(tmp_path):
    plain = plain_store(tmp_path, n=24, tokens=4)
    loader = ShuffledDataLoader(ShuffledConfig(shards=plain.path, layer=5, batch_size=8))
    next(iter(loader))
    loader.set_epoch(3)
    state = loader.state_dict()
    assert (state["epoch"], state["batch"], loader.epoch) == (3, 0, 3)
