"""Rules of Energon, MMIDIDX and LLMBATCH that single values decide; the truth is written down, or made from the formats alone."""

from __future__ import annotations

import sqlite3
import zipfile
from pathlib import Path

import pytest
from energon_tars import METADATASET_HEAD as HEAD
from energon_tars import sample_files, tar_bytes

from saev_store.errors import ArgumentError, DocumentError, UnsafeContentError
from saev_store.sources import open_source
from saev_store.sources.convert import samples_to_documents
from saev_store.sources.energon import EnergonDataset
from saev_store.sources.energon.index_sqlite import SqliteIndex
from saev_store.sources.energon.metadataset import read_metadataset
from saev_store.sources.energon.prepare import prepare
from saev_store.sources.energon.split import SplitPlan, expand
from saev_store.sources.mmididx import IndexedDataset
from saev_store.transport import MemoryTransport

# -- patterns and splits -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("pattern", "names"),
    [  # what bash prints for `echo PATTERN`
        ("{0..10}", "0 1 2 3 4 5 6 7 8 9 10"),
        ("{10..0..5}", "10 5 0"),
        ("{00..2}", "00 01 02"),
        ("{5..3}", "5 4 3"),
        ("{1..-1}", "1 0 -1"),
        ("{-2..2..2}", "-2 0 2"),
        ("{9..12}", "9 10 11 12"),
        ("{4..1..-2}", "4 2"),
        ("{0..0}", "0"),
        ("{00..100..50}", "000 050 100"),
        ("{1..03}", "01 02 03"),
    ],
)
def test_ranges_are_those_of_bash(pattern: str, names: str):
    assert expand(pattern, where="x") == names.split()


def test_patterns_of_one_split_add_up():
    counts = {"a.tar": 1, "b.tar": 1, "c.tar": 1, "empty.tar": 0}
    plan = SplitPlan(None, ["train:c", "val:b", "train:a", "train:empty"])
    assert plan.assign(counts) == ({"train": ("a.tar", "c.tar"), "val": ("b.tar",)}, [])
    found, problems = SplitPlan(None, ["train:[ab]", "val:b"]).assign(counts)
    assert found == {"train": ("a.tar", "b.tar"), "val": ("b.tar",)}
    assert [(each.kind, each.where, each.message) for each in problems] == [
        ("split_overlap", "b.tar", "it is in train and val"),
        ("in_no_split", "c.tar", "it is in no split"),
    ]


# -- preparing -----------------------------------------------------------------------------------------------------------


def tars(folder: Path, *names: str) -> Path:
    for i, name in enumerate(names):
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_bytes(tar_bytes(sample_files(i * 10, 2)))
    return folder


def test_tars_are_in_the_order_of_folders_and_hidden_ones_are_left_out(tmp_path: Path):
    """By whole names of folders: `a` is before `a-b`, though `a-b/` is before `a/` as text."""
    tars(tmp_path, "b.tar", "a-b/0.tar", "a/1.tar", "a/0.tar", ".old/0.tar", "a/.trash/0.tar", "a/.x.tar")
    made = prepare(tmp_path, split="1,0,0", progress=False)
    assert list(made.shards) == ["a/0.tar", "a/1.tar", "a-b/0.tar", "b.tar"]
    assert made.n_samples == 8
    assert made.n_parts == 16


@pytest.mark.parametrize(
    ("exclude", "left"), [("1.tar$", ["a/0.tar"]), ("^1", ["a/0.tar", "a/1.tar"]), ("a/0", ["a/1.tar"])]
)
def test_what_is_left_out_may_match_anywhere(exclude: str, left: list[str], tmp_path: Path):
    tars(tmp_path, "a/0.tar", "a/1.tar")
    assert list(prepare(tmp_path, split="1,0,0", exclude=exclude, progress=False).shards) == left


