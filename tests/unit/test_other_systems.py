"""Windows and macOS, as far as taking their missing functions away shows it."""

import subprocess
import sys

import numpy as np
from plain_stores import plain_store
from waiting import HANG_S

_WITHOUT = """
import ctypes, os, sys

# Loaded before the functions are gone: these are not what is tested.
import asyncio, concurrent.futures, multiprocessing, socket, subprocess, tempfile, uuid
import dask.array, numpy, pydantic, xarray, zarr

for name in (
    "register_at_fork", "fork", "pread", "preadv", "pwrite", "pwritev", "statvfs", "fdatasync", "posix_fallocate",
    "posix_fadvise", "geteuid", "getuid", "sched_getaffinity", "sysconf", "RWF_NOWAIT", "O_NONBLOCK", "O_CLOEXEC",
    "O_DIRECT", "O_DIRECTORY", "O_NOCTTY", "O_NOFOLLOW",
):
    if hasattr(os, name):
        delattr(os, name)
if hasattr(os, "process_cpu_count"):  # without affinities Python defines it so
    os.process_cpu_count = os.cpu_count
sys.modules["fcntl"] = sys.modules["resource"] = None
real = ctypes.CDLL

def refuse(name, *arguments, **options):
    if name is None:
        raise TypeError("LoadLibrary() argument 1 must be str, not None")
    return real(name, *arguments, **options)

ctypes.CDLL = refuse

from saev_store import ShardStore
from saev_store.errors import AccessError, ArgumentError
from saev_store.loaders import Loader

url, truth = sys.argv[1], numpy.load(sys.argv[2])
for engine in ("mmap", "pread"):
    store = ShardStore.open(url, engine=engine)
    assert (store[:] == truth).all() and (store[3, 1, 2] == truth[3, 1, 2]).all()
    assert (store.sel(layer=store.layers[1])[:] == truth[:, 1].reshape(-1, truth.shape[-1])).all()
    assert (zarr.open_array(store.as_zarr(), path="activations", mode="r")[:] == truth).all()
    assert (store.as_xarray()["activations"].values == truth).all()
    assert store.validate(deep=True).ok and store.stats().count.min() > 0
    with Loader(store.sel(layer=store.layers[1]), batch_size=8, seed=1) as loader:
        rows = numpy.concatenate([batch["act"].copy() for batch in loader])
    assert (numpy.sort(rows, axis=None) == numpy.sort(truth[:, 1], axis=None)).all()
for error, call in (
    (AccessError, lambda: store.transport.put("new.json", b"{}")),
):
    try:
        call()
    except error as refused:
        assert "Linux and macOS" in str(refused), refused
    else:
        raise AssertionError(call)
print("fine")
"""


def test_opens_reads_views_and_trains_without_what_other_systems_lack(tmp_path):
    made = plain_store(tmp_path, n=40, padded=False)
    np.save(tmp_path / "truth.npy", made.acts)
    done = subprocess.run(
        [sys.executable, "-c", _WITHOUT, str(made.path), str(tmp_path / "truth.npy")],
        capture_output=True, text=True, timeout=HANG_S, check=False,
    )  # fmt: skip
    assert (done.stdout, done.stderr) == ("fine\n", "")
