"""Whatever stands in a state: one of our errors, and the loader stands where it stood; or the state means what it meant."""

from __future__ import annotations

import copy
import math

import numpy as np
import pytest
from api import MemoryTransport
from plain_stores import plain_store
from token_files import llmbatch_bytes

from saev_store import ShardStore, pair
from saev_store.errors import SaevStoreError
from saev_store.loaders import OrderedLoader, OrderedPairLoader, ShuffledLoader, ShuffledPairLoader
from saev_store.sources.llmbatch import BatchFileReader, BatchNativeLoader

JUNK = [
    None, True, False, 0, 1, -1, 2**63, 2**200, 1.0, math.nan, math.inf, "", "0", "x" * 5000, "\udc80", b"1", [], [1], (), {}, {"a": 1},
    np.int64(1), np.float32(1), np.array(1), np.arange(3), np.array([]), object(), int, Ellipsis, range(3), {1}, 1j,
]  # fmt: skip


def llmbatch(_: ShardStore) -> BatchNativeLoader:
    batches = np.arange(48, dtype=np.uint32).reshape(12, 2, 2)
    reader = BatchFileReader("x.batch", transport=MemoryTransport({"x.batch": llmbatch_bytes(batches)}))
    return BatchNativeLoader(reader, block_size=2, output="numpy")


def torch_loader(store: ShardStore):
    torch = pytest.importorskip("saev_store.torch", exc_type=ImportError)
    return torch.ShuffledDataLoader(torch.ShuffledConfig(shards=store.url, layer=5, batch_size=8, normalize="center"))


def consumer(store: ShardStore):
    shared = torch_loader(store).share(2)[0]
    shared.load_state_dict(shared.state_dict())  # what says the order of both
    return shared


def provider(store: ShardStore):
    pytest.importorskip("torch")
    from saev_store.integrations.dictionary_learning import activation_buffer

    return activation_buffer(torch_loader(store))


KINDS = {
    "ordered": lambda store: OrderedLoader(store.sel(layer=5), batch_size=8, scale_norm=True),
    "shuffled": lambda store: ShuffledLoader(store.sel(layer=5), batch_size=8, n_partitions=2, window_blocks=2),
    "ordered pair": lambda store: OrderedPairLoader(pair(store, store).sel(layer_a=5, layer_b=11), batch_size=8),
    "shuffled pair": lambda store: ShuffledPairLoader(pair(store, store).sel(layer_a=5, layer_b=11), batch_size=8),
    "LLMBATCH": llmbatch,
    "torch": torch_loader,
    "consumer": consumer,
    "provider": provider,
}


@pytest.fixture(scope="module")
def store(tmp_path_factory) -> ShardStore:
    return ShardStore.open(plain_store(tmp_path_factory.mktemp("junk"), n=24, tokens=4).path)


def changed(state: dict[str, object]):
    """(name, state) with one value replaced or left out, at any depth."""
    for name, value in state.items():
        yield f"no {name}", {other: state[other] for other in state if other != name}
        for junk in JUNK:
            yield f"{name} = {junk!r:.40}", {**state, name: junk}
        if isinstance(value, dict):
            yield from ((f"{name}.{what}", {**state, name: inner}) for what, inner in changed(value))


@pytest.mark.parametrize("kind", KINDS)
def test_junk_in_a_state_is_refused_and_changes_nothing(store, kind):
    loader = KINDS[kind](store)
    if kind != "consumer":  # two of them would wait for each other
        batches = iter(loader)
        next(batches), next(batches)
    state = copy.deepcopy(loader.state_dict())
    wholes = [(f"{junk!r:.40}", junk) for junk in JUNK]
    for what, junk in [*wholes, *changed(state)]:
        try:
            loader.load_state_dict(junk)
        except SaevStoreError as error:
            str(error).encode()
            assert loader.state_dict() == state, what
        else:
            assert all(loader.state_dict()[name] == junk[name] for name in junk if not isinstance(junk[name], dict)), (
                what
            )
            loader.load_state_dict(state)
    loader.close()
