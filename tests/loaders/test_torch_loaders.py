"""The loaders for PyTorch: names and options of both generations, tensors, devices, PyTorch's own DataLoader."""

from __future__ import annotations

import contextlib
import copy
import ctypes
import dataclasses
import errno
import gc
import itertools
import json
import os
import pickle
import threading
from types import SimpleNamespace

import numpy as np
import pytest
from plain_stores import Plain, plain_store

torch = pytest.importorskip("torch")

from torch.utils.data import DataLoader
from waiting import soon

from saev_store.errors import (
    ArgumentError,
    CorruptShardError,
    LayerNotFoundError,
    NotFoundError,
    SelectionError,
)
from saev_store.loaders._medium import Medium  # after the check that torch is there
from saev_store.loaders._ring import BufferPool, allocate
from saev_store.loaders.options import rank_and_world
from saev_store.torch import (
    ConfigError,
    Dataset,
    IndexedConfig,
    IndexedDataset,
    OrderedConfig,
    OrderedDataLoader,
    ShuffledConfig,
    ShuffledDataLoader,
    ShuffledPairDataLoader,
)
from saev_store.torch._device import PlainCopies, copies_to, moved, pinned
from saev_store.torch.batch import tensors


@pytest.fixture(scope="module")
def plain(tmp_path_factory) -> Plain:
    return plain_store(tmp_path_factory.mktemp("torch"), n=43, tokens=7, per_shard=5, labels=True, d_model=16)


LOADERS = {"ordered": (OrderedConfig, OrderedDataLoader), "shuffled": (ShuffledConfig, ShuffledDataLoader)}
every_loader = pytest.mark.parametrize("kind", LOADERS)


def make(plain: Plain, kind: str, **options):
    config, loader = LOADERS[kind]
    return loader(config(**{"shards": plain.path, "layer": 5, "batch_size": 32, **options}))


def check(plain: Plain, batch, layers=(2, 5, 11), layer=5) -> None:
    example, token = batch["example_idx"], batch["token_idx"]
    assert example.dtype == token.dtype == torch.int64
    labels = batch["layer"] if "layer" in batch else torch.full_like(example, layer)
    position = torch.tensor([layers.index(value) for value in labels.tolist()])
    expected = torch.from_numpy(plain.acts)[example, position, token + 1]
    assert torch.equal(batch["act"].cpu(), expected)


@every_loader
@pytest.mark.parametrize("layer", [2, [11, 5], "all"], ids=str)
@pytest.mark.parametrize("tokens", ["content", "special", "all"])
def test_every_combination(plain, kind, layer, tokens):
    loader = make(plain, kind, layer=layer, tokens=tokens)
    n = 0
    for batch in loader:
        check(plain, batch, layer=layer)
        n += len(batch["act"])
        assert ("token_labels" in batch) == (tokens != "special")
        if "token_labels" in batch:
            assert batch["token_labels"].dtype == torch.int64  # uint8 would be a mask where it indexes
            labels = torch.from_numpy(plain.labels)[batch["example_idx"], batch["token_idx"].clamp(min=0)].long()
            assert torch.equal(batch["token_labels"], torch.where(batch["token_idx"] < 0, 255, labels))
    assert n == loader.n_samples == 43 * {"content": 7, "special": 1, "all": 8}[tokens] * (1 if layer == 2 else 2 if layer != "all" else 3)  # fmt: skip


def test_a_script_of_version_1_runs(plain):
    """`shard_root`, `patches`, `image_i`, `patch_i`."""
    cfg = ShuffledConfig(shard_root=str(plain.path), patches="image", layer=5, batch_size=64, n_threads=4, buffer_size=64, seed=17)  # fmt: skip
    assert (cfg.shard_root, cfg.patches, cfg.tokens) == (str(plain.path), "image", "content")
    loader = ShuffledDataLoader(cfg)
    assert (loader.n_batches, loader.n_samples, loader.batch_size, loader.drop_last) == (5, 301, 64, False)
    seen = set()
    for batch in loader:
        assert batch["act"].shape[1] == 16
        seen |= set(zip(batch["image_i"].tolist(), batch["patch_i"].tolist(), strict=True))
    assert len(seen) == 301
    loader.shutdown()
    cls = OrderedDataLoader(OrderedConfig(shard_root=plain.path, patches="cls", layer=5))
    (batch,) = cls
    assert batch["patch_i"].tolist() == [-1] * 43
    dataset = Dataset(IndexedConfig(shard_root=plain.path, patches="cls", layer=5))
    assert dataset[4]["image_i"] == 4
    assert dataset[4]["patch_i"] == -1
    assert dataset.d_vit == 16
    assert dataset.get_img_patches(3).shape == (3, 8, 16)


