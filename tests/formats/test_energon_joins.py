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
from saev_store.sources.energon.joins import JoinedDataset, open_metadataset
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
        ("f.json", b'{"image": 7}'), ("g.json", b'{"image": "a\\\\..\\\\x"}'), ("h.json", b'{"image": "file:///etc/passwd"}'),
    ])  # fmt: skip


@pytest.fixture(params=["dataset", "folder", "far"])
def images(request, tmp_path):
    if request.param == "dataset":
        return dataset(tmp_path / "images", list(MEDIA.items()))
    if request.param == "far":
        fsspec.filesystem("memory").pipe({f"{tmp_path}/{name}": data for name, data in MEDIA.items()})
        return open_transport(f"memory://{tmp_path}")
    for name, data in MEDIA.items():
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_bytes(data)
    return open_transport(tmp_path)


def test_joined_samples_have_the_files_that_they_name(texts, images):
    joined = JoinedDataset(texts, {"one": images, "many": images}, names={"one": "json[image]", "many": "json[all]"})
    assert joined[0].media == {
        "one": {"img/1.jpg": b"jpeg 1"}, "many": {"img/1.jpg": b"jpeg 1", "img/2.jpg": b"jpeg 2"},
    }  # fmt: skip
    assert list(joined[0].media["many"]) == ["img/1.jpg", "img/2.jpg"]
    assert joined[1].media == {"one": {}, "many": {}}
    assert (len(joined), joined.splits, joined[1].key, joined.key(1)) == (8, texts.splits, "b", "b")
    assert isinstance(joined, Source)
    assert joined.rows([1, 0]) == [joined[1], joined[0]] == [joined.split("train")[i] for i in (1, 0)]
    assert "jpeg" not in repr(joined[0])
    with joined, reopen(joined.describe()) as again:
        assert again[0].parts == joined[0].parts


def test_joined_samples_that_name_no_file_are_refused(texts, images):
    one = JoinedDataset(texts, {"one": images}, names={"one": "json[image]"})
    many = JoinedDataset(texts, {"one": images}, names={"one": "json[all]"})
    assert type(refused(lambda: one[2])) is NotFoundError
    for position in (3, 6, 7):
        assert type(refused(lambda position=position: one[position])) is UnsafeContentError
    for read in (lambda: many[2], lambda: one[4], lambda: one.rows([0, 4]), lambda: one[5]):
        assert type(refused(read)) is DocumentError
    for names, auxiliary in (
        ({}, {"one": images}), ({"one": "json", "two": "json"}, {"one": images}), ({"one": "x["}, {"one": images}),
    ):  # fmt: skip
        error = refused(lambda names=names, auxiliary=auxiliary: JoinedDataset(texts, auxiliary, names=names))
        assert (type(error), error.where) == (ArgumentError, "names")


def test_metadataset_opens_its_splits_as_joined_datasets(tmp_path):
    path = write_metadataset(tmp_path) / "meta.yaml"
    names = {"images": "json[image]", "clips": "json[clip]"}
    with open_metadataset(path, names=names) as joined:
        assert [sample.key for sample in joined] == ["0", "1", "2", "3"]
        assert joined[2].media == {
            "images": {"img/2.jpg": b"jpeg 2"}, "clips": {"img/0.jpg": b"jpeg 0", "img/2.jpg": b"jpeg 2"},
        }  # fmt: skip
    with open_metadataset(path, "val", names={}) as joined:
        assert [(sample.key, sample.media) for sample in joined] == [("4", {}), ("5", {})]
    for split, wrong, kind, where in (
        ("x", {}, SelectionError, "split"), ("val", {"clips": "json[clip]"}, ArgumentError, "names"),
    ):  # fmt: skip
        error = refused(lambda split=split, wrong=wrong: open_metadataset(path, split, names=wrong))
        assert (type(error), error.where) == (kind, where)
    with zipfile.ZipFile(tmp_path / "all.zip", "w") as archive:
        for each in tmp_path.rglob("*"):
            if each.is_file() and each.suffix != ".zip":
                archive.write(each, f"d/{each.relative_to(tmp_path)}")
    with open_metadataset(f"zip://d/meta.yaml::file://{tmp_path}/all.zip", names=names) as joined:
        assert joined[2].media["clips"] == {"img/0.jpg": b"jpeg 0", "img/2.jpg": b"jpeg 2"}


def test_metadataset_addresses_are_below_its_folder_unless_allowed(tmp_path):
    folder = tmp_path / "d"
    folder.mkdir()
    write_metadataset(folder)
    path = folder / "meta.yaml"
    for address, below in (
        ("./texts", True), ("texts/.", True), (f"{folder}/texts", False), (f"file://{folder}/texts", False), ("../d/texts", False),
    ):  # fmt: skip
        for split in (
            f"{{path: '{address}'}}",
            f"{{path: texts, aux: {{x: '{address}', y: 'filesystem://{address}'}}}}",
        ):
            path.write_text(f"{METADATASET_HEAD}  train: {split}\n")
            names = {"x": "json[n]", "y": "json[n]"} if "aux" in split else {}
            if not below:
                assert type(refused(lambda names=names: open_metadataset(path, names=names))) is UnsafeContentError
            with open_metadataset(path, names=names, outside_ok=True) as joined:
                assert len(joined) == 4
                assert {each.url.rpartition("/")[2] for each in joined.auxiliary.values()} <= {"texts"}


def test_metadatasets_of_other_kinds_are_refused(tmp_path):
    path = tmp_path / "meta.yaml"
    for text in (
        "[]", "__module__: megatron.energon\n__class__: Metadataset\nsplits: {}\n", "__module__: x\n__class__: MetadatasetV2\n",
        METADATASET_HEAD, f"{METADATASET_HEAD}  train: []\n", f"{METADATASET_HEAD}  train: {{blend: [], path: x}}\n",
        *(f"{METADATASET_HEAD}  train: {{path: x, {name}: 1}}\n" for name in ("join", "subset", "split_config", "blend_epochized")),
        f"{METADATASET_HEAD}  train: {{aux: {{}}}}\n", f"{METADATASET_HEAD}  train: {{path: 5}}\n", f"{METADATASET_HEAD}  train: {{path: ''}}\n",
        f"{METADATASET_HEAD}  train: {{path: x, aux: 5}}\n", f"{METADATASET_HEAD}  train: {{path: x, aux: {{a: 5}}}}\n",
        f"{METADATASET_HEAD}  train: {{path: x, split_part: 5}}\n", "a: [" * 100, "a: *x", "\0",
    ):  # fmt: skip
        path.write_text(text)
        error = refused(lambda: open_metadataset(path, names={}))
        assert (type(error), error.where) == (DocumentError, str(path)), text
    path.write_text(f"{METADATASET_HEAD}  train: {{path: !!python/name:os.system x}}\n")
    assert type(refused(lambda: open_metadataset(path, names={}))) is UnsafeContentError


def test_metadataset_reads_the_split_that_it_names(tmp_path):
    for name in "ab":
        (tmp_path / "d").mkdir(exist_ok=True)
        (tmp_path / "d" / f"{name}.tar").write_bytes(tar_bytes(sample_files(ord(name), 1)))
    prepare(tmp_path / "d", split="1,1,0", progress=False)
    text = f"{METADATASET_HEAD}  train: {{path: d, split_part: val}}\n  val: {{path: d}}\n"
    (tmp_path / "meta.yaml").write_text(text)
    for split in ("train", "val"):
        with open_metadataset(tmp_path / "meta.yaml", split, names={}) as joined:
            assert [sample.key for sample in joined.rows(slice(None))] == ["s00098"]
