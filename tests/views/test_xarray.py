"""The dataset that xarray shows is the dense array: lazy, labelled, found by engine or folder, joined, and as a tree."""

from __future__ import annotations

import asyncio
import importlib
import json
import os
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
from token_stores import token_store
from transports import CountingTransport, LatencyTransport
from waiting import HANG_S

from saev_store import SaevStoreWarning, ShardStore, new_metadata
from saev_store.core.layout import Layout
from saev_store.errors import (
    ArgumentError,
    CorruptShardError,
    DocumentError,
    IncompleteStoreError,
    NotFoundError,
    SaevStoreError,
    UnsafeContentError,
)
from saev_store.transport import open_transport

xr = pytest.importorskip("xarray")
dask = pytest.importorskip("dask")
pd = pytest.importorskip("pandas")
pytest.importorskip("dask.array")
from saev_store.xarray import SaevBackend

#: Selections; `bash .ci/nightly selections` makes 10,000.
N = 10_000 if os.environ.get("SAEV_STORE_LONG") else 800
ROOT = Path(__file__).resolve().parents[2]
SAMPLES = ROOT / "tests/data/saev"
DIMS = ("example", "layer", "token", "d_model")
#: Shards of 3, 3 and 1 examples.
LAYOUT = Layout(7, (2, 5, 11), 4, True, 8, 3)
SHOWN = {"token_ids": "token_ids", "mask": "mask", "layer": "tokens_layer", "score": "score"}


@pytest.fixture
def plain() -> PlainStore:
    return plain_store(LAYOUT, tail="cut", labelled=True)


@pytest.fixture
def folder(plain: PlainStore, tmp_path: Path) -> Path:
    return plain.write(tmp_path / "root")


@pytest.fixture
def stores(tmp_path: Path) -> list[tuple[PlainStore, Path]]:
    """Three stores of one model in one root."""
    plains = [plain_store(Layout(n, (2, 5, 11), 4, True, 8, 3), seed=n, labelled=True, ckpt="one") for n in (7, 6, 2)]
    return [(plain, plain.write(tmp_path / "roots")) for plain in plains]


def far(folder: Path) -> ShardStore:
    return ShardStore.open(LatencyTransport(open_transport(str(folder), engine="pread"), 0.0, 1e9))


# -- selections --------------------------------------------------------------------------------------------------------


def one_slice(rng: np.random.Generator, size: int) -> slice:
    start, stop = (None if rng.random() < 0.3 else int(rng.integers(-size - 2, size + 3)) for _ in range(2))
    return slice(start, stop, None if rng.random() < 0.3 else int(rng.choice([-3, -2, -1, 1, 2, 3])))


def one_key(rng: np.random.Generator, size: int) -> object:
    kind = rng.random()
    if size and kind < 0.25:
        return int(rng.integers(-size, size))
    if kind < 0.7:
        return one_slice(rng, size)
    if kind < 0.8:
        return rng.random(size) < 0.5
    return rng.integers(-size, size, size=int(rng.integers(0, 2 * size + 1))) if size else np.zeros(0, np.int64)


def isel_key(rng: np.random.Generator, sizes: dict[str, int]) -> dict[str, object]:
    """What `isel` takes for some of the dimensions: keys of their own, or points that several of them share."""
    names = [str(name) for name in rng.permutation(list(sizes))[: int(rng.integers(0, len(sizes) + 1))]]
    key: dict[str, object] = {name: one_key(rng, sizes[name]) for name in names}
    if names and min(sizes.values()) and rng.random() < 0.35:
        shape = tuple(int(n) for n in rng.integers(1, 4, size=int(rng.integers(1, 3))))
        for name in names[: int(rng.integers(1, len(names) + 1))]:
            points = rng.integers(-sizes[name], sizes[name], size=shape)
            key[name] = xr.Variable(("point", "column")[: len(shape)], points)
    return key


