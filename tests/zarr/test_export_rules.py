"""Exports without other libraries' readers: what stands in the documents, which services are chosen, and errors with their places."""

from __future__ import annotations

import base64
import errno
import json
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from dense_stores import PlainStore, plain_store

from saev_store import ShardStore, new_metadata
from saev_store.core.layout import Layout
from saev_store.errors import (
    ArgumentError,
    CorruptShardError,
    MissingDependencyError,
    NotFoundError,
    SaevStoreError,
    StoreExistsError,
    TransportError,
)
from saev_store.export import (
    _references,
    kerchunk,
    tensorstore_spec,
    to_virtual_dataset,
    write_icechunk,
    write_kerchunk,
)
from saev_store.export._references import references
from saev_store.export.kerchunk import v2_documents
from saev_store.transport.durable import TEMP_PREFIX

LAYOUT = Layout(7, (2, 5, 11), 4, True, 8, 3)


def refused(call: Callable[[], object]) -> SaevStoreError:
    with pytest.raises(SaevStoreError) as caught:
        call()
    return caught.value


def made(
    root: Path, *, tail: str = "cut", labelled: bool = True, ckpt: str | None = None, seed: int = 0
) -> tuple[PlainStore, ShardStore]:
    plain = plain_store(LAYOUT, tail=tail, labelled=labelled, ckpt=ckpt, seed=seed)
    return plain, ShardStore.open(plain.write(root))


def of_dtype(root: Path, dtype: str) -> ShardStore:
    metadata = new_metadata(
        family="gpt2", ckpt="x", layers=(1,), content_tokens_per_example=2, cls_token=False, d_model=4, n_examples=3, dtype=dtype,
        protocol="3.0", token_arrays={"token_ids": "int32", "mask": "bool", "document_ids": "int64"},
    )  # fmt: skip
    ids = np.arange(6).reshape(3, 2)
    with ShardStore.create(root, metadata, progress=False) as writer:
        writer.append(np.ones((3, 1, 2, 4), np.float32), token_ids=ids, mask=ids > 1, document_ids=ids)
    return ShardStore.open(root / metadata.hash)


def document(path: Path) -> dict[str, Any]:
    return json.loads(path.read_text())


# -- references ----------------------------------------------------------------------------------------------------------


def content(plain: PlainStore, reference: object, base: str) -> bytes:
    """The bytes that a reference leads to, read from the store's files."""
    if isinstance(reference, str):
        return base64.b64decode(reference.removeprefix("base64:"))
    address, offset, nbytes = reference
    folder, _, name = address.rpartition("/")
    assert folder == base
    found = plain.files[name][offset : offset + nbytes]
    assert len(found) == nbytes
    return found