def test_preparing_again_keeps_what_was_not_given_and_replaces_what_was(tmp_path: Path):
    tars(tmp_path, "0.tar", "1.tar")
    meta = tmp_path / ".nv-meta"
    prepare(
        tmp_path, split_parts=["train:0", "val:1"], sample_type="TextSample", field_map={"text": "txt"}, progress=False
    )
    definition, split = (meta / "dataset.yaml").read_bytes(), (meta / "split.yaml").read_bytes()
    assert b"TextSample" in definition
    again = prepare(tmp_path, overwrite=True, progress=False)
    assert (meta / "dataset.yaml").read_bytes() == definition
    assert (meta / "split.yaml").read_bytes() == split
    assert dict(again.splits) == {"train": ("0.tar",), "val": ("1.tar",)}
    # A split.json that an older Energon has left would be read in the place of the new split.yaml.
    (meta / "split.json").write_text('{"split_parts": {"old": ["0.tar"]}, "exclude": []}')
    prepare(tmp_path, split_parts=["new:0", "rest:1"], overwrite=True, progress=False)
    assert not (meta / "split.json").exists()
    with EnergonDataset(tmp_path) as dataset:
        assert [len(dataset.split(name)) for name in ("new", "rest")] == [2, 2]


def test_the_folder_of_documents_is_an_address_of_its_data_set(tmp_path: Path):
    prepare(tars(tmp_path, "a.tar"), split="1,0,0", progress=False)
    for address in (tmp_path, tmp_path / ".nv-meta"):
        with open_source(address) as source:
            assert (source.format, len(source), source.url) == ("energon", 2, str(tmp_path))


# -- the index -----------------------------------------------------------------------------------------------------------


def test_a_part_is_found_by_its_name_and_one_that_is_there_twice_is_told(tmp_path: Path):
    path = tmp_path / "index.sqlite"
    db = sqlite3.connect(path)
    db.executescript(
        "CREATE TABLE samples (tar_file_id INTEGER, sample_key TEXT, sample_index INTEGER, byte_offset INTEGER, byte_size INTEGER);"
        "CREATE UNIQUE INDEX keys ON samples(sample_key);"
        "CREATE TABLE sample_parts (tar_file_id INTEGER, sample_index INTEGER, part_name TEXT,"
        " content_byte_offset INTEGER, content_byte_size INTEGER);"
        "INSERT INTO samples VALUES (0, 'a', 0, 0, 2048), (0, 'b', 1, 2048, 1024), (1, 'c', 0, 0, 1024);"
        "INSERT INTO sample_parts VALUES (0, 0, 'txt', 512, 3), (0, 0, 'txt', 1536, 4), (0, 1, 'txt', 2560, 5), (1, 0, 'jpg', 512, 6);"
    )
    db.commit()
    db.close()
    index = SqliteIndex(str(path), where="index")
    assert (index.has_parts, index.unique_keys) == (True, True)
    assert sorted(index.find_part("a", "txt")) == [(0, 0, 512, 3), (0, 0, 1536, 4)]
    assert index.find_part("b", "txt") == [(0, 1, 2560, 5)]
    assert index.find_part("c", "jpg") == [(1, 0, 512, 6)]
    assert index.find_part("c", "txt") == index.find_part("d", "txt") == index.find_part("\ud800", "txt") == []
    assert [index.last_sample(shard) for shard in range(3)] == [1, 0, -1]
    assert index.shard_counts() == {0: 2, 1: 1}
    assert index.find("b") == [(0, 1)]
    assert index.repeated_keys() == []
    assert index.size_hint() == 3 + 4
    index.close()
    assert index.find("c") == [(1, 0)]  # it opens again
    index.close()


# -- metadata sets -------------------------------------------------------------------------------------------------------


