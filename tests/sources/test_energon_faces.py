"""Data sets as sources, as files, joined with others, and from the command line."""

from __future__ import annotations

import io
import json
import re
from functools import partialmethod
from pathlib import Path

import pytest
from energon_tars import sample_files, tar_bytes, write_dataset
from servers import s3_bucket  # noqa: F401 - a fixture
from transports import LatencyTransport

from saev_store.cli import main
from saev_store.errors import (
    ArgumentError,
    CorruptShardError,
    DocumentError,
    NotFoundError,
    SaevStoreError,
    SelectionError,
    UnsafeContentError,
)
from saev_store.sources import Source, open_source, reopen, sniff
from saev_store.sources.energon import EnergonDataset, index_sqlite
from saev_store.sources.energon.filesystem import EnergonFileSystem
from saev_store.sources.energon.index_sqlite import SqliteIndex
from saev_store.sources.energon.joins import FolderFiles, JoinedDataset
from saev_store.sources.energon.prepare import prepare
from saev_store.transport import MemoryTransport

DATA = Path(__file__).parents[1] / "data/energon"
CRUDE = DATA / "crude_varying_parts/dataset"


class TestSource:
    def test_it_is_found(self, tmp_path):
        for url in (CRUDE, f"{CRUDE}/", CRUDE / ".nv-meta", f"file://{CRUDE}"):
            source = open_source(url)
            assert isinstance(source, EnergonDataset)
            assert isinstance(source, Source)
            assert (source.format, len(source), source.splits) == ("energon", 5, ("train", "val", "test"))
        assert sniff(tmp_path) is None

    def test_it_is_found_below_a_transport(self):
        files = {f"x/{path.relative_to(CRUDE)}": path.read_bytes() for path in CRUDE.rglob("*") if path.is_file()}
        assert open_source("x", transport=MemoryTransport(files)).key(4) == "doc/004"

    def test_a_description_opens_it_again(self, tmp_path):
        truth = write_dataset(tmp_path)
        prepare(tmp_path, split="1,1,1", progress=False)
        source = open_source(tmp_path).split("val")
        again = reopen(json.loads(json.dumps(source.describe())))
        assert [again.key(i) for i in range(len(again))] == [source.key(i) for i in range(len(source))]
        assert 0 < len(again) < len(truth)
        described = source.describe()
        tar = tmp_path / "shards/shard_001.tar"
        tar.write_bytes(tar.read_bytes().replace(b"text 4", b"TEXT 4"))
        with pytest.raises(CorruptShardError, match="digest"):
            reopen(described)

    def test_positions(self):
        source = EnergonDataset(CRUDE)
        assert source[-1].key == "doc/004"
        for wrong in (5, -6, 1.5, "doc/009"):
            with pytest.raises(SelectionError):
                source.raw(wrong)
        with pytest.raises(SelectionError, match="no part 'nope'; it has json"):
            source[1]["nope"]
        with pytest.raises(SelectionError, match="no split 'nope'"):
            source.split("nope")
        with pytest.raises(ArgumentError):
            EnergonDataset(CRUDE, images="pil")
        assert [[each.key for each in batch] for batch in source.batches(2, start=1, drop_last=True)] == [
            ["doc/001", "doc/002"],
            ["doc/003", "doc/004"],
        ]


