"""Texts of an Energon data set as documents of token ids."""

from __future__ import annotations

import tarfile
from pathlib import Path

import numpy as np
import pytest

from saev_store.cli import main
from saev_store.errors import ArgumentError, CorruptShardError, DocumentError, SelectionError, StoreExistsError
from saev_store.sources import open_source
from saev_store.sources.convert import samples_to_documents
from saev_store.sources.energon import EnergonDataset
from saev_store.sources.mmididx import IndexedDataset, IndexedDatasetBuilder

DATA = Path(__file__).parents[1] / "data" / "energon" / "captioning_ratio_split" / "dataset"


def ids(text: str) -> list[int]:
    return [ord(character) for character in text]


def truth(source: EnergonDataset) -> list[str]:
    """The texts in the order of the source, read with the standard library's tarfile."""
    found: dict[tuple[str, str], str] = {}
    for path in DATA.rglob("*.tar"):
        with tarfile.open(path) as tar:
            for member in tar:
                key, _, part = member.name.partition(".")
                if part == "txt":
                    file = tar.extractfile(member)
                    assert file is not None
                    found[str(path.relative_to(DATA)), key] = file.read().decode()
    return [found[source.raw(i).shard, source.key(i)] for i in range(len(source))]


def test_every_text_is_a_document(tmp_path: Path) -> None:
    source = open_source(DATA)
    assert isinstance(source, EnergonDataset)
    n = samples_to_documents(source, tmp_path / "text", ids, end_token=3, progress=False)
    texts = truth(source)
    assert n == len(texts) > 1
    with IndexedDataset(tmp_path / "text") as documents:
        assert [np.asarray(tokens).tolist() for tokens in documents] == [[*ids(text), 3] for text in texts]
    with pytest.raises(StoreExistsError):
        samples_to_documents(source, tmp_path / "text", ids)
    assert samples_to_documents(source, tmp_path / "text", lambda _: [], overwrite=True) == n
    with IndexedDataset(tmp_path / "text") as documents:
        assert documents.sizes.tolist() == [0] * n


@pytest.mark.parametrize(
    ("kwargs", "tokenizer", "error"),
    [
        ({"part": "nothing"}, ids, SelectionError),
        ({"part": "jpg"}, ids, DocumentError),
        ({"encoding": "no such"}, ids, DocumentError),
        ({"encoding": "utf-16"}, ids, DocumentError),
        ({"dtype": np.uint8, "end_token": 300}, ids, ArgumentError),
        ({}, lambda text: [0.5], ArgumentError),
        ({}, lambda text: [[1, 2]], ArgumentError),
        ({}, int, ArgumentError),
        ({}, lambda text: len(text) + text, ArgumentError),
    ],
)
def test_nothing_is_left_behind_by_what_fails(
    kwargs: dict[str, object], tokenizer: object, error: type, tmp_path: Path
) -> None:
    source = open_source(DATA)
    with pytest.raises(error):
        samples_to_documents(source, tmp_path / "text", tokenizer, **kwargs)
    assert list(tmp_path.iterdir()) == []


def test_what_is_not_what_was_written_is_noticed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    right = IndexedDatasetBuilder.add_document
    source = open_source(DATA)
    monkeypatch.setattr(
        IndexedDatasetBuilder, "add_document", lambda self, tokens: right(self, np.asarray(tokens)[::-1])
    )
    with pytest.raises(CorruptShardError, match="read back"):
        samples_to_documents(source, tmp_path / "other", ids)


def test_texts_inside_json(tmp_path: Path) -> None:
    source = open_source(DATA)
    assert isinstance(source, EnergonDataset)
    n = samples_to_documents(source, tmp_path / "a", ids, part="none,detail.json[caption]")
    with IndexedDataset(tmp_path / "a") as documents:
        assert [tokens.tolist() for tokens in documents] == [ids(f"c{i}") for i in range(n)]
    for wrong, error in (
        ("detail.json[i]", DocumentError),
        ("detail.json[none]", DocumentError),
        ("detail.json[", ArgumentError),
    ):
        with pytest.raises(error):
            samples_to_documents(source, tmp_path / "b", ids, part=wrong)
    assert {path.name for path in tmp_path.iterdir()} == {"a.idx", "a.bin"}


def test_on_the_command_line(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    def run(*arguments: object) -> tuple[int, str, str]:
        code = main([*map(str, arguments)])
        return code, *capsys.readouterr()

    source = open_source(DATA).split("train")
    assert isinstance(source, EnergonDataset)
    texts = truth(source)
    code, out, _ = run(
        "convert", DATA, tmp_path / "a.idx", "--tokenizer", "bytes", "--split", "train", "--end-token", 0
    )
    assert (code, out.strip()) == (0, f"{tmp_path / 'a.idx'}: {len(texts)} documents")
    assert [tokens.tolist() for tokens in IndexedDataset(tmp_path / "a")] == [[*text.encode(), 0] for text in texts]
    for wrong in ([], ["--tokenizer", tmp_path / "none.json"], ["--tokenizer", DATA / ".nv-meta/.info.json"]):
        assert run("convert", DATA, tmp_path / "b.idx", *wrong)[0] in {1, 2}
    assert run("convert", DATA, tmp_path / "b.idx", "--tokenizer", "bytes", "--split", "none")[0] == 2
    assert run("convert", DATA, tmp_path / "b.idx", "--tokenizer", "bytes", "--part", "none")[0] == 2
    assert {path.name for path in tmp_path.iterdir()} == {"a.idx", "a.bin"}


def test_a_tokenizer_file(tmp_path: Path) -> None:
    tokenizers = pytest.importorskip("tokenizers")
    texts = truth(open_source(DATA))
    words = {word: number for number, word in enumerate(dict.fromkeys(" ".join(texts).split()))}
    made = tokenizers.Tokenizer(tokenizers.models.WordLevel({**words, "?": len(words)}, unk_token="?"))
    made.pre_tokenizer = tokenizers.pre_tokenizers.WhitespaceSplit()
    made.save(str(tmp_path / "tokenizer.json"))
    command = ["convert", str(DATA), str(tmp_path / "a.idx"), "--tokenizer", str(tmp_path / "tokenizer.json")]
    assert main([*command, "--dtype", "uint16"]) == 0
    with IndexedDataset(tmp_path / "a") as documents:
        assert documents.dtype == np.uint16
        assert [tokens.tolist() for tokens in documents] == [[words[word] for word in text.split()] for text in texts]
