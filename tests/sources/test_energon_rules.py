"""What Energon data sets say of themselves, what closing them gives back, the limits of their indices, and errors with their places."""

from __future__ import annotations

import gc
import io
import os
import resource
import sqlite3
import threading
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import xxhash
from energon_tars import METADATASET_HEAD, sample_files, tar_bytes, write_metadataset

from saev_store.errors import (
    ArgumentError,
    CorruptShardError,
    DocumentError,
    NotFoundError,
    ReadOnlyError,
    SaevStoreError,
    SelectionError,
    TransportError,
    UnsafeContentError,
)
from saev_store.sources.energon import EnergonDataset, _open, metadataset
from saev_store.sources.energon.field_map import FieldPath, decode, resolve
from saev_store.sources.energon.filesystem import EnergonFileSystem
from saev_store.sources.energon.index_sqlite import SqliteIndex
from saev_store.sources.energon.joins import FolderFiles, JoinedDataset
from saev_store.sources.energon.metadataset import open_metadataset
from saev_store.sources.energon.nvmeta import parse_info
from saev_store.sources.energon.prepare import find_tars, prepare
from saev_store.sources.energon.split import SplitPlan, expand
from saev_store.sources.energon.tar_scan import scan_shard
from saev_store.transport import MemoryTransport

INFO = parse_info(b'{"shard_counts": {"a.tar": 2, "b.tar": 3, "c/d.tar": 1}}', where="x.json")


def refused(call: Callable[[], object]) -> SaevStoreError:
    with pytest.raises(SaevStoreError) as caught:
        call()
    return caught.value


def prepared(files: dict[str, list[tuple[str, bytes]]], **options: object) -> MemoryTransport:
    """A data set in memory: parts of each tar."""
    memory = MemoryTransport({name: tar_bytes(parts) for name, parts in files.items()})
    prepare("", transport=memory, progress=False, **{"split": "1,0,0", **options})
    return memory


def two() -> MemoryTransport:
    return prepared({"a.tar": sample_files(0, 2), "b.tar": sample_files(2, 3)}, split="1,1,0")


# -- what is said ------------------------------------------------------------------------------------------------------


def test_the_description_of_a_split():
    memory = two()
    dataset = EnergonDataset("", transport=memory).split("val")
    names = [".nv-meta/split.yaml", ".nv-meta/dataset.yaml", ".nv-meta/index.sqlite", "b.tar"]
    hasher = xxhash.xxh3_128()
    for name in names:
        hasher.update(len(memory.files[name]).to_bytes(8, "little") + memory.files[name])
    assert dataset.describe(digest="full") == {
        "format": "energon",
        "url": "memory://",
        "split": "val",
        "n_samples": 3,
        "mapping": "example i is sample i of the split, in the order of its shards, without those that are excluded",
        "index_uuid": memory.files[".nv-meta/index.uuid"].decode(),
        "sample_type": "CrudeWebdataset",
        "digest": {"algorithm": "xxh3_128", "scope": "full", "value": hasher.hexdigest()},
    }
    memory.put(".nv-meta/index.uuid", b" 0a-1b\r\n")  # as an editor leaves it
    assert EnergonDataset("", transport=memory).describe()["index_uuid"] == "0a-1b"
    memory.delete(".nv-meta/index.uuid")
    assert EnergonDataset("", transport=memory).describe()["index_uuid"] == ""
    assert EnergonDataset("", transport=memory).describe()["split"] is None
    memory.delete("b.tar")
    gone = EnergonDataset("", transport=memory, damaged_ok=True)
    assert gone.split("train").describe()["n_samples"] == 2
    assert type(refused(gone.describe)) is NotFoundError


