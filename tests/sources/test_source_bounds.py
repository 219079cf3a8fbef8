"""Limits of documents and arguments of data sets on both sides, and remedies of their errors."""

from __future__ import annotations

import os
import pickle
import stat
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
from api import MemoryTransport
from energon_tars import METADATASET_HEAD as HEAD
from energon_tars import sample_files, tar_bytes
from token_files import llmbatch_bytes, mmididx_bytes

from saev_store import ShardStore, new_metadata
from saev_store.errors import (
    CorruptShardError,
    DocumentError,
    NotFoundError,
    SaevStoreError,
    SelectionError,
    UnsafeContentError,
)
from saev_store.sources import ImageFolder, MapStyle, Source, TextFile, TokenPlace, recorded_from
from saev_store.sources._new_file import NewFile
from saev_store.sources.energon import EnergonDataset
from saev_store.sources.energon.joins import FolderFiles, JoinedDataset
from saev_store.sources.energon.metadataset import open_metadataset, read_metadataset
from saev_store.sources.energon.prepare import prepare
from saev_store.sources.llmbatch import BatchFileReader
from saev_store.sources.mmididx import IndexedDataset, TokenSamples


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


# -- splits and counts ---------------------------------------------------------------------------------------------------


# -- metadata sets -------------------------------------------------------------------------------------------------------


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
