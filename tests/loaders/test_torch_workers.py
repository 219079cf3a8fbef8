"""A worker of PyTorch's DataLoader that is spawned knows neither torch.distributed nor, without torchrun, its rank."""

from __future__ import annotations

import copy

import pytest
from plain_stores import plain_store

torch = pytest.importorskip("torch")

from torch.utils.data import DataLoader

from saev_store.torch import OrderedConfig, OrderedDataLoader


@pytest.mark.filterwarnings("ignore:.*'pin_memory' argument.*:UserWarning")
def test_a_spawned_worker_takes_the_part_of_its_rank(tmp_path, monkeypatch):
    plain = plain_store(tmp_path, n=8, tokens=4)
    loader = OrderedDataLoader(OrderedConfig(plain.path, layer=5, batch_size=8))
    monkeypatch.delenv("RANK", raising=False)
    monkeypatch.setattr(torch.distributed, "is_initialized", lambda: True)
    monkeypatch.setattr(torch.distributed, "get_world_size", lambda group=None: 2)
    monkeypatch.setattr(torch.distributed, "get_rank", lambda group=None: 1)
    batches = DataLoader(loader.as_iterable_dataset(), batch_size=None, num_workers=1, multiprocessing_context="spawn")
    rows = [[batch["example_idx"].tolist(), batch["token_idx"].tolist()] for batch in batches]
    assert rows == [[batch["example_idx"].tolist(), batch["token_idx"].tolist()] for batch in loader]
    assert len(rows) == 2
    assert copy.copy(loader).cfg.rank is None  # a copy for this process, whose rank may still be found out
