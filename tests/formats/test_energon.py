"""Energon data sets: equal to what Energon reads, by key, position, part, split, file name and join, in all generations."""

from __future__ import annotations

import dataclasses
import hashlib
import io
import itertools
import json
import os
import pickle
import shutil
import sqlite3
from pathlib import Path

import fsspec
import numpy as np
import pytest
from energon_tars import sample_files, tar_bytes, write_definition
from photographs import noise, png
from transports import CountingTransport

from saev_store.errors import (
    ArgumentError,
    CorruptShardError,
    DocumentError,
    NotFoundError,
    ReadOnlyError,
    SaevStoreError,
    SelectionError,
)
from saev_store.sources import open_source, reopen
from saev_store.sources.energon import SAMPLE_TYPES, CrudeSample, EnergonDataset
from saev_store.sources.energon.filesystem import EnergonFileSystem
from saev_store.sources.energon.prepare import prepare
from saev_store.sources.energon.samples import decode, parse_path, resolve
from saev_store.transport import open_transport

DATA = Path(__file__).parents[1] / "data/energon"
CASES = ("captioning_ratio_split", "crude_varying_parts", "old_7_0_0")
GENERATIONS = DATA.parent / "energon_generations"
CRUDE = DATA / "crude_varying_parts/dataset"


def digests(parts) -> dict[str, str]:
    return {name: hashlib.sha256(data).hexdigest() for name, data in parts.items()}


def refused(call) -> SaevStoreError:
    with pytest.raises(SaevStoreError) as caught:
        call()
    return caught.value


def prepared(folder: Path, shards: dict[str, list[tuple[str, bytes]]], **options: object) -> Path:
    for name, files in shards.items():
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_bytes(tar_bytes(files))
    prepare(folder, split="1,0,0", progress=False, **options)
    return folder


# -- what Energon wrote, against what Energon read ---------------------------------------------------------------------


def check_truth(dataset: EnergonDataset, truth: dict) -> None:
    for entry in truth["random_access"]:
        key, part = entry["key"], entry["part"]
        assert hashlib.sha256(dataset.part(key, part)).hexdigest() == entry["sha256"]
        assert dataset.file(f"{key}.{part}") == dataset.part(dataset.index_of(key), part)
        place = next(each for each in dataset.parts(key) if each.name == part)
        assert (place.offset, place.nbytes) == (entry["offset"], entry["size"])
    rows = truth["sqlite"]["samples"]["rows"]
    by_key = truth["real_reader"]["__by_key__"]
    assert len(dataset) == len(rows)
    for position, (_, key, *_) in enumerate(rows):
        assert (dataset.key(position), dataset.index_of(key)) == (key, position)
        assert digests(dataset[position].parts) == by_key[key] == digests(dataset.raw(key).parts)
    assert [each.key for each in dataset.rows(range(len(rows))[::-1])] == [row[1] for row in rows][::-1]
    for name, expected in truth["real_reader"].items():
        if name == "__by_key__":
            continue
        part = dataset.split(name)
        if isinstance(expected, str):  # the peer refuses a split without shards
            assert len(part) == 0
            continue
        assert (list(part.shards), len(part)) == (expected["shards"], expected["len"])
        found = [(each.key, each.shard, digests(each.parts)) for batch in part.batches(2) for each in batch]
        assert found == [(each["key"], each["shard"], each["parts"]) for each in expected["samples"]]
    assert dataset.validate(deep=True, progress=False).ok


def test_dataset_of_energon_equals_its_truth(tmp_path):
    for case in CASES:
        folder = DATA / case / "dataset"
        truth = json.loads((DATA / case / "expected.json").read_text())
        there = f"memory://{tmp_path}/{case}"
        fsspec.filesystem("memory").put(str(folder), f"{tmp_path}/{case}", recursive=True)
        for transport in (open_transport(folder), open_transport(folder, engine="fsspec"), open_transport(there)):
            with EnergonDataset("", transport=transport) as dataset:
                check_truth(dataset, truth)


