"""The dataset that xarray shows: lazy, labelled, found by engine or by folder, and put together from several stores."""

from __future__ import annotations

import asyncio
import importlib
import json
import pickle
import subprocess
import sys
import tomllib
import tracemalloc
import warnings
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
from api import MemoryTransport
from dense_stores import PlainStore, plain_documents, plain_store
from transports import CountingTransport, LatencyTransport
from waiting import HANG_S

from saev_store import SaevStoreWarning, ShardStore
from saev_store.core.layout import Layout
from saev_store.errors import ArgumentError, CorruptShardError, LayerNotFoundError, NotFoundError

xr = pytest.importorskip("xarray")
dask = pytest.importorskip("dask")
pytest.importorskip("dask.array")
from saev_store.xarray import SaevBackend  # needs xarray

ROOT = Path(__file__).resolve().parents[2]
SAMPLES = Path(__file__).parents[1] / "data" / "saev"
VALID = sorted(path.parent for path in SAMPLES.glob("*/expected.json"))
LAYOUT = Layout(7, (2, 5, 11), 4, True, 8, 3)
TOGETHER = {
    "combine": "nested", "concat_dim": "example", "data_vars": "minimal", "coords": "minimal", "compat": "override",
    "join": "exact", "combine_attrs": "drop_conflicts",
}  # fmt: skip


@pytest.fixture(scope="module")
def plain() -> PlainStore:
    return plain_store(LAYOUT, tail="cut", labelled=True)


@pytest.fixture
def folder(plain: PlainStore, tmp_path: Path) -> Path:
    return plain.write(tmp_path)


@pytest.fixture
def _installed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """As if the package were installed: a distribution with the entry points of pyproject.toml."""
    entry_points = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["entry-points"]["xarray.backends"]
    about = tmp_path / "site" / "saev_store_entry_points-0.dist-info"
    about.mkdir(parents=True)
    about.joinpath("METADATA").write_text("Metadata-Version: 2.1\nName: saev-store-entry-points\nVersion: 0\n")
    lines = [f"{name} = {target}" for name, target in entry_points.items()]
    about.joinpath("entry_points.txt").write_text("\n".join(["[xarray.backends]", *lines, ""]))
    monkeypatch.setattr(sys, "path", [str(about.parent), *sys.path])
    importlib.invalidate_caches()
    with warnings.catch_warnings():
        # Where the package really is installed there are two distributions of the name; one is what users have.
        warnings.filterwarnings("ignore", "Found .* entrypoints for the engine name saev", RuntimeWarning)
        xr.backends.refresh_engines()
        yield
    monkeypatch.undo()
    xr.backends.refresh_engines()


@pytest.mark.parametrize("chunks", [None, {}, "auto", {"example": 2}, {"example": 3, "layer": 1}, 4], ids=str)
@pytest.mark.parametrize("sample", VALID, ids=lambda path: path.name)
def test_peer_written_samples_bit_for_bit(sample: Path, chunks: object):
    expected = json.loads((sample / "expected.json").read_text())
    store = ShardStore.open(sample / expected["store"])
    truth = np.load(sample / "acts.npy")
    dataset = store.as_xarray(chunks=chunks)
    assert dataset.activations.dims == ("example", "layer", "token", "d_model")
    assert dataset.activations.values.tobytes() == truth.tobytes()
    for position, layer in enumerate(store.layers):
        one = dataset.activations.sel(layer=layer)
        assert one.values.tobytes() == np.ascontiguousarray(truth[:, position]).tobytes()
    if store.layout.cls_token:
        cls = dataset.activations.sel(token=-1)
        assert cls.values.tobytes() == np.ascontiguousarray(truth[:, :, 0]).tobytes()
    assert ("labels" in dataset) == (store.labels is not None)
    if store.labels is not None:
        np.testing.assert_array_equal(dataset.labels.values, store.labels)
    assert dataset.attrs["ckpt"] == store.metadata.ckpt


def test_labels_meet_activations_by_token(folder: Path, plain: PlainStore):
    dataset = ShardStore.open(folder).as_xarray()
    labels = dataset.labels.rename(content_token="token")
    content = dataset.activations.sel(layer=5, token=labels.token)
    chosen = content.where(labels == 2)
    mask = plain.labels == 2
    assert chosen.values[mask].tobytes() == plain.dense[:, 1, 1:][mask].tobytes()


