"""Batches on a GPU that is behind: each must hold its own rows when the GPU gets to it, whoever uses the memory meanwhile."""

from __future__ import annotations

import itertools
import json
from collections.abc import Callable, Iterable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
import pytest
from row_stores import row_store
from token_stores import token_store

torch = pytest.importorskip("torch")

from saev_store import ShardStore, new_metadata  # after the check that torch is there
from saev_store.torch import (
    OrderedConfig,
    OrderedDataLoader,
    OrderedPairConfig,
    OrderedPairDataLoader,
    ShuffledConfig,
    ShuffledDataLoader,
    ShuffledPairConfig,
    ShuffledPairDataLoader,
)

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="no GPU here")

#: Cycles for which the GPU does nothing before it uses a batch: longer than the host needs for the next ones.
BEHIND = 20_000_000
DEVICES = {"copied": {"device": "cuda"}, "kept": {"device": "cuda", "window_device": "cuda"}}
CHOICES = {
    "one layer": {},
    "stacked": {"layer": (11, 5)},
    "all": {"layer": "all", "tokens": "all"},
    "scaled": {"scale_norm": True},
    "small reads": {"read_bytes": 100, "n_threads": 8},
    "stored": {"dtype": "stored"},
    "normalized": {"layer": (11, 5), "normalize": "center_and_scale_norm", "dtype": "bfloat16"},
}

Batch = dict[str, "torch.Tensor"]


@pytest.fixture(scope="module", params=["float32", "bfloat16"])
def store(tmp_path_factory: pytest.TempPathFactory, request: pytest.FixtureRequest) -> Path:
    more = {} if request.param == "float32" else {"dtype": request.param, "token_arrays": {"token_ids": "int32"}}
    return row_store(tmp_path_factory.mktemp("gpu"), **more)


def host(batches: Iterable[Batch]) -> list[Batch]:
    """Batches of this machine's memory, kept."""
    return [{name: value.clone() for name, value in batch.items()} for batch in batches]


def behind(batches: Iterable[Batch]) -> list[Batch]:
    """What a GPU finds in batches that it gets to much later; nothing waits for it before the end."""
    found = []
    for batch in batches:
        assert batch["act"].is_cuda
        torch.cuda._sleep(BEHIND)
        found.append({name: value * 1 if value.is_cuda else value.clone() for name, value in batch.items()})
        del batch
    return [{name: value.cpu() for name, value in batch.items()} for batch in found]


def same(found: list[Batch], expected: list[Batch]) -> bool:
    return len(found) == len(expected) and all(
        a.keys() == b.keys() and all(a[name].dtype == b[name].dtype and torch.equal(a[name], b[name]) for name in a)
        for a, b in zip(found, expected, strict=True)
    )


def shuffled(store: Path, **options: object) -> ShuffledDataLoader:
    return ShuffledDataLoader(
        ShuffledConfig(**{"shards": store, "layer": 5, "batch_size": 16, "window_bytes": 3000, **options})
    )


def ordered(store: Path, **options: object) -> OrderedDataLoader:
    return OrderedDataLoader(OrderedConfig(**{"shards": store, "layer": 5, "batch_size": 16, **options}))


@pytest.mark.parametrize("choice", CHOICES)
@pytest.mark.parametrize("where", DEVICES)
def test_shuffled_rows_are_those_of_the_host(store: Path, where: str, choice: str) -> None:
    expected = host(itertools.chain.from_iterable([shuffled(store, **CHOICES[choice])] * 2))
    loader = shuffled(store, **CHOICES[choice], **DEVICES[where])
    assert same(behind(itertools.chain(loader, loader)), expected)


@pytest.mark.parametrize("choice", ["one layer", "all", "scaled", "stored"])
def test_ordered_rows_are_those_of_the_host(store: Path, choice: str) -> None:
    expected = host(ordered(store, **CHOICES[choice]))
    assert same(behind(ordered(store, **CHOICES[choice], device="cuda")), expected)


