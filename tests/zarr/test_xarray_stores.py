"""What xarray's back end accepts, the coordinate `example`, roots as trees, and several stores as one dataset."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import numpy as np
import pytest
from api import MemoryTransport
from dense_stores import PlainStore, plain_store
from transports import CountingTransport, LatencyTransport

from saev_store import SaevStoreWarning, ShardStore
from saev_store.core.layout import Layout
from saev_store.errors import (
    ArgumentError,
    CorruptShardError,
    IncompleteStoreError,
    NotFoundError,
    SaevStoreError,
    UnsafeContentError,
)

xr = pytest.importorskip("xarray")
pytest.importorskip("dask")
pd = pytest.importorskip("pandas")
from saev_store.xarray import SaevBackend, concat

LAYERS = (2, 5, 11)


def layout_of(n_examples: int, *, layers: tuple[int, ...] = LAYERS, d_model: int = 8, cls: bool = True) -> Layout:
    return Layout(n_examples, layers, 4, cls, d_model, 3)


@pytest.fixture
def stores() -> list[PlainStore]:
    return [plain_store(layout_of(n), seed=n, labelled=True, ckpt="random") for n in (7, 6, 2)]


@pytest.fixture
def root(stores: list[PlainStore], tmp_path: Path) -> Path:
    for store in stores:
        store.write(tmp_path)
    return tmp_path


# -- options -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "options",
    [
        {"mask_and_scale": True},
        {"mask_and_scale": False, "decode_times": False, "decode_timedelta": True, "use_cftime": False},
        {"decode_coords": "all", "concat_characters": True},
        {"decode_cf": False},
    ],
    ids=str,
)
def test_decoding_options_have_no_effect(options: dict[str, object], root: Path, stores: list[PlainStore]):
    where = root / stores[0].name
    with xr.open_dataset(where, engine=SaevBackend, **options) as dataset:
        assert dataset.identical(ShardStore.open(where).as_xarray())
        assert dataset.activations.values.tobytes() == stores[0].dense.tobytes()
        assert dataset.labels.dtype == np.uint8
    with xr.open_datatree(root, engine=SaevBackend, **options) as tree:
        assert len(tree.children) == 3


def test_unknown_options_are_refused(root: Path, stores: list[PlainStore]):
    for open_, where in ((xr.open_dataset, root / stores[0].name), (xr.open_datatree, root)):
        with pytest.raises(TypeError, match="no option dammaged_ok"):
            open_(where, engine=SaevBackend, dammaged_ok=True)


@pytest.mark.parametrize(
    "dropped",
    ["labels", ["labels", "content_token", "example"], ["no such variable"], np.array(["labels", "token"])],
    ids=str,
)
def test_variables_are_dropped(dropped: object, root: Path, stores: list[PlainStore]):
    where = root / stores[0].name
    left_out = {dropped} if isinstance(dropped, str) else set(dropped)
    with xr.open_dataset(where, engine=SaevBackend, drop_variables=dropped) as dataset:
        everything = {"activations", "labels", "example", "layer", "token", "content_token"}
        assert set(dataset.variables) == everything - left_out
    with xr.open_datatree(root, engine=SaevBackend, drop_variables=dropped) as tree:
        assert not left_out & set(tree[stores[0].name].variables)
    store = ShardStore.open(where)
    for open_ in (xr.open_dataset, xr.open_datatree):
        assert set(open_(store, engine=SaevBackend, drop_variables=dropped).variables) == everything - left_out
        with pytest.raises(ArgumentError, match="drop_variables"):
            open_(store, engine=SaevBackend, drop_variables=5)


def test_a_group_may_be_a_path_and_nothing_else_but_a_name(root: Path, stores: list[PlainStore]):
    name = stores[0].name
    with xr.open_dataset(root, engine=SaevBackend, group=Path(name)) as dataset:
        assert "activations" in dataset
    with pytest.raises(ArgumentError, match="group"):
        xr.open_dataset(root, engine=SaevBackend, group=5)


def test_a_group_is_a_store_below_a_root(root: Path, stores: list[PlainStore]):
    for group in (stores[1].name, f"/{stores[1].name}/"):
        with xr.open_dataset(root, engine=SaevBackend, group=group) as dataset:
            assert dataset.activations.values.tobytes() == stores[1].dense.tobytes()
    for group in ("/", "", None):
        with xr.open_dataset(root / stores[1].name, engine=SaevBackend, group=group) as dataset:
            assert dataset.sizes["example"] == 6
    opened = ShardStore.open(root / stores[1].name)
    with pytest.raises(ArgumentError, match="no group"):
        xr.open_dataset(opened, engine=SaevBackend, group=stores[1].name)
    with pytest.raises(NotFoundError):
        xr.open_dataset(root, engine=SaevBackend, group="nothing")
    with pytest.raises(UnsafeContentError):
        xr.open_dataset(root / stores[1].name, engine=SaevBackend, group=f"../{stores[0].name}")


def test_options_are_those_of_the_file_system_of_a_root(root: Path, stores: list[PlainStore]):
    """A local one has none, and says so."""
    for options in ({"group": stores[1].name}, {}):
        where = root if options else root / stores[1].name
        with pytest.raises(ArgumentError, match="local files take no options"):
            xr.open_dataset(where, engine=SaevBackend, storage_options={"anon": True}, **options)
    with pytest.raises(ArgumentError, match="local files take no options"):
        xr.open_datatree(root, engine=SaevBackend, storage_options={"anon": True})


# -- example -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("chunks", [None, {}], ids=["lazy", "tasks"])
def test_examples_have_a_coordinate_of_constant_size(chunks: object, root: Path, stores: list[PlainStore]):
    opened = ShardStore.open(root / stores[0].name)
    for dataset in (
        opened.as_xarray(chunks=chunks),
        xr.open_dataset(root / stores[0].name, engine=SaevBackend, chunks=chunks),
    ):
        assert dataset.example.values.tolist() == list(range(7))
        assert isinstance(dataset.indexes["example"], pd.RangeIndex)
        later = dataset.isel(example=slice(3, None))
        assert isinstance(later.indexes["example"], pd.RangeIndex)
        assert later.activations.sel(example=5).values.tobytes() == stores[0].dense[5].tobytes()
        with pytest.raises(KeyError):
            later.sel(example=2)


def test_the_coordinate_takes_no_memory_for_many_examples():
    n_examples = 10**9
    layout = Layout(n_examples, (0,), 1, False, 1, n_examples)
    from saev_store import new_metadata
    from saev_store.documents import shards_bytes

    metadata = new_metadata(
        family="clip", ckpt="x", layers=(0,), content_tokens_per_example=1, cls_token=False, d_model=1,
        n_examples=n_examples, max_tokens_per_shard=n_examples,
    )  # fmt: skip
    files = {"metadata.json": metadata.raw, "shards.json": shards_bytes(layout, metadata.count_key)}
    store = ShardStore.open(LatencyTransport(MemoryTransport(files, label=metadata.hash), 0.0, 1e12))
    dataset = store.as_xarray()
    assert sys.getsizeof(dataset.indexes["example"]) < 1000
    assert dataset.indexes["example"][-1] == n_examples - 1
    assert dataset.isel(example=slice(-3, None)).sizes["example"] == 3


# -- trees -------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("chunks", [None, {}], ids=["lazy", "tasks"])
def test_a_root_is_a_tree(chunks: object, root: Path, stores: list[PlainStore]):
    with xr.open_datatree(root, engine=SaevBackend, chunks=chunks) as tree:
        assert sorted(tree.children) == sorted(store.name for store in stores)
        assert tree.encoding["source"] == str(root)
        for store in stores:
            node = tree[store.name]
            assert (node.activations.chunks is None) == (chunks is None)
            assert node.activations.values.tobytes() == store.dense.tobytes()
            assert node.attrs["content_hash"] == ShardStore.open(root / store.name).metadata.hash
        first = tree.isel(example=0)
        assert first[stores[0].name].activations.values.tobytes() == stores[0].dense[0].tobytes()


def test_a_tree_opens_without_reading_activations(
    root: Path, stores: list[PlainStore], monkeypatch: pytest.MonkeyPatch
):
    transport = CountingTransport(LatencyTransport(memory_root(stores), 0.0, 1e12))
    monkeypatch.setattr("saev_store.xarray._backend.open_transport", lambda *_: transport)
    with xr.open_datatree("memory://root", engine=SaevBackend) as tree:
        assert len(tree.children) == 3
    assert set(transport.counters.operations) <= {"read", "size", "list"}


def memory_root(stores: list[PlainStore]) -> MemoryTransport:
    return MemoryTransport({f"{store.name}/{path}": data for store in stores for path, data in store.files.items()})


def test_one_store_is_the_root_of_its_tree(root: Path, stores: list[PlainStore]):
    where = root / stores[0].name
    for store in (where, ShardStore.open(where)):
        with xr.open_datatree(store, engine=SaevBackend) as tree:
            assert not tree.children
            assert tree.activations.values.tobytes() == stores[0].dense.tobytes()


def test_stores_that_do_not_open_are_left_out_of_a_tree_and_named(root: Path, stores: list[PlainStore]):
    short, broken, whole = (store.name for store in stores)
    with (root / short / "acts000002.bin").open("r+b") as file:
        file.truncate(10)
    (root / broken / "metadata.json").write_text("{")
    (root / "unfinished" / ".saev_store").mkdir(parents=True)
    (root / "unfinished" / ".saev_store" / "claim.json").write_text("{}")
    (root / "notes").mkdir()
    with pytest.warns(SaevStoreWarning, match="left out") as caught:
        tree = xr.open_datatree(root, engine=SaevBackend)
    assert list(tree.children) == [whole]
    said = str(caught[0].message)
    for expected in (f"{short} (damaged)", f"{broken} (broken)", "unfinished (unfinished)"):
        assert expected in said
    with pytest.warns(SaevStoreWarning, match="left out"):
        tree = xr.open_datatree(root, engine=SaevBackend, damaged_ok=True)
    assert sorted(tree.children) == sorted([short, whole])
    assert tree[short].activations[:6].values.tobytes() == stores[0].dense[:6].tobytes()
    with pytest.raises(CorruptShardError):
        tree[short].activations[6].values  # noqa: B018  # raises


def test_a_folder_without_stores_is_no_tree(tmp_path: Path):
    with pytest.raises(NotFoundError):
        xr.open_datatree(tmp_path / "nothing", engine=SaevBackend)
    with pytest.raises(NotFoundError):
        xr.open_datatree(tmp_path, engine=SaevBackend)
    (tmp_path / "x" / ".saev_store").mkdir(parents=True)
    (tmp_path / "x" / ".saev_store" / "claim.json").write_text("{}")
    with pytest.raises(IncompleteStoreError):
        xr.open_datatree(tmp_path / "x", engine=SaevBackend)


# -- concat ------------------------------------------------------------------------------------------------------------


def test_stores_are_joined_along_examples(root: Path, stores: list[PlainStore], tmp_path: Path):
    whole = ShardStore.concat([ShardStore.open(root / store.name) for store in stores])
    dense = np.concatenate([store.dense for store in stores])
    assert whole.activations.chunks is not None
    assert isinstance(whole.indexes["example"], pd.RangeIndex)
    assert whole.activations.values.tobytes() == dense.tobytes()
    assert whole.activations.sel(example=[0, 7, 14], layer=5).values.tobytes() == dense[[0, 7, 14], 1].tobytes()
    np.testing.assert_array_equal(whole.labels.values, np.concatenate([store.labels for store in stores]))
    assert whole.attrs["n_examples"] == 15
    assert [(item["url"], item["n_examples"]) for item in json.loads(whole.attrs["stores"])] == [
        (str(root / store.name), n) for store, n in zip(stores, (7, 6, 2), strict=True)
    ]
    pytest.importorskip("scipy")
    whole.to_netcdf(tmp_path / "x.nc", engine="scipy")
    with xr.open_dataset(tmp_path / "x.nc", engine="scipy") as again:
        assert again.activations.values.astype("<f4").tobytes() == dense.tobytes()


def opened(plain: PlainStore) -> ShardStore:
    return ShardStore.open(MemoryTransport(plain.files, label=plain.name))


@pytest.mark.parametrize(
    ("other", "named"),
    [
        (plain_store(layout_of(6, layers=(2, 5))), "layers"),
        (plain_store(layout_of(6, layers=(2, 11, 5))), "layers"),
        (plain_store(layout_of(6, d_model=4)), "d_model"),
        (plain_store(layout_of(6, cls=False)), "cls_token"),
        (plain_store(Layout(6, LAYERS, 5, True, 8, 3)), "content_tokens_per_example"),
        (plain_store(layout_of(6), labelled=True), "labels"),
    ],
    ids=["fewer layers", "layers in another order", "d_model", "CLS", "tokens", "labels"],
)
def test_what_does_not_belong_together_is_refused(other: PlainStore, named: str):
    first = opened(plain_store(layout_of(7)))
    with pytest.raises(ArgumentError, match=rf"store 1 .* has {named} "):
        concat([first, opened(other)])


def test_another_model_is_refused(tmp_path: Path):
    from saev_store import new_metadata

    def store(ckpt: str, family: str = "clip", **more: object) -> ShardStore:
        metadata = new_metadata(
            family=family, ckpt=ckpt, layers=[1], content_tokens_per_example=2, cls_token=True, d_model=4,
            n_examples=3, max_tokens_per_shard=9, **more,
        )  # fmt: skip
        with ShardStore.create(tmp_path, metadata, progress=False) as writer:
            writer.append(np.full((3, 1, 3, 4), len(ckpt) + len(str(more)), np.float32))
        return ShardStore.open(writer.url)

    train = store("ViT-B-16")
    assert concat([train, store("ViT-B-16", data={"split": "val"})]).sizes["example"] == 6
    with pytest.raises(ArgumentError, match="ckpt"):
        concat([train, store("ViT-L-14")])
    with pytest.raises(ArgumentError, match="family"):
        concat([train, store("ViT-B-16", family="siglip")])
    attention, mlp = (store("ViT-B-16", hook_points=[point]) for point in ("attn_out", "mlp_out"))
    for others in ([train, attention], [attention, mlp]):
        with pytest.raises(ArgumentError, match="store 1 .* has hook_points"):
            concat(others)


def test_the_same_recording_twice_is_refused(root: Path, stores: list[PlainStore]):
    first = ShardStore.open(root / stores[0].name)
    for again in (first, ShardStore.open(root / stores[0].name)):
        with pytest.raises(ArgumentError, match="recording of store 0 again"):
            concat([first, again])
    with pytest.raises(SaevStoreError, match="at least one"):
        concat([])