def test_selections_through_xarray_equal_numpy(tmp_path: Path) -> None:
    """Chained and by every kind of key; of the vectors and of token arrays."""
    rng, cases = np.random.default_rng(0), []
    for number, dtype in enumerate(("float32", "bfloat16", "float16")):
        made = token_store(
            tmp_path / dtype, dtype=dtype, n=7, per_shard=3, content=4, layers=(2, 5, 11), seed=number,
            arrays={"token_ids": "int32", "mask": "bool", "layer": "int64"},
        )  # fmt: skip
        with np.errstate(invalid="ignore"):
            acts = made.acts.astype(np.float32)
        truth = {"activations": (DIMS, acts)}
        truth |= {SHOWN[name]: (("example", "content_token"), values) for name, values in made.arrays.items()}
        places = (ShardStore.open(made.path), ShardStore.open(made.path, engine="pread"), far(made.path))
        cases += [(store.as_xarray(), xr.Dataset(truth)) for store in places]
    with np.errstate(invalid="ignore"):
        for number in range(N):
            dataset, dense = cases[number % len(cases)]
            name = "activations" if number % 4 else str(rng.choice(list(SHOWN.values())[:3]))
            found, expected, keys = dataset[name].variable, dense[name].variable, []
            for _ in range(int(rng.integers(1, 3))):
                if "point" in expected.dims:
                    break
                keys.append(isel_key(rng, {str(key): size for key, size in expected.sizes.items()}))
                found, expected = found.isel(keys[-1]), expected.isel(keys[-1])
            assert (found.dims, found.shape, found.dtype) == (expected.dims, expected.shape, expected.dtype), keys
            assert np.array_equal(found.values, expected.values, equal_nan=name == "activations"), (number, keys)


def test_a_slice_down_from_before_the_first_position_is_empty(folder: Path) -> None:
    """xarray 2026.9 by itself gives the three examples from the last one on."""
    found = ShardStore.open(folder).as_xarray().activations[-9::-3]
    assert found.shape == found.values.shape == (0, *LAYOUT.shape[1:])


@pytest.mark.parametrize("sample", sorted(SAMPLES.glob("*/expected.json")), ids=lambda path: path.parent.name)
def test_files_of_the_reference_are_selected_by_label_bit_for_bit(sample: Path) -> None:
    store = ShardStore.open(sample.parent / json.loads(sample.read_text())["store"])
    truth = np.load(sample.parent / "acts.npy")
    for chunks in (None, {}, "auto", {"example": 2}, {"example": 3, "layer": 1}, 4):
        dataset = store.as_xarray(chunks=chunks)
        assert dataset.activations.dims == DIMS
        assert dataset.activations.values.tobytes() == truth.tobytes()
        for position, layer in enumerate(store.layers):
            one = dataset.activations.sel(layer=layer).values
            assert one.tobytes() == np.ascontiguousarray(truth[:, position]).tobytes()
        if store.layout.cls_token:
            assert dataset.activations.sel(token=-1).values.tobytes() == np.ascontiguousarray(truth[:, :, 0]).tobytes()
        assert ("labels" in dataset) == (store.labels is not None)
        if store.labels is not None:
            assert np.array_equal(dataset.labels.values, store.labels)
        assert dataset.attrs["ckpt"] == store.metadata.ckpt


def test_token_arrays_belong_to_the_caller_and_meet_activations_by_token(folder: Path, plain: PlainStore) -> None:
    dataset = ShardStore.open(folder).as_xarray()
    labels = dataset.labels.rename(content_token="token")
    chosen = dataset.activations.sel(layer=5, token=labels.token).where(labels == 2)
    mask = plain.labels == 2
    assert chosen.values[mask].tobytes() == plain.dense[:, 1, 1:][mask].tobytes()
    ShardStore.open(folder).as_xarray().labels[2:].values[...] = 9
    assert np.array_equal(ShardStore.open(folder).as_xarray().labels.values, plain.labels)


