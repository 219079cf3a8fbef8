"""What strangers may send as an Energon data set: refused with our errors, in bounded time and memory, nothing run."""

from __future__ import annotations

import io
import json
import pickle
import shutil
import sqlite3
import tarfile
import tracemalloc
from pathlib import Path

import fsspec
import numpy as np
import pytest
from energon_tars import sample_files, tar_bytes, write_dataset
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from transports import CountingTransport

from saev_store.errors import (
    ArgumentError,
    CorruptShardError,
    DocumentError,
    NotFoundError,
    SaevStoreError,
    SelectionError,
    UnsafeContentError,
)
from saev_store.sources import reopen
from saev_store.sources.energon import EnergonDataset, _yaml, index_sqlite
from saev_store.sources.energon.field_map import FieldPath, decode, resolve
from saev_store.sources.energon.filesystem import EnergonFileSystem
from saev_store.sources.energon.nvmeta import Info, definition_bytes, parse_definition, parse_info, parse_splits
from saev_store.sources.energon.prepare import prepare
from saev_store.sources.energon.tar_scan import scan_shard
from saev_store.transport import MemoryTransport

DATA = Path(__file__).parents[1] / "data/energon"
INFO = parse_info(b'{"shard_counts": {"a/00.tar": 2, "a/01.tar": 3, "b.tar": 1}}', where="x.json")


@pytest.fixture
def folder(tmp_path) -> Path:
    return Path(shutil.copytree(DATA / "captioning_ratio_split/dataset", tmp_path / "d"))


def change(folder: Path, *statements: str):
    db = sqlite3.connect(folder / ".nv-meta/index.sqlite", isolation_level=None)
    for statement in statements:
        db.execute(statement)
    db.close()


class TestDatabase:
    @pytest.mark.parametrize(
        ("statements", "match"),
        [
            (["DROP TABLE samples"], "no table 'samples'"),
            (["ALTER TABLE samples RENAME TO s", "CREATE VIEW samples AS SELECT * FROM s"], "a 'view'"),
            (["CREATE VIEW more AS SELECT 1"], "a 'view'"),
            (["CREATE TRIGGER t AFTER INSERT ON samples BEGIN SELECT 1; END"], "a 'trigger'"),
            (["CREATE VIRTUAL TABLE v USING fts5(x)"], "a 'table' 'v'"),
            (["ALTER TABLE samples ADD COLUMN x AS (sample_index + 1)"], "computed columns"),
            (["UPDATE samples SET byte_offset = 'abc' WHERE sample_index = 1"], "holds 'abc'"),
            (["UPDATE samples SET byte_offset = -512 WHERE sample_index = 1"], "holds -512"),
            (["UPDATE samples SET byte_offset = 1.5 WHERE sample_index = 1"], "holds 1.5"),
            (["UPDATE samples SET byte_size = NULL WHERE sample_index = 1"], "holds None"),
            (["UPDATE samples SET byte_size = 9223372036854775807 WHERE sample_index = 1"], "holds 9223372036854775807"),
            (["UPDATE samples SET sample_key = x'ff00' WHERE sample_key = 'sample_0001'"], "holds b'"),
            (["UPDATE samples SET sample_index = 7 WHERE sample_key = 'sample_0001'"], "not there exactly once"),
            (["UPDATE samples SET sample_index = 0 WHERE sample_key = 'sample_0001'"], "not there exactly once"),
            (["UPDATE samples SET tar_file_id = 9 WHERE sample_key = 'sample_0001'"], "samples of shard 9"),
            (["DELETE FROM samples WHERE sample_key = 'sample_0001'"], "it has 1 samples"),
            (["UPDATE samples SET byte_size = 3585 WHERE sample_key = 'sample_0001'"], "no whole number of blocks"),
            (["UPDATE samples SET byte_size = 7168 WHERE sample_key = 'sample_0001'"], "outside the tar"),
            (["UPDATE samples SET byte_offset = 0 WHERE sample_key = 'sample_0001'"], "overlaps"),
            (["UPDATE sample_parts SET content_byte_size = 4000 WHERE part_name = 'txt'"], "outside its sample"),
            (["UPDATE sample_parts SET content_byte_offset = 0 WHERE part_name = 'jpg'"], "outside its sample"),
            (["UPDATE sample_parts SET part_name = 'txt' WHERE part_name = 'jpg'"], "'txt' twice"),
            (["DELETE FROM sample_parts WHERE sample_index = 1"], "has no parts"),
            (["UPDATE sample_parts SET sample_index = 5 WHERE part_name = 'jpg'"], "belong to no sample|outside its sample"),
            (["INSERT INTO sample_parts VALUES (0, -1, 'x', 512, 1)"], "belong to no sample"),
        ],
    )  # fmt: skip
    def test_refused(self, folder, statements, match):
        change(folder, *statements)
        with pytest.raises(SaevStoreError, match=match):
            EnergonDataset(folder)

    def test_computed_default_is_not_evaluated(self, folder):
        """Functions in the schema do not run: the schema is not trusted."""
        change(folder, "CREATE INDEX evil ON samples(hex(zeroblob(1000)))")
        EnergonDataset(folder)[0]

    def test_a_question_without_end(self, folder, monkeypatch):
        monkeypatch.setattr(index_sqlite, "TIMEOUT_S", 0.05)
        dataset = EnergonDataset(folder)
        with pytest.raises(SaevStoreError, match="took longer than"):
            dataset.places.index._rows(
                "WITH RECURSIVE c(x) AS (SELECT 1 UNION ALL SELECT x + 1 FROM c) SELECT COUNT(*) FROM c"
            )

    def test_it_is_never_written(self, folder):
        index = folder / ".nv-meta/index.sqlite"
        before = index.read_bytes()
        dataset = EnergonDataset(folder)
        with pytest.raises(SaevStoreError, match="readonly|read-only|query_only|cannot be read"):
            dataset.places.index._rows("DELETE FROM samples")
        assert index.read_bytes() == before
        assert sorted(path.name for path in index.parent.iterdir()) == [
            ".info.json", "dataset.yaml", "index.sqlite", "index.uuid", "split.yaml",
        ]  # fmt: skip

    def test_a_special_file(self, folder):
        index = folder / ".nv-meta/index.sqlite"
        index.unlink()
        index.mkdir()
        with pytest.raises(SaevStoreError):
            EnergonDataset(folder)

    def test_a_large_index_is_checked_where_it_is_used(self, folder, monkeypatch):
        monkeypatch.setattr("saev_store.sources.energon.check.EAGER_ROWS", 1)
        change(folder, "UPDATE samples SET byte_offset = 'abc' WHERE sample_key = 'sample_0003'")
        dataset = EnergonDataset(folder)
        assert dataset.raw("sample_0000").parts
        with pytest.raises(DocumentError, match="holds 'abc'"):
            dataset.raw("sample_0003")
        assert not dataset.validate(progress=False).ok

    @settings(deadline=None, max_examples=150, suppress_health_check=[HealthCheck.function_scoped_fixture])
    @given(st.data())
    def test_fuzz(self, folder, data):
        """Bytes of the database changed anywhere: samples as they were, or our errors."""
        original = (DATA / "captioning_ratio_split/dataset/.nv-meta/index.sqlite").read_bytes()
        raw = bytearray(original)
        for _ in range(data.draw(st.integers(1, 6))):
            raw[data.draw(st.integers(0, len(raw) - 1))] = data.draw(st.integers(0, 255))
        if data.draw(st.booleans()):
            del raw[data.draw(st.integers(0, len(raw))) :]
        (folder / ".nv-meta/index.sqlite").write_bytes(raw)
        try:
            dataset = EnergonDataset(folder)
            for i in range(len(dataset)):
                key = dataset[i].key
                dataset.part(key, "txt")
            dataset.validate(deep=True, progress=False)
        except SaevStoreError as error:
            assert str(error)


