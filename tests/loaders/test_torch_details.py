"""Edges of the torch loaders that other tests pass by."""

from __future__ import annotations

import multiprocessing
import signal
import threading

import numpy as np
import pytest
from plain_stores import plain_store
from waiting import HANG_S

from saev_store import ShardStore, new_metadata
from saev_store.errors import CorruptShardError

pytest.importorskip("torch")

from saev_store.loaders import OrderedLoader  # after the check that torch is there
from saev_store.torch import (
    ConfigError,
    IndexedConfig,
    IndexedDataset,
    OrderedConfig,
    OrderedDataLoader,
    ShuffledConfig,
    ShuffledDataLoader,
    indexed,
)


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


@pytest.mark.parametrize("stack_layers", [False, True])
def test_large_batches_by_number_may_be_of_any_sizes(tmp_path, monkeypatch, stack_layers):
    """Memory of a batch is used again for one that it is large enough for; a batch that is kept stays as it is."""
    monkeypatch.setattr(indexed, "_MIN_ROWS_PER_THREAD", 4)
    plain = plain_store(tmp_path, n=24, tokens=4)
    dataset = IndexedDataset(IndexedConfig(shards=plain.path, layer=(2, 5), stack_layers=stack_layers))
    rows = plain.acts[:, :2, 1:]  # (example, layer, token, d_model)
    rows = rows.swapaxes(1, 2).reshape(-1, 2, 8) if stack_layers else rows.reshape(-1, 8)
    kept = []
    for size in (8, 31, 5, 96, 4, 33, 3):
        numbers = np.arange(size)[::-1] * 96 // size
        kept.append((numbers, dataset.batch(numbers)["act"]))
    for numbers, act in kept:
        assert np.array_equal(act.numpy(), rows[numbers])
    dataset.close()


def test_a_state_taken_after_set_epoch_is_of_that_epoch(tmp_path):
    plain = plain_store(tmp_path, n=24, tokens=4)
    loader = ShuffledDataLoader(ShuffledConfig(shards=plain.path, layer=5, batch_size=8))
    next(iter(loader))
    loader.set_epoch(3)
    state = loader.state_dict()
    assert (state["epoch"], state["batch"], loader.epoch) == (3, 0, 3)


def test_a_state_taken_where_an_iteration_begins_again_is_of_its_beginning(tmp_path):
    plain = plain_store(tmp_path, n=24, tokens=4)
    loader = OrderedDataLoader(OrderedConfig(shards=plain.path, layer=5, batch_size=8))
    first = [batch["example_idx"].tolist() for batch, _ in zip(loader, range(3), strict=False)]
    assert loader.state_dict()["batch"] > 0
    again = iter(loader)
    state = loader.state_dict()
    assert (state["epoch"], state["batch"]) == (0, 0)
    assert next(again)["example_idx"].tolist() == first[0]


@pytest.mark.parametrize("kind", ["ordered", "shuffled"])
@pytest.mark.parametrize(
    ("options", "n_ready"),
    [
        ({"buffer_size": 5}, 5),
        ({"buffer_size": 5, "buffer_bytes": 3 * 8 * 64}, 3),
        ({"buffer_size": 5, "buffer_bytes": 3 * 8 * 64 - 1}, 2),
        ({"buffer_size": 2, "buffer_bytes": 3 * 8 * 64}, 2),
        ({"buffer_size": 5, "buffer_bytes": 1}, 1),  # one batch at a time is the least
        ({"buffer_size": 5, "buffer_bytes": 3 * 8 * 64, "prefetch_batches": 4}, 4),
    ],
)
def test_so_many_batches_wait_as_have_room(tmp_path, kind, options, n_ready):
    plain = plain_store(tmp_path, n=24, tokens=4, d_model=16)
    make, config = {
        "ordered": (OrderedDataLoader, OrderedConfig),
        "shuffled": (ShuffledDataLoader, ShuffledConfig),
    }[kind]
    options = {"window_bytes": 1 << 20, **options} if kind == "shuffled" else options
    found = make(config(shards=plain.path, layer=5, batch_size=8, **options)).explain()
    least = make(config(shards=plain.path, layer=5, batch_size=8, **{**options, "prefetch_batches": 1})).explain()
    assert found.buffer_bytes - least.buffer_bytes == (n_ready - 1) * 8 * 64