def test_configs_are_frozen_checked_and_replaced(plain):
    cfg = ShuffledConfig(shards=plain.path, layer=5)
    assert dataclasses.replace(cfg, batch_size=8).batch_size == 8
    assert dataclasses.replace(cfg, batch_size=8).shards == str(plain.path)
    assert dataclasses.asdict(cfg)["layer"] == 5
    with pytest.raises(dataclasses.FrozenInstanceError):
        cfg.seed = 1
    for bad in ({"batch_size": 0}, {"tokens": "words"}, {"layer": "some"}, {"min_buffer_fill": 2}, {"shard_rot": "x"}, {"drop_last": "perhaps"}, {"masked": "no"}, {"remove_bos": 1}):  # fmt: skip
        with pytest.raises(ConfigError) as raised:
            ShuffledConfig(**bad)
        assert isinstance(raised.value, ArgumentError)
        assert next(iter(bad)) in str(raised.value)
    with pytest.raises(ConfigError, match="batch_size is 0") as raised:
        dataclasses.replace(cfg, batch_size=0)
    assert raised.value.__cause__ is None
    with pytest.raises(ConfigError) as raised:
        ShuffledConfig(storage_options={1: "very-secret-key"}, rank="x")
    assert "very-secret-key" not in str(raised.value)
    with pytest.raises(ConfigError, match="shards is 5; it must be a valid string"):
        ShuffledConfig(5, layer=11)
    with pytest.raises(ConfigError, match="shards is given twice"):
        ShuffledConfig("a", shard_root="b")
    with pytest.raises(ConfigError, match="shards is given twice: shard_root is another name of it"):
        ShuffledConfig(shards="a", shard_root="b")
    for kind, wrong in (
        (ShuffledDataLoader, "a path"), (ShuffledDataLoader, OrderedConfig()), (OrderedDataLoader, ShuffledConfig()),
        (OrderedDataLoader, {"shards": "a"}), (IndexedDataset, "a path"),
        (ShuffledPairDataLoader, ShuffledConfig()),
    ):  # fmt: skip
        with pytest.raises(
            ConfigError, match=f"cfg: an object of type {type(wrong).__name__} is no config of this class"
        ):
            kind(wrong)
    with pytest.raises(ConfigError, match="storage_option") as misspelled:
        ShuffledConfig(storage_option={"secret": "very-secret-key"})
    assert "very-secret-key" not in str(misspelled.value)
    assert "rank" in str(raised.value)
    assert OrderedConfig(shards="s3://bucket/store").shards == "s3://bucket/store"