def test_load_async_reads_without_blocking_the_loop(folder: Path, plain: PlainStore) -> None:
    dataset = ShardStore.open(folder).as_xarray()
    one = asyncio.run(dataset.activations.sel(layer=5).load_async())
    assert one.values.tobytes() == plain.dense[:, 1].tobytes()
    assert np.array_equal(asyncio.run(dataset.labels.load_async()).values, plain.labels)


# -- opening -----------------------------------------------------------------------------------------------------------


@pytest.fixture
def _installed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """As if the package were installed: a distribution with the entry points of pyproject.toml."""
    points = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["entry-points"]["xarray.backends"]
    about = tmp_path / "site" / "saev_store_entry_points-0.dist-info"
    about.mkdir(parents=True)
    about.joinpath("METADATA").write_text("Metadata-Version: 2.1\nName: saev-store-entry-points\nVersion: 0\n")
    lines = [f"{name} = {target}" for name, target in points.items()]
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


@pytest.mark.usefixtures("_installed")
def test_open_dataset_finds_the_engine_by_name_and_by_folder(folder: Path, plain: PlainStore, tmp_path: Path) -> None:
    for where in (folder, str(folder), f"file://{folder}", ShardStore.open(folder)):
        for options in ({"engine": "saev"}, {}):
            with xr.open_dataset(where, **options) as dataset:
                assert dataset.activations.values.tobytes() == plain.dense.tobytes()
                assert dataset.encoding["source"] == str(folder)
    with pytest.raises(NotFoundError):
        xr.open_dataset(tmp_path / "site", engine="saev")
    together = {"combine": "nested", "concat_dim": "example", "data_vars": "minimal", "coords": "minimal",
                "compat": "override", "join": "exact", "combine_attrs": "drop_conflicts"}  # fmt: skip
    second = plain_store(LAYOUT, seed=1, labelled=True).write(tmp_path / "root")
    with xr.open_mfdataset([folder, second], engine="saev", **together) as dataset:
        assert dataset.activations.chunks[0] == (7, 7)
        assert np.array_equal(dataset.activations[:7].values.view(np.uint32), plain.dense.view(np.uint32))
    fsspec = pytest.importorskip("fsspec")
    fsspec.filesystem("memory").put(str(folder), f"/bucket/{plain.name}", recursive=True)
    options = {"simplecache": {"cache_storage": str(tmp_path / "cache")}}
    with xr.open_dataset(
        f"simplecache::memory://bucket/{plain.name}", engine="saev", chunks={}, storage_options=options
    ) as dataset:
        assert dataset.activations.values.tobytes() == plain.dense.tobytes()
    assert any((tmp_path / "cache").iterdir())


def test_guess_can_open_takes_stores_and_nothing_else(folder: Path, tmp_path: Path) -> None:
    guess = SaevBackend().guess_can_open
    for store in (folder, f"{folder}/", f"file://{folder}", ShardStore.open(folder)):
        assert guess(store)
    for other in (
        tmp_path, folder / "metadata.json", tmp_path / "nothing", "s3://bucket/store", b"bytes", 3, object(), "",
        f"file://{tmp_path}", f"simplecache::file://{folder}", folder / "acts000000.bin",
    ):  # fmt: skip
        assert not guess(other), other
    for name in ("metadata.json", "shards.json"):
        content = (folder / name).read_bytes()
        (folder / name).write_bytes(b"")
        assert not guess(folder)
        (folder / name).unlink()
        assert not guess(folder)
        (folder / name).write_bytes(content)


