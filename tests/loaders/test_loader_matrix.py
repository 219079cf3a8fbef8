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
from plain_stores import Plain, plain_store
from range_server import serving
from transports import CountingTransport

from saev_store import ShardStore
from saev_store.loaders import CachedTransport, OrderedLoader, ShuffledLoader
from saev_store.transport import MemoryTransport, MmapTransport, PreadTransport, ReadCost, Transport, open_transport
from saev_store.transport.limit import Wrapper

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
    "cached": lambda plain, stack, tmp_path: CachedTransport(in_memory(plain), tmp_path / "cache", 1 << 20),
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


@pytest.mark.parametrize("name", TRANSPORTS)
def test_how_it_is_read_never_shows(name: str, plain: Plain, truth: dict[str, np.ndarray], tmp_path) -> None:
    layer = np.array([(2, 5, 11).index(label) for label in truth["layer"].tolist()])
    np.testing.assert_array_equal(truth["act"], plain.acts[truth["example_idx"], layer, truth["token_idx"] + 1])
    with ExitStack() as stack:
        store = ShardStore.open(TRANSPORTS[name](plain, stack, tmp_path))
        rows = store.sel(layer=list(LAYERS), tokens="content")
        for options in itertools.islice(
            settings(), 1, None, 3 if "http" in name else 1
        ):  # a request each is dear there
            with ShuffledLoader(rows, batch_size=24, window_blocks=5, seed=3, n_partitions=4, **options) as loader:
                found = whole(loader)
            for key, expected in truth.items():
                np.testing.assert_array_equal(found[key], expected, err_msg=f"{key} with {options}")
            with OrderedLoader(rows, batch_size=24, **options) as loader:
                found = whole(loader)
            np.testing.assert_array_equal(found["act"], plain.acts[:, 1:, 1:].reshape(-1, 16))
        store.close()


@pytest.mark.parametrize("tokens", ["all", "special"])
def test_other_tokens(tokens: str, plain: Plain) -> None:
    found = []
    for transport in (MmapTransport(plain.path), PreadTransport(plain.path), Fetched(in_memory(plain))):
        rows = ShardStore.open(transport).sel(layer=5, tokens=tokens)
        with ShuffledLoader(rows, batch_size=24, window_blocks=5, n_partitions=4, read_bytes=700) as loader:
            found.append(whole(loader))
    for one in found:
        np.testing.assert_array_equal(one["act"], found[0]["act"])
        np.testing.assert_array_equal(one["act"], plain.acts[one["example_idx"], 1, one["token_idx"] + 1])
        assert len(set(zip(one["example_idx"].tolist(), one["token_idx"].tolist(), strict=True))) == len(rows)


@pytest.mark.parametrize("tokens", ["content", "special"])
@pytest.mark.parametrize("medium", ["flash", "disk", "parallel", "cached", "memory", "remote"])
def test_whatever_the_shards_are_taken_for(medium: str, tokens: str, plain: Plain) -> None:
    """Scattered vectors are gathered from a map, merged, or read one by one; they are the same vectors."""
    for transport in (MmapTransport(plain.path), PreadTransport(plain.path), RangesOnly(in_memory(plain))):
        rows = ShardStore.open(transport).sel(layer=5, tokens=tokens)
        for kind, more in ((OrderedLoader, {}), (ShuffledLoader, {}), (ShuffledLoader, {"window_blocks": 4})):  # fmt: skip
            with kind(rows, batch_size=24, medium=medium, **more) as loader:
                found = whole(loader)
            np.testing.assert_array_equal(found["act"], plain.acts[found["example_idx"], 1, found["token_idx"] + 1])
            assert len(set(zip(found["example_idx"].tolist(), found["token_idx"].tolist(), strict=True))) == len(rows)
