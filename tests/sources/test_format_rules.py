"""Rules of Energon, MMIDIDX and LLMBATCH that single values decide; the truth is written down, or made from the formats alone."""

from __future__ import annotations

import zipfile
from pathlib import Path

import pytest
from api import MemoryTransport
from energon_tars import METADATASET_HEAD as HEAD
from energon_tars import tar_bytes

from saev_store.errors import ArgumentError, DocumentError
from saev_store.sources.convert import samples_to_documents
from saev_store.sources.energon import EnergonDataset
from saev_store.sources.energon.metadataset import read_metadataset
from saev_store.sources.energon.prepare import prepare
from saev_store.sources.mmididx import IndexedDataset

# -- patterns and splits -------------------------------------------------------------------------------------------------


# -- preparing -----------------------------------------------------------------------------------------------------------


# -- the index -----------------------------------------------------------------------------------------------------------


# -- metadata sets -------------------------------------------------------------------------------------------------------


def test_a_metadata_set_in_an_archive_names_what_is_in_the_archive(tmp_path: Path):
    with zipfile.ZipFile(tmp_path / "all.zip", "w") as archive:
        archive.writestr("d/meta.yaml", f"{HEAD}  train: {{path: texts, aux: {{files: 'filesystem://./x//y'}}}}\n")
    found = read_metadataset(f"zip://d/meta.yaml::file://{tmp_path}/all.zip")["train"]
    assert found.primary == f"zip://d/texts::file://{tmp_path}/all.zip"
    assert found.folders == {"files": f"zip://d/x/y::file://{tmp_path}/all.zip"}


# -- samples that become documents ------------------------------------------------------------------------------------------


def test_the_end_token_of_texts_may_be_zero_and_a_text_may_have_no_tokens(tmp_path: Path):
    files = [("0.txt", b"ab"), ("1.txt", b""), ("2.json", b'{"caption": "c"}')]
    (tmp_path / "0.tar").write_bytes(tar_bytes(files))
    prepare(tmp_path, split="1,0,0", progress=False)

    def ids(text: str) -> list[int]:
        return [ord(letter) for letter in text]

    with EnergonDataset(tmp_path) as dataset:
        memory = MemoryTransport()
        with pytest.raises(
            DocumentError, match="'txt,json' is .*which is no text"
        ):  # a list of parts, not one of that name
            samples_to_documents(dataset, "b", ids, part="txt,json", transport=memory, progress=False)
        assert memory.files == {}
        with pytest.raises(ArgumentError, match="end_token is 256; it must be an integer from 0 to 255"):
            samples_to_documents(dataset, "b", ids, end_token=256, dtype="uint8", transport=memory, progress=False)
        assert memory.files == {}
        for end, expected in ((None, [[97, 98], [], [99]]), (0, [[97, 98, 0], [0], [99, 0]])):
            memory = MemoryTransport()
            samples_to_documents(
                dataset, "a", ids, part="json[caption],txt", end_token=end, transport=memory, progress=False
            )
            documents = IndexedDataset("a", transport=memory)
            assert [documents.document(number).tolist() for number in range(3)] == expected


@pytest.mark.parametrize(
    ("part", "text", "message"),
    [
        ("txt", b"\xff", "part 'txt' is no text in 'utf-8'"),
        ("json[a]", b'{"a": 7}', "'json[a]' is 7, which is no text"),
    ],
)
def test_a_text_that_does_not_decode_is_named_by_tar_and_key(part: str, text: bytes, message: str, tmp_path: Path):
    name, good = part.partition("[")[0], {"txt": b"x", "json": b'{"a": "x"}'}
    for number in range(2):
        files = [(f"{number}.{name}", good[name]), (f"{number}b.{name}", text if number else good[name])]
        (tmp_path / f"{number}.tar").write_bytes(tar_bytes(files))
    prepare(tmp_path, split="1,0,0", progress=False)
    with EnergonDataset(tmp_path) as dataset, pytest.raises(DocumentError) as caught:
        samples_to_documents(dataset, "a", lambda _: [1], part=part, transport=MemoryTransport(), progress=False)
    assert caught.value.message.startswith(message)
    assert caught.value.where == f"{tmp_path}/1.tar/1b"
