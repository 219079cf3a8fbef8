"""Samples of Energon data sets joined with files of others, and the metadata sets that name them."""

from __future__ import annotations

import zipfile
from pathlib import Path

import fsspec
import pytest
from energon_tars import METADATASET_HEAD, sample_files, tar_bytes, write_metadataset

from saev_store.errors import (
    ArgumentError,
    DocumentError,
    NotFoundError,
    SaevStoreError,
    SelectionError,
    UnsafeContentError,
)
from saev_store.sources import Source, reopen
from saev_store.sources.energon import EnergonDataset
from saev_store.sources.energon.joins import FolderFiles, JoinedDataset
from saev_store.sources.energon.metadataset import open_metadataset, read_metadataset
from saev_store.sources.energon.prepare import prepare
from saev_store.transport import open_transport

MEDIA = {f"img/{i}.jpg": b"jpeg %d" % i for i in range(3)}


def refused(call) -> SaevStoreError:
    with pytest.raises(SaevStoreError) as caught:
        call()
    return caught.value


def dataset(folder: Path, files: list[tuple[str, bytes]]) -> EnergonDataset:
    folder.mkdir(parents=True)
    (folder / "0.tar").write_bytes(tar_bytes(files))
    prepare(folder, split="1,0,0", progress=False)
    return EnergonDataset(folder)


@pytest.fixture
def texts(tmp_path) -> EnergonDataset:
    return dataset(tmp_path / "texts", [
        ("a.json", b'{"image": " img/1.jpg\\n", "all": ["img/1.jpg", "img/2.jpg"]}'), ("b.json", b'{"all": [], "image": null}'),
        ("c.json", b'{"image": "img/nope.jpg", "all": [7]}'), ("d.json", b'{"image": "../etc/passwd"}'), ("e.json", b"{"),
        ("f.json", b'{"image": 7}'),
    ])  # fmt: skip


@pytest.fixture(params=["dataset", "folder", "transport", "far"])
def images(request, tmp_path):
    if request.param == "dataset":
        return dataset(tmp_path / "images", list(MEDIA.items()))
    if request.param == "far":
        fsspec.filesystem("memory").pipe({f"{tmp_path}/{name}": data for name, data in MEDIA.items()})
        return FolderFiles(f"memory://{tmp_path}")
    for name, data in MEDIA.items():
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_bytes(data)
    if request.param == "folder":
        return FolderFiles(tmp_path)
    return FolderFiles("", transport=open_transport(str(tmp_path)))


def test_joined_samples_have_the_files_that_they_name(texts, images):
    joined = JoinedDataset(texts, {"one": images, "many": images}, names={"one": "json[image]", "many": "json[all]"})
    assert joined[0].media == {
        "one": {"img/1.jpg": b"jpeg 1"}, "many": {"img/1.jpg": b"jpeg 1", "img/2.jpg": b"jpeg 2"},
    }  # fmt: skip
    assert list(joined[0].media["many"]) == ["img/1.jpg", "img/2.jpg"]
    assert joined.joined("b").media == {"one": {}, "many": {}}
    assert (len(joined), joined.key(-1), joined.index_of("b"), joined.splits) == (6, "f", 1, texts.splits)
    assert isinstance(joined, Source)
    assert joined.rows([1, 0]) == [joined[1], joined[0]] == [joined.split("train")[i] for i in (1, 0)]
    assert "jpeg" not in repr(joined[0])
    assert joined.names(texts[3], "many") == []
    assert joined.names(texts[0], "many") == ["img/1.jpg", "img/2.jpg"]
    assert joined.validate(progress=False).ok
    with joined, reopen(joined.describe()) as again:
        assert again[0] == joined[0].sample


def test_joined_samples_that_name_no_file_are_refused(texts, images):
    one = JoinedDataset(texts, {"one": images}, names={"one": "json[image]"})
    many = JoinedDataset(texts, {"one": images}, names={"one": "json[all]"})
    assert type(refused(lambda: one[2])) is NotFoundError
    assert isinstance(refused(lambda: one[3]), (UnsafeContentError, NotFoundError))
    for read in (lambda: many[2], lambda: one[4], lambda: one.rows([0, 4]), lambda: one[5]):
        assert type(refused(read)) is DocumentError
    for names, auxiliary, where in (
        ({}, {"one": images}, "names"), ({"one": "json", "two": "json"}, {"one": images}, "names"), ({"one": "x["}, {"one": images}, "names['one']"),
    ):  # fmt: skip
        error = refused(lambda names=names, auxiliary=auxiliary: JoinedDataset(texts, auxiliary, names=names))
        assert (type(error), error.where) == (ArgumentError, where)


def test_folder_files_never_leave_the_folder(tmp_path):
    (tmp_path / "d").mkdir()
    (tmp_path / "x").write_bytes(b"secret")
    (tmp_path / "d/..x").write_bytes(b"fine")
    files = FolderFiles(tmp_path / "d")
    assert files.file("..x") == b"fine"
    for name in ("../x", f"{tmp_path}/x", "a/../../x", "", "a\\..\\x", "file:///x", "a\0"):
        assert type(refused(lambda name=name: files.file(name))) is UnsafeContentError
    assert type(refused(lambda: files.file("nope"))) is NotFoundError
    files.close()


