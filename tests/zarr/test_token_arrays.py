"""Token arrays in Zarr, xarray, exports and over HTTP: variables of their dtype, ranges of their files, equal to dense NumPy."""

from __future__ import annotations

import json
import pickle
import tempfile
import urllib.request
from pathlib import Path

import numpy as np
import pytest
import zarr
from api import MemoryTransport
from hypothesis import given
from hypothesis import strategies as st
from served import serving
from strategies import legal_shapes
from test_export import FORMATS, NEEDS, make_export, read_elsewhere
from token_stores import ARRAYS, TokenStore, token_store
from waiting import HANG_S
from zarr.abc.store import RangeByteRequest
from zarr.core.sync import sync

from saev_store import ShardStore
from saev_store.core.token_arrays import TokenArray
from saev_store.errors import ArgumentError, CorruptShardError, DocumentError, SaevStoreError
from saev_store.export import _references, array_names
from saev_store.zarr import _keys
from saev_store.zarr.documents import token_variables

#: The variable of each array: `layer` and `example` are axes, `tokens_layer` is an array's own name, `act` is free here.
SHOWN = {name: name for name in ARRAYS} | {"layer": "tokens_tokens_layer", "example": "tokens_example"}


def same(found: np.ndarray, truth: np.ndarray) -> None:
    assert (found.dtype, found.shape) == (truth.dtype, truth.shape)
    assert np.array_equal(found, truth, equal_nan=truth.dtype.kind == "f")


@pytest.fixture
def made(tmp_path: Path) -> TokenStore:
    return token_store(tmp_path / "store")


@pytest.mark.parametrize("engine", ["mmap", "pread", "fsspec"])
@pytest.mark.parametrize("chunk_nbytes", [1, 50, 16 << 20])
def test_the_view_has_every_array_as_a_variable(made, engine, chunk_nbytes, monkeypatch):
    monkeypatch.setattr(_keys, "_TOKEN_CHUNK_BYTES", chunk_nbytes)
    view = ShardStore.open(made.path, engine=engine).as_zarr()
    group = zarr.open_group(pickle.loads(pickle.dumps(view)), mode="r")
    assert set(group) == {"activations", "layer", "token", "content_token", *SHOWN.values()}
    assert set(sync(_listed(view, ""))) == {*group, "zarr.json"}
    for name, truth in made.arrays.items():
        array = group[SHOWN[name]]
        assert array.metadata.dimension_names == ("example", "content_token")
        same(array[...], truth)
        same(array[3:9:2, 1:4], truth[3:9:2, 1:4])
        rows = array.chunks[0]
        assert rows == 1 or rows * truth[:1].nbytes <= chunk_nbytes
        value = view.get_sync(f"{SHOWN[name]}/c/0/0").to_bytes()
        assert value == truth[:rows].tobytes()
    same(group["activations"][...], made.acts)


@pytest.mark.parametrize("change", [7, -1, 66])
@pytest.mark.parametrize("engine", ["mmap", "pread", "fsspec"])
@pytest.mark.parametrize("name", ["token_ids", "mask", "labels"])
def test_an_array_of_a_wrong_size_never_comes_out(made, name, engine, change):
    """Neither where a damaged store is opened, nor where the file is replaced between two reads; as `store.token_arrays`."""
    opened = ShardStore.open(made.path, engine=engine)
    before = opened.as_zarr()
    array = zarr.open_group(before, mode="r")[SHOWN[name]]
    path, (n, n_content) = made.path / f"{name}.bin", array.shape
    good = path.read_bytes()
    same(array[...], made.arrays[name])
    path.write_bytes((good * 2)[: len(good) + change * array.dtype.itemsize])
    damaged = ShardStore.open(made.path, engine=engine, damaged_ok=True)
    copies = [
        zarr.open_group(damaged.as_zarr(), mode="r"),
        zarr.open_group(pickle.loads(pickle.dumps(damaged.as_zarr())), mode="r"),
    ]
    for group in copies:
        for other in made.arrays.keys() - {name}:  # that one is whole says nothing of the next
            same(group[SHOWN[other]][...], made.arrays[other])
        with pytest.raises(CorruptShardError, match=f"{n} examples x {n_content} content tokens"):
            group[SHOWN[name]][0]
        same(group["activations"][...], made.acts)
    if engine == "mmap":
        with pytest.raises(CorruptShardError, match="content tokens"):
            array[0]


