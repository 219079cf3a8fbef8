"""Reading where it is easy to be wrong: cut files, sizes at their bounds, large reads; against dense NumPy."""

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
from transports import CountingTransport
from waiting import HANG_S

from saev_store import SaevStoreWarning, ShardStore
from saev_store.core import plan
from saev_store.core.layout import Layout
from saev_store.errors import CorruptShardError, DocumentError, MissingShardError
from saev_store.transport import LocalTransport as MmapTransport
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


# -- files that are cut after they were read ---------------------------------------------------------------------------

READS: dict[str, Callable[[ShardStore], object]] = {
    "vector": lambda store: store[4, 1, 2],
    "block": lambda store: store[3:6],
    "plane": lambda store: store[3:6, 1],
    "list": lambda store: store[[5, 3], 1:],
    "points": lambda store: store[[3, 5], [0, 1], [2, 3]],
    "rows": lambda store: store.sel(layer=7, examples=slice(3, 6)).rows(slice(None)),
    "row": lambda store: store.sel(examples=[4])[3],
    "array of rows": lambda store: store.sel(layer=7, examples=slice(3, 6)).as_numpy(),
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


def test_a_wrapped_map_is_compared_too(plain: PlainStore, tmp_path: Path):
    folder = plain.write(tmp_path)
    store = ShardStore.open(CountingTransport(MmapTransport(folder)))
    store[4, 1, 2]
    os.truncate(folder / "acts000001.bin", 500)
    with pytest.raises(CorruptShardError):
        store[4, 1, 2]


def test_views_that_were_asked_for_are_read_only(plain: PlainStore, tmp_path: Path):
    store = ShardStore.open(plain.write(tmp_path))
    view = store.as_numpy(np.s_[3:6, 1], copy=False)
    assert not view.flags.writeable
    assert view.base is not None
    assert store[3:6, 1].flags.writeable


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


@pytest.mark.parametrize("engine", ["mmap", "pread"])
def test_a_vector_is_fresh_memory(engine: str, plain: PlainStore, tmp_path: Path):
    """The first one of a shard, and those that come once it is mapped."""
    store = ShardStore.open(plain.write(tmp_path), engine=engine)
    for _ in range(2):
        vector = store[4, 1, 2]
        assert vector.flags.writeable
        assert vector.tobytes() == plain.dense[4, 1, 2].tobytes()
        vector[:] = 0
    if engine == "mmap":
        mapped = store.as_numpy(np.s_[3:6], copy=False)
        assert not np.shares_memory(store[4, 1, 2], mapped)


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


# -- sizes at their bounds ---------------------------------------------------------------------------------------------

KEYS = [
    np.s_[...],
    np.s_[::-2],
    np.s_[1:8:3, 1],
    np.s_[7:0:-3, 1:],
    np.s_[2:0:-1],
    np.s_[8:5:-1, 2:0:-1, 4:0:-1, 7:0:-1],
    np.s_[6:5:-1, 2:0:-2, 4:0:-2, 6:0:-3],
    np.s_[:, :, 2],
    np.s_[2:7, 1:2, 1:4],
    np.s_[[8, 0, 4], :, 1:],
    np.s_[:, [2, 0], ::-1, 1:7:2],
    np.s_[[8, 0, 4], [0, 1, 2], [4, 4, 0]],
    np.s_[[[8, 0], [4, 3]], 1, 2, [3, 5]],
    np.s_[[8, 0], :, 1, [3, 5]],
]


DIRECT = {
    "whole shards": (np.s_[...], 3),
    "part of a shard": (np.s_[1:3], 1),
    "a layer": (np.s_[:, 1], 9),
    "a layer of every second example": (np.s_[::2, 1], 5),
    "a layer backwards": (np.s_[::-1, 2], 9),
    "layers side by side": (np.s_[:, 1:], 9),
    "some tokens of a layer": (np.s_[4:, 0, 1:4], 5),
    "all layers of every second example": (np.s_[::2], 5),
}
NOT_DIRECT = [np.s_[:, ::2], np.s_[:, :2, 1:], np.s_[:, 1, ::2], np.s_[:, 1, :, :4], np.s_[[0, 1], 1], np.s_[:, ::-1]]


# -- ranges of any file ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("extra", [-1, 1, 7])
def test_labels_of_a_wrong_size_never_come_out(extra: int, tmp_path: Path):
    """Whichever way they are read, and however the store was opened: each label would stand for another token."""
    pytest.importorskip("xarray")
    plain = plain_store(LAYOUT, labelled=True)
    folder = plain.write(tmp_path)
    labels = folder / "labels.bin"
    labels.write_bytes((labels.read_bytes() + bytes(7))[: labels.stat().st_size + extra])
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", SaevStoreWarning)
        files = {path.name: path.read_bytes() for path in folder.iterdir()}
        remote = ShardStore.open(Far(files, ReadCost(0, 1 << 20)))
    for store in (ShardStore.open(folder, damaged_ok=True), remote):
        ways: list[Callable[[], object]] = [
            lambda store=store: store.has_labels,
            lambda store=store: store.labels,
            lambda store=store: store.sel(ignore_labels=[0]),
            lambda store=store: store.as_zarr(),
            lambda store=store: store.as_xarray(),
        ]
        for way in ways:
            with pytest.raises(DocumentError, match=r"labels\.bin: it has \d+ bytes"):
                way()
        assert store[4].tobytes() == plain.dense[4].tobytes()
    with pytest.raises(DocumentError, match=r"labels\.bin"):
        xr_open(folder)


def xr_open(folder: Path) -> object:
    import xarray

    return xarray.open_dataset(folder, engine="saev", damaged_ok=True)


# -- budgets far beyond the examples -----------------------------------------------------------------------------------


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
