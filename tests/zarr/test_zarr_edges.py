"""Edges of the Zarr view: labels in several chunks, keys that look like others, what is left of damaged shards."""

from __future__ import annotations

import os
import pickle
import warnings
from pathlib import Path

import numpy as np
import pytest
import zarr
from api import MemoryTransport
from dense_stores import plain_store
from transports import CountingTransport, LatencyTransport
from zarr.abc.store import OffsetByteRequest, RangeByteRequest
from zarr.core.sync import sync

from saev_store import SaevStoreWarning, ShardStore, new_metadata
from saev_store.core.chunk_grid import ChunkGrid
from saev_store.core.layout import Layout
from saev_store.core.token_arrays import LABELS
from saev_store.errors import ArgumentError, CorruptShardError
from saev_store.transport import Transport
from saev_store.zarr import TensorKeys, ZarrView, _keys

LAYOUT = Layout(7, (2, 5, 11), 4, True, 8, 3)


def opened(transport: Transport, **options: object) -> ShardStore:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", SaevStoreWarning)  # what is in memory has no name
        return ShardStore.open(transport, **options)


@pytest.mark.parametrize(
    ("chunk_nbytes", "per_shard", "rows"),
    [(1, 3, 1), (3, 3, 1), (4, 3, 1), (7, 3, 1), (8, 3, 2), (11, 3, 2), (12, 3, 3), (1 << 20, 3, 3), (1 << 20, 100, 7)],
)
@pytest.mark.parametrize("is_far", [False, True])
def test_labels_in_chunks_of_any_size(
    chunk_nbytes: int, per_shard: int, rows: int, is_far: bool, monkeypatch: pytest.MonkeyPatch
):
    """At most as large as is said, never across what a shard holds, and never longer than the array."""
    monkeypatch.setattr(_keys, "_TOKEN_CHUNK_BYTES", chunk_nbytes)
    plain = plain_store(Layout(7, (2, 5), 4, True, 8, per_shard), labelled=True)
    transport: Transport = MemoryTransport(plain.files)
    view = opened(LatencyTransport(transport, 0.0, 1e6) if is_far else transport).as_zarr()
    labels = zarr.open_group(view, mode="r")["labels"]
    assert labels.chunks == (rows, 4)
    assert np.array_equal(labels[...], plain.labels)
    n_chunks = -(-7 // rows)
    assert sorted(view.keys.below("labels/c/")) == [f"labels/c/{i}/0" for i in range(n_chunks)]
    for i in range(n_chunks):
        value = view.get_sync(f"labels/c/{i}/0").to_bytes()
        assert value == plain.labels[i * rows : (i + 1) * rows].tobytes().ljust(rows * 4, b"\0")
    assert view.get_sync(f"labels/c/{n_chunks}/0") is None


@pytest.mark.parametrize(
    "key",
    ["activations/x/0/0/0/0", "activations//0/0/0/0", "activations/zarr.json/0/0/0/0", "layer/d/0", "labels/C/0/0"],
)
def test_only_the_folder_of_chunks_has_chunks(key: str):
    view = opened(MemoryTransport(plain_store(LAYOUT, labelled=True).files)).as_zarr(chunks=(1, 1, 5, 8))
    assert view.get_sync(key) is None
    assert not sync(view.exists(key))
    with pytest.raises(FileNotFoundError):
        sync(view.getsize(key))


@pytest.mark.parametrize("chunks", [(True, 3, 5, 8), (1, True, 5, 8), (1.0, 3, 5, 8), ("1", 3, 5, 8), (None, 3, 5, 8)])
def test_a_length_of_a_chunk_is_an_integer(chunks: tuple[object, ...]):
    with pytest.raises(ArgumentError, match="chunk"):
        opened(MemoryTransport(plain_store(LAYOUT).files)).as_zarr(chunks=chunks)


@pytest.mark.parametrize("engine", ["mmap", "pread"])
def test_every_whole_example_that_is_left_can_be_read(engine: str, tmp_path: Path):
    """To its last layer, and nothing behind it."""
    plain = plain_store(LAYOUT)
    folder = plain.write(tmp_path)
    for n_left, more in ((2, 0), (2, 7), (1, -1 + LAYOUT.example_nbytes)):
        os.truncate(folder / "acts000001.bin", n_left * LAYOUT.example_nbytes + more)
        store = ShardStore.open(folder, engine=engine, damaged_ok=True)
        array = zarr.open_group(store.as_zarr(chunks=(1, 1, 5, 8)), mode="r")["activations"]
        assert np.asarray(array[3 : 3 + n_left]).tobytes() == plain.dense[3 : 3 + n_left].tobytes()
        for key in (np.s_[3 + n_left], np.s_[3 + n_left, 0], np.s_[5, 2]):
            with pytest.raises(CorruptShardError, match=r"acts000001\.bin"):
                array[key]


def test_nothing_of_what_was_lost_may_be_asked_for_by_an_empty_range(tmp_path: Path):
    folder = plain_store(LAYOUT).write(tmp_path)
    os.truncate(folder / "acts000001.bin", 2 * LAYOUT.example_nbytes)
    view = ShardStore.open(folder, damaged_ok=True).as_zarr(chunks=(1, 1, 5, 8))
    key = "activations/c/5/0/0/0"
    assert view.get_sync(key, byte_range=RangeByteRequest(9, 9)).to_bytes() == b""
    with pytest.raises(CorruptShardError):
        view.get_sync(key, byte_range=RangeByteRequest(9, 10))


@pytest.mark.parametrize("engine", ["mmap", "pread"])
def test_a_range_ends_with_the_last_whole_example_that_is_left(engine: str, tmp_path: Path):
    """Although the file holds some bytes of the next one."""
    plain = plain_store(LAYOUT)
    folder, n = plain.write(tmp_path), 2 * LAYOUT.example_nbytes
    os.truncate(folder / "acts000001.bin", n + 7)
    view = ShardStore.open(folder, engine=engine, damaged_ok=True).as_zarr(chunks=(3, 3, 5, 8))
    key = "activations/c/1/0/0/0"
    for start in (0, 5, n - 1):
        found = view.get_sync(key, byte_range=RangeByteRequest(start, n))
        assert found.to_bytes() == plain.dense[3:5].tobytes()[start:]
        with pytest.raises(CorruptShardError):
            view.get_sync(key, byte_range=RangeByteRequest(start, n + 1))


def test_ranges_that_begin_behind_a_value_are_empty():
    view = opened(MemoryTransport(plain_store(LAYOUT).files)).as_zarr(chunks=(1, 1, 5, 8))
    for key in ("activations/c/2/0/0/0", "zarr.json", "layer/c/0"):
        n = len(view.get_sync(key).to_bytes())
        for behind in (n, n + 1, n + 1000):
            assert view.get_sync(key, byte_range=OffsetByteRequest(behind)).to_bytes() == b""
            assert view.get_sync(key, byte_range=RangeByteRequest(behind, behind + 5)).to_bytes() == b""


@pytest.mark.parametrize("tail", ["padded", "cut"])
def test_parts_of_the_last_chunk_that_are_in_the_file_need_no_size(tail: str):
    """A mapped last chunk is looked at whole only where its end is wanted; the answer is the same."""
    plain = plain_store(LAYOUT, tail=tail)
    counting = CountingTransport(MemoryTransport(plain.files, label=plain.name))
    view = ZarrView(counting, TensorKeys(ChunkGrid(LAYOUT, (3, 3, 5, 8)), {}, {}))
    value = plain.dense[6:].tobytes().ljust(3 * LAYOUT.example_nbytes, b"\0")
    for start, end in ((0, 10), (470, 480), (470, 481), (480, 490), (0, 1440), (1439, 1440)):
        sizes = counting.counters.operations.get("size", 0)
        found = view.get_sync("activations/c/2/0/0/0", byte_range=RangeByteRequest(start, end))
        assert found.to_bytes() == value[start:end]
        assert counting.counters.operations.get("size", 0) - sizes == (end > 480)


def test_a_pickled_view_is_equal_and_small():
    layout = Layout(3000, (0,), 1, False, 2, 3000)
    keys = TensorKeys(ChunkGrid(layout, (1, 1, 1, 2)), {"a": 1}, {})
    again = pickle.loads(pickle.dumps(keys))
    assert again == keys
    assert hash(again) == hash(keys)
    assert len(pickle.dumps(keys)) < 5000


def test_views_of_other_places_differ():
    files = plain_store(LAYOUT).files
    keys = TensorKeys(ChunkGrid(LAYOUT, (3, 3, 5, 8)), {}, {})
    one, same, other = (ZarrView(MemoryTransport(files, label=label), keys) for label in ("x", "x", "y"))
    assert one == same
    assert hash(one) == hash(same)
    assert one != other


def test_what_is_below_any_prefix():
    """As if all keys were looked through; what names no key or folder has nothing below it."""
    keys = TensorKeys(ChunkGrid(Layout(23, (0, 1), 3, True, 2, 2), (1, 1, 4, 2)), {}, {"labels": LABELS})
    every = list(keys.below(""))
    assert len(set(every)) == len(every)
    prefixes = {key[:n] for key in every for n in range(len(key) + 1)}
    prefixes |= {f"{key}{more}" for key in every[:40] for more in ("/", "/0", "/0/", "/0/0", "0", "x")}
    prefixes |= {
        "activations/c/00",
        "activations/c/-1/",
        "activations/c/99/",
        "activations/c/0//",
        "activations/d/",
        "x",
        "/",
    }
    for prefix in prefixes:
        assert sorted(keys.below(prefix)) == sorted(key for key in every if key.startswith(prefix)), prefix
        folder = prefix.rstrip("/")
        inside = {key.removeprefix(f"{folder}/").partition("/")[0] for key in every if key.startswith(f"{folder}/")}
        if folder:
            assert set(keys.children(folder)) == inside, folder
    assert set(keys.children("")) == {key.partition("/")[0] for key in every}


def hooked(root: Path, points: list[str] | None) -> ShardStore:
    metadata = new_metadata(
        family="gpt2", ckpt="x", layers=(5, 6, 7), hook_points=points, content_tokens_per_example=2, cls_token=False,
        d_model=4, n_examples=3,
    )  # fmt: skip
    with ShardStore.create(root, metadata, progress=False) as writer:
        writer.append(np.ones((3, 3, 2, 4), np.float32))
    return ShardStore.open(writer.url)


def test_hook_points_are_told_in_every_view(tmp_path: Path):
    points = ["mlp_out", "attn_out", "mlp_out"]
    with hooked(tmp_path, points) as store:
        assert zarr.open_group(store.as_zarr(), mode="r").attrs["hook_points"] == points
        dataset = store.as_xarray()
        assert (dataset.hook_point.dims, dataset.hook_point.values.tolist()) == (("layer",), points)
        assert "hook_points" not in dataset.attrs
    with hooked(tmp_path, None) as store:
        assert "hook_points" not in zarr.open_group(store.as_zarr(), mode="r").attrs
        assert "hook_point" not in store.as_xarray().variables


def test_a_token_array_with_the_name_of_the_coordinate_of_hook_points(tmp_path: Path):
    metadata = new_metadata(
        family="gpt2", ckpt="x", layers=(5, 5), hook_points=["attn_out", "resid_post"], content_tokens_per_example=2, cls_token=False,
        d_model=4, n_examples=3, protocol="3.0", token_arrays={"hook_point": "int32"},
    )  # fmt: skip
    values = np.arange(6, dtype=np.int32).reshape(3, 2)
    with ShardStore.create(tmp_path, metadata) as writer:
        writer.append(np.zeros((3, 2, 2, 4), np.float32), hook_point=values)
    store = ShardStore.open(tmp_path / metadata.hash)
    assert zarr.open_group(store.as_zarr(), mode="r")["tokens_hook_point"][...].tolist() == values.tolist()
    pytest.importorskip("xarray")
    dataset = store.as_xarray()
    assert dataset["tokens_hook_point"].values.tolist() == values.tolist()
    assert dataset["hook_point"].values.tolist() == ["attn_out", "resid_post"]


def test_other_hook_points_do_not_continue_a_repository(tmp_path: Path):
    pytest.importorskip("icechunk")
    pytest.importorskip("virtualizarr")
    first, *others = (["mlp_out"] * 3, ["mlp_out", "mlp_out", "attn_out"], None)
    hooked(tmp_path / "a", first).to_icechunk(str(tmp_path / "r"), chunks=(1, 3, 2, 4))
    for number, points in enumerate(others):
        store = hooked(tmp_path / str(number), points)
        with pytest.raises(ArgumentError, match="does not continue the repository; hook_points: ") as error:
            store.to_icechunk(str(tmp_path / "r"), append=True)
        assert error.value.message.endswith(f"hook_points: {first} in the repository, {points} here")
