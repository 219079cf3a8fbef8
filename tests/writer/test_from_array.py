"""`ShardStore.from_array`: arrays of every kind become stores, block by block, resumed and compared with their source."""

from __future__ import annotations

import json
import math
import signal
import subprocess
import sys
import tracemalloc
from pathlib import Path

import counted_arrays
import ml_dtypes
import numpy as np
import pytest
import xxhash
import zarr
from counted_arrays import OPTIONS, SHAPE, Counted, killed_import, numbers
from waiting import HANG_S

from saev_store import ShardStore
from saev_store.errors import (
    ArgumentError,
    CorruptShardError,
    ResumeError,
    SaevStoreError,
    SaevStoreWarning,
    StoreExistsError,
)
from saev_store.writer import shard_writer
from saev_store.writer.importing import _arrays
from saev_store.zarr import BFloat16

MODEL = {"family": "gpt2", "ckpt": "tiny", "progress": False}


@pytest.fixture(autouse=True)
def _large(monkeypatch: pytest.MonkeyPatch) -> None:
    """Arrays are identified as large ones are: by eight of their examples."""
    monkeypatch.setattr(_arrays, "_FULL_NBYTES", 0)


def files_of(folder: str | Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in sorted(Path(folder).iterdir())}


def path_of(store: ShardStore) -> Path:
    return Path(store.url.removeprefix("file://"))


def assert_same_bits(store: ShardStore, acts: np.ndarray) -> None:
    found = store.read(dtype="stored")
    assert found.dtype == acts.dtype
    assert found.tobytes() == acts.tobytes()


# -- what kinds of arrays -----------------------------------------------------------------------------------------------


def as_kind(kind: str, acts: np.ndarray, folder: Path) -> object:
    match kind:
        case "memmap":
            mapped = np.memmap(folder / "acts.raw", acts.dtype, "w+", shape=acts.shape)
            mapped[...] = acts
            return np.memmap(folder / "acts.raw", acts.dtype, "r", shape=acts.shape)
        case "zarr":
            dtype = BFloat16() if acts.dtype == ml_dtypes.bfloat16 else acts.dtype
            array = zarr.create_array(folder / "acts.zarr", shape=acts.shape, chunks=(3, 1, 5, 8), dtype=dtype)
            array[...] = acts
            return array
        case "h5py":
            h5py = pytest.importorskip("h5py")
            with h5py.File(folder / "acts.h5", "w") as file:
                file.create_dataset("acts", data=acts, chunks=(3, 1, 5, 8))
            return h5py.File(folder / "acts.h5", "r")["acts"]
        case "xarray":
            xr = pytest.importorskip("xarray")
            return xr.DataArray(acts, dims=("example", "layer", "token", "d_model"))
        case "dask":
            da = pytest.importorskip("dask.array")
            return da.from_array(acts, chunks=(4, 2, 5, 8))
        case "xarray of dask":
            da, xr = pytest.importorskip("dask.array"), pytest.importorskip("xarray")
            return xr.DataArray(da.from_array(acts, chunks=(4, 2, 5, 8)), dims=("example", "layer", "token", "d_model"))
        case "torch":
            torch = pytest.importorskip("torch")
            if acts.dtype == ml_dtypes.bfloat16:
                return torch.from_numpy(acts.view(np.int16)).view(torch.bfloat16)
            return torch.from_numpy(acts)
    return acts


@pytest.mark.parametrize(
    ("kind", "name"),
    [
        (kind, name)
        for kind in ("numpy", "memmap", "zarr", "h5py", "xarray", "dask", "xarray of dask", "torch")
        for name in ("float32", "bfloat16", "float16")
        if (kind, name) != ("h5py", "bfloat16")  # HDF5 has none
    ],
)
def test_an_array_of_every_kind_becomes_a_store_of_its_bits(kind: str, name: str, tmp_path: Path):
    acts = numbers(name)
    array = as_kind(kind, acts, tmp_path)
    store = ShardStore.from_array(array, tmp_path / "out", **OPTIONS, max_block_bytes=4 * acts[0].nbytes)
    assert_same_bits(store, acts)
    assert store.validate(deep=True).ok
    assert store.layers == (2, 5, 11)


def test_the_files_are_those_of_a_writer_with_the_same_metadata(tmp_path: Path):
    acts, ids = numbers("float16"), np.arange(55).reshape(11, 5)
    store = ShardStore.from_array(acts, tmp_path / "a", **OPTIONS, token_arrays={"token_ids": ids}, max_block_bytes=1)
    with ShardStore.create(tmp_path / "b", store.metadata, progress=False) as writer:
        writer.append(acts, token_ids=ids)
    assert files_of(path_of(store)) == files_of(tmp_path / "b" / store.metadata.hash)


