"""What the parts, fields and documents of Energon data sets mean: parts by their endings, fields by their types, and the newest document."""

from __future__ import annotations

import io
import json
import sqlite3
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
from energon_tars import sample_files, tar_bytes
from photographs import noise, png

from saev_store.errors import (
    DocumentError,
    NotFoundError,
    SaevStoreError,
    SelectionError,
)
from saev_store.sources.energon import EnergonDataset, _scan_all
from saev_store.sources.energon.field_map import decode
from saev_store.sources.energon.filesystem import EnergonFileSystem
from saev_store.sources.energon.index_sqlite import SqliteIndex
from saev_store.sources.energon.joins import FolderFiles, JoinedDataset
from saev_store.sources.energon.nvmeta import parse_definition, parse_info, parse_splits
from saev_store.sources.energon.prepare import prepare
from saev_store.sources.energon.samples import ARRAY_FIELDS, SAMPLE_TYPES, build
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


# -- parts and fields --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("endings", "raw", "value"),
    [
        ("txt text transcript x.TXT", "ü 1".encode(), "ü 1"),
        ("cls cls2 index inx id x.Cls", b" 12\n", 12),
        ("json jsn", b'{"a": [1]}', {"a": [1]}),
        ("mp msg", b"\x81\xa1a\x01", {"a": 1}),
        ("bin ten pyd pickle pth npz tar xtxt txt.gz", b"12", b"12"),
    ],
)
def test_what_the_ending_of_a_part_says(endings: str, raw: bytes, value: object):
    if "mp" in endings.split():
        pytest.importorskip("msgpack")
    for ending in endings.split():
        assert decode(ending, raw, where="x") == value
        assert type(decode(ending, raw, where="x")) is type(value)


def test_images_as_they_are_asked_for():
    pixels = noise(3, 4, 5)
    raw = png(pixels)
    np.testing.assert_array_equal(decode("a.PNG", raw, where="x"), pixels)
    light = decode("png", raw, where="x", images="torchrgb")
    np.testing.assert_array_equal(light, pixels.transpose(2, 0, 1).astype(np.float32) / np.float32(255))
    assert (light.dtype, light.flags.c_contiguous) == (np.float32, True)
    assert light.max() <= 1
    assert decode("png", raw, where="x", images="bytes") is raw
    memory = prepared(
        {"a.tar": [("a.png", raw), ("a.txt", b"t")]}, sample_type="CaptioningSample", field_map={"image": "png", "caption": "txt"}
    )  # fmt: skip
    for images, expected in (("rgb8", pixels), ("torchrgb", light)):
        found = EnergonDataset("", transport=memory, images=images).sample(0)
        np.testing.assert_array_equal(found.image, expected)
    assert EnergonDataset("", transport=memory, images="bytes").sample("a").image == raw


@pytest.mark.parametrize(("n", "is_right"), [(255, True), (256, True), (257, False)])
def test_a_number_has_so_many_digits_at_most(n: int, is_right: bool):
    if is_right:
        assert decode("cls", b"7" * n, where="x") == int("7" * n)
    else:
        assert "257 bytes are no number; it may have 256" in refused(lambda: decode("cls", b"7" * n, where="x")).message


def test_fields_of_all_types():
    """As Energon's specification lists them: those that a field map needs, and those that it may fill."""
    expected = {
        "Sample": ("", ""),
        "CaptioningSample": ("image caption", ""),
        "ImageSample": ("image", ""),
        "ImageClassificationSample": ("image", "label label_name"),
        "InterleavedSample": ("sequence", ""),
        "MultiChoiceVQASample": ("image context", "choices correct_choice_idx"),
        "OCRSample": (
            "image text",
            "block_boxes block_classes block_text lines_boxes lines_text words_boxes words_text chars_boxes chars_text",
        ),
        "TextSample": ("text", ""),
        "VidQASample": ("video context", "answers answer_weights"),
        "VQASample": ("image context", "answers answer_weights"),
        "VQAOCRSample": ("image context text", "answers answer_weights words_boxes words_text"),
    }
    assert {
        name: (" ".join(kind.required()), " ".join(kind.optional())) for name, kind in SAMPLE_TYPES.items()
    } == expected
    error = refused(lambda: SAMPLE_TYPES["VQASample"].check_fields(["image", "x"], where="field_map"))
    assert error.message == "field_map does not fit: VQASample has no field 'x', needs 'context'"
    assert error.remedy == "Its fields are image, context, answers, answer_weights."