@pytest.mark.usefixtures("_installed")
def test_the_engine_is_found_by_name_and_by_folder(folder: Path, plain: PlainStore):
    assert "saev" in xr.backends.list_engines()
    for where in (folder, str(folder), f"file://{folder}", ShardStore.open(folder)):
        for options in ({"engine": "saev"}, {}):
            with xr.open_dataset(where, **options) as dataset:
                assert dataset.activations.values.tobytes() == plain.dense.tobytes()
                assert dataset.encoding["source"] == str(folder)
    with xr.open_dataset(folder, engine="saev", chunks={}, drop_variables="labels") as dataset:
        assert list(dataset) == ["activations"]
    with pytest.raises(NotFoundError, match=r"no metadata\.json"):
        xr.open_dataset(folder.parent / "site", engine="saev")


@pytest.mark.usefixtures("_installed")
def test_storage_options_reach_the_file_system(folder: Path, plain: PlainStore):
    fsspec = pytest.importorskip("fsspec")
    memory = fsspec.filesystem("memory")
    memory.put(str(folder), f"/bucket/{plain.name}", recursive=True)
    with xr.open_dataset(
        f"simplecache::memory://bucket/{plain.name}",
        engine="saev",
        chunks={},
        storage_options={"simplecache": {"cache_storage": str(folder.parent / "cache")}},
    ) as dataset:
        assert dataset.activations.values.tobytes() == plain.dense.tobytes()
    assert any((folder.parent / "cache").iterdir())


def test_guessing_takes_stores_and_nothing_else(folder: Path, tmp_path: Path):
    backend = SaevBackend()
    assert backend.guess_can_open(folder)
    assert backend.guess_can_open(f"{folder}/")
    assert backend.guess_can_open(f"file://{folder}")
    others = (tmp_path, folder / "metadata.json", tmp_path / "nothing", "s3://bucket/store", b"bytes", 3, object(), "")
    for other in (*others, f"file://{tmp_path}", f"simplecache::file://{folder}"):
        assert not backend.guess_can_open(other), other


@pytest.mark.usefixtures("_installed")
def test_stores_side_by_side(tmp_path: Path):
    stores = [plain_store(Layout(n, (2, 5, 11), 4, True, 8, 3), seed=n, labelled=True) for n in (7, 6, 2)]
    folders = [store.write(tmp_path) for store in stores]
    truth = np.concatenate([store.dense for store in stores])
    with xr.open_mfdataset(folders, engine="saev", **TOGETHER) as dataset:
        assert dict(dataset.sizes) == {"example": 15, "layer": 3, "token": 5, "d_model": 8, "content_token": 4}
        assert dataset.chunks["example"] == (7, 6, 2)
        assert dataset.activations.values.tobytes() == truth.tobytes()
        np.testing.assert_array_equal(dataset.labels.values, np.concatenate([store.labels for store in stores]))
        assert dataset.attrs["family"] == "clip"
        assert "url" not in dataset.attrs
    lazy = xr.concat(
        [ShardStore.open(folder).as_xarray(chunks={}) for folder in folders], dim="example",
        data_vars="minimal", coords="minimal", compat="override", join="exact", combine_attrs="drop_conflicts",
    )  # fmt: skip
    assert lazy.activations.isel(example=[0, 7, 14]).values.tobytes() == truth[[0, 7, 14]].tobytes()


@pytest.mark.usefixtures("_installed")
def test_stores_of_other_layers_are_not_put_together(tmp_path: Path):
    folders = [plain_store(Layout(4, layers, 4, True, 8, 3)).write(tmp_path) for layers in ((2, 5), (2, 6))]
    with pytest.raises(ValueError, match="layer"):
        xr.open_mfdataset(folders, engine="saev", **TOGETHER)


KEYS = {
    "integers": lambda: {"example": 4, "layer": 1, "token": -1},
    "slices": lambda: {"example": slice(5, None, -2), "token": slice(1, 4), "d_model": slice(2, 6)},
    "one list": lambda: {"example": [6, 0, 6], "layer": 2},
    "outer lists": lambda: {"example": [6, 0], "layer": [2, 0], "token": [4, 0, 1], "d_model": [7, 2]},
    "mask": lambda: {"example": np.arange(7) % 3 == 0, "token": [0]},
    "points in front": lambda: {"example": xr.DataArray([6, 0, 3], dims="p"), "token": xr.DataArray([0, 4, 4], dims="p")},
    "neighbouring points": lambda: {"layer": xr.DataArray([2, 0], dims="p"), "token": xr.DataArray([[0, 3, 3], [1, 0, 4]], dims=("p", "q"))},
    "points and a slice": lambda: {"example": slice(2, 6), "layer": xr.DataArray([2, 0], dims="p"), "token": xr.DataArray([1, 1], dims="p")},
    "every axis": lambda: {dim: xr.DataArray([1, 0, 2], dims="p") for dim in ("example", "layer", "token", "d_model")},
    "nothing": lambda: {"example": [], "layer": slice(1, 1)},
}  # fmt: skip