@given(st.data())
def test_any_store_in_any_dtype_chunking_and_selection_equals_numpy(data):
    draw, dtypes = data.draw, ["float32", "bfloat16", "float16"]
    arrays = draw(
        st.dictionaries(st.sampled_from(["token_ids", "a", "layer", "content_token"]), st.just("int32"), max_size=3)
    )
    arrays |= draw(st.dictionaries(st.sampled_from(["mask", "b"]), st.just("bool")))
    arrays |= draw(st.dictionaries(st.sampled_from(["score", "token"]), st.just("float32")))
    with tempfile.TemporaryDirectory() as root:
        made = token_store(
            Path(root), dtype=draw(st.sampled_from(dtypes)), n=draw(st.integers(1, 7)), per_shard=draw(st.integers(1, 4)),
            layers=tuple(range(draw(st.integers(1, 3)))), content=draw(st.integers(1, 4)), cls=draw(st.booleans()),
            d_model=draw(st.integers(1, 3)), seed=draw(st.integers(0, 9)), cut=draw(st.booleans()), arrays=arrays,
        )  # fmt: skip
        files = {path.name: path.read_bytes() for path in made.path.iterdir()}
    store = ShardStore.open(MemoryTransport(files, label=made.path.name))
    chunks, dtype = (
        draw(st.sampled_from(legal_shapes(store.layout))),
        draw(st.sampled_from(["float32", "stored"])),
    )
    group = zarr.open_group(store.as_zarr(chunks=chunks, dtype=dtype), mode="r")
    truth = made.acts if dtype == "stored" else made.acts.astype(np.float32)
    low, step = draw(st.integers(0, 7)), draw(st.integers(1, 3))
    for key in (np.s_[...], np.s_[low::step], np.s_[low:, 0], np.s_[..., 0]):
        found, expected = group["activations"][key], truth[key]
        assert (found.dtype, found.shape) == (expected.dtype, expected.shape)
        if dtype == "stored":
            assert np.asarray(found).tobytes() == expected.tobytes()
        else:
            assert np.array_equal(found, expected, equal_nan=True)
    for name, shown in token_variables(store.token_arrays.described()).items():
        same(group[name][low::step], made.arrays[shown.name][low::step])
        same(store.as_xarray()[name].values, made.arrays[shown.name])


async def _listed(view, prefix: str) -> list[str]:
    return [name async for name in view.list_dir(prefix)]


def test_views_with_other_arrays_differ(tmp_path):
    views = [
        ShardStore.open(token_store(tmp_path / str(n), arrays=arrays).path).as_zarr()
        for n, arrays in enumerate([{"ids": "int32"}, {"ids": "int64"}, {}])
    ]
    assert views[0].keys == views[0].keys
    assert views[0].keys != views[1].keys
    assert "content_token" not in zarr.open_group(views[2], mode="r")


def test_xarray_and_zarr_show_the_same_names(made):
    import xarray as xr

    with xr.open_dataset(made.path, engine="saev") as dataset:
        own = {name: variable for name, variable in dataset.variables.items() if name != "example"}
        group = zarr.open_group(ShardStore.open(made.path).as_zarr(), mode="r")
        assert set(own) == set(group)
        for name, truth in made.arrays.items():
            same(dataset[SHOWN[name]].values, truth)
            same(dataset[SHOWN[name]].isel(example=[4, 0], content_token=slice(1, None, 2)).values, truth[[4, 0], 1::2])
    through_zarr = xr.open_zarr(ShardStore.open(made.path).as_zarr(), chunks=None, consolidated=False)
    for name, truth in made.arrays.items():
        same(through_zarr[SHOWN[name]].values, truth)


def test_a_lost_array_raises_and_the_rest_reads(made):
    (made.path / "token_ids.bin").unlink()
    with (made.path / "document_ids.bin").open("r+b") as file:
        file.truncate(100)
    group = zarr.open_group(ShardStore.open(made.path, damaged_ok=True).as_zarr(), mode="r")
    for name in ("token_ids", "document_ids"):
        with pytest.raises(CorruptShardError, match=name):
            group[name][...]
    same(group["mask"][...], made.arrays["mask"])
    same(group["activations"][...], made.acts)
    with pytest.raises(SaevStoreError, match="token_ids"):
        ShardStore.open(made.path, damaged_ok=True).to_kerchunk(made.path.parent / "r.json")


def test_stores_with_other_arrays_are_not_joined(tmp_path):
    stores = [
        ShardStore.open(token_store(tmp_path, seed=n, arrays=arrays).path)
        for n, arrays in enumerate([{"ids": "int32"}, {"ids": "int32"}, {"ids": "int64"}])
    ]
    both = ShardStore.concat(stores[:2])
    same(both.ids.values, np.concatenate([store.token_arrays["ids"] for store in stores[:2]]))
    with pytest.raises(ArgumentError, match="token_arrays"):
        ShardStore.concat(stores)


