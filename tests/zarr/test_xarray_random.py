"""Random selections through xarray and dask, chained and by every kind of key, against the same of arrays in memory.

The expected values are those of xarray and NumPy for the dense tensor. `bash .ci/nightly selections` makes 12,000 of each kind.
"""

from __future__ import annotations

import os
from pathlib import Path

import numpy as np
import pytest
from dense_stores import PlainStore, plain_store
from transports import LatencyTransport

from saev_store import ShardStore
from saev_store.core.layout import Layout
from saev_store.transport import open_transport

xr = pytest.importorskip("xarray")
dask = pytest.importorskip("dask")
pytest.importorskip("dask.array")

DIMS = ("example", "layer", "token", "d_model")
#: Shards of 3, 3 and 1 examples.
LAYOUT = Layout(7, (2, 5, 11), 4, True, 8, 3)
#: Per place; the ordinary suite makes a share of what the long one makes.
N = 4_000 if os.environ.get("SAEV_STORE_LONG") else 60
PLACES = ["mapped", "pread", "far"]


@pytest.fixture(scope="module")
def plain() -> PlainStore:
    return plain_store(LAYOUT, labelled=True)


@pytest.fixture(scope="module")
def folder(plain: PlainStore, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return plain.write(tmp_path_factory.mktemp("random"))


def opened(place: str, folder: Path) -> ShardStore:
    if place == "far":  # ranges, joined as over a slow link
        return ShardStore.open(LatencyTransport(open_transport(str(folder), engine="pread"), 0.0, 1e9))
    return ShardStore.open(folder, engine="mmap" if place == "mapped" else "pread")


def one_slice(rng: np.random.Generator, size: int, *, tasks: bool) -> slice:
    start, stop = (None if rng.random() < 0.3 else int(rng.integers(-size - 2, size + 3)) for _ in range(2))
    step = None if rng.random() < 0.3 else int(rng.choice([-3, -2, -1, 1, 2, 3]))
    if tasks and start is not None:
        start = max(
            start, -size
        )  # dask 2026.8 takes one before the first position for the last, if the step is negative
    return slice(start, stop, step)


def one_list(rng: np.random.Generator, size: int) -> np.ndarray:
    """Positions with repeats and from the end, in any order, or a mask."""
    if rng.random() < 0.25:
        return rng.random(size) < 0.5
    return rng.integers(-size, size, size=int(rng.integers(0, 2 * size + 1))) if size else np.zeros(0, np.int64)


def one_key(rng: np.random.Generator, size: int, *, tasks: bool) -> object:
    kind = rng.random()
    if size and kind < 0.25:
        return int(rng.integers(-size, size))
    return one_slice(rng, size, tasks=tasks) if kind < 0.7 else one_list(rng, size)


def isel_key(rng: np.random.Generator, sizes: dict[str, int], *, tasks: bool) -> dict[str, object]:
    """What `isel` takes for some of the dimensions: keys of their own, or points that several of them share."""
    names = [str(name) for name in rng.permutation(list(sizes))[: int(rng.integers(0, len(sizes) + 1))]]
    key: dict[str, object] = {name: one_key(rng, sizes[name], tasks=tasks) for name in names}
    if names and min(sizes.values()) and rng.random() < 0.35:
        shape = tuple(int(n) for n in rng.integers(1, 4, size=int(rng.integers(1, 3))))
        dims = ("point", "column")[: len(shape)]
        if tasks:  # dask refuses points beside what selects nothing
            key = {name: item for name, item in key.items() if np.size(np.arange(sizes[name])[item])}
        for name in names[: int(rng.integers(1, len(names) + 1))]:
            key[name] = xr.DataArray(rng.integers(-sizes[name], sizes[name], size=shape), dims=dims)
    return key


def test_a_slice_that_begins_before_the_first_position_and_goes_down_is_empty(plain: PlainStore, folder: Path):
    """xarray 2026.9 alone gives the three examples from the last one on."""
    found = opened("mapped", folder).as_xarray().activations[-9::-3]
    assert found.shape == (0, *plain.dense.shape[1:])
    assert found.values.shape == found.shape


@pytest.mark.parametrize("place", PLACES)
@pytest.mark.parametrize("tasks", [False, True], ids=["lazy", "tasks"])
def test_chains_of_selections_equal_the_dense_tensor(tasks: bool, place: str, plain: PlainStore, folder: Path):
    rng = np.random.default_rng(PLACES.index(place) * 2 + tasks)
    store = opened(place, folder)
    dense = xr.DataArray(plain.dense, dims=DIMS)
    with dask.config.set(scheduler="synchronous"):
        for number in range(N):
            chunks = {name: int(rng.integers(1, size + 1)) for name, size in dense.sizes.items()} if tasks else None
            found, expected = store.as_xarray(chunks=chunks).activations, dense
            keys = []
            for _ in range(int(rng.integers(1, 4))):
                if "point" in expected.dims:
                    break
                keys.append(isel_key(rng, {str(name): size for name, size in expected.sizes.items()}, tasks=tasks))
                found, expected = found.isel(keys[-1]), expected.isel(keys[-1])
                assert found.shape == expected.shape, (number, keys)
            assert found.dims == expected.dims, (number, keys)
            assert found.shape == expected.shape, (number, keys)
            np.testing.assert_array_equal(found.values, expected.values, err_msg=f"{number} {keys}")


@pytest.mark.parametrize("place", PLACES)
def test_selections_of_the_dask_array_equal_the_dense_tensor(place: str, plain: PlainStore, folder: Path):
    """At most one list in a key: dask has no more."""
    rng = np.random.default_rng(10 + PLACES.index(place))
    store = opened(place, folder)
    with dask.config.set(scheduler="synchronous"):
        for number in range(N):
            chunks = "auto" if rng.random() < 0.2 else tuple(int(rng.integers(1, n + 1)) for n in LAYOUT.shape)
            key = [one_key(rng, size, tasks=True) for size in LAYOUT.shape]
            for axis in [axis for axis, item in enumerate(key) if isinstance(item, np.ndarray)][1:]:
                key[axis] = one_slice(rng, LAYOUT.shape[axis], tasks=True)
            found, expected = store.as_dask(chunks=chunks)[tuple(key)], plain.dense
            # One axis after the other: dask keeps a list's axis in its place, where NumPy moves it before integers' axes.
            for axis in reversed(range(4)):
                expected = expected[(slice(None),) * axis + (key[axis],)]
            assert found.shape == expected.shape, (number, key)
            np.testing.assert_array_equal(found.compute(), expected, err_msg=f"{number} {key}")