def test_indexed_rows(plain):
    dataset = IndexedDataset(IndexedConfig(shards=plain.path, layer="all", tokens="all"))
    assert len(dataset) == 43 * 3 * 8
    for i in (0, 7, 8, 500, len(dataset) - 1):
        example = dataset[i]
        expected = plain.acts.reshape(-1, 16)[i]
        assert torch.equal(example["act"], torch.from_numpy(expected))
        assert (example["example_idx"], example["token_idx"] + 1) == (i // 24, i % 8)
        assert example["layer"] == (2, 5, 11)[i // 8 % 3]
        assert example["token_label"] == (plain.labels[i // 24, i % 8 - 1] if i % 8 else 255)
    for bad in (-1, len(dataset)):
        with pytest.raises(IndexError, match=f"example {bad} of a dataset of {len(dataset)}"):
            dataset[bad]
        with pytest.raises(
            SelectionError, match=f"examples {min(bad, 0)} to {max(bad, 0)} of a dataset of {len(dataset)}"
        ):
            dataset.batch([0, bad])
    assert len(list(iter(dataset[i] for i in range(3)))) == 3
    labels = dataset.batch([7, 8, 9])["token_labels"]
    assert labels.tolist() == [int(plain.labels[0, 6]), 255, int(plain.labels[0, 0])]
    few = IndexedDataset(IndexedConfig(shards=plain.path, layer=5, ignore_labels=range(100)))
    assert len(few) == int((plain.labels >= 100).sum())
    vector = plain.acts[0, 0, 0].copy()
    own = dataset.transform(vector)
    assert own.shape == (16,)
    own += 1
    assert np.array_equal(vector, plain.acts[0, 0, 0])  # its memory is not the caller's


def test_indices_that_are_no_integers(plain):
    """A mask is not taken for the numbers 0 and 1, nor is a fraction cut."""
    dataset = IndexedDataset(IndexedConfig(shards=plain.path, layer=5))
    mask = np.zeros(len(dataset), bool)
    mask[3] = True
    for bad in (
        mask,
        torch.from_numpy(mask),
        [1.5],
        np.array([1.0]),
        ["1"],
        [None],
        [[1, 2], [3]],
        slice(0, 2),
        [2**70],
    ):
        with pytest.raises(SelectionError, match="must be integers"):
            dataset.batch(bad)
    with pytest.raises(SelectionError, match="of a dataset of"):
        dataset.batch(np.array([2**63], np.uint64))
    for bad in (1.5, "1", None, True, slice(0, 2), [1], np.array([1, 2])):
        with pytest.raises(SelectionError, match="must be an integer"):
            dataset[bad]
    assert len(dataset.batch([])["act"]) == 0
    for number in (3, np.int8(3), torch.tensor(3)):
        assert torch.equal(dataset[number]["act"], dataset.batch(torch.tensor([3]))["act"][0])


def test_indexed_batches_are_gathered_by_threads(plain):
    dataset = IndexedDataset(IndexedConfig(shards=plain.path, layer="all", tokens="all"))
    dataset._n_threads = 4
    picked = np.random.default_rng(0).integers(0, len(dataset), 5000)
    batch = dataset.batch(picked)
    assert torch.equal(batch["act"], torch.from_numpy(plain.acts.reshape(-1, 16)[picked]))
    check(plain, batch)
    dataset.close()
    assert not [thread for thread in threading.enumerate() if thread.name.startswith("saev-indexed")]


def test_indexed_batches_where_the_medium_wants_one_thread_from_a_batch_on(plain, monkeypatch):
    """The shards have come into memory, of a machine with one core, and the threads were closed meanwhile."""
    looks = iter([("flash", 4), ("cached", 1)])

    def pretend(self) -> None:
        kind, self._n_threads = next(looks)
        self._medium = Medium(kind, "pretended", str(plain.path))

    monkeypatch.setattr(IndexedDataset, "_look_at_medium", pretend)
    dataset = IndexedDataset(IndexedConfig(shards=plain.path, layer="all", tokens="all"))
    picked = np.random.default_rng(0).integers(0, len(dataset), 3000)
    for number in range(17):
        if number == 15:
            dataset.close()
        assert torch.equal(dataset.batch(picked)["act"], torch.from_numpy(plain.acts.reshape(-1, 16)[picked]))
    assert dataset._medium.kind == "cached"
    dataset.close()


def test_indexed_batches_from_a_disk(plain, monkeypatch):
    """Scattered vectors are read one by one, without read-ahead, until the shards are in memory."""
    kinds = iter(["flash", "cached", "cached"])
    look = IndexedDataset._look_at_medium

    def pretend(self) -> None:
        look(self)
        self._medium = Medium(next(kinds), "pretended", str(plain.path))

    monkeypatch.setattr(IndexedDataset, "_look_at_medium", pretend)
    dataset = IndexedDataset(IndexedConfig(shards=plain.path, layer="all", tokens="all"))
    dataset._n_threads = 4
    rng = np.random.default_rng(0)
    for number in range(18):
        picked = rng.integers(0, len(dataset), 3000)
        batch = dataset.batch(picked)
        assert torch.equal(batch["act"], torch.from_numpy(plain.acts.reshape(-1, 16)[picked]))
        assert dataset._medium.kind == ("flash" if number < 15 else "cached")
        dataset._n_threads = 4
    dataset.close()


@pytest.mark.skipif(not hasattr(os, "posix_fadvise"), reason="the system takes no advice")
@pytest.mark.parametrize("takes_it", [True, False])
def test_a_disk_is_told_of_many_vectors_at_once(tmp_path, monkeypatch, takes_it):
    """Of each that lies apart, and of nothing else; a system that does not listen is read all the same."""
    plain, told = plain_store(tmp_path, n=60, tokens=7, per_shard=25, d_model=2048), set[tuple[int, int]]()
    of_files = dict[int, int]()  # what was said last of a whole file

    def advise(fd: int, start: int, length: int, advice: int) -> None:
        if (start, length) == (0, 0):
            of_files[os.fstat(fd).st_ino] = advice
        if advice == os.POSIX_FADV_WILLNEED:
            told.add((start, length))
            if not takes_it:
                raise OSError(errno.EINVAL, "no")

    def pretend(self) -> None:
        self._medium, self._n_threads = Medium("flash", "pretended", str(plain.path)), 4

    monkeypatch.setattr(IndexedDataset, "_look_at_medium", pretend)
    monkeypatch.setattr(os, "posix_fadvise", advise)
    dataset = IndexedDataset(IndexedConfig(shards=plain.path, layer="all", tokens="all"))
    picked = 4 * np.random.default_rng(0).integers(0, len(dataset) // 4, 1500)
    assert torch.equal(dataset.batch(picked)["act"], torch.from_numpy(plain.acts.reshape(-1, 2048)[picked]))
    wanted = {(int(vector) % (25 * 24) * 8192, 8192) for vector in picked}
    assert told == wanted if takes_it else told < wanted
    shards = {path.stat().st_ino for path in plain.path.glob("acts*.bin")}
    assert of_files == dict.fromkeys(shards, os.POSIX_FADV_RANDOM)
    for bad in (-1, len(dataset)):
        with pytest.raises(SelectionError):
            dataset.batch([*picked, bad])
    dataset.close()
    assert of_files == dict.fromkeys(shards, os.POSIX_FADV_NORMAL)  # others read them as before


@pytest.mark.parametrize("n_workers", [0, 2])
@pytest.mark.parametrize("collate", ["ours", "default"])
@pytest.mark.filterwarnings("ignore:.*multi-threaded.*fork:DeprecationWarning")
@pytest.mark.filterwarnings("ignore:.*'pin_memory' argument.*:UserWarning")
def test_indexed_with_pytorchs_loader(plain, n_workers, collate):
    dataset = IndexedDataset(IndexedConfig(shards=plain.path, layer=5))
    options = {"collate_fn": IndexedDataset.collate} if collate == "ours" else {}
    loader = DataLoader(dataset, batch_size=64, shuffle=True, num_workers=n_workers, **options)
    seen = set()
    for batch in loader:
        check(plain, batch)
        seen |= set(zip(batch["example_idx"].tolist(), batch["token_idx"].tolist(), strict=True))
    assert len(seen) == 301


def test_indexed_can_be_sent(plain):
    dataset = pickle.loads(pickle.dumps(IndexedDataset(IndexedConfig(shards=plain.path, layer=5))))
    assert torch.equal(dataset[9]["act"], torch.from_numpy(plain.acts[1, 1, 3]))


def test_ordered_agrees_with_indexed(plain):
    loader = make(plain, "ordered", layer="all", tokens="all")
    dataset = IndexedDataset(IndexedConfig(shards=plain.path, layer="all", tokens="all"))
    at = 0
    for batch in loader:
        expected = dataset.batch(np.arange(at, at + len(batch["act"])))
        assert torch.equal(batch["act"], expected["act"])
        assert torch.equal(batch["example_idx"], expected["example_idx"])
        assert torch.equal(batch["token_idx"], expected["token_idx"])
        at += len(batch["act"])
    assert at == len(dataset)


def acts(batches) -> list:
    return [batch["act"].clone() for batch in batches]


def same(one, two) -> bool:
    return len(one) == len(two) and all(torch.equal(a, b) for a, b in zip(one, two, strict=True))


@every_loader
@pytest.mark.parametrize("there", [False, True], ids=["cpu", "copied"])
def test_resuming_counts_what_was_handed_out(plain, kind, there, monkeypatch):
    """Also where one batch is copied ahead."""
    if there:
        monkeypatch.setattr("saev_store.torch.loaders.copies_to", lambda device: PlainCopies(torch.device(device)))
    whole = acts(make(plain, kind))
    loader = make(plain, kind)
    for stop_at in range(len(whole)):
        loader.set_epoch(0)
        iterator = iter(loader)
        first = acts(next(iterator) for _ in range(stop_at))
        state = json.loads(json.dumps(loader.state_dict()))
        assert (state["epoch"], state["batch"]) == (0, stop_at)
        fresh = make(plain, kind)
        fresh.load_state_dict(state)
        assert same(first + acts(fresh), whole)
        assert fresh.state_dict()["epoch"] == 1
        assert fresh.epoch == 1
        sent = pickle.loads(pickle.dumps(loader))
        assert same(first + acts(sent), whole)


@every_loader
@pytest.mark.parametrize("there", [False, True], ids=["cpu", "copied"])
def test_an_epoch_is_over_with_its_last_batch(plain, kind, there, monkeypatch):
    """Not before, although it is copied ahead; and loops that count batches never see the end."""
    if there:
        monkeypatch.setattr("saev_store.torch.loaders.copies_to", lambda device: PlainCopies(torch.device(device)))
    loader = make(plain, kind)
    expected = [acts(loader), acts(loader)]
    loader.set_epoch(0)
    iterator = iter(loader)
    for _ in range(len(loader) - 1):
        next(iterator)
    assert (loader.epoch, loader.state_dict()["batch"]) == (0, len(loader) - 1)
    del iterator
    for number in range(2):  # the epoch that was left early begins anew
        iterator = iter(loader)
        assert same([next(iterator)["act"].clone() for _ in range(len(loader))], expected[number])
        assert (loader.epoch, loader.state_dict()["epoch"], loader.state_dict()["batch"]) == (number + 1, number + 1, 0)
    assert next(iterator, None) is None


@every_loader
def test_as_a_dataset_of_batches(plain, kind, monkeypatch):
    whole = acts(make(plain, kind))
    dataset = make(plain, kind).as_iterable_dataset()
    assert len(dataset) == len(whole)
    assert same(acts(DataLoader(dataset, batch_size=None)), whole)
    dataset.loader.set_epoch(0)
    monkeypatch.setattr("saev_store.torch._epochs.get_worker_info", lambda: SimpleNamespace(num_workers=2))
    with pytest.raises(ArgumentError, match="num_workers is 2"):
        iter(dataset)


def test_a_new_loader_begins_with_the_epoch_that_its_sampler_is_told(plain):
    """Lightning tells it a number before each epoch, and loads no state from a checkpoint of an epoch's end."""
    config = ShuffledConfig(shards=plain.path, layer=5, batch_size=64)
    loader, again = ShuffledDataLoader(config), ShuffledDataLoader(config)
    orders = [[batch["example_idx"].tolist() for batch in loader] for _ in range(3)]
    batches = iter(again)
    again.sampler.set_epoch(1)
    assert [batch["example_idx"].tolist() for batch in batches] == orders[1]
    for told in (0, 2, 9):
        again.sampler.set_epoch(told)
        assert again.epoch == 2
    batches = iter(again)
    next(batches)
    resumed = ShuffledDataLoader(config)
    resumed.load_state_dict(again.state_dict())
    again.sampler.set_epoch(9)
    assert [batch["example_idx"].tolist() for batch in batches] == orders[2][1:]
    resumed.sampler.set_epoch(9)
    assert [batch["example_idx"].tolist() for batch in resumed] == orders[2][1:]


def test_a_loader_that_was_left_within_an_epoch_goes_on_to_the_next_when_its_sampler_is_told_one(plain):
    """Lightning's `limit_train_batches` gave the same rows in each epoch. A number that is told again repeats, as validation does."""
    config = ShuffledConfig(shards=plain.path, layer=5, batch_size=8)
    whole, loader = ShuffledDataLoader(config), ShuffledDataLoader(config)
    orders = [[batch["example_idx"].tolist() for batch in whole] for _ in range(5)]

    def first_two(told: int) -> list[list[int]]:
        loader.sampler.set_epoch(told)
        return [batch["example_idx"].tolist() for batch in itertools.islice(loader, 2)]

    assert first_two(0) == orders[0][:2] != orders[1][:2]
    assert first_two(1) == orders[1][:2]
    assert first_two(1) == orders[1][:2]
    assert first_two(2) == orders[2][:2]
    state = loader.state_dict()
    assert (state["epoch"], state["batch"]) == (2, 2)
    assert first_two(0) == orders[3][:2]  # a second `fit` of the same loader
    loader.load_state_dict(state)
    assert first_two(2) == orders[2][2:4]  # a state says where to go on, whatever is told
    assert first_two(3) == orders[3][:2]
    resumed = ShuffledDataLoader(config)
    resumed.load_state_dict(state)
    resumed.sampler.set_epoch(7)
    assert [batch["example_idx"].tolist() for batch in resumed] == orders[2][2:]
    for told in (8, 9):
        resumed.sampler.set_epoch(told)
        assert [batch["example_idx"].tolist() for batch in resumed] == orders[told - 5]


def test_a_left_loader_goes_on_where_its_iterator_is_made_before_its_sampler_is_told(plain):
    """Lightning's `fit` makes the iterator first. Its second one had the rows of the last epoch before it once more."""
    config = ShuffledConfig(shards=plain.path, layer=5, batch_size=8)
    whole, loader = ShuffledDataLoader(config), ShuffledDataLoader(config)
    orders = [[batch["example_idx"].tolist() for batch in whole] for _ in range(6)]

    def first_two(told: int, loader: ShuffledDataLoader = loader) -> list[list[int]]:
        batches = iter(loader)
        loader.sampler.set_epoch(told)
        return [next(batches)["example_idx"].tolist() for _ in range(2)]

    assert [first_two(told) for told in (0, 1, 0, 1)] == [order[:2] for order in orders[:4]]
    assert first_two(1) == orders[3][:2]
    assert first_two(5) == orders[5][:2]  # as a new loader that is told this
    # A checkpoint of the last batch of an epoch that is left: Lightning loads it, makes the iterator and tells the next number.
    state = loader.state_dict()
    for told, expected in ((5, orders[5][2:4]), (7, orders[5][2:4]), (6, None)):
        resumed = ShuffledDataLoader(config)
        resumed.load_state_dict(json.loads(json.dumps(state)))
        found = first_two(told, resumed)
        assert resumed.place == ((5, 4) if expected else (6, 2))
        assert expected in (None, found)


def test_a_state_of_the_last_batch_that_a_limit_allows_goes_on_with_the_next_epoch(plain):
    """Lightning writes it in the last step of its epoch, makes an iterator, and tells the loader the number of its next epoch."""
    config = ShuffledConfig(shards=plain.path, layer=5, batch_size=8)
    whole, loader = ShuffledDataLoader(config), ShuffledDataLoader(config)
    orders = [[batch["example_idx"].tolist() for batch in whole] for _ in range(3)]
    loader.sampler.set_epoch(0)
    list(itertools.islice(loader, 2))
    state = loader.state_dict()
    for make_one in (lambda: ShuffledDataLoader(config), lambda: pickle.loads(pickle.dumps(loader))):
        resumed = make_one()
        resumed.load_state_dict(state)
        assert resumed.state_dict() == state
        batches = iter(resumed)
        resumed.sampler.set_epoch(1)
        assert [batch["example_idx"].tolist() for batch in itertools.islice(batches, 2)] == orders[1][:2]
        resumed.sampler.set_epoch(2)
        assert [batch["example_idx"].tolist() for batch in resumed] == orders[2]
    within = ShuffledDataLoader(config)
    within.load_state_dict(state)
    within.sampler.set_epoch(0)
    assert [batch["example_idx"].tolist() for batch in within] == orders[0][2:]
    for told in ("0", True, -1):
        with pytest.raises(ArgumentError, match="^told: "):
            within.load_state_dict({**state, "told": told})


@pytest.mark.filterwarnings("ignore:.*multi-threaded.*fork:DeprecationWarning")
@pytest.mark.filterwarnings("ignore:.*'pin_memory' argument.*:UserWarning")
@pytest.mark.parametrize("method", ["spawn"])
def test_in_one_worker_process(plain, method):
    whole = acts(make(plain, "shuffled"))
    dataset = make(plain, "shuffled").as_iterable_dataset()
    loader = DataLoader(dataset, batch_size=None, num_workers=1, multiprocessing_context=method)
    assert same(acts(loader), whole)


@pytest.mark.filterwarnings("ignore:.*multi-threaded.*fork:DeprecationWarning")
@pytest.mark.filterwarnings("ignore:.*'pin_memory' argument.*:UserWarning")
def test_workers_do_not_begin_an_epoch_that_is_told_again(plain):
    alone, loader = make(plain, "shuffled"), make(plain, "shuffled")
    epochs = [acts(alone) for _ in range(3)]
    dataset = loader.as_iterable_dataset()
    batches = DataLoader(dataset, batch_size=None, num_workers=1, multiprocessing_context="fork")
    for expected in epochs[1:]:
        loader.begin_epoch(1)
        assert same(acts(batches), expected)


@pytest.mark.filterwarnings("ignore:.*multi-threaded.*fork:DeprecationWarning")
@pytest.mark.filterwarnings("ignore:.*'pin_memory' argument.*:UserWarning")
@pytest.mark.parametrize("workers", ["none", "forked", "spawned", "kept"])
def test_workers_that_are_started_for_each_epoch_go_on_with_the_next(plain, workers):
    """A copy of a loader that stands still gave every epoch in one order."""
    alone, loader = make(plain, "shuffled"), make(plain, "shuffled")
    epochs = [acts(alone) for _ in range(5)]
    assert not same(epochs[0], epochs[1])
    options = {
        "none": {},
        "forked": {"multiprocessing_context": "fork"},
        "spawned": {"multiprocessing_context": "spawn"},
    }
    options["kept"] = {**options["forked"], "persistent_workers": True}
    dataset = loader.as_iterable_dataset()
    if workers == "forked":
        dataset = copy.deepcopy(dataset)
        loader = dataset.loader
    batches = DataLoader(dataset, batch_size=None, num_workers=int(workers != "none"), **options[workers])
    assert same(acts(batches), epochs[0])
    assert same(acts(batches), epochs[1])
    if workers == "spawned":  # which takes seconds for each
        loader.set_epoch(0)
        assert same(acts(batches), epochs[0])
        return
    assert len(acts(itertools.islice(iter(batches), 2))) == 2  # an epoch that is left begins anew
    assert same(acts(batches), epochs[2])
    loader.set_epoch(0)
    assert same(acts(batches), epochs[0])
    assert same(acts(batches), epochs[1])
    state = loader.state_at(3, 1)
    for _ in range(2):
        loader.load_state_dict(state)
        assert same(acts(batches), epochs[3][1:])
    assert same(acts(batches), epochs[4])


@pytest.mark.filterwarnings("ignore::UserWarning", "ignore::DeprecationWarning", "ignore::FutureWarning")
@pytest.mark.parametrize("workers", ["none", "new", "kept"])
def test_torchdatas_stateful_loader(plain, workers):
    stateful = pytest.importorskip("torchdata.stateful_dataloader", reason="torchdata is not needed by anything")
    alone = make(plain, "shuffled")
    whole, later = acts(alone), acts(alone)

    def made():
        dataset, n_workers = make(plain, "shuffled").as_iterable_dataset(), int(workers != "none")
        return stateful.StatefulDataLoader(
            dataset, batch_size=None, num_workers=n_workers, persistent_workers=workers == "kept"
        )

    loader = made()
    iterator = iter(loader)
    first = acts(next(iterator) for _ in range(4))
    state = loader.state_dict()
    again = made()
    again.load_state_dict(state)
    assert same(first + acts(again), whole)
    assert same(acts(again), later)


def test_memory_is_held_while_it_is_copied():
    """A slow copy: its source is not filled again before it is done."""
    pool, done = BufferPool((2, 3), n_kept=8), []
    finished: list = []

    class Slow:
        def start(self, batch):
            source = batch["act"]
            done.append(False)
            number = len(done) - 1
            finished.append((source.data_ptr(), source.clone()))
            return batch.__class__(act=source.clone()), lambda: done[number]

        def ready(self, batch):
            pass

        def wait(self):
            done[:] = [True] * len(done)

    def batches():
        for number in range(6):
            act = pool.get()
            for at, (address, content) in enumerate(finished):
                if not done[at]:
                    assert act.ctypes.data != address, "memory that is being copied from was handed out again"
                    del content
            act[:] = number
            yield tensors({"act": act})
            del act
            if number >= 2:
                done[number - 2] = True

    assert [int(batch["act"][0, 0]) for batch in moved(batches(), Slow())] == list(range(6))
    assert sum(buffer is not None for buffer in pool._idle) <= 5


@pytest.mark.parametrize("n", [0, 1, 2, 5])
def test_a_copied_batch_is_handed_out_once_it_is_ready(n):
    """The one that was begun first, also the last ones; the next copy is under way by then."""
    calls = []

    class Recorded:
        def start(self, batch):
            calls.append(("start", int(batch["act"][0, 0])))
            return batch.__class__(act=batch["act"].clone()), lambda: True

        def ready(self, batch):
            calls.append(("ready", int(batch["act"][0, 0])))

        def wait(self):
            calls.append(("wait", None))

    batches = (tensors({"act": np.full((1, 1), number, np.float32)}) for number in range(n))
    for batch in moved(batches, Recorded()):
        number = int(batch["act"][0, 0])
        calls.append(("out", number))
    expected = []
    for number in range(n):
        begun = [0, 1] if number == 0 else [number + 1]
        expected += [("start", later) for later in begun if later < n] + [("ready", number), ("out", number)]
    assert calls == [*expected, ("wait", None)]


class Late:
    """Copies that read their source when somebody waits for them, as a device does that has other work before them."""

    device = torch.device("cpu")

    def __init__(self):
        self.under_way: list = []

    def queue(self):
        return contextlib.nullcontext()

    def start(self, batch):
        there = batch.__class__({name: torch.empty_like(value) for name, value in batch.items()})
        self.under_way.append((there, batch["act"].data_ptr(), batch["act"].shape))
        number = len(self.under_way)
        return there, lambda: len(self.under_way) < number

    def ready(self, batch):
        pass

    def wait(self):
        for there, address, shape in self.under_way:
            array = np.ctypeslib.as_array(ctypes.cast(address, ctypes.POINTER(ctypes.c_float)), tuple(shape))
            there["act"].copy_(torch.from_numpy(array))
        self.under_way.clear()


@every_loader
@pytest.mark.parametrize("stop_at", [None, 2])
def test_memory_is_held_until_the_last_copies_are_done(plain, kind, stop_at, monkeypatch):
    """Those that are under way when an epoch ends, or is left, before the next one fills the same memory."""
    epochs = [acts(iter_of) for iter_of in [make(plain, kind, batch_size=64)] * 2]
    copies = Late()
    monkeypatch.setattr("saev_store.torch.loaders.copies_to", lambda device: copies)
    loader = make(plain, kind, batch_size=64)
    loader._loader._make_buffer = allocate
    first = list(itertools.islice(iter(loader), stop_at))
    loader.set_epoch(1)
    list(loader)
    copies.wait()
    found = [batch["act"] for batch in first]
    assert same(found, epochs[0][: len(found)])


def test_devices(plain):
    assert copies_to("cpu") is None
    assert pinned("cpu") is None
    with pytest.raises(ArgumentError, match="not a device"):
        make(plain, "ordered", device="abacus")
    batches = list(make(plain, "ordered", device="meta"))
    assert batches[0]["act"].device.type == "meta"
    if not torch.cuda.is_available():
        with pytest.raises(ArgumentError, match="no GPU"):
            make(plain, "ordered", device="cuda")


@pytest.mark.skipif(not torch.cuda.is_available(), reason="no GPU here")
@every_loader
def test_on_a_gpu(plain, kind):
    whole = acts(make(plain, kind))
    found = []
    for batch in make(plain, kind, device="cuda"):
        assert batch["act"].is_cuda
        check(plain, {name: value.cpu() for name, value in batch.items()})
        found.append(batch["act"].cpu())
    assert same(found, whole)


def test_rank_and_world(tmp_path, plain, monkeypatch):
    torch.distributed.init_process_group("gloo", init_method=f"file://{tmp_path}/rendezvous", rank=0, world_size=1)
    try:
        monkeypatch.setenv("RANK", "1")
        monkeypatch.setenv("WORLD_SIZE", "2")
        assert rank_and_world(None, None) == (0, 1)  # it knows better than the environment
        assert rank_and_world(2, 3) == (2, 3)
    finally:
        torch.distributed.destroy_process_group()
    monkeypatch.undo()
    parts = [make(plain, "shuffled", batch_size=16, rank=rank, world=2, drop_last=True) for rank in range(2)]
    together = [torch.cat(pair) for pair in zip(acts(parts[0]), acts(parts[1]), strict=True)]
    assert same(together, acts(make(plain, "shuffled", drop_last=True)))


@every_loader
def test_ranks_are_found_when_an_iteration_begins(plain, kind, monkeypatch):
    """A loader that was made before torch.distributed was initialised hands out its share, and continues a state."""
    expected = [acts(make(plain, kind, batch_size=16, rank=rank, world=2)) for rank in range(2)]
    whole = make(plain, kind, batch_size=32)
    next(iter(whole))
    state = whole.state_dict()
    loader = make(plain, kind, batch_size=16)
    assert len(loader) == 19
    monkeypatch.setattr(torch.distributed, "is_initialized", lambda: True)
    monkeypatch.setattr(torch.distributed, "get_world_size", lambda group=None: 2)
    for rank in range(2):
        monkeypatch.setattr(torch.distributed, "get_rank", lambda group=None, rank=rank: rank)
        loader.set_epoch(0)
        assert len(loader) == len(expected[rank]) == 10
        assert same(acts(loader), expected[rank])
        loader.load_state_dict(state)
        assert same(acts(loader), expected[rank][1:])


@every_loader
@pytest.mark.parametrize("damaged", [False, True])
def test_chosen_examples(kind, damaged, tmp_path):
    """To train on some and to validate on others, or on what is left of a damaged store."""
    plain = plain_store(tmp_path, n=43, tokens=7, per_shard=5, labels=True, d_model=16)
    if damaged:
        plain.shard(1).unlink()
        with pytest.raises(CorruptShardError):
            make(plain, kind)
    left = np.ones(43, dtype=bool)
    left[5:10] = False
    for examples in (left, np.flatnonzero(left), np.flatnonzero(left).tolist(), slice(10, None)):
        loader = make(plain, kind, examples=examples, damaged_ok=damaged)
        found = [batch["example_idx"].clone() for batch in loader if check(plain, batch) is None]
        assert sorted(torch.cat(found).tolist()) == sorted(np.arange(43)[examples].tolist() * 7)
    for no_positions in (["some"], ["1"], [1.0], {1, 2}, True, [True, 2], np.ones((43, 1), bool)):
        with pytest.raises(ConfigError, match="examples"):
            make(plain, kind, examples=no_positions)
    for mask in (left[:-1], np.ones(44, bool)):
        with pytest.raises(SelectionError, match="mask"):
            make(plain, kind, examples=mask, damaged_ok=damaged)


@every_loader
def test_what_is_left_of_a_damaged_store_is_scaled_and_filtered_by_itself(kind, tmp_path):
    plain = plain_store(tmp_path, n=43, tokens=7, per_shard=5, d_model=16)
    plain.shard(1).unlink()
    left = np.delete(np.arange(43), range(5, 10))
    norms = np.linalg.norm(plain.acts[left, 1, 1:].astype(np.float64), axis=-1)
    options = {"examples": left, "damaged_ok": True}
    for scaled in ({"scale_norm": True}, {"normalize": "scale_norm"}):
        assert make(plain, kind, **options, **scaled).scale == pytest.approx(4 / norms.mean())
    assert make(plain, kind, **options, max_norm_multiple=1.01).n_samples == (norms <= 1.01 * norms.mean()).sum()


@pytest.mark.parametrize("layer", ["5", 5.0, b"5", {5}, ("5", "2"), (5.0,)], ids=str)
def test_what_is_no_label_of_a_layer_becomes_none(layer):
    with pytest.raises(ConfigError, match="layer"):
        OrderedConfig(layer=layer)
    assert OrderedConfig(layer=np.int64(5)).layer == 5
    assert OrderedConfig(layer=[np.int64(5), 2]).layer == (5, 2)


@pytest.mark.parametrize("rows", [[0, 1, 2], [1, 2, 0]])
def test_batches_of_the_default_collate_function_have_all_labels(plain, rows):
    """Also those that begin with a special token, whose label is 255."""
    dataset = IndexedDataset(IndexedConfig(shards=plain.path, layer=5, tokens="all"))
    batch = next(iter(torch.utils.data.DataLoader(torch.utils.data.Subset(dataset, rows), batch_size=3)))
    assert batch["token_label"].tolist() == [int(plain.labels[0, row - 1]) if row else 255 for row in rows]


@pytest.mark.parametrize("device", ["mps", "xla"])
def test_a_device_that_cannot_be_used_is_told(plain, device):
    with pytest.raises(ArgumentError, match="cannot be used here"):
        OrderedDataLoader(OrderedConfig(shards=plain.path, layer=5, device=device))


@every_loader
def test_what_is_wrong_is_said(plain, kind, tmp_path):
    with pytest.raises(NotFoundError):
        make(plain, kind, shards=tmp_path / "nothing")
    with pytest.raises(LayerNotFoundError, match="2, 5, 11"):
        make(plain, kind, layer=-2)
    broken = plain_store(tmp_path, n=9)
    broken.shard(1).unlink()
    with pytest.raises(CorruptShardError, match="acts000001"):
        list(make(broken, kind))  # far away, sizes are looked at when a shard is first read


def our_threads() -> list[str]:
    return [thread.name for thread in threading.enumerate() if thread.name.startswith("saev-")]


@every_loader
def test_nothing_is_left_running(plain, kind):
    loader = make(plain, kind)
    assert loader.manager_pid == -1
    next(iter(loader))
    assert soon(lambda: our_threads() == [])  # nobody has closed it
    assert loader.manager_pid == -1
    iterator = iter(loader)
    next(iterator)
    assert loader.manager_pid > 0
    assert our_threads()
    loader.shutdown()
    assert our_threads() == []
    with pytest.raises(ArgumentError):
        next(iterator)
    with make(plain, kind) as again:
        list(again)
        assert again.metrics().n_rows == 301
        assert "rows" in str(again.explain())
    assert our_threads() == []


def test_nothing_leaks(plain):
    """100 times made, begun, left or closed: no thread, descriptor, child or memory file stays."""
    psutil = pytest.importorskip("psutil")
    process = psutil.Process()

    def once(number: int) -> None:
        kind = list(LOADERS)[number % 2]
        loader = make(plain, kind, **({"window_bytes": 6000} if kind == "shuffled" and number % 3 else {}))
        iterator = iter(DataLoader(loader.as_iterable_dataset(), batch_size=None) if number % 5 == 4 else loader)
        for _ in range(number % 7):
            next(iterator)
        if number % 3 == 0:
            loader.close()
        elif number % 3 == 1:
            list(iterator)
        dataset = IndexedDataset(IndexedConfig(shards=plain.path, layer=5))
        dataset.batch(range(300))
        dataset.close()

    def descriptors() -> list[str]:
        found = []
        for fd in os.listdir("/proc/self/fd"):
            with contextlib.suppress(FileNotFoundError):  # that of the listing itself
                found.append(os.readlink(f"/proc/self/fd/{fd}"))
        return found

    def held() -> tuple[list[str], list[str], int, list[str]]:
        gc.collect()
        soon(lambda: our_threads() == [])  # those of what was dropped end in a moment
        files = descriptors()
        return files, our_threads(), len(process.children(recursive=True)), [name for name in files if "memfd" in name]

    for number in range(8):
        once(number)
    before = held()
    for number in range(100):
        once(number)
    after = held()
    # Fewer where something of another test went meanwhile.
    assert len(after[0]) <= len(before[0]), f"new: {sorted(set(after[0]) - set(before[0]))}"
    assert after[2] <= before[2]
    assert before[1] == before[3] == after[1] == after[3] == []


def test_measures_are_logged(plain, caplog):
    with caplog.at_level("DEBUG", "saev_store.torch"):
        list(make(plain, "shuffled", debug=True, log_every_s=1e-9))
    assert "rows_per_s" in caplog.text


@every_loader
def test_scaled_norms(plain, kind):
    loader = make(plain, kind, scale_norm=True)
    norms = torch.cat([batch["act"].norm(dim=1) for batch in loader])
    assert float(norms.mean()) == pytest.approx(4.0, rel=1e-4)
    assert loader.scale == pytest.approx(4.0 / float(torch.from_numpy(plain.acts[:, 1, 1:]).norm(dim=-1).mean()), rel=1e-4)  # fmt: skip


def test_the_scale_is_kept_beside_the_store_and_in_the_state(tmp_path, monkeypatch):
    """Computed once, by whoever is first; a run that is continued scales as it began, whatever the statistics say by then."""
    monkeypatch.setattr("saev_store.loaders._identity._MAX_EXAMPLES", 64)
    plain = plain_store(tmp_path, n=90, tokens=7, per_shard=50, d_model=16)
    first = make(plain, "shuffled", scale_norm=True)
    assert first.store.stats(sample=64, seed=0).is_sample  # what lies beside the store now
    assert first.scale == first.store.stats(sample=64, seed=0).scale(5, "content")
    assert (plain.path / "stats.json").exists()
    iterator = iter(first)
    next(iterator)
    state = json.loads(json.dumps(first.state_dict()))
    rest = acts(iterator)
    first.store.stats(refresh=True)  # of all examples now: a slightly different mean
    other = make(plain, "shuffled", scale_norm=True)
    assert other.scale != first.scale
    assert other.scale == first.store.stats().scale(5, "content")
    other.load_state_dict(state)
    assert other.scale == first.scale
    assert same(acts(other), rest)
    with pytest.raises(ArgumentError, match="scale"):
        make(plain, "shuffled").load_state_dict(state)
    with pytest.raises(ArgumentError, match="scale"):
        make(plain, "shuffled", scale_norm=True).load_state_dict(make(plain, "shuffled").state_dict())
