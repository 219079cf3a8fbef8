"""One order and right numbers, whatever reads: every transport, thread count, read size, delay and kind of slot."""

from __future__ import annotations

import itertools
import random
import time
import uuid
from collections.abc import Callable, Iterator
from contextlib import ExitStack

import numpy as np
import pytest
from api import MemoryTransport, PreadTransport
from plain_stores import Plain, plain_store
from range_server import serving
from transports import CountingTransport, Wrapper

from saev_store import ShardStore
from saev_store.loaders import ShuffledLoader
from saev_store.transport import LocalTransport as MmapTransport
from saev_store.transport import ReadCost, Transport, open_transport

LAYERS = (5, 11)


@pytest.fixture(scope="module")
def plain(tmp_path_factory: pytest.TempPathFactory) -> Plain:
    return plain_store(tmp_path_factory.mktemp("matrix"), n=31, tokens=7, per_shard=5, d_model=16)


class Shaken(Wrapper):
    """Answers late, by chance."""

    def _around(self, operation, nbytes, call):
        time.sleep(random.random() * 0.002)
        return call()


class Fetched(Wrapper):
    """Small gaps and small requests only."""

    @property
    def cost(self) -> ReadCost:
        return ReadCost(64, 4096)


class RangesOnly:
    """A transport that does not write into the caller's memory."""

    cost, is_local, local_path, reads_into = ReadCost(100, 2000), False, None, False

    def __init__(self, inner: Transport) -> None:
        for name in ("url", "name", "counters", "read", "size", "get_ranges", "close", "at", "readinto", "version"):
            setattr(self, name, getattr(inner, name))


def in_memory(plain: Plain) -> MemoryTransport:
    files = {f"{plain.path.name}/{path.name}": path.read_bytes() for path in plain.path.iterdir()}
    return MemoryTransport(files).at(plain.path.name)


def in_fsspec_memory(plain: Plain, stack: ExitStack, tmp_path) -> Transport:
    fsspec = pytest.importorskip("fsspec")
    root = f"/{uuid.uuid4().hex}/{plain.path.name}"
    files = fsspec.filesystem("memory")
    for path in plain.path.iterdir():
        files.pipe_file(f"{root}/{path.name}", path.read_bytes())
    stack.callback(files.rm, root, recursive=True)
    return open_transport(f"memory:/{root}", engine="fsspec")


def over_http(engine: str) -> Callable[[Plain, ExitStack, object], Transport]:
    def make(plain: Plain, stack: ExitStack, tmp_path: object) -> Transport:
        pytest.importorskip("aiohttp" if engine == "fsspec" else "obstore")
        url, _ = stack.enter_context(serving(plain.path))
        return open_transport(url, engine=engine)

    return make


TRANSPORTS: dict[str, Callable[[Plain, ExitStack, object], Transport]] = {
    "mmap": lambda plain, stack, tmp_path: MmapTransport(plain.path),
    "pread": lambda plain, stack, tmp_path: PreadTransport(plain.path),
    "memory": lambda plain, stack, tmp_path: in_memory(plain),
    "late": lambda plain, stack, tmp_path: Shaken(PreadTransport(plain.path)),
    "small requests": lambda plain, stack, tmp_path: Fetched(in_memory(plain)),
    "ranges only": lambda plain, stack, tmp_path: RangesOnly(in_memory(plain)),
    "counted": lambda plain, stack, tmp_path: CountingTransport(PreadTransport(plain.path)),
    "fsspec, memory": in_fsspec_memory,
    "fsspec, http": over_http("fsspec"),
    "obstore, http": over_http("obstore"),
}


def settings() -> Iterator[dict[str, object]]:
    """1 to 64 threads with reads from single vectors to everything at once."""
    sizes = itertools.cycle((1, 700, 5000, 10**9))
    for n_threads in (1, 2, 5, 16, 64, 3, 1, 64, 2):
        yield {"n_threads": n_threads, "read_bytes": next(sizes)}


@pytest.fixture(scope="module")
def truth(plain: Plain) -> dict[str, np.ndarray]:
    """What one thread reads from a map: the order that all others are held to."""
    rows = ShardStore.open(MmapTransport(plain.path)).sel(layer=list(LAYERS), tokens="content")
    with ShuffledLoader(rows, batch_size=24, window_blocks=5, seed=3, n_partitions=4, n_threads=1) as loader:
        return whole(loader)


def whole(loader) -> dict[str, np.ndarray]:
    batches = list(loader)
    return {name: np.concatenate([batch[name] for batch in batches]) for name in batches[0]}
