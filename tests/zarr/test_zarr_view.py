"""What zarr reads through the view against dense NumPy, whatever is damaged, asked or listed."""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import json
import os
import warnings
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import pytest
import zarr
import zarr.api.asynchronous
from api import MemoryTransport
from dense_stores import PlainStore, plain_store
from hypothesis import given
from hypothesis import strategies as st
from strategies import layouts, legal_shapes
from transports import LatencyTransport
from zarr.abc.store import OffsetByteRequest, RangeByteRequest, Store, SuffixByteRequest
from zarr.core.sync import sync

from saev_store import SaevStoreWarning, ShardStore
from saev_store.core.layout import Layout
from saev_store.errors import ArgumentError, CorruptShardError, DeadlineError, DocumentError
from saev_store.transport import ReadCost, Transport
from saev_store.zarr import ZarrView

SAMPLES = Path(__file__).parents[1] / "data" / "saev"
VALID = sorted(path.parent for path in SAMPLES.glob("*/expected.json"))
LAYOUT = Layout(7, (2, 5, 11), 4, True, 8, 3)


def far(transport: Transport) -> Transport:
    """The same bytes behind a price, so that the code for far-away places runs, merging only small gaps."""
    return LatencyTransport(transport, 0.0, 1e6)


def opened(where: Transport | Path, **options: object) -> ShardStore:
    """A store held in memory has no name to compare its hash with."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", SaevStoreWarning)
        return ShardStore.open(where, **options)


def read(view: ZarrView, name: str = "activations") -> zarr.Array:
    array = zarr.open_group(view, mode="r", use_consolidated=True)[name]
    assert isinstance(array, zarr.Array)
    return array


def same_bits(found: object, expected: np.ndarray) -> None:
    array = np.asarray(found)
    assert array.dtype == expected.dtype
    assert array.shape == expected.shape
    assert array.tobytes() == expected.tobytes()


# -- values ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("engine", ["mmap", "pread", "fsspec", "far"])
@pytest.mark.parametrize("sample", VALID, ids=lambda path: path.name)
def test_peer_written_samples_bit_for_bit(sample: Path, engine: str):
    expected = json.loads((sample / "expected.json").read_text())
    store = ShardStore.open(sample / expected["store"], engine="mmap" if engine == "far" else engine)
    if engine == "far":
        store = ShardStore.open(far(store.transport))
    truth = np.load(sample / "acts.npy")
    if True:
        group = zarr.open_group(store.as_zarr(), mode="r")
        same_bits(group["activations"][...], truth)
        for example, layer in np.ndindex(truth.shape[:2]):
            same_bits(group["activations"][example, layer, 1:], truth[example, layer, 1:])
        assert group["layer"][:].tolist() == list(store.layers)
        first = -1 if store.layout.cls_token else 0
        assert group["token"][:].tolist() == list(range(first, store.layout.content_tokens_per_example))
        assert ("labels" in group) == (store.labels is not None)
        if store.labels is not None:
            np.testing.assert_array_equal(group["labels"][...], store.labels)


@st.composite
def cases(draw: st.DrawFn) -> tuple[PlainStore, ZarrView, np.random.Generator]:
    layout = draw(layouts())
    plain = plain_store(
        layout,
        seed=draw(st.integers(0, 9)),
        tail=draw(st.sampled_from(["padded", "cut"])),
        empty_trailer=draw(st.booleans()),
        labelled=draw(st.booleans()),
    )
    transport: Transport = MemoryTransport(plain.files)
    if draw(st.booleans()):
        transport = far(transport)
    chunks = draw(st.one_of(st.just("auto"), st.sampled_from(legal_shapes(layout))))
    view = opened(transport).as_zarr(chunks=chunks)
    return plain, view, np.random.default_rng(draw(st.integers(0, 99)))


@given(case=cases())
def test_any_layout_chunking_and_selection_equals_numpy(case: tuple[PlainStore, ZarrView, np.random.Generator]):
    plain, view, rng = case
    array = read(view)
    assert array.shape == plain.layout.shape
    same_bits(array[...], plain.dense)
    for _ in range(4):
        bounds = [sorted(rng.integers(0, n + 1, 2).tolist()) for n in array.shape]
        basic = tuple(
            int(rng.integers(n)) if rng.random() < 0.3 else slice(low, high)
            for n, (low, high) in zip(array.shape, bounds, strict=True)
        )
        same_bits(array[basic], plain.dense[basic])
        lists = [np.sort(rng.choice(n, rng.integers(1, n + 1), replace=False)) for n in array.shape]
        same_bits(array.oindex[tuple(lists)], plain.dense[np.ix_(*lists)])
        points = tuple(rng.integers(0, n, 5) for n in array.shape)
        same_bits(array.vindex[points], plain.dense[points])
    if plain.labels is not None:
        same_bits(read(view, "labels")[...], plain.labels)


def test_ranges_of_a_value_are_slices_of_it():
    plain = plain_store(LAYOUT, tail="cut", labelled=True)
    for transport in (MemoryTransport(plain.files), far(MemoryTransport(plain.files))):
        view = opened(transport).as_zarr(chunks=(3, 3, 5, 8))
        keys = list(view.keys.below(""))
        assert len(keys) == 6 + 3 + 3 + 3
        for key in keys:
            whole = sync(view.get(key))
            assert whole is not None
            data = whole.to_bytes()
            assert sync(view.getsize(key)) == len(data)
            assert sync(view.exists(key))
            n = len(data)
            for start, end in itertools.product([0, 1, n // 3, n - 5, n], [0, 2, n // 2, n - 1, n, n + 9]):
                if start >= 0:  # a range that ends before it begins is empty
                    part = sync(view.get(key, None, RangeByteRequest(start, end)))
                    assert part is not None
                    assert part.to_bytes() == data[start:end]
            for count in (0, 1, n // 2, n, n + 1):
                offset, suffix = (
                    sync(view.get(key, None, kind(count))) for kind in (OffsetByteRequest, SuffixByteRequest)
                )
                assert offset is not None
                assert suffix is not None
                assert offset.to_bytes() == data[count:]
                assert suffix.to_bytes() == (data[-count:] if count else b"")


def test_missing_keys_are_none_and_never_read():
    view = opened(MemoryTransport(plain_store(LAYOUT).files)).as_zarr(chunks=(1, 1, 5, 8))
    for key in (
        "", "c", "activations", "activations/c", "activations/c/0/0/0", "activations/c/0/0/0/1", "activations/c/7/0/0/0",
        "activations/c/0/0/0/0/0", "activations/c/-1/0/0/0", "activations/c/00/0/0/0", "activations/c/+1/0/0/0",
        "activations/c/٣/0/0/0", "activations/c/1_0/0/0/0", "activations/c/0/0/0/0 ", "layer/c/1", "labels/c/0/0",
        ".zgroup", ".zmetadata", "zarr.json/", "acts000000.bin", "../metadata.json", "activations/c/" + "9" * 5000 + "/0/0/0",
    ):  # fmt: skip
        assert view.get_sync(key) is None, key
        assert not sync(view.exists(key)), key


# -- documents ---------------------------------------------------------------------------------------------------------


def test_the_group_that_consumers_see():
    plain = plain_store(LAYOUT, labelled=True)
    view = opened(MemoryTransport(plain.files)).as_zarr(chunks=(1, 1, 5, 8))
    group = zarr.open_consolidated(view, mode="r")
    assert sorted(group.array_keys()) == ["activations", "content_token", "labels", "layer", "token"]
    array = group["activations"]
    assert array.metadata.dimension_names == ("example", "layer", "token", "d_model")
    assert (array.chunks, array.shards) == ((1, 1, 5, 8), None)
    assert np.isnan(array.fill_value)
    assert group["labels"].metadata.dimension_names == ("example", "content_token")
    assert group["content_token"][:].tolist() == [0, 1, 2, 3]
    attributes = dict(group.attrs)
    document = json.loads(plain.files["metadata.json"])
    assert attributes["family"] == document["vit_family"]
    assert attributes["content_tokens_per_example"] == document["n_patches_per_img"]
    assert attributes["max_tokens_per_shard"] == document["max_patches_per_shard"]
    assert attributes["protocol"] == document["protocol"]
    assert attributes["data"] == document["data"]
    assert attributes["content_hash"] == plain.name
    # Without consolidated metadata each array's own document says the same.
    one_by_one = zarr.open_group(view, mode="r", use_consolidated=False)
    for name, found in group.arrays():
        assert one_by_one[name].metadata.to_dict().keys() == found.metadata.to_dict().keys()
        assert repr(one_by_one[name].metadata) == repr(found.metadata)  # NaN is not equal to itself


@pytest.mark.parametrize(
    ("changes", "shown"),
    [
        ({"data": {"x": [float("nan"), 1], "ü": "é"}}, "{'x': [nan, 1], 'ü': 'é'}"),
        ({"data": {"x": "\ud800"}}, r"{'x': '\ud800'}"),
        ({"vit_ckpt": "a\udc80ü"}, r"a\udc80ü"),
        ({"vit_family": "\ud800"}, r"\ud800"),
    ],
)
def test_documents_are_strict_json_whatever_the_metadata_holds(changes, shown):
    plain = plain_store(LAYOUT)
    document = json.loads(plain.files["metadata.json"]) | changes
    store = opened(MemoryTransport(plain.files | {"metadata.json": json.dumps(document).encode()}))
    raw = store.as_zarr().get_sync("zarr.json")
    assert raw is not None
    found = json.loads(raw.to_bytes().decode(), parse_constant=pytest.fail)
    assert found["attributes"][next(iter(changes)).removeprefix("vit_")] == shown
    json.dumps(dict(store.as_xarray().attrs), ensure_ascii=False).encode()


@pytest.mark.parametrize("labelled", [False, True])
def test_listing_is_what_can_be_read(labelled: bool):
    layout = Layout(23, (2, 5, 11), 4, True, 8, 4)
    plain = plain_store(layout, labelled=labelled)
    view = opened(MemoryTransport(plain.files)).as_zarr(chunks=(1, 1, 5, 8))

    async def all_of(prefix: str) -> list[str]:
        return sorted([key async for key in view.list_prefix(prefix)])

    async def names_in(folder: str) -> list[str]:
        return sorted([name async for name in view.list_dir(folder)])

    keys = asyncio.run(all_of(""))
    assert keys == sorted(set(keys)) == sorted(sync(all_of("")))
    assert all(view.get_sync(key) is not None for key in keys)
    n_documents = 6 if labelled else 4
    n_labels = (-(-23 // layout.examples_per_shard) + 1) if labelled else 0
    assert len(keys) == n_documents + 2 + n_labels + 23 * 3
    for prefix in {key[:length] for key in keys for length in range(len(key) + 1)} | {
        "x",
        "activations/c/01",
        "/",
        "layer/d",
    }:
        assert sync(all_of(prefix)) == [key for key in keys if key.startswith(prefix)], prefix
    folders = {"", *("/".join(key.split("/")[:n]) for key in keys for n in range(len(key.split("/"))))}
    # The first folder behind the last one, on each axis of each array.
    behind = {
        f"{array}/c/{'0/' * axis}{count}"
        for array, counts in view.keys.counts.items()
        for axis, count in enumerate(counts)
    }
    assert "activations/c/0/0/1" in behind
    assert not behind & (folders | set(keys))
    for folder in behind:
        assert sync(all_of(f"{folder}/")) == sync(names_in(folder)) == [], folder
    for folder in folders:
        below = [
            key[len(folder) + 1 :] if folder else key for key in keys if not folder or key.startswith(f"{folder}/")
        ]
        expected = sorted({key.split("/")[0] for key in below})
        assert sync(names_in(folder)) == expected
        assert sync(names_in(f"{folder}/")) == expected
    assert (
        sync(names_in("activations/c/99")) == sync(names_in("nothing")) == sync(names_in("activations/c/0/0/0/0")) == []
    )
    assert not sync(view.is_empty("activations"))
    assert sync(view.is_empty("nothing"))


# -- arguments ---------------------------------------------------------------------------------------------------------


def test_illegal_chunks_propose_legal_ones():
    store = opened(MemoryTransport(plain_store(LAYOUT).files))
    with pytest.raises(
        ArgumentError, match=r"2 examples at a time do not divide a shard of 3.*\(3, 3, 5, 8\) or \(1, 3, 5, 8\)"
    ):
        store.as_zarr(chunks=(2, 3, 5, 8))
    with pytest.raises(ArgumentError, match=r"nearest.*\(1, 1, 5, 8\)"):
        store.as_zarr(chunks=(1, 1, 1, 8))
    for nonsense in ("all", (1, 1, 5), 5, None, (1, 1, 5, 8.0), (0, 1, 5, 8)):
        with pytest.raises(ArgumentError, match="chunk"):
            store.as_zarr(chunks=nonsense)
    assert read(store.as_zarr(chunks=np.array([3, 3, 5, 8]))).chunks == (3, 3, 5, 8)


def test_what_auto_takes():
    plain = plain_store(LAYOUT)
    near, distant = opened(MemoryTransport(plain.files)), opened(far(MemoryTransport(plain.files)))
    assert (read(near.as_zarr()).chunks, read(near.as_zarr()).shards) == ((3, 3, 5, 8), None)
    array = read(distant.as_zarr())
    assert array.chunks == (1, 1, 5, 8)


# -- damage ------------------------------------------------------------------------------------------------------------


class Broken(MemoryTransport):
    """Memory that does not say its sizes when it is opened, as if it were far away."""

    is_local = False


def break_shard(files: dict[str, bytes], how: str) -> None:
    if how == "missing":
        del files["acts000001.bin"]
    else:
        files["acts000001.bin"] = files["acts000001.bin"][: 0 if how == "empty" else -4]


@pytest.mark.parametrize("how", ["missing", "short", "empty"])
@pytest.mark.parametrize("tail", ["padded", "cut"])
@pytest.mark.parametrize("is_far", [False, True])
@pytest.mark.parametrize("chunks", [(3, 3, 5, 8), (1, 3, 5, 8), (1, 1, 5, 8)])
def test_a_damaged_shard_raises_and_never_reads_as_fill_values(
    how: str, tail: str, is_far: bool, chunks: tuple[int, ...]
):
    plain = plain_store(LAYOUT, tail=tail)
    files = dict(plain.files)
    break_shard(files, how)
    transport: Transport = Broken(files)
    array = read(opened(far(transport) if is_far else transport).as_zarr(chunks=chunks))
    same_bits(array[:3], plain.dense[:3])
    same_bits(array[6:], plain.dense[6:])
    for selection in (np.s_[:], np.s_[3:6], np.s_[5], np.s_[5, 2], np.s_[5, 2, 4], np.s_[2:6:3, 2]):
        with pytest.raises(CorruptShardError, match=r"acts000001\.bin"):
            array[selection]


@pytest.mark.parametrize("how", ["missing", "short"])
def test_what_is_left_of_a_damaged_store_can_be_read(how: str):
    plain = plain_store(LAYOUT)
    files = dict(plain.files)
    break_shard(files, how)
    store = opened(MemoryTransport(files), damaged_ok=True)
    array = read(store.as_zarr(chunks=(1, 1, 5, 8)))
    same_bits(array[:3], plain.dense[:3])
    with pytest.raises(CorruptShardError, match=r"acts000001\.bin.*repair"):
        array[5]
    if how == "short":
        same_bits(array[3:5, 1], plain.dense[3:5, 1])


@pytest.mark.parametrize("engine", ["mmap", "pread", "fsspec"])
def test_stores_that_change_under_the_view(engine: str, tmp_path: Path):
    plain = plain_store(LAYOUT)
    folder = plain.write(tmp_path)
    store = ShardStore.open(folder, engine=engine)
    array = read(store.as_zarr(chunks=(1, 1, 5, 8)))
    same_bits(array[...], plain.dense)
    shard = folder / "acts000001.bin"
    whole = shard.read_bytes()
    os.truncate(shard, len(whole) - 1)
    with pytest.raises(CorruptShardError):
        array[5]
    shard.write_bytes(whole)
    same_bits(array[5], plain.dense[5])
    shard.unlink()
    # A file that is open stays readable after its name is gone; the one thing that may not happen is other values.
    with contextlib.suppress(CorruptShardError):
        same_bits(array[5], plain.dense[5])
    store.close()
    with pytest.raises(CorruptShardError, match=r"acts000001\.bin.*missing"):
        array[5]


class Dead(MemoryTransport):
    """A link that dies after the store was opened."""

    is_local = False
    cost = ReadCost(0, 1 << 20)

    def get_ranges(self, path: str, *, starts: Sequence[int], ends: Sequence[int]) -> list[memoryview]:
        raise DeadlineError("no answer for 60 s", where=path, transient=True)


def test_a_dead_link_is_the_transports_own_error():
    array = read(opened(Dead(plain_store(LAYOUT).files)).as_zarr(chunks=(1, 1, 5, 8)))
    for selection in (np.s_[:], np.s_[5], np.s_[5, 2, 4]):
        with pytest.raises(DeadlineError, match="no answer"):
            array[selection]


def test_labels_of_the_wrong_size_far_away_are_an_error():
    files = plain_store(LAYOUT, labelled=True).files
    files["labels.bin"] += b"\0"
    with pytest.raises(DocumentError, match=r"labels\.bin"):
        opened(Broken(files)).as_zarr()


@pytest.mark.parametrize("engine", ["mmap", "pread", "fsspec"])
@pytest.mark.parametrize("change", [1, -1])
def test_labels_of_another_size_are_an_error_on_every_way_to_read(engine: str, change: int, tmp_path: Path):
    """Awaited too, and in every part: a longer file has the bytes that are asked for, of another store perhaps."""
    plain = plain_store(LAYOUT, labelled=True)
    folder = plain.write(tmp_path)
    view = ShardStore.open(folder, engine=engine).as_zarr()
    data = plain.files["labels.bin"]
    transport = view._transport
    if isinstance(transport, MemoryTransport):
        transport.put("labels.bin", data + b"\0" if change > 0 else data[:change])
    else:
        (folder / "labels.bin").write_bytes(data + b"\0" if change > 0 else data[:change])
    for part in (None, RangeByteRequest(0, 4)):
        for get in (
            lambda part: sync(view.get("labels/c/0/0", None, part)),
            lambda part: view.get_sync("labels/c/0/0", byte_range=part),
        ):
            with pytest.raises(CorruptShardError, match=r"labels\.bin") as caught:
                get(part)
            assert 'store.repair().restore_array("labels", ...)' in str(caught.value.remedy)


def test_labels_that_vanish_are_an_error():
    transport = MemoryTransport(plain_store(LAYOUT, labelled=True).files)
    array = read(opened(transport).as_zarr(), "labels")
    transport.delete("labels.bin")
    with pytest.raises(CorruptShardError, match=r"labels\.bin"):
        array[:]


# -- identity and event loops ------------------------------------------------------------------------------------------


def test_equality_and_what_is_shown():
    plain = plain_store(LAYOUT)
    transport = MemoryTransport(plain.files, label=plain.name)
    store = ShardStore.open(transport)
    view = store.as_zarr()
    assert view == store.as_zarr()
    assert hash(view) == hash(store.as_zarr())
    assert view != store.as_zarr(chunks=(1, 1, 5, 8))
    assert view != ShardStore.open(MemoryTransport(plain.files, label=f"x/{plain.name}")).as_zarr()
    assert view != "view"
    assert repr(view) == f"<ZarrView of memory://{plain.name} in 3 chunks of (3, 3, 5, 8)>"
    assert str(view) == f"memory://{plain.name}"


@pytest.mark.parametrize("is_far", [False, True])
def test_inside_a_running_event_loop(is_far: bool):
    plain = plain_store(LAYOUT)
    transport: Transport = MemoryTransport(plain.files)
    view = opened(far(transport) if is_far else transport).as_zarr(chunks=(1, 1, 5, 8))

    async def work() -> None:
        same_bits(read(view)[...], plain.dense)  # zarr's synchronous calls, as in a notebook
        group = await zarr.api.asynchronous.open_group(view, mode="r")
        array = await group.getitem("activations")
        same_bits(await array.getitem(np.s_[2:5, 1]), plain.dense[2:5, 1])

    asyncio.run(work())


def test_the_loop_is_free_while_a_far_away_place_answers():
    plain = plain_store(LAYOUT)
    slow = LatencyTransport(MemoryTransport(plain.files), 0.05, 1e9)
    view = opened(slow).as_zarr(chunks=(1, 1, 5, 8))
    key = "activations/c/0/0/0/0"

    async def work() -> int:
        reading = asyncio.ensure_future(view.get(key))
        ticks = 0
        while not reading.done():
            ticks += 1
            await asyncio.sleep(0.001)
        return ticks

    assert asyncio.run(work()) > 3


@pytest.mark.skipif(not hasattr(Store, "get_ranges"), reason="zarr 3.3 has it")
@pytest.mark.parametrize("is_far", [False, True])
def test_zarrs_synchronous_pipeline_is_for_mapped_memory(is_far: bool):
    plain = plain_store(LAYOUT, tail="cut")
    transport: Transport = MemoryTransport(plain.files)
    store = opened(far(transport) if is_far else transport)
    from zarr.abc.store import _store_supports_sync_io

    with zarr.config.set({"codec_pipeline.path": "zarr.core.codec_pipeline.FusedCodecPipeline"}):
        for chunks in [(3, 3, 5, 8), (1, 1, 5, 8)]:
            view = store.as_zarr(chunks=chunks)
            assert _store_supports_sync_io(view) == (not is_far)
            same_bits(read(view)[...], plain.dense)
            same_bits(read(view)[1:5, 2, ::2], plain.dense[1:5, 2, ::2])


@pytest.mark.parametrize("key", ["zarr.json", "activations/c/0/0/0/0", "layer/c/0"])
def test_a_suffix_is_never_longer_than_the_value(key: str):
    view = ShardStore.open(MemoryTransport(plain_store(LAYOUT).files, label=plain_store(LAYOUT).name)).as_zarr()
    whole = view.get_sync(key).to_bytes()
    for n in (1, len(whole) - 1, len(whole), len(whole) + 1, 2 * len(whole) - 1, 10**9):
        assert view.get_sync(key, byte_range=SuffixByteRequest(n)).to_bytes() == whole[-n:]
