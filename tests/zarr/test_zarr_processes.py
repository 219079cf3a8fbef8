"""The view in other processes: pickled, forked, on dask's schedulers."""

from __future__ import annotations

import pickle
import subprocess
import sys
import warnings
from pathlib import Path

import numpy as np
import pytest
import zarr
from dense_stores import PlainStore, plain_store
from waiting import HANG_S

from saev_store import ShardStore
from saev_store.core.layout import Layout
from saev_store.transport import Transport
from saev_store.zarr import ZarrView

ROOT = Path(__file__).resolve().parents[2]
LAYOUT = Layout(7, (2, 5, 11), 4, True, 8, 3)


@pytest.fixture(scope="module")
def plain() -> PlainStore:
    return plain_store(LAYOUT, tail="cut", labelled=True)


@pytest.fixture
def folder(plain: PlainStore, tmp_path: Path) -> Path:
    return plain.write(tmp_path)


@pytest.mark.parametrize("engine", ["mmap", "pread", "fsspec"])
def test_pickles(engine: str, folder: Path, plain: PlainStore):
    view = ShardStore.open(folder, engine=engine).as_zarr()
    array = zarr.open_group(view, mode="r")["activations"]
    assert isinstance(array, zarr.Array)
    array[0]  # what has been read is not sent along
    assert pickle.loads(pickle.dumps(view)) == view
    assert len(pickle.dumps(view)) < 10_000
    again = pickle.loads(pickle.dumps(array))
    assert again[...].tobytes() == plain.dense.tobytes()


FORKED = """
import os, sys, warnings
import numpy as np, zarr
from saev_store import ShardStore
warnings.simplefilter("error")
warnings.filterwarnings("ignore", "This process .* is multi-threaded", DeprecationWarning)
folder, engine, path = sys.argv[1:]
truth = np.load(path)
views = [ShardStore.open(folder, engine=engine).as_zarr(chunks=chunks) for chunks in ("auto", (1, 1, 5, 8))]
arrays = [zarr.open_group(view, mode="r")["activations"] for view in views]
for array in arrays:
    assert array[...].tobytes() == truth.tobytes()
child = os.fork()
if child == 0:
    try:
        for array in arrays:
            assert array[...].tobytes() == truth.tobytes()
        os._exit(0)
    except BaseException as error:
        print(repr(error), file=sys.stderr, flush=True)
        os._exit(3)
assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
for array in arrays:
    assert array[...].tobytes() == truth.tobytes()
"""


@pytest.mark.parametrize("engine", ["mmap", "pread", "fsspec"])
def test_a_forked_child_reads_the_same(engine: str, folder: Path, plain: PlainStore, tmp_path: Path):
    np.save(tmp_path / "truth.npy", plain.dense)
    command = [sys.executable, "-c", FORKED, str(folder), engine, str(tmp_path / "truth.npy")]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=HANG_S, check=False)
    assert done.returncode == 0, done.stderr


def read_all(view: ZarrView) -> bytes:
    array = zarr.open_group(view, mode="r")["activations"]
    assert isinstance(array, zarr.Array)
    return np.asarray(array[...]).tobytes()


def test_threads_share_a_view(folder: Path, plain: PlainStore):
    from concurrent.futures import ThreadPoolExecutor

    for engine in ("mmap", "pread"):
        view = ShardStore.open(folder, engine=engine).as_zarr()
        with ThreadPoolExecutor(8) as pool:
            assert set(pool.map(read_all, [view] * 32)) == {plain.dense.tobytes()}


@pytest.mark.parametrize("engine", ["mmap", "fsspec"])
def test_dask_on_threads_and_processes(engine: str, folder: Path, plain: PlainStore):
    dask = pytest.importorskip("dask")
    store = ShardStore.open(folder, engine=engine)
    zarr_array = zarr.open_group(store.as_zarr(), mode="r")["activations"]
    arrays = [
        store.as_dask(chunks=(3, 1, 5, 8)),
        store.as_xarray(chunks={}).activations.data,
        dask.array.from_zarr(zarr_array),
    ]
    for scheduler in ("synchronous", "threads"):
        for array in arrays:
            assert array.compute(scheduler=scheduler).tobytes() == plain.dense.tobytes()
    # One pool for all three: starting processes is what takes the time.
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "This process .* is multi-threaded", DeprecationWarning)
        found = dask.compute(*arrays, scheduler="processes", num_workers=2)
    assert {part.tobytes() for part in found} == {plain.dense.tobytes()}


def test_distributed_workers(folder: Path, plain: PlainStore, monkeypatch: pytest.MonkeyPatch):
    distributed = pytest.importorskip("distributed")
    monkeypatch.setenv("PYTHONPATH", str(ROOT))
    store = ShardStore.open(folder)
    with (
        distributed.LocalCluster(n_workers=2, threads_per_worker=1, processes=True, dashboard_address=":0") as cluster,
        distributed.Client(cluster),
    ):
        assert store.as_dask(chunks=(1, 3, 5, 8)).compute().tobytes() == plain.dense.tobytes()
        dataset = store.as_xarray(chunks={"example": 2})
        assert dataset.activations.sel(layer=[2, 11]).compute().values.tobytes() == plain.dense[:, [0, 2]].tobytes()


def test_transports_that_hold_no_bytes_travel_light(folder: Path):
    transport = ShardStore.open(folder).transport
    assert isinstance(transport, Transport)
    assert len(pickle.dumps(ShardStore.open(folder).as_dask())) < 20_000
