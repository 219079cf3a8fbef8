"""Limits of documents and arguments of data sets on both sides, and remedies of their errors."""

from __future__ import annotations

import os
import pickle
import stat
from collections.abc import Callable
from fractions import Fraction
from pathlib import Path

import numpy as np
import pytest
from energon_tars import METADATASET_HEAD as HEAD
from energon_tars import sample_files, tar_bytes
from token_files import llmbatch_bytes, mmididx_bytes

from saev_store import ShardStore, new_metadata
from saev_store.errors import (
    ArgumentError,
    CorruptShardError,
    DocumentError,
    NotFoundError,
    SaevStoreError,
    SelectionError,
    UnsafeContentError,
)
from saev_store.sources import ImageFolder, MapStyle, Source, TextFile, TokenPlace, recorded_from
from saev_store.sources._new_file import NewFile
from saev_store.sources.energon import EnergonDataset, _yaml
from saev_store.sources.energon.filesystem import EnergonFileSystem
from saev_store.sources.energon.index_sqlite import SqliteIndex
from saev_store.sources.energon.joins import FolderFiles, JoinedDataset
from saev_store.sources.energon.metadataset import open_metadataset, read_metadataset
from saev_store.sources.energon.nvmeta import parse_info
from saev_store.sources.energon.prepare import prepare
from saev_store.sources.energon.split import parse_ratio
from saev_store.sources.energon.tar_idx import parse_tar_idx
from saev_store.sources.llmbatch import BatchFileReader
from saev_store.sources.mmididx import IndexedDataset, TokenSamples
from saev_store.transport import MemoryTransport


def refused(call: Callable[[], object]) -> SaevStoreError:
    with pytest.raises(SaevStoreError) as caught:
        call()
    return caught.value


# -- arguments -----------------------------------------------------------------------------------------------------------


def every_kind() -> list[Source]:
    idx, bin_ = mmididx_bytes([np.arange(3, dtype=np.int32), np.arange(2, dtype=np.int32)])
    memory = MemoryTransport({
        "x.batch": llmbatch_bytes(np.zeros((1, 1, 2), np.uint32)), "x.idx": idx, "x.bin": bin_, "i/a.png": b"", "t.txt": b"a\nb\n",
        "e/a.tar": tar_bytes(sample_files(0, 2)),
    })  # fmt: skip
    prepare("", transport=memory.at("e"), split="1,0,0", progress=False)
    documents, energon = IndexedDataset("x", transport=memory), EnergonDataset("", transport=memory.at("e"))
    return [
        documents, TokenSamples(documents, 2), BatchFileReader("x.batch", transport=memory), energon, MapStyle([1, 2]),
        TextFile("t.txt", transport=memory), ImageFolder("", transport=memory.at("i")),
        JoinedDataset(energon, {"m": FolderFiles("", transport=memory)}, names={"m": "txt"}),
    ]  # fmt: skip


@pytest.mark.parametrize("source", every_kind(), ids=lambda source: type(source).__name__)
def test_booleans_are_no_positions_and_texts_no_booleans(source: Source):
    for wrong in (True, False, np.True_):
        assert refused(lambda wrong=wrong: source[wrong]).message.startswith(f"{wrong!r} is no position")
        assert refused(lambda wrong=wrong: source.key(wrong)).message.startswith(f"{wrong!r} is no position")
    error = refused(lambda: source.validate(deep="no"))
    assert (error.where, error.message) == ("deep", "deep is 'no'; it must be True or False")
    assert source.validate(deep=np.False_, progress=False).deep is False


# -- YAML ----------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("more", "is_right"), [(-1, True), (0, True), (1, False)])
def test_a_document_has_so_many_bytes_at_most(more: int, is_right: bool):
    raw = b"a: 1".ljust((1 << 20) + more)
    if is_right:
        assert _yaml.loads(raw, where="x") == {"a": 1}
    else:
        error = refused(lambda: _yaml.loads(raw, where="x"))
        assert (error.message, error.where) == ("it has 1,048,577 bytes; such a document has at most 1,048,576", "x")