def test_the_card_of_a_data_set():
    assert repr(EnergonDataset("", transport=two()).split("val")).splitlines() == [
        "Energon memory://",
        "  samples       3 in 1 shards (split 'val')",
        "  splits        train (1 shards), val (1 shards), test (0 shards)",
        "  sample type   CrudeWebdataset",
        "  prepared by   7.4.1",
        "  read through  memory",
    ]
    memory = two()
    memory.put(".nv-meta/.info.json", b'{"shard_counts": {"a.tar": 2, "b.tar": 3}}')
    shown = repr(EnergonDataset("", transport=memory)).splitlines()
    assert shown[1] == "  samples       5 in 2 shards"
    assert shown[4] == "  prepared by   a release before 7.4"


def test_what_preparing_tells():
    memory = MemoryTransport(
        {"a.tar": tar_bytes(sample_files(0, 2)), "x/b.tar": tar_bytes(sample_files(2, 3)), "c.tar.gz": b""}
    )
    made = prepare("", transport=memory, split="1,1,0", progress=False)
    assert str(made).splitlines() == [
        "memory://: 5 samples, 10 parts in 2 shards",
        "  parts: json, txt",
        "  train: 2 samples in 1 shards",
        "  val: 3 samples in 1 shards",
        "  test: 0 samples in 0 shards",
        f"  {made.problems[0]}",
    ]
    (problem,) = made.problems
    assert (problem.kind, problem.where, problem.severity) == ("compressed_tar", "c.tar.gz", "warning")


# -- closing -----------------------------------------------------------------------------------------------------------


class Closing(MemoryTransport):
    """Counts how often it was closed."""

    n_closed = 0

    def at(self, path: str) -> MemoryTransport:
        return self if not path else super().at(path)

    def close(self) -> None:
        self.n_closed += 1
        super().close()


def test_closing_gives_back_the_database_and_the_connections():
    transport, media = Closing(two().files), Closing({"x": b""})
    dataset = EnergonDataset("", transport=transport)
    index = dataset.places.index
    assert index is not None
    assert dataset[0].key == "s00000"
    assert index._db is not None
    dataset.close()
    assert (index._db, transport.n_closed) == (None, 1)
    assert dataset.part("s00003", "txt") == b"text 3\n"  # it opens again
    with JoinedDataset(dataset, {"files": FolderFiles("", transport=media)}, names={"files": "json[file]"}) as joined:
        assert joined[0].media == {"files": {}}
        assert joined.validate(deep=True, progress=False).checked_bytes > 0
        assert joined.validate().checked_bytes == 0
        assert joined.describe(digest="full") == dataset.describe(digest="full")
    assert (index._db, transport.n_closed, media.n_closed) == (None, 2, 1)