class TestTars:
    @settings(deadline=None, max_examples=300)
    @given(st.data())
    def test_fuzz(self, data):
        """Bytes of a tar changed anywhere: it is prepared, and then agrees with itself, or it is refused."""
        format = data.draw(st.sampled_from(["gnu", "pax"]))
        raw = bytearray(tar_bytes([*sample_files(0, 3), ("x" * 120 + ".txt", b"long")], format=format))
        for _ in range(data.draw(st.integers(1, 5))):
            raw[data.draw(st.integers(0, 6000))] = data.draw(st.integers(0, 255))
        transport = MemoryTransport({"a.tar": bytes(raw)})
        try:
            prepare("", transport=transport, split="1,0,0", progress=False)
            dataset = EnergonDataset("", transport=transport)
            [dataset[i] for i in range(len(dataset))]
            assert dataset.validate(deep=True, progress=False).ok
        except SaevStoreError as error:
            assert str(error)


class TestYaml:
    @pytest.mark.parametrize(
        ("text", "match"),
        [
            ("a: !!python/object/apply:os.system [id]", "tag"),
            ("a: !custom x", "tag"),
            ("a: !!set {x}", "tag"),
            ("x: " + "[" * 40 + "]" * 40, "nested"),
            ("x: " + "[" * 100_000, "nested"),
            ("a: 1\na: 2", "stands twice"),
            ("a: !!bool maybe", "value that cannot be read"),
            ("a: !!int ''", "value that cannot be read"),
            ("!!map [[a, 1]]", "tag of a mapping"),
            ("!!map ''", "tag of a mapping"),
            ("? [1]\n: 2", "key"),
            ("a: &a [*a]", "refers to itself"),
            ("a: *b", "refers to itself|not YAML"),
            ("\n".join(["a0: &a0 [x, x, x, x, x, x, x, x]", *(f"a{i}: &a{i} [{', '.join([f'*a{i - 1}'] * 9)}]" for i in range(1, 12))]), "more than"),
            ("a: [", "not YAML"),
            ("a: \x00", "not YAML"),
            ("- x", "no mapping"),
            ("", "no mapping"),
            ("field_map: [x]", "field_map"),
            ("field_map: {a: 1}", "field_map"),
            ("sample_type: {__module__: megatron.energon, __class__: TextSample}\nfield_map: {txt: txt}", "no field 'txt', needs 'text'"),
            ("x: 0x" + "f" * 5000 + "\ny: " + "1" * 5000, "cannot be read|no mapping|it holds"),
        ],
    )  # fmt: skip
    def test_refused(self, text, match):
        with pytest.raises(SaevStoreError, match=match):
            parse_definition(text.encode(), where="dataset.yaml")

    def test_a_tag_is_unsafe(self):
        with pytest.raises(UnsafeContentError, match="tag"):
            parse_definition(b"a: !!python/object/apply:os.system [id]", where="dataset.yaml")

    def test_latin_1(self):
        with pytest.raises(DocumentError, match="not UTF-8"):
            parse_definition("a: ü".encode("latin-1"), where="dataset.yaml")

    def test_code_is_named_and_not_run(self, folder):
        """A loader that would prove that it ran."""
        (folder / ".nv-meta/sample_loader.py").write_text(f"open({str(folder / 'ran')!r}, 'w')")
        (folder / ".nv-meta/dataset.yaml").write_text(
            "sample_type:\n  __module__: megatron.energon\n  __class__: OCRSample\n"
            "sample_loader: sample_loader.py:sample_loader\npart_filter: sample_loader.py:part_filter\n"
        )
        dataset = EnergonDataset(folder)
        assert [problem.kind for problem in dataset.problems] == ["code_not_run", "code_not_run"]
        assert set(dataset.sample(0).parts) == {"detail.json", "jpg", "txt"}
        assert not (folder / "ran").exists()

    def test_classes_of_others_are_not_imported(self, folder):
        (folder / ".nv-meta/dataset.yaml").write_text(
            "sample_type: {__module__: os, __class__: system}\nfield_map: {a: txt}\n"
        )
        dataset = EnergonDataset(folder)
        assert [problem.kind for problem in dataset.problems] == ["unknown_sample_type"]
        assert dataset.sample(0).parts["txt"]

    def test_a_type_that_energon_does_not_export_is_named_where_it_finds_it(self):
        raw = definition_bytes("VQAOCRSample", {"image": "jpg", "context": "txt", "text": "txt"})
        assert b"__module__: megatron.energon.flavors.vqa_and_ocr\n" in raw
        assert parse_definition(raw, where="x").sample_type == "VQAOCRSample"

    def test_factories_of_older_releases(self):
        text = (
            b"__module__: megatron.energon\n__class__: CaptioningWebdataset\nfield_map:\n  image: jpg\n  caption: txt\n"
        )
        assert parse_definition(text, where="x").sample_type == "CaptioningSample"