def test_open_dataset_ignores_decoding_options_and_refuses_unknown_ones(stores: list[tuple[PlainStore, Path]]) -> None:
    plain, where = stores[0]
    for options in (
        {"mask_and_scale": True, "decode_timedelta": True}, {"decode_times": False, "use_cftime": False},
        {"decode_coords": "all", "concat_characters": True}, {"decode_cf": False},
    ):  # fmt: skip
        with xr.open_dataset(where, engine=SaevBackend, **options) as dataset:
            assert dataset.identical(ShardStore.open(where).as_xarray())
            assert dataset.labels.dtype == np.uint8
        with xr.open_datatree(where.parent, engine=SaevBackend, **options) as tree:
            assert len(tree.children) == 3
    for open_, place in ((xr.open_dataset, where), (xr.open_datatree, where.parent)):
        with pytest.raises(TypeError, match="dammaged_ok"):
            open_(place, engine=SaevBackend, dammaged_ok=True)
        with pytest.raises(ArgumentError):
            open_(place, engine=SaevBackend, storage_options={"anon": True})  # local files take none
    everything = {"activations", "labels", "example", "layer", "token", "content_token"}
    for dropped in ("labels", ["labels", "content_token", "example"], ["nothing"], np.array(["labels", "token"])):
        left_out = {dropped} if isinstance(dropped, str) else set(dropped)
        for place in (where, ShardStore.open(where)):
            with xr.open_dataset(place, engine=SaevBackend, drop_variables=dropped) as dataset:
                assert set(dataset.variables) == everything - left_out
        with xr.open_datatree(where.parent, engine=SaevBackend, drop_variables=dropped) as tree:
            assert not left_out & set(tree[plain.name].variables)
    with pytest.raises(ArgumentError) as caught:
        xr.open_dataset(where, engine=SaevBackend, drop_variables=5)
    assert caught.value.where == "drop_variables"


def test_a_group_is_the_folder_of_a_store_below_a_root(stores: list[tuple[PlainStore, Path]]) -> None:
    (_, first), (plain, where), _ = stores
    for group in (plain.name, f"/{plain.name}/", Path(plain.name)):
        with xr.open_dataset(where.parent, engine=SaevBackend, group=group) as dataset:
            assert dataset.activations.values.tobytes() == plain.dense.tobytes()
    for group in ("/", "", None):
        with xr.open_dataset(where, engine=SaevBackend, group=group) as dataset:
            assert dataset.sizes["example"] == 6
    for place, group, error in (
        (ShardStore.open(where), plain.name, ArgumentError), (where.parent, "nothing", NotFoundError),
        (where, f"../{first.name}", UnsafeContentError), (where.parent, 5, ArgumentError),
    ):  # fmt: skip
        with pytest.raises(error):
            xr.open_dataset(place, engine=SaevBackend, group=group)


def test_examples_have_a_coordinate_of_constant_size(folder: Path, plain: PlainStore) -> None:
    for chunks in (None, {}):
        dataset = ShardStore.open(folder).as_xarray(chunks=chunks)
        later = dataset.isel(example=slice(3, None))
        assert isinstance(dataset.indexes["example"], pd.RangeIndex)
        assert isinstance(later.indexes["example"], pd.RangeIndex)
        assert later.activations.sel(example=5).values.tobytes() == plain.dense[5].tobytes()
        with pytest.raises(KeyError):
            later.sel(example=2)
    layout = Layout(10**9, (0,), 1, False, 1, 10**9)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", SaevStoreWarning)
        store = ShardStore.open(LatencyTransport(MemoryTransport(plain_documents(layout)), 0.0, 1e12))
    dataset = store.as_xarray()
    assert sys.getsizeof(dataset.indexes["example"]) < 1000
    assert dataset.indexes["example"][-1] == 10**9 - 1


def test_attributes_and_hook_points_are_of_kinds_that_files_hold(folder: Path, tmp_path: Path) -> None:
    attributes = ShardStore.open(folder).as_xarray().attrs
    assert all(type(each) in {str, int, float} for each in attributes.values())
    assert (attributes["cls_token"], attributes["content_hash"]) == (1, folder.name)
    hooked = written(tmp_path, labelled=False, hook_points=["attn_out", "mlp_out"]).as_xarray()
    assert hooked.hook_point.dims == ("layer",)
    assert hooked.hook_point.values.tolist() == ["attn_out", "mlp_out"]
    assert "hook_points" not in hooked.attrs