@pytest.mark.parametrize(("buffer_size", "n_batches"), [(8, 8), (31, 31), (32, 32), (33, 32), (1000, 32)])
def test_a_window_holds_as_many_batches_as_are_asked_for_up_to_a_limit(tmp_path, monkeypatch, buffer_size, n_batches):
    monkeypatch.setattr("saev_store.torch.loaders.WINDOW_BYTES", 32 * 8 * 64)
    plain = plain_store(tmp_path, n=240, tokens=4, d_model=16)

    def window_bytes(**more: object) -> int:
        options = {"layer": 5, "batch_size": 8, "prefetch_batches": 2, "buffer_size": buffer_size, **more}
        return ShuffledDataLoader(ShuffledConfig(shards=plain.path, **options)).explain().window_bytes

    assert window_bytes() == window_bytes(window_bytes=n_batches * 8 * 64)
    assert window_bytes() < window_bytes(window_bytes=2 * n_batches * 8 * 64)


@pytest.mark.parametrize(
    "chosen", [slice(1, 5), slice(None, None, 2), slice(-3, None), slice(4, 1, -2), slice(5, 99), slice(3, 3)], ids=str
)
def test_a_gathered_batch_is_sliced_like_a_list(tmp_path, chosen):
    plain = plain_store(tmp_path, n=24, tokens=4)
    dataset = IndexedDataset(IndexedConfig(shards=plain.path, layer=5))
    numbers = [7, 3, 3, 50, 0, 11, 95]
    found = dataset.__getitems__(numbers)[chosen]
    assert [(int(one["example_idx"]), int(one["token_idx"])) for one in found] == [
        divmod(i, 4) for i in numbers[chosen]
    ]
    for one in found:
        np.testing.assert_array_equal(one["act"].numpy(), plain.acts[one["example_idx"], 1, one["token_idx"] + 1])