# -- exports -----------------------------------------------------------------------------------------------------------


def truth_of(made: TokenStore, path: Path) -> str:
    n_content = next(iter(made.arrays.values())).shape[1]
    coordinates = {
        "layer": np.array([2, 5]), "token": np.arange(n_content + 1) - 1, "content_token": np.arange(n_content)
    }  # fmt: skip
    np.savez(path, activations=made.acts, **coordinates, **{SHOWN[name]: a for name, a in made.arrays.items()})
    return str(path)


@pytest.mark.parametrize("format", FORMATS)
def test_exports_have_them_without_us(format, tmp_path, monkeypatch):
    for library in NEEDS.get(format, []):
        pytest.importorskip(library)
    jobs = []
    for number, (dtype, nbytes) in enumerate([("float32", 1 << 20), ("float16", 1 << 20), ("float16", 100)]):
        monkeypatch.setattr(_references, "_TOKEN_CHUNK_BYTES", nbytes)  # several chunks, and a short one
        made = token_store(tmp_path, dtype=dtype, seed=number, cut=number != 1)
        out = tmp_path / f"out{number}{'.json' if format in {'kerchunk', 'tensorstore'} else ''}"
        store = ShardStore.open(made.path)
        if format == "tensorstore":
            out.write_text(json.dumps({name: store.to_tensorstore_spec(name) for name in array_names(store)}))
        else:
            make_export(store, format, out)
        jobs.append({"format": format, "out": str(out), "truth": truth_of(made, tmp_path / f"{number}.npz")})
    assert read_elsewhere(jobs, tmp_path) == [[], [], []]


def test_virtual_datasets_have_them(made):
    pytest.importorskip("virtualizarr")
    from obspec_utils.registry import ObjectStoreRegistry
    from obstore.store import LocalStore
    from test_virtual import ranges
    from virtualizarr import open_virtual_dataset

    from saev_store.export import SaevParser

    registry = ObjectStoreRegistry({"file://": LocalStore()})
    parsed = open_virtual_dataset(f"file://{made.path}", registry, SaevParser())
    for dataset in (ShardStore.open(made.path).to_virtual_dataset(), parsed):
        for name, truth in made.arrays.items():
            assert dataset[SHOWN[name]].dtype == truth.dtype
            assert ranges(dataset[SHOWN[name]].data) == truth.tobytes()


def test_icechunk_appends_them(tmp_path):
    pytest.importorskip("icechunk")
    pytest.importorskip("virtualizarr")
    from test_virtual import opened

    parts = [token_store(tmp_path, seed=seed, n=8) for seed in range(2)]
    for part in parts:
        store = ShardStore.open(part.path)
        store.to_icechunk(tmp_path / "repository", chunks=(1, *store.shape[1:]), append=part is not parts[0])
    found = opened(tmp_path / "repository")
    for name, shown in SHOWN.items():
        same(found[shown].values, np.concatenate([part.arrays[name] for part in parts]))
    for arrays, dtype, message in (
        ({**ARRAYS, "score": "int32"}, "float32", "score: 'float32' in the repository, 'int32' here"),
        ({**ARRAYS, "more": "int32"}, "float32", "more: None in the repository, 'int32' here"),
        (ARRAYS, "float16", "activations: 'float32' in the repository, 'float16' here"),
    ):
        other = ShardStore.open(token_store(tmp_path, seed=3, n=8, arrays=arrays, dtype=dtype).path)
        with pytest.raises(ArgumentError, match=message):
            other.to_icechunk(tmp_path / "repository", append=True)


def test_a_repository_whose_chunks_take_any_memory_is_refused(tmp_path):
    """Completing a chunk of a token array takes the memory of all of it, whatever the repository says of its shape."""
    icechunk = pytest.importorskip("icechunk")
    pytest.importorskip("virtualizarr")
    parts = [ShardStore.open(token_store(tmp_path, seed=seed, n=8).path) for seed in range(2)]
    parts[0].to_icechunk(tmp_path / "repository", chunks=(1, *parts[0].shape[1:]))
    storage = icechunk.local_filesystem_storage(str(tmp_path / "repository"))
    session = icechunk.Repository.open(storage).writable_session("main")
    group = zarr.open_group(session.store, mode="a")
    name = SHOWN["mask"]
    array = group[name]
    del group[name]
    group.create_array(
        name, shape=array.shape, chunks=(2**40, array.shape[1]), dtype=array.dtype,
        dimension_names=array.metadata.dimension_names,
    )  # fmt: skip
    session.commit("chunks of terabytes")
    with pytest.raises(ArgumentError, match="not an export of a store"):
        parts[1].to_icechunk(tmp_path / "repository", append=True)