def test_datasets_are_written_and_read_back(folder: Path, plain: PlainStore, tmp_path: Path) -> None:
    for chunks in (None, {}):
        dataset = ShardStore.open(folder).as_xarray(chunks=chunks)
        path = tmp_path / f"{chunks}.zarr"
        dataset.to_zarr(path, consolidated=False)
        with xr.open_zarr(path, consolidated=False) as again:
            assert again.activations.values.astype("<f4").tobytes() == plain.dense.tobytes()
            assert np.array_equal(again.labels.values, plain.labels)
            assert dict(again.attrs) == dict(dataset.attrs)
            for name in ("example", "layer", "token", "content_token"):
                assert np.array_equal(again[name].values, dataset[name].values)
        if importlib.util.find_spec("scipy"):
            dataset.to_netcdf(tmp_path / f"{chunks}.nc", engine="scipy")
            with xr.open_dataset(tmp_path / f"{chunks}.nc", engine="scipy") as again:
                assert again.activations.values.astype("<f4").tobytes() == plain.dense.tobytes()


def test_opening_reads_no_activation_and_loading_takes_the_result(plain: PlainStore, tmp_path: Path) -> None:
    transport = CountingTransport(LatencyTransport(MemoryTransport(plain.files, label=plain.name), 0.0, 1e12))
    store = ShardStore.open(transport)
    repr((store.as_xarray(), store.as_xarray(chunks={})))
    assert set(transport.counters.operations) <= {"read", "size"}
    large = plain_store(Layout(550, tuple(range(3)), 15, True, 320, 100))
    folder = large.write(tmp_path)
    xr.open_dataset(folder, engine=SaevBackend).activations[:1].load()  # imports
    tracemalloc.start()
    try:
        found = xr.open_dataset(folder, engine=SaevBackend).activations.values
        _, peak = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert found.tobytes() == large.dense.tobytes()
    assert peak <= 1.1 * found.nbytes


def test_closing_a_dataset_or_a_tree_closes_its_stores(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    closed: list[str] = []
    monkeypatch.setattr(ShardStore, "close", lambda store: closed.append(store.url))
    dataset, tree = ShardStore.open(folder).as_xarray(), xr.open_datatree(folder.parent, engine=SaevBackend)
    tree.load()
    assert closed == []
    dataset.close()
    tree.close()
    assert closed == [str(folder)] * 2


def test_datasets_pickle(folder: Path, plain: PlainStore) -> None:
    for chunks in (None, {}):
        dataset = pickle.loads(pickle.dumps(ShardStore.open(folder).as_xarray(chunks=chunks)))
        assert dataset.activations.values.tobytes() == plain.dense.tobytes()
        assert np.array_equal(dataset.labels.values, plain.labels)


# -- damage ------------------------------------------------------------------------------------------------------------


def test_what_is_lost_is_an_error_and_what_is_left_can_be_read(folder: Path, plain: PlainStore, tmp_path: Path) -> None:
    dataset = ShardStore.open(folder).as_xarray()
    (folder / "acts000001.bin").unlink()
    with pytest.raises(CorruptShardError):
        dataset.activations.load()
    with pytest.raises(CorruptShardError):
        xr.open_dataset(folder, engine=SaevBackend)
    left = xr.open_dataset(folder, engine=SaevBackend, damaged_ok=True)
    assert left.activations[:3].values.tobytes() == plain.dense[:3].tobytes()
    with pytest.raises(ArgumentError) as caught:
        ShardStore.open(folder, damaged_ok=True).as_xarray(chunks={"example": (2, 3)})
    assert caught.value.where == "chunks"
    made = token_store(tmp_path / "mask", arrays={"mask": "bool", "ids": "int32"})
    data = bytearray((made.path / "mask.bin").read_bytes())
    data[27] = 2
    (made.path / "mask.bin").write_bytes(data)
    for chunks in (None, {}):
        with pytest.raises(DocumentError):
            ShardStore.open(made.path).as_xarray(chunks=chunks)["mask"].load()
        assert np.array_equal(ShardStore.open(made.path).as_xarray(chunks=chunks)["ids"].values, made.arrays["ids"])


@pytest.mark.parametrize(("missing", "call"), [("xarray", "as_xarray()"), ("dask", "as_dask()"),
                                               ("dask", "as_xarray(chunks={})")])  # fmt: skip
def test_a_library_that_is_not_installed_is_named(missing: str, call: str, folder: Path) -> None:
    code = (
        f"import sys; sys.modules[{missing!r}] = None\n"
        "from saev_store import ShardStore\n"
        "from saev_store.errors import MissingDependencyError\n"
        f"try: ShardStore.open(sys.argv[1]).{call}\n"
        "except MissingDependencyError as error: print(error.where)"
    )
    command = [sys.executable, "-c", code, str(folder)]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=HANG_S, check=True)
    assert done.stdout == f"{call.partition('(')[0]}\n"