@pytest.mark.parametrize("where", DEVICES)
def test_a_state_is_continued(store: Path, where: str) -> None:
    expected = host(shuffled(store))
    for stop_at in (1, 3, 8):
        loader = shuffled(store, **DEVICES[where])
        first = behind(itertools.islice(loader, stop_at))
        state = json.loads(json.dumps(loader.state_dict()))
        loader.close()
        again = shuffled(store, **DEVICES[where])
        again.load_state_dict(state)
        assert same(first + behind(again), expected)


@pytest.mark.parametrize("where", DEVICES)
def test_a_consumer_with_a_stream_of_its_own(store: Path, where: str) -> None:
    """Batches are ready in the stream that is current where they are taken."""
    expected = host(shuffled(store))
    with torch.cuda.stream(torch.cuda.Stream()):
        assert same(behind(shuffled(store, **DEVICES[where])), expected)


@pytest.mark.parametrize("where", DEVICES)
def test_consumers_that_share_a_loader(store: Path, where: str) -> None:
    """Each in a thread and a stream of its own, and each another time behind."""
    expected = host(shuffled(store))

    def take(consumer: Iterable[Batch]) -> list[Batch]:
        with torch.cuda.stream(torch.cuda.Stream()):
            return behind(consumer)

    shared = shuffled(store, **DEVICES[where]).share(3)
    with ThreadPoolExecutor(3) as pool:
        assert all(same(found, expected) for found in pool.map(take, shared))


@pytest.mark.parametrize("kind", ["ordered", "shuffled"])
def test_pairs_are_those_of_the_host(tmp_path: Path, kind: str) -> None:
    a = token_store(tmp_path / "a", arrays={"token_ids": "int32"})
    b = token_store(tmp_path / "b", arrays={"token_ids": "int32"}, dtype="bfloat16", d_model=4, seed=1)
    (b.path / "token_ids.bin").write_bytes((a.path / "token_ids.bin").read_bytes())
    config_of: Callable[..., object] = OrderedPairConfig if kind == "ordered" else ShuffledPairConfig
    loader_of = OrderedPairDataLoader if kind == "ordered" else ShuffledPairDataLoader
    given = {"shards_a": a.path, "shards_b": b.path, "layer_a": 5, "layer_b": 2, "batch_size": 4}
    expected = [{name: np.asarray(value) for name, value in batch.items()} for batch in loader_of(config_of(**given))]
    found = []
    for batch in loader_of(config_of(**given, device="cuda")):
        assert batch["act_a"].is_cuda and batch["act_b"].is_cuda
        torch.cuda._sleep(BEHIND)
        found.append({name: value * 1 for name, value in batch.items()})
    assert len(found) == len(expected) > 3
    for one, other in zip(found, expected, strict=True):
        assert one.keys() == other.keys()
        assert all(
            np.array_equal(one[name].cpu().numpy(), other[name], equal_nan=name.startswith("act")) for name in one
        )


def test_tensors_of_a_gpu_are_appended(tmp_path: Path) -> None:
    """What is written is what was computed when `append` was called, although the GPU is behind."""
    n = 12
    metadata = new_metadata(
        family="gpt2", ckpt="gpu", layers=(0, 1), content_tokens_per_example=2, cls_token=True, d_model=8,
        n_examples=n, max_tokens_per_shard=30,
    )  # fmt: skip
    acts = torch.randn((n, 2, 3, 8), device="cuda")
    expected = acts.cpu().numpy()
    with ShardStore.create(tmp_path, metadata, progress=False) as writer:
        for first in range(0, n, 2):
            torch.cuda._sleep(BEHIND)
            computed = acts[first : first + 2] * 1
            writer.append(computed)
            computed.zero_()
    assert np.array_equal(ShardStore.open(tmp_path / metadata.hash)[:], expected)