@pytest.mark.parametrize(
    ("dims", "shape"),
    [
        (("layer", "example", "token", "d_model"), (3, 11, 5, 8)),
        (("d_model", "token", "layer", "example"), (8, 5, 3, 11)),
        (("example", "d_model", "layer"), (11, 8, 3)),
        (("example", "token", "d_model"), (11, 5, 8)),
        (("d_model", "example"), (8, 11)),
    ],
)
def test_axes_come_in_any_order_that_is_named(dims: tuple[str, ...], shape: tuple[int, ...], tmp_path: Path):
    array = numbers(shape=shape)
    options = OPTIONS | {"layers": [2, 5, 11] if "layer" in dims else [5]}
    store = ShardStore.from_array(array, tmp_path, dims=dims, **options, max_block_bytes=900)
    letters = {"example": "e", "layer": "l", "token": "t", "d_model": "d"}
    present = "".join(letters[axis] for axis in letters if axis in dims)
    expected = np.einsum(f"{''.join(letters[axis] for axis in dims)}->{present}", array)
    np.testing.assert_array_equal(store[...].reshape(expected.shape), expected)


def test_xarray_names_its_axes_and_layers(tmp_path: Path):
    xr = pytest.importorskip("xarray")
    acts = numbers()
    array = xr.DataArray(
        acts.swapaxes(0, 1), dims=("layer", "example", "token", "d_model"), coords={"layer": [1, 4, 7]}
    )
    store = ShardStore.from_array(array, tmp_path, **MODEL)
    assert store.layers == (1, 4, 7)
    assert_same_bits(store, acts)
    assert ShardStore.from_array(array, tmp_path / "others", layers=(0, 1, 2), **MODEL).layers == (0, 1, 2)
    with pytest.raises(ArgumentError, match=r"given as \[7, 1, 4\]; by the array's coordinate they are \[1, 4, 7\]"):
        ShardStore.from_array(array, tmp_path / "turned", layers=(7, 1, 4), **MODEL)
    falling = array.assign_coords(layer=[7, 4, 1])
    with pytest.raises(ArgumentError, match=r"given as \[1, 4, 7\]; by the array's coordinate they are \[7, 4, 1\]"):
        ShardStore.from_array(falling, tmp_path / "turned", layers=(1, 4, 7), **MODEL)
    assert not (tmp_path / "turned").exists()


def test_token_arrays_whose_axes_are_named_in_another_order_are_refused(tmp_path: Path):
    xr = pytest.importorskip("xarray")
    acts, labels = numbers(shape=(5, 3, 5, 8)), np.arange(25, dtype=np.uint8).reshape(5, 5)
    for dims in (("token", "example"), ("content_token", "example"), ("token", "row")):
        turned = {"labels": xr.DataArray(labels, dims=dims)}
        with pytest.raises(ArgumentError, match="axes") as found:
            ShardStore.from_array(acts, tmp_path, **OPTIONS, token_arrays=turned)
        assert found.value.where == "labels"
    for number, dims in enumerate([("example", "token"), ("example", "content_token"), ("row", "position")]):
        named = {"labels": xr.DataArray(labels, dims=dims)}
        store = ShardStore.from_array(acts, tmp_path / str(number), **OPTIONS, token_arrays=named)
        np.testing.assert_array_equal(store.labels, labels)


def test_three_axes_are_examples_tokens_and_numbers(tmp_path: Path):
    acts = numbers(shape=(11, 5, 8))
    store = ShardStore.from_array(acts, tmp_path, **MODEL, layers=[7], cls_token=True)
    assert (store.shape, store.layers, store.layout.content_tokens_per_example) == ((11, 1, 5, 8), (7,), 4)
    assert_same_bits(store, acts[:, None])


def test_big_endian_numbers_are_stored_little_endian(tmp_path: Path):
    acts = numbers()
    assert_same_bits(ShardStore.from_array(acts.astype(">f4"), tmp_path, **OPTIONS), acts)