# -- trees -------------------------------------------------------------------------------------------------------------


def test_a_root_is_a_tree_with_a_node_for_each_store(stores: list[tuple[PlainStore, Path]]) -> None:
    root = stores[0][1].parent
    for chunks in (None, {}):
        with xr.open_datatree(root, engine=SaevBackend, chunks=chunks) as tree:
            assert sorted(tree.children) == sorted(plain.name for plain, _ in stores)
            for plain, where in stores:
                node = tree[plain.name]
                assert (node.activations.chunks is None) == (chunks is None)
                assert node.activations.values.tobytes() == plain.dense.tobytes()
                assert node.attrs["content_hash"] == ShardStore.open(where).metadata.hash
    for store in (stores[0][1], ShardStore.open(stores[0][1])):
        with xr.open_datatree(store, engine=SaevBackend) as tree:
            assert not tree.children
            assert tree.activations.values.tobytes() == stores[0][0].dense.tobytes()


def test_stores_that_do_not_open_are_left_out_of_a_tree_and_named(stores: list[tuple[PlainStore, Path]]) -> None:
    (plain, short), (_, broken), (_, whole) = stores
    root = short.parent
    os.truncate(short / "acts000002.bin", 10)
    (broken / "metadata.json").write_text("{")
    (root / "unfinished" / ".saev_store").mkdir(parents=True)
    (root / "unfinished" / ".saev_store" / "claim.json").write_text("{}")
    (root / "notes").mkdir()
    for open_, names in ((xr.open_datatree, lambda tree: set(tree.children)), (xr.open_groups, set)):
        with pytest.warns(SaevStoreWarning) as caught:
            found = open_(root, engine=SaevBackend)
        assert {name.strip("/") for name in names(found)} == {whole.name}
        assert all(name in str(caught[0].message) for name in (short.name, broken.name, "unfinished"))
    with pytest.warns(SaevStoreWarning):
        tree = xr.open_datatree(root, engine=SaevBackend, damaged_ok=True)
    assert set(tree.children) == {short.name, whole.name}
    assert tree[short.name].activations[:6].values.tobytes() == plain.dense[:6].tobytes()
    with pytest.raises(CorruptShardError):
        tree[short.name].activations[6].load()
    for nothing, error in ((root / "nothing", NotFoundError), (root / "notes", NotFoundError),
                           (root / "unfinished", IncompleteStoreError)):  # fmt: skip
        with pytest.raises(error):
            xr.open_datatree(nothing, engine=SaevBackend)


# -- concat ------------------------------------------------------------------------------------------------------------

COMMON = {
    "family": "clip", "ckpt": "x", "layers": (2, 5), "content_tokens_per_example": 3, "cls_token": False, "d_model": 4,
    "n_examples": 2, "max_tokens_per_shard": 12, "data": {"part": 0}, "pixel_agg": "majority",
}  # fmt: skip


