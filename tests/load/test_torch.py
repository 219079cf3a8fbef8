"""Loaders for PyTorch: tensors, devices with late copies, normalisation, datasets, workers, states."""

from __future__ import annotations

import json
import math
import os
import pickle
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np
import pytest

torch = pytest.importorskip("torch")
from token_stores import token_store
from torch.utils.data import DataLoader

from saev_store import ShardStore, new_metadata, pair
from saev_store.errors import ArgumentError, CorruptShardError, SelectionError
from saev_store.loaders import Loader
from saev_store.torch import BatchDataset, ExampleBatch, StoreDataset, StoreLoader, StoreOptions
from saev_store.torch.device import Copies, copies_to, memory_for, moved

LAYERS, N, TOKENS, D = (3, 7), 17, 5, 8


@pytest.fixture(scope="module")
def path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A store whose vectors begin with example and token; two hook points of one layer, and labels."""
    metadata = new_metadata(
        family="gpt2", ckpt="x", layers=list(LAYERS), content_tokens_per_example=TOKENS, cls_token=True, d_model=D, n_examples=N,
        max_tokens_per_shard=4 * (TOKENS + 1) * len(LAYERS), token_arrays={"token_ids": "int32", "labels": "uint8"},
    )  # fmt: skip
    acts = np.random.default_rng(0).standard_normal(metadata.layout.shape, dtype=np.float32) * 3 + 1
    acts[..., 0], acts[..., 1] = np.arange(N)[:, None, None], np.arange(-1, TOKENS)
    root = tmp_path_factory.mktemp("torch")
    ids = np.arange(N * TOKENS, dtype=np.int32).reshape(N, TOKENS)
    with ShardStore.create(root, metadata, progress=False) as writer:
        writer.append(acts, token_ids=ids, labels=(ids % 3).astype(np.uint8))
    return root / metadata.hash


def make(path: object, **options: object) -> StoreLoader:
    given = {"batch_size": 4, "window_bytes": 2 * 3 * 4 * D * 4, "early_start": False, "n_partitions": 1}
    if isinstance(path, (Path, str, ShardStore)):
        given["layer"] = 3
    return StoreLoader(path, **(given | options))


def rows_of(batches: Iterator[ExampleBatch]) -> list[list[int]]:
    return [row for batch in batches for row in batch["act"][:, :2].long().tolist()]


def test_loader_of_any_source_has_the_batches_of_the_numpy_loader(path: Path) -> None:
    store = ShardStore.open(str(path))
    rows = store.sel(layer=3, tokens="content")
    with Loader(
        rows, batch_size=4, window_bytes=2 * 3 * 4 * D * 4, early_start=False, n_partitions=1, labels=True
    ) as plain:
        expected = list(plain)
    for source in (path, str(path), store, rows):
        loader = make(source, token_arrays=["token_ids"])
        assert (len(loader), loader.n_samples, loader.d_model) == (22, 85, D)
        for batch, other in zip(loader, expected, strict=True):
            assert set(batch) == {"act", "example_idx", "token_idx", "token_ids", "token_labels"}
            assert batch["token_labels"].dtype == torch.int64 and batch["token_ids"].dtype == torch.int32
            for name in other:
                np.testing.assert_array_equal(batch[name].numpy(), other[name])
            assert batch["image_i"] is batch["example_idx"]
        assert loader.epoch == 1
        with pytest.raises(KeyError):
            batch["patch"]
    both = pair(store, store).sel(layer_a=3, layer_b=(7, 3))
    (batch, *_) = list(make(both))
    assert torch.equal(batch["act_b"][:, 1], batch["act_a"])
    assert make(path, order="stored").explain().mixing is None


def test_sixteen_bits_are_tensors_of_sixteen_bits(tmp_path: Path) -> None:
    for stored in ("bfloat16", "float16"):
        made = token_store(tmp_path / stored, dtype=stored, n=5)
        loader = StoreLoader(made.path, layer=2, dtype="stored", batch_size=4, masked=True)
        for batch in loader:
            assert batch["act"].dtype == getattr(torch, stored)
            expected = made.acts[batch["example_idx"].numpy(), 0, batch["token_idx"].numpy() + 1]
            assert batch["act"].view(torch.int16).numpy().tobytes() == expected.tobytes()


class LateCopies(Copies):
    """Copies as a GPU makes them: a batch is copied long after `start` returned, from memory that must still hold it."""

    def __init__(self) -> None:
        super().__init__(torch.device("cpu"))
        self.queue: list[tuple[ExampleBatch, ExampleBatch, list[bool]]] = []

    def start(self, batch: ExampleBatch) -> tuple[ExampleBatch, Callable[[], bool]]:
        there = ExampleBatch({name: torch.full_like(value, -9) for name, value in batch.items()})
        done: list[bool] = []
        # A GPU reads the memory by its address, and does not keep the tensor.
        source = ExampleBatch({name: torch.from_dlpack(value).data for name, value in batch.items()})
        self.queue.append((source, there, done))
        if len(self.queue) > 3:
            self._copy()
        return there, lambda: bool(done)

    def _copy(self) -> None:
        source, there, done = self.queue.pop(0)
        for name, value in there.items():
            value.copy_(source[name])
        done.append(True)

    def ready(self, batch: ExampleBatch) -> None:
        while any(there is batch for _, there, _ in self.queue):
            self._copy()

    def wait(self) -> None:
        while self.queue:
            self._copy()


def test_batches_of_late_copies_are_right_over_many_pools(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Also where a loop is left, and its state says what was handed out."""
    expected = [batch["act"].clone() for batch in make(path)]
    monkeypatch.setattr("saev_store.torch.loader.copies_to", lambda device: LateCopies())
    loader = make(path)
    for _ in range(3):
        batches = iter(loader)
        for number in range(5):
            assert torch.equal(next(batches)["act"], expected[number])
        assert loader.place == (0, 5) and loader.state_dict()["batch"] == 5
    state = loader.state_dict()
    other = make(path)
    other.load_state_dict(state)
    assert all(torch.equal(batch["act"], one) for batch, one in zip(other, expected[5:], strict=True))
    found = [batch["act"] for batch in loader]
    assert all(torch.equal(act, one) for act, one in zip(found, expected, strict=True)) and loader.epoch == 1
    batches = iter(loader)
    for _ in range(22):
        next(batches)
    assert loader.epoch == 2
    left = iter(loader)
    for _ in range(21):  # the last batch was copied, and not handed out
        next(left)
    assert loader.place == (2, 21)
    assert rows_of(iter(loader)) == rows_of(iter(pickle.loads(pickle.dumps(make_at(path, 2)))))


