"""Texts are JSON lines, whatever the names of their files are."""

from __future__ import annotations

import gzip
import json
from pathlib import Path

import pytest
import xxhash

from saev_store.errors import (
    CorruptShardError,
    DocumentError,
    NotFoundError,
    SaevStoreError,
    SelectionError,
)
from saev_store.sources import TextFile, reopen

LINES = b"".join(json.dumps({"text": text, "n": 1}).encode() + b"\n" for text in ("a cat", "the end"))


def refusal(call, *arguments, **options) -> SaevStoreError:
    with pytest.raises(SaevStoreError) as caught:
        call(*arguments, **options)
    return caught.value


def put(folder: Path, name: str, content: bytes) -> Path:
    (folder / name).write_bytes(content)
    return folder / name


def test_text_file_takes_any_name_and_key(tmp_path):
    for name in ("x.jsonl", "x.txt", "x"):
        for content in (LINES, b"\n  " + LINES, LINES.replace(b'{"', b'{ "')):
            source = TextFile(put(tmp_path, name, content))
            assert [*source] == ["a cat", "the end"]
            assert [*reopen(source.describe())] == ["a cat", "the end"]
        other = TextFile(put(tmp_path, name, LINES.replace(b'"text"', b'"content"')), text_key="content")
        assert [*other] == ["a cat", "the end"]


def test_a_text_that_is_not_json_lines_is_refused(tmp_path):
    pretty = json.dumps([{"text": "a cat"}], indent=1).encode()
    for content in (gzip.compress(LINES), b"a cat", pretty, b'[{"text": "a cat"}]'):
        path = put(tmp_path, "x.txt", content)
        error = refusal(TextFile(path).__getitem__, 0)
        assert (type(error), error.where, error.remedy is None) == (DocumentError, f"{path}:1", False)


# -- positions ---------------------------------------------------------------------------------------------------------

TEXTS = ["a cat", "", "größer\nin two lines", "\U0001f600" * 5, "x" * 40, "the end"]


def write_lines(path: Path, *, end: str = "\n", key: str = "text") -> Path:
    """A JSONL file with lines that have no content."""
    lines = [json.dumps({"n": 1, key: text}, ensure_ascii=False) for text in TEXTS]
    path.write_bytes(f" {end}{end.join([*lines[:3], '', '  ', *lines[3:]])}".encode())
    return path


@pytest.mark.parametrize("piece", [1, 7, 64, 8 << 20])
@pytest.mark.parametrize("end", ["\n", "\r\n", "\n\n", "\n \t\n"])
def test_the_texts_of_lines(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, piece: int, end: str) -> None:
    monkeypatch.setattr("saev_store.sources._files.CHUNK_BYTES", piece)
    source = TextFile(write_lines(tmp_path / "x.jsonl", end=end, key="content"), text_key="content")
    assert [*source] == TEXTS
    assert len(source) == 6
    assert source[-1] == "the end"
    order = [5, 0, 1, 2, 2, 3, -1, 4]
    assert [*source.rows(order)] == [TEXTS[i] for i in order]
    assert [[*batch] for batch in source.batches(4)] == [TEXTS[:4], TEXTS[4:]]
    assert source.key(3) == "3"
    with pytest.raises(SelectionError):
        source[6]


def test_an_empty_file_has_no_texts(tmp_path: Path) -> None:
    assert [*TextFile(put(tmp_path, "empty.jsonl", b""))] == []


def test_a_file_of_any_file_system_is_described_and_opened_again(tmp_path: Path) -> None:
    import fsspec

    raw = write_lines(tmp_path / "x.jsonl").read_bytes()
    fsspec.filesystem("memory").pipe("/texts/x.jsonl", raw)
    digest = xxhash.xxh3_128(len(raw).to_bytes(8, "little") + raw).hexdigest()
    for address in ("memory://texts/x.jsonl", tmp_path / "x.jsonl"):
        source = TextFile(address)
        described = source.describe()
        assert described == {
            "format": "text",
            "url": source.url,
            "text_key": "text",
            "n_samples": 6,
            "digest": {"algorithm": "xxh3_128", "scope": "full", "value": digest},
        }
        assert [*reopen(json.loads(json.dumps(described)))] == TEXTS
    assert "x.jsonl" in repr(source)
    for position in (0, len(raw) // 2, len(raw) - 1):  # no byte is left out of the digest
        changed = bytearray(raw)
        changed[position] ^= 1
        (tmp_path / "x.jsonl").write_bytes(changed)
        with pytest.raises(CorruptShardError):
            reopen(described)
    (tmp_path / "x.jsonl").unlink()
    with pytest.raises(NotFoundError):
        reopen(described)


def test_the_line_of_a_mistake_is_named(tmp_path: Path) -> None:
    path = tmp_path / "x.jsonl"
    path.write_bytes(b'{"text": "a"}\n\n{"text": 5}\n{"text": "b"\n\xff\n["b"]\n{"text": "c"}')
    source = TextFile(path)
    assert (source[0], source[5]) == ("a", "c")
    for position, line in ((1, 3), (2, 4), (3, 5), (4, 6)):
        error = refusal(source.__getitem__, position)
        assert (type(error), error.where) == (DocumentError, f"{path}:{line}")
    assert source.validate().ok
    report = source.validate(deep=True)
    assert [problem.lost for problem in report.problems] == [((i, i + 1),) for i in range(1, 5)]
    assert [problem.where.rpartition(":")[2] for problem in report.problems] == ["3", "4", "5", "6"]