class TestSplits:
    def test_braces_in_both(self):
        splits = parse_splits(
            b"split_parts:\n  train: ['a/{00..01}.tar', b.tar]\nexclude: ['a/{00..00}.tar', 'a/01.tar/k{1..2}', gone.tar]\n",
            INFO, where="split.yaml",
        )  # fmt: skip
        assert splits.parts == {"train": ("a/01.tar", "b.tar")}
        assert splits.exclude == {("a/01.tar", "k1"), ("a/01.tar", "k2")}
        assert [problem.kind for problem in splits.problems] == ["unknown_exclude"]

    @pytest.mark.parametrize(
        ("document", "match"),
        [
            ({"split_parts": {"t": ["{a,b}" * 30]}}, "stands for 1073741824 names"),
            ({"split_parts": {"t": ["{0..999999999999}.tar"]}}, "names; at most"),
            ({"split_parts": {"t": ["{1..900000}", "{1..900000}"]}}, "names; at most"),
            ({"split_parts": {}, "exclude": ["{a,b}" * 30]}, "stands for"),
            ({"split_parts": {"t": ["{" * 30 + "}" * 30]}}, "deep"),
            ({"split_parts": {"t": ["{a"]}}, "do not match"),
            ({"split_parts": {"t": ["../x.tar"]}}, "outside the data set"),
            ({"split_parts": {"t": ["/etc/passwd"]}}, "outside the data set"),
            ({"split_parts": {"t": ["s3://x/y.tar"]}}, "outside the data set"),
            ({"split_parts": {"t": ["missing.tar"]}}, "the index does not have: 'missing.tar'"),
            ({"split_parts": {"t": [7]}}, "no text"),
            ({"split_parts": {"t": "a/00.tar"}}, "must be a list"),
            ({"split_parts": []}, "no mapping"),
            ({}, "no mapping"),
            ([], "no mapping"),
        ],
    )  # fmt: skip
    def test_refused(self, document, match):
        with pytest.raises(SaevStoreError, match=match):
            parse_splits(json.dumps(document).encode(), INFO, where="split.json")

    @pytest.mark.parametrize("name", ["../x", "/x", "a//b", "a/./b", "a\\b", "x\0", "http://x", "", "a\nb"])
    def test_names_of_shards(self, name):
        with pytest.raises(UnsafeContentError):
            parse_info(json.dumps({"shard_counts": {name: 1}}).encode(), where="x.json")

    @pytest.mark.parametrize("counts", [None, [], ["a.tar"], "a.tar", 3, True])
    def test_no_mapping_of_counts(self, counts):
        with pytest.raises(DocumentError, match="no mapping 'shard_counts'"):
            parse_info(json.dumps({"shard_counts": counts}).encode(), where="x.json")

    @pytest.mark.parametrize("count", [-1, 1.5, "2", None, True, 2**63, [1]])
    def test_counts(self, count):
        with pytest.raises(DocumentError, match="no number of samples"):
            parse_info(json.dumps({"shard_counts": {"a.tar": count}}).encode(), where="x.json")


