"""Edges of the dataset: vectorized keys, what a folder is taken for, damaged stores in a tree, what may be joined."""

from __future__ import annotations

import os
from pathlib import Path

import numpy as np
import pytest
from dense_stores import PlainStore, plain_store

from saev_store import SaevStoreWarning, ShardStore, new_metadata
from saev_store.core.layout import Layout
from saev_store.errors import ArgumentError, CorruptShardError

xr = pytest.importorskip("xarray")
pytest.importorskip("dask.array")
from xarray.core.indexing import VectorizedIndexer
from xarray.core.nputils import NumpyVIndexAdapter

from saev_store.xarray import SaevBackend
from saev_store.xarray._variables import StoreArray

LAYOUT = Layout(7, (2, 5, 11), 4, True, 8, 3)
PAIRS, TABLE = np.array([0, 2, 1]), np.array([[0, 1], [2, 2]])


@pytest.fixture(scope="module")
def plain() -> PlainStore:
    return plain_store(LAYOUT, labelled=True)


@pytest.fixture
def folder(plain: PlainStore, tmp_path: Path) -> Path:
    return plain.write(tmp_path)


@pytest.mark.parametrize("lists", [PAIRS, TABLE], ids=["1d", "2d"])
@pytest.mark.parametrize(
    "axes", [(0,), (1,), (2,), (0, 1), (1, 2), (2, 3), (0, 2), (1, 3), (0, 1, 2), (1, 2, 3), (0, 1, 2, 3)]
)
def test_vectorized_keys_put_their_dimensions_in_front(axes: tuple[int, ...], lists: np.ndarray, plain, folder):
    """Wherever the lists are; judged by xarray's own adapter of NumPy arrays."""
    rest = (slice(1, 6), slice(0, 3, 2), slice(1, None), slice(2, 7, 3))
    key = tuple(lists if axis in axes else rest[axis] for axis in range(4))
    found = StoreArray(ShardStore.open(folder))[VectorizedIndexer(key)]
    expected = NumpyVIndexAdapter(plain.dense)[key]
    assert found.shape == expected.shape
    assert found.tobytes() == np.ascontiguousarray(expected).tobytes()


@pytest.mark.parametrize("key", [np.s_[:], np.s_[2:5, ::2], np.s_[::-1], np.s_[3], np.s_[[5, 0], 1]], ids=str)
def test_labels_are_the_callers_own(key: object, plain: PlainStore, folder: Path):
    with ShardStore.open(folder).as_xarray() as dataset:
        found = dataset.labels[key].values
        assert np.array_equal(found, plain.labels[key])
        if found.ndim:
            found[...] = 9
    with ShardStore.open(folder).as_xarray() as dataset:
        assert np.array_equal(dataset.labels.values, plain.labels)


def test_a_folder_without_one_of_the_documents_is_no_store(folder: Path):
    guess = SaevBackend().guess_can_open
    assert guess(str(folder))
    assert guess(folder)
    assert guess(f"file://{folder}")
    assert guess(ShardStore.open(folder))
    for name in ("metadata.json", "shards.json"):
        content = (folder / name).read_bytes()
        (folder / name).unlink()
        assert not guess(folder)
        (folder / name).write_bytes(b"")
        assert not guess(folder)
        (folder / name).write_bytes(content)
    assert not guess(f"s3://bucket{folder}")
    assert not guess(b"bytes")
    assert not guess(str(folder / "acts000000.bin"))


def test_damaged_stores_are_in_a_tree_where_that_is_allowed(plain: PlainStore, tmp_path: Path):
    damaged, whole = plain.write(tmp_path), plain_store(LAYOUT, seed=1).write(tmp_path)
    os.truncate(damaged / "acts000001.bin", 0)
    with pytest.warns(SaevStoreWarning, match=rf"left out of the tree: {damaged.name} \(damaged\)"):
        tree = xr.open_datatree(str(tmp_path), engine=SaevBackend)
    assert set(tree.children) == {whole.name}
    with pytest.warns(SaevStoreWarning, match="left out of the tree") as caught:
        assert set(xr.open_groups(str(tmp_path), engine=SaevBackend)) == {f"/{whole.name}"}
    assert caught[0].filename == __file__  # the caller of xarray
    tree = xr.open_datatree(str(tmp_path), engine=SaevBackend, damaged_ok=True)
    assert set(tree.children) == {whole.name, damaged.name}
    acts = tree[damaged.name].activations
    assert acts[0].values.tobytes() == plain.dense[0].tobytes()
    with pytest.raises(CorruptShardError):
        _ = acts[3].values
    with pytest.raises(CorruptShardError):
        xr.open_dataset(str(damaged), engine=SaevBackend)
    one = xr.open_dataset(str(damaged), engine=SaevBackend, damaged_ok=True)
    assert one.activations[0].values.tobytes() == plain.dense[0].tobytes()
    below = xr.open_dataset(str(tmp_path), engine=SaevBackend, group=damaged.name, damaged_ok=True)
    assert below.activations[6].values.tobytes() == plain.dense[6].tobytes()