def test_float64_is_rounded_to_the_dtype_that_is_asked_for(tmp_path: Path):
    acts = np.random.default_rng(0).standard_normal(SHAPE)
    with pytest.raises(ArgumentError, match="float64, which no store holds"):
        ShardStore.from_array(acts, tmp_path, **OPTIONS)
    assert_same_bits(ShardStore.from_array(acts, tmp_path, **OPTIONS, dtype="float32"), acts.astype(np.float32))
    store = ShardStore.from_array(acts, tmp_path, **OPTIONS, dtype="bfloat16")
    assert_same_bits(store, acts.astype(np.float32).astype(ml_dtypes.bfloat16))
    acts[3, 1, 2, 4] = 1e39
    with pytest.raises(
        ArgumentError, match=r"example 3 holds 1 numbers that float32 cannot hold; the first is 1e\+39 .*saturate"
    ):
        ShardStore.from_array(acts, tmp_path, **OPTIONS, dtype="float32", max_block_bytes=1)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16"])
def test_the_policy_for_large_numbers_holds_beyond_float32(tmp_path: Path, dtype: str):
    acts = np.random.default_rng(0).standard_normal(SHAPE)
    acts[3, 1, 2, :2] = 1e39, -1e300
    largest = float(ml_dtypes.finfo(dtype).max) if dtype == "bfloat16" else float(np.finfo(dtype).max)
    with pytest.raises(
        ArgumentError, match=rf"example 3 holds 2 numbers that {dtype} cannot hold; the first is 1e\+39"
    ):
        ShardStore.from_array(acts, tmp_path / "a", **OPTIONS, dtype=dtype)
    found = ShardStore.from_array(acts, tmp_path / "b", **OPTIONS, dtype=dtype, on_overflow="saturate")[3, 1, 2, :2]
    assert found.tolist() == [largest, -largest]
    with pytest.warns(SaevStoreWarning, match=f"{dtype} cannot hold"):
        store = ShardStore.from_array(
            acts, tmp_path / "c", **OPTIONS, dtype=dtype, on_overflow="warn", on_nonfinite="allow"
        )
    assert store[3, 1, 2, :2].tolist() == [np.inf, -np.inf]


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_float64_is_rounded_once(tmp_path: Path, dtype: str):
    """By way of float32, numbers near the middle of two become the wrong one."""
    bits = {"bfloat16": 7, "float16": 10}[dtype]
    rng = np.random.default_rng(0)
    n = math.prod(SHAPE)
    exponent = rng.integers(-10, 10, n)
    whole = rng.integers(2**bits, 2 ** (bits + 1), n)
    near = rng.choice([0.0, 2.0**-40, -(2.0**-40), 2.0**-20, -(2.0**-20)], n)
    sign = rng.choice([-1.0, 1.0], n)
    acts = (sign * np.ldexp(whole + 0.5 + near, exponent - bits)).reshape(SHAPE)
    up = (near > 0) | ((near == 0) & (whole % 2 == 1))  # to nearest, of two equally near to the even one
    truth = (sign * np.ldexp(whole + up.astype(np.int64), exponent - bits)).reshape(SHAPE)
    assert ShardStore.from_array(acts, tmp_path, **OPTIONS, dtype=dtype)[...].tolist() == truth.tolist()


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_what_float64_holds_as_infinite_or_nan_is_stored_as_that(tmp_path: Path, dtype: str):
    """Nothing overflows there: whether such numbers are wanted is what `on_nonfinite` says, as for any other dtype."""
    acts = np.random.default_rng(0).standard_normal(SHAPE)
    acts[3, 1, 2, :3] = np.inf, -np.inf, np.nan
    store = ShardStore.from_array(acts, tmp_path, **OPTIONS, dtype=dtype, on_nonfinite="allow")
    found = store[...]
    assert found[3, 1, 2, :2].tolist() == [np.inf, -np.inf]
    assert np.isnan(found[3, 1, 2, 2])
    assert np.array_equal(np.isfinite(found), np.isfinite(acts))


def test_a_policy_for_large_numbers_is_part_of_what_is_verified(tmp_path: Path):
    acts = numbers()
    acts[4, 0, 1, 2] = 1e6
    with pytest.raises(ArgumentError, match="float16 cannot hold"):
        ShardStore.from_array(acts, tmp_path, **OPTIONS, dtype="float16")
    store = ShardStore.from_array(acts, tmp_path, **OPTIONS, dtype="float16", on_overflow="saturate")
    assert store[4, 0, 1, 2] == 65504
    again = ShardStore.from_array(acts, tmp_path, **OPTIONS, dtype="float16", on_overflow="saturate")
    assert again.url == store.url  # the source is compared as that policy writes it


