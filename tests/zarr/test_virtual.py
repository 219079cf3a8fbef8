"""Virtual datasets, the parser for VirtualiZarr, and Icechunk repositories of several stores, against dense arrays."""

from __future__ import annotations

import os
from pathlib import Path

import numpy as np
import pytest
from dense_stores import PlainStore, plain_store

from saev_store import ShardStore
from saev_store.core.layout import Layout
from saev_store.errors import ArgumentError, CorruptShardError, NotFoundError, WriterConflictError
from saev_store.export import icechunk as icechunk_export

icechunk = pytest.importorskip("icechunk")
pytest.importorskip("virtualizarr")
import xarray as xr

#: The last shard is cut within a chunk of the default shape, padded, or the only one.
LAYOUTS = {
    "cut": (Layout(7, (2, 5, 11), 4, True, 8, 3), "cut"),
    "padded": (Layout(10, (2, 5), 3, True, 8, 6), "padded"),
    "cut in the middle": (Layout(10, (2, 5), 3, True, 8, 6), "cut"),
    "one short shard": (Layout(2, (-2,), 4, False, 8, 5), "cut"),
    "prime": (Layout(13, (0,), 2, False, 4, 13), "cut"),
}


def made(root: Path, name: str, seed: int = 0, labelled: bool = True) -> tuple[PlainStore, ShardStore]:
    layout, tail = LAYOUTS[name]
    plain = plain_store(layout, seed=seed, tail=tail, labelled=labelled, ckpt="same")
    return plain, ShardStore.open(plain.write(root))


def ranges(array) -> bytes:
    """All chunks of a ManifestArray in C order, read with nothing but `open` and `seek`."""
    found = []
    for entry in array.manifest.dict().values():
        with open(entry["path"].removeprefix("file://"), "rb") as file:
            file.seek(entry["offset"])
            found.append(file.read(entry["length"]))
            assert len(found[-1]) == entry["length"]
    return b"".join(found)


@pytest.mark.parametrize("name", LAYOUTS)
def test_every_chunk_is_a_range_of_a_file(name: str, tmp_path: Path):
    plain, store = made(tmp_path, name)
    found = store.to_virtual_dataset()
    # Chunks are whole examples here, so their bytes in a row are the tensor's.
    assert ranges(found.activations.data) == plain.dense.tobytes()
    assert ranges(found.labels.data) == plain.labels.tobytes()
    assert found.layer.values.tolist() == list(store.layout.layers)
    assert found.activations.dims == ("example", "layer", "token", "d_model")


def test_a_shape_that_would_need_bytes_is_refused_with_one_that_does_not(tmp_path: Path):
    plain, store = made(tmp_path, "cut")
    with pytest.raises(ArgumentError, match="chunks of 3 examples do not divide the last shard, which has 1") as caught:
        store.to_virtual_dataset(chunks=(3, *store.layout.shape[1:]))
    assert "Take 1 examples" in str(caught.value)
    assert (
        ranges(store.to_virtual_dataset(chunks=(1, *store.layout.shape[1:])).activations.data) == plain.dense.tobytes()
    )


@pytest.mark.parametrize(
    ("layout", "chunk", "whole"),
    [
        (Layout(6, (0,), 2, False, 4, 7), 4, 3),  # of the only shard, whatever it could hold
        (Layout(6, (0,), 2, False, 4, 6), 5, 3),
        (Layout(6, (0,), 2, False, 4, 8), 4, 3),
        (Layout(14, (0,), 2, False, 4, 8), 4, 2),  # of all shards: 8 and 6 examples
        (Layout(18, (0,), 2, False, 4, 12), 5, 3),
    ],
)
def test_the_shape_that_is_proposed_is_the_largest_that_divides_every_shard(
    layout: Layout, chunk: int, whole: int, tmp_path: Path
):
    plain = plain_store(layout, tail="cut")
    store = ShardStore.open(plain.write(tmp_path))
    with pytest.raises(ArgumentError) as caught:
        store.to_virtual_dataset(chunks=(chunk, *layout.shape[1:]))
    assert caught.value.remedy == f"Take {whole} examples."
    found = store.to_virtual_dataset(chunks=(whole, *layout.shape[1:])).activations.data
    assert found.manifest.shape_chunk_grid[0] == layout.n_examples // whole
    assert ranges(found) == plain.dense.tobytes()


def test_damage_is_refused(tmp_path: Path):
    _, store = made(tmp_path, "cut")
    os.remove(Path(store.url) / "acts000001.bin")
    with pytest.raises(CorruptShardError):
        store.to_virtual_dataset()