@pytest.mark.parametrize("chunks", [None, {}, {"example": 2, "layer": 2}], ids=["lazy", "tasks", "small"])
@pytest.mark.parametrize("far", [False, True], ids=["mapped", "far"])
@pytest.mark.parametrize("key", KEYS, ids=str)
def test_every_way_to_index_equals_dense(key: str, *, far: bool, chunks: object, plain: PlainStore, folder: Path):
    files = MemoryTransport(plain.files, label=plain.name)
    store = ShardStore.open(LatencyTransport(files, 0.0, 1e12) if far else folder)
    dataset = store.as_xarray(chunks=chunks)
    dense = xr.Dataset({"activations": (dataset.activations.dims, plain.dense)}).activations
    found, expected = dataset.activations.isel(KEYS[key]()), dense.isel(KEYS[key]())
    assert found.dims == expected.dims
    assert found.values.tobytes() == expected.values.tobytes()
    labels = xr.Dataset({"labels": (dataset.labels.dims, plain.labels)}).labels
    chosen = {dim: item for dim, item in KEYS[key]().items() if dim == "example"}
    assert dataset.labels.isel(chosen).values.tobytes() == labels.isel(chosen).values.tobytes()


#: Labels for `sel` -> the same selection of `store[...]`, by position.
SELECTIONS = {
    "one vector": ({"example": 4, "layer": 5, "token": -1}, np.s_[4, 1, 0]),
    "one example": ({"example": 4}, np.s_[4]),
    "one layer": ({"layer": 5}, np.s_[:, 1]),
    "CLS of one layer": ({"layer": 5, "token": -1}, np.s_[:, 1, 0]),
    "content tokens": ({"token": slice(0, None)}, np.s_[:, :, 1:]),
    "two layers, reversed": ({"layer": [11, 2]}, np.s_[:, [2, 0]]),
    "some tokens of one layer": ({"layer": 11, "token": slice(1, 2)}, np.s_[:, 2, 2:4]),
    "a range of examples": ({"example": slice(2, 5)}, np.s_[2:6]),
    "scattered examples": ({"example": [6, 0, 3], "layer": [2]}, np.s_[[6, 0, 3], 0:1]),
    "every second example": ({"example": slice(None, None, 2), "layer": 2}, np.s_[::2, 0]),
    "points": (
        {"example": xr.DataArray([6, 0, 3], dims="p"), "layer": xr.DataArray([2, 11, 5], dims="p")},
        np.s_[[6, 0, 3], [0, 2, 1]],
    ),
    "everything": ({}, np.s_[:]),
}


def test_loading_without_waiting_in_the_loop(folder: Path, plain: PlainStore):
    one = asyncio.run(ShardStore.open(folder).as_xarray().activations.sel(layer=5).load_async())
    assert one.values.tobytes() == plain.dense[:, 1].tobytes()


def test_opening_and_loading_takes_the_output_and_no_more(tmp_path: Path):
    """With tasks: test_dask_result.py."""
    plain = plain_store(Layout(550, tuple(range(3)), 15, True, 320, 100))
    folder = plain.write(tmp_path)
    xr.open_dataset(folder, engine=SaevBackend).activations[:1].values  # noqa: B018  # imports
    tracemalloc.start()
    try:
        found = xr.open_dataset(folder, engine=SaevBackend).activations.values
        _, peak = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert found.tobytes() == plain.dense.tobytes()
    assert peak <= 1.1 * found.nbytes


