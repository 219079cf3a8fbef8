"""Limits of documents and arguments of data sets on both sides, and remedies of their errors."""

from __future__ import annotations

import pickle
from collections.abc import Callable
from pathlib import Path

import pytest
from energon_tars import METADATASET_HEAD as HEAD
from energon_tars import sample_files, tar_bytes

from saev_store.errors import (
    SaevStoreError,
    SelectionError,
)
from saev_store.sources.energon import EnergonDataset
from saev_store.sources.energon.joins import FolderFiles
from saev_store.sources.energon.metadataset import open_metadataset, read_metadataset
from saev_store.sources.energon.prepare import prepare


def refused(call: Callable[[], object]) -> SaevStoreError:
    with pytest.raises(SaevStoreError) as caught:
        call()
    return caught.value


# -- arguments -----------------------------------------------------------------------------------------------------------


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


# -- pieces --------------------------------------------------------------------------------------------------------------


# -- texts and origins ---------------------------------------------------------------------------------------------------