@pytest.mark.parametrize(("depth", "is_right"), [(30, True), (31, True), (32, False)])
def test_a_document_is_so_deep_at_most(depth: int, is_right: bool):
    """The document itself is the first level."""
    for text in ("[" * depth + "]" * depth, "{a: " * depth + "1" + "}" * depth):
        if is_right:
            assert _yaml.loads(text.encode(), where="x")
        else:
            error = refused(lambda text=text: _yaml.loads(text.encode(), where="x"))
            assert (type(error), error.message) == (DocumentError, "it is nested more than 32 levels deep")
            assert [problem.kind for problem in error.problems] == ["yaml"]


@pytest.mark.parametrize(("most", "is_right"), [(12, True), (11, True), (10, False)])
def test_a_document_has_so_many_values_at_most(most: int, is_right: bool, monkeypatch: pytest.MonkeyPatch):
    """A list of two lists of four, the second by reference: 1 + 2 x 5 = 11."""
    monkeypatch.setattr(_yaml, "MAX_NODES", most)
    raw = b"[&a [1, 2, 3, 4], *a]"
    if is_right:
        assert _yaml.loads(raw, where="x") == [[1, 2, 3, 4]] * 2
    else:
        assert refused(lambda: _yaml.loads(raw, where="x")).message == "it has more than 10 values"


@pytest.mark.parametrize(
    ("text", "value"),
    [
        ("0b11", 3), ("017", 15), ("0x1F", 31), ("1_000", 1000), ("+5", 5), ("-5", -5), ("1.5e+3", 1500.0), (".5", 0.5), ("-.inf", float("-inf")),
        ("yes", True), ("off", False), ("~", None), ("null", None), ("2020-01-01", "2020-01-01"), ("1:30", "1:30"), ("1:30.5", "1:30.5"), ("'1'", "1"),
        ("08", "08"), ("1e5", "1e5"),
    ],
)  # fmt: skip
def test_plain_values(text: str, value: object):
    found = _yaml.loads(f"a: {text}".encode(), where="x")
    assert found == {"a": value}
    assert isinstance(found, dict)
    assert type(found["a"]) is type(value)


def test_tags_are_named_by_their_line():
    error = refused(lambda: _yaml.loads(b"a: 1\nb:\n  - !!python/name:os.system x\n", where="d.yaml"))
    assert (type(error), error.where, error.remedy) == (UnsafeContentError, "d.yaml", "Remove the tag.")
    assert error.message.startswith("line 3 has the tag 'tag:yaml.org,2002:python/name:os.system'")
    assert "byte 3 is not UTF-8" in refused(lambda: _yaml.loads(b"a: \xff", where="x")).message
    assert _yaml.loads(b"\xef\xbb\xbfa: 1", where="x") == {"a": 1}


# -- splits and counts ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("text", "is_right"),
    [
        ("999999999,1,1", True), ("1000000000,1,1", False), ("0,0,1", True), ("0,0,0", False), ("1" * 9 + "." + "1" * 20, True), ("1" * 9 + "." + "1" * 21, False),
        ("-0.1,1,1", False), ("1, 2 ,3", True), ("1,x", False), (",".join(["1"] * 128), True), (",".join(["1"] * 129), False), ("1,,1", False),
    ],
)  # fmt: skip
def test_shares_at_their_bounds(text: str, is_right: bool):
    if is_right:
        assert parse_ratio(text) == tuple(Fraction(share.strip()) for share in text.split(","))
    else:
        error = refused(lambda: parse_ratio(text))
        assert (type(error), error.where) == (ArgumentError, "split")


@pytest.mark.parametrize(("n", "is_right"), [(1024, True), (1025, False)])
def test_samples_of_all_shards_have_a_limit(n: int, is_right: bool):
    """Of so many shards with the largest number of samples each."""
    each = 2**40 - 1
    raw = ('{"shard_counts": {' + ",".join(f'"{i}.tar": {each}' for i in range(n)) + "}}").encode()
    if is_right:
        assert parse_info(raw, where="x.json").counts.sum() == n * each
    else:
        assert "more than any disk holds" in refused(lambda: parse_info(raw, where="x.json")).message


def test_errors_of_offsets_say_what_to_do():
    for raw, message in (
        (bytes(8), "it has 8 bytes; 1 samples need 16"),
        (bytes(8) + (1024).to_bytes(8, "little"), "its last offset is 1,024, but the tar has 512 bytes"),
        (bytes(16), "its offsets do not ascend in whole blocks of 512 bytes"),
    ):
        error = refused(lambda raw=raw: parse_tar_idx(raw, where="a.tar.idx", n_samples=1, tar_nbytes=512))
        assert (error.message, error.where) == (message, "a.tar.idx")
        assert error.remedy == "The tar and its index do not belong together: prepare the data set again."
        assert [problem.kind for problem in error.problems] == ["tar_idx"]


