"""Names of dask tasks follow the recording, whichever way the array is made: dask takes equal names for equal values."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
from plain_stores import plain_store

from saev_store import ShardStore, new_metadata

dask = pytest.importorskip("dask")
da = pytest.importorskip("dask.array")
xr = pytest.importorskip("xarray")
zarr = pytest.importorskip("zarr")


def _view(path: Path, name: str) -> str:
    return da.from_zarr(zarr.open_array(ShardStore.open(path).as_zarr(), path=name, mode="r")).name


def _as_zarr_dataset(path: Path, name: str) -> str:
    return xr.open_zarr(ShardStore.open(path).as_zarr(), chunks={}, consolidated=False)[name].data.name


def _opened(path: Path, name: str) -> str:
    return xr.open_dataset(str(path), engine="saev", chunks={})[name].data.name


def _opened_by_url(path: Path, name: str) -> str:
    """xarray takes the time of a folder into the name, but not that of a URL."""
    return xr.open_dataset(f"file://{path}", engine="saev", chunks={})[name].data.name


def _tree(path: Path, name: str) -> str:
    return xr.open_datatree(str(path.parent), engine="saev", chunks={})[path.name][name].data.name


def _chunked(path: Path, name: str) -> str:
    return ShardStore.open(path).as_xarray().chunk()[name].data.name


def _part_chunked(path: Path, name: str) -> str:
    return ShardStore.open(path).as_xarray()[name][1:4].chunk({"example": 2}).data.name


def _variable_chunked(path: Path, name: str) -> str:
    return ShardStore.open(path).as_xarray()[name].variable[1:4].chunk().data.name


WAYS = [_view, _as_zarr_dataset, _opened, _opened_by_url, _tree, _chunked, _part_chunked, _variable_chunked]


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize(("name", "file"), [("activations", "acts000001.bin"), ("labels", "labels.bin")])
def test_what_was_replaced_has_another_name(way: Callable[[Path, str], str], name: str, file: str, tmp_path: Path):
    path = plain_store(tmp_path, labels=True).path
    before = way(path, name)
    assert way(path, name) == before
    values = np.fromfile(path / file, np.uint8)
    values[::-1].tofile(path / file)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        assert way(path, name) != before


def test_rows_of_a_replaced_shard_have_another_name(tmp_path: Path):
    path = plain_store(tmp_path).path
    names = []
    for _ in range(2):
        rows = ShardStore.open(path).sel(layer=5)
        arrays = [da.from_array(rows, chunks=-1, meta=np.empty((0, 0), np.float32)) for _ in range(2)]
        assert arrays[0].name == arrays[1].name
        names.append(arrays[0].name)
        values = np.fromfile(path / "acts000001.bin", np.uint8)
        values[::-1].tofile(path / "acts000001.bin")
    assert names[0] != names[1]


def test_views_of_other_chunks_are_other_values_for_dask(tmp_path: Path):
    store = ShardStore.open(plain_store(tmp_path).path)
    views = [store.as_zarr(chunks=chunks) for chunks in ("auto", (1, 1, 5, 8), (1, 3, 5, 8), (1, 3, 5, 8))]
    tokens = [dask.base.tokenize(view) for view in views]
    assert len(set(tokens)) == 3
    assert tokens[2] == tokens[3]


def test_token_arrays_of_one_shape_have_names_of_their_own(tmp_path: Path):
    """Else dask would compute one of them for both."""
    arrays = {"ids": "int32", "others": "int32"}
    metadata = new_metadata(
        family="gpt2", ckpt="x", layers=(1,), content_tokens_per_example=2, cls_token=False, d_model=4, n_examples=3, dtype="float32",
        protocol="3.0", token_arrays=arrays,
    )  # fmt: skip
    ids = np.arange(6, dtype=np.int32).reshape(3, 2)
    with ShardStore.create(tmp_path, metadata, progress=False) as writer:
        writer.append(np.ones((3, 1, 2, 4), np.float32), ids=ids, others=-ids)
    store = ShardStore.open(tmp_path / metadata.hash)
    for dataset in (store.as_xarray().chunk(), store.as_xarray(chunks={}), store.as_xarray()):
        chunked = [dataset[name].variable.chunk() for name in arrays]
        assert chunked[0].data.name != chunked[1].data.name
        (found,) = dask.compute([each.data for each in chunked])
        assert [each.tolist() for each in found] == [ids.tolist(), (-ids).tolist()]


@pytest.mark.parametrize("options", [{"name": "mine"}, {"from_array_kwargs": {"name": "mine"}}])
def test_a_name_of_the_caller_is_kept_and_tells_the_recording(options: dict, tmp_path: Path):
    path = plain_store(tmp_path).path
    names = []
    for _ in range(2):
        names.append(ShardStore.open(path).as_xarray().activations.variable.chunk(**options).data.name)
        values = np.fromfile(path / "acts000001.bin", np.uint8)
        values[::-1].tofile(path / "acts000001.bin")
    assert all(name.startswith("mine-") for name in names)
    assert names[0] != names[1]


def test_other_rows_and_other_chunks_have_other_names(tmp_path: Path):
    store = ShardStore.open(plain_store(tmp_path, labels=True).path)
    chosen = [
        store.sel(layer=5),
        store.sel(layer=2),
        store.sel(layer=5, tokens="content"),
        store.sel(layer=5, dtype="float64"),
    ]
    arrays = [da.from_array(rows, chunks=-1, meta=np.empty((0, 0), rows.dtype)) for rows in chosen]
    views = [store.as_zarr(), store.as_zarr(chunks=(1, 1, 5, 8))]
    arrays += [da.from_zarr(zarr.open_array(view, path="activations", mode="r"), chunks=(3, 1, 5, 8)) for view in views]
    lazy = store.as_xarray()
    arrays += [lazy[name].variable.chunk().data for name in ("activations", "labels")]
    arrays += [lazy.activations.variable[first : first + 2].chunk({"example": 1}).data for first in (0, 2)]
    assert len({array.name for array in arrays}) == len(arrays)
    assert lazy.activations.variable[2:4].chunk({"example": 1}).data.compute().tobytes() == store[2:4].tobytes()
