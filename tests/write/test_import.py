"""`ShardStore.from_array`: arrays of every kind become stores of their bits, block by block, and are continued."""

from __future__ import annotations

from importlib.util import find_spec
from pathlib import Path

import ml_dtypes
import numpy as np
import pytest
import zarr
from clusters import two_workers
from written import LOCAL, content

from saev_store import ShardStore
from saev_store.errors import ArgumentError, TransportError
from saev_store.zarr import BFloat16

SHAPE = (11, 3, 5, 8)
OPTIONS = {"family": "gpt2", "ckpt": "tiny", "layers": [2, 5, 11], "max_tokens_per_shard": 30, "progress": False}


def numbers(name: str = "float32", shape: tuple[int, ...] = SHAPE) -> np.ndarray:
    dtype = np.dtype(ml_dtypes.bfloat16 if name == "bfloat16" else name)
    return np.random.default_rng(3).standard_normal(shape, dtype=np.float32).astype(dtype)


class Noted:
    """An array in chunks that notes what is read of it, after what its identity needs."""

    def __init__(self, values: np.ndarray, chunks: tuple[object, ...] | None = None) -> None:
        self._values, self.shape, self.dtype, self.chunks = values, values.shape, values.dtype, chunks
        self.blocks = list[tuple[int, int]]()

    def __getitem__(self, key: tuple[slice, ...]) -> np.ndarray:
        self.blocks.append(key[0].indices(len(self._values))[:2])
        return self._values[key]


def as_kinds(acts: np.ndarray, folder: Path) -> dict[str, object]:
    """The same numbers in every kind of array."""
    import dask.array as da
    import xarray as xr

    folder.mkdir()
    np.save(folder / "acts.npy", acts.view(np.uint16) if acts.dtype.itemsize == 2 else acts)
    mapped = np.load(folder / "acts.npy", mmap_mode="r").view(acts.dtype)
    dims = ("example", "layer", "token", "d_model")
    kind = BFloat16() if acts.dtype.name == "bfloat16" else acts.dtype
    of_zarr = zarr.create_array(folder / "acts.zarr", shape=acts.shape, chunks=(3, 1, 5, 8), dtype=kind)
    of_zarr[...] = acts
    lazy = da.from_array(acts, chunks=(4, 2, 5, 8))
    found = {
        "numpy": acts, "mapped": mapped, "zarr": of_zarr, "xarray": xr.DataArray(acts, dims=dims), "dask": lazy,
        "xarray of dask": xr.DataArray(lazy, dims=dims), "big-endian": acts.astype(acts.dtype.newbyteorder(">")),
    }  # fmt: skip
    if find_spec("torch") is not None:
        import torch

        bits = torch.from_numpy(acts.view(np.int16)) if acts.dtype.name == "bfloat16" else torch.from_numpy(acts)
        found["torch"] = bits.view(torch.bfloat16) if acts.dtype.name == "bfloat16" else bits
    if acts.dtype.name == "bfloat16":
        return {name: array for name, array in found.items() if name != "big-endian"}
    h5py = pytest.importorskip("h5py")
    with h5py.File(folder / "acts.h5", "w") as file:
        file.create_dataset("acts", data=acts, chunks=(3, 1, 5, 8))
    return {**found, "h5py": h5py.File(folder / "acts.h5", "r")["acts"]}


def test_from_array_of_every_kind_is_a_store_of_its_bits(tmp_path):
    for name in ("float32", "bfloat16", "float16"):
        acts, ids = numbers(name), np.arange(55).reshape(11, 5)
        for kind, array in as_kinds(acts, tmp_path / name).items():
            root = tmp_path / f"{name}-{kind}"
            store = ShardStore.from_array(array, root, **OPTIONS, token_arrays={"token_ids": ids})
            found = store.read(dtype="stored")
            assert (found.dtype.name, found.tobytes()) == (name, acts.tobytes()), kind
            assert np.array_equal(store.token_arrays["token_ids"], ids)
            assert store.validate(deep=True, progress=False).ok
        with ShardStore.create(tmp_path / f"{name}-written", store.metadata, progress=False) as writer:
            writer.append(acts, token_ids=ids)
        assert content(Path(store.url)) == content(tmp_path / f"{name}-written" / store.name)