# -- metadata sets -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("text", "message", "remedy"),
    [
        ("train: {path: ../a}", "splits['train']['path'] is '../a', which is not below the document's folder", "Pass outside_ok=True if you trust the document."),
        ("train: {path: a, aux: {b: /c}}", "splits['train']['aux']['b'] is '/c', which is not below the document's folder", "Pass outside_ok=True if you trust the document."),
        ("train: {path: a, aux: {b: 7}}", "splits['train']['aux']['b'] is 7; it must be a path", None),
        ("train: {path: a, aux: 7}", "splits['train']['aux'] is 7; it must be a mapping from names", None),
        ("train: {path: a, subflavors: [1]}", "splits['train'] has subflavors or a split_part of another type", None),
        ("train: {path: a, blend_epochized: []}", "splits['train'] has 'blend_epochized'; one primary data set with a path is read", "Open each of its data sets on its own."),
        ("train: {path: a, dataset_config: x}", "splits['train'] has 'dataset_config'; one primary data set with a path is read", "Open each of its data sets on its own."),
        ("train: {path: a, split_config: x}", "splits['train'] has 'split_config'; one primary data set with a path is read", "Open each of its data sets on its own."),
        ("train: {path: ''}", "splits['train']['path'] is ''; it must be a path", None),
        ("train: 3", "splits['train'] is 3; it must be a mapping", None),
    ],
)  # fmt: skip
def test_errors_of_metadata_sets(text: str, message: str, remedy: str | None, tmp_path: Path):
    path = tmp_path / "meta.yaml"
    path.write_text(f"{HEAD}  {text}\n")
    error = refused(lambda: read_metadataset(path))
    assert (error.message, error.where, error.remedy) == (message, str(path), remedy)