def make_at(path: Path, epoch: int) -> StoreLoader:
    loader = make(path)
    loader.set_epoch(epoch)
    return loader


def test_devices_that_are_not_here_are_refused() -> None:
    for device in ("nothing", "cuda" if not torch.cuda.is_available() else "nothing", "xpu"):
        with pytest.raises(ArgumentError) as caught:
            copies_to(device)
        assert caught.value.where == "device"
    copies = copies_to("meta")
    assert copies is not None and copies_to("cpu") is None
    batches = moved(iter([ExampleBatch(act=torch.zeros(2))] * 3), copies)
    assert [batch["act"].device.type for batch in batches] == ["meta"] * 3
    assert memory_for("cpu")(8).nbytes == 8


def test_normalize_is_what_numpy_makes_of_the_sample(path: Path) -> None:
    """All rows are in the sample of a small store."""
    store = ShardStore.open(str(path))
    acts = store[:, :, 1:].astype(np.float64)
    for layer, positions in ((3, [0]), ((7, 3), [1, 0])):
        for stacked in (False, True):
            for kind in ("scale_norm_per_layer", "center", "center_and_scale_norm"):
                loader = make(path, layer=layer, stack_layers=stacked, normalize=kind, dtype="float32")
                means, scales = [], []
                for position in positions:
                    vectors = acts[:, position].reshape(-1, D)
                    mean = vectors.mean(0) if kind.startswith("center") else np.zeros(D)
                    norm = np.linalg.norm(vectors - mean, axis=1).mean()
                    means.append(mean)
                    scales.append(math.sqrt(D) / norm if "scale" in kind else 1.0)
                how = loader.normalization["act"]
                np.testing.assert_allclose(how.mean.numpy(), means, rtol=1e-5)
                np.testing.assert_allclose(how.scale.numpy(), scales, rtol=1e-5)
                for batch in loader:
                    example, token = batch["example_idx"].numpy(), batch["token_idx"].numpy()
                    if stacked:
                        raw = acts[example[:, None], positions, token[:, None]]
                        expected = (raw - np.array(means)) * np.array(scales)[:, None]
                    else:
                        at = (
                            [positions.index(LAYERS.index(one)) for one in batch["layer"].tolist()]
                            if "layer" in batch
                            else [0] * len(example)
                        )
                        raw = acts[example, [positions[one] for one in at], token]
                        expected = (raw - np.array(means)[at]) * np.array(scales)[at][:, None]
                    np.testing.assert_allclose(batch["act"].numpy(), expected, rtol=1e-4, atol=1e-5)
    rounded = make(path, normalize="center", dtype="bfloat16")
    exact = make(path, normalize="center")
    for one, other in zip(rounded, exact, strict=True):
        assert torch.equal(one["act"], other["act"].to(torch.bfloat16))
    both = make(pair(store, store).sel(layer_a=3, layer_b=7), normalize="center")
    assert sorted(both.normalization) == ["act_a", "act_b"] and len(list(both)) == 22


