"""Text files as sources: against Python's own reading of the file, whatever the pieces in which it is read."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
import xxhash

from saev_store.errors import CorruptShardError, DocumentError, NotFoundError, SelectionError
from saev_store.sources import TextFile, reopen

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
    monkeypatch.setattr("saev_store.sources.text_file.CHUNK_BYTES", piece)
    source = TextFile(write_lines(tmp_path / "x.jsonl", end=end, key="content"), text_key="content")
    assert [*source] == TEXTS
    assert len(source) == 6
    assert source[-1] == "the end"
    order = [5, 0, 1, 2, 2, 3, -1, 4]
    assert [*source.rows(order)] == [TEXTS[i] for i in order]
    assert [[*batch] for batch in source.batches(4)] == [TEXTS[:4], TEXTS[4:]]
    assert (source.key(3), source.index_of("3")) == ("3", 3)
    with pytest.raises(SelectionError):
        source[6]


def test_a_file_without_lines_is_one_text(tmp_path: Path) -> None:
    for name, content in {"a.txt": "one\r\ntwo\rthree\n\n", "b": "größer", "c.md": ""}.items():
        (tmp_path / name).write_bytes(content.encode())
        source = TextFile(tmp_path / name)
        assert [*source] == [(tmp_path / name).read_text(encoding="utf-8")]  # which translates ends of lines
    (tmp_path / "empty.jsonl").write_bytes(b"")
    assert [*TextFile(tmp_path / "empty.jsonl")] == []


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
        with pytest.raises(CorruptShardError, match=r"digest is .*was described|n_samples is"):
            reopen(described)
    (tmp_path / "x.jsonl").unlink()
    with pytest.raises(NotFoundError, match=r"x\.jsonl"):
        reopen(described)
    with pytest.raises(DocumentError, match="text_key is 3"):
        reopen({**described, "text_key": 3})


def test_the_line_of_a_mistake_is_named(tmp_path: Path) -> None:
    path = tmp_path / "x.jsonl"
    path.write_bytes(b'{"text": "a"}\n\n{"text": 5}\n{"text": "b"\n\xff\n["b"]\n{"text": "c"}')
    source = TextFile(path)
    assert (source[0], source[5]) == ("a", "c")
    for position, line, why in [
        (1, 3, "the value of 'text' is 5"),
        (2, 4, "no JSON"),
        (3, 5, "not UTF-8"),
        (4, 6, "an object with a text"),
    ]:
        with pytest.raises(DocumentError, match=rf"x\.jsonl:{line}: .*{why}"):
            source[position]
    assert source.validate().ok
    report = source.validate(deep=True)
    assert [problem.lost for problem in report.problems] == [((i, i + 1),) for i in range(1, 5)]
    assert [problem.where.rpartition(":")[2] for problem in report.problems] == ["3", "4", "5", "6"]


def test_neighbours_are_read_together(tmp_path: Path) -> None:
    source = TextFile(write_lines(tmp_path / "x.jsonl"))
    before = source.transport.counters.requests
    assert [*source.rows(np.arange(6))] == TEXTS
    assert source.transport.counters.requests <= before + 1