def test_from_array_takes_axes_in_any_order_that_is_named(tmp_path):
    import xarray as xr

    full = {"example": 11, "layer": 3, "token": 5, "d_model": 8}
    for dims in (
        "layer example token d_model",
        "d_model token layer example",
        "example d_model layer",
        "d_model example",
    ):
        names = tuple(dims.split())
        array = numbers(shape=tuple(full[name] for name in names))
        options = OPTIONS | {"layers": [2, 5, 11] if "layer" in names else [5]}
        truth = np.moveaxis(array, [names.index(name) for name in full if name in names], range(len(names)))
        truth = np.expand_dims(truth, [i for i, name in enumerate(full) if name not in names])
        for given in ({"dims": names}, {}):
            source = array if given else xr.DataArray(array, dims=names)
            assert np.array_equal(ShardStore.from_array(source, tmp_path, **given, **options)[...], truth)
    array = xr.DataArray(numbers(), dims=tuple(full), coords={"layer": [7, 2, 4]})
    assert ShardStore.from_array(array, tmp_path, **OPTIONS | {"layers": None}).layers == (7, 2, 4)
    assert ShardStore.from_array(array, tmp_path, **OPTIONS | {"layers": [1, 2, 3]}).layers == (1, 2, 3)


def test_from_array_of_float64_is_rounded_once_to_what_is_asked_for(tmp_path):
    acts = np.random.default_rng(0).standard_normal(SHAPE)
    acts[0, 0, 0, :4] = [1 + 2**-11 + 2**-30, np.nan, np.inf, 1e-300]  # the first is just above a tie of float16
    with pytest.raises(ArgumentError):
        ShardStore.from_array(acts, tmp_path, **OPTIONS)
    for dtype in ("float32", "float16", "bfloat16"):
        store = ShardStore.from_array(acts, tmp_path, **OPTIONS, dtype=dtype, on_nonfinite="allow")
        truth = acts.astype(ml_dtypes.bfloat16 if dtype == "bfloat16" else dtype)
        if dtype != "bfloat16":  # ml_dtypes rounds float64 twice
            assert np.array_equal(
                store.read(dtype="stored").astype(np.float32), truth.astype(np.float32), equal_nan=True
            )
        acts[3, 1, 2, 3] = 1e60
        with pytest.raises(ArgumentError):
            ShardStore.from_array(acts, tmp_path / dtype, **OPTIONS, dtype=dtype, on_nonfinite="allow")
        store = ShardStore.from_array(
            acts, tmp_path / dtype, **OPTIONS, dtype=dtype, on_nonfinite="allow", on_overflow="saturate"
        )
        assert np.isfinite(store[3]).all()
        acts[3, 1, 2, 3] = 0


def test_from_array_that_was_cut_short_continues_with_whole_shards(tmp_path, monkeypatch):
    acts = numbers()
    real = LOCAL.open_sink

    def open_sink(self, path, **options):
        if path == "acts000003.bin":
            raise TransportError("the disk is full", where=path)
        return real(self, path, **options)

    whole = ShardStore.from_array(acts, tmp_path / "whole", **OPTIONS)
    for root in (tmp_path / "cut",):
        with monkeypatch.context() as patch:
            patch.setattr(LOCAL, "open_sink", open_sink)
            with pytest.raises(TransportError):
                ShardStore.from_array(acts, root, **OPTIONS)
        array = Noted(acts)
        array.blocks.clear()
        store = ShardStore.from_array(array, root, **OPTIONS)
        assert min(start for start, _ in array.blocks[1:]) == 6
        assert content(Path(store.url)) == content(Path(whole.url))


