"""The Zarr view is the dense array: any selection, dtype, chunk shape and place; and what it shows, lists and refuses."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import pickle
import subprocess
import sys
import tracemalloc
import warnings
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
import zarr
import zarr.api.asynchronous
from api import MemoryTransport
from dense_stores import PlainStore, plain_documents, plain_store
from servers import Bucket, s3_bucket  # noqa: F401  # the second is a fixture
from strategies import legal_shapes
from token_stores import ARRAYS, TokenStore, token_store
from transports import CountingTransport, LatencyTransport
from waiting import HANG_S
from zarr.abc.store import ByteRequest, OffsetByteRequest, RangeByteRequest, SuffixByteRequest
from zarr.core.buffer import default_buffer_prototype
from zarr.core.sync import sync

from saev_store import SaevStoreWarning, ShardStore
from saev_store.core.layout import Layout
from saev_store.errors import ArgumentError, CorruptShardError, DocumentError
from saev_store.transport import Transport, open_transport
from saev_store.zarr import ZarrView

#: Selections; `bash .ci/nightly selections` makes 10,000.
N = 10_000 if os.environ.get("SAEV_STORE_LONG") else 800
ROOT = Path(__file__).resolve().parents[2]
SAMPLES = ROOT / "tests/data/saev"
LAYOUT = Layout(7, (2, 5, 11), 4, True, 8, 3)
#: Variables of token arrays whose name an axis or a coordinate has.
SHOWN = {name: name for name in ARRAYS} | {"layer": "tokens_tokens_layer", "example": "tokens_example"}
ENGINES = ("mmap", "pread", "fsspec")


def far(transport: Transport, latency_s: float = 0.0) -> Transport:
    """The same bytes behind a price for each request."""
    return LatencyTransport(transport, latency_s, 1e6 if not latency_s else 1e9)


def opened(where: object, **options: object) -> ShardStore:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", SaevStoreWarning)  # what is in memory has no name to compare the hash with
        return ShardStore.open(where, **options)


def in_memory(plain: PlainStore, *, is_far: bool = False) -> ShardStore:
    memory = MemoryTransport(plain.files, label=plain.name)
    return opened(far(memory) if is_far else memory)


def read(view: ZarrView, name: str = "activations") -> zarr.Array:
    array = zarr.open_group(view, mode="r")[name]
    assert isinstance(array, zarr.Array)
    return array


def value(view: ZarrView, key: str, part: ByteRequest | None = None) -> bytes | None:
    found = sync(view.get(key, default_buffer_prototype(), part))
    return None if found is None else found.to_bytes()


def same(found: object, truth: np.ndarray) -> None:
    array = np.asarray(found)
    assert (array.dtype, array.shape) == (truth.dtype, truth.shape)
    assert array.tobytes() == truth.tobytes()


def widened(bits: np.ndarray) -> np.ndarray:
    """bfloat16 as float32: the same bits above zeros."""
    return (bits.view(np.uint16).astype(np.uint32) << 16).view(np.float32)


# -- values ------------------------------------------------------------------------------------------------------------


def views(root: Path, rng: np.random.Generator) -> Iterator[tuple[zarr.Array, np.ndarray]]:
    """Arrays of stores of every dtype, cut or padded, near and far, in random legal chunks; with their truth."""
    for number in range(24):
        dtype = ["float32", "bfloat16", "float16"][number % 3]
        made = token_store(
            root / str(number), dtype=dtype, n=int(rng.integers(1, 14)), per_shard=int(rng.integers(1, 9)),
            layers=tuple(range(int(rng.integers(1, 5)))), content=int(rng.integers(1, 5)), cls=bool(rng.integers(2)),
            d_model=int(rng.integers(1, 5)), cut=bool(rng.integers(2)), seed=number, arrays={"ids": "int32", "mask": "bool"},
        )  # fmt: skip
        transport = open_transport(str(made.path), engine=["mmap", "pread"][number % 2])
        store = ShardStore.open(far(transport) if number % 4 == 1 else transport)
        shapes = legal_shapes(store.layout)
        for shown in ("float32", "stored"):
            chunks = "auto" if rng.random() < 0.2 else shapes[int(rng.integers(len(shapes)))]
            group = zarr.open_group(store.as_zarr(chunks=chunks, dtype=shown), mode="r")
            truth = made.acts if shown == "stored" or dtype == "float32" else made.acts.astype(np.float32)
            yield group["activations"], truth
        for name, truth in made.arrays.items():
            yield group[name], truth


def basic_key(rng: np.random.Generator, shape: tuple[int, ...]) -> tuple[int | slice, ...]:
    key: list[int | slice] = []
    for size in shape:
        low, high = sorted(rng.integers(0, size + 1, 2).tolist())
        key.append(int(rng.integers(size)) if rng.random() < 0.3 else slice(low, high, int(rng.integers(1, 4))))
    return tuple(key)


def test_selections_through_zarr_equal_numpy(tmp_path: Path) -> None:
    rng = np.random.default_rng(0)
    arrays = list(views(tmp_path, rng))
    for number in range(N):
        array, truth = arrays[number % len(arrays)]
        if number < len(arrays):
            found, expected = array[...], truth
        elif number % 3 == 0:
            lists = [np.sort(rng.choice(n, rng.integers(1, n + 1), replace=False)) for n in truth.shape]
            found, expected = array.oindex[tuple(lists)], truth[np.ix_(*lists)]
        elif number % 3 == 1:
            points = tuple(rng.integers(0, n, 5) for n in truth.shape)
            found, expected = array.vindex[points], truth[points]
        else:
            key = basic_key(rng, truth.shape)
            found, expected = array[key], truth[key]
        found = np.asarray(found)
        assert (found.dtype, found.shape) == (expected.dtype, expected.shape), number
        with np.errstate(invalid="ignore"):  # signalling NaNs
            assert np.array_equal(found, expected, equal_nan=expected.dtype.kind in "fV"), number


@pytest.mark.parametrize("sample", sorted(SAMPLES.glob("*/expected.json")), ids=lambda path: path.parent.name)
def test_files_of_the_reference_read_bit_for_bit(sample: Path) -> None:
    folder = sample.parent / json.loads(sample.read_text())["store"]
    truth = np.load(sample.parent / "acts.npy")
    for engine in ENGINES:
        store = ShardStore.open(folder, engine=engine)
        group = zarr.open_group(store.as_zarr(), mode="r")
        same(group["activations"][...], truth)
        assert group["layer"][:].tolist() == list(store.layers)
        n_content = store.layout.content_tokens_per_example
        assert group["token"][:].tolist() == list(range(-store.layout.n_special_tokens, n_content))
        assert ("labels" in group) == (store.labels is not None)
        if store.labels is not None:
            same(group["labels"][...], np.asarray(store.labels))


def test_parts_of_a_value_are_slices_of_it(tmp_path: Path) -> None:
    """Of documents, coordinates, padded chunks, and numbers that are converted; in any order and by any kind of request."""
    made = token_store(tmp_path, dtype="bfloat16", n=5, per_shard=2, d_model=3, content=1, arrays={"ids": "int32"})
    plain = plain_store(LAYOUT, tail="cut", labelled=True)
    cases = [
        (ShardStore.open(made.path, engine=engine).as_zarr(chunks=(2, 2, 2, 3)), widened(made.acts))
        for engine in ENGINES
    ]
    cases += [(in_memory(plain, is_far=is_far).as_zarr(chunks=(3, 3, 5, 8)), plain.dense) for is_far in (False, True)]
    for view, dense in cases:
        keys = sorted(key for key in sync(listed(view, "")) if key.endswith("json") or key.count("/c/"))
        n_rows = view_chunk(view)
        for key in keys:
            data = value(view, key)
            assert data is not None
            n = len(data)
            assert (sync(view.getsize(key)), sync(view.exists(key))) == (n, True)
            if key.startswith("activations/c/"):
                first = int(key.split("/")[2]) * n_rows
                assert data == dense[first : first + n_rows].tobytes().ljust(n, b"\0")
            edges = sorted({at for at in (0, 1, 2, 5, n // 3, n // 2, n - 5, n - 1, n, n + 9) if at >= 0})
            for start in edges:
                assert value(view, key, OffsetByteRequest(start)) == data[start:]
                assert value(view, key, SuffixByteRequest(start)) == (data[-start:] if start else b"")
                for end in edges:
                    if start <= end:
                        assert value(view, key, RangeByteRequest(start, end)) == data[start:end], (key, start, end)
            with pytest.raises(ValueError):
                value(view, key, "bytes=0-1")
        assert pickle.loads(pickle.dumps(view)) == view


def view_chunk(view: ZarrView) -> int:
    return read(view).chunks[0]


async def listed(view: ZarrView, prefix: str) -> list[str]:
    return [key async for key in view.list_prefix(prefix)]


async def names_in(view: ZarrView, folder: str) -> list[str]:
    return sorted([name async for name in view.list_dir(folder)])


def test_keys_that_the_view_does_not_have_are_none() -> None:
    view = in_memory(plain_store(LAYOUT, labelled=True)).as_zarr(chunks=(1, 1, 5, 8))
    for key in (
        "", "c", "activations", "activations/c", "activations/c/", "activations/c/0/0/0", "activations/c/0/0/0/1",
        "activations/c/7/0/0/0", "activations/c/0/3/0/0", "activations/c/0/0/0/0/0", "activations/c/-1/0/0/0",
        "activations/c/00/0/0/0", "activations/c/+1/0/0/0", "activations/c/٣/0/0/0", "activations/c/1_0/0/0/0",
        "activations/c/0/0/0/0 ", "layer/c/1", "labels/c/0/1", "labels/c/3/0", ".zgroup", ".zmetadata", "zarr.json/",
        "acts000000.bin", "../metadata.json", "activations/c/" + "9" * 5000 + "/0/0/0", "activations/x/0/0/0/0",
        "activations//0/0/0/0", "activations/zarr.json/0/0/0/0", "layer/d/0", "labels/C/0/0", "nothing/c/0",
    ):  # fmt: skip
        assert value(view, key) is None, key
        assert not sync(view.exists(key)), key
        with pytest.raises(FileNotFoundError):
            sync(view.getsize(key))


def test_listing_is_what_can_be_read() -> None:
    for labelled in (False, True):
        plain = plain_store(Layout(13, (2, 5, 11), 4, True, 8, 4), labelled=labelled)
        view = in_memory(plain).as_zarr(chunks=(1, 1, 5, 8))
        keys = sync(listed(view, ""))
        assert len(keys) == len(set(keys)) == (6 + 4 + 3 if labelled else 4 + 2) + 13 * 3
        assert all(value(view, key) is not None for key in keys)
        assert sorted(sync(all_keys(view))) == sorted(keys)
        for prefix in ("activations/c/1", "activations/", "layer", "x", "/", "zarr.json"):
            assert sorted(sync(listed(view, prefix))) == sorted(key for key in keys if key.startswith(prefix))
        folders = {"", *("/".join(key.split("/")[:n]) for key in keys for n in range(len(key.split("/"))))}
        for folder in folders:
            head = f"{folder}/" if folder else ""
            expected = sorted({key[len(head) :].split("/")[0] for key in keys if key.startswith(head)})
            assert sync(names_in(view, folder)) == sync(names_in(view, f"{folder}/")) == expected, folder
        for nothing in ("nothing", "activations/d", "activations/c/99", "activations/c/0/3", "activations/c/0/0/0/0",
                        "activations/c/0/0/0/0/0", "activations/c/x", "labels/c/9"):  # fmt: skip
            assert sync(names_in(view, nothing)) == [], nothing
        assert sync(view.is_empty("nothing"))
        assert not sync(view.is_empty("activations"))


async def all_keys(view: ZarrView) -> list[str]:
    return [key async for key in view.list()]


# -- documents ---------------------------------------------------------------------------------------------------------


def test_the_group_shows_axes_chunks_attributes_and_fill_values(tmp_path: Path) -> None:
    plain = plain_store(LAYOUT, labelled=True)
    view = in_memory(plain).as_zarr(chunks=(1, 1, 5, 8))
    group = zarr.open_consolidated(view, mode="r")
    assert sorted(group.array_keys()) == ["activations", "content_token", "labels", "layer", "token"]
    array = group["activations"]
    assert array.metadata.dimension_names == ("example", "layer", "token", "d_model")
    assert (array.chunks, array.shards) == ((1, 1, 5, 8), None)
    assert np.isnan(array.fill_value)
    assert group["labels"].metadata.dimension_names == ("example", "content_token")
    attributes, document = dict(group.attrs), json.loads(plain.files["metadata.json"])
    names = {"family": "vit_family", "ckpt": "vit_ckpt", "content_tokens_per_example": "n_patches_per_img", "data": "data",
             "d_model": "d_vit", "n_examples": "n_imgs", "protocol": "protocol", "cls_token": "cls_token"}  # fmt: skip
    assert {name: attributes[name] for name in names} == {name: document[old] for name, old in names.items()}
    assert (attributes["content_hash"], attributes["url"]) == (plain.name, f"memory://{plain.name}")
    one_by_one = zarr.open_group(view, mode="r", use_consolidated=False)
    for name, found in group.arrays():
        assert repr(one_by_one[name].metadata) == repr(found.metadata)  # NaN is not equal to itself
    made = token_store(tmp_path)
    tokens = zarr.open_group(ShardStore.open(made.path).as_zarr(), mode="r")
    assert set(tokens) == {"activations", "layer", "token", "content_token", *SHOWN.values()}
    for name, truth in made.arrays.items():
        assert tokens[SHOWN[name]].dtype == truth.dtype
        assert np.array_equal(tokens[SHOWN[name]][...], truth)
        assert tokens[SHOWN[name]].fill_value == 0 or np.isnan(tokens[SHOWN[name]].fill_value)


def test_attributes_are_strict_json_whatever_the_metadata_has() -> None:
    for changes in (
        {"data": {"x": [float("nan"), 1], "ü": "é"}}, {"data": {"x": "\ud800"}}, {"vit_ckpt": "a\udc80ü"},
        {"vit_family": "\ud800"},
    ):  # fmt: skip
        plain = plain_store(LAYOUT)
        document = json.dumps(json.loads(plain.files["metadata.json"]) | changes).encode()
        store = opened(MemoryTransport(plain.files | {"metadata.json": document}))
        raw = value(store.as_zarr(), "zarr.json")
        assert raw is not None
        found = json.loads(raw.decode(), parse_constant=pytest.fail)["attributes"]
        assert isinstance(found[next(iter(changes)).removeprefix("vit_")], str)


def test_auto_chunks_suit_the_place(tmp_path: Path) -> None:
    plain = plain_store(LAYOUT)
    assert read(in_memory(plain).as_zarr()).chunks == (3, 3, 5, 8)
    assert read(in_memory(plain, is_far=True).as_zarr()).chunks == (1, 1, 5, 8)
    assert read(in_memory(plain).as_zarr(chunks=np.array([3, 3, 5, 8]))).chunks == (3, 3, 5, 8)


def test_views_are_equal_if_place_and_keys_are(tmp_path: Path) -> None:
    plain = plain_store(LAYOUT)
    store = in_memory(plain)
    view = store.as_zarr()
    assert view == store.as_zarr()
    assert hash(view) == hash(store.as_zarr())
    other = opened(MemoryTransport(plain.files, label=f"x/{plain.name}")).as_zarr()
    for different in (store.as_zarr(chunks=(1, 1, 5, 8)), other, "view"):
        assert view != different
    assert plain.name in repr(view)
    assert str(view) == f"memory://{plain.name}"
    kinds = [ShardStore.open(token_store(tmp_path / dtype, arrays={"ids": dtype}).path) for dtype in ("int32", "int64")]
    assert kinds[0].as_zarr() != kinds[1].as_zarr()
    sixteen = ShardStore.open(token_store(tmp_path / "16", dtype="float16").path)
    assert sixteen.as_zarr() != sixteen.as_zarr(dtype="stored")


def test_as_zarr_refuses_what_is_no_chunk_shape_and_other_dtypes(tmp_path: Path) -> None:
    store = in_memory(plain_store(LAYOUT))
    for chunks in ("all", (1, 1, 5), 5, None, (1, 1, 5, 8.0), (0, 1, 5, 8), (2, 3, 5, 8), (1, 1, 1, 8), (1, 2, 5, 8),
                   (12, 3, 5, 8), (3, 1, 5, 8), (1, -1, 5, 8), ("1", 3, 5, 8), (None, 3, 5, 8), (2**70, 3, 5, 8)):  # fmt: skip
        with pytest.raises(ArgumentError) as caught:
            store.as_zarr(chunks=chunks)
        assert caught.value.where == "chunks"
    made = token_store(tmp_path, dtype="float16")
    for dtype in ("bfloat16", "float64", "int8"):
        with pytest.raises(ArgumentError) as caught:
            ShardStore.open(made.path).as_zarr(dtype=dtype)
        assert caught.value.where == "dtype"


def test_the_view_refuses_writing() -> None:
    view = in_memory(plain_store(LAYOUT)).as_zarr()
    assert (view.supports_writes, view.supports_deletes, view.supports_listing, view.read_only) == (
        False,
        False,
        True,
        True,
    )
    buffer = default_buffer_prototype().buffer.from_bytes(b"x")
    for refused in (lambda: view.set("x", buffer), lambda: view.delete("layer/c/0")):
        with pytest.raises(ValueError):
            sync(refused())


# -- damage ------------------------------------------------------------------------------------------------------------


def test_a_damaged_shard_is_an_error_and_never_fill_values(tmp_path: Path) -> None:
    selections = (np.s_[:], np.s_[3:6], np.s_[5], np.s_[5, 2], np.s_[5, 2, 4], np.s_[2:6:3, 2])
    for number, (how, tail, chunks) in enumerate(
        (how, tail, chunks)
        for how in ("missing", "short", "empty")
        for tail in ("padded", "cut")
        for chunks in ((3, 3, 5, 8), (1, 3, 5, 8), (1, 1, 5, 8))
    ):
        plain = plain_store(LAYOUT, tail=tail)
        folder = plain.write(tmp_path / str(number))
        shard = folder / "acts000001.bin"
        shard.unlink() if how == "missing" else os.truncate(shard, 0 if how == "empty" else shard.stat().st_size - 4)
        for engine in ENGINES:
            store = ShardStore.open(folder, engine=engine, damaged_ok=True)
            for transport in (store.transport, far(store.transport)):
                array = read(ShardStore.open(transport, damaged_ok=True).as_zarr(chunks=chunks))
                same(array[:3], plain.dense[:3])
                same(array[6:], plain.dense[6:])
                for selection in selections:
                    with pytest.raises(CorruptShardError) as caught:
                        array[selection]
                    assert "acts000001.bin" in str(caught.value.where)
                if how == "short" and chunks[0] == 1:
                    same(array[3:5], plain.dense[3:5])
    with shard.open("ab") as file:  # of another capacity: its vectors may be those of other examples
        file.truncate(4 * LAYOUT.example_nbytes)
    for engine in ("mmap", "pread"):
        with pytest.raises(CorruptShardError):
            read(ShardStore.open(folder, engine=engine, damaged_ok=True).as_zarr())[5]


def test_a_shard_that_changes_under_the_view_is_an_error_or_the_same(tmp_path: Path) -> None:
    for engine in ENGINES:
        plain = plain_store(LAYOUT)
        folder = plain.write(tmp_path / engine)
        store = ShardStore.open(folder, engine=engine)
        array = read(store.as_zarr(chunks=(1, 1, 5, 8)))
        same(array[...], plain.dense)
        shard = folder / "acts000001.bin"
        whole = shard.read_bytes()
        os.truncate(shard, len(whole) - 1)
        with pytest.raises(CorruptShardError):
            array[5]
        shard.write_bytes(whole)
        shard.unlink()
        with contextlib.suppress(CorruptShardError):  # a file that is open can still be read
            same(array[5], plain.dense[5])
        store.close()
        with pytest.raises(CorruptShardError):
            array[5]


def test_a_token_array_of_a_wrong_size_or_with_no_bools_never_comes_out(tmp_path: Path) -> None:
    for engine in ENGINES:
        for name, change in (("mask", 7), ("labels", -1), ("token_ids", 66), ("token_ids", None)):
            made = token_store(tmp_path / f"{engine}-{name}-{change}")
            path = made.path / f"{name}.bin"
            data = path.read_bytes()
            path.unlink()
            if change is not None:
                path.write_bytes((data * 2)[: len(data) + change * made.arrays[name].itemsize])
            store = ShardStore.open(made.path, engine=engine, damaged_ok=True)
            group = zarr.open_group(pickle.loads(pickle.dumps(store.as_zarr())), mode="r")
            with pytest.raises((CorruptShardError, DocumentError)) as caught:
                group[SHOWN[name]][0]
            assert path.name in str(caught.value.where)
            for other in made.arrays.keys() - {name}:
                assert np.array_equal(group[SHOWN[other]][...], made.arrays[other], equal_nan=other == "score")
        made = token_store(tmp_path / f"{engine}-2")
        data = bytearray((made.path / "mask.bin").read_bytes())
        data[27] = 2
        (made.path / "mask.bin").write_bytes(data)
        view = ShardStore.open(made.path, engine=engine).as_zarr()
        for part in (None, RangeByteRequest(2, 5)):
            with pytest.raises(DocumentError):
                value(view, "mask/c/1/0", part)
        assert value(view, "mask/c/1/0", RangeByteRequest(0, 3)) == bytes(data[24:27])
    plain = plain_store(LAYOUT, labelled=True)
    plain.files["labels.bin"] += b"\0"
    with pytest.raises(DocumentError):
        in_memory(plain, is_far=True).as_zarr()


# -- event loops, threads, processes -----------------------------------------------------------------------------------


def test_the_view_works_inside_a_running_event_loop() -> None:
    for is_far in (False, True):
        plain = plain_store(LAYOUT)
        view = in_memory(plain, is_far=is_far).as_zarr(chunks=(1, 1, 5, 8))

        async def work(view: ZarrView = view, plain: PlainStore = plain) -> None:
            same(read(view)[...], plain.dense)  # zarr's synchronous calls, as in a notebook
            group = await zarr.api.asynchronous.open_group(view, mode="r")
            array = await group.getitem("activations")
            same(await array.getitem(np.s_[2:5, 1]), plain.dense[2:5, 1])

        asyncio.run(work())


def test_reads_of_a_far_place_leave_the_loop_free() -> None:
    view = opened(far(MemoryTransport(plain_store(LAYOUT).files), 0.05)).as_zarr(chunks=(1, 1, 5, 8))

    async def work() -> int:
        reading, ticks = asyncio.ensure_future(view.get("activations/c/0/0/0/0")), 0
        while not reading.done():
            ticks += 1
            await asyncio.sleep(0.001)
        return ticks

    assert asyncio.run(work()) > 3


FORKED = """
import os, sys, warnings
from concurrent.futures import ThreadPoolExecutor
import numpy as np, zarr
from saev_store import ShardStore
warnings.simplefilter("error")
warnings.filterwarnings("ignore", "This process .* is multi-threaded", DeprecationWarning)
folder, path = sys.argv[1:]
truth = np.load(path).tobytes()
views = [ShardStore.open(folder, engine=engine).as_zarr(chunks=(1, 1, 5, 8)) for engine in ("mmap", "pread")]
arrays = [zarr.open_group(view, mode="r")["activations"] for view in views]
def check():
    for array in arrays:
        assert array[...].tobytes() == truth
