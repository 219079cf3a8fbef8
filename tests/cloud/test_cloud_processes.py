"""A store in a bucket, opened in one process and read in others: right data, or a named error at once."""

from __future__ import annotations

import asyncio
import multiprocessing
import os
import pickle
import warnings
from concurrent.futures import ProcessPoolExecutor

import numpy as np
import pytest
from dense_stores import PlainStore, plain_store
from servers import Bucket, s3_bucket  # noqa: F401 (the second is a fixture)
from waiting import HANG_S

from saev_store import ShardStore
from saev_store.core.layout import Layout
from saev_store.errors import AccessError, ForkError
from saev_store.transport import open_transport

LAYOUT = Layout(
    n_examples=12, layers=(3, 7), content_tokens_per_example=4, cls_token=True, d_model=16, examples_per_shard=5
)
engines = pytest.mark.parametrize("engine", ["obstore", "fsspec"])


@pytest.fixture(scope="module")
def plain() -> PlainStore:
    return plain_store(LAYOUT, tail="cut")


@pytest.fixture
def store(plain: PlainStore, s3_bucket: Bucket, engine: str) -> ShardStore:
    """Opened, and read from, so that the client has threads and connections."""
    if engine == "obstore":
        pytest.importorskip("obstore")
    url = f"{s3_bucket.url}/{plain.name}"
    transport = open_transport(url, s3_bucket.options, engine="fsspec")
    for name, data in plain.files.items():
        transport.put(name, data)
    opened = ShardStore.open(url, s3_bucket.options, engine=engine)
    assert opened[0].tobytes() == plain.dense[0].tobytes()
    return opened


def total(store: ShardStore) -> bytes | str:
    """All bytes, or the name of the error that says why not."""
    try:
        return store[...].tobytes()
    except ForkError as error:
        return type(error).__name__


@engines
@pytest.mark.parametrize("how", ["fork", "spawn", "forkserver"])
def test_other_processes(store: ShardStore, plain: PlainStore, engine: str, how: str):
    with warnings.catch_warnings():
        # Python warns of any fork with threads; what becomes of it is what is tested.
        warnings.filterwarnings("ignore", "This process .* is multi-threaded", DeprecationWarning)
        queue = multiprocessing.get_context(how).Queue()
        process = multiprocessing.get_context(how).Process(target=tell, args=(store, queue))
        process.start()
        found = queue.get(timeout=HANG_S)
        process.join(HANG_S)
    assert process.exitcode == 0
    assert found == plain.dense.tobytes() or (how == "fork" and engine == "obstore" and found == "ForkError")
    assert store[...].tobytes() == plain.dense.tobytes()  # and the parent goes on


def tell(store: ShardStore, queue: object) -> None:
    queue.put(total(store))


@engines
def test_a_loop_that_runs(store: ShardStore, plain: PlainStore, engine: str):
    """As in a notebook, where every cell runs inside a loop."""
    del engine

    async def cell() -> bytes:
        here = store[...].tobytes()
        there = await asyncio.get_running_loop().run_in_executor(None, store.read, slice(3, None))
        assert there.tobytes() == plain.dense[3:].tobytes()
        return here

    assert asyncio.run(cell()) == plain.dense.tobytes()


@engines
def test_dask_workers(store: ShardStore, plain: PlainStore, engine: str):
    del engine
    dask = pytest.importorskip("dask")
    array = store.as_dask()
    for scheduler in ("synchronous", "threads"):
        assert np.asarray(array.compute(scheduler=scheduler)).tobytes() == plain.dense.tobytes()
    with (
        ProcessPoolExecutor(2, mp_context=multiprocessing.get_context("spawn"), initializer=_credentials, initargs=(dict(store.transport.client.options.all),)) as pool,
        dask.config.set(pool=pool, scheduler="processes"),
    ):  # fmt: skip
        try:
            found = np.asarray(array.compute())
        except Exception as error:
            assert "credentials do not travel in a pickle" in str(error)
        else:
            assert found.tobytes() == plain.dense.tobytes()


def test_a_dask_cluster(s3_bucket: Bucket, plain: PlainStore, monkeypatch: pytest.MonkeyPatch):
    """Its workers hear only what the scheduler passes on: right data, or a named error at once."""
    distributed = pytest.importorskip("distributed")
    pytest.importorskip("obstore")
    url, options = f"{s3_bucket.url}/{plain.name}", s3_bucket.options
    transport = open_transport(url, options)
    for name, data in plain.files.items():
        transport.put(name, data)
    monkeypatch.setenv("AWS_ACCESS_KEY_ID", options["key"])
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", options["secret"])
    with (
        distributed.LocalCluster(n_workers=1, threads_per_worker=1, processes=True, dashboard_address=":0") as cluster,
        distributed.Client(cluster),
    ):
        for engine in ("obstore", "fsspec"):
            told = ShardStore.open(url, options, engine=engine).as_dask()
            with pytest.raises(AccessError, match="credentials do not travel in a pickle"):
                told.compute()
            silent = ShardStore.open(url, {"endpoint_url": options["endpoint_url"]}, engine=engine).as_dask()
            assert np.asarray(silent.compute()).tobytes() == plain.dense.tobytes()


def _credentials(options: dict) -> None:
    os.environ.update(AWS_ACCESS_KEY_ID=options["key"], AWS_SECRET_ACCESS_KEY=options["secret"])


@engines
@pytest.mark.parametrize("how", ["fork", "spawn"])
def test_torch_workers(store: ShardStore, plain: PlainStore, engine: str, how: str):
    torch = pytest.importorskip("torch")
    del engine

    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "This process .* is multi-threaded", DeprecationWarning)
        loader = torch.utils.data.DataLoader(
            Examples(store), batch_size=None, num_workers=2, multiprocessing_context=how, timeout=HANG_S
        )
        found = np.stack([example.numpy() for example in loader])
    assert found.tobytes() == plain.dense.tobytes()


class Examples:
    """What PyTorch calls a map-style data set."""

    def __init__(self, store: ShardStore) -> None:
        self.store = store

    def __len__(self) -> int:
        return len(self.store)

    def __getitem__(self, number: int) -> object:
        import torch

        return torch.from_numpy(self.store[number])


@engines
def test_a_pickle_elsewhere_has_no_credentials(store: ShardStore, engine: str):
    del engine
    assert b"very-secret-key" not in pickle.dumps(store)
