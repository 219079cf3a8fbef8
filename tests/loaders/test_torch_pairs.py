"""The same rows of two stores as tensors: against the NumPy loaders of pairs, and the two stores themselves."""

from __future__ import annotations

import json
import pickle
from pathlib import Path

import numpy as np
import pytest
from token_stores import TokenStore, token_store

torch = pytest.importorskip("torch")

from saev_store import ShardStore, pair  # after the check that torch is there
from saev_store.errors import ArgumentError
from saev_store.loaders import OrderedPairLoader, ShuffledPairLoader
from saev_store.torch import (
    ConfigError,
    OrderedPairConfig,
    OrderedPairDataLoader,
    ShuffledPairConfig,
    ShuffledPairDataLoader,
)
from saev_store.torch._device import PlainCopies

KINDS = {
    "ordered": (OrderedPairDataLoader, OrderedPairConfig, OrderedPairLoader, {}),
    "shuffled": (
        ShuffledPairDataLoader,
        ShuffledPairConfig,
        ShuffledPairLoader,
        {"window_blocks": 3, "n_partitions": 2},
    ),
}
CHOICES = {
    "plain": {"layer_a": 5, "layer_b": 2},
    "stacked": {"layer_a": (5, 2), "layer_b": 2, "tokens": "all"},
    "conditions": {
        "layer_a": 5,
        "layer_b": "all",
        "where": {"group": (0, 2)},
        "masked": True,
        "examples": (1, 4, 7, 9, 10),
    },
    "stored": {"layer_a": 5, "layer_b": 2, "dtype": "stored"},
}


@pytest.fixture(scope="module")
def stores(tmp_path_factory: pytest.TempPathFactory) -> tuple[TokenStore, TokenStore]:
    """Other numbers, dtypes and sizes; the same tokens."""
    root, rng = tmp_path_factory.mktemp("pairs"), np.random.default_rng(0)
    arrays = {"token_ids": "int32", "mask": "bool", "labels": "uint8", "group": "uint8"}
    a = token_store(root / "a", arrays=arrays)
    b = token_store(root / "b", arrays={"token_ids": "int32", "score": "float32"}, dtype="bfloat16", d_model=4, seed=1)
    (b.path / "token_ids.bin").write_bytes((a.path / "token_ids.bin").read_bytes())
    a.arrays["group"][...] = rng.integers(0, 4, (11, 6))
    (a.path / "group.bin").write_bytes(a.arrays["group"].tobytes())
    return a, b


def config(kind: str, stores: tuple[TokenStore, TokenStore], choice: str, **more):
    _, config_of, _, options = KINDS[kind]
    a, b = stores
    given = {"batch_size": 4, "token_arrays": ("token_ids", "score"), **options, **CHOICES[choice], **more}
    return config_of(shards_a=a.path, shards_b=b.path, **given)


def as_arrays(batch: dict) -> dict[str, np.ndarray]:
    return {
        key: (value.view(torch.int16) if value.dtype == torch.bfloat16 else value).numpy().copy()
        for key, value in batch.items()
    }


def same(found: list[dict], expected: list[dict]) -> None:
    assert len(found) == len(expected) > 0
    for one, other in zip(found, expected, strict=True):
        assert one.keys() == other.keys()
        for key, values in one.items():
            assert values.tobytes() == np.ascontiguousarray(other[key]).tobytes(), key


@pytest.mark.parametrize("choice", CHOICES)
@pytest.mark.parametrize("kind", KINDS)
def test_batches_are_those_of_the_numpy_loader_as_tensors(stores, kind, choice):
    loader_of, _, plain_of, options = KINDS[kind]
    sel = {"tokens": "content", **CHOICES[choice]}
    a, b = (ShardStore.open(made.path) for made in stores)
    rows = pair(a, b).sel(**{**sel, **({"examples": list(sel["examples"])} if "examples" in sel else {})})
    names = ("token_ids", "score")
    with plain_of(rows, batch_size=4, token_arrays=names, labels=a.labels, **options) as plain:
        expected = [{key: values.copy() for key, values in batch.items()} for batch in plain]
    for batch in expected:
        batch["token_labels"] = batch["token_labels"].astype(np.int64)  # as in all batches of tensors
    with loader_of(config(kind, stores, choice)) as loader:
        assert (len(loader), loader.n_samples, loader.batch_size) == (len(expected), len(rows), 4)
        same([as_arrays(batch) for batch in loader], expected)
        assert loader.scale == (None, None)
        assert [metrics.n_batches for metrics in loader.metrics()] == [len(expected)] * 2
        assert len(loader.explain()) == 2
    example, token = expected[0]["example_idx"], expected[0]["token_idx"]
    if choice == "plain":
        truth = stores[0].acts[example, 1, token + 1]
        assert np.array_equal(expected[0]["act_a"], truth, equal_nan=True)