def test_a_metadata_set_hands_on_its_options(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    (tmp_path / "d").mkdir()
    (tmp_path / "d/a.tar").write_bytes(tar_bytes(sample_files(0, 1)))
    prepare(tmp_path / "d", split="1,0,0", progress=False)
    (tmp_path / "meta.yaml").write_text(
        f"{HEAD}  train: {{path: d, aux: {{a: d, f: 'filesystem://d'}}, subflavors: {{x: 1}}}}\n"
    )
    assert read_metadataset(tmp_path / "meta.yaml")["train"].subflavors == {"x": 1}
    with open_metadataset(tmp_path / "meta.yaml", names={"a": "json[x]", "f": "json[y]"}, engine="pread") as joined:
        assert joined.primary.transport.name == "pread"
        kinds = {name: type(each) for name, each in joined.auxiliary.items()}
        assert kinds == {"a": EnergonDataset, "f": FolderFiles}
        assert {each.transport.name for each in joined.auxiliary.values()} == {"pread"}
    error = refused(lambda: open_metadataset(tmp_path / "meta.yaml", names={"g": "x"}))
    assert (error.where, error.message) == ("names", "there is no 'g'; there are a, f")
    error = refused(lambda: open_metadataset(tmp_path / "meta.yaml", "val", names={}))
    assert (type(error), error.where) == (SelectionError, "split")


# -- data sets without an index of parts ---------------------------------------------------------------------------------


@pytest.fixture
def plain() -> MemoryTransport:
    """As Energon 5 has left it: no database."""
    memory = MemoryTransport({"a.tar": tar_bytes(sample_files(0, 2)), "b.tar": tar_bytes(sample_files(2, 1))})
    prepare("", transport=memory, split="1,1,0", progress=False)
    memory.delete(".nv-meta/index.sqlite")
    return memory


def test_what_needs_an_index_says_so(plain: MemoryTransport):
    dataset = EnergonDataset("", transport=plain)
    assert [part.name for part in dataset.parts(1)] == ["json", "txt"]
    (data,) = plain.get_ranges("a.tar", starts=[dataset.parts(1)[1].offset], ends=[dataset.parts(1)[1].offset + 7])
    assert bytes(data) == b"text 1\n"
    assert dataset.part(1, "txt", start=1, end=-1) == b"ext 1"
    for call in (
        lambda: dataset.raw("s00000"),
        lambda: dataset.index_of("s00000"),
        lambda: dataset.part("s00000", "txt"),
    ):
        error = refused(call)
        assert (type(error), error.where) == (NotFoundError, "memory://")
        assert (
            error.message == "keys cannot be looked up: the data set has no index.sqlite (it was prepared by Energon 5)"
        )
        assert error.remedy == "Run `saev-store prepare --overwrite` on it."
    files = EnergonFileSystem(dataset=dataset)
    error = refused(lambda: list(files.entries("")))
    assert (error.message, error.remedy) == (
        "it cannot be listed: it has no index.sqlite",
        "Run `saev-store prepare --overwrite`.",
    )
    assert files._strip_protocol(["energon://a/", "/b"]) == ["a", "b"]


def test_names_of_files_in_a_sample(plain: MemoryTransport):
    plain.put("x/1", b"one")
    for text, media in (
        ('{"f": null}', {}),
        ('{"f": []}', {}),
        ('{"f": ["1"]}', {"1": b"one"}),
        ('{"f": " 1 "}', {"1": b"one"}),
    ):
        memory = MemoryTransport({"a.tar": tar_bytes([("k.json", text.encode())])})
        prepare("", transport=memory, split="1,0,0", progress=False)
        joined = JoinedDataset(
            EnergonDataset("", transport=memory), {"m": FolderFiles("", transport=plain.at("x"))}, names={"m": "json[f]"}
        )  # fmt: skip
        assert joined[0].media == {"m": media}
    error = refused(
        lambda: JoinedDataset(
            EnergonDataset("", transport=plain), {"m": FolderFiles("", transport=plain)}, names={"n": "txt"}
        )
    )
    assert (error.where, error.message) == ("names", "names are given for n, auxiliary data sets are m")


def test_a_key_in_several_tars_is_taken_by_position(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    memory = MemoryTransport({f"{name}.tar": tar_bytes([(f"{name}.txt", b"")]) for name in "abcdef"})
    prepare("", transport=memory, split="1,0,0", progress=False)
    dataset = EnergonDataset("", transport=memory)
    monkeypatch.setattr(SqliteIndex, "find", lambda *_: [(i, 0) for i in range(5)])
    error = refused(lambda: dataset.index_of("k"))
    assert (type(error), error.where, error.remedy) == (SelectionError, "key", "Take them by position.")
    assert error.message == "5 samples have the key 'k', in 'a.tar', 'b.tar', 'c.tar', 'd.tar'"


def test_a_pickle_keeps_how_a_data_set_was_opened(tmp_path: Path):
    for name in "ab":
        (tmp_path / f"{name}.tar").write_bytes(tar_bytes([(f"{name}.txt", b"x")]))
    prepare(tmp_path, split="1,1,0", progress=False)
    (tmp_path / "a.tar").unlink()
    for split in (None, "val"):
        dataset = EnergonDataset(tmp_path, damaged_ok=True, images="torchrgb", engine="pread")
        again = pickle.loads(pickle.dumps(dataset.split(split) if split else dataset))
        assert (again.images, again.transport.name, len(again)) == ("torchrgb", "pread", 1 if split else 2)
        assert [problem.kind for problem in again.problems] == ["missing_shard"]
        assert pickle.loads(pickle.dumps(again)).raw("b").key == "b"


def test_what_is_on_this_machine_is_not_copied(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    (tmp_path / "t").mkdir()
    (tmp_path / "d").mkdir()
    (tmp_path / "d/a.tar").write_bytes(tar_bytes(sample_files(0, 1)))
    prepare(tmp_path / "d", split="1,0,0", progress=False)
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path / "t"))
    for engine in ("mmap", "pread"):
        with EnergonDataset(tmp_path / "d", engine=engine) as dataset, NewFile(dataset.transport, "x") as file:
            assert dataset.part("s00000", "txt") == b"text 0\n"
            file.write(b"a")
            assert list((tmp_path / "t").iterdir()) == []


# -- pieces --------------------------------------------------------------------------------------------------------------


def test_what_waits_for_its_upload_is_read_by_nobody_else():
    """The temporary folder is everybody's."""
    before = os.umask(0)
    try:
        with NewFile(MemoryTransport(), "x") as file:
            assert stat.S_IMODE(os.stat(file.temporary).st_mode) == 0o600
    finally:
        os.umask(before)


# -- texts and origins ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("line", "message", "remedy"),
    [
        (
            b'{"text": 5}',
            "the value of 'text' is 5; it must be a text",
            "If the text has another key, pass text_key=….",
        ),
        (b'{"a": 1, "b": 2}', "the line has no text under the key 'text'; its keys are ['a', 'b']", "Pass text_key=…."),
        (b"[1]", "the line is [1]; it must be an object with a text", None),
        (b"{", "the line is no JSON: Expecting property name enclosed in double quotes at column 2", None),
        (b"\xff", "it is not UTF-8: invalid start byte", None),
    ],
)
def test_errors_of_lines(line: bytes, message: str, remedy: str | None):
    source = TextFile("x.jsonl", transport=MemoryTransport({"x.jsonl": b'{"text": "a"}\n\n' + line}))
    error = refused(lambda: source[1])
    assert (type(error), error.message, error.where, error.remedy) == (
        DocumentError,
        message,
        "memory://x.jsonl:3",
        remedy,
    )
    error = refused(lambda: TextFile("y.txt", transport=MemoryTransport()))
    assert error.remedy == "If this is the text itself, write it to a file. From Python pass a list of texts."


