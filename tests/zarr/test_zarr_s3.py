"""The view over a bucket: the clients for object stores, in event loops, threads and forked children."""

from __future__ import annotations

import asyncio
from pathlib import Path

import numpy as np
import pytest
import zarr
from dense_stores import PlainStore, plain_store
from servers import Bucket, s3_bucket  # noqa: F401  # the second is a fixture

from saev_store import ShardStore
from saev_store.core.layout import Layout
from saev_store.errors import CorruptShardError
from saev_store.transport import Transport as Writes
from saev_store.transport import open_transport

ROOT = Path(__file__).resolve().parents[2]
engines = pytest.mark.parametrize("engine", ["fsspec", "obstore"])


@pytest.fixture(scope="module")
def plain() -> PlainStore:
    return plain_store(Layout(7, (2, 5, 11), 4, True, 8, 3), tail="cut", labelled=True)


@pytest.fixture
def url(plain: PlainStore, s3_bucket: Bucket) -> str:
    transport = open_transport(f"{s3_bucket.url}/{plain.name}", s3_bucket.options)
    assert isinstance(transport, Writes)
    for name, data in plain.files.items():
        transport.put(name, data)
    return transport.url


@engines
def test_a_bucket_reads_like_a_folder(engine: str, url: str, plain: PlainStore, s3_bucket: Bucket):
    pytest.importorskip("s3fs" if engine == "fsspec" else "obstore")
    store = ShardStore.open(url, s3_bucket.options, engine=engine)
    view = store.as_zarr(chunks=(1, 1, 5, 8))
    group = zarr.open_group(view, mode="r")
    assert group["activations"][...].tobytes() == plain.dense.tobytes()
    np.testing.assert_array_equal(group["labels"][...], plain.labels)

    async def in_a_loop() -> np.ndarray:
        return np.asarray(group["activations"][2:5, 1])

    assert asyncio.run(in_a_loop()).tobytes() == plain.dense[2:5, 1].tobytes()
    transport = store.transport
    assert isinstance(transport, Writes)
    transport.put("acts000001.bin", plain.files["acts000001.bin"][:-4])
    with pytest.raises(CorruptShardError, match=r"acts000001\.bin"):
        group["activations"][5]
    transport.delete("acts000001.bin")
    with pytest.raises(CorruptShardError, match=r"acts000001\.bin"):
        group["activations"][5, 2]
    assert group["activations"][:3].tobytes() == plain.dense[:3].tobytes()


FORKED = """
import json, os, sys, warnings
import numpy as np, zarr
from saev_store import ShardStore
from saev_store.errors import ForkError
warnings.simplefilter("error")
warnings.filterwarnings("ignore", "This process .* is multi-threaded", DeprecationWarning)
url, engine, options, path = sys.argv[1:]
truth = np.load(path)
array = zarr.open_group(ShardStore.open(url, json.loads(options), engine=engine).as_zarr(), mode="r")["activations"]
assert array[...].tobytes() == truth.tobytes()
child = os.fork()
if child == 0:
    try:
        assert array[...].tobytes() == truth.tobytes()
        os._exit(0)
    except ForkError as error:
        os._exit(7)
    except BaseException as error:
        print(repr(error), file=sys.stderr, flush=True)
        os._exit(3)
code = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
assert array[...].tobytes() == truth.tobytes()
sys.exit(code)
"""