class TestOlderReleases:
    """Energon 5 and 6: `.info.yaml`, `.tar.idx`, and in 6 a database of samples alone, in WAL mode."""

    @pytest.fixture
    def prepared(self, tmp_path) -> tuple[Path, dict]:
        truth = write_dataset(tmp_path / "d")
        prepare(tmp_path / "d", split="1,1,1", progress=False)
        meta = tmp_path / "d/.nv-meta"
        counts = json.loads((meta / ".info.json").read_text())["shard_counts"]
        (meta / ".info.yaml").write_text("shard_counts:\n" + "".join(f"  {name}: {n}\n" for name, n in counts.items()))
        (meta / ".info.json").unlink()
        return tmp_path / "d", truth

    def six(self, folder: Path):
        index = folder / ".nv-meta/index.sqlite"
        old = sqlite3.connect(index)
        rows = old.execute("SELECT * FROM samples").fetchall()
        old.close()
        index.unlink()
        db = sqlite3.connect(index)
        db.execute("PRAGMA journal_mode = WAL")
        db.execute(
            "CREATE TABLE samples (id INTEGER PRIMARY KEY AUTOINCREMENT, tar_file_id INTEGER, sample_key TEXT,"
            " sample_index INTEGER, byte_offset INTEGER, byte_size INTEGER)"
        )
        db.execute("CREATE INDEX idx_samples_sample_key ON samples(sample_key)")
        db.executemany(
            "INSERT INTO samples (tar_file_id, sample_key, sample_index, byte_offset, byte_size) VALUES (?, ?, ?, ?, ?)",
            rows,
        )
        db.commit()
        db.close()

    def test_6(self, prepared):
        folder, truth = prepared
        self.six(folder)
        dataset = EnergonDataset(folder)
        assert {sample.key: dict(sample.parts) for batch in dataset.batches(5) for sample in batch} == truth
        for key, parts in truth.items():
            assert {part: dataset.part(key, part) for part in parts} == parts
            assert dataset.key(dataset.index_of(key)) == key
        assert dataset.validate(deep=True, progress=False).ok
        with pytest.raises(SelectionError, match="no part 'nope'"):
            dataset.part(0, "nope")

    def test_5(self, prepared):
        folder, truth = prepared
        (folder / ".nv-meta/index.sqlite").unlink()
        dataset = EnergonDataset(folder)
        assert {sample.key: dict(sample.parts) for sample in dataset.rows(range(len(dataset)))} == truth
        assert dataset.key(0) in truth
        with pytest.raises(NotFoundError, match="prepare --overwrite"):
            dataset.part("plain", "txt")
        assert dataset.validate(deep=True, progress=False).ok

    def test_5_with_a_wrong_tar_idx(self, prepared):
        folder, _ = prepared
        (folder / ".nv-meta/index.sqlite").unlink()
        idx = folder / "shards/shard_000.tar.idx"
        idx.write_bytes(idx.read_bytes()[:-8])
        with pytest.raises(SaevStoreError, match="samples need"):
            EnergonDataset(folder)

    def test_offsets_of_another_tar_with_as_many_samples(self, prepared):
        """A range that holds two samples is none."""
        folder, _ = prepared
        self.six(folder)
        files = [(f"{key}.txt", b"x") for key in "abcd"]  # of 1024 bytes each
        (folder / "shards/shard_000.tar").write_bytes(tar_bytes(files, format="ustar"))
        offsets = np.array([0, 2048, 3072, 3584, 4096], "<u8")
        (folder / "shards/shard_000.tar.idx").write_bytes(offsets.tobytes())
        dataset = EnergonDataset(folder, damaged_ok=True)
        with pytest.raises(CorruptShardError, match="sample 0 is not where its .tar.idx says"):
            dataset[0]
        assert dict(dataset[1].parts) == {"txt": b"x"}

    def test_6_a_key_leads_to_a_sample_of_that_key(self, prepared):
        folder, _ = prepared
        self.six(folder)
        dataset = EnergonDataset(folder)
        one, two = dataset.key(0), dataset.key(1)
        dataset.close()
        db = sqlite3.connect(folder / ".nv-meta/index.sqlite", isolation_level=None)
        for old, new in ((one, "x"), (two, one), ("x", two)):
            db.execute("UPDATE samples SET sample_key = ? WHERE sample_key = ?", (new, old))
        db.close()
        dataset = EnergonDataset(folder)
        for read in (dataset.raw, lambda key: dataset.part(key, "txt")):
            with pytest.raises(CorruptShardError, match="prepare the data set again"):
                read(one)

    def test_6_parts_of_a_changed_tar_are_those_of_no_other_sample(self, tmp_path):
        """Both samples take 1,024 bytes. `energon://cat.txt` was empty: its size is that of the part in the index's place."""
        files = [("cat.txt", b"meow"), ("dog.txt", b""), ("dog.cls", b"")]
        folder = tmp_path / "d"
        folder.mkdir()
        (folder / "a.tar").write_bytes(tar_bytes(files, format="ustar"))
        prepare(folder, split="1,0,0", progress=False)
        self.six(folder)
        assert EnergonDataset(folder).parts("cat")[0].nbytes == 4
        for changed in (files[1:] + files[:1], [("dog.txt", b""), ("cat.txt", b""), *files[1:]]):
            (folder / "a.tar").write_bytes(tar_bytes(changed, format="ustar"))
            dataset = EnergonDataset(folder)
            with pytest.raises(CorruptShardError, match="prepare the data set again"):
                dataset.parts("cat")
            with pytest.raises(CorruptShardError, match="prepare the data set again"):
                fsspec.open(f"energon://cat.txt::file://{folder}").open()

    @pytest.mark.parametrize("release", ["5.2.0", "6.0.1"])
    def test_written_by_those_releases(self, release):
        """What their own `prepare` made of a tar with a global PAX header."""
        folder = DATA.parent / "energon_generations" / release
        dataset = EnergonDataset(folder)
        with tarfile.open(folder / "a.tar") as tar:
            truth = {member.name: tar.extractfile(member).read() for member in tar}
        found = {
            f"{sample.key}.{part}": data for sample in dataset.rows(range(3)) for part, data in sample.parts.items()
        }
        assert found == truth
        assert len(dataset.split("test")) == 3
        assert dataset.validate(deep=True, progress=False).ok
        if release != "5.2.0":
            assert {name: dataset.file(name) for name in truth} == truth

    def test_7_0_may_have_a_key_twice(self, tmp_path):
        folder = Path(shutil.copytree(DATA / "old_7_0_0/dataset", tmp_path / "d"))
        for shard in ("shard_000", "shard_001"):
            (folder / f"shards/{shard}.tar").write_bytes((folder / "shards/shard_000.tar").read_bytes())
        change(folder, "UPDATE samples SET sample_key = 'sample_000' || sample_index WHERE tar_file_id < 2",
               "UPDATE sample_parts SET content_byte_size = (SELECT content_byte_size FROM sample_parts AS s WHERE s.tar_file_id = 0"
               " AND s.sample_index = sample_parts.sample_index AND s.part_name = sample_parts.part_name) WHERE tar_file_id = 1")  # fmt: skip
        dataset = EnergonDataset(folder)
        assert [problem.kind for problem in dataset.problems if problem.severity == "warning"] == ["repeated_key"] * 2
        assert dataset[0].parts == dataset[2].parts
        with pytest.raises(SelectionError, match="2 samples have the key 'sample_0000'"):
            dataset.index_of("sample_0000")