@pytest.mark.parametrize("nbytes", [1 << 20, 130, 1])
def test_icechunk_appends_them_wherever_their_chunks_end(tmp_path, monkeypatch: pytest.MonkeyPatch, nbytes: int):
    """Chunks of token arrays hold many examples, although those of the vectors hold one."""
    pytest.importorskip("icechunk")
    pytest.importorskip("virtualizarr")
    from test_virtual import opened

    monkeypatch.setattr(_references, "_TOKEN_CHUNK_BYTES", nbytes)
    parts = [token_store(tmp_path, seed=seed, n=n, cut=True) for seed, n in enumerate((23, 9, 1, 7, 24, 2))]
    for count, part in enumerate(parts, 1):
        store = ShardStore.open(part.path)
        store.to_icechunk(tmp_path / "repository", chunks=(1, *store.shape[1:]), append=count > 1)
        found = opened(tmp_path / "repository")
        same(found.activations.values, np.concatenate([ShardStore.open(one.path)[:] for one in parts[:count]]))
        for name, shown in SHOWN.items():
            same(found[shown].values, np.concatenate([one.arrays[name] for one in parts[:count]]))
        assert (found.attrs["n_examples"], found.sizes["example"]) == (len(found.activations),) * 2


# -- over HTTP ---------------------------------------------------------------------------------------------------------


def test_the_server_has_them(made):
    for needed in ("starlette", "uvicorn"):
        pytest.importorskip(needed)
    files = {}
    with serving(made.path) as (url, _):
        for name in SHOWN.values():
            for key in (f"{name}/zarr.json", *(f"{name}/c/{row}/0" for row in range(3))):
                with urllib.request.urlopen(f"{url.rstrip('/')}/{key}", timeout=HANG_S) as answer:
                    files[key] = answer.read()
    buffers = {key: zarr.core.buffer.default_buffer_prototype().buffer.from_bytes(data) for key, data in files.items()}
    served = zarr.storage.MemoryStore(buffers, read_only=True)
    for name, truth in made.arrays.items():
        same(zarr.open_array(served, path=SHOWN[name], mode="r")[...], truth)


def test_a_store_in_memory_has_them(made):
    files = {path.name: path.read_bytes() for path in made.path.iterdir()}
    store = ShardStore.open(MemoryTransport(files, label=made.path.name))
    group = zarr.open_group(store.as_zarr(), mode="r")
    for name, truth in made.arrays.items():
        same(group[SHOWN[name]][...], truth)


@pytest.mark.parametrize("engine", ["mmap", "pread", "fsspec"])
def test_a_byte_that_is_no_bool_is_no_value_of_any_view(made, engine):
    """NumPy would show a byte of 2 as true, and compare it unequal to true."""
    xarray = pytest.importorskip("xarray")
    pytest.importorskip("dask")
    file = made.path / "mask.bin"
    data = bytearray(file.read_bytes())
    data[27] = 2
    file.write_bytes(data)
    told = "mask.bin.*the first is 2 at byte 27; a bool is one of them.*copy it again"
    store = ShardStore.open(made.path, engine=engine)
    view, dataset = store.as_zarr(), store.as_xarray(chunks={"example": 3})
    reads = {
        "native": lambda: store.token_arrays["mask"],
        "zarr": lambda: zarr.open_group(view, mode="r")["mask"][...],
        "one key": lambda: view.get_sync("mask/c/1/0"),
        "part of a key": lambda: view.get_sync("mask/c/1/0", byte_range=RangeByteRequest(2, 5)),
        "xarray": lambda: store.as_xarray(chunks=None)["mask"].values,
        "xarray over zarr": lambda: xarray.open_zarr(view, consolidated=False)["mask"].values,
        "dask": lambda: dataset["mask"].data.compute(scheduler="sync"),
    }
    for name, read in reads.items():
        with pytest.raises(DocumentError, match=told):
            read()
            pytest.fail(name)
    group = zarr.open_group(view, mode="r")
    same(group["mask"][:4], made.arrays["mask"][:4])  # another chunk
    same(group["token_ids"][...], made.arrays["token_ids"])
    assert view.get_sync("mask/c/1/0", byte_range=RangeByteRequest(0, 3)).to_bytes() == bytes(data[24:27])


def test_a_token_array_may_have_the_name_of_any_other_variable() -> None:
    names = ["activations", "example", "layer", "token", "d_model", "content_token", "hook_point", "score"]
    arrays = [TokenArray(name, "int32") for name in names]
    assert [*token_variables(arrays)] == [*(f"tokens_{name}" for name in names[:-1]), "score"]