@pytest.mark.parametrize("chunks", [None, {}], ids=["lazy", "tasks"])
@pytest.mark.parametrize("format", ["netCDF", "Zarr"])
def test_datasets_are_written_and_read_back(
    format: str, chunks: object, plain: PlainStore, folder: Path, tmp_path: Path
):
    store = ShardStore.open(folder)
    dataset = store.as_xarray(chunks=chunks)
    if format == "netCDF":
        pytest.importorskip("scipy")
        dataset.to_netcdf(tmp_path / "x.nc", engine="scipy")
        again = xr.open_dataset(tmp_path / "x.nc", engine="scipy")
    else:
        dataset.to_zarr(tmp_path / "x.zarr", consolidated=False)
        again = xr.open_zarr(tmp_path / "x.zarr", consolidated=False)
    with again:
        assert again.activations.values.astype("<f4").tobytes() == plain.dense.tobytes()
        np.testing.assert_array_equal(again.labels.values, plain.labels)
        for name in ("example", "layer", "token", "content_token"):
            np.testing.assert_array_equal(again[name].values, dataset[name].values)
        assert dict(again.attrs) == dict(dataset.attrs)
        assert json.loads(again.attrs["data"]) == store.metadata.data


def test_tasks_are_written_to_zarr(monkeypatch: pytest.MonkeyPatch, tmp_path: Path):
    """Tasks that cut shards: zarr wants chunks of one length."""
    layout = Layout(60, (2, 5), 4, True, 8, 24)
    monkeypatch.setattr("saev_store.core.chunk_grid.TASK_BYTES", 9 * layout.example_nbytes)
    plain = plain_store(layout, labelled=True)
    dataset = ShardStore.open(plain.write(tmp_path)).as_xarray(chunks={})
    assert dataset.chunks["example"] == (8,) * 7 + (4,)
    dataset.to_zarr(tmp_path / "x.zarr", consolidated=False)
    with xr.open_zarr(tmp_path / "x.zarr", consolidated=False) as again:
        assert again.activations.values.tobytes() == plain.dense.tobytes()


def test_opening_reads_no_activation(plain: PlainStore):
    transport = CountingTransport(LatencyTransport(MemoryTransport(plain.files, label=plain.name), 0.0, 1e12))
    store = ShardStore.open(transport)
    store.as_xarray()
    dataset = store.as_xarray(chunks={})
    repr(dataset)
    assert set(transport.counters.operations) == {"read", "size"}
    assert transport.counters.operations["read"] <= 3  # digests.json for the names of tasks


def test_tasks_are_few_and_follow_the_shards():
    layout = Layout(40_000, tuple(range(6)), 196, True, 768, 2_000)
    files = plain_documents(layout)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", SaevStoreWarning)
        store = ShardStore.open(LatencyTransport(MemoryTransport(files), 0.0, 1e12))
    for dataset in (store.as_xarray(chunks={}), xr.open_dataset(store, engine=SaevBackend, chunks={})):
        lengths = dataset.chunks["example"]
        assert sum(lengths) == 40_000
        assert len(lengths) < 1_700
        ends = np.cumsum(lengths)
        assert set(range(2_000, 40_001, 2_000)) <= set(ends.tolist())
        assert max(lengths) * layout.example_nbytes <= 160 << 20
    assert store.as_dask().numblocks[0] < 1_700


def test_datasets_pickle(folder: Path, plain: PlainStore):
    for chunks in (None, {}):
        dataset = pickle.loads(pickle.dumps(ShardStore.open(folder).as_xarray(chunks=chunks)))
        assert dataset.activations.values.tobytes() == plain.dense.tobytes()


def test_errors_are_ours(folder: Path):
    dataset = ShardStore.open(folder).as_xarray()
    (folder / "acts000001.bin").unlink()
    with pytest.raises(CorruptShardError, match=r"acts000001\.bin"):
        dataset.activations.load()
    with pytest.raises(ArgumentError, match="cannot be laid over"):
        ShardStore.open(folder, damaged_ok=True).as_xarray(chunks={"example": (2, 3)})
    with pytest.raises(KeyError):
        dataset.activations.sel(layer=3)
    assert issubclass(LayerNotFoundError, KeyError)


@pytest.mark.parametrize(("missing", "call"), [("xarray", "as_xarray()"), ("dask", "as_dask()")])
def test_what_is_not_installed_is_named(missing: str, call: str, folder: Path):
    code = (
        f"import sys; sys.modules[{missing!r}] = None\n"
        "from saev_store import ShardStore\n"
        "from saev_store.errors import MissingDependencyError\n"
        f"try: ShardStore.open(sys.argv[1]).{call}\n"
        "except MissingDependencyError as error: print(error)"
    )
    command = [sys.executable, "-c", code, str(folder)]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=HANG_S, check=True)
    assert done.stdout == f"as_{missing}: {missing} is not installed. Run: pip install 'saev-store[xarray]'.\n"