@pytest.mark.parametrize("templates", [True, False])
@pytest.mark.parametrize("step", [1, 4, 1 << 16])
def test_every_reference_leads_to_its_chunk(
    templates: bool, step: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr(kerchunk, "_STEP", step)
    plain, store = made(tmp_path)
    write_kerchunk(store, str(tmp_path / "r.json"), chunks=(3, 3, 5, 8), base="s3://lab/a b/", templates=templates)
    found = document(tmp_path / "r.json")
    assert found["version"] == 1
    assert found.get("templates") == ({"u": "s3://lab/a b"} if templates else None)
    base, refs = "{{u}}" if templates else "s3://lab/a b", found["refs"]
    chunks = [content(plain, refs[f"activations/{n}.0.0.0"], base) for n in range(3)]
    assert chunks[:2] == [plain.dense[:3].tobytes(), plain.dense[3:6].tobytes()]
    assert chunks[2] == plain.dense[6:].tobytes() + bytes(2 * LAYOUT.example_nbytes)
    assert isinstance(refs["activations/2.0.0.0"], str)
    assert plain.labels is not None
    assert content(plain, refs["labels/0.0"], base) == plain.labels.tobytes()
    assert np.frombuffer(content(plain, refs["layer/0"], base), "<i8").tolist() == [2, 5, 11]
    assert np.frombuffer(content(plain, refs["token/0"], base), "<i8").tolist() == [-1, 0, 1, 2, 3]
    assert np.frombuffer(content(plain, refs["content_token/0"], base), "<i8").tolist() == [0, 1, 2, 3]
    documents = {key: json.loads(text) for key, text in refs.items() if key.rpartition("/")[2].startswith(".z")}
    consolidated = documents.pop(".zmetadata")
    assert consolidated == {"zarr_consolidated_format": 1, "metadata": documents}
    assert documents[".zgroup"] == {"zarr_format": 2}
    assert documents[".zattrs"]["url"] == "s3://lab/a b"
    assert set(refs) == {".zmetadata", *documents, *(f"activations/{n}.0.0.0" for n in range(3)), "labels/0.0", "layer/0", "token/0", "content_token/0"}  # fmt: skip


def test_a_last_chunk_that_ends_with_its_file_is_not_copied(tmp_path: Path):
    _, store = made(tmp_path, tail="padded")
    write_kerchunk(store, str(tmp_path / "r.json"), chunks=(3, 3, 5, 8), base="s3://a/b", templates=False)
    assert document(tmp_path / "r.json")["refs"]["activations/2.0.0.0"] == ["s3://a/b/acts000002.bin", 0, 1440]


@pytest.mark.parametrize(("dtype", "name", "fill"), [("float32", "<f4", "NaN"), ("float16", "<f2", "NaN")])
def test_dtypes_of_zarr_2(dtype: str, name: str, fill: str, tmp_path: Path):
    documents = v2_documents(references(of_dtype(tmp_path, dtype), base="s3://a/b"))
    assert (documents["activations/.zarray"]["dtype"], documents["activations/.zarray"]["fill_value"]) == (name, fill)
    for array, expected in (("token_ids", "<i4"), ("mask", "|b1"), ("document_ids", "<i8")):
        assert (documents[f"{array}/.zarray"]["dtype"], documents[f"{array}/.zarray"]["fill_value"]) == (expected, None)
    for array in ("activations", "mask", "layer"):
        said = documents[f"{array}/.zarray"]
        rest = {key: said[key] for key in ("zarr_format", "compressor", "filters", "order", "dimension_separator")}
        assert rest == {"zarr_format": 2, "compressor": None, "filters": None, "order": "C", "dimension_separator": "."}


def test_the_smallest_store_that_gives_a_warning(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    _, store = made(tmp_path, labelled=False)
    found = references(store, base="s3://a/b", chunks=(1, 1, 5, 8))
    assert found.arrays[0].n_chunks == 21
    for most, is_many in ((20, True), (21, True), (22, False)):
        monkeypatch.setattr(_references, "MANY_REFERENCES", most)
        if is_many:
            with pytest.warns(match="21 references make a document of about 100 bytes each; larger chunks make fewer"):
                _references.warn_if_many(found, what="a document")
        else:
            _references.warn_if_many(found, what="a document")


def test_token_arrays_in_whole_chunks_where_bytes_may_not_stand(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    _, store = made(tmp_path)
    for nbytes, rows in ((28, 7), (27, 1), (4, 1)):
        monkeypatch.setattr(_references, "_TOKEN_CHUNK_BYTES", nbytes)
        labels = references(store, base="s3://a/b", inline=False).arrays[1]
        assert (labels.name, labels.chunk, dict(labels.inline)) == ("labels", (rows, 4), {})


# -- errors --------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("arguments", "where", "message"),
    [
        ({"format": "xml"}, "format", "format is 'xml'; it must be 'json' or 'parquet'"),
        ({"base": ""}, "base", "a JSON document names the store's folder once, in its template"),
        ({"base": "/"}, "base", "'/' is not an address of a store's folder"),
        ({"chunks": (7, 3, 5, 8)}, "chunks", "7"),
    ],
)
def test_errors_of_kerchunk(arguments: dict, where: str, message: str, tmp_path: Path):
    _, store = made(tmp_path)
    error = refused(lambda: write_kerchunk(store, str(tmp_path / "r.json"), **arguments))
    assert (type(error), error.where) == (ArgumentError, where)
    assert message in error.message
    assert not (tmp_path / "r.json").exists()


def test_bfloat16_has_no_name_in_zarr_2(tmp_path: Path):
    store = of_dtype(tmp_path, "bfloat16")
    error = refused(lambda: write_kerchunk(store, str(tmp_path / "r.json")))
    assert (type(error), error.where) == (ArgumentError, store.url)
    assert error.remedy == "Export to Icechunk or as a TensorStore spec, or copy the store as float32."


def test_a_folder_of_other_files_is_left_alone_and_says_so(tmp_path: Path):
    pytest.importorskip("fastparquet")
    _, store = made(tmp_path / "s")
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine" / "x").touch()
    error = refused(lambda: write_kerchunk(store, str(tmp_path / "mine"), format="parquet"))
    assert (type(error), error.where) == (StoreExistsError, str(tmp_path / "mine"))
    assert error.remedy == "Name a folder that is new, or one that an export may replace."


def test_what_a_killed_export_has_not_renamed_is_no_other_file(tmp_path: Path):
    pytest.importorskip("fastparquet")
    _, store = made(tmp_path / "s")
    (tmp_path / "refs").mkdir()
    (tmp_path / "refs" / f"{TEMP_PREFIX}1-abc").touch()
    write_kerchunk(store, str(tmp_path / "refs"), format="parquet")
    assert (tmp_path / "refs" / ".zmetadata").exists()


@pytest.mark.parametrize("there", ["nothing", "an empty folder", "files"])
@pytest.mark.parametrize("fails", ["create", "save_config", "rename", "panic", "not"])
def test_a_repository_that_could_not_be_created_can_be(
    there: str, fails: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    icechunk = pytest.importorskip("icechunk")
    pytest.importorskip("virtualizarr")
    _, store = made(tmp_path / "s")
    where = tmp_path / "r"
    if there != "nothing":
        where.mkdir()
    if there == "files":
        (where / "mine").touch()
    panic = type("PanicException", (BaseException,), {})

    def failing(*_: object, **__: object) -> None:
        if fails == "rename":
            raise OSError(errno.EIO, "input/output error")
        raise panic("unwrap") if fails == "panic" else icechunk.IcechunkError("no space left on device\nand more")

    with monkeypatch.context() as changed:
        if fails == "rename":
            changed.setattr("os.rename", failing)
        elif fails != "not":
            name = "create" if fails == "panic" else fails
            real = icechunk.Repository
            fake = SimpleNamespace(exists=real.exists, open=real.open, fetch_config=real.fetch_config, create=failing)
            if name == "save_config":
                fake.create = lambda *of, **options: (
                    real.create(*of, **options) and SimpleNamespace(save_config=failing)
                )
            changed.setattr(icechunk, "Repository", fake)
        if fails != "not":
            error = refused(lambda: write_icechunk(store, str(where)))
            assert type(error) is TransportError
            assert error.where == str(where)
            assert "and more" not in error.message
    if there == "files":
        error = refused(lambda: write_icechunk(store, str(where)))
        assert (type(error), error.message) == (
            StoreExistsError,
            "the folder contains files that are no repository, perhaps of a creation that was interrupted",
        )
        assert [path.name for path in where.iterdir()] == ["mine"]
    else:
        write_icechunk(store, str(where))
        assert icechunk.Repository.exists(icechunk.local_filesystem_storage(str(where)))
    assert sorted(path.name for path in tmp_path.iterdir()) == ["r", "s"]


def test_libraries_that_are_not_there(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    _, store = made(tmp_path)
    for module, call, install in (
        ("fastparquet", lambda: write_kerchunk(store, str(tmp_path / "r"), format="parquet"), "saev-store[kerchunk]"),
        ("icechunk", lambda: write_icechunk(store, str(tmp_path / "r")), "saev-store[icechunk]"),
        ("virtualizarr", lambda: to_virtual_dataset(store), "saev-store[icechunk]"),
    ):
        with monkeypatch.context() as patch:
            patch.setitem(__import__("sys").modules, module, None)
            error = refused(call)
        assert (type(error), error.remedy) == (MissingDependencyError, f"Run: pip install '{install}'.")
    assert not (tmp_path / "r").exists()


def test_damage_is_told_by_every_export(tmp_path: Path):
    _, store = made(tmp_path)
    (Path(store.url) / "acts000002.bin").unlink()
    damaged = ShardStore.open(store.url, damaged_ok=True)
    for call in (
        lambda: tensorstore_spec(damaged), lambda: tensorstore_spec(damaged, "labels"), lambda: references(damaged),
        lambda: references(damaged, inline=False),
    ):  # fmt: skip
        assert type(refused(call)) is CorruptShardError
    assert tensorstore_spec(damaged, "layer")["array"] == [2, 5, 11]


def test_specs_are_whole_shards(tmp_path: Path):
    """A last shard at its full size is a chunk like the others."""
    _, store = made(tmp_path, tail="padded")
    whole = tensorstore_spec(store)
    # A driver that only reads, over every element.
    assert (whole["driver"], whole["downsample_factors"], whole["downsample_method"]) == (
        "downsample",
        [1] * 4,
        "stride",
    )
    spec = whole["base"]
    assert (spec["driver"], spec["metadata"]["shape"]) == ("zarr3", [7, 3, 5, 8])
    assert spec["metadata"]["chunk_grid"]["configuration"]["chunk_shape"] == [3, 3, 5, 8]
    keys = [layer["exact"] for layer in spec["kvstore"]["layers"]]
    assert keys == [f"c/{n}/0/0/0" for n in range(3)]
    whole = tensorstore_spec(store, "labels")
    assert (whole["driver"], whole["downsample_factors"]) == ("downsample", [1, 1])
    labels = whole["base"]
    assert labels["metadata"]["shape"] == [7, 4]
    assert [layer["exact"] for layer in labels["kvstore"]["layers"]] == ["c/0/0"]
    assert not {"attributes", "storage_transformers"} & set(spec["metadata"])
    layer = tensorstore_spec(store, "layer")
    assert (layer["driver"], layer["dtype"]) == ("array", "int64")
    assert layer["transform"] == {"input_inclusive_min": [0], "input_exclusive_max": [3], "input_labels": ["layer"]}
    error = refused(lambda: tensorstore_spec(store, base="ftp://host/a"))
    assert error.message == "TensorStore has no driver for 'ftp://host/a'"
    error = refused(lambda: tensorstore_spec(store, base={"path": "a"}))
    assert error.message == "{'path': 'a'} is no kvstore: it names no driver"


@pytest.mark.parametrize("tail", ["cut", "padded"])
def test_a_spec_of_one_shard_is_one_array(tmp_path: Path, tail: str):
    """Also where the file is shorter than a full shard: then its one chunk is as long as the file."""
    plain = plain_store(Layout(2, (2, 5), 4, True, 8, 3), tail=tail)
    spec = tensorstore_spec(ShardStore.open(plain.write(tmp_path)))["base"]
    assert (spec["driver"], spec["metadata"]["shape"]) == ("zarr3", [2, 2, 5, 8])
    n_in_file = len(plain.files["acts000000.bin"]) // (2 * 5 * 8 * 4)
    assert spec["metadata"]["chunk_grid"]["configuration"]["chunk_shape"] == [n_in_file, 2, 5, 8]
    assert [layer["exact"] for layer in spec["kvstore"]["layers"]] == ["c/0/0/0/0"]


# -- Icechunk ------------------------------------------------------------------------------------------------------------


class Told(Exception):
    """Which of Icechunk's functions was asked, with what."""


def test_the_service_of_an_address(monkeypatch: pytest.MonkeyPatch):
    icechunk = pytest.importorskip("icechunk")
    from saev_store.export._repository import container_of, storage_of

    def telling(name: str) -> Callable[..., object]:
        return lambda *given, **options: (name, given, options)

    for name in ("local_filesystem_store", "s3_store", "gcs_store", "http_store"):
        monkeypatch.setattr(icechunk, name, telling(name))
    for name in ("local_filesystem_storage", "s3_storage", "gcs_storage", "VirtualChunkContainer"):
        monkeypatch.setattr(icechunk, name, telling(name))
    for base, store in (
        ("file:///a/b", ("local_filesystem_store", ("/a/b",), {})),
        ("s3://lab/a", ("s3_store", (), {})),
        ("gs://lab/a", ("gcs_store", (), {})),
        ("gcs://lab/a", ("gcs_store", (), {})),
        ("http://host/a", ("http_store", (), {})),
        ("https://host/a", ("http_store", (), {})),
    ):
        assert container_of(base) == ("VirtualChunkContainer", (f"{base}/", store), {})
    for target, expected in (
        ("/a/b", ("local_filesystem_storage", ("/a/b",), {})),
        ("file:///a/b", ("local_filesystem_storage", ("/a/b",), {})),
        ("s3://lab/a/b/", ("s3_storage", (), {"bucket": "lab", "prefix": "a/b", "from_env": True})),
        ("gs://lab/a", ("gcs_storage", (), {"bucket": "lab", "prefix": "a", "from_env": True})),
        ("gcs://lab/a", ("gcs_storage", (), {"bucket": "lab", "prefix": "a", "from_env": True})),
    ):
        assert storage_of(target) == expected
    error = refused(lambda: container_of("az://a/b"))
    assert (error.where, error.remedy) == ("base", "Pass a VirtualChunkContainer as `container`.")
    error = refused(lambda: storage_of("az://a/b"))
    assert (error.where, error.remedy) == ("target", "Pass an icechunk.Storage of your own.")


def test_errors_of_repositories(tmp_path: Path):
    pytest.importorskip("icechunk")
    pytest.importorskip("virtualizarr")
    _, store = made(tmp_path / "s")
    (tmp_path / "file").touch()
    (tmp_path / "link").symlink_to("nowhere")
    for where in (str(tmp_path / "file"), str(tmp_path / "link")):
        error = refused(lambda where=where: write_icechunk(store, where))
        assert (type(error), error.where, error.message, error.remedy) == (StoreExistsError, where, "a file has that name", "Name a new folder.")  # fmt: skip
    for name in ("new", "empty"):
        if name == "empty":
            (tmp_path / name).mkdir()
        error = refused(lambda name=name: write_icechunk(store, str(tmp_path / name), append=True))
        assert (type(error), error.where) == (NotFoundError, str(tmp_path / name))
        assert (error.message, error.remedy) == (
            "there is no repository to append to",
            "Create it without append=True first.",
        )
    assert not (tmp_path / "new").exists()
    error = refused(lambda: write_icechunk(store, str(tmp_path / "r"), base="s3://lab/a b"))
    assert (type(error), error.where) == (ArgumentError, "base")
    assert error.remedy == "Name the store by another path, such as a symbolic link."
    write_icechunk(store, str(tmp_path / "r"), chunks=(1, 3, 5, 8))
    error = refused(lambda: write_icechunk(store, str(tmp_path / "r")))
    assert (type(error), error.remedy) == (StoreExistsError, "Name a new folder, or append to it.")
    error = refused(lambda: write_icechunk(store, str(tmp_path / "r"), append=True))
    assert error.message == f"file://{store.url} is already in the repository"


@pytest.mark.parametrize("name", ["ckpt", "family"])
def test_another_model_does_not_continue_a_repository(name: str, tmp_path: Path):
    pytest.importorskip("icechunk")
    pytest.importorskip("virtualizarr")
    _, first = made(tmp_path / "a", ckpt="one")
    write_icechunk(first, str(tmp_path / "r"), chunks=(1, 3, 5, 8))
    if name == "ckpt":
        _, other = made(tmp_path / "b", ckpt="two")
        told = "ckpt: 'one' in the repository, 'two' here"
    else:
        plain = plain_store(LAYOUT, tail="cut", labelled=True, ckpt="one")
        documents = json.loads(plain.files["metadata.json"]) | {"vit_family": "siglip"}
        files = plain.files | {"metadata.json": json.dumps(documents).encode()}
        folder = PlainStore(files, "x", plain.dense, plain.labels, LAYOUT).write(tmp_path / "b")
        with pytest.warns(match="metadata.json"):
            other = ShardStore.open(folder)
        told = "family: 'clip' in the repository, 'siglip' here"
    error = refused(lambda: write_icechunk(other, str(tmp_path / "r"), append=True))
    assert error.message == f"the store does not continue the repository; {told}"


def test_chunks_that_no_bytes_complete_divide_full_shards_and_the_last_one(tmp_path: Path):
    plain = plain_store(Layout(14, (2, 5), 4, True, 8, 8), tail="cut", labelled=False)
    (tensor, *_) = references(ShardStore.open(plain.write(tmp_path)), base="s3://a/b", inline=False).arrays
    assert tensor.chunk == (2, 2, 5, 8)  # shards of 8 and 6 examples


def test_other_layers_do_not_continue_a_repository(tmp_path: Path):
    pytest.importorskip("icechunk")
    pytest.importorskip("virtualizarr")
    _, first = made(tmp_path / "a", ckpt="one")
    write_icechunk(first, str(tmp_path / "r"), chunks=(1, 3, 5, 8))
    plain = plain_store(Layout(7, (2, 5, 12), 4, True, 8, 3), tail="cut", labelled=True, ckpt="one")
    error = refused(
        lambda: write_icechunk(ShardStore.open(plain.write(tmp_path / "b")), str(tmp_path / "r"), append=True)
    )
    assert error.message == (
        "the store does not continue the repository; layers: (2, 5, 11) in the repository, (2, 5, 12) here"
    )


@pytest.mark.parametrize(
    ("name", "change"),
    [
        ("parts", [1]), ("parts", [None]), ("parts", [{}]), ("parts", [[1]]),
        ("activations", {"shape": ()}),
        ("activations", {"shape": (4,), "chunks": (1,)}),
        ("activations", {"shape": (2**40, 3, 5, 8), "chunks": (1, 3, 5, 8)}),
        ("layer", {"shape": (2**34,), "chunks": (2**34,)}),
        ("layer", {"shape": (3,), "chunks": (2**34,)}),
        ("layer", {"shape": (3, 2)}),
        ("labels", {"shape": (9, 4), "chunks": (1, 4)}),
        ("labels", {"shape": (5, 4), "chunks": (1, 4)}),
        ("labels", {"shape": (7, 9), "chunks": (1, 9)}),
    ],
)  # fmt: skip
def test_a_repository_that_is_no_export_is_refused(name: str, change: Any, tmp_path: Path):
    """Whatever it says, no memory is taken for it, and it stays as it is."""
    icechunk = pytest.importorskip("icechunk")
    pytest.importorskip("virtualizarr")
    import zarr

    _, first = made(tmp_path / "a", ckpt="one")
    _, other = made(tmp_path / "b", ckpt="one", seed=1)
    write_icechunk(first, str(tmp_path / "r"), chunks=(1, 3, 5, 8))
    repository = icechunk.Repository.open(icechunk.local_filesystem_storage(str(tmp_path / "r")))
    session = repository.writable_session("main")
    group = zarr.open_group(session.store, mode="r+")
    if name == "parts":
        group.attrs["parts"] = change
    else:
        dtype = group[name].dtype
        del group[name]
        group.create_array(name, dtype=dtype, compressors=None, **change)
    tip = session.commit("changed")
    error = refused(lambda: write_icechunk(other, str(tmp_path / "r"), append=True))
    assert type(error) is ArgumentError
    assert "is not an export of a store" in error.message or "does not continue" in error.message
    assert repository.lookup_branch("main") == tip


def test_what_is_appended_has_the_chunks_of_the_repository(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    pytest.importorskip("icechunk")
    pytest.importorskip("virtualizarr")
    zarr = pytest.importorskip("zarr")
    import icechunk

    stores = [made(tmp_path / name, ckpt="one", seed=seed) for seed, name in enumerate("abc")]
    for number, (_, store) in enumerate(stores):
        # Labels in chunks of one example; where there is no repository yet, those would be of seven.
        monkeypatch.setattr(_references, "_TOKEN_CHUNK_BYTES", 4 if number == 0 else 1 << 20)
        write_icechunk(store, str(tmp_path / "r"), chunks=(1, 1, 5, 8) if number == 0 else "auto", append=number > 0)
    containers = {
        f"file://{store.url}/": getattr(icechunk.credentials, "LocalFileSystemAccess", None) for _, store in stores
    }
    storage = icechunk.local_filesystem_storage(str(tmp_path / "r"))
    repository = icechunk.Repository.open(storage, authorize_virtual_chunk_access=containers)
    group = zarr.open_group(repository.readonly_session("main").store, mode="r")
    assert (group["labels"].chunks, group["activations"].chunks) == ((1, 4), (1, 1, 5, 8))
    for array, truths in (
        ("activations", [plain.dense for plain, _ in stores]),
        ("labels", [plain.labels for plain, _ in stores]),
    ):
        assert group[array][...].tobytes() == np.concatenate(truths).tobytes()
    assert group.attrs["n_examples"] == 21
    assert [part["url"] for part in group.attrs["parts"]] == [f"file://{store.url}" for _, store in stores]
    for _, store in stores:  # each of them is known
        error = refused(lambda store=store: write_icechunk(store, str(tmp_path / "r"), append=True))
        assert error.message == f"file://{store.url} is already in the repository"


def test_a_container_of_the_caller_is_the_one_that_reads(tmp_path: Path):
    icechunk = pytest.importorskip("icechunk")
    pytest.importorskip("virtualizarr")
    plain, store = made(tmp_path / "s")
    (tmp_path / "moved").symlink_to(store.url)
    # Of the folder above, where readers find the store by another name.
    container = icechunk.VirtualChunkContainer(f"file://{tmp_path}/", icechunk.local_filesystem_store(str(tmp_path)))
    base = f"file://{tmp_path}/moved"
    write_icechunk(store, str(tmp_path / "r"), base=base, container=container)
    storage = icechunk.local_filesystem_storage(str(tmp_path / "r"))
    config = icechunk.Repository.fetch_config(storage)
    assert config is not None
    assert list(config.virtual_chunk_containers or {}) == [f"file://{tmp_path}/"]
    access = getattr(icechunk.credentials, "LocalFileSystemAccess", None)  # older versions have None
    repository = icechunk.Repository.open(storage, authorize_virtual_chunk_access={f"file://{tmp_path}/": access})
    zarr = pytest.importorskip("zarr")
    group = zarr.open_group(repository.readonly_session("main").store, mode="r")
    assert group["activations"][...].tobytes() == plain.dense.tobytes()


def test_a_parser_hands_on_its_options(monkeypatch: pytest.MonkeyPatch):
    pytest.importorskip("virtualizarr")
    from saev_store.export import SaevParser

    given: list[object] = []

    def opened(url: str, **options: object) -> None:
        given.append((url, options))
        raise Told

    monkeypatch.setattr(ShardStore, "open", opened)
    for options in (None, {"key": "x"}):
        with pytest.raises(Told):
            SaevParser(storage_options=options)("s3://lab/a", None)
    assert given == [("s3://lab/a", {"storage_options": None}), ("s3://lab/a", {"storage_options": {"key": "x"}})]
