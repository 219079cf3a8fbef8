"""Token arrays in batches: every row has what was recorded for its token, in every loader, dtype, rank and continued run."""

from __future__ import annotations

import itertools
import json
import pickle
from pathlib import Path

import numpy as np
import pytest
from token_stores import ARRAYS, TokenStore, token_store

from saev_store import ShardStore, new_metadata
from saev_store.errors import ArgumentError, DocumentError
from saev_store.loaders import OrderedLoader, ShuffledLoader

#: The key of each array in a batch; the names `act` and `layer` are those of other keys, `tokens_layer` is an array's own.
KEYS = {name: name for name in ARRAYS} | {"act": "tokens_act", "layer": "tokens_tokens_layer"}
ALL = tuple(ARRAYS)
KINDS = {"ordered": (OrderedLoader, {}), "shuffled": (ShuffledLoader, {"window_blocks": 3, "n_partitions": 4})}


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> TokenStore:
    return token_store(tmp_path_factory.mktemp("tokens"), n=23, dtype="bfloat16")


def batches_of(
    made: TokenStore, kind: str = "shuffled", *, engine: str = "auto", tokens: str = "all", **options
) -> list:
    cls, more = KINDS[kind]
    rows = ShardStore.open(made.path, engine=engine).sel(
        layer=[5, 2], tokens=tokens, masked=options.pop("masked", False)
    )
    with cls(rows, **{"batch_size": 16, "n_threads": 2, "token_arrays": ALL, **more, **options}) as loader:
        return list(loader)


def check(batch: dict, made: TokenStore, names: tuple[str, ...] = ALL) -> None:
    assert set(batch) - {"act", "example_idx", "token_idx", "layer", "token_labels"} == {KEYS[name] for name in names}
    for name in names:
        found, truth = batch[KEYS[name]], made.column(name, batch["example_idx"], batch["token_idx"])
        assert (found.dtype, found.shape) == (truth.dtype, truth.shape)
        assert np.array_equal(found, truth, equal_nan=truth.dtype.kind == "f")


@pytest.mark.parametrize("kind", KINDS)
def test_only_what_is_asked_for_comes_and_the_order_stays(made, kind):
    plain = batches_of(made, kind, token_arrays=())
    some = batches_of(made, kind, token_arrays=["token_ids"])
    for one, other in zip(plain, some, strict=True):
        assert set(one) == {"act", "example_idx", "token_idx", "layer"}
        check(other, made, ("token_ids",))
        for key, values in one.items():
            assert np.array_equal(values, other[key], equal_nan=True)


@pytest.mark.parametrize("name", ALL)
def test_the_key_of_an_array_does_not_depend_on_which_others_are_asked_for(made, name):
    for batch in batches_of(made, token_arrays=[name]):
        check(batch, made, (name,))


def test_special_tokens_alone_have_none(made):
    for kind in KINDS:
        for batch in batches_of(made, kind, tokens="special"):
            check(batch, made, ())


def test_labels_stay_beside_them(made):
    labels = ShardStore.open(made.path).labels
    for batch in batches_of(made, labels=labels):
        check(batch, made)
        assert np.array_equal(batch["token_labels"], batch["labels"])


def test_a_loader_hands_out_labels_of_an_older_store_by_name(tmp_path):
    metadata = new_metadata(
        family="clip", ckpt="x", layers=[2], content_tokens_per_example=3, cls_token=False, d_model=2, n_examples=4,
        max_tokens_per_shard=6,
    )  # fmt: skip
    labels = np.arange(12, dtype=np.uint8).reshape(4, 3)
    with ShardStore.create(tmp_path, metadata, progress=False) as writer:
        writer.append(np.zeros((4, 1, 3, 2), np.float32), labels=labels)
    store = ShardStore.open(tmp_path / metadata.hash)
    (batch,) = OrderedLoader(store.sel(layer=2), token_arrays=["labels"])
    assert batch["labels"].tolist() == labels.reshape(-1).tolist()