check()
with ThreadPoolExecutor(4) as pool:
    for future in [pool.submit(check) for _ in range(8)]:
        future.result()
child = os.fork()
if child == 0:
    try:
        check()
        os._exit(0)
    except BaseException as error:
        print(repr(error), file=sys.stderr, flush=True)
        os._exit(3)
assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
check()
"""


def test_threads_and_a_forked_child_read_the_same(tmp_path: Path) -> None:
    plain = plain_store(LAYOUT, tail="cut")
    folder = plain.write(tmp_path)
    np.save(tmp_path / "truth.npy", plain.dense)
    command = [sys.executable, "-c", FORKED, str(folder), str(tmp_path / "truth.npy")]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=HANG_S, check=False)
    assert done.returncode == 0, done.stderr


def test_pickles_of_a_view_are_small_and_read_the_same(tmp_path: Path) -> None:
    plain = plain_store(LAYOUT, tail="cut", labelled=True)
    folder = plain.write(tmp_path)
    for engine in ENGINES:
        view = ShardStore.open(folder, engine=engine).as_zarr()
        array = read(view)
        array[0]  # what has been read is not sent along
        assert len(pickle.dumps(view)) < 10_000
        same(pickle.loads(pickle.dumps(array))[...], plain.dense)


def test_a_bucket_reads_like_a_folder(s3_bucket: Bucket) -> None:
    plain = plain_store(LAYOUT, tail="cut", labelled=True)
    transport = open_transport(f"{s3_bucket.url}/{plain.name}", s3_bucket.options)
    for name, data in plain.files.items():
        transport.put(name, data)
    for engine in ("fsspec", "obstore"):
        if engine == "obstore":
            pytest.importorskip("obstore")
        store = ShardStore.open(transport.url, s3_bucket.options, engine=engine)
        group = zarr.open_group(store.as_zarr(chunks=(1, 1, 5, 8)), mode="r")

        async def in_a_loop(group: zarr.Group = group) -> np.ndarray:
            return np.asarray(group["activations"][2:5, 1])

        same(group["activations"][...], plain.dense)
        same(group["labels"][...], plain.labels)
        same(asyncio.run(in_a_loop()), plain.dense[2:5, 1])
        transport.put("acts000001.bin", plain.files["acts000001.bin"][:-4])
        again = ShardStore.open(transport.url, s3_bucket.options, engine=engine).as_zarr(chunks=(1, 1, 5, 8))
        with pytest.raises(CorruptShardError):
            read(again)[5]
        transport.delete("acts000001.bin")
        gone = ShardStore.open(transport.url, s3_bucket.options, engine=engine).as_zarr(chunks=(1, 1, 5, 8))
        with pytest.raises(CorruptShardError):
            read(gone)[5, 2]
        same(read(gone)[:3], plain.dense[:3])
        transport.put("acts000001.bin", plain.files["acts000001.bin"])


# -- cost --------------------------------------------------------------------------------------------------------------


def test_an_access_takes_one_request_a_chunk_and_no_byte_more() -> None:
    layout = Layout(40, tuple(range(6)), 16, True, 32, 10)
    plane = 17 * 32 * 4
    patterns = [(np.s_[:, 3], (40, 8)), (np.s_[17], (6, 1)), (np.s_[17, 3, 5], (1, 1)), (np.s_[:], (240, 8))]
    for chunks, place, nbytes in (((1, 1, 17, 32), 0, plane), ((5, 6, 17, 32), 1, 5 * 6 * plane)):
        transport = CountingTransport(LatencyTransport(MemoryTransport(plain_store(layout).files), 0.0, 1e12))
        array = read(opened(transport).as_zarr(chunks=chunks))
        for key, n_requests in patterns:
            transport.reset()
            array[key]
            found = transport.counters
            assert set(found.operations) == {"get_ranges"}
            assert (found.requests, found.bytes_read) == (n_requests[place], n_requests[place] * nbytes)


def test_reading_mapped_memory_takes_the_result_and_one_chunk(tmp_path: Path) -> None:
    layout = Layout(550, tuple(range(3)), 15, True, 320, 100)  # 33 MB, six shards, the last one half full
    for tail in ("padded", "cut"):
        plain = plain_store(layout, tail=tail)
        array = read(ShardStore.open(plain.write(tmp_path / tail)).as_zarr())
        array[:1]
        for selection in (np.s_[:], np.s_[:, 1], np.s_[100:400]):
            nbytes = plain.dense[selection].nbytes
            tracemalloc.start()
            try:
                found = array[selection]
                _, peak = tracemalloc.get_traced_memory()
            finally:
                tracemalloc.stop()
            same(found, plain.dense[selection])
            assert nbytes <= peak <= 1.05 * nbytes + (2 << 20)


def test_seven_million_chunks_open_without_a_list() -> None:
    layout = Layout(1_200_000, tuple(range(6)), 256, True, 1024, 2_400_000 // 257 // 6)
    store = opened(far(MemoryTransport(plain_documents(layout))))
    zarr.open_group(store.as_zarr(), mode="r")  # imports, and zarr's own caches
    tracemalloc.start()
    try:
        view = store.as_zarr(chunks=(1, 1, 257, 1024))
        assert read(view).nchunks == 7_200_000
        assert sync(names_in(view, "activations/c/1199999")) == [str(n) for n in range(6)]
        raw = value(view, "zarr.json")
        _, peak = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert peak < 5 << 20
    assert raw is not None
    assert len(raw) < 10_000


def test_the_stored_face_of_a_mapped_store_copies_nothing(tmp_path: Path) -> None:
    made: TokenStore = token_store(tmp_path, dtype="bfloat16")
    store = ShardStore.open(made.path, engine="mmap")
    view = store.as_zarr(chunks=(1, 2, 7, 8), dtype="stored")
    for example in (0, 5, 10):
        chunk = sync(view.get(f"activations/c/{example}/0/0/0"))
        assert chunk is not None
        mapped = store.as_numpy(np.s_[example], copy=False, dtype="stored")
        assert np.shares_memory(chunk.as_numpy_array(), mapped)
