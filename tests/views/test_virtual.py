"""References to the shards, read by others without this package, are the dense array; and the recipes of docs/reading.md."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from api import MemoryTransport
from dense_stores import PlainStore, plain_store
from token_stores import token_store
from waiting import HANG_S

from saev_store import ShardStore
from saev_store.core.layout import Layout
from saev_store.errors import ArgumentError, CorruptShardError

pytest.importorskip("virtualizarr")
import xarray as xr
from obspec_utils.registry import ObjectStoreRegistry
from obstore.store import LocalStore
from virtualizarr import open_virtual_dataset

from saev_store.export import SaevParser

ROOT = Path(__file__).resolve().parents[2]
SHOWN = {"token_ids": "token_ids", "mask": "mask", "layer": "tokens_layer"}
#: Shape and tail: the last shard is cut within a chunk of the default shape, padded, or the only one.
LAYOUTS = (
    (Layout(7, (2, 5, 11), 4, True, 8, 3), "cut"),
    (Layout(10, (2, 5), 3, True, 8, 6), "padded"),
    (Layout(10, (2, 5), 3, True, 8, 6), "cut"),
    (Layout(2, (-2,), 4, False, 8, 5), "cut"),
    (Layout(13, (0,), 2, False, 4, 13), "cut"),
    (Layout(1, (0,), 1, False, 1, 1), "cut"),
)


def registry() -> ObjectStoreRegistry:
    return ObjectStoreRegistry({"file://": LocalStore()})


def ranges(array) -> bytes:
    """All chunks of a ManifestArray in C order, read with nothing but `open` and `seek`."""
    found = []
    for entry in array.manifest.dict().values():
        with open(entry["path"].removeprefix("file://"), "rb") as file:
            file.seek(entry["offset"])
            found.append(file.read(entry["length"]))
            assert len(found[-1]) == entry["length"]
    return b"".join(found)


def made(root: Path, number: int) -> tuple[PlainStore, ShardStore]:
    layout, tail = LAYOUTS[number]
    plain = plain_store(layout, tail=tail, labelled=True)
    return plain, ShardStore.open(plain.write(root / str(number)))


def test_references_are_ranges_of_the_files_and_equal_numpy(tmp_path: Path) -> None:
    for number in range(len(LAYOUTS)):
        plain, store = made(tmp_path, number)
        url = f"file://{store.url}"
        single = (1, 1, *store.shape[2:])
        for chunks in ("auto", (1, *store.shape[1:]), single):
            parsed = open_virtual_dataset(url, registry(), SaevParser(chunks=chunks))
            for found in (store.to_virtual_dataset(chunks=chunks), parsed):
                # Chunks are whole examples, or layers of one, so their bytes in a row are the tensor's.
                assert ranges(found.activations.data) == plain.dense.tobytes()
                assert ranges(found.labels.data) == plain.labels.tobytes()
                assert found.activations.dims == ("example", "layer", "token", "d_model")
                assert found.attrs["content_hash"] == store.metadata.hash
            n_chunks = int(np.prod(store.shape)) // int(np.prod(chunks)) if chunks != "auto" else None
            assert n_chunks in {None, len(found.activations.data.manifest.dict())}
        virtual = store.to_virtual_dataset()
        assert virtual.layer.values.tolist() == list(store.layout.layers)
        assert virtual.token.values.tolist() == list(
            range(-plain.layout.n_special_tokens, virtual.sizes["content_token"])
        )
        read = xr.open_zarr(SaevParser()(url, registry()), consolidated=False, zarr_format=3, chunks=None)
        assert read.activations.values.tobytes() == plain.dense.tobytes()
        assert np.array_equal(read.labels.values, plain.labels)
        skipped = open_virtual_dataset(url, registry(), SaevParser(skip_variables=["labels"]))
        assert set(skipped) == {"activations"}


def test_references_have_the_stored_dtype_and_every_token_array(tmp_path: Path) -> None:
    for dtype in ("float32", "bfloat16", "float16"):
        store = token_store(
            tmp_path / dtype, dtype=dtype, arrays={"token_ids": "int32", "mask": "bool", "layer": "int64"}
        )
        url = f"file://{store.path}"
        for found in (
            ShardStore.open(store.path).to_virtual_dataset(),
            open_virtual_dataset(url, registry(), SaevParser()),
        ):
            assert found.activations.dtype == store.acts.dtype
            assert ranges(found.activations.data) == store.acts.tobytes()
            for name, truth in store.arrays.items():
                assert found[SHOWN[name]].dtype == truth.dtype
                assert ranges(found[SHOWN[name]].data) == truth.tobytes()
        read = xr.open_zarr(SaevParser()(url, registry()), consolidated=False, zarr_format=3, chunks=None)
        assert read.activations.values.tobytes() == store.acts.tobytes()


def test_to_virtual_dataset_refuses_chunks_that_do_not_divide_the_last_shard(tmp_path: Path) -> None:
    for layout, chunk, whole in (
        (Layout(7, (0,), 2, False, 4, 3), 3, 1), (Layout(6, (0,), 2, False, 4, 7), 4, 3),
        (Layout(6, (0,), 2, False, 4, 6), 5, 3), (Layout(14, (0,), 2, False, 4, 8), 4, 2),
        (Layout(18, (0,), 2, False, 4, 12), 4, 3),
    ):  # fmt: skip
        plain = plain_store(layout, tail="cut")
        store = ShardStore.open(plain.write(tmp_path / f"{layout.n_examples}-{layout.examples_per_shard}"))
        with pytest.raises(ArgumentError) as caught:
            store.to_virtual_dataset(chunks=(chunk, *layout.shape[1:]))
        assert caught.value.where == "chunks"
        assert f"{whole} " in str(caught.value.remedy)
        found = store.to_virtual_dataset(chunks=(whole, *layout.shape[1:])).activations.data
        assert found.manifest.shape_chunk_grid[0] == layout.n_examples // whole
        assert ranges(found) == plain.dense.tobytes()
        for junk in ((chunk, 2), (), 5, "all", (0, *layout.shape[1:]), (1, 1, 1, 1), None):
            with pytest.raises(ArgumentError):
                store.to_virtual_dataset(chunks=junk)


def test_to_virtual_dataset_names_the_address_for_readers(tmp_path: Path) -> None:
    plain, store = made(tmp_path, 0)
    for base in ("s3://lab/shards/x", "s3://lab/shards/x/"):
        found = store.to_virtual_dataset(base=base)
        paths = {entry["path"] for entry in found.activations.data.manifest.dict().values()}
        assert paths == {f"s3://lab/shards/x/acts{number:06d}.bin" for number in range(3)}
        assert found.attrs["url"] == "s3://lab/shards/x"
    memory = ShardStore.open(MemoryTransport(plain.files, label=plain.name))
    assert memory.to_virtual_dataset(base="s3://lab/x").sizes["example"] == 7
    for junk in (None, "", "/", 5):
        with pytest.raises(ArgumentError) as caught:
            memory.to_virtual_dataset(base=junk)
        assert caught.value.where == "base"


def test_to_virtual_dataset_refuses_damage(tmp_path: Path) -> None:
    """Other readers would show fill values."""
    for number, damage in enumerate((os.remove, lambda path: os.truncate(path, 8))):
        _, store = made(tmp_path / str(number), 0)
        damage(f"{store.url}/acts000001.bin")
        with pytest.raises(CorruptShardError):
            store.to_virtual_dataset()
        with pytest.raises(CorruptShardError):
            SaevParser()(f"file://{store.url}", registry())


@pytest.mark.parametrize(
    "call", ["ShardStore.open(sys.argv[1]).to_virtual_dataset()", "SaevParser()(sys.argv[1], None)"]
)
def test_virtualizarr_is_named_if_it_is_not_installed(call: str, tmp_path: Path) -> None:
    _, store = made(tmp_path, 0)
    code = (
        "import sys; sys.modules['virtualizarr'] = None\n"
        "from saev_store import ShardStore\n"
        "from saev_store.export import SaevParser\n"
        "from saev_store.errors import MissingDependencyError\n"
        f"try: {call}\n"
        "except MissingDependencyError as error: print(error.remedy)"
    )
    command = [sys.executable, "-c", code, store.url]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=HANG_S, check=True)
    assert "virtualizarr" in done.stdout
