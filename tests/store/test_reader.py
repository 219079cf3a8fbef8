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
from dense_stores import PlainStore, plain_store
from transports import CountingTransport
from waiting import HANG_S

from saev_store import SaevStoreWarning, ShardStore
from saev_store.core import plan
from saev_store.core.layout import Layout
from saev_store.errors import CorruptShardError, DocumentError, MissingShardError
from saev_store.store import reader
from saev_store.store import selection as selected
from saev_store.transport import MemoryTransport, MmapTransport, ReadCost, Transport, fetch

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


@pytest.mark.parametrize("cut", [-1, 0, 1])
def test_of_a_far_shard_that_was_cut_whole_examples_can_be_read(cut: int, plain: PlainStore):
    """An example that is there in part counts as lost, and is not requested."""
    nbytes = 2 * LAYOUT.example_nbytes + cut
    n_left = 1 if cut < 0 else 2
    store = opened(
        Far(plain.files | {"acts000001.bin": plain.files["acts000001.bin"][:nbytes]}, ReadCost(0, 1 << 20)),
        damaged_ok=True,
    )
    for key in (np.s_[3 + n_left], np.s_[3 + n_left, 0, 0], np.s_[3:6]):
        read = store.transport.counters.bytes_read
        with pytest.raises(CorruptShardError, match=f"was lost with its shard.*only the first {n_left} can be read"):
            store[key]
        assert store.transport.counters.bytes_read == read
    assert store[3 : 3 + n_left].tobytes() == plain.dense[3 : 3 + n_left].tobytes()


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


@pytest.mark.parametrize("n_vectors", [1, 4, 5, 6, 14, 15, 16, 45])
@pytest.mark.parametrize("engine", ["mmap", "pread", "far"])
def test_small_pieces_read_what_large_ones_do(
    n_vectors: int, engine: str, plain: PlainStore, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    """All the sizes at which work is cut are shrunk to a few vectors: a layer has 5, an example 15, a shard 45."""
    nbytes = n_vectors * LAYOUT.vector_nbytes
    monkeypatch.setattr(plan, "PIECE_BYTES", nbytes)
    monkeypatch.setattr(plan, "DIRECT_BYTES", nbytes)
    monkeypatch.setattr(reader, "SCRATCH_BYTES", nbytes)
    monkeypatch.setattr(reader, "THREAD_BYTES", nbytes)
    monkeypatch.setattr(selected, "PIECE_BYTES", nbytes)
    monkeypatch.setattr(fetch, "IN_FLIGHT_BYTES", nbytes)
    if engine == "far":
        store = opened(Far(plain.files, ReadCost(100, 3 * LAYOUT.vector_nbytes)))
    else:
        store = ShardStore.open(plain.write(tmp_path), engine=engine)
    for key in KEYS:
        expected = plain.dense[key]
        found = store[key]
        assert found.shape == expected.shape, key
        assert found.tobytes() == expected.tobytes(), key
    rows = store.sel(layer=[11, 3], tokens="content")
    expected = plain.dense[:, [2, 0], 1:].reshape(-1, 8)
    assert rows.rows(slice(None)).tobytes() == expected.tobytes()
    assert rows.rows(slice(50, 3, -7)).tobytes() == expected[50:3:-7].tobytes()
    assert rows.rows([3, 70, 3, 0]).tobytes() == expected[[3, 70, 3, 0]].tobytes()
    assert rows.as_numpy(copy=True).tobytes() == expected.tobytes()
    assert np.concatenate(list(rows)).tobytes() == expected.tobytes()


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


@pytest.mark.parametrize("name", DIRECT)
def test_large_runs_are_read_straight_into_the_result(
    name: str, plain: PlainStore, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr(plan, "DIRECT_BYTES", 3 * LAYOUT.vector_nbytes)
    key, n_runs = DIRECT[name]
    store = ShardStore.open(plain.write(tmp_path))
    before = store.transport.counters
    assert store[key].tobytes() == plain.dense[key].tobytes()
    after = store.transport.counters
    assert after.operations.get("get_ranges", 0) == before.operations.get("get_ranges", 0)
    assert after.requests - before.requests == n_runs
    assert after.bytes_read - before.bytes_read == plain.dense[key].nbytes


def test_a_run_is_direct_from_the_bound_on(plain: PlainStore, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    store = ShardStore.open(plain.write(tmp_path))
    for bound, direct in ((5 * 32 - 1, True), (5 * 32, True), (5 * 32 + 1, False)):
        monkeypatch.setattr(plan, "DIRECT_BYTES", bound)
        before = store.transport.counters.operations.get("readinto", 0)
        assert store[:, 1].tobytes() == plain.dense[:, 1].tobytes()
        assert (store.transport.counters.operations.get("readinto", 0) > before) == direct


@pytest.mark.parametrize("key", NOT_DIRECT, ids=str)
def test_what_is_not_contiguous_is_copied_out_of_the_map(
    key: object, plain: PlainStore, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr(plan, "DIRECT_BYTES", 1)
    store = ShardStore.open(plain.write(tmp_path))
    assert store[key].tobytes() == plain.dense[key].tobytes()
    assert "readinto" not in store.transport.counters.operations


@pytest.mark.parametrize("nbytes", [1, 31, 32, 33, 64, 10_000])
def test_bytes_in_flight_are_bounded(nbytes: int, plain: PlainStore, monkeypatch: pytest.MonkeyPatch):
    """A call of the transport never asks for more than the bound, or for one request."""
    monkeypatch.setattr(fetch, "IN_FLIGHT_BYTES", nbytes)
    largest = [0]

    class Watched(Far):
        def get_ranges(self, path: str, *, starts, ends):
            if len(starts) > 1:
                largest.append(sum(ends) - sum(starts))
            return super().get_ranges(path, starts=starts, ends=ends)

    store = opened(Watched(plain.files, ReadCost(0, 32)))
    assert store[:, 1, ::2].tobytes() == plain.dense[:, 1, ::2].tobytes()
    assert max(largest) <= nbytes + 32


# -- ranges of any file ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("gap", [0, 1, 5, 1000])
@pytest.mark.parametrize("longest", [1, 7, 10, 11, 1000])
@pytest.mark.parametrize("in_flight", [1, 9, 10, 11, 1000])
def test_ranges_in_any_order(gap: float, longest: float, in_flight: int, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(fetch, "IN_FLIGHT_BYTES", in_flight)
    content = np.random.default_rng(0).integers(0, 256, 500, dtype=np.uint8).tobytes()
    transport = CountingTransport(Far({"a": content}, ReadCost(gap, longest)))
    starts, ends = [200, 0, 210, 0, 499, 30, 100, 100], [210, 10, 221, 10, 500, 30, 130, 101]
    found = fetch.fetch_ranges(transport, "a", starts, ends)
    assert [bytes(part) for part in found] == [content[a:b] for a, b in zip(starts, ends, strict=True)]
    assert fetch.fetch_ranges(transport, "a", [], []) == []
    (one,) = fetch.fetch_ranges(transport, "a", [5], [50])
    assert bytes(one) == content[5:50]


def test_no_request_is_longer_than_the_transport_likes():
    lengths: list[int] = []

    class Watched(Far):
        def get_ranges(self, path: str, *, starts, ends):
            lengths.extend(b - a for a, b in zip(starts, ends, strict=True))
            return super().get_ranges(path, starts=starts, ends=ends)

    transport = Watched({"a": bytes(range(100))}, ReadCost(2, 30))
    (whole,) = fetch.fetch_ranges(transport, "a", [0], [100])
    assert bytes(whole) == bytes(range(100))
    assert lengths == [30, 30, 30, 10]


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