def test_from_array_refuses_what_is_not_an_array_of_examples(tmp_path):
    import dask.array as da

    acts = numbers()
    ids = {"token_ids": np.zeros((11, 5), np.int32)}
    unknown = da.from_array(acts, chunks=4)
    cases: list[tuple[object, dict[str, object]]] = [
        ("acts.npy", {}), ([[1.0]], {}), (np.zeros(8, np.float32), {}), (np.zeros((1, 2, 3, 4, 5), np.float32), {}),
        (np.zeros((0, 3, 5, 8), np.float32), {}), (acts, {"dims": ("example", "layer", "token")}),
        (acts, {"dims": ("batch", "layer", "token", "d_model")}), (acts, {"dims": "eltd"}), (acts, {"dims": 4}),
        (acts, {"layers": None}), (acts, {"layers": [1, 2]}), (acts, {"layers": [1, 2, 2]}), (acts, {"layers": 5}),
        (acts.astype(np.int16), {}), (acts.astype(np.complex64), {}), (np.zeros(SHAPE, object), {}),
        (acts, {"dtype": "float64"}),
        (acts, {"data": "birds"}), (acts, {"token_arrays": [acts]}),
        (acts, {"token_arrays": {5: np.zeros((11, 5), np.int32)}}), (acts, {"client": "tcp://scheduler:8786"}), (acts, {"token_arrays": {"token_ids": np.zeros((11, 4), np.int32)}}),
        (acts, {"token_arrays": {"token_ids": np.zeros((11, 5))}}), (acts, {"token_arrays": {"token_ids": [[1, 2]]}}),
        (acts, {"token_arrays": {"mine": np.zeros((11, 5), np.uint16)}}), (acts, {"cls_token": True, "token_arrays": ids}),
        (np.ma.masked_less(acts, 0), {}), (np.full(SHAPE, np.nan, np.float32), {}),
        (unknown[da.from_array(np.arange(11)) % 2 == 0], {}),
    ]  # fmt: skip
    if find_spec("torch") is not None:
        import torch

        cases.append((torch.zeros(SHAPE).to_sparse(), {}))
    for array, options in cases:
        with pytest.raises(ArgumentError) as caught:
            ShardStore.from_array(array, tmp_path, **OPTIONS | options)
        assert str(caught.value)
    assert not list(tmp_path.glob("*/metadata.json"))


def test_from_array_by_a_cluster_writes_the_bytes_of_one_process(tmp_path):
    import dask.array as da

    acts, ids = numbers("float16"), np.arange(55).reshape(11, 5)
    array, arrays = da.from_array(acts, chunks=(5, 1, 5, 8)), {"token_ids": ids, "mask": ids % 3 > 0}
    whole = ShardStore.from_array(array, tmp_path / "alone", **OPTIONS, token_arrays=arrays)
    flag = tmp_path / "flag"
    flag.touch()

    def failing(block: np.ndarray, flag: Path, block_info: dict[int, dict[str, tuple[int, ...]]]) -> np.ndarray:
        if block_info[0]["chunk-location"][0] == 2 and flag.exists():
            raise ZeroDivisionError("chunk 2")
        return block

    with two_workers() as client:
        store = ShardStore.from_array(array, tmp_path / "many", **OPTIONS, token_arrays=arrays, client=client)
        assert content(Path(store.url)) == content(Path(whole.url))
        ShardStore.from_array(array, tmp_path / "many", **OPTIONS, token_arrays=arrays, client=client)
        fails = da.map_blocks(failing, da.from_array(acts[:, :1], chunks=5), flag=flag, dtype=acts.dtype, meta=acts[:0])
        flag.unlink()
        right = ShardStore.from_array(fails, tmp_path / "right", **OPTIONS | {"layers": [1]})
        other = {"name": right.name, "options": OPTIONS | {"layers": [1], "client": client}}
        assert ShardStore.from_array(fails, tmp_path / "failed", **other["options"]).name == other["name"]