class TestFiles:
    @pytest.fixture
    def fs(self):
        fsspec = pytest.importorskip("fsspec")
        from saev_store.sources.energon.filesystem import register

        register()
        return fsspec.filesystem("energon", fo=str(CRUDE), skip_instance_cache=True)

    def test_as_folders_and_files(self, fs):
        assert fs.ls("", detail=False) == ["doc"]
        assert fs.ls("doc", detail=False)[:4] == [
            "doc/000.img1.jpg",
            "doc/000.img2.jpg",
            "doc/000.json",
            "doc/001.json",
        ]
        assert fs.info("doc/003.tar.gz.note.txt") == {"name": "doc/003.tar.gz.note.txt", "size": 9, "type": "file"}
        assert len(fs.find("")) == 11
        assert fs.glob("doc/*.json") == [f"doc/00{i}.json" for i in (0, 1, 2, 4)]
        assert fs.exists("doc/002.txt") and not fs.exists("doc/002.nope") and fs.isdir("doc")
        assert fs.cat_file("doc/003.tar.gz.note.txt", 0, 2) == "ü".encode()
        assert fs.cat_file("doc/003.tar.gz.note.txt", -4) == b"code"
        assert fs.cat("doc/002.txt") == b""
        with fs.open("doc/000.json") as file:
            assert json.load(file) == {"n": 0}
        for path in ("nope", "doc/nope", "doc/009.json", "x/y.z"):
            with pytest.raises(FileNotFoundError):
                fs.info(path)
        with pytest.raises(FileNotFoundError):
            fs.cat_file("doc/nope")
        with pytest.raises(PermissionError):
            fs.open("doc/000.json", "wb")

    def test_by_address(self, fs):
        import fsspec

        with fsspec.open(f"energon://doc/000.json::{CRUDE}") as file:
            assert file.read() == b'{"n": 0}'
        with fsspec.open(f"energon://doc/000.img1.jpg::file://{CRUDE}") as file:
            assert file.read(3) == b"\xff\xd8\xff"

    def test_in_a_bucket(self, fs, s3_bucket):
        import fsspec

        s3fs = pytest.importorskip("s3fs")
        s3fs.S3FileSystem(**s3_bucket.options).put(str(CRUDE), f"{s3_bucket.url}/data", recursive=True)
        with fsspec.open(f"energon://doc/004.json::{s3_bucket.url}/data", s3=s3_bucket.options) as file:
            assert file.read() == b'{"n": 4}'

    def test_many_folders(self, tmp_path, monkeypatch):
        files = [(f"{folder}/{i:03d}.txt", b"x") for folder in ("a", "a b", "a/b", "a0", "é") for i in range(3)]
        files += [("top.txt", b""), ("a.txt", b"")]
        (tmp_path / "x.tar").write_bytes(tar_bytes(files))
        prepare(tmp_path, split="1,0,0", progress=False)
        fs = EnergonFileSystem(dataset=EnergonDataset(tmp_path))
        real = SqliteIndex.files
        for page in (1, 2, 10_000):
            monkeypatch.setattr(SqliteIndex, "files", partialmethod(real, limit=page))
            found = [(each["name"], each["type"]) for each in fs.ls("")]
            assert found == [
                *(((name, "directory")) for name in ("a", "a b", "a0", "é")), ("a.txt", "file"), ("top.txt", "file"),
            ]  # fmt: skip
            assert fs.ls("a", detail=False) == ["a/b", "a/000.txt", "a/001.txt", "a/002.txt"]

    @pytest.mark.parametrize(
        ("most", "page"), [(100, 10), (101, 10), (150, 10), (199, 10), (200, 10), (300, 10), (301, 3)]
    )
    def test_samples_of_many_parts_are_listed_whole(self, most: int, page: int, monkeypatch: pytest.MonkeyPatch):
        """A page of the index has a limit of parts, too: it ends with the last sample that it has whole."""
        names = [f"{key}.p{i:03d}" for key in "abc" for i in range(100)]
        memory = MemoryTransport({"x.tar": tar_bytes([(name, b"") for name in names])})
        prepare("", transport=memory, split="1,0,0", progress=False)
        fs, real = EnergonFileSystem(dataset=EnergonDataset("", transport=memory)), SqliteIndex.files
        monkeypatch.setattr(SqliteIndex, "files", partialmethod(real, limit=page))
        monkeypatch.setattr(index_sqlite, "MAX_PARTS", most - 64 * page)
        assert fs.ls("", detail=False) == names

    def test_a_sample_of_more_parts_than_a_page_has_is_refused(self, monkeypatch: pytest.MonkeyPatch):
        memory = MemoryTransport({"x.tar": tar_bytes([(f"a.p{i}", b"") for i in range(5)])})
        prepare("", transport=memory, split="1,0,0", progress=False)
        fs = EnergonFileSystem(dataset=EnergonDataset("", transport=memory))
        monkeypatch.setattr(index_sqlite, "MAX_PARTS", 4 - 64 * 10_000)
        with pytest.raises(DocumentError, match="sample 'a' has more than 4 parts"):
            fs.ls("")
        monkeypatch.setattr(index_sqlite, "MAX_PARTS", 5 - 64 * 10_000)
        assert len(fs.ls("")) == 5