@pytest.mark.parametrize("name", ["answer_weights", "block_boxes", "lines_boxes", "words_boxes", "chars_boxes"])
def test_lists_of_numbers_become_arrays(name: str):
    assert len(ARRAY_FIELDS) == 5
    kind = SAMPLE_TYPES["VQASample" if name == "answer_weights" else "OCRSample"]
    plain = dict.fromkeys(kind.required(), b"")

    def made(value: object) -> object:
        return getattr(build(kind, {**plain, name: value}, key="k", restore_key=("u", "s", 1), where="x"), name)

    for value in ([1, 2], [[0.5, 1], [2, 3]], [], [True, False]):
        found = made(value)
        assert isinstance(found, np.ndarray)
        assert found.tolist() == value
    assert made(None) is None
    assert made("text") == "text"
    for wrong in (["a"], [[1], [2, 3]], [None], [{}]):
        error = refused(lambda wrong=wrong: made(wrong))
        assert (type(error), error.where) == (DocumentError, "x")
        assert error.message.startswith(f"{name} is [")
        assert error.message.endswith("it must be numbers in even rows")


def test_a_sample_says_where_it_is_from():
    dataset = EnergonDataset("", transport=two()).split("val")
    sample = dataset.sample(1)
    assert (sample.__key__, sample.__restore_key__, sample.__subflavors__) == (
        "s00003",
        (dataset.url, "b.tar", 1),
        None,
    )
    error = refused(lambda: dataset[1]["jpg"])
    assert (type(error), error.where) == (SelectionError, "part")
    assert error.message == "sample 's00003' has no part 'jpg'; it has json, txt"
    assert refused(lambda: dataset.part(1, "jpg")).message == error.message
    assert refused(lambda: dataset.file("nodot")).message == "'nodot' is no name of a part: it has no dot"


# -- documents ---------------------------------------------------------------------------------------------------------


def test_documents_that_are_not_there_are_told():
    memory = two()
    for name in ("split.yaml", "dataset.yaml"):
        memory.delete(f".nv-meta/{name}")
    dataset = EnergonDataset("", transport=memory)
    assert [(each.kind, each.where, each.severity) for each in dataset.problems] == [
        ("no_splits", ".nv-meta/split.yaml", "info"), ("no_definition", ".nv-meta/dataset.yaml", "info"),
    ]  # fmt: skip
    assert (dataset.splits, dataset.sample_type) == (("all",), None)
    assert dataset.split("all").shards == ("a.tar", "b.tar")
    assert set(dataset.sample(0).parts) == {"json", "txt"}
    memory.put(".nv-meta/split.json", b'{"split_parts": {"one": ["b.tar"]}}')
    assert EnergonDataset("", transport=memory).split("one").shards == ("b.tar",)
    memory.delete(".nv-meta/.info.json")
    error = refused(lambda: EnergonDataset("", transport=memory))
    assert (type(error), error.where) == (NotFoundError, "memory://")
    assert error.remedy == "Run `saev-store prepare` on a folder of tars."


def test_the_newest_document_counts():
    memory = two()
    memory.put(".nv-meta/.info.yaml", b"shard_counts: {other.tar: 9}")
    memory.put(".nv-meta/split.json", b'{"split_parts": {"old": ["b.tar"]}}')
    dataset = EnergonDataset("", transport=memory)
    assert (dataset.shards, dataset.splits) == (("a.tar", "b.tar"), ("train", "val", "test"))


