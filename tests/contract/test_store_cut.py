"""Shards and labels that are cut or removed while a store is open: an error, never other vectors."""

from __future__ import annotations

import os
import subprocess
import sys
import textwrap
import tracemalloc
import warnings
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
from api import MemoryTransport
from dense_stores import PlainStore, plain_store
from waiting import HANG_S

from saev_store import SaevStoreWarning, ShardStore
from saev_store.core import plan
from saev_store.core.layout import Layout
from saev_store.errors import CorruptShardError, MissingShardError
from saev_store.transport import ReadCost, Transport

LAYOUT = Layout(
    n_examples=9, layers=(3, 7, 11), content_tokens_per_example=4, cls_token=True, d_model=8, examples_per_shard=3
)


@pytest.fixture
def plain() -> PlainStore:
    return plain_store(LAYOUT)


def opened(transport: Transport, **options: object) -> ShardStore:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", SaevStoreWarning)  # what is in memory has no name
        return ShardStore.open(transport, **options)


class Far(MemoryTransport):
    """Memory that is read like a bucket."""

    is_local = False

    def __init__(self, files: dict[str, bytes], cost: ReadCost) -> None:
        super().__init__(files)
        self.cost = cost


READS: dict[str, Callable[[ShardStore], object]] = {
    "vector": lambda store: store[4, 1, 2],
    "block": lambda store: store[3:6],
    "plane": lambda store: store[3:6, 1],
    "list": lambda store: store[[5, 3], 1:],
    "points": lambda store: store[[3, 5], [0, 1], [2, 3]],
    "rows": lambda store: store.sel(layer=7, examples=slice(3, 6)).rows(slice(None)),
    "row": lambda store: store.sel(examples=[4])[3],
    "view": lambda store: store.as_numpy(np.s_[3:6]),
    "dask": lambda store: store.as_dask()[3:6].compute(scheduler="synchronous"),
    "statistics": lambda store: store.stats(save=False),
    "zarr": lambda store: np.asarray(_zarr_array(store)[3:6]),
}


def _zarr_array(store: ShardStore) -> np.ndarray:
    import zarr

    return zarr.open_group(store.as_zarr(), mode="r")["activations"]  # type: ignore[return-value]  # read like one


@pytest.mark.parametrize("engine", ["mmap", "pread"])
@pytest.mark.parametrize("way", READS)
def test_a_shard_that_is_cut_after_it_was_read_is_an_error(way: str, engine: str, plain: PlainStore, tmp_path: Path):
    """What lies behind the new end reads as zeros through a map, as long as it is in the last page."""
    if way in {"dask", "statistics"}:
        pytest.importorskip("dask")
    folder = plain.write(tmp_path)
    store = ShardStore.open(folder, engine=engine)
    READS[way](store)
    os.truncate(folder / "acts000001.bin", 500)
    with pytest.raises(CorruptShardError, match=r"acts000001\.bin"):
        READS[way](store)
    assert store[0].tobytes() == plain.dense[0].tobytes()


def test_a_cut_behind_the_last_page_does_not_end_the_process(tmp_path: Path):
    layout = Layout(2, (0,), 63, True, 256, 1)
    folder = plain_store(layout).write(tmp_path)
    code = textwrap.dedent(f"""
        import os
        from saev_store import ShardStore
        from saev_store.errors import CorruptShardError
        store = ShardStore.open({str(folder)!r})
        reads = [lambda: store[1, 0, 60], lambda: store[1:, 0, 50:60], lambda: store.sel()[[100, 120]]]
        for read in reads:
            read()
        os.truncate({str(folder / "acts000001.bin")!r}, 100)
        for read in reads:
            try:
                read()
            except CorruptShardError:
                print("refused")
    """)
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False, timeout=HANG_S)
    assert (done.returncode, done.stdout.split()) == (0, ["refused"] * 3), done.stderr


