"""What a conversion writes to: never a file of its source. And what it says of samples of which there are none."""

from __future__ import annotations

import io
import os
import tarfile
from pathlib import Path

import numpy as np
import pytest

from saev_store.cli import main
from saev_store.errors import ArgumentError
from saev_store.sources.convert import documents_to_batches, samples_to_documents
from saev_store.sources.energon.prepare import prepare
from saev_store.sources.llmbatch import BatchFileReader, write_batch_file
from saev_store.sources.mmididx import IndexedDataset, IndexedDatasetBuilder


@pytest.fixture
def texts(tmp_path: Path) -> Path:
    folder = tmp_path / "texts"
    folder.mkdir()
    with tarfile.open(folder / "s.tar", "w") as tar:
        for number in range(4):
            info = tarfile.TarInfo(f"d{number}.txt")
            info.size = 5
            tar.addfile(info, io.BytesIO(b"hello"))
    prepare(folder, split="1,0,0", progress=False)
    return folder


@pytest.fixture
def documents(tmp_path: Path) -> Path:
    with IndexedDatasetBuilder(tmp_path / "d.idx") as builder:
        for _ in range(4):
            builder.add_document(np.arange(6))
    return tmp_path / "d.idx"


def files(folder: Path) -> dict[Path, bytes]:
    return {path: path.read_bytes() for path in folder.rglob("*") if path.is_file()}


@pytest.mark.parametrize("name", ["s.tar.idx", "s.tar", ".nv-meta/split.yaml", ".nv-meta/.info.json", "s.idx"])
def test_texts_do_not_replace_a_file_of_their_data_set(
    texts: Path, name: str, capsys: pytest.CaptureFixture[str]
) -> None:
    (texts / "s.bin").write_bytes(b"mine")  # beside an index that is new
    (texts.parent / "link").symlink_to(texts)
    before = files(texts)
    for folder in (texts, texts.parent / "link"):
        out = folder / name if name.endswith("idx") else folder / f"{name}.idx"
        out.with_suffix(".bin").write_bytes(b"") if not name.endswith("idx") else None
        before = files(texts)
        command = ["convert", str(texts), str(out), "--tokenizer", "bytes", "--overwrite", "--no-progress"]
        assert main(command) == 2
        assert "a file of the data set that is converted. Name another file." in capsys.readouterr().err
        assert files(texts) == before


def test_a_link_in_the_folder_of_a_data_set_is_a_file_of_it_wherever_it_leads(texts: Path) -> None:
    """The link would be replaced, not what it leads to."""
    (texts.parent / "elsewhere.tar.idx").write_bytes(b"mine")
    link = texts / "s.link.idx"
    link.symlink_to(texts.parent / "elsewhere.tar.idx")
    command = ["convert", str(texts), str(link), "--tokenizer", "bytes", "--overwrite", "--no-progress"]
    assert main(command) == 2
    assert link.is_symlink()
    assert link.read_bytes() == b"mine"


@pytest.mark.parametrize("name", ["d.idx", "d.bin", "link.bin", "../{}/d.bin"])
def test_documents_are_not_replaced_by_their_batches(documents: Path, name: str) -> None:
    (documents.parent / "link.bin").symlink_to(documents.with_suffix(".bin"))
    before = files(documents.parent)
    with IndexedDataset(documents) as source, pytest.raises(ArgumentError) as caught:
        to = documents.parent / name.format(documents.parent.name)
        documents_to_batches(source, to, seq_len=3, batch_size=2, overwrite=True, progress=False)
    assert (caught.value.where, caught.value.remedy) == ("output_path", "Name another file.")
    assert files(documents.parent) == before


@pytest.mark.parametrize("name", ["x.bin", "x.idx"])
def test_batches_are_not_replaced_by_their_documents(tmp_path: Path, name: str) -> None:
    write_batch_file(tmp_path / "x.batch", np.arange(16, dtype="u4").reshape(4, 4), batch_size=2, seed=1)
    os.rename(tmp_path / "x.batch", tmp_path / name)
    before = files(tmp_path)
    with (
        BatchFileReader(tmp_path / name) as source,
        pytest.raises(ArgumentError, match=f"would replace {name}, a file of the data set"),
    ):
        samples_to_documents(source, tmp_path / "x", overwrite=True, progress=False)
    assert files(tmp_path) == before


def test_other_files_are_replaced(texts: Path, documents: Path, tmp_path: Path) -> None:
    options = {"seq_len": 3, "batch_size": 2, "progress": False, "overwrite": True}
    for _ in range(2):
        with IndexedDataset(documents) as source:
            assert documents_to_batches(source, tmp_path / "d.batch", **options) == 4
        command = ["convert", str(texts), str(tmp_path / "t.idx"), "--tokenizer", "bytes", "--overwrite"]
        assert main([*command, "--no-progress"]) == 0
    assert len(IndexedDataset(tmp_path / "t.idx")) == 4