def recorded(root: Path, data: dict[str, object], *, cls: bool = False) -> ShardStore:
    metadata = new_metadata(
        family="clip", ckpt="tiny", layers=[0], content_tokens_per_example=2, cls_token=cls, d_model=2, n_examples=2, data=data,
    )  # fmt: skip
    with ShardStore.create(root, metadata, progress=False) as writer:
        writer.append(np.ones((2, 1, 2 + cls, 2), np.float32))
    return ShardStore.open(writer.url)


def texts() -> IndexedDataset:
    idx, bin_ = mmididx_bytes([np.arange(4, dtype=np.int32), np.arange(3, dtype=np.int32)])
    return IndexedDataset("x", transport=MemoryTransport({"x.idx": idx, "x.bin": bin_}))


@pytest.mark.parametrize(
    ("change", "cls", "message", "remedy"),
    [
        ({"examples": {"first": 9}}, False, "example 1 is said to be sample 10, but the source has 2", "Check that the metadata describe this source."),
        ({"examples": {"samples": [0]}}, False, "which does not tell where examples come from", "Stores recorded with data=recorded_from(source) name theirs."),
        ({"content": {}}, False, "data.content is None, which does not tell where examples come from", "Stores recorded with data=recorded_from(source) name theirs."),
        ({"examples": {"first": 0, "skipped": [2**64]}}, False, "data.examples is ", "Stores recorded with data=recorded_from(source) name theirs."),
        ({"content": {"tokens": {"first": -1}}}, False, "data.content is ", "Stores recorded with data=recorded_from(source) name theirs."),
        ({"content": {"tokens": {"first": 1 << 62}}}, False, "data.content is ", "Stores recorded with data=recorded_from(source) name theirs."),
        ({"content": {"patches": {"grid": [1, 2], "image_px": [8, 10**400]}}}, False, "data.content is ", "Stores recorded with data=recorded_from(source) name theirs."),
        ({"content": {"patches": {"grid": [1, 2], "image_px": [8, 16], "framing": {"resize": (1 << 20) + 1, "crop": None}}}}, False, "data.content is ", "Stores recorded with data=recorded_from(source) name theirs."),
        ({"content": {"tokens": {"first": "1"}}}, False, "data.content is ", "Stores recorded with data=recorded_from(source) name theirs."),
        ({}, True, "does not say whether the special token of the store is the first token of a sample", "Record with recorded_from(source, first_token=1) if it is (BOS), else with first_token=0."),
    ],
)  # fmt: skip
def test_errors_of_origins(change: dict, cls: bool, message: str, remedy: str, tmp_path: Path):
    source = texts()
    store = recorded(tmp_path, {**recorded_from(source), **change}, cls=cls)
    error = refused(lambda: store.origin(1, 0, source=source))
    assert (type(error), error.where, error.remedy) == (DocumentError, store.metadata.where, remedy)
    assert message in error.message


class Marked(list[str]):
    """A data set with a fingerprint."""

    _fingerprint = "one"