# -- token arrays -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", ["numpy", "zarr", "dask"])
def test_token_arrays_are_arrays_too(kind: str, tmp_path: Path):
    ids, mask = np.arange(44).reshape(11, 4), np.arange(44).reshape(11, 4) % 3 > 0
    given: dict[str, object] = {"token_ids": ids, "mask": mask, "score": mask.astype(np.float32)}
    if kind == "zarr":
        given["token_ids"] = zarr.create_array(tmp_path / "ids.zarr", data=ids)
    if kind == "dask":
        given["token_ids"] = pytest.importorskip("dask.array").from_array(ids, chunks=3)
    store = ShardStore.from_array(
        numbers(), tmp_path / "out", **OPTIONS, cls_token=True, token_arrays=given, max_block_bytes=1000
    )
    np.testing.assert_array_equal(store.token_arrays["token_ids"], ids)
    assert store.token_arrays["token_ids"].dtype == np.int32
    np.testing.assert_array_equal(store.token_arrays["mask"], mask)
    np.testing.assert_array_equal(store.token_arrays["score"], mask.astype(np.float32))


def test_labels_alone_leave_a_store_that_every_reader_knows(tmp_path: Path):
    labels = np.arange(55, dtype=np.uint8).reshape(11, 5)
    store = ShardStore.from_array(numbers(), tmp_path, **OPTIONS, token_arrays={"labels": labels})
    assert store.metadata.protocol == "2.0"
    np.testing.assert_array_equal(store.labels, labels)


# -- memory ---------------------------------------------------------------------------------------------------------------


def test_blocks_are_no_larger_than_was_asked_for(tmp_path: Path):
    acts = numbers()
    array = Counted(acts)
    ShardStore.from_array(array, tmp_path, **OPTIONS, max_block_bytes=3 * acts[0].nbytes + 5)
    assert array.blocks == [(0, 3), (3, 6), (6, 9), (9, 11)]
    array = Counted(acts)
    ShardStore.from_array(array, tmp_path / "b", **OPTIONS, max_block_bytes=1)
    assert array.blocks == [(i, i + 1) for i in range(11)]


@pytest.mark.parametrize(
    ("chunks", "blocks"),
    [
        ((3, 1, 5, 8), [(0, 3), (3, 6), (6, 9), (9, 11)]),
        ((2, 1, 5, 8), [(0, 4), (4, 8), (8, 11)]),
        (((2, 2, 2, 1, 4), (3,), (5,), (8,)), [(0, 4), (4, 7), (7, 11)]),
    ],
)
def test_a_chunk_that_fits_is_read_once(tmp_path: Path, chunks: tuple[object, ...], blocks: list[tuple[int, int]]):
    """Together with as many others as fit."""
    array = Counted(numbers(), chunks=chunks)
    ShardStore.from_array(array, tmp_path, **OPTIONS, max_block_bytes=4 * array._values[0].nbytes)
    assert array.blocks == blocks


@pytest.mark.parametrize("chunks", [(5, 1, 5, 8), ((5, 5, 1), (3,), (5,), (8,))])
def test_a_chunk_that_does_not_fit_is_read_in_pieces(tmp_path: Path, chunks: tuple[object, ...]):
    acts = numbers()
    array = Counted(acts, chunks=chunks)
    store = ShardStore.from_array(array, tmp_path, **OPTIONS, max_block_bytes=2 * acts[0].nbytes)
    assert array.blocks == [(0, 2), (2, 4), (4, 5), (5, 7), (7, 9), (9, 11)]
    assert_same_bits(store, acts)


def test_every_chunk_of_dask_is_computed_once(tmp_path: Path):
    da = pytest.importorskip("dask.array")
    acts, computed = numbers(), []

    def noted(block: np.ndarray, block_info: dict[int, dict[str, object]] | None = None) -> np.ndarray:
        if block_info:
            computed.append(block_info[0]["chunk-location"][0])
        return block

    array = da.from_array(acts, chunks=((2, 5, 4), 3, 5, 8)).map_blocks(noted, dtype=acts.dtype, meta=acts[:0])
    store = ShardStore.from_array(array, tmp_path, **OPTIONS, max_block_bytes=6 * acts[0].nbytes)
    assert_same_bits(store, acts)
    assert computed[8:] == [0, 1, 2]