@pytest.mark.parametrize("device", ["cpu", "meanwhile"])
@pytest.mark.parametrize("kind", KINDS)
def test_a_state_continues_with_the_next_batch_also_where_batches_are_copied_ahead(stores, kind, device, monkeypatch):
    if device != "cpu":
        monkeypatch.setattr("saev_store.torch.pairs.copies_to", lambda device: PlainCopies(torch.device(device)))
    loader_of = KINDS[kind][0]
    cfg = config(kind, stores, "conditions")
    with loader_of(cfg) as loader:
        epochs = [[as_arrays(batch) for batch in loader] for _ in range(2)]
        assert loader.epoch == 2
        assert len(epochs[0]) > 3
    for epoch, n in ((0, 1), (0, 3), (1, 2), (0, len(epochs[0]))):
        with loader_of(cfg) as loader:
            loader.set_epoch(epoch)
            batches = iter(loader)
            for _ in range(n):
                next(batches)
            state = json.loads(json.dumps(loader.state_dict()))
            restored = pickle.loads(pickle.dumps(loader))
        rest = epochs[epoch][n:] or epochs[epoch + 1]
        with loader_of(cfg) as again, restored:
            again.load_state_dict(state)
            same([as_arrays(batch) for batch in again], rest)
            same([as_arrays(batch) for batch in restored], rest)


@pytest.mark.parametrize("kind", KINDS)
def test_a_state_of_other_tokens_is_refused(stores, kind):
    loader_of = KINDS[kind][0]
    with loader_of(config(kind, stores, "conditions")) as loader:
        state = loader.state_dict()
    with loader_of(config(kind, stores, "conditions", where={"group": 1})) as other:
        with pytest.raises(ArgumentError, match="state"):
            other.load_state_dict(state)
        with pytest.raises(ArgumentError, match="pair"):
            other.load_state_dict(state["a"])


def test_ranks_share_the_rows(stores):
    seen = []
    for rank in range(2):
        with ShuffledPairDataLoader(config("shuffled", stores, "plain", rank=rank, world=2, batch_size=2)) as loader:
            for batch in loader:
                seen += zip(batch["example_idx"].tolist(), batch["token_idx"].tolist(), strict=True)
    assert set(seen) == {tuple(place) for place in np.argwhere(stores[0].arrays["mask"]).tolist()}


@pytest.mark.parametrize("num_workers", [0, 1])
def test_a_data_loader_of_pytorch_hands_out_the_same_batches(stores, num_workers):
    with ShuffledPairDataLoader(config("shuffled", stores, "plain")) as loader:
        expected = [as_arrays(batch) for batch in loader]
        loader.set_epoch(0)
        data = torch.utils.data.DataLoader(loader.as_iterable_dataset(), batch_size=None, num_workers=num_workers)
        same([as_arrays(batch) for batch in data], expected)


@pytest.mark.parametrize(
    "change", [{"batch_size": 0}, {"where": 3}, {"layer_c": 2}, {"masked": "maybe"}, {"window": 1}]
)
@pytest.mark.parametrize("config_of", [OrderedPairConfig, ShuffledPairConfig])
def test_a_config_names_what_makes_no_sense(config_of, change):
    with pytest.raises(ConfigError, match=next(iter(change))):
        config_of(**change)


def test_stores_of_other_tokens_are_refused(stores, tmp_path: Path):
    other = token_store(tmp_path, n=12)
    with pytest.raises(ArgumentError, match="not of the same tokens"):
        OrderedPairDataLoader(OrderedPairConfig(shards_a=stores[0].path, shards_b=other.path, layer_a=5, layer_b=5))


@pytest.mark.parametrize("kind", KINDS)
def test_labels_come_from_the_store_that_has_some(stores, kind):
    for some in (stores, stores[::-1]):
        n_rows = 0
        with KINDS[kind][0](config(kind, some, "plain", token_arrays=())) as loader:
            for batch in loader:
                truth = stores[0].arrays["labels"][batch["example_idx"].numpy(), batch["token_idx"].numpy()]
                assert np.array_equal(batch["token_labels"].numpy(), truth)
                n_rows += len(truth)
        assert n_rows == loader.n_samples > 0


@pytest.mark.parametrize("kind", KINDS)
def test_each_store_is_opened_with_its_own_options(stores, kind, monkeypatch):
    opened, real = [], ShardStore.open

    def without_options(address: str, options: object) -> ShardStore:
        opened.append((address, options))
        return real(address)

    monkeypatch.setattr("saev_store.torch.pairs.ShardStore.open", without_options)
    options = {"storage_options_a": {"key": 1}, "storage_options_b": {"key": 2}}
    with KINDS[kind][0](config(kind, stores, "plain", **options)) as loader:
        assert len(next(iter(loader))["act_b"]) == 4
    assert opened == [(str(stores[0].path), {"key": 1}), (str(stores[1].path), {"key": 2})]