def test_a_count_that_no_shard_has(tmp_path):
    """A list as long as the document says would take all memory."""
    folder = tmp_path / "d"
    write_dataset(folder, n_shards=2)
    prepare(folder, split="1,0,0", progress=False)
    path = folder / ".nv-meta/.info.json"
    document = json.loads(path.read_text())
    document["shard_counts"][next(iter(document["shard_counts"]))] = 200_000_000
    path.write_text(json.dumps(document))
    dataset = EnergonDataset(folder, damaged_ok=True)
    tracemalloc.start()
    assert not dataset.validate(progress=False).ok
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert peak < 64 << 20


class TestBytesChangedAnywhere:
    """Every file of a data set but its tars, in the newest generation and in one that has no database."""

    @pytest.fixture(params=[7, 5])
    def files(self, request) -> dict[str, bytes]:
        folder = DATA / "captioning_ratio_split/dataset"
        files = {path.relative_to(folder).as_posix(): path.read_bytes() for path in folder.rglob("*") if path.is_file()}
        if request.param == 5:
            counts = json.loads(files.pop(".nv-meta/.info.json"))["shard_counts"]
            files[".nv-meta/.info.yaml"] = (
                "shard_counts:\n" + "".join(f"  {k}: {n}\n" for k, n in counts.items())
            ).encode()
            del files[".nv-meta/index.sqlite"]
        return files

    @settings(deadline=None, max_examples=200, suppress_health_check=[HealthCheck.function_scoped_fixture])
    @given(st.data())
    def test_fuzz(self, files, data):
        changed = dict(files)
        names = sorted(name for name in files if not name.endswith((".tar", ".sqlite")))
        for name in data.draw(st.lists(st.sampled_from(names), min_size=1, max_size=2)):
            raw = bytearray(changed[name])
            for _ in range(data.draw(st.integers(0, 3))):
                if raw:
                    raw[data.draw(st.integers(0, len(raw) - 1))] = data.draw(st.integers(0, 255))
            start = data.draw(st.integers(0, len(raw)))
            changed[name] = bytes(raw[:start]) + data.draw(st.binary(max_size=9)) + bytes(raw[start:])
        try:
            dataset = EnergonDataset("", transport=MemoryTransport(changed), images="bytes")
            for split in dataset.splits:
                part = dataset.split(split)
                [part.sample(i) for i in range(len(part))]
            dataset.validate(deep=True, progress=False)
        except SaevStoreError as error:
            assert str(error)