def test_batches_grow_and_errors_of_gathering_threads_are_raised(tmp_path, monkeypatch):
    plain = plain_store(tmp_path, n=500, tokens=4)
    with_threads = IndexedDataset(IndexedConfig(shards=plain.path, layer=5))
    with_threads._n_threads = 2
    for n_rows in (600, 1500, 700, 2000):
        picked = np.random.default_rng(n_rows).integers(0, 2000, n_rows)
        found = with_threads.batch(picked)["act"].numpy()
        np.testing.assert_array_equal(found, plain.acts[picked // 4, 1, picked % 4 + 1])
    rows = with_threads.rows.rows

    def fail(picked, out):
        if threading.current_thread() is not threading.main_thread():
            raise CorruptShardError("the shard was cut")
        return rows(picked, out=out)

    monkeypatch.setattr(type(with_threads.rows), "rows", lambda _self, picked, out: fail(picked, out))
    with pytest.raises(CorruptShardError, match="was cut"):
        with_threads.batch(np.arange(1500))
    with_threads.close()


@pytest.mark.filterwarnings("ignore:.*multi-threaded.*fork:DeprecationWarning")
def test_a_forked_child_gathers_with_threads_of_its_own(tmp_path):
    """Those of the parent, which had been started, do not exist there."""
    plain = plain_store(tmp_path, n=400, tokens=4)
    dataset = IndexedDataset(IndexedConfig(shards=plain.path, layer=5))
    dataset._n_threads = 3
    picked = np.random.default_rng(0).permutation(len(dataset))
    gathered = dataset.batch(picked)["act"]
    np.testing.assert_array_equal(gathered.numpy(), plain.acts[picked // 4, 1, picked % 4 + 1])
    assert dataset._pool is not None
    child = multiprocessing.get_context("fork").Process(target=_gather, args=(dataset, picked, gathered.numpy()))
    child.start()
    child.join(HANG_S)
    is_alive = child.is_alive()
    child.kill()
    assert not is_alive
    assert child.exitcode == 0
    dataset.close()


def _gather(dataset: IndexedDataset, picked: np.ndarray, expected: np.ndarray) -> None:
    signal.alarm(30)  # ends a child that waits for threads which do not exist
    np.testing.assert_array_equal(dataset.batch(picked)["act"].numpy(), expected)


def test_one_example_of_a_config_is_the_example_of_that_number():
    assert OrderedConfig(examples=3).examples == OrderedConfig(examples=np.int64(3)).examples == (3,)
    for junk in (1.5, object(), ..., float("nan"), True, False, np.True_):  # a boolean is no position
        with pytest.raises(ConfigError, match="examples"):
            OrderedConfig(examples=junk)


@pytest.mark.parametrize("config", [IndexedConfig, OrderedConfig, ShuffledConfig])
@pytest.mark.parametrize("junk", [True, False, np.True_, (5, True), [np.False_]], ids=repr)
def test_a_boolean_is_no_layer(config, junk):
    """`layer=True` would be layer 1: vectors that nobody asked for."""
    with pytest.raises(ConfigError, match="label of a layer"):
        config(layer=junk)
    assert config(layer=[5, (5, "attn_out")]).layer == (5, (5, "attn_out"))


def test_stored_half_precision_keeps_the_bits_of_every_nan(tmp_path):
    """PyTorch, which converts float16 where it is imported, sets the quiet bit of signalling NaNs; `stored` converts nothing."""
    bits = np.arange(1 << 16, dtype="<u2").reshape(1024, 1, 4, 16)
    metadata = new_metadata(
        family="gpt2", ckpt="x", layers=[5], content_tokens_per_example=4, cls_token=False, d_model=16, n_examples=1024,
        max_tokens_per_shard=1000, dtype="float16",
    )  # fmt: skip
    with ShardStore.create(tmp_path, metadata, on_nonfinite="allow", progress=False) as writer:
        writer.append(bits.view("<f2"))
    path, rows = tmp_path / metadata.hash, bits.reshape(-1, 16)
    store = ShardStore.open(path)
    options = {"shards": path, "layer": 5, "dtype": "stored"}
    read = [store.read(dtype="stored").reshape(-1, 16), store.sel(dtype="stored").rows(slice(None))]
    indexed = IndexedDataset(IndexedConfig(**options))
    read.append(indexed.batch(range(len(rows)))["act"].numpy())
    for cls, config, more in (
        (OrderedDataLoader, OrderedConfig, {}),
        (ShuffledDataLoader, ShuffledConfig, {}),
        (ShuffledDataLoader, ShuffledConfig, {"window_device": "cpu"}),
    ):
        with cls(config(**options, batch_size=512, **more)) as loader:
            found = np.empty_like(rows)
            for batch in loader:
                found[batch["example_idx"].numpy() * 4 + batch["token_idx"].numpy()] = batch["act"].numpy().view("<u2")
        read.append(found)
    for found in read:
        assert np.array_equal(found.view("<u2"), rows)
    # Converted, every number is exact, and every NaN is a NaN of the same sign and payload, but for the quiet bit.
    wide, numbers = store.read().reshape(-1), bits.reshape(-1)
    is_nan = (numbers & 0x7FFF) > 0x7C00
    assert np.array_equal(wide[~is_nan], numbers[~is_nan].view("<f2").astype(np.float32))
    expected = (
        ((numbers[is_nan] & 0x8000).astype("<u4") << 16) | 0x7F800000 | ((numbers[is_nan] & 0x3FF).astype("<u4") << 13)
    )
    assert np.array_equal(wide[is_nan].view("<u4") | 0x400000, expected | 0x400000)


@pytest.mark.parametrize("options", ["AKIA-hush", ["AKIA-hush"], {"key": "AKIA-hush", 3: "AKIA-hush"}])
@pytest.mark.parametrize("config", [IndexedConfig, OrderedConfig, ShuffledConfig])
def test_options_of_file_systems_are_not_shown_where_they_are_refused(config, options):
    with pytest.raises(ConfigError, match="storage_options; it must be") as caught:
        config(storage_options=options)
    assert "hush" not in str(caught.value)