def test_metadataset_opens_its_splits_as_joined_datasets(tmp_path):
    write_metadataset(tmp_path)
    found = read_metadataset(tmp_path / "meta.yaml")
    assert {name: (each.primary, each.split) for name, each in found.items()} == {
        "train": (f"{tmp_path}/texts", "train"), "val": (f"{tmp_path}/texts", "val"), "twice": (f"{tmp_path}/texts", "train"),
    }  # fmt: skip
    train = found["train"]
    assert (dict(train.auxiliary), dict(train.folders), dict(train.subflavors)) == (
        {"images": f"{tmp_path}/images"}, {"clips": f"{tmp_path}/files"}, {"lang": "en"},
    )  # fmt: skip
    names = {"images": "json[image]", "clips": "json[clip]"}
    with open_metadataset(tmp_path / "meta.yaml", names=names, engine="pread") as joined:
        assert {each.transport.name for each in (joined.primary, *joined.auxiliary.values())} == {"pread"}
        assert [sample.sample.key for sample in joined] == ["0", "1", "2", "3"]
        assert joined[2].media == {
            "images": {"img/2.jpg": b"jpeg 2"}, "clips": {"img/0.jpg": b"jpeg 0", "img/2.jpg": b"jpeg 2"},
        }  # fmt: skip
    with open_metadataset(tmp_path / "meta.yaml", "val", names={}) as joined:
        assert [(sample.sample.key, sample.media) for sample in joined] == [("4", {}), ("5", {})]
    assert refused(lambda: open_metadataset(tmp_path / "meta.yaml", "x", names={})).where == "split"
    assert type(refused(lambda: open_metadataset(tmp_path / "meta.yaml", "x", names={}))) is SelectionError
    error = refused(lambda: open_metadataset(tmp_path / "meta.yaml", "val", names={"clips": "json[clip]"}))
    assert (type(error), error.where) == (ArgumentError, "names")


def test_metadataset_addresses_are_below_its_folder_unless_allowed(tmp_path):
    path = tmp_path / "meta.yaml"
    for address, full, below in (
        ("a/./b", f"{tmp_path}/a/b", True), (".", str(tmp_path), True), ("/data/x", "/data/x", False),
        ("s3://lab/x", "s3://lab/x", False), ("../x", f"{tmp_path}/../x", False), ("zip://a::b.zip", "zip://a::b.zip", False),
    ):  # fmt: skip
        for key, text in (("path", address), ("folder", f"filesystem://{address}")):
            aux = f"aux: {{x: '{text}'}}" if key == "folder" else ""
            path.write_text(f"{METADATASET_HEAD}  train: {{path: '{address if key == 'path' else 'x'}', {aux}}}\n")
            if not below:
                assert type(refused(lambda: read_metadataset(path))) is UnsafeContentError
            found = read_metadataset(path, outside_ok=True)["train"]
            assert (found.primary if key == "path" else found.folders["x"]) == full
    path.write_text(f"{METADATASET_HEAD}  train: {{path: x, aux: {{a: 'filesystem+s3://lab/x', b: y}}}}\n")
    found = read_metadataset(path, outside_ok=True)["train"]
    assert (dict(found.folders), dict(found.auxiliary)) == ({"a": "s3://lab/x"}, {"b": f"{tmp_path}/y"})


def test_metadataset_in_an_archive_names_folders_of_the_archive(tmp_path):
    with zipfile.ZipFile(tmp_path / "all.zip", "w") as archive:
        archive.writestr(
            "d/meta.yaml", f"{METADATASET_HEAD}  train: {{path: texts, aux: {{files: 'filesystem://./x//y'}}}}\n"
        )
    found = read_metadataset(f"zip://d/meta.yaml::file://{tmp_path}/all.zip")["train"]
    assert found.primary == f"zip://d/texts::file://{tmp_path}/all.zip"
    assert found.folders == {"files": f"zip://d/x/y::file://{tmp_path}/all.zip"}


def test_metadatasets_of_other_kinds_are_refused(tmp_path):
    path = tmp_path / "meta.yaml"
    for text in (
        "[]", "__module__: megatron.energon\n__class__: Metadataset\nsplits: {}\n", "__module__: x\n__class__: MetadatasetV2\n",
        METADATASET_HEAD, f"{METADATASET_HEAD}  train: []\n", f"{METADATASET_HEAD}  train: {{blend: [], path: x}}\n",
        *(f"{METADATASET_HEAD}  train: {{path: x, {name}: 1}}\n" for name in ("join", "subset", "split_config", "blend_epochized")),
        f"{METADATASET_HEAD}  train: {{aux: {{}}}}\n", f"{METADATASET_HEAD}  train: {{path: 5}}\n", f"{METADATASET_HEAD}  train: {{path: ''}}\n",
        f"{METADATASET_HEAD}  train: {{path: x, aux: 5}}\n", f"{METADATASET_HEAD}  train: {{path: x, aux: {{a: 5}}}}\n",
        f"{METADATASET_HEAD}  train: {{path: x, subflavors: 5}}\n", f"{METADATASET_HEAD}  train: {{path: x, split_part: 5}}\n",
        "a: [" * 100, "a: *x", "\0",
    ):  # fmt: skip
        path.write_text(text)
        error = refused(lambda: read_metadataset(path))
        assert (type(error), error.where) == (DocumentError, str(path)), text
    path.write_text(f"{METADATASET_HEAD}  train: {{path: !!python/name:os.system x}}\n")
    assert type(refused(lambda: read_metadataset(path))) is UnsafeContentError


def test_metadataset_reads_the_split_that_it_names(tmp_path):
    for name in "ab":
        (tmp_path / "d").mkdir(exist_ok=True)
        (tmp_path / "d" / f"{name}.tar").write_bytes(tar_bytes(sample_files(ord(name), 1)))
    prepare(tmp_path / "d", split_parts=["train:a", "val:b"], progress=False)
    (tmp_path / "meta.yaml").write_text(
        f"{METADATASET_HEAD}  train: {{path: d, split_part: val}}\n  val: {{path: d}}\n"
    )
    for split in ("train", "val"):
        with open_metadataset(tmp_path / "meta.yaml", split, names={}) as joined:
            assert [sample.sample.key for sample in joined.rows(slice(None))] == ["s00098"]