class TestParts:
    def test_pickles_stay_bytes(self):
        evil = b"cos\nsystem\n(S'true'\ntR."
        for part in ("pyd", "pkl", "pickle", "pth", "x.pth", "pt", "dill", "tb", "bin"):
            assert decode(part, evil, where="x") is evil

    def test_arrays(self):
        import io

        import numpy as np

        buffer = io.BytesIO()
        np.save(buffer, np.arange(6).reshape(2, 3))
        assert decode("npy", buffer.getvalue(), where="x").tolist() == [[0, 1, 2], [3, 4, 5]]
        objects = io.BytesIO()
        np.save(objects, np.array([{}], dtype=object), allow_pickle=True)
        with pytest.raises(DocumentError, match="object"):
            decode("npy", objects.getvalue(), where="x")
        huge = buffer.getvalue().replace(b"(2, 3)", b"(2, 9999999999)".ljust(6))[:128]
        with pytest.raises(DocumentError, match="does not decode"):
            decode("npy", huge, where="x")

    @pytest.mark.parametrize(
        "header", ["(", '"""', "-" * 9000 + "1", "~" * 9000 + "1", "if 1:\n   2\n 3", "\0", " 1\n  2"]
    )
    def test_headers_that_python_does_not_parse(self, header):
        raw = b"\x93NUMPY\x01\x00" + len(header).to_bytes(2, "little") + header.encode()
        with pytest.raises(DocumentError, match="does not decode"):
            decode("npy", raw, where="x")

    @pytest.mark.parametrize("kind", ["|V0", "<U0", "|S0"])
    def test_arrays_of_items_without_bytes(self, kind):
        """Few bytes, and a loop over them that never ends."""
        header = f"{{'descr': '{kind}', 'fortran_order': False, 'shape': (4611686018427387904,)}}"
        raw = b"\x93NUMPY\x01\x00" + len(header).to_bytes(2, "little") + header.encode()
        with pytest.raises(DocumentError, match="have no bytes"):
            decode("npy", raw, where="x")

    @pytest.mark.parametrize("order", ["C", "F"])
    @pytest.mark.parametrize("kind", ["<f4", ">i2", "<c8", "|b1", "<U3", "<M8[ns]"])
    @pytest.mark.parametrize("shape", [(), (0, 3), (2, 3), (1, 2, 3)])
    def test_arrays_are_those_of_numpy(self, shape, kind, order):
        array = np.asarray(np.arange(int(np.prod(shape))).reshape(shape).astype(kind), order=order)
        buffer = io.BytesIO()
        np.save(buffer, array)
        found = decode("npy", buffer.getvalue(), where="x")
        assert (found.dtype, found.shape, found.tobytes(), found.flags.writeable) == (
            array.dtype,
            shape,
            array.tobytes(),
            True,
        )

    @pytest.mark.parametrize(("part", "raw"), [("json", b"{"), ("json", b"[" * 10**5), ("txt", b"\xff"), ("cls", b"x"), ("cls", b"9" * 5000), ("npy", b"x"), ("jpg", b"no"), ("png", b"\x89PNG\r\n\x1a\n" + bytes(30)), ("mp", b"\xc1")])  # fmt: skip
    def test_what_does_not_decode(self, part, raw):
        if part in {"jpg", "png"}:
            pytest.importorskip("PIL")
        if part == "mp":
            pytest.importorskip("msgpack")
        with pytest.raises(DocumentError, match="does not decode"):
            decode(part, raw, where="x")

    def test_paths(self):
        parts = {"json": b'{"a": {"b": ["x", "y"]}, "n": null}', "txt": b"t"}
        for path, expected in [("json[a][b][1]", "y"), ("json[nope],txt", "t"), ("nope,txt", "t"), ("json[n]", None)]:
            assert resolve(FieldPath.parse(path, where="x"), parts, where="x") == expected
        for path in ["json[a][b][2]", "json[a][b][-1]", "json[a][b][x]", "nope", "txt[0]"]:
            with pytest.raises(DocumentError, match="the sample has no"):
                resolve(FieldPath.parse(path, where="x"), parts, where="x")
        for path in ["", "a[", "a]b", "[a]", "a,", "a[b]c"]:
            with pytest.raises(ArgumentError, match="no path"):
                FieldPath.parse(path, where="x")


