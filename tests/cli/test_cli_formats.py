"""One scenario of `convert`, `prepare`, and `ls` of an Energon data set."""

from __future__ import annotations

import shutil
from pathlib import Path

import numpy as np
import pytest
from energon_tars import sample_files, tar_bytes, write_definition

from saev_store.sources.energon import EnergonDataset
from saev_store.sources.llmbatch import BatchFileReader
from saev_store.sources.mmididx import IndexedDataset

DOCUMENTS = Path(__file__).resolve().parents[1] / "data/mmididx/core_seed_example_3_4_2_int32/data.idx"


@pytest.fixture
def photos(tmp_path: Path) -> Path:
    folder = tmp_path / "photos"
    folder.mkdir()
    for i in range(10):
        (folder / f"{i}.tar").write_bytes(tar_bytes(sample_files(i * 10, 2, folder="x/y/")))
    return folder


def test_prepare_makes_a_data_set_that_ls_lists(run, photos):
    write_definition(photos, "TextSample", {"text": "json[caption]"})
    found = run("prepare", photos, "--split", "8,1,1", "--no-progress", "--json").json
    assert set(found) == {"url", "n_samples", "shards", "splits"}
    assert (found["n_samples"], len(found["splits"]["train"])) == (20, 8)
    assert EnergonDataset(photos).split("val").sample(0).text == "c80"
    assert run("ls", photos, "--json").json["entries"] == [{"name": f"{i}.tar", "n_samples": 2} for i in range(10)]
    entries = run("ls", photos / "x/y/s00000", "--json").json["entries"]
    assert [entry["name"] for entry in entries] == ["x/y/s00000.json", "x/y/s00000.txt"]
    assert run("ls", photos / "x/y/s00000").out.endswith("x/y/s00000.txt\n")
    assert run("ls", photos / "x/nope").code == 2
    assert run("info", photos, "--json").json["n_samples"] == 20
    assert run("prepare", photos, "--split", "8,1,1").code == 1
    assert run("prepare", photos, "--overwrite", "--no-progress").code == 0
    (photos / "3.tar").unlink()
    assert [run(command, photos, "--json").code for command in ("info", "validate", "ls")] == [0, 1, 0]
    assert run("prepare", photos, "--overwrite", "--split", "x").code == 2


def test_ls_of_a_data_set_that_is_broken_is_an_error(run, photos):
    (photos / ".nv-meta").mkdir()
    (photos / ".nv-meta/.info.json").write_text("[")
    assert run("ls", photos).code == 1
    assert run("ls", photos.parent).code == 0


def test_convert_makes_batches_of_documents_and_back(run, tmp_path):
    shutil.copytree(DOCUMENTS.parent, tmp_path / "d")
    index = tmp_path / "d/data.idx"
    tokens = np.concatenate(list(IndexedDataset(index)))
    done = run("convert", index, tmp_path / "d.batch", "--seq-len", 3, "--batch-size", 1, "--no-progress", "--json")
    assert done.json == {"url": str(tmp_path / "d.batch"), "batches": len(tokens) // 3}
    with BatchFileReader(tmp_path / "d.batch") as reader:
        assert sorted(np.concatenate([np.ravel(record) for record in reader])) == sorted(tokens[: len(tokens) // 3 * 3])
    back = run("convert", tmp_path / "d.batch", tmp_path / "back.idx", "--dtype", "uint16", "--no-progress")
    assert (back.code, back.out) == (0, f"{tmp_path / 'back.idx'}: {len(tokens) // 3} documents\n")
    for wrong in (
        (index, "x.batch"), (index, "x.batch", "--seq-len", 3, "--batch-size", 1, "--part", "json"),
        (tmp_path / "d.batch", "x.idx", "--seq-len", 3), (tmp_path / "d.batch", "x.idx", "--tokenizer", "bytes"),
    ):  # fmt: skip
        assert run("convert", wrong[0], tmp_path / wrong[1], *wrong[2:]).code == 2, wrong


def test_convert_makes_documents_of_texts(run, photos, tmp_path):
    tokenizers = pytest.importorskip("tokenizers")
    assert run("prepare", photos, "--split", "8,1,1", "--no-progress").code == 0
    command = ("convert", photos, tmp_path / "t.idx", "--no-progress")
    assert run(*command).code == 2  # a tokenizer is needed
    assert (
        run(*command, "--tokenizer", "bytes", "--part", "json[caption]", "--split", "train", "--json").json["documents"]
        == 16
    )
    assert bytes(IndexedDataset(tmp_path / "t.idx")[0].astype(np.uint8)) == b"c0"
    made = tokenizers.Tokenizer(tokenizers.models.WordLevel({"c0": 7, "?": 1}, unk_token="?"))
    made.save(str(tmp_path / "own.json"))
    options = ("--tokenizer", tmp_path / "own.json", "--part", "json[caption]", "--end-token", 9, "--overwrite")
    assert run(*command, *options).code == 0
    assert IndexedDataset(tmp_path / "t.idx")[0].tolist() == [7, 9]
