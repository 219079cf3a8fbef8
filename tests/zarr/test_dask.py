"""The dask array over a store: values, tasks, and what its tasks do to memory."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
from api import MemoryTransport
from dense_stores import plain_store
from hypothesis import given
from hypothesis import strategies as st
from plain_stores import plain_store as random_store
from strategies import layouts
from token_stores import token_store

from saev_store import ShardStore
from saev_store.core.layout import Layout
from saev_store.errors import ArgumentError

dask = pytest.importorskip("dask")
pytest.importorskip("dask.array")
tokenize = pytest.importorskip("dask.base").tokenize

SAMPLES = Path(__file__).parents[1] / "data" / "saev"
VALID = sorted(path.parent for path in SAMPLES.glob("*/expected.json"))
LAYOUT = Layout(7, (2, 5, 11), 4, True, 8, 3)


@pytest.mark.parametrize("sample", VALID, ids=lambda path: path.name)
def test_peer_written_samples_bit_for_bit(sample: Path):
    expected = json.loads((sample / "expected.json").read_text())
    array = ShardStore.open(sample / expected["store"]).as_dask()
    truth = np.load(sample / "acts.npy")
    assert (array.shape, array.dtype) == (truth.shape, truth.dtype)
    assert array.compute().tobytes() == truth.tobytes()


@given(layout=layouts(), data=st.data())
def test_any_chunks_and_selection_equal_numpy(layout: Layout, data: st.DataObject):
    plain = plain_store(layout, tail="cut")
    store = ShardStore.open(MemoryTransport(plain.files, label=plain.name))
    chunks = tuple(data.draw(st.integers(1, n)) for n in layout.shape)
    array = store.as_dask(chunks=data.draw(st.sampled_from(["auto", chunks])))
    key = tuple(
        data.draw(st.one_of(st.integers(0, n - 1), st.slices(n), st.lists(st.integers(0, n - 1), min_size=1)))
        if axis == 0
        else data.draw(st.one_of(st.integers(0, n - 1), st.slices(n)))
        for axis, n in enumerate(layout.shape)
    )
    with dask.config.set(scheduler="synchronous"):
        assert array.compute().tobytes() == plain.dense.tobytes()
        found, expected = np.asarray(array[key].compute()), plain.dense[key]
    assert found.shape == expected.shape
    assert found.tobytes() == expected.tobytes()


def test_small_shards_share_a_task():
    """A scheduler spends as much on a small task as on one of 128 MiB."""
    plain = plain_store(LAYOUT, tail="cut")
    array = ShardStore.open(MemoryTransport(plain.files, label=plain.name)).as_dask()
    assert array.chunks == ((7,), (3,), (5,), (8,))


def test_blocks_of_a_local_store_are_copies(tmp_path: Path):
    """A view of a mapped file would end the worker if the file were cut while a task computes."""
    plain = plain_store(LAYOUT)
    store = ShardStore.open(plain.write(tmp_path))
    block = store.as_dask(chunks=-1)[3:6, 1].compute(scheduler="synchronous")
    assert not np.shares_memory(block, store.as_numpy(np.s_[3:6], copy=False))
    assert block.flags.writeable


def test_another_mask_has_another_name(tmp_path: Path):
    store = token_store(tmp_path, arrays={"mask": "bool"})
    before = ShardStore.open(store.path)
    names = tokenize(before), before.as_xarray(chunks={})["mask"].data.name
    (store.path / "mask.bin").write_bytes((~store.arrays["mask"]).tobytes())
    after = ShardStore.open(store.path)
    assert tokenize(after) != names[0]
    assert after.as_xarray(chunks={})["mask"].data.name != names[1]


def test_a_repaired_store_has_another_name(tmp_path: Path):
    """Tasks read the damaged numbers without looking at the digests, which say the same before and after."""
    plain = random_store(tmp_path)
    plain.write_digests(block_bytes=64)
    whole = plain.shard(1).read_bytes()
    plain.shard(1).write_bytes(bytes(8) + whole[8:])
    damaged = ShardStore.open(plain.path)
    name = damaged.as_dask().name
    report = damaged.validate(deep=True)
    with damaged.repair(report) as writer:
        for start, end in report.lost:
            writer.append(plain.acts[start:end])
    repaired = ShardStore.open(plain.path)
    assert plain.shard(1).read_bytes() == whole
    assert repaired.as_dask().name != name


@pytest.mark.parametrize(
    "chunks",
    [(1, 2), "many", (0, 1, 1, 1), ((3, 3), 3, 5, 8), object()],
    ids=["two", "word", "zero", "uneven", "object"],
)
def test_chunks_that_do_not_fit(chunks: object):
    plain = plain_store(LAYOUT)
    store = ShardStore.open(MemoryTransport(plain.files, label=plain.name))
    with pytest.raises(ArgumentError, match="chunks"):
        store.as_dask(chunks=chunks)


def test_why_chunks_do_not_fit_is_told():
    plain = plain_store(LAYOUT)
    store = ShardStore.open(MemoryTransport(plain.files, label=plain.name))
    with pytest.raises(ValueError) as reason:
        dask.array.from_array(store, chunks="many")
    with pytest.raises(ArgumentError) as caught:
        store.as_dask(chunks="many")
    assert str(reason.value) in str(caught.value)