class TestStaleIndex:
    """Members of the same sizes are swapped after the index was made: no read gives the other one's bytes."""

    NAMES = (
        ("cat.txt", "dog.txt"),
        ("kätze.txt", "hünde.txt"),
        ("c?t.txt", "cät.txt"),
        ("x" * 95 + "/cat.txt", "x" * 95 + "/dog.txt"),
        ("deep/" * 40 + "cat.txt", "deep/" * 40 + "dog.txt"),
    )

    @pytest.mark.parametrize("names", NAMES, ids=lambda names: names[0][-12:])
    @pytest.mark.parametrize("format", ["pax", "gnu", "ustar"])
    def test_every_read_compares_the_name(self, tmp_path, names, format):
        cat, dog = names
        try:
            data = tar_bytes([(cat, b"cat"), (dog, b"dog")], format=format)
        except ValueError:
            pytest.skip("USTAR has no room for such a name")
        (tmp_path / "a.tar").write_bytes(data)
        prepare(tmp_path, split="1,0,0", progress=False)
        key, _, part = cat.rpartition(".")
        assert EnergonDataset(tmp_path).part(key, part) == b"cat"
        (tmp_path / "a.tar").write_bytes(tar_bytes([(dog, b"dog"), (cat, b"cat")], format=format))
        dataset = EnergonDataset(tmp_path)
        for read in (
            lambda: dataset.part(key, part),
            lambda: dataset.part(0, part),
            lambda: dataset.part(key, part, start=1, end=2),
            lambda: dataset.raw(key),
            lambda: dataset[0],
            lambda: dataset.rows([0, 1]),
            lambda: EnergonFileSystem(dataset=dataset).cat_file(cat),
            lambda: EnergonFileSystem(dataset=dataset).cat_file(cat, 0, 1),
        ):
            with pytest.raises(CorruptShardError, match="prepare the data set again"):
                read()

    def test_long_extension_headers(self, tmp_path):
        """Attributes in PAX records may be longer than the name."""
        buffer = io.BytesIO()
        with tarfile.open(fileobj=buffer, mode="w", format=tarfile.PAX_FORMAT) as tar:
            info = tarfile.TarInfo("kätze.txt")
            info.size, info.pax_headers = 3, {"SCHILY.xattr.user.note": "y" * 6000}
            tar.addfile(info, io.BytesIO(b"cat"))
        (tmp_path / "a.tar").write_bytes(buffer.getvalue())
        prepare(tmp_path, split="1,0,0", progress=False)
        assert EnergonDataset(tmp_path).part("kätze", "txt") == b"cat"


@pytest.mark.parametrize("text", [b"split_parts: {train: ['{0..9}{0..9}{0..9}{0..9}%s.tar']}" % (b"x" * 60_000)])
def test_few_bytes_do_not_stand_for_many(tmp_path, text):
    """Names are counted with their lengths: 60 kB of braces asked for gigabytes."""
    with pytest.raises(DocumentError, match="at most"):
        parse_splits(text, Info(("a.tar",), np.zeros(1, np.int64)), where="split.yaml")


@pytest.mark.parametrize("tag", ["", "!!int ", "!!float "])
def test_numbers_in_base_60(tag):
    """YAML's `1:0:0…` takes quadratic time as a number; it is text, and refused where it is said to be a number."""
    raw = f"a: {tag}1{':0' * 200_000}".encode()
    if tag:
        with pytest.raises(DocumentError, match="base 60"):
            _yaml.loads(raw, where="x")
    else:
        assert isinstance(_yaml.loads(raw, where="x")["a"], str)
    assert _yaml.loads(b"[1, -2, 0x1f, 1.5, 1e5, .inf, 12_3, 0]", where="x") == [
        1,
        -2,
        31,
        1.5,
        "1e5",
        float("inf"),
        123,
        0,
    ]


def test_a_large_extension_header(tmp_path):
    """Some contents take quadratic time in `tarfile`; no name needs so much."""
    buffer = io.BytesIO()
    header = tarfile.TarInfo("x")
    header.type, header.size = tarfile.XHDTYPE, 1 << 20
    buffer.write(header.tobuf() + b"1" * (1 << 20) + tar_bytes([("a.txt", b"a")]))
    (tmp_path / "a.tar").write_bytes(buffer.getvalue())
    with pytest.raises(CorruptShardError, match="header claims 1,048,576 bytes"):
        prepare(tmp_path, split="1,0,0", progress=False)


@pytest.mark.parametrize("size", [-1, -511, -512, -10_000])
def test_a_negative_size(tmp_path, size):
    """Sizes up to a block below zero lead to no place that was seen before."""
    header = bytearray(tarfile.TarInfo("b.txt").tobuf(tarfile.GNU_FORMAT))
    header[124:136] = (2**96 + size).to_bytes(12, "big")
    header[148:156] = b"        "
    header[148:156] = b"%06o\0 " % sum(header)
    whole = tar_bytes([("a.txt", b"x")], format="gnu", close=False)
    (tmp_path / "s.tar").write_bytes(tar_bytes([("a.txt", b"x")]))
    prepare(tmp_path, split="1,0,0", progress=False)
    before = {path.name: path.read_bytes() for path in (tmp_path / ".nv-meta").iterdir() if path.is_file()}
    (tmp_path / "s.tar").write_bytes(whole + bytes(header) + tar_bytes([("c.txt", b"yz")]))
    with pytest.raises(CorruptShardError, match="negative size"):
        prepare(tmp_path, split="1,0,0", progress=False, overwrite=True)
    assert {path.name: path.read_bytes() for path in (tmp_path / ".nv-meta").iterdir() if path.is_file()} == before