@pytest.mark.parametrize("name", LAYOUTS)
def test_the_parser_gives_arrays_that_zarr_reads(name: str, tmp_path: Path):
    from obspec_utils.registry import ObjectStoreRegistry
    from obstore.store import LocalStore
    from virtualizarr import open_virtual_dataset
    from virtualizarr.parsers.typing import Parser

    from saev_store.export import SaevParser

    plain, store = made(tmp_path, name)
    registry = ObjectStoreRegistry({"file://": LocalStore()})
    parser = SaevParser()
    assert isinstance(parser, Parser)
    virtual = open_virtual_dataset(f"file://{store.url}", registry, parser)
    assert ranges(virtual.activations.data) == plain.dense.tobytes()
    read = xr.open_zarr(parser(f"file://{store.url}", registry), consolidated=False, zarr_format=3, chunks=None)
    np.testing.assert_array_equal(read.activations.values, plain.dense)
    np.testing.assert_array_equal(read.labels.values, plain.labels)
    single = open_virtual_dataset(f"file://{store.url}", registry, SaevParser(chunks=(1, 1, *store.shape[2:])))
    assert single.activations.data.manifest.shape_chunk_grid == (*store.shape[:2], 1, 1)
    skipping = SaevParser(skip_variables=["labels"])
    assert set(open_virtual_dataset(f"file://{store.url}", registry, skipping)) == {"activations"}


def test_virtualizarr_reads_kerchunk_documents_without_templates(tmp_path: Path):
    from obspec_utils.registry import ObjectStoreRegistry
    from obstore.store import LocalStore
    from virtualizarr import open_virtual_dataset
    from virtualizarr.parsers import KerchunkJSONParser

    plain, store = made(tmp_path, "padded")
    store.to_kerchunk(tmp_path / "refs.json", chunks=(1, *store.layout.shape[1:]), templates=False)
    parser = KerchunkJSONParser(skip_variables=["layer", "token", "content_token"])
    registry = ObjectStoreRegistry({"file://": LocalStore()})
    found = open_virtual_dataset(f"file://{tmp_path}/refs.json", registry, parser)
    assert ranges(found.activations.data) == plain.dense.tobytes()


@pytest.mark.parametrize("chunks", [*((n, 2, 4, 8) for n in (0, -1, -7, True, 2**70, "3", 1.5, None)), (), (3,)])
def test_a_chunk_of_an_illegal_length_is_refused_as_such(tmp_path: Path, chunks: tuple):
    _, store = made(tmp_path / "a", "cut")
    with pytest.raises(ArgumentError) as caught:
        store.to_virtual_dataset(chunks=chunks)
    assert caught.value.where == "chunks"


# -- appending to an Icechunk repository -------------------------------------------------------------------------------


def opened(folder: Path) -> xr.Dataset:
    storage = icechunk.local_filesystem_storage(str(folder))
    places = icechunk.Repository.fetch_config(storage).virtual_chunk_containers
    # Versions before 2 allow a place by None.
    access = getattr(icechunk.credentials, "LocalFileSystemAccess", None)
    repository = icechunk.Repository.open(storage, authorize_virtual_chunk_access=dict.fromkeys(places, access))
    return xr.open_zarr(
        repository.readonly_session("main").store, consolidated=False, chunks=None, mask_and_scale=False
    )


def test_stores_that_follow_each_other_are_one_array(tmp_path: Path):
    parts = [made(tmp_path / f"{seed}", "padded", seed) for seed in range(3)]
    for _, store in parts:
        store.to_icechunk(tmp_path / "repository", chunks=(1, *store.layout.shape[1:]), append=store is not parts[0][1])
    found = opened(tmp_path / "repository")
    np.testing.assert_array_equal(found.activations.values, np.concatenate([plain.dense for plain, _ in parts]))
    np.testing.assert_array_equal(found.labels.values, np.concatenate([plain.labels for plain, _ in parts]))
    assert found.layer.values.tolist() == [2, 5]
    assert found.attrs["n_examples"] == 30
    assert [part["url"] for part in found.attrs["parts"]] == [f"file://{store.url}" for _, store in parts]


def test_a_short_last_chunk_is_kept_and_ends_the_repository(tmp_path: Path):
    """Chunks of three examples: 10 = 3 + 3 + 3 + 1, after 6 + 6 of the first store."""
    first = plain_store(Layout(12, (2, 5), 3, True, 8, 6), seed=1, tail="cut", ckpt="same")
    last = plain_store(Layout(10, (2, 5), 3, True, 8, 6), seed=2, tail="cut", ckpt="same")
    stores = [ShardStore.open(plain.write(tmp_path / name)) for plain, name in ((first, "a"), (last, "b"))]
    stores[0].to_icechunk(tmp_path / "repository", chunks=(3, *first.layout.shape[1:]))
    stores[1].to_icechunk(tmp_path / "repository", append=True)
    found = opened(tmp_path / "repository").activations.values
    np.testing.assert_array_equal(found, np.concatenate([first.dense, last.dense]))
    third = ShardStore.open(plain_store(first.layout, seed=3, ckpt="same").write(tmp_path / "c"))
    with pytest.raises(ArgumentError, match="ends within a chunk: 22 examples in chunks of 3"):
        third.to_icechunk(tmp_path / "repository", append=True)