def test_memory_does_not_grow_with_the_array(tmp_path: Path):
    """64 examples of 256 KiB, in blocks of 1 MiB and shards of 512 KiB."""

    class Zeros:
        shape, dtype = (64, 1, 64, 1024), np.dtype(np.float32)

        def __getitem__(self, key: tuple[slice, ...]) -> np.ndarray:
            return np.zeros((key[0].stop - key[0].start, *self.shape[1:]), self.dtype)

    tracemalloc.start()
    try:
        ShardStore.from_array(Zeros(), tmp_path, **MODEL, layers=[0], max_tokens_per_shard=128, max_block_bytes=1 << 20)
        _, peak = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert peak < 8 << 20  # of 16 MiB


# -- crashes, and sources that change ---------------------------------------------------------------------------------------


@pytest.mark.parametrize(("verify", "kills"), [(True, (9, 13, 18)), (False, (8, 12))])
def test_after_kills_the_same_call_gives_the_same_bytes(verify: bool, kills: tuple[int, ...], tmp_path: Path):
    """Killed when it has read so many times: eight examples to identify the array, then example after example."""
    acts = numbers("bfloat16")
    options = {**killed_import(), "verify": verify}
    undisturbed = ShardStore.from_array(acts, tmp_path / "a", **options)
    for kill_at in kills:
        command = [sys.executable, counted_arrays.__file__, str(tmp_path / "b"), str(kill_at), str(verify)]
        assert subprocess.run(command, timeout=HANG_S, check=False).returncode == -signal.SIGKILL
        assert not (tmp_path / "b" / undisturbed.metadata.hash / "metadata.json").exists()
    store = ShardStore.from_array(acts, tmp_path / "b", **options)
    assert files_of(path_of(store)) == files_of(path_of(undisturbed))


class Interrupted(Exception):
    pass


class Failing(Counted):
    """Raises when it is read for the `fail_at`th time; says that it lies in a file."""

    filename = "/data/acts.npy"

    def __init__(self, values: np.ndarray, fail_at: int):
        super().__init__(values)
        self._fail_at = fail_at

    def __getitem__(self, key: tuple[slice, ...]) -> np.ndarray:
        if len(self.reads) == self._fail_at:
            raise Interrupted
        return super().__getitem__(key)


def test_an_import_that_is_continued_reads_only_the_rest_unless_it_verifies(tmp_path: Path):
    acts = numbers()
    with pytest.raises(Interrupted):
        ShardStore.from_array(Failing(acts, 8 + 5), tmp_path, **OPTIONS, max_block_bytes=1)
    array = Failing(acts, 99)
    assert_same_bits(ShardStore.from_array(array, tmp_path, **OPTIONS, max_block_bytes=1, verify=False), acts)
    assert array.blocks == [(i, i + 1) for i in range(5, 11)]


@pytest.mark.parametrize("resume", [True, "auto"])
def test_a_file_that_has_changed_is_refused(resume: object, tmp_path: Path):
    acts = numbers()
    with pytest.raises(Interrupted):
        ShardStore.from_array(Failing(acts, 8 + 5), tmp_path, **OPTIONS, max_block_bytes=1)
    acts[10, 0, 0, 0] += 1  # one of the examples that identify the array
    with pytest.raises(ResumeError, match="has changed since the import"):
        ShardStore.from_array(Failing(acts, 99), tmp_path, **OPTIONS, resume=resume)
    assert len(list(tmp_path.iterdir())) == 1