def test_a_long_map_of_a_file_with_holes():
    """GNU's map of such a file goes on in as many blocks as it likes, and `tarfile` keeps all of it."""
    entry = b"00000000001\0" * 2
    header = bytearray(tarfile.TarInfo("a.txt").tobuf(tarfile.GNU_FORMAT))
    header[156:157], header[386:482], header[482], header[148:156] = tarfile.GNUTYPE_SPARSE, entry * 4, 1, b" " * 8
    header[148:156] = b"%06o\0 " % sum(header)
    more = entry * 21 + b"\1" + bytes(7)
    transport = CountingTransport(MemoryTransport({"a.tar": bytes(header) + more * 16_384 + bytes(1024)}))
    with pytest.raises(CorruptShardError, match="more than 1,048,576 bytes of headers"):
        scan_shard(transport, "a.tar")
    assert transport.counters.bytes_read < 2 << 20


def test_keys_that_collide():
    """Multiples of 2^61 - 1 have one hash, so that a mapping of 40,000 of them took half a minute."""
    prime = 2**61 - 1
    raw = ("{" + ", ".join(f"{i * prime}: 0" for i in range(1_001)) + "}").encode()
    with pytest.raises(DocumentError, match="more than 1,000 keys that are no text"):
        _yaml.loads(raw, where="x")
    assert len(_yaml.loads(raw.replace(b": 0}", b"}").rpartition(b",")[0] + b"}", where="x")) == 1_000
    assert len(_yaml.loads(b"".join(b"a%d: 0\n" % i for i in range(2_000)), where="x")) == 2_000


def test_a_schema_that_is_no_text(tmp_path):
    (tmp_path / "a.tar").write_bytes(tar_bytes([("a.txt", b"a")]))
    prepare(tmp_path, split="1,0,0", progress=False)
    path = tmp_path / ".nv-meta/index.sqlite"
    raw = path.read_bytes()
    for name in (b"sample_parts_full", b"byte_offset", b"CREATE TABLE samples"):
        path.unlink()
        path.write_bytes(raw.replace(name, b"\xff" + name[1:]))
        with pytest.raises(SaevStoreError):
            EnergonDataset(tmp_path).validate(deep=True)


def test_numbers_are_not_cut():
    assert decode("cls", b" 7\n", where="x") == 7
    long = b"1" * 70
    assert decode("cls", long, where="x") == int(long)
    with pytest.raises(DocumentError, match="no number"):
        decode("cls", b"1" * 300, where="x")


@pytest.mark.parametrize("elsewhere", ["elsewhere", "data2"])
def test_links_that_lead_outside_are_told(tmp_path, elsewhere):
    (tmp_path / elsewhere).mkdir()
    (tmp_path / elsewhere / "a.tar").write_bytes(tar_bytes([("a.txt", b"a")]))
    (tmp_path / "data").mkdir()
    (tmp_path / "data/b.tar").write_bytes(tar_bytes([("b.txt", b"b")]))
    (tmp_path / "data/a.tar").symlink_to(tmp_path / elsewhere / "a.tar")
    prepare(tmp_path / "data", split="1,0,0", progress=False)
    dataset = EnergonDataset(tmp_path / "data")
    for problems in (dataset.problems, dataset.validate().problems):
        (problem,) = [problem for problem in problems if problem.kind == "symlink_outside"]
        assert problem.severity == "info"
        assert str(tmp_path / elsewhere / "a.tar") in problem.message
    assert dataset.part("a", "txt") == b"a"


def test_folders_whose_names_mean_something_in_addresses(tmp_path):
    folder = tmp_path / "a#b?mode=rw%41"
    folder.mkdir()
    (folder / "a.tar").write_bytes(tar_bytes([("a.txt", b"a")]))
    prepare(folder, split="1,0,0", progress=False)
    assert EnergonDataset(folder).part("a", "txt") == b"a"


def test_a_split_of_the_name_all(tmp_path):
    for name in "ab":
        (tmp_path / f"{name}.tar").write_bytes(tar_bytes([(f"{name}.txt", b"x")]))
    prepare(tmp_path, split_parts=["all:b"], progress=False)
    dataset = EnergonDataset(tmp_path)
    chosen = dataset.split("all")
    assert [[each.key(i) for i in range(len(each))] for each in (dataset, chosen)] == [["a", "b"], ["b"]]
    for each in (dataset, chosen):
        assert len(pickle.loads(pickle.dumps(each))) == len(each)
        assert len(reopen(each.describe())) == len(each)


def test_a_new_preparation_is_seen_through_fsspec(tmp_path):
    for name in ("a", "b"):
        (tmp_path / "x.tar").write_bytes(tar_bytes([(f"{name}.txt", name.encode())]))
        prepare(tmp_path, split="1,0,0", overwrite=True, progress=False)
        with fsspec.open(f"energon://{name}.txt::{tmp_path}") as file:
            assert file.read() == name.encode()