def test_a_data_set_in_memory_is_compared_and_must_be_passed_on(tmp_path: Path):
    data = Marked(["a", "b"])
    store = recorded(tmp_path, recorded_from(MapStyle(data), first_token=0))
    assert store.origin(1, source=MapStyle(data)).sample == "b"
    error = refused(store.source)
    assert (type(error), error.where) == (DocumentError, store.metadata.where)
    assert error.message == "was recorded from a data set in memory, a 'Marked', which has no address"
    assert error.remedy == "Pass it on: store.origin(…, source=MapStyle(data)), of saev_store.sources."
    other = Marked(["a", "b"])
    other._fingerprint = "two"
    for wrong, message in (
        (other, "fingerprint is 'two', but was 'one'"),
        (Marked("abc"), "n_samples is 3, but was 2"),
    ):
        error = refused(lambda wrong=wrong: store.origin(0, source=MapStyle(wrong)))
        assert (type(error), error.where) == (CorruptShardError, "source")
        assert error.message == f"{message} when the store was recorded"
        assert error.remedy == "Pass the data set that was recorded."
    assert store.origin(0, source=MapStyle(["x", "y"])).sample == "x"  # nothing is known of a list


def lines(raw: bytes) -> TextFile:
    return TextFile("x.jsonl", transport=MemoryTransport({"x.jsonl": raw}))


TWO_LINES = b'{"text": "a"}\n{"text": "b"}\n'


def test_other_texts_than_those_that_were_recorded_are_noticed(tmp_path: Path):
    store = recorded(tmp_path, recorded_from(lines(TWO_LINES), first_token=0))
    assert store.origin(1, source=lines(TWO_LINES)).sample == "b"
    for other, message in (
        (TWO_LINES.replace(b"b", b"c"), "digest is "),
        (TWO_LINES[:14], "n_samples is 1, but was 2"),
    ):
        error = refused(lambda other=other: store.origin(0, source=lines(other)))
        assert (type(error), error.where) == (CorruptShardError, "source")
        assert error.message.startswith(message)


@pytest.mark.parametrize(
    ("neighbours", "before", "after"), [(0, (), ()), (1, (14,), (16,)), (2, (14,), (16, 17)), (9, (14,), (16, 17))]
)
def test_a_token_of_a_text_has_the_neighbours_that_were_recorded(
    neighbours: int, before: tuple, after: tuple, tmp_path: Path
):
    """The source has texts, not tokens: what the store has of both sides."""
    metadata = new_metadata(
        family="gpt2", ckpt="tiny", layers=[0], content_tokens_per_example=4, cls_token=False, d_model=2, n_examples=2, protocol="3.0",
        token_arrays={"token_ids": "int32", "document_ids": "int64", "positions": "int32"}, text={"layout": "window", "bos": False},
        data=recorded_from(lines(TWO_LINES), by_token=True),
    )  # fmt: skip
    with ShardStore.create(tmp_path, metadata, progress=False) as writer:
        writer.append(
            np.ones((2, 1, 4, 2), np.float32),
            token_ids=np.arange(10, 18).reshape(2, 4),
            document_ids=np.repeat([0, 1], 4).reshape(2, 4),
            positions=np.tile(np.arange(4), 2).reshape(2, 4),
        )
    found = ShardStore.open(writer.url).origin(1, 1, source=lines(TWO_LINES), neighbours=neighbours)
    assert (found.sample_idx, found.sample) == (1, "b")
    assert found.place == TokenPlace(1, 15, before, after)


def test_servers_are_asked_only_where_that_is_allowed(tmp_path: Path):
    for number, scheme in enumerate(("s3", "gs", "http", "https", "ftp", "simplecache::file")):
        data = {
            "source": {"url": f"{scheme}://host/x.idx", "digest": {"scope": "full"}},
            "examples": {"first": 0},
            "content": {},
        }
        store = recorded(tmp_path / str(number), data)
        error = refused(store.source)
        assert (type(error), error.where) == (UnsafeContentError, store.metadata.where)
        assert error.remedy == "Pass outside_ok=True if you trust the store, or url= of the source."
    for number, address in enumerate(
        ("/none/x.idx", "file:///none/x.idx", "local:///none/x.idx", "memory://none/x.idx"), 10
    ):
        data = {"source": {"url": address, "digest": {"scope": "full"}}, "examples": {"first": 0}, "content": {}}
        assert type(refused(recorded(tmp_path / str(number), data).source)) is NotFoundError