def test_another_part_of_a_mapped_file_is_another_store(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    acts = numbers(shape=(10, 3, 5, 8))
    np.save(tmp_path / "acts.npy", acts)
    mapped = np.load(tmp_path / "acts.npy", mmap_mode="r")
    with monkeypatch.context() as patch:
        patch.setattr(shard_writer.ShardWriter, "checkpoint", _interrupted)
        with pytest.raises(Interrupted):
            ShardStore.from_array(mapped[:5], tmp_path / "out", **OPTIONS)
    assert_same_bits(ShardStore.from_array(mapped[5:], tmp_path / "out", **OPTIONS), acts[5:])
    first = ShardStore.from_array(mapped[:5], tmp_path / "out", **OPTIONS)
    assert_same_bits(first, acts[:5])
    assert first.metadata.data["imported"]["url"].endswith("acts.npy::0:2400")
    whole = ShardStore.from_array(mapped.view(np.uint32).view(np.float32), tmp_path / "out", **OPTIONS)
    assert whole.metadata.data["imported"]["url"].endswith("acts.npy")


def _interrupted(writer: object) -> None:
    raise Interrupted


def test_another_reading_of_an_unchanged_file_is_another_store(tmp_path: Path):
    acts = numbers(shape=(5, 3, 5, 8))
    with pytest.raises(Interrupted):
        ShardStore.from_array(Failing(acts, 8), tmp_path, **OPTIONS, max_block_bytes=1)
    dims = ("token", "layer", "example", "d_model")
    turned = ShardStore.from_array(Failing(acts, 99), tmp_path, **OPTIONS, dims=dims)
    assert_same_bits(turned, acts.swapaxes(0, 2))
    with_mask = {"mask": np.ones((5, 5), bool)}
    assert_same_bits(ShardStore.from_array(Failing(acts, 99), tmp_path, **OPTIONS, token_arrays=with_mask), acts)


@pytest.mark.parametrize(("example", "n_at_once"), [(2, 2), (5, 2), (2, 1), (4, 1)])
def test_a_change_that_the_identity_does_not_see_is_found_by_verifying(example: int, n_at_once: int, tmp_path: Path):
    """Example 2 lies in a shard that was whole; 4, where one example is read at once, in one that was half written."""
    acts = numbers(shape=(50, 3, 5, 8))
    with pytest.raises(Interrupted):
        ShardStore.from_array(Failing(acts, 8 + 5), tmp_path, **OPTIONS, max_block_bytes=n_at_once * acts[0].nbytes)
    acts[example, 0, 0, 0] += 1
    array = Failing(acts, 999)
    with pytest.raises(ResumeError, match=f"examples {example // 2 * 2} to {example // 2 * 2 + 1} of the source"):
        ShardStore.from_array(array, tmp_path, **OPTIONS, max_block_bytes=1)
    assert len(array.blocks) < 50 or example == 4  # its shard is compared when the rest of it is durable
    with pytest.raises(SaevStoreError):
        ShardStore.open(next(tmp_path.iterdir()))


@pytest.mark.parametrize(("example", "shard"), [(7, "6 to 7"), (0, "0 to 1")])
def test_bytes_that_are_damaged_on_their_way_are_not_published(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, example: int, shard: str
):
    acts, right = numbers(), shard_writer.rows_as_bytes

    def damaged(array: np.ndarray, layout: object) -> np.ndarray:
        found = right(array, layout).copy()
        if acts[example].tobytes() == found.tobytes():
            found[100] ^= 1
        return found

    monkeypatch.setattr(shard_writer, "rows_as_bytes", damaged)
    with pytest.raises(CorruptShardError, match=f"examples {shard} is not what was read"):
        ShardStore.from_array(acts, tmp_path, **OPTIONS, max_block_bytes=1)
    with pytest.raises(SaevStoreError):
        ShardStore.open(next(tmp_path.iterdir()))


def test_in_a_bucket_whole_shards_are_kept():
    """A service has a file when it is complete: of five examples four are kept."""
    acts, root = numbers(), "memory://from-array"
    with pytest.raises(Interrupted):
        ShardStore.from_array(Failing(acts, 8 + 5), root, **OPTIONS, max_block_bytes=1)
    array = Failing(acts, 99)
    assert_same_bits(ShardStore.from_array(array, root, **OPTIONS, max_block_bytes=1, verify=False), acts)
    assert array.blocks == [(i, i + 1) for i in range(4, 11)]
    assert ShardStore.from_array(acts, root, **OPTIONS).validate(deep=True).ok


@pytest.mark.parametrize("example", [1, 3])
def test_a_change_in_a_shard_that_was_kept_is_told_before_more_is_imported(example: int):
    """As soon as that shard was read, also where it is the last of those."""
    acts, root = numbers(shape=(50, 3, 5, 8)), f"memory://from-array-changed-{example}"
    with pytest.raises(Interrupted):
        ShardStore.from_array(Failing(acts, 8 + 5), root, **OPTIONS, max_block_bytes=1)
    acts[example, 0, 0, 0] += 1
    array, first = Failing(acts, 999), example // 2 * 2
    with pytest.raises(ResumeError, match=f"examples {first} to {first + 1} of the source"):
        ShardStore.from_array(array, root, **OPTIONS, max_block_bytes=1)
    assert array.blocks == [(i, i + 1) for i in range(first + 2)]


def test_a_finished_store_is_compared_and_not_written_again(tmp_path: Path):
    acts, ids = numbers(), np.arange(55, dtype=np.int32).reshape(11, 5)
    options = {**OPTIONS, "token_arrays": {"token_ids": ids, "mask": ids > 3}}
    folder = path_of(ShardStore.from_array(acts, tmp_path, **options))
    before, times = files_of(folder), {path: path.stat().st_mtime_ns for path in folder.iterdir()}
    array = Counted(acts)
    ShardStore.from_array(array, tmp_path, **options, verify=False)
    assert array.blocks == []
    ShardStore.from_array(acts, tmp_path, **options)
    assert files_of(folder) == before
    assert {path: path.stat().st_mtime_ns for path in folder.iterdir()} == times
    with pytest.raises(StoreExistsError, match="the store is complete.*without resume=False") as refused:
        ShardStore.from_array(acts, tmp_path, **options, resume=False)
    assert "exist_ok" not in str(refused.value)  # from_array has no such option
    # Example 3 is none of the eight that name the store.
    ids[3, 2] += 1
    with pytest.raises(StoreExistsError, match="examples 2 to 3 are not those of the source"):
        ShardStore.from_array(acts, tmp_path, **options)
    ids[3, 2] -= 1
    acts[3, 2, 1, 0] += 1
    with pytest.raises(StoreExistsError, match="examples 2 to 3 are not those of the source"):
        ShardStore.from_array(acts, tmp_path, **options)


@pytest.mark.parametrize("lost", ["digests.json", "an entry of it", "blocks of this size"])
def test_a_finished_store_without_digests_is_compared_byte_by_byte(tmp_path: Path, lost: str):
    """Deleting a digests.json that cannot be used is what other errors advise."""
    acts = numbers()
    folder = path_of(ShardStore.from_array(acts, tmp_path, **OPTIONS))
    document = json.loads((folder / "digests.json").read_text())
    (folder / "digests.json").unlink()
    if lost == "an entry of it":
        del document["files"]["acts000001.bin"]
        (folder / "digests.json").write_text(json.dumps(document))
    elif lost == "blocks of this size":
        files = {path.name: path.read_bytes() for path in folder.glob("acts*.bin")}
        found = {
            name: {
                "nbytes": len(raw),
                "digests": [xxhash.xxh3_128_hexdigest(raw[i : i + 256]) for i in range(0, len(raw), 256)],
            }
            for name, raw in files.items()
        }
        (folder / "digests.json").write_text(json.dumps({**document, "block_bytes": 256, "files": found}))
    assert path_of(ShardStore.from_array(acts, tmp_path, **OPTIONS)) == folder
    shard = bytearray((folder / "acts000001.bin").read_bytes())
    shard[5] ^= 1
    (folder / "acts000001.bin").write_bytes(shard)
    with pytest.raises(
        StoreExistsError, match="examples 2 to 3 are not those of the source: the source or the store has changed"
    ):
        ShardStore.from_array(acts, tmp_path, **OPTIONS)


def test_a_small_array_is_identified_by_all_its_numbers(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.undo()
    acts = numbers()
    first = ShardStore.from_array(acts, tmp_path, **OPTIONS)
    acts[3, 2, 1, 0] += 1
    second = ShardStore.from_array(acts, tmp_path, **OPTIONS)
    assert first.url != second.url
    assert_same_bits(second, acts)


def test_a_large_array_is_identified_by_eight_of_its_examples(tmp_path: Path):
    """The first, the last, and six that are evenly spread; an import goes on only where all releases take the same."""
    acts = np.concatenate([numbers(), numbers(seed=1)])[:20]
    store = ShardStore.from_array(acts, tmp_path, **OPTIONS)
    eight = acts[[0, 2, 5, 8, 10, 13, 16, 19]]
    found = store.metadata.data["imported"]["digest"]
    assert found == {"algorithm": "xxh3_128", "scope": "sampled", "value": xxhash.xxh3_128_hexdigest(eight.tobytes())}


def test_other_numbers_are_another_store(tmp_path: Path):
    first = ShardStore.from_array(numbers(seed=1), tmp_path, **OPTIONS)
    second = ShardStore.from_array(numbers(seed=2), tmp_path, **OPTIONS)
    assert first.url != second.url
    assert first.metadata.data["imported"]["shape"] == [11, 3, 5, 8]


def test_what_is_imported_is_named_in_the_metadata(tmp_path: Path):
    array = as_kind("memmap", numbers(), tmp_path)
    store = ShardStore.from_array(array, tmp_path / "out", **OPTIONS, data={"corpus": "birds"}, dataset="/data/birds")
    document = json.loads((path_of(store) / "metadata.json").read_text())
    assert document["data"]["corpus"] == "birds"
    assert document["data"]["imported"]["url"] == str(tmp_path / "acts.raw")
    assert document["dataset"] == "/data/birds"
    # Data that were taken from another store say what that one was imported from.
    again = ShardStore.from_array(numbers(seed=2), tmp_path / "out", **OPTIONS, data=store.metadata.data)
    assert again.metadata.data["corpus"] == "birds"
    assert again.metadata.data["imported"]["digest"] != document["data"]["imported"]["digest"]
    assert_same_bits(again, numbers(seed=2))


# -- what is refused --------------------------------------------------------------------------------------------------------


class Short(Counted):
    """Says that it has more examples than come."""

    def __init__(self, values: np.ndarray):
        super().__init__(values)
        self.shape = (2**40, *values.shape[1:])


@pytest.mark.parametrize(
    ("array", "options", "message"),
    [
        ("acts.npy", {}, "of type str; it must be an array"),
        ([[1.0]], {}, "of type list; it must be an array"),
        (np.zeros(8, np.float32), {}, "the 1 axes of the array"),
        (np.zeros((1, 2, 3, 4, 5), np.float32), {}, "the 5 axes of the array"),
        (np.zeros((0, 3, 5, 8), np.float32), {}, "no axis of a store is empty"),
        (numbers(), {"dims": ("example", "layer", "token")}, "the 4 axes of the array"),
        (numbers(), {"dims": ("example", "layer", "layer", "d_model")}, "the 4 axes of the array"),
        (numbers(), {"dims": ("batch", "layer", "token", "d_model")}, "the 4 axes of the array"),
        (numbers(), {"dims": "eltd"}, "dims is 'eltd'"),
        (numbers(), {"layers": None}, "the labels of the layers are not known"),
        (numbers(), {"layers": [1, 2]}, "2 layers for an array that has 3"),
        (numbers(), {"layers": [1, 2, 2]}, "layers"),
        (numbers().astype(np.int16), {}, "if these are the bits of bfloat16"),
        (numbers("bfloat16").view("V2"), {}, "if these are the bits of bfloat16"),
        (numbers().astype(np.complex64), {}, "has dtype complex64"),
        (numbers().astype(np.longdouble), {}, "a store holds"),
        (np.zeros(SHAPE, object), {}, "has dtype object"),
        (numbers(), {"dtype": "float64"}, "dtype is 'float64'"),
        (numbers(), {"max_block_bytes": 0}, "max_block_bytes is 0"),
        (numbers(), {"max_block_bytes": 1.5}, "max_block_bytes is 1.5"),
        (numbers(), {"verify": "deep"}, "verify is 'deep'"),
        (numbers(), {"resume": "yes"}, "resume is 'yes'"),
        (numbers(), {"dims": 4}, "dims is 4"),
        (numbers(), {"layers": 5}, "layers is 5"),
        (numbers(), {"token_arrays": [numbers()]}, "token_arrays is a list"),
        (numbers(), {"data": "birds"}, "data is 'birds'"),
        (numbers(), {"client": "tcp://scheduler:8786"}, "a cluster writes dask arrays only"),
        (numbers(), {"token_arrays": {"token_ids": np.zeros((11, 4), np.int32)}}, "token_ids has shape"),
        (numbers(), {"token_arrays": {"token_ids": np.zeros((11, 5))}}, "token_ids has dtype float64"),
        (numbers(), {"token_arrays": {"token_ids": np.full((11, 5), 2**40)}}, "token_ids holds values"),
        (numbers(), {"token_arrays": {"mine": np.zeros((11, 5), np.uint16)}}, "mine has dtype uint16"),
        (numbers(), {"token_arrays": {"token_ids": [[1, 2]]}}, "of type list; it must be an array"),
        (numbers(), {"cls_token": True, "token_arrays": {"mask": np.ones((11, 5), bool)}}, "mask has shape"),
        (np.ma.masked_less(numbers(), 0), {}, "masked array"),
        (np.full(SHAPE, np.nan, np.float32), {}, "not finite"),
        (Short(numbers()), {}, "they must be float32"),
    ],
)
def test_what_is_no_store_is_refused(array: object, options: dict[str, object], message: str, tmp_path: Path):
    with pytest.raises(ArgumentError, match=f"(?i){message}"):
        ShardStore.from_array(array, tmp_path, **OPTIONS | options)
    assert not list(tmp_path.glob("*/metadata.json"))


def test_lengths_that_dask_does_not_know_are_refused(tmp_path: Path):
    da = pytest.importorskip("dask.array")
    array = da.from_array(numbers(), chunks=4)
    with pytest.raises(ArgumentError, match="not all is known"):
        ShardStore.from_array(array[da.from_array(np.arange(11)) % 2 == 0], tmp_path, **OPTIONS)
