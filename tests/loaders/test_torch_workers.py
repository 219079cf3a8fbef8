"""A worker of PyTorch's DataLoader that is spawned knows neither torch.distributed nor, without torchrun, its rank."""

from __future__ import annotations

import copy
import pickle
from collections.abc import Iterable
from multiprocessing.context import set_spawning_popen
from pathlib import Path

import pytest
from plain_stores import plain_store

torch = pytest.importorskip("torch")

from torch.utils.data import DataLoader

from saev_store import ShardStore, pair
from saev_store.errors import ArgumentError
from saev_store.loaders import OrderedLoader, ShuffledLoader, ShuffledPairLoader
from saev_store.torch import (
    OrderedConfig,
    OrderedDataLoader,
    OrderedPairConfig,
    OrderedPairDataLoader,
    ShuffledConfig,
    ShuffledDataLoader,
)


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


def made(kind: str, path: Path):
    """A loader of 32 rows, 2 in a batch."""
    rows = ShardStore.open(path).sel(layer=5, tokens="content")
    both = pair(ShardStore.open(path), ShardStore.open(path)).sel(layer_a=5, layer_b=5)
    return {
        "ordered": lambda: OrderedLoader(rows, batch_size=2),
        "shuffled": lambda: ShuffledLoader(rows, batch_size=2),
        "pair": lambda: ShuffledPairLoader(both, batch_size=2),
        "torch": lambda: ShuffledDataLoader(ShuffledConfig(path, layer=5, batch_size=2)),
        "torch pair": lambda: OrderedPairDataLoader(
            OrderedPairConfig(shards_a=path, shards_b=path, layer_a=5, layer_b=5, batch_size=2)
        ),
    }[kind]()


KINDS = ("ordered", "shuffled", "pair", "torch", "torch pair")


def rows_of(batches: Iterable) -> list[tuple[int, int]]:
    return [
        row for batch in batches for row in zip(batch["example_idx"].tolist(), batch["token_idx"].tolist(), strict=True)
    ]


def ranks(monkeypatch: pytest.MonkeyPatch, rank: int | None, world: int = 2) -> None:
    """What the environment says from now on."""
    for name, value in (("RANK", rank), ("WORLD_SIZE", world)):
        monkeypatch.delenv(name, raising=False)
        if rank is not None:
            monkeypatch.setenv(name, str(value))


@pytest.mark.parametrize("known", ["before", "after"])
@pytest.mark.parametrize("kind", KINDS)
def test_a_pickled_loader_is_shared_out_by_the_ranks_where_it_arrives(kind, known, tmp_path, monkeypatch):
    """`multiprocessing.spawn(train, args=(loader,))`: the ranks are made known in the new processes."""
    path = plain_store(tmp_path, n=8, tokens=4).path
    ranks(monkeypatch, None)
    loader = made(kind, path)
    loader.set_epoch(3)
    sent = pickle.dumps(loader)
    found, expected = [], []
    for rank in range(2):
        ranks(monkeypatch, rank if known == "before" else None)
        arrived = pickle.loads(sent)
        ranks(monkeypatch, rank)
        found.append(rows_of(arrived))
        assert arrived.epoch == 4
        direct = made(kind, path)
        direct.set_epoch(3)
        expected.append(rows_of(direct))
    assert found == expected
    assert sorted(found[0] + found[1]) == [(example, token) for example in range(8) for token in range(4)]


@pytest.mark.parametrize("kind", ["ordered", "shuffled", "pair"])
def test_a_loader_that_goes_to_a_process_being_started_keeps_its_rank(kind, tmp_path, monkeypatch):
    """The rank is known to torch.distributed alone, which is not initialised in that process."""
    path = plain_store(tmp_path, n=8, tokens=4).path
    ranks(monkeypatch, None)
    with monkeypatch.context() as here:
        here.setattr(torch.distributed, "is_initialized", lambda: True)
        here.setattr(torch.distributed, "get_world_size", lambda group=None: 2)
        here.setattr(torch.distributed, "get_rank", lambda group=None: 1)
        expected = rows_of(made(kind, path))
        loader = made(kind, path)
        set_spawning_popen(object())  # as multiprocessing does while it pickles for the new process
        try:
            sent = pickle.dumps(loader)
        finally:
            set_spawning_popen(None)
    arrived = pickle.loads(sent)
    assert (arrived.rank, arrived.world) == (1, 2)
    assert rows_of(arrived) == expected
    assert len(expected) == 16


@pytest.mark.parametrize("kind", KINDS)
def test_a_pickled_loader_within_an_epoch_is_not_shared_out_anew(kind, tmp_path, monkeypatch):
    path = plain_store(tmp_path, n=8, tokens=4).path
    ranks(monkeypatch, None)
    loader = made(kind, path)
    next(iter(loader))
    arrived = pickle.loads(pickle.dumps(loader))
    ranks(monkeypatch, 0)
    with pytest.raises(ArgumentError, match="global_batch_size"):
        iter(arrived)


@pytest.mark.parametrize("closed", [True, False])
@pytest.mark.parametrize("kind", KINDS)
def test_a_state_is_of_the_ranks_that_its_batches_were_for(kind, closed, tmp_path, monkeypatch):
    """As where torch.distributed is destroyed before the last checkpoint is written."""
    path = plain_store(tmp_path, n=8, tokens=4).path
    ranks(monkeypatch, 1)
    loader = made(kind, path)
    batches = iter(loader)
    before = rows_of([next(batches), next(batches)])
    expected = loader.state_dict()
    if closed:
        loader.close()
    ranks(monkeypatch, None)
    assert len(loader) == 8
    assert loader.state_dict() == expected
    with pytest.raises(ArgumentError, match="global_batch_size"):
        made(kind, path).load_state_dict(loader.state_dict())
    ranks(monkeypatch, 1)
    again = made(kind, path)
    whole = rows_of(again)
    again.load_state_dict(expected)
    assert before + rows_of(again) == whole
    ranks(monkeypatch, None)
    assert len(rows_of(loader)) == 32  # the next iteration is that of the ranks as they are then