def test_splits_against_the_index():
    document = {
        "split_parts": {"x": ["a.tar", "b.tar", "a.tar"], "y": ["c/d.tar"]},
        "exclude": ["c/d.tar/k/l", "b.tar"],
    }
    found = parse_splits(json.dumps(document).encode(), INFO, where="split.json")
    assert found.parts == {"x": ("a.tar", "a.tar"), "y": ("c/d.tar",)}
    assert found.exclude == {("c/d.tar", "k/l")}
    assert [(each.kind, each.message, each.severity) for each in found.problems] == [
        ("repeated_shard", "split 'x' lists a shard twice: its samples come twice", "warning")
    ]
    many = {"split_parts": {"x": [f"{i}.tar" for i in range(10)]}}
    error = refused(lambda: parse_splits(json.dumps(many).encode(), INFO, where="split.json"))
    assert error.message.endswith("'6.tar', '7.tar' and 2 more")
    many["split_parts"]["x"] = many["split_parts"]["x"][:8]
    assert refused(lambda: parse_splits(json.dumps(many).encode(), INFO, where="split.json")).message.endswith(
        "'7.tar'"
    )
    gone = {"split_parts": {"x": ["a.tar"]}, "exclude": ["nothing/here"]}
    (problem,) = parse_splits(json.dumps(gone).encode(), INFO, where="split.json").problems
    assert (problem.kind, problem.severity, problem.where) == ("unknown_exclude", "info", "split.json")


@pytest.mark.parametrize(("count", "is_right"), [(0, True), (2**40 - 1, True), (2**40, False), (-1, False)])
def test_a_shard_has_so_many_samples_at_most(count: int, is_right: bool):
    raw = json.dumps({"shard_counts": {"a.tar": count}, "energon_version": "7.4.1"}).encode()
    if is_right:
        found = parse_info(raw, where="x.json")
        assert (found.shards, found.counts.tolist(), found.version) == (("a.tar",), [count], "7.4.1")
    else:
        assert refused(lambda: parse_info(raw, where="x.json")).message == f"'a.tar': {count} is no number of samples"


@pytest.mark.parametrize("name", ["sample_loader", "part_filter", "decoder"])
def test_code_is_named_but_not_run(name: str):
    text = f"sample_type: {{__module__: megatron.energon, __class__: TextSample}}\nfield_map: {{text: txt}}\n{name}: x.py:f\n"
    found = parse_definition(text.encode(), where="dataset.yaml")
    assert [(each.kind, each.severity) for each in found.problems] == [("code_not_run", "warning")]
    assert found.problems[0].message == f"{name} is code ('x.py:f'); it is not run, parts are returned as they are"
    assert found.sample_type == (None if name == "sample_loader" else "TextSample")


@pytest.mark.parametrize(
    ("module", "kind", "found"),
    [
        ("megatron.energon", "TextSample", "TextSample"), ("megatron.energon.flavors.x", "TextSample", "TextSample"),
        ("megatron.energonx", "TextSample", None), ("megatron", "TextSample", None), ("megatron.energon", "CrudeWebdataset", "CrudeWebdataset"),
        ("megatron.energon", "OtherSample", None), ("megatron.energon", "3", None),
    ],
)  # fmt: skip
def test_which_types_are_energons(module: str, kind: str, found: str | None):
    definition = parse_definition(f"__module__: {module}\n__class__: {kind}".encode(), where="x")
    assert definition.sample_type == found
    assert [each.kind for each in definition.problems] == ([] if found else ["unknown_sample_type"])


def test_only_whole_names_are_files():
    memory = prepared({"a.tar": [("d/a.txt", b"12"), ("d/a.txt.gz", b"345"), ("d/ab.txt", b"6")]})
    files = EnergonFileSystem(dataset=EnergonDataset("", transport=memory))
    sizes = {"d/a.txt": 2, "d/a.txt.gz": 3, "d/ab.txt": 1}
    for name, nbytes in sizes.items():
        assert files.info(name) == files.info(f"energon://{name}") == {"name": name, "size": nbytes, "type": "file"}
        assert files.ls(name, detail=False) == [name]
        assert len(files.cat_file(name)) == nbytes
    for wrong in ("d/a.tx", "d/a.", "d/a.txt.g", "d/a", "a.txt", "d/b.txt", "e"):
        assert type(refused(lambda wrong=wrong: files.info(wrong))) is NotFoundError
    assert files.info("d") == {"name": "d", "size": 0, "type": "directory"}
    assert files.info("") == {"name": "", "size": 0, "type": "directory"}
    assert files.ls("d") == [files.info(name) for name in sizes]