@pytest.mark.parametrize(
    ("layout", "labelled", "message"),
    [
        (Layout(10, (2, 6), 3, True, 8, 6), True, "layers: "),
        (Layout(10, (2, 5), 4, True, 8, 6), True, "content_tokens_per_example: 3 in the repository, 4 here"),
        (Layout(10, (2, 5), 3, True, 4, 6), True, "d_model: 8 in the repository, 4 here"),
        (Layout(10, (2, 5), 3, False, 8, 6), True, "cls_token: True in the repository, False here"),
        (Layout(10, (2, 5), 3, True, 8, 6), False, "labels: 'uint8' in the repository, None here"),
    ],
)
def test_what_does_not_continue_the_repository_is_refused(layout, labelled, message, tmp_path: Path):
    _, store = made(tmp_path / "a", "padded")
    store.to_icechunk(tmp_path / "repository", chunks=(1, *store.layout.shape[1:]))
    before = opened(tmp_path / "repository").activations.values
    other = ShardStore.open(plain_store(layout, seed=5, labelled=labelled, ckpt="same").write(tmp_path / "b"))
    with pytest.raises(ArgumentError, match="does not continue the repository") as caught:
        other.to_icechunk(tmp_path / "repository", append=True)
    assert message in str(caught.value)
    np.testing.assert_array_equal(opened(tmp_path / "repository").activations.values, before)


def test_the_same_store_is_not_appended_twice_and_a_repository_must_exist(tmp_path: Path):
    _, store = made(tmp_path / "a", "padded")
    with pytest.raises(NotFoundError, match="no repository to append to"):
        store.to_icechunk(tmp_path / "repository", append=True)
    store.to_icechunk(tmp_path / "repository", chunks=(1, *store.layout.shape[1:]))
    with pytest.raises(ArgumentError, match="already in the repository"):
        store.to_icechunk(tmp_path / "repository", append=True)


@pytest.mark.parametrize("is_same", [False, True])
def test_what_is_appended_meanwhile_is_not_appended_twice_nor_forgotten(tmp_path: Path, monkeypatch, is_same: bool):
    """To make references takes long for large stores."""
    first, one, two = (
        ShardStore.open(plain_store(Layout(6, (2, 5), 3, True, 8, 6), seed=seed, ckpt="same").write(tmp_path / name))
        for seed, name in ((1, "a"), (2, "b"), (3, "c"))
    )
    repository, plainly = tmp_path / "repository", icechunk_export.references
    first.to_icechunk(repository, chunks=(1, *first.layout.shape[1:]))

    def meanwhile(*args, **options):
        monkeypatch.setattr(icechunk_export, "references", plainly)
        (one if is_same else two).to_icechunk(repository, append=True)
        return plainly(*args, **options)

    monkeypatch.setattr(icechunk_export, "references", meanwhile)
    with pytest.raises(WriterConflictError):
        one.to_icechunk(repository, append=True)
    found = opened(repository)
    assert len(found.attrs["parts"]) == 2
    np.testing.assert_array_equal(found.activations[6:].values, (one if is_same else two)[:])
    if not is_same:
        one.to_icechunk(repository, append=True)
        np.testing.assert_array_equal(opened(repository).activations[12:].values, one[:])


def test_of_two_processes_that_create_a_repository_one_is_told(tmp_path: Path, monkeypatch):
    """And not to delete what the other has made."""
    first, other = (
        ShardStore.open(plain_store(Layout(6, (2, 5), 3, True, 8, 6), seed=seed).write(tmp_path / name))
        for seed, name in ((1, "a"), (2, "b"))
    )
    repository, plainly = tmp_path / "repository", icechunk_export.create_whole

    def meanwhile(*args):
        monkeypatch.setattr(icechunk_export, "create_whole", plainly)
        other.to_icechunk(repository)
        plainly(*args)

    monkeypatch.setattr(icechunk_export, "create_whole", meanwhile)
    with pytest.raises(WriterConflictError, match="has created the repository meanwhile"):
        first.to_icechunk(repository)
    np.testing.assert_array_equal(opened(repository).activations.values, other[:])