def test_scale_norm_multiplies_by_one_factor_that_a_state_keeps(path: Path) -> None:
    store = ShardStore.open(str(path))
    exact = [batch["act"].clone() for batch in make(path)]
    norm = np.linalg.norm(store[:, 0, 1:].astype(np.float64), axis=-1).mean()
    for source, options in (
        (path, {"scale_norm": True}),
        (path, {"normalize": "scale_norm"}),
        (store.sel(layer=3, tokens="content"), {"scale_norm": True}),
    ):
        loader = make(source, **options)
        assert loader.scale == pytest.approx(math.sqrt(D) / norm, rel=1e-4)
        for batch, one in zip(loader, exact, strict=True):
            assert torch.equal(batch["act"], one * loader.scale)
    assert make(path, normalize="center").scale is None
    fixed = make(path, scale_norm=2.0)
    assert fixed.scale == 2.0 and make(path).scale is None and make(path).normalization is None
    state = json.loads(json.dumps(fixed.state_dict()))
    assert len(json.dumps(state)) < 2048
    make(path, scale_norm=2.0).load_state_dict(state)
    for other in (make(path), make(path, normalize="center"), make(path, scale_norm=True), make(path, scale_norm=3.0)):
        with pytest.raises(ArgumentError):
            other.load_state_dict(state)
    for junk in ([], None, {**state, "framework_epoch": -1}, {**state, "normalize": np.arange(3)}):
        with pytest.raises(ArgumentError):
            fixed.load_state_dict(junk)
    masked = make(path, scale_norm=True, ignore_labels=[1])
    assert masked.scale is not None
    both = make(pair(store, store).sel(layer_a=3, layer_b=7), scale_norm=True)
    assert sorted(both.scale) == ["act_a", "act_b"] and len(list(both)) == 22


def test_options_that_make_no_sense_are_refused(path: Path) -> None:
    rows = ShardStore.open(str(path)).sel(layer=3)
    for call, where in (
        (lambda: make(path, normalize="all"), "normalize"), (lambda: make(path, normalize="center", scale_norm=True), "normalize"),
        (lambda: make(path, scale_norm=-1.0), "scale_norm"), (lambda: make(path, layers=3), "layers"),
        (lambda: make(rows, layer=3), "layer"), (lambda: make(rows, tokens="all"), "tokens"), (lambda: make(3), "source"),
        (lambda: StoreLoader(path, 3), "options"), (lambda: make(path, use_tmpdir=1), "use_tmpdir"),
        (lambda: make(path, normalize="center", examples=[]).normalization, "normalize"),
        (lambda: StoreDataset(path, tokens="content", layre=3), "layre"),
        (lambda: StoreDataset(pair(*[ShardStore.open(str(path))] * 2).sel(layer_a=3, layer_b=3)), "source"),
        (lambda: StoreDataset(path, token_arrays=["nothing"]), "token_arrays"),
        (lambda: StoreDataset(path, token_arrays=None), "token_arrays"),
        (lambda: make(rows, examples=np.arange(3)), "examples"), (lambda: make(path, device=None), "device"),
    ):  # fmt: skip
        with pytest.raises(ArgumentError) as caught:
            call()
        assert caught.value.where == where
    assert StoreOptions(scale_norm=True).does == "scale_norm" and StoreOptions().labels