def test_closing_a_dataset_closes_its_store(folder: Path):
    store = ShardStore.open(folder)
    closed: list[int] = []
    store.transport.close, close = (lambda: (closed.append(1), close())), store.transport.close
    dataset = store.as_xarray()
    assert not closed
    dataset.close()
    assert closed


def test_closing_a_tree_closes_its_stores(folder: Path, monkeypatch: pytest.MonkeyPatch):
    closed: list[str] = []
    monkeypatch.setattr(ShardStore, "close", lambda store: closed.append(store.url))
    tree = xr.open_datatree(folder.parent, engine="saev")
    tree.load()
    assert not closed
    tree.close()
    assert closed == [str(folder)]


def test_attributes_are_of_kinds_that_files_hold(folder: Path):
    """netCDF knows neither booleans nor objects."""
    attributes = ShardStore.open(folder).as_xarray().attrs
    assert all(type(value) in {str, int, float} for value in attributes.values())
    assert attributes["cls_token"] == 1
    assert attributes["content_hash"] == folder.name


@pytest.mark.parametrize("chunks", [None, {}, {"example": 2}])
def test_values_are_kept_where_they_are_not_tasks(chunks: object, plain: PlainStore, folder: Path):
    """Tasks of dask compute anew what was there, and are named after the recording."""
    dataset = ShardStore.open(folder).as_xarray(chunks=chunks)
    assert dataset.activations.values.tobytes() == plain.dense.tobytes()
    again = ShardStore.open(folder).as_xarray(chunks=chunks)
    if chunks is not None:
        assert dataset.activations.data.name == again.activations.data.name
        os.utime(folder / "acts000001.bin", ns=(1, 1))
        other = ShardStore.open(folder).as_xarray(chunks=chunks)
        assert other.activations.data.name != dataset.activations.data.name


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


@pytest.mark.parametrize(
    ("name", "changes"),
    [
        ("family", {"family": "dinov2"}),
        ("ckpt", {"ckpt": "y"}),
        ("layers", {"layers": (2, 6)}),
        ("layers", {"layers": (2,)}),
        ("content_tokens_per_example", {"content_tokens_per_example": 4}),
        ("content_tokens_per_example", {"content_tokens_per_example": 2, "cls_token": True}),
        ("cls_token", {"cls_token": True}),
        ("d_model", {"d_model": 8}),
        ("labels", {"labelled": False}),
        ("pixel_agg", {"pixel_agg": "prefer-fg"}),
    ],
)
def test_stores_are_joined_that_agree_in_everything_that_rows_mean(name: str, changes: dict, tmp_path: Path):
    one, other = written(tmp_path), written(tmp_path, **{"data": {"part": 1}, **changes})
    with pytest.raises(ArgumentError, match=f"store 1 .* has {name} "):
        ShardStore.concat([one, other])


def test_how_labels_were_made_does_not_matter_where_there_are_none(tmp_path: Path):
    one = written(tmp_path, labelled=False)
    other = written(tmp_path, labelled=False, data={"part": 1}, pixel_agg="prefer-fg")
    assert ShardStore.concat([one, other]).sizes["example"] == 4


def test_equal_recordings_of_other_metadata_are_no_repetition(tmp_path: Path):
    """Their bytes are equal; the documents say that they are of other data."""
    stores = [written(tmp_path, data={"part": part}, n_examples=2) for part in range(3)]
    assert ShardStore.concat(stores).attrs["n_examples"] == 6
    with pytest.raises(ArgumentError, match="store 3 is the recording of store 1 again"):
        ShardStore.concat([*stores, stores[1]])


def test_other_recordings_of_the_same_metadata_are_no_repetition(tmp_path: Path):
    plains = [plain_store(LAYOUT, seed=seed, ckpt="same") for seed in (0, 1)]
    stores = [ShardStore.open(plain.write(tmp_path / str(number))) for number, plain in enumerate(plains)]
    assert stores[0].metadata.raw == stores[1].metadata.raw
    found = ShardStore.concat(stores)
    assert found.activations.values.tobytes() == np.concatenate([plain.dense for plain in plains]).tobytes()