def test_datasets_of_energon_6_are_read_without_an_index_of_parts():
    files = sample_files(0, 3)
    dataset = EnergonDataset(GENERATIONS / "6.0.1")
    found = [(f"{each.key}.{part}", data) for each in dataset.split("test") for part, data in each.parts.items()]
    assert found == files
    assert [dataset.part(i // 2, name.rpartition(".")[2]) for i, (name, _) in enumerate(files)] == [
        raw for _, raw in files
    ]
    assert [dataset.key(i) for i in range(3)] == [f"s0000{i}" for i in range(3)]
    assert dataset.validate(deep=True, progress=False).ok
    for i, key in ((1, "s00001"), (2, "s00002")):
        assert (dataset.raw(key).key, dataset.file(f"{key}.txt"), dataset.index_of(key)) == (key, b"text %d\n" % i, i)
    assert type(refused(lambda: EnergonDataset(GENERATIONS / "5.2.0"))) is NotFoundError  # it has no index.sqlite


def test_key_of_another_sample_in_a_tar_of_energon_6_is_refused(tmp_path):
    folder = Path(shutil.copytree(GENERATIONS / "6.0.1", tmp_path / "d"))
    db = sqlite3.connect(folder / ".nv-meta/index.sqlite", isolation_level=None)
    db.execute(
        "UPDATE samples SET byte_offset = (SELECT byte_offset FROM samples WHERE sample_index = 1) WHERE sample_index = 0"
    )
    db.close()
    dataset = EnergonDataset(folder)
    for read in (dataset.raw, dataset.parts, lambda key: dataset.part(key, "txt")):
        error = refused(lambda read=read: read("s00000"))
        assert (type(error), error.where) == (CorruptShardError, f"{folder}/a.tar")


def test_swapped_numbers_of_samples_of_energon_6_are_found_by_deep_validation(tmp_path):
    folder = Path(shutil.copytree(GENERATIONS / "6.0.1", tmp_path / "d"))
    db = sqlite3.connect(folder / ".nv-meta/index.sqlite", isolation_level=None)
    db.execute("UPDATE samples SET sample_index = 1 - sample_index WHERE sample_index < 2")
    db.close()
    (problem,) = EnergonDataset(folder).validate(deep=True, progress=False).errors
    assert (problem.kind, problem.where, problem.lost) == ("corrupt_shard", f"{folder}/a.tar", ((0, 3),))


def test_dataset_opened_again_is_the_same(tmp_path):
    dataset = EnergonDataset(CRUDE).split("val")
    for again in (pickle.loads(pickle.dumps(dataset)), EnergonDataset(CRUDE).split("val")):
        assert [again.key(i) for i in range(len(again))] == ["doc/003", "doc/004"]
        assert again.describe() == dataset.describe()
    described = dataset.describe(digest="full")
    assert (described["format"], described["split"], described["n_samples"]) == ("energon", "val", 2)
    assert described["index_uuid"] == "8eb0cc01-1eaf-43b7-b9e5-3583b6b9d2dc"
    assert [sample.key for sample in reopen(described)] == ["doc/003", "doc/004"]
    assert pickle.loads(pickle.dumps(EnergonDataset(CRUDE))).splits == ("train", "val", "test")
    dataset.close()
    assert dataset.raw("doc/003").parts["tar.gz.note.txt"].decode() == "ünïcode"  # opens again what was closed
    with open_source(CRUDE) as source:
        assert (source.format, len(source), source.url) == ("energon", 5, str(CRUDE))
    shutil.copytree(CRUDE, tmp_path / "d")
    (tmp_path / "d/.nv-meta/index.uuid").unlink()
    assert EnergonDataset(tmp_path / "d").describe()["index_uuid"] == ""
    (tmp_path / "d/parts/data-0.tar").unlink()
    damaged = EnergonDataset("", transport=open_transport(tmp_path / "d", engine="pread"))
    assert type(refused(damaged.describe)) is NotFoundError
    again = pickle.loads(pickle.dumps(damaged.split("val")))
    assert (again.transport.name, again.raw("doc/003").key) == ("pread", "doc/003")
    assert [problem.kind for problem in damaged.validate(progress=False).problems] == ["missing_shard"]


@pytest.mark.skipif(not hasattr(os, "fork"), reason="no fork")
def test_dataset_in_a_forked_child_reads_the_same():
    dataset = EnergonDataset(CRUDE)
    expected = dataset.raw("doc/001").parts
    child = os.fork()
    if child == 0:
        os._exit(dataset.raw("doc/001").parts != expected)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
    assert dataset.raw("doc/001").parts == expected


def test_part_costs_few_requests_of_its_bytes_and_header(tmp_path):
    big = bytes(1_000_000)
    prepared(tmp_path, {"x.tar": [("a.bin", big), ("b.bin", big), ("b.txt", b"here"), ("c.bin", big)]})
    fsspec.filesystem("memory").put(str(tmp_path), str(tmp_path), recursive=True)
    transport = CountingTransport(open_transport(f"memory://{tmp_path}"))
    dataset = EnergonDataset("", transport=transport)
    dataset.part("a", "bin")
    for read, expected, n_requests, nbytes in ((lambda: dataset.part("b", "txt"), b"here", 1, 1024),):
        before = transport.counters
        assert read() == expected
        after = transport.counters
        assert after.operations["get_ranges"] == before.operations["get_ranges"] + n_requests
        assert after.bytes_read - before.bytes_read <= nbytes


# -- positions, keys, splits -------------------------------------------------------------------------------------------


def test_splits_leave_out_what_split_yaml_excludes(tmp_path):
    shards = {f"s/{i:02d}.tar": [(f"{i}{j}.txt", b"%d%d" % (i, j)) for j in range(3)] for i in range(4)}
    folder = prepared(tmp_path, shards)
    (folder / ".nv-meta/split.yaml").write_text(
        "split_parts:\n  train: ['s/{00..02}.tar']\n  all: [s/03.tar, 's/0{1,3}.tar']\n  none: []\n"
        "exclude: ['s/00.tar/0{0,2}', s/02.tar, s/01.tar/nope, s/01.tar/00, nothing, 's/03.tar/31']\n"
    )
    dataset = EnergonDataset(folder)
    keys = {name: [sample.key for sample in dataset.split(name)] for name in dataset.splits}
    assert keys == {
        "train": ["01", "10", "11", "12"],
        "all": ["30", "32", "10", "11", "12", "30", "32"],
        "none": [],
    }
    assert len(dataset) == 12
    train = dataset.split("train")
    for key in (f"{i}{j}" for i in range(4) for j in range(3)):
        if key in keys["train"]:
            assert train.index_of(key) == keys["train"].index(key)
            assert train.part(key, "txt") == train.raw(key).parts["txt"] == key.encode()
        else:
            for read in (train.index_of, train.raw, lambda key: train.part(key, "txt")):
                assert type(refused(lambda read=read, key=key: read(key))) is SelectionError
    for each in (dataset, dataset.split("all")):
        assert len(pickle.loads(pickle.dumps(each))) == len(reopen(each.describe())) == len(each)
    (folder / "s/01.tar").unlink()
    assert EnergonDataset(folder).split("train").validate(progress=False).lost == ((1, 4),)


def test_older_split_json_is_read_and_newest_document_counts(tmp_path):
    folder = prepared(tmp_path, {"a.tar": sample_files(0, 2), "b.tar": sample_files(2, 3)})
    meta = folder / ".nv-meta"
    (meta / "split.json").write_text('{"split_parts": {"one": ["b.tar"]}}')
    (meta / ".info.yaml").write_text("shard_counts: {other.tar: 9}")
    assert EnergonDataset(folder).splits == ("train", "val", "test")
    (meta / "split.yaml").unlink()
    (meta / "dataset.yaml").unlink()
    dataset = EnergonDataset(folder)
    assert (dataset.splits, dataset.split("one").shards, dataset.sample_type) == (("one",), ("b.tar",), None)
    (meta / "split.json").unlink()
    dataset = EnergonDataset(folder)
    assert (dataset.splits, len(dataset.split("all"))) == (("all",), 5)
    assert set(dataset.sample(0).parts) == {"json", "txt"}


def test_samples_of_one_key_are_found_by_position(tmp_path, capfd):
    """As Energon 7.0 allowed."""
    folder = Path(shutil.copytree(DATA / "old_7_0_0/dataset", tmp_path / "d"))
    (folder / "shards/shard_001.tar").write_bytes((folder / "shards/shard_000.tar").read_bytes())
    db = sqlite3.connect(folder / ".nv-meta/index.sqlite", isolation_level=None)
    db.execute("UPDATE samples SET sample_key = 'sample_000' || sample_index WHERE tar_file_id < 2")
    db.execute(
        "UPDATE sample_parts SET content_byte_size = (SELECT content_byte_size FROM sample_parts AS s WHERE s.tar_file_id = 0"
        " AND s.sample_index = sample_parts.sample_index AND s.part_name = sample_parts.part_name) WHERE tar_file_id = 1"
    )
    db.close()
    dataset = EnergonDataset(folder)
    files, name = EnergonFileSystem(dataset.url), f"sample_0000.{dataset.parts(0)[0].name}"
    for read in (dataset.raw, dataset.index_of, dataset.parts, lambda key: dataset.part(key, "txt")):
        assert type(refused(lambda read=read: read("sample_0000"))) is SelectionError
    assert type(refused(lambda: files.cat_file(name))) is NotFoundError
    (folder / ".nv-meta/split.yaml").write_text(
        "split_parts:\n  train: ['shards/shard_{000..001}.tar']\nexclude: [shards/shard_001.tar/sample_0000]\n"
    )
    kept = [(sample.shard[-7:], sample.sample_index) for sample in EnergonDataset(folder).split("train")]
    assert kept == [("000.tar", 0), ("000.tar", 1), ("001.tar", 1)]


def test_arguments_that_name_nothing_are_refused(tmp_path):
    folder = prepared(tmp_path / "d", {"a.tar": sample_files(0, 2)})
    dataset = EnergonDataset(folder)
    for call, kind, where in (
        (lambda: dataset[2], SelectionError, "sample"),
        (lambda: dataset.rows([0, 2]), SelectionError, "sample"),
        (lambda: dataset.raw("x"), SelectionError, "key"),
        (lambda: dataset.part("x", "txt"), SelectionError, "key"),
        (lambda: dataset.raw("\ud800"), SelectionError, "key"),
        (lambda: dataset.part(0, "jpg"), SelectionError, "part"),
        (lambda: dataset.part("s00000", "jpg"), SelectionError, "part"),
        (lambda: dataset.file("nodot"), NotFoundError, str(folder)),
        (lambda: dataset.split("x"), SelectionError, "split"),
        (lambda: dataset.split(1), SelectionError, "split"),
        (lambda: dataset.validate(deep=2), ArgumentError, "deep"),
        (lambda: EnergonDataset(tmp_path), NotFoundError, str(tmp_path)),
        (lambda: parse_path("a[", where="here"), ArgumentError, "here"),
    ):
        error = refused(call)
        assert (type(error), error.where) == (kind, where)
    assert (dataset[-1].key, dataset.key(-2), len(dataset.rows([]))) == ("s00001", "s00000", 0)
    assert repr(dataset[0]) == "RawSample(key='s00000', shard='a.tar', sample_index=0)"


# -- parts and fields --------------------------------------------------------------------------------------------------


def test_captions_and_crude_samples_are_decoded_as_dataset_yaml_says():
    dataset = EnergonDataset(DATA / "captioning_ratio_split/dataset")
    for i in range(6):
        sample = dataset.sample(i)
        assert (type(sample).__name__, sample.__key__, sample.__subflavors__) == (
            "CaptioningSample", f"sample_{i:04d}", None,
        )  # fmt: skip
        assert sample.__restore_key__ == (dataset.url, f"shards/shard_{i // 2:03d}.tar", i % 2)
        assert sample.caption == f"caption number {i}\n"
        assert (sample.image.dtype, sample.image.ndim, sample.image.shape[2]) == (np.uint8, 3, 3)
    assert dataset.decode(dataset[1]).caption == "caption number 1\n"
    crude = EnergonDataset(CRUDE).sample("doc/003")
    assert isinstance(crude, CrudeSample)
    assert crude.parts["tar.gz.note.txt"].decode() == "ünïcode"


def test_sample_with_an_image_is_decoded_and_survives_a_pickle(tmp_path):
    pixels = noise(3, 4, 5)
    write_definition(tmp_path, "CaptioningSample", {"image": "png", "caption": "txt"})
    folder = prepared(tmp_path, {"a.tar": [("a.png", png(pixels)), ("a.txt", b"t")]})
    sample = EnergonDataset(folder).sample("a")
    np.testing.assert_array_equal(sample.image, pixels)
    assert (sample.image.dtype, sample.caption) == (np.uint8, "t")
    again = pickle.loads(pickle.dumps(sample))
    assert (type(again), again.caption, again.__key__) == (SAMPLE_TYPES["CaptioningSample"], "t", "a")


def npy(array, **options) -> bytes:
    buffer = io.BytesIO()
    np.save(buffer, array, **options)
    return buffer.getvalue()


def test_parts_are_decoded_by_their_last_ending():
    pytest.importorskip("msgpack")
    pickled = b"cos\nsystem\n(S'true'\ntR."
    for endings, raw, value in (
        ("txt text transcript x.TXT", "ü 1".encode(), "ü 1"),
        ("cls cls2 index inx id x.Cls", b" 12\n", 12),
        ("cls", b"1" * 70, int("1" * 70)),
        ("json jsn detail.json", b'{"a": [1]}', {"a": [1]}),
        ("mp msg", b"\x81\xa1a\x01", {"a": 1}),
        ("bin ten pyd pickle pth npz tar xtxt txt.gz pkl pt dill", pickled, pickled),
    ):
        for ending in endings.split():
            found = decode(ending, raw, where="x")
            assert (found, type(found)) == (value, type(value))
    for kind, order, shape in itertools.product(("<f4", ">i2", "|b1", "<U3"), "CF", ((), (0, 3), (2, 3))):
        array = np.asarray(np.arange(int(np.prod(shape))).reshape(shape).astype(kind), order=order)
        found = decode("x.npy", npy(array), where="x")
        assert (found.dtype, found.shape, found.flags.writeable) == (array.dtype, shape, True)
        np.testing.assert_array_equal(found, array)


def test_parts_that_do_not_decode_are_refused():
    pytest.importorskip("msgpack")
    objects = npy(np.array([{}], dtype=object), allow_pickle=True)
    huge = npy(np.arange(6).reshape(2, 3)).replace(b"(2, 3)", b"(2, 9999999999)")[:128]
    empty = b"{'descr': '|V0', 'fortran_order': False, 'shape': (4611686018427387904,)}"
    for part, raw in (
        ("json", b"{"), ("json", b"[" * 10**5), ("txt", b"\xff"), ("cls", b"x"), ("cls", b"7.5"), ("cls", b""), ("id", b"0x7"),
        ("cls", b"9" * 5000), ("npy", b"x"), ("npy", objects), ("npy", huge), ("npy", npy(np.zeros(2)) + b"x"),
        ("npy", b"\x93NUMPY\x01\x00" + len(empty).to_bytes(2, "little") + empty), ("jpg", b"no"),
        ("png", b"\x89PNG\r\n\x1a\n" + bytes(30)), ("mp", b"\xc1"), ("mp", b"\xdd\xff\xff\xff\xff"),
    ):  # fmt: skip
        error = refused(lambda part=part, raw=raw: decode(part, raw, where="s"))
        assert (type(error), error.where) == (DocumentError, "s")


def test_field_paths_take_the_first_part_that_the_sample_has():
    parts = {"json": b'{"a": {"b": ["x", "y"]}, "n": null, "0": "zero"}', "txt": b"t"}
    for path, expected in (
        ("json[a][b][1]", "y"), ("json[nope],txt", "t"), ("nope, txt", "t"), ("json[n]", None), ("json[0]", "zero"),
    ):  # fmt: skip
        assert resolve(parse_path(path, where="x"), parts, where="x") == expected
    for path in ("json[a][b][2]", "json[a][b][-1]", "json[a][b][x]", "nope", "txt[0]"):
        assert type(refused(lambda path=path: resolve(parse_path(path, where="x"), parts, where="x"))) is DocumentError
    for path in ("", "a[", "a]b", "[a]", "a,", "a[b]c"):
        assert type(refused(lambda path=path: parse_path(path, where="x"))) is ArgumentError


def test_sample_types_have_the_fields_of_the_specification():
    expected = {
        "Sample": ("", ""), "CaptioningSample": ("image caption", ""), "ImageSample": ("image", ""),
        "ImageClassificationSample": ("image", "label label_name"), "InterleavedSample": ("sequence", ""),
        "MultiChoiceVQASample": ("image context", "choices correct_choice_idx"),
        "OCRSample": ("image text", "block_boxes block_classes block_text lines_boxes lines_text words_boxes words_text chars_boxes chars_text"),
        "TextSample": ("text", ""), "VidQASample": ("video context", "answers answer_weights"),
        "VQASample": ("image context", "answers answer_weights"),
        "VQAOCRSample": ("image context text", "answers answer_weights words_boxes words_text"),
    }  # fmt: skip
    assert expected.keys() == SAMPLE_TYPES.keys()
    for name, (required, optional) in expected.items():
        fields = {**dict.fromkeys(required.split(), True), **dict.fromkeys(optional.split(), False)}
        found = [each for each in dataclasses.fields(SAMPLE_TYPES[name]) if not each.name.startswith("__")]
        assert {each.name: each.default is dataclasses.MISSING for each in found} == fields


# -- as files ----------------------------------------------------------------------------------------------------------


def test_filesystem_reads_parts_by_name(tmp_path):
    fsspec.register_implementation("energon", EnergonFileSystem, clobber=True)
    fs = EnergonFileSystem(str(CRUDE))
    assert fs.cat_file("doc/003.tar.gz.note.txt", 0, 2) == "ü".encode()
    assert (fs.cat_file("doc/003.tar.gz.note.txt", -4), fs.cat("doc/002.txt")) == (b"code", b"")
    with fs.open("doc/000.json", block_size=3) as file:
        assert json.load(file) == {"n": 0}
    for path in ("nope", "doc/nope", "doc/009.json", "x/y.z", "doc/00"):
        assert type(refused(lambda path=path: fs.cat_file(path))) is NotFoundError
    assert type(refused(lambda: fs.open("doc/000.json", "wb"))) is ReadOnlyError
    for address in (f"energon://doc/000.json::{CRUDE}", f"energon://doc/000.json::file://{CRUDE}"):
        with fsspec.open(address) as file:
            assert file.read() == b'{"n": 0}'
    files = fsspec.open_files([f"energon://doc/00{i}.json::{CRUDE}" for i in (0, 4)])
    assert [file.open().read() for file in files] == [b'{"n": 0}', b'{"n": 4}']
    fsspec.filesystem("memory").put(str(CRUDE), str(tmp_path), recursive=True)
    with fsspec.open(f"energon://doc/004.json::memory://{tmp_path}") as file:
        assert file.read() == b'{"n": 4}'


def test_filesystem_after_a_new_preparation_reads_the_new_samples(tmp_path):
    fsspec.register_implementation("energon", EnergonFileSystem, clobber=True)
    for name in ("a", "b"):
        prepared(tmp_path, {"x.tar": [(f"{name}.txt", name.encode())]}, overwrite=True)
        with fsspec.open(f"energon://{name}.txt::{tmp_path}") as file:
            assert file.read() == name.encode()
