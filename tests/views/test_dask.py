"""The dask array of a store is the dense array, in few tasks that are named after the recording."""

from __future__ import annotations

import os
import warnings
from pathlib import Path

import numpy as np
import pytest
from api import MemoryTransport
from dense_stores import plain_documents, plain_store
from plain_stores import plain_store as random_store
from strategies import legal_shapes
from token_stores import token_store
from transports import LatencyTransport

from saev_store import SaevStoreWarning, ShardStore
from saev_store.core.layout import Layout
from saev_store.errors import ArgumentError
from saev_store.transport import open_transport

dask = pytest.importorskip("dask")
pytest.importorskip("dask.array")
xr = pytest.importorskip("xarray")

#: `bash .ci/nightly selections` makes 10,000.
N = 10_000 if os.environ.get("SAEV_STORE_LONG") else 600
LAYOUT = Layout(7, (2, 5, 11), 4, True, 8, 3)


def one_key(rng: np.random.Generator, size: int, *, lists: bool) -> object:
    kind = rng.random()
    if kind < 0.3:
        return int(rng.integers(-size, size))
    if kind < 0.5 and lists:
        return rng.random(size) < 0.5 if kind < 0.35 else rng.integers(-size, size, size=int(rng.integers(1, 5)))
    start = None if rng.random() < 0.3 else int(rng.integers(-size, size + 3))  # dask takes an earlier one for the last
    stop = None if rng.random() < 0.3 else int(rng.integers(-size - 2, size + 3))
    return slice(start, stop, None if rng.random() < 0.3 else int(rng.choice([-3, -2, -1, 1, 2, 3])))


def test_selections_through_dask_equal_numpy(tmp_path: Path) -> None:
    """At most one list in a key: dask has no more."""
    rng, cases = np.random.default_rng(0), []
    for number, dtype in enumerate(("float32", "bfloat16", "float16") * 2):
        made = token_store(tmp_path / str(number), dtype=dtype, n=7, per_shard=3, content=4, seed=number, arrays={})
        with np.errstate(invalid="ignore"):
            acts = made.acts.astype(np.float32)
        transport = open_transport(str(made.path), engine=["mmap", "pread"][number % 2])
        store = ShardStore.open(LatencyTransport(transport, 0.0, 1e9) if number % 3 == 0 else transport)
        for _ in range(4):
            chunks = "auto" if rng.random() < 0.2 else tuple(int(rng.integers(1, n + 1)) for n in acts.shape)
            cases.append((store.as_dask(chunks=chunks), acts))
    with dask.config.set(scheduler="synchronous"):
        for number in range(N):
            array, truth = cases[number % len(cases)]
            key = [one_key(rng, size, lists=axis == number % 4) for axis, size in enumerate(truth.shape)]
            expected = truth
            # One axis after the other: dask keeps a list's axis in its place, where NumPy moves it before integers' axes.
            for axis in reversed(range(4)):
                expected = expected[(slice(None),) * axis + (key[axis],)]
            found = array[tuple(key)]
            assert found.shape == expected.shape, (number, key)
            with np.errstate(invalid="ignore"):
                assert np.array_equal(found.compute(), expected, equal_nan=True), (number, key)


def test_chunked_datasets_equal_numpy(tmp_path: Path) -> None:
    rng = np.random.default_rng(1)
    plain = plain_store(LAYOUT, labelled=True)
    folder = plain.write(tmp_path)
    with dask.config.set(scheduler="synchronous"):
        for _ in range(40):
            chunks = {name: int(rng.integers(1, size + 1)) for name, size in zip(
                ("example", "layer", "token", "d_model", "content_token"), (*LAYOUT.shape, 4), strict=True)}  # fmt: skip
            dataset = ShardStore.open(folder).as_xarray(chunks=chunks)
            first = int(rng.integers(6))
            part = dataset.isel(example=slice(first, None, 2), layer=[2, 0])
            assert part.activations.values.tobytes() == plain.dense[first::2][:, [2, 0]].tobytes()
            assert np.array_equal(part.labels.values, plain.labels[first::2])
        opened = xr.open_dataset(str(folder), engine="saev", chunks={})
        both = dask.compute(opened.labels.data, opened.activations.data)
        assert np.array_equal(both[0], plain.labels)
        assert both[1].tobytes() == plain.dense.tobytes()


def test_tasks_are_few_and_end_where_shards_end(tmp_path: Path) -> None:
    layout = Layout(40_000, tuple(range(6)), 196, True, 768, 2_000)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", SaevStoreWarning)  # what is in memory has no name
        store = ShardStore.open(LatencyTransport(MemoryTransport(plain_documents(layout)), 0.0, 1e12))
    lengths = [
        store.as_xarray(chunks={}).chunks["example"],
        xr.open_dataset(store, engine="saev", chunks={}).chunks["example"],
        store.as_dask().chunks[0],
    ]
    for found in lengths:
        assert sum(found) == 40_000
        assert len(found) < 1_700
        assert set(range(2_000, 40_001, 2_000)) <= set(np.cumsum(found).tolist())
    small = ShardStore.open(plain_store(LAYOUT, tail="cut").write(tmp_path))  # shards share a task
    assert small.as_dask().chunks == ((7,), (3,), (5,), (8,))


def test_blocks_of_a_local_store_are_copies(tmp_path: Path) -> None:
    """A view of a mapped file would end the worker if the file were cut while a task computes."""
    store = ShardStore.open(plain_store(LAYOUT).write(tmp_path))
    block = store.as_dask(chunks=-1)[3:6, 1].compute(scheduler="synchronous")
    assert not np.shares_memory(block, store.as_numpy(np.s_[3:6], copy=False))
    assert block.flags.writeable


def test_names_of_tasks_follow_the_recording(tmp_path: Path) -> None:
    plain = random_store(tmp_path, labels=True)

    def names() -> list[str]:
        store = ShardStore.open(plain.path)
        return [store.as_dask().name, *(each.data.name for each in store.as_xarray(chunks={}).data_vars.values())]

    before = names()
    assert names() == before
    assert len(set(before)) == len(before)
    values = np.fromfile(plain.shard(1), np.uint8)
    values[::-1].tofile(plain.shard(1))
    assert not set(names()) & set(before)


def test_as_dask_refuses_chunks_that_do_not_fit(tmp_path: Path) -> None:
    store = ShardStore.open(plain_store(LAYOUT).write(tmp_path))
    for chunks in ((1, 2), "many", (0, 1, 1, 1), ((3, 3), 3, 5, 8), object()):
        with pytest.raises(ArgumentError) as caught:
            store.as_dask(chunks=chunks)
        assert caught.value.where == "chunks"


def test_every_legal_chunk_shape_of_the_view_is_a_dask_array(tmp_path: Path) -> None:
    import zarr

    plain = plain_store(LAYOUT, tail="cut")
    store = ShardStore.open(plain.write(tmp_path))
    for chunks in legal_shapes(LAYOUT):
        array = dask.array.from_zarr(zarr.open_array(store.as_zarr(chunks=chunks), path="activations", mode="r"))
        assert array.compute(scheduler="synchronous").tobytes() == plain.dense.tobytes()