class TestJoins:
    @pytest.fixture
    def texts(self, tmp_path):
        files = [
            ("a.json", b'{"image": "img/1.jpg", "all": ["img/1.jpg", "img/2.jpg"]}'),
            ("b.json", b'{"all": []}'),
            ("c.json", b'{"image": "img/nope.jpg", "all": [7]}'),
            ("d.json", b'{"image": "../etc/passwd"}'),
        ]
        (tmp_path / "texts").mkdir()
        (tmp_path / "texts/0.tar").write_bytes(tar_bytes(files))
        prepare(tmp_path / "texts", split="1,0,0", progress=False)
        return EnergonDataset(tmp_path / "texts")

    @pytest.fixture(params=["dataset", "folder", "memory", "remote"])
    def images(self, request, tmp_path):
        media = {f"img/{i}.jpg": b"jpeg %d" % i for i in range(3)}
        if request.param == "dataset":
            (tmp_path / "images").mkdir()
            (tmp_path / "images/0.tar").write_bytes(tar_bytes(list(media.items())))
            prepare(tmp_path / "images", split="1,0,0", progress=False)
            return EnergonDataset(tmp_path / "images")
        if request.param == "memory":
            return FolderFiles("", transport=MemoryTransport(media))
        if request.param == "remote":
            return FolderFiles("", transport=LatencyTransport(MemoryTransport(media), 0.0, 10e3))
        for name, data in media.items():
            (tmp_path / name).parent.mkdir(exist_ok=True)
            (tmp_path / name).write_bytes(data)
        return FolderFiles(tmp_path)

    def test_by_file_name(self, texts, images):
        joined = JoinedDataset(
            texts, {"one": images, "many": images}, names={"one": "json[image]", "many": "json[all]"}
        )
        assert joined[0].media == {
            "one": {"img/1.jpg": b"jpeg 1"}, "many": {"img/1.jpg": b"jpeg 1", "img/2.jpg": b"jpeg 2"},
        }  # fmt: skip
        assert joined.joined("b").media == {"one": {}, "many": {}}
        assert len(joined) == 4
        assert isinstance(joined, Source)
        assert (joined.key(-1), joined.index_of("b"), joined.splits) == ("d", 1, texts.splits)
        assert joined.rows([1, 0]) == [joined[1], joined[0]] == [joined.split("train")[i] for i in (1, 0)]
        with joined, reopen(joined.describe()) as again:
            assert again[0] == joined[0].sample

    def test_what_is_wrong(self, texts, images):
        joined = JoinedDataset(texts, {"one": images}, names={"one": "json[image]"})
        with pytest.raises(NotFoundError, match=r"'one' has no file 'img/nope\.jpg'"):
            joined[2]
        with pytest.raises((UnsafeContentError, NotFoundError)):
            joined[3]
        with pytest.raises(DocumentError, match="no name of a file"):
            JoinedDataset(texts, {"one": images}, names={"one": "json[all]"})[2]
        with pytest.raises(ArgumentError, match="names are given for"):
            JoinedDataset(texts, {"one": images}, names={})