def written(root: Path, *, labelled: bool = True, **changes: object) -> ShardStore:
    metadata = new_metadata(**{**COMMON, **changes})
    layout = metadata.layout
    with ShardStore.create(root, metadata, progress=False) as writer:
        labels = np.zeros((layout.n_examples, layout.content_tokens_per_example), np.uint8)
        writer.append(np.ones(layout.shape, np.float32), labels=labels if labelled else None)
    return ShardStore.open(root / metadata.hash)


def test_concat_joins_stores_along_examples(stores: list[tuple[PlainStore, Path]]) -> None:
    whole = ShardStore.concat([ShardStore.open(where) for _, where in stores])
    dense = np.concatenate([plain.dense for plain, _ in stores])
    assert whole.activations.chunks[0] == (7, 6, 2)
    assert isinstance(whole.indexes["example"], pd.RangeIndex)
    assert whole.activations.values.tobytes() == dense.tobytes()
    assert whole.activations.sel(example=[0, 7, 14], layer=5).values.tobytes() == dense[[0, 7, 14], 1].tobytes()
    assert np.array_equal(whole.labels.values, np.concatenate([plain.labels for plain, _ in stores]))
    assert whole.attrs["n_examples"] == 15
    assert [(item["url"], item["n_examples"]) for item in json.loads(whole.attrs["stores"])] == [
        (str(where), len(plain.dense)) for plain, where in stores
    ]


@pytest.mark.parametrize(
    "changes",
    [
        {"family": "dinov2"}, {"ckpt": "y"}, {"layers": (2, 6)}, {"layers": (2,)}, {"layers": (5, 2)},
        {"content_tokens_per_example": 4}, {"content_tokens_per_example": 2, "cls_token": True}, {"cls_token": True},
        {"d_model": 8}, {"labelled": False}, {"pixel_agg": "prefer-fg"},
    ],
    ids=str,
)  # fmt: skip
def test_concat_refuses_stores_that_do_not_agree(changes: dict[str, object], tmp_path: Path) -> None:
    one, other = written(tmp_path), written(tmp_path, **{"data": {"part": 1}, **changes})
    with pytest.raises(ArgumentError) as caught:
        ShardStore.concat([one, other])
    assert caught.value.where == "stores"


def test_concat_refuses_a_recording_twice_but_not_equal_bytes(tmp_path: Path) -> None:
    stores = [written(tmp_path, data={"part": part}) for part in range(3)]
    assert ShardStore.concat(stores).attrs["n_examples"] == 6
    unlabelled = [
        written(tmp_path / "u", labelled=False), written(tmp_path / "u", labelled=False, data={}, pixel_agg="prefer-fg")
    ]  # fmt: skip
    assert ShardStore.concat(unlabelled).sizes["example"] == 4
    plains = [plain_store(LAYOUT, seed=seed, ckpt="same") for seed in (0, 1)]
    recordings = [ShardStore.open(plain.write(tmp_path / str(seed))) for seed, plain in enumerate(plains)]
    found = ShardStore.concat(recordings)
    assert found.activations.values.tobytes() == np.concatenate([plain.dense for plain in plains]).tobytes()
    ids = [
        ShardStore.open(token_store(tmp_path, seed=n, arrays=kinds).path)
        for n, kinds in enumerate([{"ids": "int32"}, {"ids": "int32"}, {"ids": "int64"}])
    ]
    assert np.array_equal(
        ShardStore.concat(ids[:2]).ids.values, np.concatenate([s.token_arrays["ids"] for s in ids[:2]])
    )
    hooked = [written(tmp_path, labelled=False, layers=(2,), hook_points=[point]) for point in ("attn_out", "mlp_out")]
    for wrong in (
        hooked,
        [*stores, stores[1]],
        [stores[0], ShardStore.open(stores[0].url)],
        [],
        ids,
        [1],
        "store",
        stores[0],
    ):
        with pytest.raises(SaevStoreError):
            ShardStore.concat(wrong)
