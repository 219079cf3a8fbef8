"""The dataset that xarray shows: lazy, labelled, found by engine or by folder, and put together from several stores."""

from __future__ import annotations

import importlib
import json
import pickle
import subprocess
import sys
import tomllib
import warnings
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
from dense_stores import PlainStore, plain_store
from transports import CountingTransport, LatencyTransport
from waiting import HANG_S

from saev_store import SaevStoreWarning, ShardStore
from saev_store.core.layout import Layout
from saev_store.errors import ArgumentError, CorruptShardError, LayerNotFoundError, NotFoundError
from saev_store.transport import MemoryTransport

xr = pytest.importorskip("xarray")
pytest.importorskip("dask")

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
    for where in (folder, str(folder)):
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
    from saev_store.xarray import SaevBackend

    backend = SaevBackend()
    assert backend.guess_can_open(folder)
    assert backend.guess_can_open(f"{folder}/")
    for other in (tmp_path, folder / "metadata.json", tmp_path / "nothing", "s3://bucket/store", b"bytes", 3, object()):
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


def test_opening_reads_no_activation(plain: PlainStore):
    transport = CountingTransport(LatencyTransport(MemoryTransport(plain.files, label=plain.name), 0.0, 1e12))
    store = ShardStore.open(transport)
    store.as_xarray()
    dataset = store.as_xarray(chunks={})
    repr(dataset)
    assert set(transport.counters.operations) == {"read", "size"}
    assert transport.counters.operations["read"] == 2


def test_tasks_are_few_and_follow_the_shards():
    layout = Layout(40_000, tuple(range(6)), 196, True, 768, 2_000)
    files = plain_documents(layout)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", SaevStoreWarning)
        store = ShardStore.open(LatencyTransport(MemoryTransport(files), 0.0, 1e12))
    for dataset in (
        store.as_xarray(chunks={}),
        store.as_xarray(chunks={}, zarr_chunks=(20, 6, 197, 768), sharded=False),
    ):
        lengths = dataset.chunks["example"]
        assert sum(lengths) == 40_000
        assert len(lengths) < 1_200
        ends = np.cumsum(lengths)
        assert set(range(2_000, 40_001, 2_000)) <= set(ends.tolist())
        assert max(lengths) * layout.example_nbytes <= 160 << 20
    assert store.as_dask().numblocks[0] < 1_200


def plain_documents(layout: Layout) -> dict[str, bytes]:
    from saev_store import new_metadata
    from saev_store.documents import shards_bytes

    metadata = new_metadata(
        family="clip", ckpt="x", layers=layout.layers, content_tokens_per_example=layout.content_tokens_per_example,
        cls_token=layout.cls_token, d_model=layout.d_model, n_examples=layout.n_examples,
        max_tokens_per_shard=layout.examples_per_shard * layout.vectors_per_example,
    )  # fmt: skip
    return {"metadata.json": metadata.to_bytes(), "shards.json": shards_bytes(layout, metadata.count_key)}


def test_datasets_pickle(folder: Path, plain: PlainStore):
    for chunks in (None, {}):
        dataset = pickle.loads(pickle.dumps(ShardStore.open(folder).as_xarray(chunks=chunks)))
        assert dataset.activations.values.tobytes() == plain.dense.tobytes()


def test_errors_are_ours(folder: Path):
    dataset = ShardStore.open(folder).as_xarray()
    (folder / "acts000001.bin").unlink()
    with pytest.raises(CorruptShardError, match=r"acts000001\.bin"):
        dataset.activations.load()
    with pytest.raises(ArgumentError, match="nearest"):
        ShardStore.open(folder, damaged_ok=True).as_xarray(zarr_chunks=(2, 3, 5, 8))
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
    assert done.stdout == f"as_{missing}: {missing} is not installed. pip install 'saev_store[xarray]'\n"