@pytest.mark.parametrize("world", [2, 4])
def test_every_rank_has_them_and_repeats_them_with_repeated_rows(made, world):
    alone = batches_of(made, batch_size=16, masked=True)
    ranks = [batches_of(made, batch_size=16 // world, rank=rank, world=world, masked=True) for rank in range(world)]
    for batch in itertools.chain(*ranks):
        check(batch, made)
    joined = [np.concatenate([batch["token_ids"] for batch in step]) for step in zip(*ranks, strict=True)]
    for step, batch in zip(joined[:-1], alone[:-1], strict=True):
        assert sorted(step.tolist()) == sorted(batch["token_ids"].tolist())


@pytest.mark.parametrize("kind", KINDS)
def test_a_continued_run_has_them_too(made, kind):
    whole = batches_of(made, kind)
    cls, more = KINDS[kind]
    rows = ShardStore.open(made.path).sel(layer=[5, 2], tokens="all")

    def make(**options):
        return cls(rows, **{"batch_size": 16, "n_threads": 2, **more, **options})

    with make() as loader:  # without them: they are no part of the state
        list(itertools.islice(loader, 2))
        state = json.loads(json.dumps(loader.state_dict()))
    with make(token_arrays=ALL) as loader:
        loader.load_state_dict(state)
        rest = list(loader)
    assert len(rest) == len(whole) - 2
    for found, batch in zip(rest, whole[2:], strict=True):
        check(found, made)
        assert np.array_equal(found["document_ids"], batch["document_ids"])


def test_what_is_not_there_or_broken_is_refused(made, tmp_path: Path):
    rows = ShardStore.open(made.path).sel(layer=2)
    for kind, (cls, _) in KINDS.items():
        with pytest.raises(ArgumentError, match="no token array 'text'; it has") as caught:
            cls(rows, token_arrays=["token_ids", "text"])
        assert caught.value.where == "token_arrays", kind
    with pytest.raises(ArgumentError, match="token_arrays"):
        OrderedLoader(rows, token_arrays="token_ids")
    broken = token_store(tmp_path, arrays={"mask": "bool"})
    (broken.path / "mask.bin").write_bytes(bytes([7]) * broken.arrays["mask"].size)
    with pytest.raises(DocumentError, match="other than 0 and 1"):
        OrderedLoader(ShardStore.open(broken.path).sel(layer=2, masked=True), token_arrays=["mask"])


# -- PyTorch -----------------------------------------------------------------------------------------------------------


def config(cls, made: TokenStore, **options):
    return cls(**{"shards": str(made.path), "layer": (5, 2), "tokens": "all", "token_arrays": ALL, **options})


def torch_batches(made: TokenStore, kind: str, **options):
    from saev_store.torch import OrderedConfig, OrderedDataLoader, ShuffledConfig, ShuffledDataLoader

    cls, cfg = {
        "ordered": (OrderedDataLoader, OrderedConfig), "shuffled": (ShuffledDataLoader, ShuffledConfig)
    }[kind]  # fmt: skip
    return cls(config(cfg, made, **{"batch_size": 16, "n_threads": 2, **options}))


def checked_as_arrays(batches, made: TokenStore) -> int:
    import torch

    n_rows = 0
    for batch in batches:
        assert all(isinstance(value, torch.Tensor) for value in batch.values())
        check({key: value.float().numpy() if key == "act" else value.numpy() for key, value in batch.items()}, made)
        n_rows += len(batch["act"])
    return n_rows


@pytest.mark.parametrize(
    ("kind", "options"),
    [
        ("ordered", {}), ("shuffled", {}), ("shuffled", {"window_device": "cpu", "window_bytes": 4000}),
        ("shuffled", {"dtype": "stored"}), ("shuffled", {"use_tmpdir": True, "layer": (5, 2)}),
    ],
)  # fmt: skip
def test_tensors_of_the_stored_dtypes(made, kind, options, tmp_path, monkeypatch):
    pytest.importorskip("torch")
    monkeypatch.setenv("TMPDIR", str(tmp_path))
    n_rows = 2 * (int(made.arrays["mask"].sum()) + len(made.acts))
    with torch_batches(made, kind, **options) as loader:
        assert checked_as_arrays(loader, made) == n_rows
        assert checked_as_arrays(loader.as_iterable_dataset(), made) == n_rows


@pytest.mark.parametrize("num_workers", [0, 1])
def test_an_iterable_dataset_in_a_data_loader(made, num_workers):
    data = pytest.importorskip("torch.utils.data")
    with torch_batches(made, "shuffled") as loader:
        batches = data.DataLoader(loader.as_iterable_dataset(), batch_size=None, num_workers=num_workers)
        assert checked_as_arrays(batches, made) == loader.n_samples


def test_random_access(made):
    torch = pytest.importorskip("torch")
    from saev_store.torch import ConfigError, IndexedConfig, IndexedDataset

    dataset = IndexedDataset(config(IndexedConfig, made))
    picked = np.random.default_rng(0).integers(0, len(dataset), 60)
    assert checked_as_arrays([dataset.batch(picked)], made) == 60
    for number in picked[:20].tolist():
        example = dataset[number]
        for name, key in KEYS.items():
            at = np.array([example["example_idx"]]), np.array([example["token_idx"]])
            truth = made.column(name, *at)[0]
            assert type(example[key]) is type(truth)
            assert np.array_equal(example[key], truth, equal_nan=truth.dtype.kind == "f")
    loaded = torch.utils.data.DataLoader(dataset, batch_size=32, collate_fn=IndexedDataset.collate)
    assert checked_as_arrays(loaded, made) == len(dataset)
    assert set(IndexedDataset(config(IndexedConfig, made, tokens="special"))[0]) == {
        "act", "example_idx", "token_idx", "layer"
    }  # fmt: skip
    with pytest.raises(ArgumentError, match="no token array 'text'"):
        IndexedDataset(config(IndexedConfig, made, token_arrays=["text"]))
    with pytest.raises(ConfigError, match="token_arrays"):
        config(IndexedConfig, made, token_arrays="text")


@pytest.mark.parametrize("batch_size", [8, None])
def test_a_data_loader_without_collate_keeps_dtypes(made, batch_size):
    """PyTorch makes int64 of Python's integers and float64 of its floats."""
    data = pytest.importorskip("torch.utils.data")
    from saev_store.torch import IndexedConfig, IndexedDataset

    names = tuple(name for name in ALL if name != "labels")
    dataset = IndexedDataset(IndexedConfig(shards=made.path, layer=5, token_arrays=names))
    first = next(iter(data.DataLoader(dataset, batch_size=batch_size)))
    whole = dataset.batch(range(batch_size or 1))
    for name in names:
        expected, found = whole[KEYS[name]].numpy(), np.asarray(first[KEYS[name]])
        assert found.dtype == expected.dtype == made.arrays[name].dtype
        assert np.array_equal(found.reshape(-1), expected, equal_nan=found.dtype.kind == "f")
    dataset.close()


@pytest.mark.parametrize("use_tmpdir", [False, True])
def test_configs_choose_tokens_by_their_values(made, use_tmpdir, tmp_path, monkeypatch):
    pytest.importorskip("torch")
    from saev_store import torch as ours

    monkeypatch.setenv("TMPDIR", str(tmp_path))
    wanted = made.arrays["labels"][:2].reshape(-1)
    chosen = np.isin(made.arrays["labels"], wanted) & ~made.arrays["example"]
    options = {
        "shards": made.path, "layer": 5, "masked": True, "token_arrays": ("labels", "score"),
        "where": {"labels": wanted, "example": False},
    }  # fmt: skip
    expected = [tuple(place) for place in np.argwhere(chosen).tolist()]

    def places(batches) -> list[tuple[int, int]]:
        return [
            (e, t)
            for one in batches
            for e, t in zip(one["example_idx"].tolist(), one["token_idx"].tolist(), strict=True)
        ]

    indexed = ours.IndexedDataset(ours.IndexedConfig(**options))
    assert places([indexed.batch(range(len(indexed)))]) == expected
    for cls, config_of in (
        (ours.OrderedDataLoader, ours.OrderedConfig),
        (ours.ShuffledDataLoader, ours.ShuffledConfig),
    ):
        cfg = config_of(**options, batch_size=4, use_tmpdir=use_tmpdir)
        with cls(cfg) as loader:
            assert sorted(places(loader)) == expected
            batches = iter(loader)
            next(batches)
            state = json.loads(json.dumps(loader.state_dict()))
            rest = places(batches)
            assert rest
        with pickle.loads(pickle.dumps(cls(cfg))) as again:
            again.load_state_dict(state)
            assert places(again) == rest
        other = config_of(**{**options, "where": {"labels": wanted[:1]}}, batch_size=4)
        with cls(other) as loader, pytest.raises(ArgumentError, match="state"):
            loader.load_state_dict(state)


@pytest.mark.parametrize("where", ["labels", {"labels": "x"}, {"labels": [[1], [2, 3]]}, {1: 2}, {"labels": None}])
def test_a_config_refuses_what_is_no_condition(where):
    pytest.importorskip("torch")
    from saev_store.torch import ConfigError, IndexedConfig, OrderedConfig, ShuffledConfig

    for config_of in (IndexedConfig, OrderedConfig, ShuffledConfig):
        with pytest.raises(ConfigError, match="where"):
            config_of(where=where)