def test_splits_and_addresses_of_a_metadata_set(tmp_path: Path):
    (tmp_path / "meta.yaml").write_text(
        f"{HEAD}  val: {{path: texts}}\n  other: {{path: texts, split_part: x}}\n"
        "  far: {path: 's3://b/a', aux: {files: 'filesystem+s3://x/y', here: 'filesystem://z', root: 'filesystem:///r'}}\n"
    )
    with pytest.raises(UnsafeContentError):
        read_metadataset(tmp_path / "meta.yaml")
    found = read_metadataset(tmp_path / "meta.yaml", outside_ok=True)
    assert {name: each.split for name, each in found.items()} == {"val": "val", "other": "x", "far": "far"}
    assert found["val"].primary == f"{tmp_path}/texts"
    assert found["far"].primary == "s3://b/a"
    assert found["far"].folders == {"files": "s3://x/y", "here": f"{tmp_path}/z", "root": "/r"}
    assert found["far"].auxiliary == {}


def test_a_metadata_set_in_an_archive_names_what_is_in_the_archive(tmp_path: Path):
    with zipfile.ZipFile(tmp_path / "all.zip", "w") as archive:
        archive.writestr("d/meta.yaml", f"{HEAD}  train: {{path: texts, aux: {{files: 'filesystem://./x//y'}}}}\n")
    found = read_metadataset(f"zip://d/meta.yaml::file://{tmp_path}/all.zip")["train"]
    assert found.primary == f"zip://d/texts::file://{tmp_path}/all.zip"
    assert found.folders == {"files": f"zip://d/x/y::file://{tmp_path}/all.zip"}


# -- samples that become documents ------------------------------------------------------------------------------------------


def test_the_end_token_of_texts_may_be_zero_and_a_text_may_have_no_tokens(tmp_path: Path):
    files = [("0.txt", b"ab"), ("1.txt", b""), ("2.json", b'{"caption": "c"}')]
    (tmp_path / "0.tar").write_bytes(tar_bytes(files))
    prepare(tmp_path, split="1,0,0", progress=False)

    def ids(text: str) -> list[int]:
        return [ord(letter) for letter in text]

    with EnergonDataset(tmp_path) as dataset:
        memory = MemoryTransport()
        with pytest.raises(
            DocumentError, match="'txt,json' is .*which is no text"
        ):  # a list of parts, not one of that name
            samples_to_documents(dataset, "b", ids, part="txt,json", transport=memory, progress=False)
        assert memory.files == {}
        with pytest.raises(ArgumentError, match="end_token is 256; it must be an integer from 0 to 255"):
            samples_to_documents(dataset, "b", ids, end_token=256, dtype="uint8", transport=memory, progress=False)
        assert memory.files == {}
        for end, expected in ((None, [[97, 98], [], [99]]), (0, [[97, 98, 0], [0], [99, 0]])):
            memory = MemoryTransport()
            samples_to_documents(
                dataset, "a", ids, part="json[caption],txt", end_token=end, transport=memory, progress=False
            )
            documents = IndexedDataset("a", transport=memory)
            assert [documents.document(number).tolist() for number in range(3)] == expected


@pytest.mark.parametrize(
    ("part", "text", "message"),
    [
        ("txt", b"\xff", "part 'txt' is no text in 'utf-8'"),
        ("json[a]", b'{"a": 7}', "'json[a]' is 7, which is no text"),
    ],
)
def test_a_text_that_does_not_decode_is_named_by_tar_and_key(part: str, text: bytes, message: str, tmp_path: Path):
    name, good = part.partition("[")[0], {"txt": b"x", "json": b'{"a": "x"}'}
    for number in range(2):
        files = [(f"{number}.{name}", good[name]), (f"{number}b.{name}", text if number else good[name])]
        (tmp_path / f"{number}.tar").write_bytes(tar_bytes(files))
    prepare(tmp_path, split="1,0,0", progress=False)
    with EnergonDataset(tmp_path) as dataset, pytest.raises(DocumentError) as caught:
        samples_to_documents(dataset, "a", lambda _: [1], part=part, transport=MemoryTransport(), progress=False)
    assert caught.value.message.startswith(message)
    assert caught.value.where == f"{tmp_path}/1.tar/1b"
