"""Texts are known by their first bytes, not by the names of their files."""

from __future__ import annotations

import gzip
import json
import lzma
from pathlib import Path

import numpy as np
import pytest

from saev_store.errors import ArgumentError, DocumentError, SaevStoreError
from saev_store.sources import TextFile, reopen

LINES = b"".join(json.dumps({"text": text, "n": 1}).encode() + b"\n" for text in ("a cat", "the end"))


def refusal(call, *arguments, **options) -> SaevStoreError:
    with pytest.raises(SaevStoreError) as caught:
        call(*arguments, **options)
    return caught.value


def put(folder: Path, name: str, content: bytes) -> Path:
    (folder / name).write_bytes(content)
    return folder / name


def test_text_file_finds_json_lines_whatever_their_name(tmp_path):
    for name in ("x.jsonl", "x.ndjson", "x.json", "x.txt", "x"):
        for content in (LINES, b"\n  " + LINES, LINES.replace(b'{"', b'{ "')):
            source = TextFile(put(tmp_path, name, content))
            assert [*source] == ["a cat", "the end"]
            assert [*reopen(source.describe())] == ["a cat", "the end"]
        other = TextFile(put(tmp_path, name, LINES.replace(b'"text"', b'"content"')), text_key="content")
        assert [*other] == ["a cat", "the end"]
    for text in (b"", b"a cat\n", b"{curly} and [square]", b"[1] a list of references", b"\\begin{document}"):
        assert [*TextFile(put(tmp_path, "x.txt", text))] == [text.decode()]


def test_text_file_of_something_else_is_refused(tmp_path):
    pretty = json.dumps([{"text": "a cat"}], indent=1).encode()
    for content in (
        gzip.compress(LINES), lzma.compress(LINES), b"\x28\xb5\x2f\xfd" + LINES, b"BZh9" + LINES, b"PK\3\4" + LINES,
        pretty, b'[{"text": "a cat"}]', json.dumps({"text": "a cat"}, indent=1).encode(),
    ):  # fmt: skip
        path = put(tmp_path, "x.txt", content)
        error = refusal(TextFile, path)
        assert (type(error), error.where, error.remedy is None) == (DocumentError, str(path), False)
    error = refusal(TextFile, put(tmp_path, "x.txt", b"a cat"), text_key="content")
    assert (type(error), error.where) == (ArgumentError, "text_key")


def test_texts_of_a_stream_of_samples_are_under_their_key():
    """As `load_dataset(..., streaming=True)` gives them: without a length."""
    pytest.importorskip("torch")
    from saev_store.record import Texts

    samples = [{"ids": np.array([5, 6, 7]), "n": 1}, {"ids": np.array([3]), "n": 2}]
    texts = Texts((sample for sample in samples), context=4, bos=None, text_key="ids")
    ids, is_token = next(texts.batches(0, 2)).inputs
    assert ids[np.asarray(is_token)].tolist() == [5, 6, 7, 3]
    error = refusal(Texts, (sample for sample in samples), context=4, bos=None)
    assert (type(error), error.where) == (ArgumentError, "text_key")
