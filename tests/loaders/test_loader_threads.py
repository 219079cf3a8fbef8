"""Threads that share an iterator: each batch goes to one of them, whole; all of them find the end of the epoch."""

from __future__ import annotations

import itertools
import sys
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from plain_stores import Plain, plain_store

from saev_store import ShardStore, pair
from saev_store.errors import ArgumentError
from saev_store.loaders import OrderedLoader, OrderedPairLoader, ShuffledLoader, ShuffledPairLoader

N_THREADS, BATCH_SIZE, N = 4, 4, 150
KINDS = [
    order + kind
    for order in ("Ordered", "Shuffled")
    for kind in ("Loader", "PairLoader", "DataLoader", "PairDataLoader")
]


@pytest.fixture
def often() -> Iterator[None]:
    """Threads take turns as often as they can."""
    before = sys.getswitchinterval()
    sys.setswitchinterval(1e-6)
    yield
    sys.setswitchinterval(before)


def loader_of(kind: str, a: Plain, b: Plain) -> Any:
    """A loader of layer 5 of one store, or of both."""
    if "DataLoader" in kind:
        torch = pytest.importorskip("saev_store.torch")
        addresses = {"shards_a": a.path, "shards_b": b.path, "layer_a": 5, "layer_b": 5}
        options = addresses if "Pair" in kind else {"shards": a.path, "layer": 5}
        config = getattr(torch, kind.replace("DataLoader", "Config"))
        return getattr(torch, kind)(config(**options, batch_size=BATCH_SIZE))
    stores = ShardStore.open(a.path), ShardStore.open(b.path)
    if "Pair" in kind:
        of_two = {"OrderedPairLoader": OrderedPairLoader, "ShuffledPairLoader": ShuffledPairLoader}[kind]
        return of_two(pair(*stores).sel(layer_a=5, layer_b=5), batch_size=BATCH_SIZE)
    of_one = {"OrderedLoader": OrderedLoader, "ShuffledLoader": ShuffledLoader}[kind]
    return of_one(stores[0].sel(layer=5, tokens="content"), batch_size=BATCH_SIZE)


@pytest.mark.usefixtures("often")
@pytest.mark.parametrize("kind", KINDS)
def test_each_batch_goes_to_one_of_the_threads(kind: str, tmp_path: Path) -> None:
    a, b = (plain_store(tmp_path, n=N, per_shard=40, seed=seed) for seed in (0, 1))
    loader = loader_of(kind, a, b)
    batches = iter(loader)

    def taken(_: int) -> list[tuple[int, int]]:
        """The rows of the batches that a thread gets."""
        rows: list[tuple[int, int]] = []
        for batch in batches:
            example, token = np.asarray(batch["example_idx"]), np.asarray(batch["token_idx"])
            for name, store in {"act": a, "act_a": a, "act_b": b}.items():
                if name in batch:
                    np.testing.assert_array_equal(np.asarray(batch[name]), store.acts[example, 1, token + 1])
            rows += zip(example.tolist(), token.tolist(), strict=True)
        return rows

    with loader, ThreadPoolExecutor(N_THREADS) as pool:
        found = list(itertools.chain.from_iterable(pool.map(taken, range(N_THREADS))))
        assert sorted(found) == list(itertools.product(range(N), range(4)))
        state = loader.state_dict()
    places = [state["a"], state["b"]] if "Pair" in kind else [state]
    assert [(place["epoch"], place["batch"]) for place in places] == [(1, 0)] * len(places)


@pytest.mark.parametrize("kind", KINDS)
def test_no_thread_takes_a_closed_iterator_for_the_end_of_the_epoch(kind: str, tmp_path: Path) -> None:
    """Of the threads that shared an iterator of tensors one was told; the others ended as if they had had all of the epoch."""
    a, b = (plain_store(tmp_path, n=N, per_shard=40, seed=seed) for seed in (0, 1))
    loader = loader_of(kind, a, b)
    batches = iter(loader)
    next(batches)
    loader.close()
    for _ in range(3):
        with pytest.raises(ArgumentError, match="this iterator was closed"):
            next(batches)