class TestCommands:
    @pytest.fixture
    def run(self, capfd):
        def call(*arguments):
            code = main([str(argument) for argument in arguments])
            return code, *capfd.readouterr()

        return call

    def test_ls_of_folders_in_folders(self, run, tmp_path):
        """The path within a data set is told from the folders of the address, however many there are."""
        (tmp_path / "0.tar").write_bytes(tar_bytes(sample_files(0, 2, folder="x/y/z/")))
        prepare(tmp_path, split="1,0,0", progress=False)
        assert run("ls", tmp_path / "x")[1] == "x/y/\n"
        assert run("ls", tmp_path / "x/y")[1] == "x/y/z/\n"
        entries = json.loads(run("ls", tmp_path / "x/y/z/s00001", "--json")[1])["entries"]
        assert [entry["name"] for entry in entries] == ["x/y/z/s00001.json", "x/y/z/s00001.txt"]

    @pytest.mark.parametrize("is_damaged", [False, True])
    def test_ls_of_data_sets_of_earlier_releases_and_of_damaged_ones(self, run, tmp_path, is_damaged):
        """Energon 5 and 6 have `.info.yaml`; of a data set with a missing tar all samples are listed that its index has."""
        for name in ("0", "1"):
            (tmp_path / f"{name}.tar").write_bytes(tar_bytes(sample_files(10 * int(name), 2, folder="x/")))
        prepare(tmp_path, split="1,0,0", progress=False)
        if is_damaged:
            (tmp_path / "1.tar").unlink()
        listed = run("ls", tmp_path / "x")
        assert (listed[0], len(listed[1].splitlines()), listed[2]) == (0, 8, "")
        meta = tmp_path / ".nv-meta"
        counts = json.loads((meta / ".info.json").read_text())["shard_counts"]
        (meta / ".info.json").unlink()
        (meta / ".info.yaml").write_text("shard_counts:\n" + "".join(f"  {name}: {n}\n" for name, n in counts.items()))
        assert run("ls", tmp_path / "x") == listed
        assert run("ls", tmp_path) == (0, "x/\n", "")

    def test_a_data_set_that_cannot_be_read_is_not_a_folder_without_stores(self, run, tmp_path):
        (tmp_path / "x").mkdir()
        (tmp_path / "x/0.tar").write_bytes(tar_bytes(sample_files(0, 2)))
        prepare(tmp_path / "x", split="1,0,0", progress=False)
        (tmp_path / "x/.nv-meta/split.yaml").write_text("split_parts: 5\n")
        (tmp_path / "x/stores").mkdir()
        code, out, err = run("ls", tmp_path / "x")
        assert (code, out) == (1, "") and "split.yaml" in err
        assert run("ls", tmp_path / "x/stores")[:2] == (0, f"no stores in {tmp_path / 'x/stores'}\n")

    def test_prepare_info_ls_validate(self, run, tmp_path):
        for i in range(10):
            (tmp_path / f"{i}.tar").write_bytes(tar_bytes(sample_files(i * 10, 2, folder="x/")))
        code, out, err = run(
            "prepare", tmp_path, "--split", "8,1,1", "--sample-type", "TextSample", "--field", "text=json[caption]",
            "--num-workers", 2, "--no-progress",
        )  # fmt: skip
        assert code == 0
        assert re.fullmatch(rf"indexed 102\.4 kB in [\d.]+ s, .+/s, at {re.escape(str(tmp_path))}\n", err)
        assert "20 samples, 40 parts in 10 shards" in out and "train: 16 samples in 8 shards" in out
        val = EnergonDataset(tmp_path).split("val")
        assert val.sample(0).text == "c80"
        assert [val.decode(raw) for raw in val.rows([1, 0])] == [val.sample(1), val.sample(0)]
        code, out, _ = run("info", tmp_path)
        assert code == 0 and "train (8 shards), val (1 shards), test (1 shards)" in out
        code, out, _ = run("validate", "--deep", tmp_path, "--json")
        assert code == 0 and json.loads(out)["ok"]
        assert run("ls", tmp_path)[1] == "x/\n"
        code, out, _ = run("ls", tmp_path / "x")
        assert len(out.splitlines()) == 40 and out.splitlines()[0].endswith("  x/s00000.json")
        assert len(run("ls", tmp_path / "x/s00000")[1].splitlines()) == 2
        code, out, _ = run("ls", tmp_path / "x/s00000.txt", "--json")
        assert json.loads(out)["entries"] == [{"name": "x/s00000.txt", "nbytes": 7}]
        assert run("ls", tmp_path / "x/nope")[0] == 1
        code, _, err = run("prepare", tmp_path, "--split", "8,1,1")
        assert code == 1 and "prepared already" in err
        code, out, _ = run("prepare", tmp_path, "--overwrite", "--json", "--split-parts", r"train:[0-4]\.tar", "--field-map", '{"text": "txt"}', "--sample-type", "TextSample")  # fmt: skip
        assert code == 0 and len(json.loads(out)["splits"]["train"]) == 5
        assert {problem["kind"] for problem in json.loads(out)["problems"]} == {"in_no_split"}

    @pytest.mark.parametrize(
        "options",
        [[], ["--field", "x"], ["--field", "=x"], ["--field-map", "{"], ["--field-map", "[1]"], ["--num-workers", "0"]],
    )
    def test_wrong_usage(self, run, tmp_path, options):
        (tmp_path / "0.tar").write_bytes(tar_bytes(sample_files(0, 1)))
        assert run("prepare", tmp_path, *options, *(["--split", "1,0,0"] if options else []))[0] == 2

    def test_interactive(self, run, tmp_path, monkeypatch):
        (tmp_path / "0.tar").write_bytes(tar_bytes(sample_files(0, 3)))
        answers = "nonsense\n1,0\n1,0,0\n99\nTextSample\njson[\njson[caption]\n"
        monkeypatch.setattr("sys.stdin", io.StringIO(answers))
        code, out, err = run("prepare", tmp_path, "-i", "--no-progress")
        assert code == 0, err
        assert "parts: json, txt" in err and "3 samples" in out
        assert "1 tars, from 0.tar to 0.tar" in err
        assert err.count("Ratio of train, val and test") == 3
        assert "--sample-type: '99' is none of them" in err and "json[" in err.replace("json[caption]", "")
        assert (tmp_path / ".nv-meta/dataset.yaml").read_text() == (
            "sample_type:\n  __module__: megatron.energon\n  __class__: TextSample\nfield_map:\n  text: json[caption]\n"
        )
        assert EnergonDataset(tmp_path).sample(2).text == "c2"

    @pytest.mark.parametrize("answers", ["", "1,0,0\n"])
    def test_questions_that_nobody_answers(self, run, tmp_path, monkeypatch, answers):
        (tmp_path / "0.tar").write_bytes(tar_bytes(sample_files(0, 1)))
        monkeypatch.setattr("sys.stdin", io.StringIO(answers))
        code, _, err = run("prepare", tmp_path, "-i", "--no-progress")
        assert code == 2
        assert "error: --interactive: standard input has ended, and a question is left. Answer by options.\n" in err
        assert [path.name for path in tmp_path.iterdir()] == ["0.tar"]

    def test_interactive_with_patterns(self, run, tmp_path, monkeypatch):
        (tmp_path / "0.tar").write_bytes(tar_bytes(sample_files(0, 3)))
        monkeypatch.setattr("sys.stdin", io.StringIO("train:[\ntrain:0.*\n1,0,0\nval:1.*\n\n0\n"))
        code, _, err = run("prepare", tmp_path, "-i", "--no-progress")
        assert code == 0, err
        assert EnergonDataset(tmp_path).splits == ("train", "val")
        assert EnergonDataset(tmp_path).sample_type == "CrudeWebdataset"

    def test_texts_of_a_part_that_is_no_path(self, run, tmp_path):
        (tmp_path / "0.tar").write_bytes(tar_bytes(sample_files(0, 1)))
        prepare(tmp_path, split="1,0,0", progress=False)
        code, _, err = run("convert", tmp_path, tmp_path / "t.idx", "--tokenizer", "bytes", "--part", "json[")
        assert (code, err) == (2, "error: --part: 'json[' is no path; write for example 'jpg,png' or 'json[caption]'\n")
        assert not [*tmp_path.glob("t.*")]

    def test_a_damaged_one(self, run, tmp_path):
        write_dataset(tmp_path, odd=False)
        prepare(tmp_path, split="1,0,0", progress=False)
        (tmp_path / "shards/shard_001.tar").unlink()
        code, out, err = run("validate", tmp_path)
        assert code == 1 and "shard_001.tar" in out + err
        assert run("ls", tmp_path)[0] == 0


def test_errors_are_ours_for_any_folder(tmp_path):
    for name in (".info.json", "split.yaml", "dataset.yaml", "index.sqlite"):
        (tmp_path / ".nv-meta" / name).mkdir(parents=True)
    with pytest.raises(SaevStoreError):
        EnergonDataset(tmp_path)