@pytest.mark.parametrize("raw", [b"7.5", b"7.0", b"", b"seven", b"7 8", b"0x7", b"1e3", b"7;"])
def test_what_is_no_integer_is_refused(raw: bytes):
    for ending in ("cls", "id"):
        error = refused(lambda ending=ending: decode(ending, raw, where="x"))
        assert (type(error), error.where) == (DocumentError, "x")
        assert error.message.startswith(f"part '{ending}' does not decode: ")
        assert [problem.kind for problem in error.problems] == ["bad_part"]
    assert [decode("cls", each, where="x") for each in (b"-7", b"+7", b" 7\n", b"007")] == [-7, 7, 7, 7]


def test_samples_are_shown_without_their_bytes():
    memory = prepared({"a.tar": [("k.json", b'{"f": "m.bin"}'), ("k.bin", b"CONTENT")]})
    dataset = EnergonDataset("", transport=memory)
    assert repr(dataset[0]) == "RawSample(key='k', shard='a.tar', sample_index=0)"
    media = FolderFiles("", transport=MemoryTransport({"m.bin": b"CONTENT"}))
    joined = JoinedDataset(dataset, {"m": media}, names={"m": "json[f]"})
    assert joined[0].media == {"m": {"m.bin": b"CONTENT"}}
    assert "CONTENT" not in repr(joined[0])


@pytest.mark.parametrize("content", [b"{", b"", b"\xff", b'{"f": "m.bin"'])
def test_a_sample_whose_names_do_not_decode_is_none_without_files(content: bytes):
    media = FolderFiles("", transport=MemoryTransport({"m.bin": b"CONTENT"}))
    memory = prepared({"a.tar": [("j.json", b'{"g": 1}'), ("k.json", content)]})
    joined = JoinedDataset(EnergonDataset("", transport=memory), {"m": media}, names={"m": "json[f]"})
    assert joined[0].media == {"m": {}}  # it names none
    for read in (lambda: joined[1], lambda: joined.rows([0, 1]), lambda: joined.names(joined.primary[1], "m")):
        with pytest.raises(DocumentError, match="part 'json' does not decode"):
            read()


@pytest.mark.parametrize("n_workers", [1, 2, 3, 4, 9])
@pytest.mark.parametrize("n_shards", [1, 2, 3, 7])
def test_workers_share_the_tars_in_turn(n_workers: int, n_shards: int, monkeypatch: pytest.MonkeyPatch):
    """Each scans what it is sent; answers are taken in the order of the tars."""
    made: list[Worker] = []

    class Worker:
        def __init__(self, command: list[str], **_: object) -> None:
            assert command[-1] == "/root"
            self.stdin, self.stdout, self.is_killed = io.StringIO(), self, False
            made.append(self)

        def readline(self) -> str:
            if not hasattr(self, "left"):
                self.left = json.loads(self.stdin.getvalue())
            shard = self.left.pop(0)
            return "null\n" if shard == "2.tar" else json.dumps([shard, 7, 5, ["odd"], []]) + "\n"

        def kill(self) -> None:
            self.is_killed = True

        def __exit__(self, *_: object) -> None:
            pass

    monkeypatch.setattr(_scan_all.subprocess, "Popen", Worker)
    shards = [f"{i}.tar" for i in range(n_shards)]
    answers = _scan_all._in_processes("/root", shards, n_workers)
    found = [None if each is None else (each.shard, each.nbytes, each.end, each.oddities) for each in answers]
    assert found == [None if shard == "2.tar" else (shard, 7, 5, ("odd",)) for shard in shards]
    assert len(made) == min(n_workers, n_shards)
    assert all(worker.is_killed and worker.left == [] for worker in made)


@pytest.mark.parametrize(("n", "is_right"), [(1000, True), (1 << 19, True), ((1 << 20) + 1, False)])
def test_a_name_in_an_index_has_a_limit(n: int, is_right: bool, tmp_path: Path):
    """A text of gigabytes would fill the memory."""
    db = sqlite3.connect(tmp_path / "x")
    db.execute("CREATE TABLE samples (tar_file_id, sample_key, sample_index, byte_offset, byte_size)")
    db.execute("INSERT INTO samples VALUES (0, ?, 0, 0, 512)", ("k" * n,))
    db.commit()
    db.close()
    index = SqliteIndex(str(tmp_path / "x"), where="x")
    if is_right:
        assert index.samples(0, 0, 1) == [(0, "k" * n, 0, 512)]
    else:
        assert refused(lambda: index.samples(0, 0, 1)).message == "the database cannot be read: string or blob too big"
    index.close()