def test_a_database_that_was_fetched_is_deleted_with_the_data_set(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    memory = two()
    dataset = EnergonDataset("", transport=memory)
    (fetched,) = tmp_path.iterdir()
    assert fetched.read_bytes() == memory.files[".nv-meta/index.sqlite"]
    del dataset
    gc.collect()
    assert list(tmp_path.iterdir()) == []
    raw = memory.files[".nv-meta/index.sqlite"]
    for n in (len(raw) - 1, len(raw)):
        index = None
        if n == len(raw):
            index = _open.open_index(memory, max_nbytes=n)
            assert index is not None
        else:
            error = refused(lambda n=n: _open.open_index(memory, max_nbytes=n))
            assert error.message == f"it has {len(raw):,} bytes; at most {n:,} are fetched"
        del index
    gc.collect()
    memory.put(".nv-meta/index.sqlite", raw[:16] + bytes(len(raw) - 16))
    assert type(refused(lambda: EnergonDataset("", transport=memory))) is DocumentError
    assert list(tmp_path.iterdir()) == []
    memory.put(".nv-meta/index.sqlite", b"SQLite format 4\0")
    assert refused(lambda: EnergonDataset("", transport=memory)).message == (
        "it begins with b'SQLite format 4\\x00': it is no SQLite database"
    )


def test_a_database_that_does_not_fit_into_the_temporary_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """The last bytes are written when the file is closed."""
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    memory = two()
    nbytes = len(memory.files[".nv-meta/index.sqlite"])
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    for most in (0, nbytes - 1):
        resource.setrlimit(resource.RLIMIT_FSIZE, (most, hard))
        try:
            error = refused(lambda: EnergonDataset("", transport=memory))
        finally:
            resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
        assert isinstance(error, TransportError)
        assert error.message == "could not write: File too large (EFBIG)"
        assert list(tmp_path.iterdir()) == []


@pytest.mark.skipif(not hasattr(os, "fork"), reason="there are no forked children here")
@pytest.mark.filterwarnings("ignore:This process .* is multi-threaded:DeprecationWarning")
def test_a_forked_child_leaves_the_database_that_was_fetched(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    dataset = EnergonDataset("", transport=two())
    (fetched,) = tmp_path.iterdir()
    child = os.fork()
    if child == 0:
        del dataset
        gc.collect()
        os._exit(0 if fetched.exists() else 3)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
    assert dataset.part("s00003", "txt") == b"text 3\n"


# -- the index ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("n", "is_right"), [(63, True), (64, True), (65, False)])
def test_a_database_has_so_many_tables_at_most(n: int, is_right: bool, tmp_path: Path):
    db = sqlite3.connect(tmp_path / "x")
    db.execute("CREATE TABLE samples (tar_file_id, sample_key, sample_index, byte_offset, byte_size)")
    for number in range(n - 1):
        db.execute(f"CREATE TABLE t{number} (a)")
    db.commit()
    db.close()
    if is_right:
        index = SqliteIndex(str(tmp_path / "x"), where="x")
        assert (index.has_parts, index.unique_keys) == (False, False)
        error = refused(lambda: index.files("", after=""))
        assert error.message == "it does not list parts, which Energon 6 did not index"
    else:
        error = refused(lambda: SqliteIndex(str(tmp_path / "x"), where="x"))
        assert error.message == "it has more than 64 tables and indices"
    assert error.remedy == "Prepare the data set again: `saev-store prepare --overwrite`."


@pytest.mark.parametrize("column", ["tar_file_id", "sample_key", "sample_index", "byte_offset", "byte_size"])
def test_every_column_is_needed(column: str, tmp_path: Path):
    columns = [
        name for name in ("tar_file_id", "sample_key", "sample_index", "byte_offset", "byte_size") if name != column
    ]
    db = sqlite3.connect(tmp_path / "x")
    db.execute(f"CREATE TABLE samples ({', '.join(columns)})")
    db.commit()
    db.close()
    error = refused(lambda: SqliteIndex(str(tmp_path / "x"), where="x"))
    assert error.message == f"table 'samples' has no column '{column}'; it has {', '.join(columns)}"


def test_every_column_of_parts_is_needed(tmp_path: Path):
    names = ["tar_file_id", "sample_index", "part_name", "content_byte_offset", "content_byte_size"]
    for column in names:
        columns = ", ".join(name for name in names if name != column)
        db = sqlite3.connect(tmp_path / column)
        db.execute("CREATE TABLE samples (tar_file_id, sample_key, sample_index, byte_offset, byte_size)")
        db.execute(f"CREATE TABLE sample_parts ({columns})")
        db.close()
        error = refused(lambda column=column: SqliteIndex(str(tmp_path / column), where="x"))
        assert error.message == f"table 'sample_parts' has no column '{column}'; it has {columns}"


# -- errors ------------------------------------------------------------------------------------------------------------


def as_files() -> EnergonFileSystem:
    return EnergonFileSystem(dataset=EnergonDataset("", transport=two()))


@pytest.mark.parametrize(
    ("call", "kind", "where", "message"),
    [
        (lambda: EnergonDataset("", transport=two(), images="x"), ArgumentError, "images", "'x' is none of rgb8, torchrgb, bytes"),
        (lambda: EnergonDataset("", {}, transport=two()), ArgumentError, "storage_options", "a transport has its options already"),
        (lambda: EnergonDataset("", transport=two()).split("x"), SelectionError, "split", "there is no split 'x'; there are 'train', 'val', 'test'"),
        (lambda: EnergonDataset("", transport=two()).index_of("x"), SelectionError, "key", "no sample has the key 'x'"),
        (lambda: EnergonDataset("", transport=two()).split("val").index_of("s00001"), SelectionError, "key", "sample 's00001' is not in split 'val', or left out of it"),
        (lambda: as_files().open("s00001.txt", "ab"), ReadOnlyError, "s00001.txt", "parts are not written through this file system (mode 'ab')"),
        (lambda: as_files().info("x.txt"), NotFoundError, "memory://", "there is no 'x.txt'"),
        (lambda: as_files().cat_file("s00001"), NotFoundError, "memory://", "there is no 's00001'"),
        (lambda: FieldPath.parse("a[", where="here"), ArgumentError, "here", "'a[' is no path; write for example 'jpg,png' or 'json[caption]'"),
        (lambda: resolve(FieldPath.parse("a[b],c", where="x"), {"d": b"", "e": b""}, where="s"), DocumentError, "s", "the sample has no 'a[b],c'; its parts are d, e"),
        (lambda: FolderFiles("", transport=MemoryTransport({"a": b""})).file("../a"), UnsafeContentError, "memory://", "'../a' names a file outside the folder"),
        (lambda: prepare("", transport=MemoryTransport({"a.tar": tar_bytes([("a.txt", b"")])})), ArgumentError, "split", "it is not said how to split it"),
        (lambda: prepare("", transport=MemoryTransport({"a.txt": b""}), split="1,0,0"), NotFoundError, "memory://", "there are no tars (*.tar)"),
        (lambda: prepare("", transport=MemoryTransport({"a.tar": b""}), split="1,0,0", exclude="a"), NotFoundError, "memory://", "there are no tars (*.tar) that `exclude` leaves"),
        (lambda: prepare("", transport=two(), split="1,0,0"), None, "memory://", "it is prepared already"),
        (lambda: prepare("", transport=two(), split="1,0,0", overwrite=True, sample_type="CrudeWebdataset", field_map={"a": "b"}), ArgumentError, "field_map", "CrudeWebdataset has parts as they are, and takes no field map"),
        (lambda: find_tars(MemoryTransport({"a.tgz": b"", "b.tar.zst": b""})), NotFoundError, "memory://", "there are no tars (*.tar)"),
        (lambda: SplitPlan("1,0,0", ["a:b"]), ArgumentError, "split", "shares and patterns cannot both be given"),
        (lambda: SplitPlan(None, ["train:"]), ArgumentError, "split_parts", "'train:' is not written 'train:shards/train_.*'"),
        (lambda: SplitPlan(None, [":x"]), ArgumentError, "split_parts", "':x' is not written 'train:shards/train_.*'"),
        (lambda: expand("a" * 65_537, where="here"), DocumentError, "here", "has 65,537 characters; at most 65,536 are read"),
        (lambda: parse_info(b'{"shard_counts": {"../a.tar": 1}}', where="x.json"), UnsafeContentError, "x.json", "'../a.tar' names a file outside the data set"),
        (lambda: scan_shard(MemoryTransport({"a.tar": b""}), "a.tar"), CorruptShardError, "memory://a.tar", "it is empty; a tar has at least its end marker"),
    ],
)  # fmt: skip
def test_errors_name_their_place(call: Callable[[], object], kind: type[Exception] | None, where: str, message: str):
    error = refused(call)
    assert message in error.message
    assert error.where == where
    assert kind is None or type(error) is kind


@pytest.mark.parametrize("head", [b"\x1f\x8b", b"\x28\xb5\x2f\xfd", b"BZh9", b"\xfd7zX"])
def test_compressed_tars_are_told(head: bytes):
    error = refused(lambda: scan_shard(MemoryTransport({"a.tar": head + bytes(1022)}), "a.tar"))
    assert error.message == "it is compressed: parts of it have no byte ranges"
    assert error.remedy == "Copy the tar again, or write it again."


def test_all_damaged_tars_are_told():
    memory = MemoryTransport({"a.tar": b"x" * 700, "b.tar": tar_bytes(sample_files(0, 2)), "c.tar": b"", "d.txt": b""})
    error = refused(lambda: prepare("", transport=memory, split="1,0,0", progress=False))
    assert error.message.startswith("2 of 3 tars cannot be indexed: memory://a.tar: ")
    assert "; memory://c.tar: it is empty" in error.message
    assert [problem.where for problem in error.problems] == ["memory://a.tar", "memory://c.tar"]
    assert error.remedy == "Restore them or leave them out with `exclude`, then prepare again."
    assert set(memory.files) == {"a.tar", "b.tar", "c.tar", "d.txt"}
    made = prepare("", transport=memory, split="1,0,0", exclude="^[ac]", progress=False)
    assert (made.n_samples, dict(made.shards)) == (2, {"b.tar": 2})


def test_a_key_that_is_there_twice_is_a_problem_of_its_tar():
    memory = MemoryTransport(
        {"a.tar": tar_bytes([("k.txt", b"")]), "b.tar": tar_bytes([("j.txt", b""), ("k.txt", b"")])}
    )
    error = refused(lambda: prepare("", transport=memory, split="1,0,0", progress=False))
    assert [(each.kind, each.where, each.message) for each in error.problems] == [
        ("repeated_key", "b.tar", error.message)
    ]
    assert error.remedy == "Give each sample a name of its own; files of one sample must follow each other in the tar."


def test_the_file_system_of_a_bucket_is_given_its_options(monkeypatch: pytest.MonkeyPatch):
    given: list[object] = []

    def opened(url: object, options: object = None) -> object:
        given.append((url, options))
        return None

    monkeypatch.setattr("saev_store.sources.energon.filesystem.EnergonDataset", opened)
    options = {"skip_instance_cache": True}
    EnergonFileSystem("lab/d", "s3", {"key": "x"}, **options)
    EnergonFileSystem("s3://lab/d", "s3", {}, **options)
    EnergonFileSystem("/d", "file", {"auto_mkdir": True}, **options)
    EnergonFileSystem("/d", None, {"a": 1}, **options)
    assert given == [("s3://lab/d", {"key": "x"}), ("s3://lab/d", None), ("/d", None), ("/d", None)]


def test_a_file_system_opens_files_with_the_options_that_it_is_given():
    with as_files().open("s00001.txt", block_size=3, cache_type="none") as file:
        assert (file.blocksize, file.cache.name, file.read()) == (3, "none", b"text 1\n")


def test_options_reach_the_document_and_every_data_set(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    write_metadataset(tmp_path)
    given: list[tuple[str, object, object]] = []

    def telling(name: str) -> Callable[..., object]:
        real = getattr(metadataset, name)

        def call(url: object, options: object = None, **more: object) -> object:
            given.append((name, options, more["engine"]))
            return real(url, **{"storage_options": None, **more})

        return call

    for name in ("locate", "EnergonDataset", "FolderFiles"):
        monkeypatch.setattr(metadataset, name, telling(name))
    options = {"anon": True}
    names = {"images": "json[image]", "clips": "json[clip]"}
    open_metadataset(tmp_path / "meta.yaml", "train", options, names=names, engine="pread").close()
    expected = ["locate", "EnergonDataset", "FolderFiles", "EnergonDataset"]
    assert given == [(name, options, "pread") for name in expected]


def test_a_folder_of_files_is_opened_as_is_said(tmp_path: Path):
    assert FolderFiles(tmp_path, engine="pread").transport.name == "pread"
    assert "local files take no options" in refused(lambda: FolderFiles(tmp_path, {"anon": True})).message


def test_closing_joined_data_sets_closes_all_of_them():
    media = {name: Closing({"x": b""}) for name in "abc"}
    auxiliary = {name: FolderFiles("", transport=transport) for name, transport in media.items()}
    JoinedDataset(EnergonDataset("", transport=two()), auxiliary, names=dict.fromkeys("abc", "json[file]")).close()
    assert [transport.n_closed for transport in media.values()] == [1, 1, 1]


def test_a_file_that_is_not_there_is_told_with_the_place_where_it_was_looked_for():
    primary = EnergonDataset("", transport=two())
    media = FolderFiles("", transport=MemoryTransport({"x": b""}, label="media"))
    error = refused(lambda: JoinedDataset(primary, {"files": media}, names={"files": "json[caption]"})[0])
    assert (type(error), error.where) == (NotFoundError, "memory://media/c0")
    assert error.message.startswith("'files' has no file 'c0': ")


def test_files_of_far_folders_are_fetched_together():
    """Two requests wait for each other: one after the other they would wait in vain."""
    both = threading.Barrier(2)

    class Far(MemoryTransport):
        is_local = False

        def read(self, path: str, **options: int) -> bytes:
            both.wait(timeout=30)
            return super().read(path, **options)

    primary = EnergonDataset("", transport=prepared({"a.tar": [("k.json", b'["x", "y"]')]}))
    media = FolderFiles("", transport=Far({"x": b"1", "y": b"2"}))
    joined = JoinedDataset(primary, {"files": media}, names={"files": "json"})
    assert joined[0].media == {"files": {"x": b"1", "y": b"2"}}


def test_what_joined_data_sets_are_asked_reaches_the_primary_one(capsys: pytest.CaptureFixture[str]):
    primary, media = EnergonDataset("", transport=two()), {"a": FolderFiles("", transport=MemoryTransport({"x": b""}))}
    joined = JoinedDataset(primary, media, names={"a": "json[file]"})
    for shown in (False, True):
        assert joined.validate(progress=shown).ok
        assert ("checking" in capsys.readouterr().err) == shown
    assert [sample.sample.key for sample in joined.split("val")] == ["s00002", "s00003", "s00004"]
    assert refused(lambda: JoinedDataset(primary, media, names={"a": "x["})).where == "names['a']"


def test_a_metadata_set_takes_the_split_that_it_names(tmp_path: Path):
    for name in "ab":
        (tmp_path / "d").mkdir(exist_ok=True)
        (tmp_path / "d" / f"{name}.tar").write_bytes(tar_bytes([(f"{name}.txt", b"x.jpg")]))
    prepare(tmp_path / "d", split_parts=["train:a", "val:b"], progress=False)
    (tmp_path / "meta.yaml").write_text(
        f"{METADATASET_HEAD}  train: {{path: d, split_part: val}}\n  val: {{path: d}}\n"
    )
    for split in ("train", "val"):
        with open_metadataset(tmp_path / "meta.yaml", split, names={}) as joined:
            assert [sample.sample.key for sample in joined.rows(slice(None))] == ["b"]


def test_arrays_in_parts_keep_their_order():
    buffer = io.BytesIO()
    np.save(buffer, np.asfortranarray(np.arange(6, dtype=np.int16).reshape(2, 3)))
    assert decode("x.npy", buffer.getvalue(), where="x").tolist() == [[0, 1, 2], [3, 4, 5]]


def test_documents_of_older_releases_are_replaced():
    """A reader that looks for `.info.yaml` would find tars that are no longer there."""
    memory = prepared({"a.tar": sample_files(0, 2)})
    memory.put(".nv-meta/.info.yaml", b"shard_counts: {gone.tar: 9}")
    memory.delete(".nv-meta/.info.json")
    memory.put(".nv-meta/split.json", b"{}")
    assert refused(lambda: prepare("", transport=memory, split="1,0,0")).remedy == "Pass overwrite=True."
    made = prepare("", transport=memory, overwrite=True, progress=False)  # keeps split.yaml, and what else is not said
    assert ".nv-meta/.info.yaml" not in memory.files
    assert memory.files[".nv-meta/split.json"] == b"{}"
    assert dict(made.splits) == {"train": ("a.tar",), "val": (), "test": ()}
    prepare("", transport=memory, overwrite=True, split="0,1,0", progress=False)
    assert set(memory.files) == {
        "a.tar", "a.tar.idx", ".nv-meta/.info.json", ".nv-meta/index.sqlite", ".nv-meta/index.uuid", ".nv-meta/split.yaml",
        ".nv-meta/dataset.yaml",
    }  # fmt: skip
    definition = {"sample_type": "TextSample", "field_map": {"text": "json[caption]"}}
    prepare("", transport=memory, overwrite=True, progress=False, **definition)
    for more, kind in (
        ({}, "TextSample"),
        ({"sample_type": "CrudeWebdataset"}, "CrudeWebdataset"),
        ({}, "CrudeWebdataset"),
    ):
        prepare("", transport=memory, overwrite=True, progress=False, **more)
        assert EnergonDataset("", transport=memory).sample_type == kind


@pytest.mark.parametrize(
    ("options", "where", "message"),
    [
        ({"sample_type": "X"}, "sample_type", "'X' is none of Sample, CaptioningSample, "),
        ({"field_map": {"a": "b"}}, "field_map", "a field map needs a sample type"),
        ({"sample_type": "TextSample"}, "field_map", "field_map does not fit: TextSample needs 'text'"),
        ({"sample_type": "TextSample", "field_map": {"text": "a["}}, "field_map", "'a[' is no path"),
        ({"exclude": "("}, "exclude", "'(' is no regular expression: "),
        ({"split": "1,2"}, "split", "'1,2' has 2 shares; train, val and test need 3"),
        ({"split": None, "split_parts": ["a:("]}, "split_parts", "'(' is no regular expression: "),
    ],
)
def test_what_cannot_be_prepared(options: dict, where: str, message: str):
    memory = MemoryTransport({"a.tar": tar_bytes(sample_files(0, 1))})
    error = refused(lambda: prepare("", transport=memory, progress=False, **{"split": "1,0,0", **options}))
    assert (type(error), error.where) == (ArgumentError, where)
    assert error.message.startswith(message)
    assert set(memory.files) == {"a.tar"}


def test_what_cannot_be_listed_cannot_be_prepared():
    class Reader:
        name, url = "reader", "nowhere://"

    error = refused(lambda: prepare("", transport=Reader(), split="1,0,0"))
    assert (type(error), error.where) == (ReadOnlyError, "nowhere://")
    assert error.message == "nothing can be written or listed through reader"


def test_the_uuid_of_an_index_is_of_names_sizes_and_places():
    def uuid(files: dict[str, bytes]) -> str:
        memory = MemoryTransport(files)
        prepare("", transport=memory, split="1,0,0", progress=False)
        return memory.files[".nv-meta/index.uuid"].decode()

    tar = tar_bytes([("k.txt", b"abc"), ("l.txt", b"d")])
    other = [
        tar_bytes([("k.txt", b"ab"), ("l.txt", b"d")]),
        tar_bytes([("k.txt", b"abc"), ("l.json", b"d")]),
        tar + bytes(512),
    ]
    found = [uuid({"a.tar": tar}), uuid({"b.tar": tar}), uuid({"a.tar": tar, "e.tar": tar_bytes([])})]
    found += [uuid({"a.tar": each}) for each in other]
    assert len(set(found)) == 6
    assert uuid({"a.tar": tar}) == found[0]
    assert uuid({"a.tar": tar.replace(b"abc", b"xyz")}) == found[0]  # contents are not indexed