def test_tmpdir_holds_what_is_read(path: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TMPDIR", str(tmp_path))
    near = make(path, use_tmpdir=True, remove_bos=True)
    assert Path(near.store.url).parents[1] == tmp_path
    state = make(path).state_dict()
    near.load_state_dict(state)
    assert rows_of(near) == rows_of(make(path))
    with pytest.raises(ArgumentError):
        make(ShardStore.open(str(path)), use_tmpdir=True)
    monkeypatch.delenv("TMPDIR")
    assert make(path, use_tmpdir=True).store.url == str(path)


def test_dataset_has_the_rows_of_the_selection(path: Path) -> None:
    store = ShardStore.open(str(path))
    for options in (
        {"layer": 3},
        {"layer": (7, 3)},
        {"layer": "all", "stack_layers": True},
        {"layer": 3, "tokens": "all", "ignore_labels": np.array([0, 1])},
    ):
        dataset = StoreDataset(store, token_arrays=["token_ids"], **options)
        rows = store.sel(**({"tokens": "content"} | options))
        assert len(dataset) == len(rows)
        numbers = np.random.default_rng(0).permutation(len(rows))
        batch, where = dataset.batch(numbers), rows.coordinates(numbers)
        np.testing.assert_array_equal(batch["act"].numpy(), rows.rows(numbers))
        np.testing.assert_array_equal(batch["example_idx"].numpy(), where.example_idx)
        np.testing.assert_array_equal(batch["token_idx"].numpy(), where.token_idx)
        if "layer" in batch:
            np.testing.assert_array_equal(batch["layer"].numpy(), where.layer)
        one = dataset[5]
        assert torch.equal(one["act"], torch.from_numpy(rows[5])) and isinstance(one["example_idx"], int)
        loader = DataLoader(pickle.loads(pickle.dumps(dataset)), batch_size=7, num_workers=1)
        batches = list(loader)
        assert torch.equal(torch.cat([b["act"] for b in batches]), torch.from_numpy(rows.rows(slice(None))))
        assert "token_label" in batches[0]
        assert len(dataset.batch([])["act"]) == 0
    for index in ([len(dataset)], [-1], [1.0], np.ones(3, bool), [2**64], [[0], [0, 1]]):
        with pytest.raises(SelectionError):
            dataset.batch(index)
    with pytest.raises(IndexError):
        dataset[len(dataset)]


def test_workers_of_a_data_loader_go_through_the_epochs(path: Path) -> None:
    """A worker for each epoch, and one that is kept."""
    expected = [rows_of(make_at(path, epoch)) for epoch in range(5)]
    for kept in (False, True):
        loader = make(path)
        dataset = loader.as_iterable_dataset()
        assert isinstance(dataset, BatchDataset) and len(dataset) == 22
        worked = DataLoader(dataset, batch_size=None, num_workers=1, persistent_workers=kept)
        assert [rows_of(worked) for _ in range(3)] == expected[:3]
        loader.set_epoch(4)
        assert rows_of(worked) == expected[4]
        state = make_at(path, 1).state_dict()
        loader.load_state_dict({**state, "batch": 5})
        assert rows_of(worked) == expected[1][20:]
    assert rows_of(DataLoader(make(path).as_iterable_dataset(), batch_size=None)) == expected[0]
    with pytest.raises(ArgumentError):
        list(DataLoader(make(path).as_iterable_dataset(), batch_size=None, num_workers=2))
    alone = make(path).as_iterable_dataset()
    alone.load_state_dict({**alone.state_dict(), "batch": 3})
    assert rows_of(alone) == expected[0][12:]


def test_epochs_follow_a_framework_that_counts_them(path: Path) -> None:
    """Each new number gives other rows, even if the loop is left early, and after a state."""
    expected = [rows_of(make_at(path, epoch)) for epoch in range(6)]
    loader = make(path)

    def part(epoch: int, n: int | None) -> list[list[int]]:
        loader.sampler.set_epoch(epoch)
        batches = iter(loader)
        return rows_of(batches if n is None else (next(batches) for _ in range(n)))

    assert part(0, 3) == expected[0][:12]
    assert part(1, 3) == expected[1][:12]
    assert part(1, 2) == expected[1][:8]
    state = loader.state_dict()
    assert state["framework_epoch"] == 1
    loader = make(path)
    loader.load_state_dict(state)
    assert part(2, None) == expected[2]
    assert part(3, None) == expected[3]
    fresh = loader = make(path)
    assert part(4, 1) == expected[4][:4] and fresh.batch_sampler is None
    same = make(path)
    same.load_state_dict({**state, "batch": 2})
    same.begin_epoch(1)
    assert same.place == (1, 2)


def test_an_epoch_is_chosen_after_one_that_failed_before_its_first_batch(path: Path, tmp_path: Path) -> None:
    copy = shutil.copytree(path, tmp_path / path.name)
    loader = make(copy)
    assert len(list(loader)) == len(loader)
    for shard in copy.glob("acts*.bin"):
        os.truncate(shard, 0)
    with pytest.raises(CorruptShardError):
        next(iter(loader))
    loader.begin_epoch(5)
    assert loader.place == (5, 0)


def test_pickled_loader_is_at_the_same_place(path: Path) -> None:
    loader = make(path)
    batches = iter(loader)
    next(batches)
    again = pickle.loads(pickle.dumps(loader))
    assert again.place == (0, 1)
    with loader, again:
        assert rows_of(again) == rows_of(batches)


def test_vectors_of_sixteen_bits_and_of_hook_points_are_normalized(tmp_path: Path) -> None:
    metadata = new_metadata(
        family="x", ckpt="x", layers=[5, 5], hook_points=["pre", "post"], content_tokens_per_example=4, cls_token=False, d_model=D,
        n_examples=6, dtype="bfloat16",
    )  # fmt: skip
    acts = np.random.default_rng(0).standard_normal((6, 2, 4, D), dtype=np.float32) + np.array([0, 5])[:, None, None]
    with ShardStore.create(tmp_path, metadata, progress=False) as writer:
        writer.append(acts.astype(np.float32))
    store = ShardStore.open(str(tmp_path / metadata.hash))
    for dtype in ("stored", "float32"):
        for batch in StoreLoader(store, normalize="center", dtype=dtype, batch_size=16):
            layer = batch["layer_key_idx"].numpy()
            stored = store[:, :].astype(np.float64)
            expected = stored[batch["example_idx"].numpy(), layer, batch["token_idx"].numpy()]
            expected = expected - stored.mean((0, 2))[layer]
            np.testing.assert_allclose(batch["act"].float().numpy(), expected, atol=0.05)


def test_vectors_without_a_norm_have_no_scale(tmp_path: Path) -> None:
    metadata = new_metadata(
        family="x", ckpt="x", layers=[5], content_tokens_per_example=4, cls_token=False, d_model=D, n_examples=3
    )
    with ShardStore.create(tmp_path, metadata, progress=False) as writer:
        writer.append(np.zeros((3, 1, 4, D), np.float32))
    for options in ({"scale_norm": True}, {"normalize": "center_and_scale_norm"}):
        with pytest.raises(ArgumentError) as caught:
            next(iter(StoreLoader(tmp_path / metadata.hash, **options)))
        assert caught.value.where == "normalize"


def test_ranks_are_those_of_torch_distributed(path: Path) -> None:
    torch.distributed.init_process_group("gloo", store=torch.distributed.HashStore(), rank=0, world_size=1)
    try:
        loader = make(path)
        assert (loader.rank, loader.world) == (0, 1)
    finally:
        torch.distributed.destroy_process_group()


def test_iterator_of_an_earlier_iteration_is_refused(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for late in (False, True):
        if late:
            monkeypatch.setattr("saev_store.torch.loader.copies_to", lambda device: LateCopies())
        loader = make(path)
        stale = iter(loader)
        next(stale)
        later = iter(loader)
        next(later)
        with pytest.raises(ArgumentError):
            next(stale)
        assert loader.place == (0, 1) and len(list(later)) == 21


@pytest.mark.parametrize("late", [False, True])
def test_loader_may_be_moved_at_its_last_batch(path: Path, late: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    if late:
        monkeypatch.setattr("saev_store.torch.loader.copies_to", lambda device: LateCopies())
    loader = make(path)
    for move in (loader.close, lambda: loader.set_epoch(5), lambda: loader.load_state_dict(loader.state_dict())):
        for _ in loader:
            if loader.place[1] == 0:
                move()
    assert loader.place == (6, 0)