def test_a_shard_that_was_cut_and_restored_is_read_again(plain: PlainStore, tmp_path: Path):
    folder = plain.write(tmp_path)
    store, shard = ShardStore.open(folder), folder / "acts000001.bin"
    whole = shard.read_bytes()
    assert store[4, 1, 2].tobytes() == plain.dense[4, 1, 2].tobytes()
    os.truncate(shard, 500)
    with pytest.raises(CorruptShardError):
        store[4, 1, 2]
    with shard.open("r+b") as file:
        file.write(whole)
    assert store[4, 1, 2].tobytes() == plain.dense[4, 1, 2].tobytes()
    assert store[3:6].tobytes() == plain.dense[3:6].tobytes()


def test_labels_that_are_cut_after_they_were_read_are_an_error(tmp_path: Path):
    folder = plain_store(LAYOUT, labelled=True).write(tmp_path)
    store = ShardStore.open(folder)
    assert len(store.sel(ignore_labels=[0])) > 0
    os.truncate(folder / "labels.bin", 10)
    with pytest.raises(CorruptShardError, match=r"labels\.bin"):
        store.sel(ignore_labels=[0])


@pytest.mark.parametrize("direct_bytes", [1, plan.DIRECT_BYTES])
@pytest.mark.parametrize("engine", ["mmap", "pread", "far"])
@pytest.mark.parametrize("way", ["vector", "block", "plane", "list", "points", "rows", "row"])
def test_a_shard_that_is_missing_when_it_is_read_has_a_name(
    way: str, engine: str, direct_bytes: int, plain: PlainStore, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    """Whatever reads it, and however the files are reached."""
    monkeypatch.setattr(plan, "DIRECT_BYTES", direct_bytes)
    if engine == "far":
        transport = Far(dict(plain.files), ReadCost(0, 1 << 20))
        store = opened(transport)
        READS[way](store)  # its size is known then, and not requested again
        transport.delete("acts000001.bin")
    else:
        folder = plain.write(tmp_path)
        store = ShardStore.open(folder, engine=engine)
        (folder / "acts000001.bin").unlink()
    with pytest.raises(MissingShardError, match="the shard of examples 3 to 5 is missing"):
        READS[way](store)


def test_a_view_of_what_was_lost_is_refused(plain: PlainStore, tmp_path: Path):
    """Also where the key goes backwards, and where the shard has no byte more than what is left."""
    folder = plain.write(tmp_path)
    os.truncate(folder / "acts000001.bin", 2 * LAYOUT.example_nbytes)
    store = ShardStore.open(folder, damaged_ok=True)
    for key in (np.s_[3:5], np.s_[4], np.s_[4:2:-1]):
        assert store.as_numpy(key, copy=False).tobytes() == plain.dense[key].tobytes()
    for key in (np.s_[3:6], np.s_[5], np.s_[5:2:-1], np.s_[3:6:2]):
        for copy in (False, None):
            with pytest.raises(CorruptShardError, match="example 5 was lost"):
                store.as_numpy(key, copy=copy)


def test_a_budget_far_beyond_the_examples_costs_nothing():
    """A shard that would hold 10^15 vectors, with seven examples in it."""
    pytest.importorskip("xarray")
    layout = Layout(7, (3, 7), 4, True, 8, 10**14)
    store = opened(MemoryTransport(plain_store(layout, tail="cut").files))
    assert store.layout.examples_per_shard == 10**14
    for ways in (store.as_dask, lambda: store.as_xarray(chunks={}), store.as_zarr, lambda: store.stats(save=False)):
        ways()  # what is imported and kept
        tracemalloc.start()
        try:
            ways()
            _, peak = tracemalloc.get_traced_memory()
        finally:
            tracemalloc.stop()
        assert peak < 4 << 20
    assert store.as_dask().compute(scheduler="synchronous").tobytes() == store[...].tobytes()
    far = opened(Far(store.transport.files, ReadCost(0, 1 << 20)))
    assert far[...].tobytes() == store[...].tobytes()
    assert far.as_dask().numblocks == (1, 1, 1, 1)
